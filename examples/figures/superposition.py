"""The figure of `superposition`."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.patches import Circle


def superposition(
    present: Sequence[float],
    weights: Float[np.ndarray, "sparsities 2 n"],
    before: Float[np.ndarray, "features latents"],
    found: Float[np.ndarray, "features latents"],
    moved: Float[np.ndarray, "latents features"],
) -> Figure:
    """Features in two channels, and how an autoencoder finds those in sixteen.

    **Arguments:**

    - `present`: how often a feature is not zero.
    - `weights`: the direction of each feature, then.
    - `before`, `found`: the cosines of features and latents, before training and after.
    - `moved`: how much each latent, set to one, moves each feature of the output.
    """
    fig = plt.figure(figsize=(13, 7.5), layout="constrained")
    above, below = np.asarray(fig.subfigures(2, 1, height_ratios=(2, 3)))
    above.suptitle("Five features in two channels, each with probability P of not being zero")
    for ax, p, weight in zip(above.subplots(1, len(present)), present, weights, strict=True):
        ax.add_patch(Circle((0, 0), 1, fill=False, linestyle=":", color="0.6"))
        for x, y in weight.T:
            ax.plot([0, x], [0, y], "k-")
        ax.plot(*weight, "ko")
        ax.set(title=f"P = {p}", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        ax.set(xlabel="channel 0", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    above.axes[0].set_ylabel("channel 1")

    # Each latent beside the feature that it is nearest to.
    order = np.argsort(found.argmax(axis=0), kind="stable")
    left, middle, right = below.subplots(1, 3)
    titles = "Features and latents before training", "... after training"
    for ax, title, cosine in zip((left, middle), titles, (before, found), strict=True):
        ax.imshow(cosine[:, order], cmap="Greys", vmin=-1, vmax=1, aspect="auto")
        ax.set(title=title, xlabel="latent", ylabel="feature")
    label = "cosine (0: at right angles, 1: the same)"
    below.colorbar(left.images[0], ax=[left, middle], label=label)
    image = right.imshow(moved[order].T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    right.set(title="One latent set to one", xlabel="latent", ylabel="feature of the output")
    below.colorbar(image, ax=right, label="change of the output (0: none)")
    return fig
