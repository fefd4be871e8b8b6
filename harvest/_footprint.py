"""Where the collected value of a site is, and how many bytes it has there, as far as types say.

What types do not say is how the compiler shards values over automatic axes of a mesh.
"""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from . import _compat, _types
from ._entry import CondSum, Entry
from ._probe import as_tangent


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
