"""The grids of experiments that `sweep` runs."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import _types
from ._errors import SelectError
from ._structure import is_array


class PerExample(eqx.Module):
    """An item of a row that each example of a batch has for itself."""

    value: Any


def per_example(value: Any) -> PerExample:
    """In the grid of [`harvest.sweep`][]: what is different for each example of a batch.

    Where `fn` holds a `vmap` over prompts, and what is called the subject stands elsewhere in each
    of them.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(xs):  # a batch of two, of three positions each
            return jax.vmap(lambda x: harvest.sow(x, name="h").sum())(xs)

        subject = jnp.array([0, 2])  # the position in each example
        grid = harvest.grid(pos=harvest.per_example(subject[None]))
        edit = lambda h, row: h.at[row["pos"]].set(0)
        out = harvest.sweep(f, "h", edit, grid)(jnp.arange(6.0).reshape(2, 3))["h"]
        assert out.tolist() == [[1 + 2, 3 + 4]]
        ```

    **Arguments:**

    - `value`: a pytree of arrays that have, behind the axis of the grid, the axes that `vmap` gives
        to the site.

    **Returns:**

    What stands for it in a grid: an edit sees the part of one example.
    """
    return PerExample(value)


class Grid(eqx.Module):
    """Named axes; an experiment for each combination."""

    names: tuple[str, ...] = eqx.field(static=True)  # in the order that the user gave
    axes: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(_length, self.axes, self.names))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def row(self, number: Any) -> Any:
        """What an edit gets, for the experiment of this number, a traced integer."""
        indices = jnp.unravel_index(number, self.shape)
        return dict(zip(self.names, map(_item, self.axes, indices), strict=True))


class Rows(eqx.Module):
    """A pytree of arrays with one leading axis; an experiment for each index."""

    rows: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (_length(self.rows, None),)

    @property
    def size(self) -> int:
        return self.shape[0]

    def row(self, number: Any) -> Any:
        return _item(self.rows, number)


class NoGrid(eqx.Module):
    """One experiment."""

    shape = ()
    size = 1


def grid(**axes: Any) -> Grid:
    """The product of named axes, for [`harvest.sweep`][] and [`harvest.attribute`][].

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        f = lambda x: harvest.sow(x, name="h").sum()
        grid = harvest.grid(pos=jnp.arange(3), add=jnp.array([10.0, 20.0]))
        edit = lambda h, row: h.at[row["pos"]].add(row["add"])
        assert harvest.sweep(f, "h", edit, grid)(jnp.ones(3))["h"].shape == (3, 2)
        ```

    **Arguments:**

    - `**axes`: for each axis an array (or a pytree of arrays), whose leading axis it is.

    **Returns:**

    A grid: an edit gets a dict with one item of each axis, and results have the axes in this order.

    **Raises:**

    - [`harvest.SelectError`][]: an axis is not made of arrays with a leading axis of one length.
    """
    if not axes:
        raise SelectError("`grid` got no axes; wanted arrays, as in `grid(pos=jnp.arange(14))`")
    made = Grid(tuple(axes), jax.tree.map(_as_array, tuple(axes.values())))
    made.shape  # noqa: B018  checks it
    return made


def as_grid(given: Any) -> Grid | Rows | NoGrid:
    """What the user passed as a grid."""
    if given is None or isinstance(given, Grid):
        return NoGrid() if given is None else given
    made = Rows(jax.tree.map(_as_array, given))
    made.shape  # noqa: B018  checks it
    return made


def _item(axis: Any, number: Any) -> Any:
    # Numpy arrays take no traced index.
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], axis)


def _as_array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, int | float | complex) else leaf


def _length(axis: Any, name: str | None) -> int:
    leaves = jax.tree.leaves(axis)
    lengths = {leaf.shape[0] for leaf in leaves if is_array(leaf) and leaf.ndim}
    one = len(lengths) == 1 and lengths != {0}
    if not one or not all(is_array(leaf) and leaf.ndim for leaf in leaves):
        what = "a grid" if name is None else f"the axis {name!r} of a grid"
        got = ", ".join(map(_types.describe, leaves)) or "nothing"
        raise SelectError(
            f"{what} got {got}; wanted arrays with a leading axis of one length, not empty: one "
            "item for each experiment"
        )
    return lengths.pop()
