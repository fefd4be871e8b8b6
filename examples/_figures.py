"""The figures of the examples, all readable in greyscale."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure


def induction_heads(
    scores: Float[np.ndarray, "layers heads"],
    marked: Int[np.ndarray, "marked 2"],
    curves: Mapping[str, Float[np.ndarray, " tokens"]],
) -> Figure:
    """Every head's induction score, and the loss at each token with some heads silenced.

    **Arguments:**

    - `scores`: between 0 and 1.
    - `marked`: the `(layer, head)` pairs to name in the map.
    - `curves`: the losses of the tokens after the first, by which of three things was silenced.
    """
    fig, (above, below) = plt.subplots(2, 1, figsize=(9, 7), layout="constrained")
    image = above.imshow(scores.T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    for layer, head in marked:
        name = f"{layer}.{head}"
        above.text(layer, head, name, color="white", size=7, ha="center", va="center")
    above.set(title="Induction heads of SmolLM2-135M", xlabel="layer", ylabel="head")
    above.set_yticks(range(scores.shape[1]))
    label = "attention to the token to copy\n(0: none of it, 1: all of it)"
    fig.colorbar(image, ax=above, label=label)

    end = len(next(iter(curves.values())))
    for (name, curve), style in zip(curves.items(), ["-", "--", ":"], strict=True):
        below.plot(range(1, end + 1), curve, style, color="black", label=name)
    repeat = "the sequence repeats itself"
    below.axvspan((end + 1) / 2, end, color="0.92", zorder=0, label=repeat)
    below.set(title="Loss with heads silenced", xlabel="token", ylabel="loss (nats)")
    below.set(xlim=(1, end), ylim=(0, None))
    below.legend(loc="lower left", title="silenced")
    return fig


def residual_gradients(
    norms: Float[np.ndarray, "layers tokens"], labels: Sequence[str], answer: str
) -> Figure:
    """How strongly the log probability of `answer` depends on the residual stream."""
    fig, ax = plt.subplots(figsize=(6, 7), layout="constrained")
    image = ax.imshow(norms, cmap="Greys", norm=LogNorm(), aspect="auto", origin="lower")
    layer, position = np.nonzero(norms == 0)
    ax.plot(position, layer, "x", color="0.6", markersize=5)
    ax.set(title=f"Where the answer {answer!r} comes from", xlabel="token", ylabel="layer")
    ax.set_xticks(range(len(labels)), [repr(label) for label in labels])
    what = f"norm of the gradient of log P({answer!r})\nat the residual stream"
    fig.colorbar(image, ax=ax, label=f"{what} (nats per unit; x: exactly 0)")
    return fig


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
