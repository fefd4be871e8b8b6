"""The figure of `steering`."""

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


def steering(
    doses: Sequence[float],
    prompts: Sequence[str],
    swept: Float[np.ndarray, "prompts layers doses"],
    layer: int,
    control: Float[np.ndarray, "prompts vectors doses"],
) -> Figure:
    """Dose and response at one layer, beside random vectors, and at all layers.

    **Arguments:**

    - `doses`: how much of the direction is added.
    - `prompts`: what is continued.
    - `swept`: how much likelier positive words are than negative ones.
    - `layer`: the one whose curves are drawn.
    - `control`: as `swept`, with random vectors, at that layer.
    """
    fig, axes = plt.subplots(
        1, 3, figsize=(15, 5.5), layout="constrained", width_ratios=(1, 1, 1.2)
    )
    left, middle, right = axes
    markers = itertools.cycle("os^Dv")
    for prompt, curve, marker in zip(prompts, swept[:, layer], markers, strict=False):
        left.plot(doses, curve, "-", marker=marker, color="black", label=f"{prompt} ...")
    left.set(title=f"The direction, added at layer {layer}")
    left.legend(loc="lower right", fontsize=8)
    for curves, marker in zip(control, itertools.cycle("os^Dv"), strict=False):
        middle.plot(doses, curves.T, "-", marker=marker, color="0.45", markersize=3, lw=0.7)
    middle.set(title=f"{control.shape[1]} random vectors of that length, each prompt")
    limits = min(swept[:, layer].min(), control.min()), max(swept[:, layer].max(), control.max())
    left.set(xlabel="dose (1: the mean difference of the pairs)")
    middle.set(xlabel="dose (1: the same length)")
    for ax in (left, middle):
        ax.axhline(0, color="black", linestyle=":", lw=0.8)
        ax.set(xticks=range(-2, 3))
        ax.set(ylim=(limits[0] - 0.5, limits[1] + 0.5))
        ax.set(ylabel="log odds of positive over negative words (nats)")

    change = (swept - swept[..., [list(doses).index(0)]]).mean(axis=0)
    bound = abs(change).max()
    image = right.imshow(change, cmap="cividis", vmin=-bound, vmax=bound, aspect="auto")
    for row, values in enumerate(change):
        for column, value in enumerate(values):
            color = "black" if value > 0 else "white"
            text = {"size": 6, "ha": "center", "va": "center", "color": color}
            right.text(column, row, f"{value:+.1f}" if value else "0", **text)
    right.invert_yaxis()
    right.set(title="Change at every layer, mean of the prompts", xlabel="dose", ylabel="layer")
    right.set_xticks(range(len(doses)), [f"{dose:g}" for dose in doses])
    label = "change of the log odds (nats; grey, 0: as without steering)"
    fig.colorbar(image, ax=right, label=label)
    return fig
