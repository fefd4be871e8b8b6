"""Arithmetic on the values of sites: what `add`, `scale`, `zero` and `at` do to each leaf."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat, _hi_types, _types
from ._errors import PlantError
from ._lowered import on_arrays
from ._structure import is_array


def add(value: Any, operand: Any) -> Any:
    return _leafwise(_sum, value, operand)


def scale(value: Any, factor: Any) -> Any:
    return _leafwise(_product, value, factor)


def zero(value: Any) -> Any:
    return jax.tree.map(lambda x: _zero(x) if is_array(x) else x, value)


def where(chosen: Any, new: Any, old: Any) -> Any:
    where = functools.partial(on_arrays, lambda n, o: jnp.where(chosen, n, o))
    return jax.tree.map(lambda n, o: where(n, o) if is_array(o) else o, new, old)


def _leafwise(op: Callable[[Any, Any], Any], value: Any, operand: Any) -> Any:
    """`op` with one operand for all arrays of `value`, or with one for each."""
    if jax.tree.structure(operand) != jax.tree.structure(value):
        if not jax.tree_util.all_leaves([operand]):
            raise PlantError(
                f"got an operand of structure {jax.tree.structure(operand)} for a value of "
                f"structure {jax.tree.structure(value)}; wanted the same, or one array"
            )
        operand = jax.tree.map(lambda _: operand, value)
    return jax.tree.map(lambda x, y: op(x, y) if is_array(x) else x, value, operand)


def _sum(value: Any, operand: Any) -> Any:
    if not _compat.is_hi(value):
        return jnp.add(value, _operand(operand, value))
    type = _check_vector(value, "add")
    if not _compat.is_hi(operand) or jax.typeof(operand) != type:
        raise PlantError(
            f"got an operand of type {_types.describe(operand)} for a value of the hi type {type}; "
            "wanted one of that very type"
        )
    return type.vspace_add(value, operand)


def _product(value: Any, operand: Any) -> Any:
    if _compat.is_hi(value):
        raise PlantError(
            f"got `scale` for a value of the hi type {_types.describe(value)}, which has no "
            "multiplication; wanted a function of the value, or a new one"
        )
    return jnp.multiply(value, _operand(operand, value))


def _zero(value: Any) -> Any:
    if not _compat.is_hi(value):
        return jnp.zeros_like(value)
    return _check_vector(value, "zero").vspace_zero()


def _check_vector(value: Any, name: str) -> Any:
    """The hi type of a value, which has a zero and a sum if it is a type of tangents."""
    type = jax.typeof(value)
    if _hi_types.tangent_of(type) != type:
        raise PlantError(
            f"got `{name}` for a value of the hi type {type}, which is no vector space (its own "
            "type of tangents); wanted a function of the value, or a new one"
        )
    return type


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    fits = [size in (1, wanted) for size, wanted in zip(shape[::-1], to[::-1], strict=False)]
    return len(shape) <= len(to) and all(fits)


def _operand(operand: Any, like: Any) -> Any:
    """`operand` with the shape and dtype of `like`."""
    if _compat.is_hi(operand):
        raise PlantError(
            f"got an operand of the hi type {_types.describe(operand)} for {_types.describe(like)}"
        )
    operand = jnp.asarray(operand)
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        raise PlantError(
            f"got arithmetic for a value of type {_types.describe(like)}, which has none"
        )
    if operand.dtype not in (like.dtype, bool) and not _types.number_fits(
        operand.dtype, like.dtype
    ):
        raise PlantError(
            f"got an operand of type {_types.describe(operand)} for {_types.describe(like)}"
        )
    if not _broadcasts(operand.shape, like.shape):
        raise PlantError(
            f"got an operand of type {_types.describe(operand)}, which does not broadcast to "
            f"{_types.describe(like)}"
        )
    operand = _compat.on_mesh_of(operand, jax.typeof(like))
    operand = jnp.broadcast_to(operand.astype(like.dtype), like.shape)
    return _compat.placed_like(operand, jax.typeof(like))
