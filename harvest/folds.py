"""Reducers over loop iterations, for `select`: `reap(model, {"resid": folds.mean()})`.

A fold runs inside the loop, and needs memory for its result only. It combines all loops around a
site ([`Fold.over`][harvest.Fold.over] chooses some), for each example of a batch, and is updated
only where the site runs: not in branches of a `cond` that are not taken. Outside of any loop there
is one value, which `at`, `every`, `last`, `maximum` and `mean` return as it is.

Of values of hi types there are `at`, `count`, `every`, `last` and `stack`; the others are for
numbers, as those that a function makes of a value: `mean().of(dequantize)`.
"""

from typing import Any

import jax.numpy as jnp

from . import _types
from ._errors import SelectError
from ._fold import Fold as Fold
from ._fold_results import Moments as Moments
from ._fold_results import Stack as Stack
from ._fold_results import TopK as TopK
from ._folds import (
    AtFold,
    CountFold,
    EveryFold,
    HistogramFold,
    LastFold,
    MaximumFold,
    MeanFold,
    MomentsFold,
    StackFold,
    TopKFold,
)
from ._structure import is_array

__all__ = [
    "Moments",
    "Stack",
    "TopK",
    "at",
    "count",
    "every",
    "histogram",
    "last",
    "maximum",
    "mean",
    "moments",
    "stack",
    "top_k",
]


def last() -> Fold:
    """The value of the last iteration that ran; zeros if there was none.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.while_loop(lambda x: x < 9, lambda x: harvest.sow(2 * x, name="h"), x)

        assert harvest.reap(f, {"h": harvest.folds.last()})(1.0)["h"] == 16
        ```

    **Returns:**

    A [`harvest.Fold`][] whose result is of the type of one value. Beside it,
    [`harvest.folds.count`][] tells whether there was one.
    """
    return LastFold()


def at(index: Any) -> Fold:
    """The value of one iteration.

    As `stop_at_layer` of TransformerLens, where `index` is an int: `reap` of such values only, in a
    `scan` of which nothing else is needed, ends the loop there.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        assert harvest.reap(f, {"h": harvest.folds.at(2)})(jnp.arange(5.0))["h"] == 2
        assert harvest.reap(f, {"h": harvest.folds.at(jnp.array(-1))})(jnp.arange(5.0))["h"] == 4
        ```

    **Arguments:**

    - `index`: an int, which is static and checked, or an integer array of rank 0, which may be
        traced: a new one never retraces. Negative ones count from the end. In nested loops a tuple
        of these, outermost first, with `...` for a loop whose iterations are all kept.

    **Returns:**

    A [`harvest.Fold`][] whose result is of the type of one value, with an axis for each `...`:
    zeros if the site did not run in that iteration, or if an array is out of range.

    **Raises:**

    - [`harvest.SelectError`][]: an index of another type or, by the transform, an int that is out
        of range, negative in a `while_loop`, or not one for each loop.
    """
    static, arrays = [], []
    for i in index if isinstance(index, tuple) else (index,):
        traced = is_array(i) and jnp.issubdtype(i.dtype, jnp.integer) and i.ndim == 0
        if not traced and i is not ... and (not isinstance(i, int) or isinstance(i, bool)):
            got = _types.describe(i) if is_array(i) else repr(i)
            raise SelectError(
                f"`folds.at` got the index {got}; wanted an int, an integer array of rank 0, "
                "`...`, or a tuple of these"
            )
        static.append(None if traced else i)
        arrays.append(i if traced else None)
    return AtFold(tuple(static), tuple(arrays))


def mean() -> Fold:
    """The mean over the iterations, elementwise.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        assert harvest.reap(f, {"h": harvest.folds.mean()})(jnp.arange(4.0))["h"] == 1.5
        ```

    **Returns:**

    A [`harvest.Fold`][] whose result has the shape of one value and the dtype of `jnp.mean`.
    Values of low precision are summed in single precision. NaN if nothing ran.

    **Raises:**

    - [`harvest.SelectError`][] (by the transform): the value is not made of numbers.
    """
    return MeanFold()


def maximum() -> Fold:
    """The largest value over the iterations, elementwise.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        assert harvest.reap(f, {"h": harvest.folds.maximum()})(jnp.arange(4.0))["h"] == 3
        ```

    **Returns:**

    A [`harvest.Fold`][] whose result is of the type of one value. Minus infinity if nothing ran, or
    the least number of a dtype without it; NaN if a value was NaN.

    **Raises:**

    - [`harvest.SelectError`][] (by the transform): the values are not real numbers or booleans.
    """
    return MaximumFold()


