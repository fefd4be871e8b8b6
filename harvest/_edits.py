"""Edits: what `plant` does to a value."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._errors import PlantError
from ._structure import is_array, is_traced, number_fits


class Loop(NamedTuple):
    """One loop around a site: its current index, traced, and its length."""

    index: Any
    length: int


class Context(NamedTuple):
    """Where an edit is applied."""

    loops: tuple[Loop, ...]  # outermost first
    mapped: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]  # `vmap` over the batch axes
    fitted: Callable[[Any], Any]  # the edited value, checked to be of the type of the site


class Edit(eqx.Module):
    """What happens to a value at a site.

    A module: its arrays are arguments of the transformed program, so new values never retrace.
    The value has its batch axes in front.
    """

    def apply(self, value: Any, context: Context) -> Any:
        raise NotImplementedError

    def check(self, loops: tuple[int, ...]) -> None:
        """Raise a `PlantError` if this edit does not fit into loops of these lengths."""


class Replace(Edit):
    value: Any

    def apply(self, value, context):
        return self.value


class Call(Edit):
    fn: Callable[[Any], Any]

    def apply(self, value, context):
        return context.mapped(self.fn)(value)


class Indexed(Edit):
    fn: Callable[[Any, tuple[Any, ...]], Any]

    def apply(self, value, context):
        index = tuple(loop.index for loop in context.loops)
        return context.mapped(lambda v: self.fn(v, index))(value)


class Add(Edit):
    value: Any

    def apply(self, value, context):
        return _leafwise(jnp.add, value, self.value)


class Scale(Edit):
    factor: Any

    def apply(self, value, context):
        return _leafwise(jnp.multiply, value, self.factor)


class Zero(Edit):
    def apply(self, value, context):
        return jax.tree.map(lambda x: jnp.zeros_like(x) if is_array(x) else x, value)


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

    edit: Edit

    def apply(self, value, context):
        return self.edit.apply(value, context)

    def check(self, loops):
        if not loops:
            raise PlantError("got `each(...)` where there is no loop")
        for leaf in filter(is_array, jax.tree.leaves(self.edit)):
            if leaf.shape[: len(loops)] != loops:
                raise PlantError(
                    f"`each` slices its arrays along the loop axes {loops}, and got an array of "
                    f"shape {leaf.shape}"
                )


class At(Edit):
    index: Any
    edit: Edit

    def apply(self, value, context):
        chosen = jnp.asarray(True)
        for index, loop in zip(_per_loop(self.index), context.loops, strict=True):
            chosen = chosen & _chosen(index, loop)
        if _is_cheap(self.edit):
            edited = context.fitted(self.edit.apply(value, context))
            return _where(chosen, edited, value)
        # Run the user's function only where it is wanted: it may be large, and where it is not
        # finite a `where` would let NaNs into the gradient.
        arrays, rest = eqx.partition(value, is_array)

        def edited_arrays(arrays):
            new = self.edit.apply(eqx.combine(arrays, rest), context)
            return eqx.filter(context.fitted(new), is_array)

        return eqx.combine(lax.cond(chosen, edited_arrays, lambda arrays: arrays, arrays), rest)

    def check(self, loops):
        indices = _per_loop(self.index)
        if not loops:
            raise PlantError("got `at(...)` where there is no loop")
        if len(indices) != len(loops):
            raise PlantError(
                f"got `at` with {len(indices)} index(es) in {len(loops)} nested loops of lengths "
                f"{loops}; wanted a tuple of one index for each, outermost first, with `...` for "
                "all iterations"
            )
        for index, length in zip(indices, loops, strict=True):
            _check_index(index, length)
        self.edit.check(loops)


class Branches(Edit):
    """One edit for each branch of a `cond`; see `in_branch`."""

    edits: tuple[Edit, ...]

    def check(self, loops):
        pass  # built by harvest from a value that has been checked


# ------------------------------------------------------------------ structures around a site


def split_each(edits: Sequence[Edit]) -> tuple[Any, Any]:
    """What a loop slices (the arrays inside `Each`), and the rest; see `equinox.partition`."""

    def spec(node: Any) -> Any:
        return jax.tree.map(is_array, node) if isinstance(node, Each) else False

    return eqx.partition(
        edits, jax.tree.map(spec, edits, is_leaf=lambda node: isinstance(node, Each))
    )


def split_arrays(edits: Sequence[Edit]) -> tuple[Any, Any]:
    """The arrays of the edits, and the rest: what can be an argument, and what cannot."""
    return eqx.partition(edits, is_array)


def in_branch(edit: Edit, branch: int) -> Edit:
    """What is left of an edit inside one branch of the outermost `cond` around the site."""
    return jax.tree.map(
        lambda node: node.edits[branch] if isinstance(node, Branches) else node,
        edit,
        is_leaf=lambda node: isinstance(node, Branches),
    )


# ---------------------------------------------------------------------------- constructors


def as_edit(edit: Any) -> Edit:
    """An edit as it is; a callable as an edit by calling it; anything else as a new value."""
    if isinstance(edit, Edit):
        return edit
    return Call(edit) if callable(edit) else Replace(edit)


def replace(value: Any) -> Edit:
    """Replace the value of a site; for values that are themselves callable.

    `plant(f, {"h": value})` means the same for all other values. Gradients flow to the planted
    value, not to what it replaced.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return jnp.sum(harvest.sow(x, name="h"))

        assert harvest.plant(f, {"h": harvest.replace(jnp.ones(3))})(jnp.zeros(3)) == 3
        ```

    **Arguments:**

    - `value`: of the tree, shapes and dtypes that `reap` returns for the site: stacked over the
        loops around it. Inside [`harvest.at`][] also the value of one iteration.

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Replace(value)


def add(value: Any) -> Edit:
    """Add to the value of a site, as a steering vector does.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return 2 * harvest.sow(x, name="h")

        assert harvest.plant(f, {"h": harvest.add(10.0)})(jnp.float32(1)) == 22
        ```

    **Arguments:**

    - `value`: an array or a number that broadcasts to each array of the site (trailing axes
        aligned, as in numpy), or a pytree of these like the site's. It is cast to the site's dtype.

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Add(_checked_operand(value, "add"))


