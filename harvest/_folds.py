"""The folds that there are."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array

from . import _compat, _types
from ._errors import SelectError
from ._fold import Fold, Level, flat_index, is_type
from ._fold_results import Moments, Stack, TopK
from ._lowered import on_arrays, zeros
from ._structure import is_array


def _each(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn` of the arrays (or of their types), with static leaves as they are."""

    def of_leaf(leaf: Any, *others: Any) -> Any:
        if is_array(leaf):
            return on_arrays(fn, leaf, *others)
        return fn(leaf, *others) if is_type(leaf) else leaf

    return jax.tree.map(of_leaf, tree, *rest)


def _full(aval: Any, value: Any, dtype: Any = None) -> Any:
    """An array of the type `aval`, of its sharding too, or of another dtype."""
    return jnp.full_like(_compat.zeros(aval), value, dtype)


def _rows(value: Any, length: int) -> Any:
    return on_arrays(lambda x: jnp.broadcast_to(x, (length, *x.shape)), value)


class LastFold(Fold):
    like_value = True

    def init(self, aval):
        return _each(zeros, aval)

    def update(self, state, value, index):
        return value


class AtFold(LastFold):
    static: tuple[Any, ...] = eqx.field(static=True)  # for each loop an int or `...`
    arrays: tuple[Any, ...]  # or else a traced integer

    def update(self, state, value, index):
        chosen = jnp.asarray(True)
        wanted = [
            s if a is None else a
            for s, a in zip(self.static, self.arrays, strict=True)
            if s is not ...
        ]
        for here, i in zip(wanted, index, strict=True):
            chosen &= i == here
        return _each(lambda new, old: jnp.where(chosen, new, old), value, state)

    def within(self, lengths):
        if not lengths:
            return AtFold((), ()), ()
        if len(self.static) != len(lengths):
            raise SelectError(
                f"got `folds.at` with {len(self.static)} index(es) in {len(lengths)} nested loops "
                f"of lengths {lengths}; wanted a tuple of one index for each, outermost first, "
                "with `...` for loops whose iterations are all kept"
            )
        rows = list(map(_index_in, self.static, self.arrays, lengths))
        levels = tuple(
            Level(static is not ..., static if isinstance(static, int) else None)
            for static, _ in rows
        )
        return AtFold(tuple(s for s, _ in rows), tuple(a for _, a in rows)), levels


def _index_in(static: Any, array: Any, length: int | None) -> tuple[Any, Any]:
    """An index into a loop of this length, counted from the start."""
    if static is ...:
        return static, None
    if isinstance(static, int):
        if length is None and static < 0:
            raise SelectError(
                f"got `folds.at({static})` in a `while_loop`, whose length is not known; wanted "
                "an index from the start, or `folds.last()`"
            )
        if length is not None and not -length <= static < length:
            raise SelectError(f"got `folds.at({static})` in a loop of length {length}")
        return (static if length is None else static % length), None
    array = jnp.asarray(array).astype(int)  # a narrower one could overflow
    return None, array if length is None else jnp.where(array < 0, array + length, array)


class MeanFold(Fold):
    like_value = True

    def init(self, aval):
        return {
            "sum": _each(lambda a: _full(a, 0, _accumulated(a)), aval),
            "dtypes": _each(_mean_dtype, aval),
        }

    def update(self, state, value, index):
        return state | {"sum": _each(lambda v, s: s + v.astype(s.dtype), value, state["sum"])}

    def finish(self, state, count):
        def mean(s, dtype):
            return (s / count.astype(s.dtype)).astype(dtype)

        return _each(mean, state["sum"], state["dtypes"])


def _mean_dtype(aval: Any) -> Any:
    _check_numbers(aval)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        raise SelectError(f"got a fold that adds, and values of type {_types.short(aval)}")
    dtype = aval.dtype if jnp.issubdtype(aval.dtype, jnp.inexact) else _computed(aval.dtype)
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype


def _accumulated(aval: Any) -> Any:
    """Sums of low precision are kept in single precision."""
    return _promoted(_mean_dtype(aval), jnp.float32)


def _promoted(a: Any, b: Any) -> Any:
    """The dtype for values of both, whatever the user has set."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(_computed(a), _computed(b))


def _computed(dtype: Any) -> Any:
    """A dtype that has all values of one which JAX stores only: which it does not promote."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        return jnp.float32
    return dtype


class MaximumFold(Fold):
    like_value = True

    def init(self, aval):
        return _each(lambda a: _full(a, _lowest(a)), aval)

    def update(self, state, value, index):
        return _each(jnp.maximum, state, value)


def _check_numbers(aval: Any) -> None:
    if _compat.is_hi_type(aval):
        raise SelectError(
            f"got a fold of numbers, and values of the hi type {aval}; wanted `at`, `count`, "
            "`every`, `last`, `stack`, your own `Fold`, or a fold of a function of the value, as "
            "`folds.mean().of(fn)`"
        )


def _lowest(aval: Any) -> Any:
    _check_numbers(aval)
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if np.isinf(np.asarray(np.inf).astype(dtype)) else jnp.finfo(dtype).min
    raise SelectError(f"got a fold that compares values, which those of type `{dtype}` cannot be")


class CountFold(Fold):
    def init(self, aval):
        return ()

    def update(self, state, value, index):
        return ()

    def finish(self, state, count):
        return count


