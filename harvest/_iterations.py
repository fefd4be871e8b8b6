"""Which iterations of the loops around a site an index chooses."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _compat, _types
from ._errors import PlantError
from ._structure import is_array


def checked_indices(index: Any) -> tuple[Any, ...]:
    """For each loop an int, a slice, `...` or an array; a `PlantError` if it is something else."""
    return tuple(map(_checked, index if isinstance(index, tuple) else (index,)))


def _checked(index: Any) -> Any:
    if isinstance(index, list):
        index = np.asarray(index)
    traced = is_array(index) and not _compat.is_hi(index)
    if isinstance(index, bool) or not (isinstance(index, int | slice) or index is ... or traced):
        raise PlantError(
            f"`at` got the index {index!r} of type `{type(index).__name__}`; wanted an int, a "
            "slice, an array of integers or booleans, `...`, or a tuple of these"
        )
    if is_array(index):
        kind = jnp.issubdtype(index.dtype, jnp.integer) or index.dtype == bool
        if not kind or index.ndim > 1 or (index.dtype == bool and index.ndim == 0):
            raise PlantError(
                f"`at` got an index of type {_types.describe(index)}; wanted integers of rank "
                "0 or 1, or a boolean mask of rank 1"
            )
    return index


def check_index(index: Any, length: int | None) -> None:
    """Raise a `PlantError` for an index that does not fit into a loop (None: of any length)."""
    if length is None:
        bounds = (index.start, index.stop) if isinstance(index, slice) else (index,)
        step = index.step if isinstance(index, slice) else None
        from_the_end = any(isinstance(i, int) and i < 0 for i in (*bounds, step))
        if from_the_end or (is_array(index) and index.dtype == bool):
            got = _types.describe(index) if is_array(index) else repr(index)
            raise PlantError(
                f"got `at` with {got} in a `while_loop`, whose length is not known; wanted "
                "indices from the start"
            )
        return
    if isinstance(index, int) and not -length <= index < length:
        raise PlantError(f"got `at` with index {index} for a loop of length {length}")
    if is_array(index) and index.dtype == bool and index.shape != (length,):
        raise PlantError(
            f"got `at` with a mask of shape {index.shape} for a loop of length {length}"
        )


def is_chosen(index: Any, i: Any, length: int | None) -> Any:
    """Whether iteration `i` of a loop of this length is among those of `index`."""
    if index is ...:
        return True
    if isinstance(index, slice):
        return _is_in_slice(index, i, length)
    if isinstance(index, int):
        return i == (index if length is None else index % length)
    index = jnp.asarray(index)
    if index.dtype == bool:
        return index if index.ndim == 0 else index[i]  # a scalar if `each` has sliced it
    index = index.astype(jnp.result_type(i))  # the narrower one could overflow
    if length is not None:
        index = jnp.where(index < 0, index + length, index)
    return jnp.any(index == i)


def _is_in_slice(index: slice, i: Any, length: int | None) -> Any:
    if length is None:
        start, step = index.start or 0, index.step or 1
        before = True if index.stop is None else i < index.stop
        return (i >= start) & before & ((i - start) % step == 0)
    chosen = range(*index.indices(length))
    if not chosen:
        return False
    low, high = min(chosen), max(chosen)
    return (i >= low) & (i <= high) & ((i - low) % abs(chosen.step) == 0)
