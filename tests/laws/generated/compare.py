"""What was collected, compared with what the reference has noted down; and lowered programs."""

import itertools
import re
from typing import Any

import jax
import numpy as np

from harvest import CondSum

from .reference import Stack, Sum, plain

TOLERANCE = {"rtol": 3e-2, "atol": 3e-2}  # of what low precision may have passed through


def check(got: Any, wanted: Stack | Sum, where: str) -> None:
    """Equal; but an axis may be missing along which the values cannot differ.

    A value that does not depend on what is mapped has no axis for it, and what a loop does not
    change may be moved out of it by differentiation.
    """
    if isinstance(wanted, Sum):
        assert isinstance(got, CondSum), f"{where}: {got}"
        hoisted = any(isinstance(b, Stack) and b.hoisted for b in wanted.branches)
        stack = Stack(wanted.index, wanted.index.ndim, 0, hoisted)
        _check_leaf(got.index, wanted.index, stack, f"index of {where}")
        for number, (branch, values) in enumerate(zip(got.branches, wanted.branches, strict=True)):
            if values is None:
                assert branch is None
            else:
                check(branch, values, f"branch {number} of {where}")
        return
    leaves, structure = jax.tree.flatten(wanted.tree)
    for leaf, values in zip(structure.flatten_up_to(got), leaves, strict=True):
        _check_leaf(leaf, values, wanted, where)


def _check_leaf(got: Any, wanted: Any, stack: Stack, where: str) -> None:
    if isinstance(wanted, str):
        assert got == wanted, where
        return
    got = plain(got)
    options = [
        values
        for dropped in _subsets(stack)
        if (values := _without(wanted, dropped)) is not None and values.shape == got.shape
    ]
    assert options, f"{where}: got the shape {got.shape}, wanted {wanted.shape}"
    for values in options:
        if np.allclose(got, values, **TOLERANCE):
            return
    np.testing.assert_allclose(got, options[0], **TOLERANCE, err_msg=where)


def _subsets(stack: Stack) -> Any:
    first = 0 if stack.hoisted else stack.loops
    axes = range(first, stack.loops + stack.lanes)
    sizes = range(len(axes) + 1)
    return itertools.chain(*(itertools.combinations(axes, size) for size in sizes))


def _without(values: np.ndarray, dropped: tuple[int, ...]) -> np.ndarray | None:
    for axis in reversed(dropped):
        if values.shape[axis] == 0:
            return None
        first = values.take([0], axis)
        if not np.allclose(values, first, **TOLERANCE):
            return None
        values = first.squeeze(axis)
    return values


def operations(text: str) -> int:
    """How many operations a lowered program has, with its calls expanded."""
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if function := re.match(r"\s*func\.func (?:public |private )?@(\w+)", line):
            body = bodies[function[1]] = []
        elif " = " in line and bodies:
            body.append(line)

    def count(name: str) -> int:
        calls = [re.search(r"\bcall @(\w+)", line) for line in bodies[name]]
        return sum(count(call[1]) if call else 1 for call in calls)

    return count("main")