def count() -> Fold:
    """How many times the site ran.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.while_loop(lambda x: x < 9, lambda x: harvest.sow(2 * x, name="h"), x)

        assert harvest.reap(f, {"h": harvest.folds.count()})(1.0)["h"] == 4
        assert harvest.reap(f, {"h": harvest.folds.count()})(9.0)["h"] == 0
        ```

    **Returns:**

    A [`harvest.Fold`][] whose result is an integer array of shape `()`.
    """
    return CountFold()


def moments() -> Fold:
    """Mean and variance over the iterations, elementwise.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        h = harvest.reap(f, {"h": harvest.folds.moments()})(jnp.array([1.0, 3.0]))["h"]
        assert (h.mean, h.variance) == (2, 1)
        ```

    **Returns:**

    A [`harvest.Fold`][] whose result is [`harvest.folds.Moments`][], of the shape of one value and
    the dtypes of `jnp.mean` and `jnp.var`. NaN if nothing ran.

    **Raises:**

    - [`harvest.SelectError`][] (by the transform): the value is not made of numbers.
    """
    return MomentsFold()


def histogram(bins: Any) -> Fold:
    """How many elements of all iterations fall into each bin, as `jnp.histogram`.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        fold = harvest.folds.histogram(jnp.array([-jnp.inf, 0.0, 2.0, jnp.inf]))
        assert harvest.reap(f, {"h": fold})(jnp.arange(5.0))["h"].tolist() == [0, 2, 3]
        ```

    **Arguments:**

    - `bins`: the edges, a rising array of rank 1. It may be traced; new ones do not retrace. Values
        outside of all bins are not counted, nor are NaNs.

    **Returns:**

    A [`harvest.Fold`][] whose result is an integer array of shape `(bins.size - 1,)`.

    **Raises:**

    - [`harvest.SelectError`][]: `bins` is not an array of at least two edges (a number of bins
        would need the range before the first value is seen).
    """
    if isinstance(bins, list | tuple):
        bins = jnp.asarray(bins)
    if not is_array(bins) or bins.ndim != 1 or bins.size < 2:
        raise SelectError(
            f"`folds.histogram` got {_types.describe(bins)}; wanted the edges of the bins, as "
            "`jnp.linspace(-5, 5, 101)`"
        )
    return HistogramFold(jnp.asarray(bins))


def top_k(k: int) -> Fold:
    """The `k` largest values over the iterations, elementwise, and where they come from.

    For the examples that excite a feature most, where a `scan` runs over batches.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        h = harvest.reap(f, {"h": harvest.folds.top_k(1)})(jnp.array([[1.0, 4.0], [3.0, 2.0]]))["h"]
        assert h.values.tolist() == [[3, 4]] and h.indices[0].tolist() == [[1, 0]]
        ```

    **Arguments:**

    - `k`: how many, a positive int.

    **Returns:**

    A [`harvest.Fold`][] whose result is [`harvest.folds.TopK`][].

    **Raises:**

    - [`harvest.SelectError`][]: `k` is not a positive int.
    """
    return TopKFold(_positive(k, "top_k"))


def every(n: int) -> Fold:
    """The values of every `n`-th iteration, from the first one on, stacked.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        h = harvest.reap(f, {"h": harvest.folds.every(2)})(jnp.arange(5.0))["h"]
        assert h.tolist() == [0, 2, 4]
        ```

    **Arguments:**

    - `n`: a positive int. In nested loops, iterations are counted through all of them.

    **Returns:**

    A [`harvest.Fold`][] whose result is `(ceil(iterations / n), *shape)`: zeros where the site did
    not run.

    **Raises:**

    - [`harvest.SelectError`][]: `n` is not a positive int or, by the transform, the site is in a
        `while_loop`.
    """
    return EveryFold(_positive(n, "every"))


def stack(max_steps: int) -> Fold:
    """The values of the first `max_steps` iterations that run, in the order in which they run.

    For a `while_loop`, whose trip count is not known.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.while_loop(lambda x: x < 9, lambda x: harvest.sow(2 * x, name="h"), x)

        h = harvest.reap(f, {"h": harvest.folds.stack(2)})(1.0)["h"]
        assert h.values.tolist() == [2, 4] and h.count == 4 and h.overflow
        ```

    **Arguments:**

    - `max_steps`: how many values there is room for, a positive int.

    **Returns:**

    A [`harvest.Fold`][] whose result is [`harvest.folds.Stack`][].

    **Raises:**

    - [`harvest.SelectError`][]: `max_steps` is not a positive int.
    """
    return StackFold(_positive(max_steps, "stack"))


def _positive(number: Any, what: str) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise SelectError(f"`folds.{what}` got {number!r}; wanted a positive int")
    return number
