"""The figure of `logit_lens`."""

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator


def logit_lens(
    prompt: Sequence[str],
    words: Sequence[Sequence[str]],
    probability: Float[np.ndarray, "layers tokens"],
    labels: Sequence[str],
    ahead: Int[np.ndarray, "prompts layers"],
) -> Figure:
    """What would be said after each layer, and how far off the answer is.

    **Arguments:**

    - `prompt`: the tokens of one prompt.
    - `words`: what the lens takes for the next, after each layer and at each token.
    - `probability`: of these.
    - `labels`: all prompts, each with its answer.
    - `ahead`: how many words are likelier than the answer at the end of each prompt.
    """
    fig, (table, ranks) = plt.subplots(
        1, 2, figsize=(14, 8), layout="constrained", width_ratios=(5, 3)
    )
    options = {"cmap": "Greys", "vmin": 0, "vmax": 1, "aspect": "auto", "origin": "lower"}
    image = table.imshow(probability, **options)
    for layer, row in enumerate(words):
        for token, word in enumerate(row):
            color = "white" if probability[layer, token] > 0.5 else "black"
            text = repr(word)[1:-1].strip() or "␣"
            table.text(token, layer, text, size=7, color=color, ha="center", va="center")
    table.set(
        title="Likeliest next word (␣: nothing but spaces)", xlabel="token", ylabel="layers read"
    )
    table.set_xticks(range(len(prompt)), prompt, rotation=30)
    label = "probability of the likeliest word (0: none, 1: certain)"
    fig.colorbar(image, ax=table, label=label, pad=0.01)

    markers = itertools.cycle("os^Dv")
    for label, line, marker in zip(labels, ahead, markers, strict=False):
        ranks.plot(line, "-", marker=marker, color="black", markersize=4, lw=0.7, label=label)
    ranks.set(title="Words that are likelier than the answer", xlabel="layers read")
    ranks.set_yscale("symlog", linthresh=1)
    ranks.set_yticks([0, 1, 10, 100, 1000, 10_000], ["0", "1", "10", "100", "1000", "10000"])
    ranks.set(ylim=(-0.1, None), ylabel="words ahead of it (0: it would be said)")
    ranks.legend(loc="lower left", fontsize=8)
    for axis in (table.yaxis, ranks.xaxis):
        axis.set_major_locator(MultipleLocator(5))
    return fig
