"""Where the collected value of a site is, and how many bytes it has there, as far as types say.

What types do not say is how the compiler shards values over automatic axes of a mesh.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from . import _compat, _types
from ._batching import levels
from ._entry import CondSum, Entry
from ._fit import known
from ._probe import as_tangent


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a collected value. (No pytree: it is a leaf.)"""

    type: Any  # with the axes of loops in front, of those whose length is known
    loops: int  # how many these are
    folded: Any  # its type if a fold combines the iterations of all loops
    axes: tuple[int | None, ...]  # for each axis of that, which one of `type` it is
    number: int | None = None  # which one of those that a value of a hi type is lowered to
    chooses: bool = False  # it is the index of the `CondSum` of a `cond`


def collected(entry: Entry) -> Any:
    """A tree like the collected value: an `Array` for each array, with static leaves as they are.

    A value of a hi type is the list of the arrays that it is lowered to.
    """
    return _collected(entry, entry.type, 0)


def _collected(entry: Entry, type: Any, outer: int) -> Any:
    loops = outer + len(known(entry.loops))
    branches = entry.branches or ()
    if entry.summed:
        index = dataclasses.replace(_arrays_at(type.index, loops, (), (), ()), chooses=True)
        rows = zip(branches, type.branches, strict=True)
        return CondSum(index, tuple(b and _collected(b, t, loops) for b, t in rows))
    if entry.sums:
        inside = next(filter(None, branches))
        return _collected(inside, type, outer + len(known(entry.around)))
    inner, _ = next(entry.innermost())
    marker = inner.marker
    batch = _types.batch_dims(marker.in_avals, marker.positions)
    rows = [axes for _, axes in levels(marker.positions)]
    has = [[row[number] is not None for row in rows] for number in range(len(type))]
    make = lambda aval, has: _arrays_at(aval, loops, inner.lanes, batch, has)
    return marker.label.structure.unflatten(map(make, type, has))


def _arrays_at(
    aval: Any,
    loops: int,
    lanes: Sequence[_types.Dim],
    batch: Sequence[_types.Dim],
    has: Sequence[bool],
) -> Any:
    """The `Array` of a leaf. `has`: which axes of the batch; after a fold it has all of them."""
    if _compat.is_hi_type(aval):
        missing = [dim for dim, there in zip(batch, has, strict=True) if not there]
        return _hi_arrays(aval, loops, lanes, missing)
    dims = _types.dims(aval)
    dims = [*dims[:loops], *lanes, *dims[loops:]]
    rest = iter(range(loops, len(dims)))
    front = [next(rest) if there else None for there in (*(True for _ in lanes), *has)]
    axes = (*front, *rest)
    known = [*lanes, *batch, *(None for _ in axes[len(front) :])]
    folded = [dim if axis is None else dims[axis] for axis, dim in zip(axes, known, strict=True)]
    return Array(_with(aval, dims), loops, _with(aval, folded), axes)


def _with(aval: Any, dims: Sequence[Any]) -> Any:
    return aval if dims == _types.dims(aval) else _types.with_dims(aval, dims)


def _hi_arrays(
    type: Any, loops: int, lanes: Sequence[_types.Dim], missing: Sequence[_types.Dim]
) -> list[Array]:
    type = _with_axes(type, lanes)
    folded = _unless_missing(lambda: _types.dropped(type, loops), type)
    rows = zip(type.lo_ty(), folded.lo_ty(), _with_axes(folded, missing).lo_ty(), strict=True)
    return [
        Array(lo, loops, last, _behind(*map(_types.rank, (lo, kept, last))), number)
        for number, (lo, kept, last) in enumerate(rows)
    ]


def _behind(rank: int, kept: int, folded: int) -> tuple[int | None, ...]:
    """Of `folded` axes, the last ones that are `kept`, as they are among `rank` axes."""
    return (*(None for _ in range(folded - kept)), *range(rank - kept, rank))


def _with_axes(type: Any, dims: Sequence[_types.Dim]) -> Any:
    for dim in reversed(dims):
        type = _unless_missing(lambda t=type, n=dim.size: _types.stacked(t, n), type)
    return type


def _unless_missing(fn: Callable[[], Any], default: Any) -> Any:
    try:
        return fn()
    except NotImplementedError:  # by the user's `HiType`, which has no such axes then
        return default


def arrays_of(tree: Any) -> Iterator[Array]:
    return (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Array))


def sharding_of(entry: Entry) -> Any:
    """A tree like the collected value, with None where the type says nothing; or None for all."""
    tree = _shardings(entry, entry.type)
    return tree if jax.tree.leaves(tree) else None


def _shardings(entry: Entry, type: Any) -> Any:
    if entry.summed:
        pairs = zip(entry.branches or (), type.branches, strict=True)
        return CondSum(None, tuple(branch and _shardings(branch, t) for branch, t in pairs))
    if entry.branches is not None:
        return _shardings(next(filter(None, entry.branches)), type)
    return as_tangent(entry.marker.label.structure, list(map(_sharding, type)))


def _sharding(aval: Any) -> NamedSharding | None:
    sharding = getattr(aval, "sharding", None)
    said = _compat.explicit_sharding(aval) is not None or is_split(sharding)
    return sharding if said else None


def is_split(sharding: Any) -> bool:
    """Whether a sharding leaves a part of the value on each device only."""
    return sharding is not None and any(p is not None for p in sharding.spec.partitions)


def nbytes_of(aval: Any) -> Any:
    """The size of a value, in bytes."""
    if _compat.is_hi_type(aval):
        return sum(map(nbytes_of, aval.lo_ty()))
    return math.prod(aval.shape) * aval.dtype.itemsize


def nbytes_per_device(aval: Any) -> Any:
    """The size of what each device has of a value, in bytes."""
    if _compat.is_hi_type(aval):
        return sum(map(nbytes_per_device, aval.lo_ty()))
    return math.prod(map(_size_per_device, _types.dims(aval))) * aval.dtype.itemsize


def _size_per_device(dim: _types.Dim) -> Any:
    if dim.mesh is None:
        return dim.size
    names = dim.partition if isinstance(dim.partition, tuple) else (dim.partition,)
    return dim.size // math.prod(dim.mesh.shape[name] for name in names)
