"""What is collected at a site: its values as they are, functions of them, or folds over them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import _compat, _types
from ._batching import levels, over_examples
from ._edit_nodes import Loop
from ._entry import CondSum, Entry
from ._errors import HarvestError, SelectError
from ._fold import Fold, Level
from ._lowered import lowered, raised
from ._markers import Marker
from ._shards import Layout, Shards, axes_named_in, inside
from ._slots import assembled
from ._structure import Packed
from ._types import Dim


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
            with _compat.mesh_of(marker.in_avals):
                return Packed.pack(self.fn(marker.label.structure.unflatten(leaves)))

        fronted = _types.axes_to_front(leaves, marker.positions)
        return over_examples(mapped, marker.positions)(fronted)

    def type_of(self, entry):
        loops = entry.loops
        if entry.summed:
            type = tuple(b and self.type_of(b) for b in entry.branches or ())
        elif entry.branches is not None:
            type = _types.united([self.type_of(branch) for branch in entry.branches if branch])
            loops = entry.around
        else:
            type = self._type_at(entry)
        for length in reversed(loops):
            assert length is not None, "a loop of dynamic length stacks nothing"
            type = jax.tree.map(functools.partial(_types.stacked, length=length), type)
        return CondSum(entry.type.index, type) if entry.summed else type

    def _type_at(self, entry: Entry) -> Any:
        """The type without the axes of loops, of an entry outside any `cond`."""
        marker = entry.marker

        def types(part: "Mapped") -> Any:
            read = lambda *leaves: part.read(marker, list(leaves), ())
            return _types.result_types(read, *marker.in_avals)

        with located(entry.describe()):
            type = inside(entry.shards, types, self)
        type = jax.tree.map(lambda aval: _types.with_varying(aval, entry.uneven), type)
        batch = len(levels(marker.positions))
        for shards in reversed(entry.shards):
            type = jax.tree.map(functools.partial(_stacked_shards, shards, batch), type)
        return type

    def result(self, entry, read):
        return _assembled(entry, read, lambda _, packed: packed.unflatten())


class Slot(eqx.Module):
    """The state of a fold, and how often it was updated.

    Each array has an axis for each loop that is not folded, then the batch axes of the value.
    Values of hi types are there as arrays.
    """

    state: Packed
    count: Any


class Folded(Part):
    """A fold over the loops around the site, whose state the loops carry on."""

    fold: Fold
    slot: Slot
    levels: tuple[Level, ...] | None = eqx.field(static=True)  # of all loops, or fold whatever is
    batch: int = eqx.field(static=True)  # how many batch axes the arrays of the slot have
    lanes: tuple[Dim, ...] = eqx.field(static=True)  # those of them that the value has not
    varying: tuple[frozenset[str], ...] = eqx.field(static=True)  # mesh axes, for each array

    def level(self, depth: int) -> Level:
        return Level() if self.levels is None else self.levels[depth]

    def kept_inside(self, depth: int) -> int:
        """How many loops inside the one at this depth stack results."""
        return sum(not level.folded for level in (self.levels or ())[depth + 1 :])

    def layouts(self, shards: Shards, depth: int) -> Slot:
        """How the slot enters and leaves a `shard_map` with this many loops around it."""
        front = self.kept_inside(depth - 1) + self.batch
        leaves, treedef = jax.tree.flatten(self.slot)
        pairs = zip(leaves, self.varying, strict=True)
        return jax.tree.unflatten(treedef, [_of_slot(shards, v, front, x) for x, v in pairs])

    def read(self, marker, leaves, loops):
        levels = self.levels or (Level(),) * len(loops)
        index = tuple(loop.index for loop, x in zip(loops, levels, strict=True) if x.folded)

        def updated(leaves, slot):
            value, before = marker.label.structure.unflatten(leaves), raised(slot.state.unflatten())
            with _compat.mesh_of(marker.in_avals):
                state = Packed.pack(self.fold.update(before, value, index))
            checked = _checked(state, Packed.pack(before), self.fold)
            return Slot(in_slot(checked), slot.count + 1)

        update = over_examples(updated, marker.positions)
        for _ in self.lanes:
            update = jax.vmap(update, in_axes=(None, 0))
        return update(_types.axes_to_front(leaves, marker.positions), self.slot)

    def type_of(self, entry):
        raise NotImplementedError("a branch that does not run keeps the slot")

    def result(self, entry, read):
        def finish(slot):
            state = raised(slot.state.unflatten())
            with _compat.mesh_of(entry.marker.in_avals):
                return in_slot(Packed.pack(self.fold.finish(state, slot.count)))

        for shards in reversed(entry.shards):
            axes = [0 if shards.differing(v) else None for v in self.varying]
            if any(axis is not None for axis in axes):
                finish = jax.vmap(finish, (jax.tree.unflatten(jax.tree.structure(read), axes),))
        front = self.kept_inside(-1) + self.batch
        for _ in range(front):
            finish = jax.vmap(finish)
        finished = finish(read)
        if self.fold.like_value and entry.marker.label.spec:
            finished = self._assembled(finished, entry, front)
        return raised(finished.unflatten())

    def _assembled(self, finished: Packed, entry: Entry, front: int) -> Packed:
        """The result with global arrays by their specs, where these say how all shards differ."""
        label, leaves = entry.marker.label, list(finished.leaves)
        along = frozenset().union(*self.varying)
        if finished.structure != label.structure:
            return finished
        for i, spec in enumerate(label.spec or ()):
            names = axes_named_in(spec)
            told = [not s.check_vma or names >= {*s.differing(along)} for s in entry.shards]
            if names and all(told):
                (leaves[i],) = assembled(leaves[i : i + 1], [spec], entry.shards, along, front)
        return Packed(leaves, finished.structure)


class Reading(eqx.Module):
    """What is collected at one entry."""

    parts: tuple[Part, ...]
    single: bool = eqx.field(static=True)  # not a tuple

    def read(self, marker: Marker, leaves: list[Any], loops: tuple[Loop, ...], where: str) -> Any:
        with located(where):
            return [part.read(marker, leaves, loops) for part in self.parts]

    def result(self, entry: Entry, read: Sequence[Any]) -> Any:
        with located(entry.describe()):
            values = [part.result(entry, r) for part, r in zip(self.parts, read, strict=True)]
        return values[0] if self.single else tuple(values)


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Have the errors of a reducer say at which site it was."""
    try:
        yield
    except HarvestError as error:
        raise type(error)(f"{error}, for {where}") from None
    except Exception as error:
        error.add_note(f"harvest: raised by the reducer of {where}")
        raise


