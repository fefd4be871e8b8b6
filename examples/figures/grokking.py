"""The figure of `grokking`."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure


def grokking(
    seen: Float[np.ndarray, "looks 4"],
    power: Float[np.ndarray, " f"],
    added: Float[np.ndarray, " f"],
    keys: Int[np.ndarray, " keys"],
    circles: Mapping[int, Float[Array, "p 2"]],
) -> Figure:
    """How a model learns to add, and the circles on which it then does.

    **Arguments:**

    - `seen`: for each look at it the steps so far, and the accuracy on the pairs that are taught,
        on their mirror images, and on all others.
    - `power`: the share of each frequency in the embedding of the numbers.
    - `added`: the loss without it in the neurons, minus the loss with it.
    - `keys`: which of them are drawn black.
    - `circles`: where each number is, by frequency.
    """
    fig = plt.figure(figsize=(13, 7.5), layout="constrained")
    above, below = np.asarray(fig.subfigures(2, 1))
    left, middle, right = above.subplots(1, 3)
    names = ["pairs that are taught", "their mirror images", "all others"]
    for accuracy, style, name in zip(seen.T[1:], ["k--", "k:", "k-"], names, strict=True):
        left.plot(seen[:, 0], accuracy, style, label=name)
    left.set(title="It learns by heart, then to add", xlabel="step of training")
    left.set(ylabel="accuracy", ylim=(0, 1.05), xlim=(0, None))
    left.legend(loc="lower right")

    frequency = 1 + np.arange(len(power))
    colors = np.where(np.isin(frequency - 1, keys), "black", "0.75").tolist()
    middle.bar(frequency, power, color=colors)
    middle.set(title="What its embedding of numbers is made of", ylabel="share of the power")
    right.bar(frequency, added, color=colors)
    right.set(title="What its neurons need", ylabel="loss added without that frequency (nats)")
    for ax in middle, right:
        ax.set(xlabel="frequency (black: 85% of the embedding)", xticks=range(2, len(power) + 1, 4))

    axes = below.subplots(1, len(circles), squeeze=False)[0]
    for ax, (name, points) in zip(axes, circles.items(), strict=True):
        points = np.asarray(points)
        for number, (x, y) in enumerate(points):
            ax.text(x, y, str(number), size=7, ha="center", va="center")
        limit = 1.15 * abs(points).max()
        ax.set(title=f"Numbers, frequency {name}", xlim=(-limit, limit), ylim=(-limit, limit))
        ax.set(aspect="equal", xlabel="along its cosine", ylabel="along its sine")
    return fig
