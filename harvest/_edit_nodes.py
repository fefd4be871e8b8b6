"""What an edit is, and what becomes of it in the structures around a site."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from . import _arithmetic, _compat, _types
from ._batching import Positions
from ._errors import PlantError
from ._iterations import check_index, is_chosen
from ._lowered import lowered, raised
from ._structure import is_array


class Loop(NamedTuple):
    """One loop around a site: its current index, traced, and its length (None if not known)."""

    index: Any
    length: int | None


class Context(NamedTuple):
    """Where an edit is applied."""

    loops: tuple[Loop, ...]  # outermost first
    positions: Positions  # of the batch axes of the leaves
    mapped: Callable[..., Callable[..., Any]]  # a function, over the batch axes of the value
    fitted: Callable[[Any], Any]  # the edited value, checked to be of the type of the site


class Edit(eqx.Module):
    """What happens to a value at a site.

    A module: its arrays are arguments of the transformed program, so new values never retrace.
    The value has its batch axes in front.
    """

    def apply(self, value: Any, context: Context) -> Any:
        raise NotImplementedError

    def check(self, loops: tuple[int | None, ...]) -> None:
        """Raise a `PlantError` if this edit does not fit into loops of these lengths."""


class Replace(Edit):
    value: Any

    def apply(self, value, context):
        return self.value


class Call(Edit):
    fn: Callable[[Any], Any]

    def apply(self, value, context):
        return context.mapped(self.fn)(value)


class Sourced(Call):
    """A function of the value, and of what the same site had in another run."""

    source: tuple[Any, ...]  # nothing, or one value


class Indexed(Edit):
    fn: Callable[[Any, tuple[Any, ...]], Any]

    def apply(self, value, context):
        index = tuple(loop.index for loop in context.loops)
        return context.mapped(lambda v: self.fn(v, index))(value)


class Add(Edit):
    value: Any

    def apply(self, value, context):
        return _arithmetic.add(value, self.value)


class Scale(Edit):
    factor: Any

    def apply(self, value, context):
        return _arithmetic.scale(value, self.factor)


class Zero(Edit):
    def apply(self, value, context):
        return _arithmetic.zero(value)


class Chain(Edit):
    edits: tuple[Edit, ...]

    def apply(self, value, context):
        for edit in self.edits:
            value = edit.apply(value, context)
        return value

    def check(self, loops):
        for edit in self.edits:
            edit.check(loops)


class Each(Edit):
    """Every loop around the site slices the arrays of `edit`; see `split_each`."""

    edit: Any  # an `Edit`, or part of one

    def apply(self, value, context):
        return self.edit.apply(value, context)

    def check(self, loops):
        loops = tuple(length for length in loops if length is not None)
        if not loops:
            raise PlantError("got `each(...)` where there is no loop of a length that is known")
        arrays = list(filter(is_array, jax.tree.leaves(self.edit)))
        if not arrays:
            raise PlantError(
                "got `each` of an edit without arrays, so that there is nothing to slice"
            )
        for leaf in arrays:
            if _types.leading(leaf, len(loops)) != loops:
                hi = _compat.is_hi(leaf)
                got = _types.describe(leaf) if hi else f"an array of shape {leaf.shape}"
                raise PlantError(
                    f"`each` slices its arrays along the loop axes {loops}, and got {got}"
                )


class At(Edit):
    static: tuple[Any, ...] = eqx.field(static=True)  # for each loop an int, a slice or `...`
    arrays: tuple[Any, ...]  # or else an array
    edit: Edit

    @property
    def indices(self) -> tuple[Any, ...]:
        pairs = zip(self.static, self.arrays, strict=True)
        return tuple(static if array is None else array for static, array in pairs)

    def apply(self, value, context):
        chosen = jnp.asarray(True)
        for index, loop in zip(self.indices, context.loops, strict=True):
            chosen = chosen & is_chosen(index, *loop)
        if _is_cheap(self.edit):
            edited = context.fitted(self.edit.apply(value, context))
            return _arithmetic.where(chosen, edited, value)
        # Run the user's function only where it is wanted: it may be large, and where it is not
        # finite a `where` would let NaNs into the gradient.
        arrays, rest = eqx.partition(value, is_array)

        def edited_arrays(arrays):
            new = self.edit.apply(eqx.combine(arrays, rest), context)
            return eqx.filter(context.fitted(new), is_array)

        # As arrays: JAX returns no value of a hi type from a `cond`.
        edited_lowered = lambda low: lowered(edited_arrays(raised(low)))
        new = lax.cond(chosen, edited_lowered, lambda low: low, lowered(arrays))
        return eqx.combine(raised(new), rest)

    def check(self, loops):
        indices = self.indices
        if not loops:
            raise PlantError("got `at(...)` where there is no loop")
        if len(indices) != len(loops):
            raise PlantError(
                f"got `at` with {len(indices)} index(es) in {len(loops)} nested loops of lengths "
                f"{loops}; wanted a tuple of one index for each, outermost first, with `...` for "
                "all iterations"
            )
        for index, length in zip(indices, loops, strict=True):
            check_index(index, length)
        self.edit.check(loops)


class Branches(Edit):
    """One edit for each branch of a `cond`; see `in_branch`."""

    edits: tuple[Edit, ...]  # built by harvest from a value that has been checked


# ------------------------------------------------------------------ structures around a site


def split_each(edits: Sequence[Any]) -> tuple[Any, Any]:
    """What a loop slices (the arrays inside `Each`), and the rest; see `equinox.partition`."""

    def spec(node: Any) -> Any:
        return jax.tree.map(is_array, node) if isinstance(node, Each) else False

    return eqx.partition(
        edits, jax.tree.map(spec, edits, is_leaf=lambda node: isinstance(node, Each))
    )


def split_arrays(actions: Sequence[Any]) -> tuple[Any, Any]:
    """The arrays in edits and reducers, and the rest: what can be an argument, and what cannot."""
    return eqx.partition(actions, is_array)


def in_branch(edits: Any, branch: int) -> Any:
    """What is left of edits inside one branch of the outermost `cond` around their sites."""
    return jax.tree.map(
        lambda node: node.edits[branch] if isinstance(node, Branches) else node,
        edits,
        is_leaf=lambda node: isinstance(node, Branches),
    )


# -------------------------------------------------------------------------------- details


def _is_cheap(edit: Edit) -> bool:
    """Whether an edit runs no function of the user's."""
    nodes = jax.tree.leaves(edit, is_leaf=lambda node: isinstance(node, Call | Indexed))
    return not any(isinstance(node, Call | Indexed) for node in nodes)
