"""The slots of folds inside `shard_map`: global arrays, of which each shard has a part."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _compat, _types
from ._entry import Entry
from ._fold import Fold
from ._lowered import lowered, raised
from ._shards import WHOLE, Layout, Shards, inside
from ._structure import Packed, Structure, is_array


def varying(fold: Fold, entry: Entry, state: Packed, folded: int) -> tuple[frozenset[str], ...]:
    """For each array of a slot, the mesh axes along which shards may differ.

    As a state does as soon as the value does, unless the fold reduces over the mesh.
    `state` has the types of the initial state, `folded` is the number of loops that are folded.
    """
    if not entry.shards:
        return (frozenset(),) * (len(state.leaves) + 1)
    structure, marker = entry.marker.label.structure, entry.marker
    value = list(map(_types.unbatched, marker.in_avals, marker.positions))
    index = (_types.index_type(),) * folded

    def updated(
        fold: Fold, axes: Sequence[frozenset[str]], leaves: Any, value: Any, index: Any
    ) -> Packed:
        leaves = list(map(_compat.varying_along, leaves, axes))
        differing = [_compat.varying(aval) | entry.uneven for aval in marker.in_avals]
        value = structure.unflatten(map(_compat.varying_along, value, differing))
        before = raised(Packed(leaves, state.structure).unflatten())
        return Packed.pack(lowered(fold.update(before, value, index)))

    def plain(avals: Sequence[Any]) -> list[Any]:
        array = lambda aval: _types.array_type(aval.shape, aval.dtype, aval.weak_type)
        return [aval if _compat.is_hi_type(aval) else array(aval) for aval in avals]

    types = plain(state.leaves), plain(value), index
    axes = [entry.uneven | _compat.varying(leaf) for leaf in state.leaves]
    while True:
        update = lambda fold, axes=axes: jax.eval_shape(
            functools.partial(updated, fold, axes), *types
        )
        new = inside(entry.shards, update, fold)
        further = [a | _compat.varying(leaf) for a, leaf in zip(axes, new.leaves, strict=False)]
        if further == axes or new.structure != state.structure:  # an error when it is folded
            return (*axes, entry.uneven)
        axes = further


def made_in_shards(
    make: Callable[[Any], list[Any]],
    held: Any,
    state: Packed,
    around: Sequence[Shards],
    varying: Sequence[frozenset[str]],
    front: int,
) -> list[Any]:
    """The arrays of a slot, of which `make` makes those of one shard, with `front` axes in front.

    `make` is called with `held`, of whose arrays every shard has all. `state` has the types of one
    state.
    """

    def in_shard(held: Any) -> list[Any]:
        pairs = zip(make(held), varying, strict=True)
        return [_compat.varying_along(x, v) for x, v in pairs]

    made: Callable[[Any], list[Any]] = in_shard
    ranks = [*(front + len(aval.shape) for aval in state.leaves), front]
    for shards in reversed(around):
        axes = list(map(shards.differing, varying))
        layouts = [shards.stacked(a, front, n) for a, n in zip(axes, ranks, strict=True)]
        made = _mapped(made, shards, layouts)
        ranks = [n + bool(a) for a, n in zip(axes, ranks, strict=True)]
    return made(held)


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

    mapped = jax.shard_map(
        body,
        in_specs=([stack.spec for stack in stacks],),
        out_specs=[layout.spec for layout in split],
        **shards.options,
    )
    return jax.jit(mapped, inline=True)(list(leaves))  # as above


def _mapped(
    make: Callable[[Any], list[Any]], shards: Shards, layouts: Sequence[Layout]
) -> Callable[[Any], list[Any]]:
    def made(held: Any) -> list[Any]:
        arrays, rest = Structure.flatten(held, is_array)

        def body(arrays: list[Any]) -> list[Any]:
            shard = make(rest.unflatten(arrays))
            return [layout.leave(x) for layout, x in zip(layouts, shard, strict=True)]

        whole = [WHOLE.spec] * len(arrays)
        specs = [layout.spec for layout in layouts]
        mapped = jax.shard_map(body, in_specs=(whole,), out_specs=specs, **shards.options)
        # JAX evaluates no `shard_map` inside another one operation by operation.
        return jax.jit(mapped, inline=True)(list(map(shards.placed, arrays, whole)))

    return made