def scale(factor: Any) -> Edit:
    """Multiply the value of a site, as a mask does.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return harvest.sow(x, name="h") + 1

        assert harvest.plant(f, {"h": harvest.scale(0.5)})(jnp.float32(4)) == 3
        ```

    **Arguments:**

    - `factor`: as the value of [`harvest.add`][].

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Scale(_checked_operand(factor, "scale"))


def zero() -> Edit:
    """Replace the value of a site by zeros: ablation.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return harvest.sow(x, name="h") + 1

        assert harvest.plant(f, {"h": harvest.zero()})(jnp.float32(4)) == 1
        ```

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Zero()


def at(index: Any, edit: Any) -> Edit:
    """Apply an edit at chosen iterations of the loops around a site.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):  # five layers, each of which adds one
            layer = lambda x, _: (harvest.sow(x + 1, name="h"), None)
            return jax.lax.scan(layer, x, length=5)[0]

        x = jnp.float32(0)
        assert harvest.plant(f, {"h": harvest.at(2, harvest.zero())})(x) == 2
        assert harvest.plant(f, {"h": harvest.at(slice(3, None), harvest.add(10))})(x) == 25
        assert harvest.plant(f, {"h": harvest.at(jnp.array([0, -1]), harvest.add(10))})(x) == 25
        ```

    **Arguments:**

    - `index`: an int, a slice, an array of indices of rank 0 or 1, or a boolean mask as long as
        the loop. Indices count from the end when negative. Arrays may be traced, and new ones
        never retrace; an int or a slice is static. In nested loops a tuple of these, outermost
        first, with `...` for all iterations.
    - `edit`: an edit, a callable or a value: that of one iteration, or stacked over all.

    **Returns:**

    An edit for [`harvest.plant`][].

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): the site is in no loop, or in another number of loops;
        an int is out of range; a mask has another length.
    """
    return At(_index(index), as_edit(edit))


def indexed(fn: Callable[[Any, tuple[Any, ...]], Any]) -> Edit:
    """An edit that knows in which iteration it is.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):
            layer = lambda x, _: (harvest.sow(x, name="h"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        edit = harvest.indexed(lambda h, index: h + index[0])
        assert harvest.plant(f, {"h": edit})(jnp.float32(0)) == 0 + 1 + 2 + 3
        ```

    **Arguments:**

    - `fn`: called as `fn(value, index)` with a tuple of the indices of the loops around the site,
        outermost first: traced integers.

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Indexed(fn)


def each(edit: Any) -> Edit:
    """An edit whose arrays are sliced along the loop axes: one for each iteration.

    One SAE for each layer, or a mask over layers and heads.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):
            layer = lambda x, _: (harvest.sow(x + 1, name="h"), None)
            return jax.lax.scan(layer, x, length=3)[0]

        keep = jnp.array([1.0, 0.0, 1.0])
        assert harvest.plant(f, {"h": harvest.each(harvest.scale(keep))})(jnp.float32(7)) == 1
        ```

    **Arguments:**

    - `edit`: an edit or a callable module, every array of which has the lengths of the loops
        around the site as its leading axes, outermost first.

    **Returns:**

    An edit for [`harvest.plant`][].

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): the site is in no loop, or an array has other leading
        axes.
    """
    return Each(as_edit(edit))


def chain(*edits: Any) -> Edit:
    """Several edits, one after the other.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return harvest.sow(x, name="h")

        edit = harvest.chain(harvest.add(1), harvest.scale(10))
        assert harvest.plant(f, {"h": edit})(jnp.float32(1)) == 20
        ```

    **Arguments:**

    - `*edits`: edits or callables, the first one applied first.

    **Returns:**

    An edit for [`harvest.plant`][].
    """
    return Chain(tuple(map(as_edit, edits)))


# -------------------------------------------------------------------------------- details


def _is_cheap(edit: Edit) -> bool:
    """Whether an edit runs no function of the user's."""
    nodes = jax.tree.leaves(edit, is_leaf=lambda node: isinstance(node, Call | Indexed))
    return not any(isinstance(node, Call | Indexed) for node in nodes)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(chosen, n, o) if is_array(o) else o, new, old)


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    if isinstance(index, list):
        index = np.asarray(index)
    if isinstance(index, bool) or not (
        isinstance(index, int | slice) or index is ... or is_array(index)
    ):
        raise PlantError(
            f"`at` got the index {index!r} of type `{type(index).__name__}`; wanted an int, a "
            "slice, an array of integers or booleans, `...`, or a tuple of these"
        )
    if is_array(index):
        kind = jnp.issubdtype(index.dtype, jnp.integer) or index.dtype == bool
        if not kind or index.ndim > 1 or (index.dtype == bool and index.ndim == 0):
            raise PlantError(
                f"`at` got an index array of type {_short(index)}; wanted integers of rank 0 or "
                "1, or a boolean mask of rank 1"
            )
    return index


def _per_loop(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _check_index(index: Any, length: int) -> None:
    if isinstance(index, int) and not -length <= index < length:
        raise PlantError(f"got `at` with index {index} for a loop of length {length}")
    if is_array(index) and index.dtype == bool and index.shape != (length,):
        raise PlantError(
            f"got `at` with a mask of shape {index.shape} for a loop of length {length}"
        )


def _chosen(index: Any, loop: Loop) -> Any:
    """Whether the current iteration is among those of `index`."""
    i, length = loop
    if index is ...:
        return True
    if isinstance(index, slice):
        start, stop, step = index.indices(length)
        chosen = range(start, stop, step)
        if not chosen:
            return False
        low, high = min(chosen), max(chosen)
        return (i >= low) & (i <= high) & ((i - low) % abs(step) == 0)
    if isinstance(index, int):
        return i == index % length
    index = jnp.asarray(index)
    if index.dtype == bool:
        return index if index.ndim == 0 else index[i]  # a scalar if `each` has sliced it
    return jnp.any(jnp.where(index < 0, index + length, index) == i)


def _checked_operand(operand: Any, name: str) -> Any:
    is_leaf = jax.tree_util.all_leaves([operand])
    if is_leaf and not is_traced(operand) and not isinstance(operand, int):
        raise PlantError(
            f"`{name}` got {operand!r} of type `{type(operand).__name__}`; wanted a number, an "
            "array, or a pytree of these like the value of the site"
        )
    # Python ints as arrays: a new one must not retrace. Their type is weak, as theirs.
    return jax.tree.map(lambda x: jnp.asarray(x) if type(x) is int else x, operand)


def _leafwise(op: Callable[[Any, Any], Any], value: Any, operand: Any) -> Any:
    """`op` with one operand for all arrays of `value`, or with one for each."""
    if jax.tree.structure(operand) != jax.tree.structure(value):
        if not jax.tree_util.all_leaves([operand]):
            raise PlantError(
                f"got an operand of structure {jax.tree.structure(operand)} for a value of "
                f"structure {jax.tree.structure(value)}; wanted the same, or one array"
            )
        operand = jax.tree.map(lambda _: operand, value)
    return jax.tree.map(lambda x, y: op(x, _operand(y, x)) if is_array(x) else x, value, operand)


def _operand(operand: Any, like: Any) -> Any:
    """`operand` with the shape and dtype of `like`."""
    operand = jnp.asarray(operand)
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        raise PlantError(f"got arithmetic for a value of type {_short(like)}, which has none")
    if operand.dtype not in (like.dtype, bool) and not number_fits(operand.dtype, like.dtype):
        raise PlantError(f"got an operand of type {_short(operand)} for {_short(like)}")
    try:
        return jnp.broadcast_to(operand.astype(like.dtype), like.shape)
    except ValueError:
        raise PlantError(
            f"got an operand of type {_short(operand)}, which does not broadcast to {_short(like)}"
        ) from None


def _short(array: Any) -> str:
    return jax.typeof(array).str_short(short_dtypes=True)
