"""The slots of folds inside `shard_map`: global arrays, of which each shard has a part."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _compat, _types
from ._entry import Entry
from ._fold import Fold
from ._shards import Layout, Shards, inside
from ._structure import Packed


def varying(fold: Fold, entry: Entry, state: Packed, folded: int) -> tuple[frozenset[str], ...]:
    """For each array of a slot, the mesh axes along which shards may differ.

    As a state does as soon as the value does, unless the fold reduces over the mesh.
    `state` has the types of the initial state, `folded` is the number of loops that are folded.
    """
    if not entry.shards:
        return (frozenset(),) * (len(state.leaves) + 1)
    structure, marker = entry.marker.label.structure, entry.marker
    value = list(map(_types.unbatched, marker.in_avals, marker.positions))
    index = (jax.ShapeDtypeStruct((), "int32"),) * folded

    def updated(axes: Sequence[frozenset[str]], leaves: Any, value: Any, index: Any) -> Packed:
        leaves = list(map(_compat.varying_along, leaves, axes))
        differing = [_compat.varying(aval) | entry.uneven for aval in marker.in_avals]
        value = structure.unflatten(map(_compat.varying_along, value, differing))
        before = Packed(leaves, state.structure).unflatten()
        return Packed.pack(fold.update(before, value, index))

    def plain(avals: Sequence[Any]) -> list[Any]:
        return [_types.array_type(aval.shape, aval.dtype, aval.weak_type) for aval in avals]

    types = plain(state.leaves), plain(value), index
    axes = [entry.uneven | _compat.varying(leaf) for leaf in state.leaves]
    while True:
        update = functools.partial(updated, axes)
        new = inside(entry.shards, functools.partial(jax.eval_shape, update, *types))
        further = [a | _compat.varying(leaf) for a, leaf in zip(axes, new.leaves, strict=False)]
        if further == axes or new.structure != state.structure:  # an error when it is folded
            return (*axes, entry.uneven)
        axes = further


def made_in_shards(
    make: Callable[[], list[Any]],
    state: Packed,
    around: Sequence[Shards],
    varying: Sequence[frozenset[str]],
    front: int,
) -> list[Any]:
    """The arrays of a slot, of which `make` makes those of one shard, with `front` axes in front.

    `state` has the types of one state.
    """

    def made() -> list[Any]:
        pairs = zip(make(), varying, strict=True)
        return [_compat.varying_along(x, v) for x, v in pairs]

    ranks = [*(front + len(aval.shape) for aval in state.leaves), front]
    for shards in reversed(around):
        axes = list(map(shards.differing, varying))
        layouts = [shards.stacked(a, front, n) for a, n in zip(axes, ranks, strict=True)]
        made = _mapped(made, shards, layouts)
        ranks = [n + bool(a) for a, n in zip(axes, ranks, strict=True)]
    return made()


def assembled(
    leaves: Sequence[Any],
    specs: Sequence[Any],
    around: Sequence[Shards],
    varying: frozenset[str],
    front: int,
) -> list[Any]:
    """Global arrays by their specs, of arrays whose shards are stacked behind `front` axes."""
    if not around:
        return list(leaves)
    shards, *rest = around
    axes = shards.differing(varying)
    stacked = sum(bool(s.differing(varying)) for s in around)
    stacks, split = [], []
    for leaf, spec in zip(leaves, specs, strict=True):
        stacks.append(shards.stacked(axes, front, leaf.ndim - bool(axes)))
        own = leaf.ndim - stacked - front
        split.append(shards.by_spec(spec, own).aligned(front + own))

    def body(leaves: Sequence[Any]) -> list[Any]:
        entered = [stack.enter(leaf) for stack, leaf in zip(stacks, leaves, strict=True)]
        return assembled(entered, specs, rest, varying, front)

    return jax.shard_map(
        body,
        in_specs=([stack.spec for stack in stacks],),
        out_specs=[layout.spec for layout in split],
        **shards.options,
    )(list(leaves))


def _mapped(
    make: Callable[[], list[Any]], shards: Shards, layouts: Sequence[Layout]
) -> Callable[[], list[Any]]:
    def body() -> list[Any]:
        return [layout.leave(x) for layout, x in zip(layouts, make(), strict=True)]

    specs = [layout.spec for layout in layouts]
    return jax.shard_map(body, in_specs=(), out_specs=specs, **shards.options)
