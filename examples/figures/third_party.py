"""The figure of `third_party`."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


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
