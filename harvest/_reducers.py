"""What a `select` may map to: checked, and made into how an entry is read."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _compat, _types
from ._entry import Entry
from ._errors import SelectError, UnsupportedError
from ._fold import Fold, Level
from ._lowered import raised
from ._markers import Marker
from ._reading import Folded, Mapped, Part, Reading, Slot, Whole, in_slot, located
from ._shards import inside
from ._slots import made_in_shards, varying
from ._structure import Bound, Packed
from ._types import Dim


def check_reducer(reducer: Any) -> Any:
    """A reducer as a pytree, or a `SelectError`."""
    if isinstance(reducer, tuple | list):
        return tuple(map(_check_single, reducer))
    return _check_single(reducer)


def _check_single(reducer: Any) -> Any:
    if reducer is None or isinstance(reducer, Fold):
        return reducer
    if isinstance(reducer, functools.partial):
        return Bound.of(reducer)
    uncalled = getattr(reducer, "__module__", None) == f"{__package__}.folds"
    if uncalled or (isinstance(reducer, type) and issubclass(reducer, Fold)):
        name = f"folds.{reducer.__name__}" if uncalled else reducer.__name__
        raise SelectError(
            f"got `{name}` as a reducer; wanted what it returns: call it, as `{name}(...)`"
        )
    if not callable(reducer):
        raise SelectError(
            f"got the reducer {reducer!r} of type `{type(reducer).__name__}`; wanted None (the "
            "value as it is), a function of the value, a fold such as `harvest.folds.mean()`, or "
            "a tuple of these"
        )
    return reducer


def reading_of(reducer: Any, entry: Entry) -> Reading:
    """How a checked reducer reads an entry."""
    single = not isinstance(reducer, tuple)
    return Reading(tuple(_part(r, entry) for r in ([reducer] if single else reducer)), single)


def _part(reducer: Any, entry: Entry) -> Part:
    if reducer is None:
        return Whole()
    return _folded(reducer, entry) if isinstance(reducer, Fold) else Mapped(reducer)


def _folded(fold: Fold, entry: Entry) -> Folded:
    with located(entry.describe()):
        rows = [(inner, loops, *fold.within(loops)) for inner, loops in entry.innermost()]
        states = [_initial(r[2], r[0]) for r in rows]
    first, _, bound, levels = rows[0]
    kept = [_kept(inner, loops, levels) for inner, loops, _, levels in rows]
    # Where the branches of a `cond` have loops of their own, these can only be folded.
    alike = all(row[3] == levels for row in rows)
    for (_, _, also, _), sizes, state in zip(rows, kept, states, strict=True):
        same = jax.tree.structure(also) == jax.tree.structure(bound)
        fits = sizes == kept[0] and (alike or sizes.stacked == ())
        if not (same and fits and _same_types(state, states[0])):
            raise SelectError(
                f"a fold needs values of one type, and the branches of the `cond` around "
                f"{entry.describe()} sow it with different types or in different loops; sow it "
                "under two names"
            )
    if None in kept[0].stacked:
        raise SelectError(
            f"a fold has to fold a `while_loop`, whose length is not known, for {entry.describe()}"
        )
    front = [*(Dim(n) for n in kept[0].stacked if n is not None), *kept[0].batch]
    folded = sum(level.folded for level in levels)
    with located(entry.describe()):
        each = [varying(bound, row[0], states[0], folded) for row in rows]
    differing = [frozenset().union(*same) for same in zip(*each, strict=True)]
    # Those arrays that differ at all are stacked alike, so that `finish` gets them shard by shard.
    everywhere = frozenset().union(*differing)
    axes = tuple(everywhere if v else v for v in differing)

    def leaves(held: tuple[Fold, Any]) -> list[Any]:
        with _compat.mesh_of(first.marker.in_avals):
            fold, count = held
            state = in_slot(Packed.pack(fold.init(_example_type(first.marker))))
            state = _sharded(state, fold, first, folded)
            count = _compat.in_this_mesh(count)
            return [_broadcast(leaf, front) for leaf in (*state.leaves, count)]

    held = bound, jnp.zeros((), jnp.int32)
    *state, count = made_in_shards(leaves, held, states[0], entry.shards, axes, len(front))
    slot = Slot(Packed(state, states[0].structure), count)
    return Folded(bound, slot, levels if alike else None, len(kept[0].batch), first.lanes, axes)


def _initial(fold: Fold, entry: Entry) -> Packed:
    """The types of the state of a fold before the first iteration."""

    def made(fold: Fold) -> Packed:
        state = fold.init(_example_type(entry.marker))
        if entry.shards and any(map(_compat.is_hi, jax.tree.leaves(state))):
            raise UnsupportedError(
                "the state of this fold holds a value of a hi type, which is inside a `shard_map` "
                "and has no spec; fold a function of the value that returns arrays"
            )
        return in_slot(Packed.pack(state))

    types = lambda fold: _types.result_types(functools.partial(made, fold))

    with _compat.mesh_of(entry.marker.in_avals):
        return inside(entry.shards, types, fold)


def _sharded(state: Packed, fold: Fold, entry: Entry, folded: int) -> Packed:
    """The initial state, sharded as that after an update: `jnp.zeros` of the user's is not."""
    marker = entry.marker
    if entry.shards or not any(map(_compat.explicit_sharding, marker.in_avals)):
        return state

    def updated(leaves: list[Any], value: list[Any], index: Any) -> list[Any]:
        before = raised(Packed(leaves, state.structure).unflatten())
        after = fold.update(before, marker.label.structure.unflatten(value), index)
        return in_slot(Packed.pack(after)).leaves

    value = list(map(_types.unbatched, marker.in_avals, marker.positions))
    index = (_types.index_type(),) * folded
    types = _types.result_types(updated, list(map(jax.typeof, state.leaves)), value, index)
    leaves = [
        _compat.placed(leaf, getattr(type, "sharding", None))
        if jnp.shape(leaf) == getattr(type, "shape", None)
        else leaf
        for leaf, type in itertools.zip_longest(state.leaves, types)
    ]
    return Packed(leaves, state.structure)


