"""Edits: what `plant` does to a value."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._edit_nodes import Add, At, Call, Chain, Each, Edit, Indexed, Replace, Scale, Zero
from ._errors import PlantError
from ._iterations import checked_indices
from ._structure import Bound, is_array, is_traced


def as_edit(edit: Any) -> Edit:
    """An edit as it is; a callable as an edit by calling it; anything else as a new value."""
    if isinstance(edit, Edit):
        return edit
    if getattr(edit, "__module__", None) == __name__:
        raise PlantError(
            f"got `harvest.{edit.__name__}` as an edit; wanted what it returns: call it, as "
            f"`harvest.{edit.__name__}(...)`"
        )
    if isinstance(edit, functools.partial):
        edit = Bound.of(edit)
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

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): the value has another tree, shape or dtype than the
        site.
    """
    return Replace(_as_array(value))


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
        To a value of a hi type that is a vector space (its own type of tangents) only one of that
        very type is added, by its `vspace_add`.

    **Returns:**

    An edit for [`harvest.plant`][].

    **Raises:**

    - [`harvest.PlantError`][]: `value` is neither a number nor an array nor a tree of these; or (by
        `plant`) it does not broadcast to the site, or would lose precision as the site's dtype.
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

    - `factor`: as the value of [`harvest.add`][]; hi types cannot be scaled.

    **Returns:**

    An edit for [`harvest.plant`][].

    **Raises:**

    - [`harvest.PlantError`][]: as of [`harvest.add`][].
    """
    return Scale(_checked_operand(factor, "scale"))


def zero() -> Edit:
    """Replace the value of a site by zeros: ablation. Of a hi type, by its `vspace_zero`.

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

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): the value is of a hi type that is no vector space.
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
        never retrace; an int or a slice is static. An index in an array that is out of range
        chooses nothing, since it may be traced. In nested loops a tuple of these, outermost
        first, with `...` for all iterations.
    - `edit`: an edit, a callable or a value: that of one iteration, or stacked over all.

    **Returns:**

    An edit for [`harvest.plant`][].

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): the site is in no loop, or in another number of loops;
        an int is out of range; a mask has another length.
    """
    indices = checked_indices(index)
    static = tuple(None if is_array(i) else i for i in indices)
    arrays = tuple(i if is_array(i) else None for i in indices)
    return At(static, arrays, as_edit(edit))


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

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): `fn` returns a value of another tree, shape or dtype.
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

    **Raises:**

    - [`harvest.PlantError`][] (by `plant`): one of the edits cannot be applied to what the one
        before it gives, or gives a value of another type.
    """
    return Chain(tuple(map(as_edit, edits)))


def _checked_operand(operand: Any, name: str) -> Any:
    is_leaf = jax.tree_util.all_leaves([operand])
    if is_leaf and not is_traced(operand) and not isinstance(operand, int):
        raise PlantError(
            f"`{name}` got {operand!r} of type `{type(operand).__name__}`; wanted a number, an "
            "array, or a pytree of these like the value of the site"
        )
    return jax.tree.map(_as_array, operand)


def _as_array(leaf: Any) -> Any:
    """A Python number as an array, of a weak type as its own: a new one must not retrace."""
    return jnp.asarray(leaf) if type(leaf) in (int, float, complex) else leaf
