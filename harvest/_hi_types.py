"""Hi types: their axes, and their tangents.

Of a `jax.experimental.hijax.HiType` nothing is known but what its methods say. How an axis goes
through its arrays is said by a `MappingSpec`, which nobody but the type can read; where it is, is
seen from the arrays that the type is lowered to, once with the axis and once without.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.hijax import HiType

from . import _compat


class HiAxis(NamedTuple):
    """An axis that `vmap` added to a value of a hi type."""

    spec: Any  # a `MappingSpec`, for the type without the axis
    size: int


# For each `vmap`, outermost first, a `HiAxis`; None where that one left the value unbatched.
HiAxes = Sequence[Any]


def stacked(type: HiType, length: int) -> HiType:
    """The type of `length` values on a new leading axis, as `lax.scan` stacks them."""
    return type.inc_rank(length, type.leading_axis_spec())


def dropped(type: HiType) -> HiType:
    """The type without its leading axis."""
    size = next(iter(leading(type, 1)), None)
    return type.dec_rank(size, type.leading_axis_spec())


def leading(type: Any, count: int) -> tuple[int, ...]:
    """The sizes of leading axes, which all arrays of a stacked value have in common."""
    sizes = {tuple(lo.shape[:count]) for lo in type.lo_ty()}
    return sizes.pop() if len(sizes) == 1 else ()


def unbatched(type: HiType, axes: HiAxes) -> HiType:
    """The type of one example of a batch."""
    for axis in axes:
        type = type if axis is None else type.dec_rank(axis.size, axis.spec)
    return type


def moved(type: HiType, axes: HiAxes) -> HiType:
    """The type of a value whose batch axes are moved to the front."""
    type = unbatched(type, axes)
    for axis in reversed(axes):
        type = type if axis is None else stacked(type, axis.size)
    return type


def alike(a: Any, b: Any) -> bool:
    """Whether hi types are equal but for the meshes of their arrays, as far as can be seen."""
    arrays = lambda type: [(lo.shape, lo.dtype) for lo in type.lo_ty()]
    return a == b or (type(a) is type(b) and str(a) == str(b) and arrays(a) == arrays(b))


def tangent_of(type: HiType) -> Any:
    """The type of tangents, or None if there are none."""
    try:
        tangent = type.to_tangent_aval()
    except NotImplementedError:
        return None
    return tangent if _compat.is_hi_type(tangent) or _is_inexact(tangent) else None


def is_linear(type: HiType) -> bool:
    """Whether values are their own tangents, the sums of which are those of their arrays."""
    return tangent_of(type) == type and all(map(_is_inexact, type.lo_ty()))


def tangent_arrays(type: HiType) -> list[Any] | None:
    """The types of the arrays that stand for a tangent; None if arrays cannot."""
    tangent = tangent_of(type)
    if tangent is None:
        return []
    if not _compat.is_hi_type(tangent):
        return [tangent]
    return tangent.lo_ty() if is_linear(tangent) else None


def places(type: HiType, axes: HiAxes) -> tuple[list[Any], list[Any]]:
    """Where the batch axes are in the arrays of a value, and in those of its tangent.

    For each array a number for each `vmap` that batched the value, None if it has no such axis.
    """
    batch = [axis for axis in axes if axis is not None]
    sizes = [size for lo in _arrays(type) for size in lo.shape if isinstance(size, int)]
    unlike = max(sizes, default=0) + 1  # sizes that no other axis has
    marked = unbatched(type, axes)
    for number, axis in reversed(list(enumerate(batch))):
        marked = marked.inc_rank(unlike + number, axis.spec)

    def row(lo: Any) -> tuple[int | None, ...]:
        marks = range(unlike, unlike + len(batch))
        return tuple(lo.shape.index(mark) if mark in lo.shape else None for mark in marks)

    return list(map(row, marked.lo_ty())), list(map(row, tangent_arrays(marked) or []))


def leading_axes(type: HiType, axes: HiAxes) -> tuple[HiAxis | None, ...]:
    """The axes of a value of this type, of one example, that has them in front."""
    fronted: list[HiAxis | None] = []
    for axis in reversed(axes):
        fronted.append(axis and HiAxis(type.leading_axis_spec(), axis.size))
        type = type if axis is None else stacked(type, axis.size)
    return tuple(reversed(fronted))


def _arrays(type: HiType) -> list[Any]:
    return [*type.lo_ty(), *(tangent_arrays(type) or [])]


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
