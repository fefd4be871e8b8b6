"""Types of values, and their axes: those that loops and `vmap` put in front.

A type is an aval: a `jax.ShapeDtypeStruct`, or a `HiType`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding

from . import _compat, _hi_axes, _hi_types
from ._batching import Positions, levels
from ._hi_types import HiAxis


def index_type() -> jax.ShapeDtypeStruct:
    """That of the index of a loop, which has 64 bits under `jax_enable_x64`."""
    return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(int))


def moved(aval: Any, positions: tuple[Any, ...]) -> Any:
    """The type of a value whose batch axes are moved to the front."""
    if _compat.is_hi_type(aval):
        return _hi_types.moved(aval, positions)
    axes = [axis for axis in positions if axis is not None]
    if not axes:
        return aval  # with its sharding
    rest = [axis for axis in range(len(aval.shape)) if axis not in axes]
    given = dims(aval)
    return with_dims(aval, [given[axis] for axis in (*axes, *rest)])


class Dim(NamedTuple):
    """An axis of a type."""

    size: int
    partition: Any = None  # the mesh axes that it is sharded over, as far as the type says
    mesh: Any = None  # where these are


def dims(aval: Any) -> list[Dim]:
    """The axes of a type. (A specification that has unreduced axes cannot be iterated.)"""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return list(map(Dim, aval.shape))
    given, mesh = sharding.spec.partitions, sharding.mesh
    return [
        Dim(size) if partition is None else Dim(size, partition, mesh)
        for size, partition in itertools.zip_longest(aval.shape, given)
    ]


def with_dims(aval: Any, dims: Sequence[Dim]) -> jax.ShapeDtypeStruct:
    """The type with other axes: of the same mesh, and unreduced over the same of its axes."""
    sharding, varying = getattr(aval, "sharding", None), _compat.varying(aval)
    # Mesh axes along which a value varies are those of its sharding.
    says = varying or any(dim.mesh for dim in dims) or _compat.explicit_sharding(aval) is not None
    sharding = repartitioned(sharding, sharding.mesh, dims) if sharding and says else None
    return array_type([dim.size for dim in dims], aval.dtype, aval.weak_type, sharding, varying)


def repartitioned(sharding: NamedSharding, mesh: Any, dims: Sequence[Dim]) -> NamedSharding:
    return NamedSharding(mesh, sharding.spec.update(partitions=[dim.partition for dim in dims]))


def result_types(fn: Callable[..., Any], *avals: Any) -> Any:
    """As `jax.eval_shape`, which leaves out a sharding if some axes of its mesh are automatic."""
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*avals)
    types = [with_dims(t, dims(t)) if _compat.is_array_type(t) else t for t in jaxpr.out_avals]
    return jax.tree.unflatten(jax.tree.structure(out), types)


def batch_dims(avals: Sequence[Any], positions: Positions) -> tuple[Dim, ...]:
    """The axis of each `vmap` that batched any leaf, outermost first."""
    rows = []
    for _, axes in levels(positions):
        batched = [(aval, a) for aval, a in zip(avals, axes, strict=True) if a is not None]
        aval, axis = batched[0]
        rows.append(Dim(axis.size) if isinstance(axis, HiAxis) else dims(aval)[axis])
    return tuple(rows)


def array_type(
    shape: Sequence[Any],
    dtype: Any,
    weak_type: bool = False,
    sharding: NamedSharding | None = None,
    varying: frozenset[str] = frozenset(),
) -> jax.ShapeDtypeStruct:
    manual = ManualAxisType(varying=varying) if varying else None
    return jax.ShapeDtypeStruct(
        tuple(shape), dtype, weak_type=weak_type, sharding=sharding, manual_axis_type=manual
    )


def with_varying(aval: Any, axes: frozenset[str]) -> Any:
    """The type of a value that may differ along these mesh axes as well."""
    if axes <= _compat.varying(aval) or not _compat.is_array_type(aval):
        return aval
    sharding = getattr(aval, "sharding", None)
    axes = axes | _compat.varying(aval)
    return array_type(aval.shape, aval.dtype, aval.weak_type, sharding, axes)


def axes_to_front(leaves: Sequence[Any], positions: Positions) -> list[Any]:
    """Move the axes that `vmap` added to the front, the outermost first."""
    pairs = zip(leaves, positions, strict=True)
    return [
        _hi_axes.axes_to_front(leaf, axes) if _compat.is_hi(leaf) else _moveaxis(leaf, axes, None)
        for leaf, axes in pairs
    ]


def axes_from_front(leaves: Sequence[Any], positions: Positions, avals: Sequence[Any]) -> list[Any]:
    """The inverse of `axes_to_front`, for leaves that were of these types."""
    rows = zip(leaves, positions, avals, strict=True)
    return [
        _hi_axes.axes_from_front(leaf, axes, aval)
        if _compat.is_hi(leaf)
        else _moveaxis(leaf, None, axes)
        for leaf, axes, aval in rows
    ]


def _moveaxis(leaf: Any, source: Any, destination: Any) -> Any:
    batch = [axis for axis in source or destination or () if isinstance(axis, int)]
    if not batch:
        return leaf
    front = list(range(len(batch)))
    return jnp.moveaxis(leaf, batch if source else front, front if source else batch)


def stacked(aval: Any, length: int) -> Any:
    """The type of `length` values of type `aval`, stacked on a new leading axis."""
    if _compat.is_hi_type(aval):
        return _hi_types.stacked(aval, length)
    return with_dims(aval, [Dim(length), *dims(aval)])


def dropped(aval: Any, axes: int) -> Any:
    """The type without its leading axes."""
    if _compat.is_hi_type(aval):
        for _ in range(axes):
            aval = _hi_types.dropped(aval)
        return aval
    return with_dims(aval, dims(aval)[axes:])


def rank(aval: Any) -> int:
    return len(aval.shape) if _compat.is_array_type(aval) else 0


def unbatched(aval: Any, positions: tuple[Any, ...]) -> Any:
    """The type of one example of a batch."""
    if _compat.is_hi_type(aval):
        return _hi_types.unbatched(aval, positions)
    batch = [axis for axis in positions if axis is not None]
    return dropped(moved(aval, positions), len(batch))


def tangent_of(aval: Any) -> Any:
    """The type of tangents; None if there is no derivative."""
    if _compat.is_hi_type(aval):
        return _hi_types.tangent_of(aval)
    return aval if jnp.issubdtype(aval.dtype, jnp.inexact) else None


def no_tangent(aval: Any) -> Any:
    """What JAX has as the tangent of a value without derivative: zeros of dtype `float0`."""
    if _compat.is_hi_type(aval):
        try:
            aval = aval.to_tangent_aval()
        except NotImplementedError:
            return None
    return np.zeros(aval.shape, jax.dtypes.float0)


def leading(value: Any, count: int) -> tuple[int, ...]:
    """The sizes of the leading axes of a value."""
    aval = jax.typeof(value)
    return _hi_types.leading(aval, count) if _compat.is_hi_type(aval) else aval.shape[:count]


def describe(value: Any) -> str:
    """What a value is: `f32[12,128]`, or the name of its class."""
    try:
        aval = jax.typeof(value)
    except TypeError:
        return f"a `{type(value).__name__}`"
    return short(aval)


def short(aval: Any) -> str:
    """A type as `f32[12,128]`."""
    if not _compat.is_array_type(aval):
        return str(aval)
    return jax.core.ShapedArray(aval.shape, aval.dtype).str_short(short_dtypes=True)


def same_types(a: Any, b: Any) -> bool:
    """Whether two trees of avals are the same, but for weak types, which a `cond` promotes."""

    def same(x: Any, y: Any) -> bool:
        if _compat.is_hi_type(x) or _compat.is_hi_type(y):
            return x == y
        return x.dtype == y.dtype and dims(x) == dims(y)

    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    return all(map(same, jax.tree.leaves(a), jax.tree.leaves(b)))


def united(types: Sequence[Any]) -> Any:
    """The type of what is one of these, which are the same but for what `vma` says."""

    def one(first: Any, *others: Any) -> Any:
        return with_varying(first, frozenset().union(*map(_compat.varying, others)))

    return jax.tree.map(one, *types)


def number_fits(given: Any, dtype: Any) -> bool:
    """Whether numbers of one dtype can stand where another is wanted: ints for floats, not back."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [[jnp.issubdtype(d, kind) for kind in kinds] for d in (given, dtype)]
    return all(map(any, rank)) and rank[0].index(True) <= rank[1].index(True)