def _example_type(marker: Marker) -> Any:
    """The type of what is sown, in one iteration and for one example of a batch."""
    avals = map(_types.unbatched, marker.in_avals, marker.positions)
    return marker.label.structure.unflatten(avals)


class _Kept(NamedTuple):
    """The axes that the results of a fold have in front."""

    stacked: tuple[int | None, ...]  # of the loops that are not folded
    batch: tuple[Dim, ...]
    lanes: tuple[Dim, ...]


def _kept(entry: Entry, loops: Sequence[int | None], levels: Sequence[Level]) -> _Kept:
    stacked = tuple(n for n, level in zip(loops, levels, strict=True) if not level.folded)
    batch = _types.batch_dims(entry.marker.in_avals, entry.marker.positions)
    return _Kept(stacked, (*entry.lanes, *batch), entry.lanes)


def _same_types(a: Packed, b: Packed) -> bool:
    return a.structure == b.structure and _types.same_types(a.leaves, b.leaves)


def _broadcast(leaf: Any, front: Sequence[Dim]) -> Any:
    """The state of one example for all of them, sharded as their axes are."""
    strong = _compat.like_weak(jnp.asarray(leaf), jax.ShapeDtypeStruct((), jnp.result_type(leaf)))
    value = jnp.broadcast_to(strong, (*(dim.size for dim in front), *strong.shape))
    meshes = [dim.mesh for dim in front if dim.mesh is not None]
    if not meshes:
        return value
    aval = jax.typeof(value)
    dims = [*front, *_types.dims(aval)[len(front) :]]
    return _compat.placed(value, _types.repartitioned(aval.sharding, meshes[0], dims))
