"""What is collected at a site: its values as they are, functions of them, or folds over them."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import _types
from ._batching import over_examples
from ._edit_nodes import Loop
from ._entry import CondSum, Entry
from ._errors import HarvestError, SelectError
from ._fold import Fold, Level
from ._markers import Marker
from ._structure import Packed


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
            with located(entry.describe()):
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