class MomentsFold(Fold):
    def init(self, aval):
        total = _each(lambda a: _full(a, 0, _accumulated(a)), aval)
        squares = _each(lambda s: jnp.zeros_like(s.real), total)
        count, dtypes = jnp.zeros((), int), _each(_mean_dtype, aval)
        return {"sum": total, "squares": squares, "count": count, "dtypes": dtypes}

    def update(self, state, value, index):
        # Welford's algorithm, which does not cancel: Technometrics 4 (1962), 419.
        def off(v, s, n):
            """The distance from the mean of `n` values whose sum is `s`."""
            return v.astype(s.dtype) - s / jnp.maximum(n, 1).astype(s.dtype)

        count = state["count"] + 1
        total = _each(lambda v, s: s + v.astype(s.dtype), value, state["sum"])
        before = _each(lambda v, s: off(v, s, state["count"]), value, state["sum"])
        after = _each(lambda v, s: off(v, s, count), value, total)
        squares = _each(lambda s, a, b: s + (a * jnp.conj(b)).real, state["squares"], before, after)
        return state | {"sum": total, "squares": squares, "count": count}

    def finish(self, state, count):
        def mean(s, dtype):
            return (s / count.astype(s.dtype)).astype(dtype)

        def variance(s, dtype):
            # Real, if the values are complex.
            return (s / count.astype(s.dtype)).astype(jnp.finfo(dtype).dtype)

        mean = _each(mean, state["sum"], state["dtypes"])
        return Moments(mean, _each(variance, state["squares"], state["dtypes"]))


class HistogramFold(Fold):
    bins: Array

    def init(self, aval):
        _each(lambda a: _lowest(a), aval)  # which checks that there is an order
        return _each(lambda _: jnp.zeros(self.bins.size - 1, int), aval)

    def update(self, state, value, index):
        def counted(v, counts):
            dtype = _promoted(v.dtype, self.bins.dtype)
            new = _counts(v.astype(dtype), self.bins.astype(dtype))
            return counts + new.astype(counts.dtype)

        return _each(counted, value, state)


def _counts(values: Any, bins: Any) -> Any:
    def counts(values: Any, bins: Any) -> Any:
        return jnp.histogram(values.ravel(), bins)[0]

    sharding = _compat.explicit_sharding(jax.typeof(values))
    if sharding is None:
        return counts(values, bins)
    # Across explicit axes JAX can neither flatten nor count.
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    automatic: Callable[..., Any] = auto_axes(counts, out_sharding=replicated)
    return automatic(values, bins)


class TopKFold(Fold):
    k: int = eqx.field(static=True)
    loops: int = eqx.field(static=True, default=0)

    def within(self, lengths):
        return TopKFold(self.k, len(lengths)), (Level(),) * len(lengths)

    def init(self, aval):
        values = _each(lambda a: _rows(_full(a, _lowest(a)), self.k), aval)
        indices = _each(lambda a: _rows(_full(a, -1, int), self.k), aval)
        return values, (indices,) * self.loops, jnp.zeros((), int)

    def update(self, state, value, index):
        kept, indices, count = state

        def entered(new, old):
            # Before what stands for nothing, which is not to win a tie.
            return jnp.concatenate([old, old[-1:]]).at[jnp.minimum(count, self.k)].set(new)

        among = _each(entered, value, kept)
        best = _each(lambda a: jnp.moveaxis(_order(a, self.k), -1, 0), among)

        def chosen(tree):
            return _each(lambda a, order: jnp.take_along_axis(a, order, axis=0), tree, best)

        def numbered(tree, i):
            return _each(lambda old: entered(i.astype(old.dtype), old), tree)

        pairs = zip(indices, index, strict=True)
        return chosen(among), tuple(chosen(numbered(tree, i)) for tree, i in pairs), count + 1

    def finish(self, state, count):
        values, indices, _ = state
        return TopK(values, indices)


def _order(values: Any, k: int) -> Any:
    return lax.top_k(jnp.moveaxis(values, 0, -1).astype(_computed(values.dtype)), k)[1]


class EveryFold(Fold):
    n: int = eqx.field(static=True)
    lengths: tuple[int, ...] = eqx.field(static=True, default=())

    def within(self, lengths):
        if not lengths:
            return LastFold(), ()
        known = tuple(length for length in lengths if length is not None)
        if len(known) < len(lengths):
            raise SelectError(
                "got `folds.every` in a `while_loop`, whose length is not known; wanted "
                "`folds.stack(max_steps)`"
            )
        return EveryFold(self.n, known), (Level(),) * len(known)

    def init(self, aval):
        size = -(-math.prod(self.lengths) // self.n)
        return _each(lambda a: _rows(zeros(a), size), aval)

    def update(self, state, value, index):
        if not math.prod(self.lengths):
            return state
        step = flat_index(index, self.lengths)
        # Iterations between are written to where there is nothing.
        where = jnp.where(step % self.n == 0, step // self.n, jnp.iinfo(jnp.int32).max)
        return _each(lambda v, kept: kept.at[where].set(v, mode="drop"), value, state)


class StackFold(Fold):
    max_steps: int = eqx.field(static=True)

    def init(self, aval):
        values = _each(lambda a: _rows(zeros(a), self.max_steps), aval)
        return values, jnp.zeros((), int)

    def update(self, state, value, index):
        values, count = state
        values = _each(lambda v, kept: kept.at[count].set(v, mode="drop"), value, values)
        return values, count + 1

    def finish(self, state, count):
        return Stack(state[0], count, count > self.max_steps)
