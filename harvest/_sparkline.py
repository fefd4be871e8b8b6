"""An array in a few characters."""

from typing import Any

import jax.numpy as jnp
import numpy as np

BLOCKS = "▁▂▃▄▅▆▇█"
BINS = 12


def summary(value: Any) -> str:
    """A number itself; of an array a sparkline, and the range of what is finite.

    The sparkline is of the flattened array: each block is the mean of a part, between the least and
    the largest of these, and `×` stands for a part with a NaN or an infinity.
    """
    array = _as_numbers(value)
    if array is None or array.size == 0:
        return ""
    if array.ndim == 0:
        return f"{array.item():.4g}" if array.dtype.kind in "fc" else str(array)
    if array.dtype == bool:
        return f"{np.count_nonzero(array)} of {array.size} true"
    array = abs(array) if array.dtype.kind == "c" else array
    finite = array[np.isfinite(array)]
    if finite.size == array.size and finite.min() == finite.max():
        return f"all {finite.min():.4g}"
    blocks = sparkline(array.ravel())
    return f"{blocks} {finite.min():.3g} .. {finite.max():.3g}" if finite.size else blocks


def has_range(value: Any) -> bool:
    """Whether it is an array of which a picture can be drawn."""
    array = _as_numbers(value)
    return array is not None and array.ndim > 0 and bool(np.isfinite(array).any())


def _as_numbers(value: Any) -> np.ndarray | None:
    """A value in a dtype of numpy's; None of keys of random numbers, and of values of hi types."""
    try:
        array = np.asarray(value)
    except Exception:
        return None
    if jnp.issubdtype(array.dtype, jnp.floating):  # bfloat16 and smaller ones too
        return array.astype(np.float64)
    return array if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number) else None


def sparkline(values: np.ndarray) -> str:
    with np.errstate(invalid="ignore", over="ignore"):
        means = np.array([part.mean() for part in np.array_split(values, min(BINS, values.size))])
    finite = means[np.isfinite(means)]
    if not finite.size:
        return "×" * means.size
    low, high = finite.min(), finite.max()
    scaled = np.zeros_like(means) if low == high else (means - low) / (high - low)
    return "".join(
        BLOCKS[round(s * (len(BLOCKS) - 1))] if np.isfinite(m) else "×"
        for m, s in zip(means, scaled, strict=True)
    )
