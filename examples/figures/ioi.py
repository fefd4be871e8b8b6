"""The figure of `ioi`."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


def patching(
    by_position: Float[np.ndarray, "layers tokens"],
    words: Sequence[str],
    of_heads: tuple[Float[np.ndarray, "layers heads"], Float[np.ndarray, "layers heads"]],
    of_resid: tuple[Float[np.ndarray, "layers t"], Float[np.ndarray, "layers t"]],
    heads: Float[np.ndarray, "layers heads"],
    mlps: Float[np.ndarray, " layers"],
    n_prompts: int,
) -> Figure:
    """What the parts of the model add, what patches restore, and how well that is estimated.

    **Arguments:**

    - `by_position`: what is restored by the residual stream at one position.
    - `words`: the tokens.
    - `of_heads`: what is restored by one head, and the same to first order.
    - `of_resid`: likewise, by the residual stream at the positions where prompts differ.
    - `heads`, `mlps`: what these add to the logit difference.
    - `n_prompts`: on average over so many.
    """
    fig, (direct, left, right) = plt.subplots(1, 3, figsize=(17, 6.5), layout="constrained")
    added = np.concatenate([heads, mlps[:, None]], axis=1)
    bound = abs(added).max()
    image = direct.imshow(
        added, cmap="cividis", vmin=-bound, vmax=bound, aspect="auto", origin="lower"
    )
    for layer, part in zip(*np.nonzero(abs(added) > 0.15), strict=True):
        value = added[layer, part]
        color = "black" if value > 0 else "white"
        text = {"size": 7, "ha": "center", "va": "center", "color": color}
        direct.text(part, layer, f"{value:+.1f}", **text)
    direct.set(
        title=f"Added to the logit difference ({n_prompts} prompts)", xlabel="head", ylabel="layer"
    )
    direct.set_xticks(range(added.shape[1]), [*map(str, range(heads.shape[1])), "MLP"])
    fig.colorbar(image, ax=direct, label="for the right name (nats; grey, 0: for neither)")

    options = {"aspect": "auto", "origin": "lower", "vmin": 0, "vmax": 1}
    image = left.imshow(by_position, cmap="Greys", **options)
    left.set(title="Residual stream patched at one position", xlabel="token", ylabel="layer")
    left.set_xticks(range(len(words)), words, rotation=60)
    fig.colorbar(image, ax=left, label="restored (0: as corrupted, 1: as clean)")

    right.axline((0, 0), slope=1, color="0.8", zorder=0)
    points = [(of_resid, "D", "white", "the residual stream"), (of_heads, "o", "black", "a head")]
    for (exact, estimate), marker, color, label in points:
        style = {"color": "black", "markersize": 3.5, "mew": 0.6, "mfc": color, "label": label}
        right.plot(exact.ravel(), estimate.ravel(), marker, **style)
    by_head, estimate = of_heads
    strongest = np.argsort(-abs(by_head), axis=None)[:6]
    for layer, head in zip(*np.unravel_index(strongest, by_head.shape), strict=True):
        point = (by_head[layer, head], estimate[layer, head])
        right.annotate(f" {layer}.{head}", point, size=8, va="center")
    right.margins(0.12)
    right.legend(loc="upper left", title="patched")
    right.set(title="One patch, exact and estimated", xlabel="restored, exact (sweep)")
    right.set_ylabel("restored, estimated (attribute)")
    return fig
