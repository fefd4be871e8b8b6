"""Moving the batch axes of values of hi types, which JAX cannot: as arrays."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import _compat, _hi_types
from ._errors import PlantError, UnsupportedError
from ._hi_types import HiAxes
from ._lowered import Lowered


def axes_to_front(value: Any, axes: HiAxes) -> Any:
    """Move the axes that `vmap` added to the front, the outermost first."""
    if not any(axes):
        return value
    low = Lowered.of(value)
    front = functools.partial(_to_front, [axis.size for axis in axes if axis])
    rows = zip((low.parts, low.carriers), _hi_types.places(low.type, axes), strict=True)
    moved = [list(map(front, arrays, places)) for arrays, places in rows]
    return Lowered(_hi_types.moved(low.type, axes), *moved).raised()


def axes_from_front(value: Any, axes: HiAxes, type: Any) -> Any:
    """The inverse of `axes_to_front`, for a value that was of the type `type`."""
    if not any(axes):
        return value
    low = Lowered.of(value)
    places = _hi_types.places(type, axes)
    if any(None in row for rows in places for row in rows):
        raise PlantError(
            f"`vmap` gives its axis to some of the arrays of the hi type {type} only, and a new "
            "value may need it in all; plant inside the `vmap`: `jax.vmap(plant(f, ...))`"
        )
    rows = zip((low.parts, low.carriers), places, strict=True)
    return Lowered(type, *(list(map(_from_front, arrays, row)) for arrays, row in rows)).raised()


def tangent_to_front(tangent: Any, type: Any, axes: HiAxes) -> tuple[Any, tuple[Any, ...]]:
    """The tangent of a value that has these batch axes, and where it has them.

    Only the type of the value can read their `MappingSpec`s. So a tangent of another hi type gets
    them in front; one that is an array has them where they are.
    """
    if _hi_types.is_linear(type) or not any(axes):
        return tangent, tuple(axes)
    _, places = _hi_types.places(type, axes)
    if not places or any(None in row for row in places):
        raise UnsupportedError(
            f"`vmap` gives its axis to some of the arrays of the hi type {type} only, or its "
            "tangents are no arrays of floating-point numbers: `perturb` cannot tell their axes; "
            "use `jax.vmap` around `jax.grad`"
        )
    first, *others = places
    if not _compat.is_hi(tangent):
        found = iter(first)
        return tangent, tuple(None if axis is None else next(found) for axis in axes)
    front = functools.partial(_to_front, [axis.size for axis in axes if axis])
    parts = map(front, Lowered.of(tangent).parts, (first, *others))
    moved = _hi_types.tangent_of(_hi_types.moved(type, axes))
    example = _hi_types.tangent_of(_hi_types.unbatched(type, axes))
    return Lowered(moved, list(parts), []).raised(), _hi_types.leading_axes(example, axes)


def tangent_from_front(tangent: Any, type: Any, axes: HiAxes) -> Any:
    """The inverse of `tangent_to_front`."""
    if _hi_types.is_linear(type) or not any(axes) or not _compat.is_hi(tangent):
        return tangent
    _, places = _hi_types.places(type, axes)
    parts = list(map(_from_front, Lowered.of(tangent).parts, places))
    return Lowered(_hi_types.tangent_of(type), parts, []).raised()


def _from_front(array: Any, places: Sequence[int]) -> Any:
    return jnp.moveaxis(array, range(len(places)), places)


def _to_front(sizes: Sequence[int], array: Any, places: Sequence[int | None]) -> Any:
    """Move the axes at these places to the front; where there is none, repeat the array."""
    there = [place for place in places if place is not None]
    array = jnp.moveaxis(array, there, range(len(there)))
    array = jnp.expand_dims(array, [i for i, place in enumerate(places) if place is None])
    return jnp.broadcast_to(array, (*sizes, *array.shape[len(sizes) :]))
