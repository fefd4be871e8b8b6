"""What is collected at a site: its values as they are, functions of them, or folds over them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import _compat, _types
from ._batching import batch_sizes, over_examples
from ._edit_nodes import Loop
from ._entry import CondSum, Entry
from ._errors import HarvestError, SelectError
from ._fold import Fold, Level
from ._markers import Marker
from ._structure import Bound, Packed


class Part(eqx.Module):
    """One thing that is collected at a site."""

    def read(self, marker: Marker, leaves: list[Any], loops: tuple[Loop, ...]) -> Any:
        """What the site contributes in one iteration; its batch axes are in front."""
        raise NotImplementedError

    def type_of(self, entry: Entry) -> Any:
        """The type of what is read at an entry."""
        raise NotImplementedError

    def result(self, entry: Entry, read: Any) -> Any:
        """What the user gets, from what was read."""
        raise NotImplementedError


class Whole(Part):
    """The values as they are, stacked by the loops around the site."""

    def read(self, marker, leaves, loops):
        return _types.axes_to_front(leaves, marker.positions)

    def type_of(self, entry):
        return entry.type

    def result(self, entry, read):
        return _assembled(entry, read, lambda inner, r: inner.marker.label.structure.unflatten(r))


class Mapped(Part):
    """A function of the value, of one example of a batch; stacked by the loops around the site."""

    fn: Callable[[Any], Any]

    def read(self, marker, leaves, loops):
        def mapped(leaves):
            return Packed.pack(self.fn(marker.label.structure.unflatten(leaves)))

        fronted = _types.axes_to_front(leaves, marker.positions)
        return over_examples(mapped, marker.positions)(fronted)

    def type_of(self, entry):
        loops = entry.loops
        if entry.summed:
            index = jax.ShapeDtypeStruct((), jnp.int32)
            type = CondSum(index, tuple(b and self.type_of(b) for b in entry.branches or ()))
        elif entry.branches is not None:
            type = self.type_of(next(filter(None, entry.branches)))
            loops = entry.around
        else:
            marker = entry.marker
            with _located(entry.describe()):
                type = jax.eval_shape(lambda *x: self.read(marker, list(x), ()), *marker.in_avals)
        for length in reversed(loops):
            assert length is not None, "a loop of dynamic length stacks nothing"
            type = jax.tree.map(functools.partial(_types.stacked, length=length), type)
        return type

    def result(self, entry, read):
        return _assembled(entry, read, lambda _, packed: packed.unflatten())


class Slot(eqx.Module):
    """The state of a fold, and how often it was updated.

    Each array has an axis for each loop that is not folded, then the batch axes of the value.
    """

    state: Packed
    count: Any


class Folded(Part):
    """A fold over the loops around the site, whose state the loops carry on."""

    fold: Fold
    slot: Slot
    levels: tuple[Level, ...] | None = eqx.field(static=True)  # of all loops, or fold whatever is
    kept: int = eqx.field(static=True)  # how many axes the arrays of the slot have in front
    lanes: tuple[int, ...] = eqx.field(static=True)  # batch axes that the slot has, not the value

    def level(self, depth: int) -> Level:
        return Level() if self.levels is None else self.levels[depth]

    def kept_inside(self, depth: int) -> int:
        """How many loops inside the one at this depth stack results."""
        return sum(not level.folded for level in (self.levels or ())[depth + 1 :])

    def read(self, marker, leaves, loops):
        levels = self.levels or (Level(),) * len(loops)
        index = tuple(loop.index for loop, x in zip(loops, levels, strict=True) if x.folded)

        def updated(leaves, slot):
            value = marker.label.structure.unflatten(leaves)
            state = Packed.pack(self.fold.update(slot.state.unflatten(), value, index))
            return Slot(_checked(state, slot.state, self.fold), slot.count + 1)

        update = over_examples(updated, marker.positions)
        for _ in self.lanes:
            update = jax.vmap(update, in_axes=(None, 0))
        return update(_types.axes_to_front(leaves, marker.positions), self.slot)

    def type_of(self, entry):
        raise NotImplementedError("a branch that does not run keeps the slot")

    def result(self, entry, read):
        finish = lambda slot: Packed.pack(self.fold.finish(slot.state.unflatten(), slot.count))
        for _ in range(self.kept):
            finish = jax.vmap(finish)
        return finish(read).unflatten()


class Reading(eqx.Module):
    """What is collected at one entry."""

    parts: tuple[Part, ...]
    single: bool = eqx.field(static=True)  # not a tuple

    def read(self, marker: Marker, leaves: list[Any], loops: tuple[Loop, ...], where: str) -> Any:
        with _located(where):
            return [part.read(marker, leaves, loops) for part in self.parts]

    def result(self, entry: Entry, read: Sequence[Any]) -> Any:
        with _located(entry.describe()):
            values = [part.result(entry, r) for part, r in zip(self.parts, read, strict=True)]
        return values[0] if self.single else tuple(values)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Have the errors of a reducer say at which site it was."""
    try:
        yield
    except HarvestError as error:
        raise type(error)(f"{error}, for {where}") from None
    except Exception as error:
        error.add_note(f"harvest: raised by the reducer of {where}")
        raise


