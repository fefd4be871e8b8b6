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
    heads: Float[np.ndarray, "layers heads"],
    mlps: Float[np.ndarray, " layers"],
) -> Figure:
    """What the parts of the model add, what patches restore, and how well that is estimated.

    **Arguments:**

    - `by_position`: what is restored by the residual stream at one position.
    - `words`: the tokens.
    - `by_head`: what is restored by one head.
    - `estimate`: the same to first order.
    - `heads`, `mlps`: what these add to the logit difference.
    """
    fig, (direct, left, right) = plt.subplots(1, 3, figsize=(17, 6.5), layout="constrained")
    added = np.concatenate([heads, mlps[:, None]], axis=1)
    bound = abs(added).max()
    image = direct.imshow(
        added, cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto", origin="lower"
    )
    for layer, part in zip(*np.nonzero(abs(added) > 0.15), strict=True):
        value = added[layer, part]
        color = "white" if abs(value) > 0.6 * bound else "black"
        text = {"size": 7, "ha": "center", "va": "center", "color": color}
        direct.text(part, layer, f"{value:+.1f}", **text)
    direct.set(title="Added to the logit difference (24 prompts)", xlabel="head", ylabel="layer")
    direct.set_xticks(range(added.shape[1]), [*map(str, range(heads.shape[1])), "MLP"])
    fig.colorbar(image, ax=direct, label="for the right name (nats; 0: for neither)")

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