READ = Reading((Whole(),), single=True)
CONSUMED = Reading((), single=False)  # nobody sees it afterwards, and nothing is read


def _stacked_shards(shards: Shards, front: int, aval: Any) -> Any:
    return shards.outside(aval, shards.stacking(aval, front))


def _of_slot(shards: Shards, varying: frozenset[str], front: int, leaf: Any) -> Layout:
    axes = shards.differing(varying)
    return shards.stacked(axes, front, leaf.ndim - bool(axes))


def in_slot(state: Packed) -> Packed:
    """A state as it is carried on: values of hi types as arrays."""
    return Packed.pack(lowered(state.unflatten()))


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
        if not _fits(got, wanted):
            raise SelectError(
                f"`update` of {_name(fold)} returned a state of type {_types.short(got)}; wanted "
                f"that of `init`, {_types.short(wanted)}"
            )
        further = _compat.varying(got) - _compat.varying(wanted)
        if further and not _compat.checks_varying():
            new = _compat.unvarying(new)
        elif further:
            raise SelectError(
                f"`update` of {_name(fold)} returned a state that differs along the mesh axes "
                f"{sorted(further)}, along which the value does not"
            )
        hi = _compat.is_hi_type(got)
        leaves.append(new if hi else _compat.placed_like(jnp.asarray(new, wanted.dtype), wanted))
    return Packed(leaves, state.structure)


def _fits(got: Any, wanted: Any) -> bool:
    if _compat.is_hi_type(got) or _compat.is_hi_type(wanted):
        return got == wanted
    weak = got.weak_type and _types.number_fits(got.dtype, wanted.dtype)
    return got.shape == wanted.shape and (got.dtype == wanted.dtype or weak)


def _name(fold: Fold) -> str:
    return f"the fold `{type(fold).__name__.removeprefix('_').lower()}`"