READ = Reading((Whole(),), single=True)


def _assembled(entry: Entry, read: Any, leaf: Callable[[Entry, Any], Any]) -> Any:
    """The value of a site, from what was read in the branches of the `cond`s around it."""
    if entry.branches is None:
        return leaf(entry, read)
    if not entry.summed:
        return _assembled(next(filter(None, entry.branches)), read, leaf)
    branches = tuple(
        None if branch is None else _assembled(branch, part, leaf)
        for branch, part in zip(entry.branches, read.branches, strict=True)
    )
    return CondSum(read.index, branches)


def _checked(state: Packed, before: Packed, fold: Fold) -> Packed:
    """The new state of a fold, of the types of the one before."""
    if state.structure != before.structure:
        same = state.structure.treedef == before.structure.treedef
        hint = "; what changes has to be an array, as `jnp.asarray(0)`" if same else ""
        raise SelectError(
            f"`update` of {_name(fold)} returned a state of structure {state.structure}; wanted "
            f"that of `init`, {before.structure}{hint}"
        )
    leaves = []
    for new, old in zip(state.leaves, before.leaves, strict=True):
        got, wanted = jax.typeof(new), jax.typeof(old)
        weak = got.weak_type and _types.number_fits(got.dtype, wanted.dtype)
        if got.shape != wanted.shape or (got.dtype != wanted.dtype and not weak):
            raise SelectError(
                f"`update` of {_name(fold)} returned a state of type {_types.short(got)}; wanted "
                f"that of `init`, {_types.short(wanted)}"
            )
        leaves.append(jnp.asarray(new, wanted.dtype))
    return Packed(leaves, state.structure)


def _name(fold: Fold) -> str:
    return f"the fold `{type(fold).__name__.removeprefix('_').lower()}`"


# ------------------------------------------------------------------------- from reducers


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
    with _located(entry.describe()):
        rows = [(inner, loops, *fold.within(loops)) for inner, loops in entry.innermost()]
        states = [Packed.pack(r[2].init(_example_type(r[0].marker))) for r in rows]
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
    sizes = (*(n for n in kept[0].stacked if n is not None), *kept[0].batch)
    leaves = [_broadcast(leaf, sizes) for leaf in states[0].leaves]
    slot = Slot(Packed(leaves, states[0].structure), jnp.zeros(sizes, jnp.int32))
    return Folded(bound, slot, levels if alike else None, len(sizes), first.lanes)


def _example_type(marker: Marker) -> Any:
    """The type of what is sown, in one iteration and for one example of a batch."""

    def unbatched(aval: Any, axes: tuple[int | None, ...]) -> Any:
        type = _types.unbatched(aval, axes)
        sharding = getattr(aval, "sharding", None)
        if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
            return type
        spec = PartitionSpec(*(s for i, s in enumerate(sharding.spec) if i not in axes))
        return type.update(sharding=NamedSharding(sharding.mesh, spec))

    return marker.label.structure.unflatten(map(unbatched, marker.in_avals, marker.positions))


