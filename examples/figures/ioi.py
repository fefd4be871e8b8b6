"""The figure of `ioi`."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


def patching(
    by_position: Float[np.ndarray, "layers tokens"],
    words: Sequence[str],
    by_head: Float[np.ndarray, "layers heads"],
    estimate: Float[np.ndarray, "layers heads"],
) -> Figure:
    """How much of the right answer each patch restores, and how well that is estimated."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 6), layout="constrained")
    options = {"aspect": "auto", "origin": "lower", "vmin": 0, "vmax": 1}
    image = left.imshow(by_position, cmap="Greys", **options)
    left.set(title="Residual stream patched at one position", xlabel="token", ylabel="layer")
    left.set_xticks(range(len(words)), words, rotation=60)
    fig.colorbar(image, ax=left, label="restored (0: as corrupted, 1: as clean)")

    right.axline((0, 0), slope=1, color="0.8", zorder=0)
    right.plot(by_head.ravel(), estimate.ravel(), "o", color="black", markersize=3)
    strongest = np.argsort(-abs(by_head), axis=None)[:6]
    for layer, head in zip(*np.unravel_index(strongest, by_head.shape), strict=True):
        point = (by_head[layer, head], estimate[layer, head])
        right.annotate(f" {layer}.{head}", point, size=8, va="center")
    right.margins(0.12)
    right.set(title="Each head patched", xlabel="restored, exact (sweep)")
    right.set_ylabel("restored, estimated (attribute)")
    return fig
