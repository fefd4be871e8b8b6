"""What is planted, and what the reference does at a site for it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import reject

from harvest import CondSum

from .programs import Body, Path
from .reference import Choice, Edit, Site, sites


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Half(Edit):
    """Half of all numbers, three more than an integer, and a key of another kind."""

    @staticmethod
    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return leaf
        if is_key(leaf):
            return jax.random.fold_in(leaf, 1)
        return leaf + 3 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf / 2

    @staticmethod
    def of_value(value: Any) -> Any:
        return jax.tree.map(Half.of_leaf, value)

    def __call__(self, node, path, value, loops, lanes):
        return Half.of_value(value)


def other_values(collected: Any) -> Any:
    """Other values of the same types."""

    def other(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return leaf
        if is_key(leaf):
            keys = jax.random.split(jax.random.key(99), max(1, leaf.size))
            return keys[: leaf.size].reshape(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf + 1
        count = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
        return jnp.cos(count).astype(leaf.dtype)

    # The index of a `CondSum` says which branch ran, and is no value.
    return {
        key: tuple(_map(other, occurrence) for occurrence in found)
        for key, found in collected.items()
    }


def _map(fn: Any, value: Any) -> Any:
    if isinstance(value, CondSum):
        branches = (None if b is None else _map(fn, b) for b in value.branches)
        return CondSum(value.index, tuple(branches))
    return jax.tree.map(fn, value)


def without(plants: Mapping[str, Sequence[Any]], numbers: set[int]) -> dict[str, Any]:
    """Those occurrences left alone."""
    return {
        key: tuple(None if n in numbers else value for n, value in enumerate(found))
        for key, found in plants.items()
    }


class Planted(Edit):
    """Values in the form in which they are collected."""

    def __init__(self, body: Body, plants: Mapping[str, Sequence[Any]]):
        self.sites: dict[Path, tuple[Site, Any]] = {}
        for key, found in sites(body).items():
            for site, value in zip(found, plants[key], strict=True):
                self._note(site, value)

    def _note(self, site: Site | Choice | None, value: Any) -> None:
        if site is None or value is None:
            return
        if isinstance(site, Choice) and not site.alike:
            for branch, part in zip(site.branches, value.branches, strict=True):
                self._note(branch, part)
            return
        for leaf in site.leaves:
            self.sites[leaf.path] = leaf, value

    def __call__(self, node, path, value, loops, lanes):
        if path not in self.sites:
            return value
        site, planted = self.sites[path]

        def at(own: Any, leaf: Any) -> Any:
            return (
                leaf if isinstance(leaf, str) else leaf[_index(site, leaf, own, (*loops, *lanes))]
            )

        return jax.tree.map(at, value, planted)


def _index(site: Site, planted: Any, own: Any, index: Sequence[Any]) -> tuple[Any, ...]:
    """Where a value is; it may lack axes along which what was sown cannot differ."""
    lengths = (*site.loops, *site.lanes)
    kept = planted.ndim - own.ndim
    fixed = 0 if site.hoisted else len(site.loops)
    options = [
        axes
        for axes in itertools.combinations(range(len(lengths)), kept)
        if set(range(fixed)) <= set(axes)
        and tuple(lengths[axis] for axis in axes) == planted.shape[:kept]
    ]
    if len(options) > 1:
        reject()  # two axes are as long, and one of them is missing
    (axes,) = options
    return tuple(index[axis] for axis in axes)