class _Kept(NamedTuple):
    """The axes that the results of a fold have in front."""

    stacked: tuple[int | None, ...]  # of the loops that are not folded
    batch: tuple[int, ...]
    lanes: tuple[int, ...]


def _kept(entry: Entry, loops: Sequence[int | None], levels: Sequence[Level]) -> _Kept:
    stacked = tuple(n for n, level in zip(loops, levels, strict=True) if not level.folded)
    batch = batch_sizes(entry.marker.in_avals, entry.marker.positions)
    return _Kept(stacked, (*entry.lanes, *batch), entry.lanes)


def _same_types(a: Packed, b: Packed) -> bool:
    return a.structure == b.structure and _types.same_types(
        list(map(jax.typeof, a.leaves)), list(map(jax.typeof, b.leaves))
    )


def _broadcast(leaf: Any, sizes: tuple[int, ...]) -> Any:
    strong = _compat.like_weak(jnp.asarray(leaf), jax.ShapeDtypeStruct((), jnp.result_type(leaf)))
    return jnp.broadcast_to(strong, (*sizes, *strong.shape))


# --------------------------------------------------------------------------- through loops


class LoopSlots:
    """How the slots of folds go through a loop: carried on if it is folded, else sliced."""

    def __init__(self, actions: Sequence[Any], depth: int):
        self._depth = depth
        self.readings = [a for a in actions if isinstance(a, Reading)]
        self.parts = [part for reading in self.readings for part in reading.parts]

    def _is_carried(self, part: Part) -> bool:
        return isinstance(part, Folded) and part.level(self._depth).folded

    def states(self) -> tuple[list[Slot], list[Slot]]:
        """The slots that the loop carries on, and those that it slices."""
        folded = [part for part in self.parts if isinstance(part, Folded)]
        carried = [part.slot for part in folded if self._is_carried(part)]
        return carried, [part.slot for part in folded if not self._is_carried(part)]

    def inside(self, actions: Sequence[Any], carried: Any, sliced: Any) -> tuple[Any, ...]:
        """The actions in one iteration."""
        carried, sliced = iter(carried), iter(sliced)

        def part_inside(part: Part) -> Part:
            if not isinstance(part, Folded):
                return part
            slot = next(carried) if self._is_carried(part) else next(sliced)
            return dataclasses.replace(part, slot=slot)

        return tuple(
            Reading(tuple(map(part_inside, a.parts)), a.single) if isinstance(a, Reading) else a
            for a in actions
        )

    def split(self, reads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What the loop carries on of what was read in an iteration, and what it stacks."""
        flat = [r for read in reads for r in read]
        pairs = list(zip(self.parts, flat, strict=True))
        carried = [r for part, r in pairs if self._is_carried(part)]
        return carried, [r for part, r in pairs if not self._is_carried(part)]

    def merged(self, carried: Any, stacked: Any) -> list[Any]:
        """The inverse of `split`, after the loop."""
        carried, stacked = iter(carried), iter(stacked)
        flat = (next(carried) if self._is_carried(p) else next(stacked) for p in self.parts)
        return [[next(flat) for _ in reading.parts] for reading in self.readings]

    def masked(self, mask: Any, new: list[Slot], old: list[Slot]) -> list[Slot]:
        """The new slots where a batched loop still runs, and the old ones elsewhere."""
        folded = [part for part in self.parts if isinstance(part, Folded)]
        slots = []
        for part, n, o in zip(filter(self._is_carried, folded), new, old, strict=True):
            front = jnp.expand_dims(mask, tuple(range(part.kept_inside(self._depth))))
            slots.append(jax.tree.map(functools.partial(_where, front), n, o))
        return slots

    def wanted(self) -> list[int] | None:
        """The only iterations that anything is wanted of, if these are known."""
        levels = [p.level(self._depth) if isinstance(p, Folded) else Level() for p in self.parts]
        wanted = [level.only for level in levels if level.only is not None]
        return wanted if wanted and len(wanted) == len(levels) else None


def _where(mask: Any, new: Any, old: Any) -> Any:
    return jnp.where(jnp.expand_dims(mask, tuple(range(mask.ndim, new.ndim))), new, old)
