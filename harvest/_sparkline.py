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
    try:
        array = np.asarray(value)
    except Exception:  # keys of random numbers, values of hi types
        return ""
    if array.dtype == bool:
        return f"{np.count_nonzero(array)} of {array.size} true" if array.ndim else str(array)
    if array.size == 0 or not jnp.issubdtype(array.dtype, jnp.number):
        return ""
    if array.ndim == 0:
        return f"{array.item():.4g}" if jnp.issubdtype(array.dtype, jnp.inexact) else str(array)
    array = abs(array) if jnp.issubdtype(array.dtype, jnp.complexfloating) else array
    array = array.astype(np.float64)
    finite = array[np.isfinite(array)]
    if not finite.size:
        return f"{sparkline(array.ravel())} nothing finite"
    return f"{sparkline(array.ravel())} {finite.min():.3g} .. {finite.max():.3g}"


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
