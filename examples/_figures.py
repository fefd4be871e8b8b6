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


def third_party(
    image: Float[np.ndarray, "H W"],
    looks: Float[np.ndarray, "blocks grid grid"],
    states: Float[np.ndarray, "blocks grid grid D"],
    without: Sequence[float],
    senses: Sequence[float],
) -> Figure:
    """A vision transformer on one image, block by block, and the senses of a word by layer.

    **Arguments:**

    - `image`: what is looked at.
    - `looks`: how much each patch is attended to, by one head of each block.
    - `states`: of each patch, after each block.
    - `without`: the accuracy with the attention of a block silenced.
    - `senses`: the accuracy with which the sense of a word is told, after the embeddings and after
        each layer.
    """
    fig = plt.figure(figsize=(12, 7), layout="constrained")
    maps, below = np.asarray(fig.subfigures(2, 1, height_ratios=(3, 2)))
    axes = maps.subplots(2, len(looks) + 1)
    axes[0, 0].imshow(image, cmap="Greys")
    axes[0, 0].set(title="image")
    axes[1, 0].axis("off")
    distance = np.linalg.norm(states - states.mean(axis=(1, 2), keepdims=True), axis=-1)
    distance /= distance.max(axis=(1, 2), keepdims=True)
    labels = ["attention to each patch\n(one head)", "distance from the mean\n(1: largest)"]
    for row, values, label in zip(axes, (looks, distance), labels, strict=True):
        shown = None
        for i, (ax, value) in enumerate(zip(row[1:], values, strict=True)):
            shown = ax.imshow(value, cmap="Greys", vmin=0, vmax=values.max())
            ax.set(title=f"block {i}")
        maps.colorbar(shown, ax=row.tolist(), label=label)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])

    left, right = below.subplots(1, 2)
    left.bar(range(len(without)), without, color="0.7", edgecolor="black", width=0.6)
    left.set(title="Shapes told, with the attention of a block silenced", xlabel="block")
    right.plot(range(len(senses)), senses, "o-", color="black")
    right.set(title='Senses of "bank" told by MiniLM', xlabel="layer (0: the embeddings)")
    for ax, values, chance in [(left, without, 0.25), (right, senses, 0.5)]:
        ax.set(ylabel="accuracy", xticks=range(len(values)), ylim=(0, 1.05))
        ax.axhline(chance, color="black", linestyle=":")
        at_edge = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "bottom"}
        ax.text(0.99, chance, "chance", **at_edge)
        ax.set_xlim(-0.6, len(values))
    return fig
