"""The figures of the quickstart."""

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
