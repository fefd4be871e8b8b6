"""Gradients at sites by hand: something is added at each of them, and differentiated."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harvest import CondSum

from .compare import TOLERANCE
from .programs import Body, Custom, Path, Sites, nodes
from .reference import Choice, Site, Sown, plain, sites

SHAPES = {"v": (3,), "h": (2,), "first": ()}


class Nudged(Sites):
    def __init__(self, nudges: Mapping[Path, Any]):
        self.nudges = nudges

    def sow(self, node, path, value, state):
        if path not in self.nudges:
            return value
        nudge = self.nudges[path][(*state["loops"], *state["lanes"])]
        return value + nudge.astype(value.dtype)


def differentiable(body: Body) -> Sown:
    """Keys whose sites hold an array each, and are not in a custom derivative rule.

    In such a rule, what comes in at a site is differentiated as the body is written.
    """
    custom = [path for node, path in nodes(body) if isinstance(node, Custom)]
    inside = lambda path: any(path[: len(c)] == c for c in custom)
    return {
        key: found
        for key, found in sites(body).items()
        if all(
            leaf.node.field in SHAPES and not inside(leaf.path)
            for site in found
            for leaf in site.leaves
        )
    }


def gradients(body: Body, wanted: Sown, loss: Callable[[Sites], Any]) -> dict[Path, np.ndarray]:
    """With respect to the values of each site, in all iterations and lanes."""
    leaves = [leaf for found in wanted.values() for site in found for leaf in site.leaves]
    zeros = {
        leaf.path: jnp.zeros(
            (*(length or 0 for length in leaf.loops), *leaf.lanes, *SHAPES[leaf.node.field])
        )
        for leaf in leaves
    }
    grads = jax.grad(lambda nudges: loss(Nudged(nudges)))(zeros)
    return {path: plain(grad) for path, grad in grads.items()}


def check_gradient(
    got: Any, site: Site | Choice, by_hand: Mapping[Path, np.ndarray], where: str
) -> None:
    if isinstance(site, Choice) and not site.alike:
        assert isinstance(got, CondSum), where
        for number, (branch, part) in enumerate(zip(site.branches, got.branches, strict=True)):
            if branch is None:
                assert part is None
            else:
                check_gradient(part, branch, by_hand, f"branch {number} of {where}")
        return
    wanted = sum(by_hand[leaf.path] for leaf in site.leaves)
    first, *_ = site.leaves
    got = plain(got)
    # A value without an axis for the lanes is that of all of them; nor has it one for the loops
    # that differentiation has moved it out of.
    behind = 0 if any(leaf.hoisted for leaf in site.leaves) else len(first.loops)
    axes = range(behind, len(first.loops) + len(first.lanes))
    options = [
        wanted.sum(summed) for summed in itertools.combinations(axes, wanted.ndim - got.ndim)
    ]
    options = [option for option in options if option.shape == got.shape]
    assert options, f"{where}: got the shape {got.shape}, wanted {wanted.shape}"
    if not any(np.allclose(got, option, **TOLERANCE) for option in options):
        np.testing.assert_allclose(got, options[0], **TOLERANCE, err_msg=where)
