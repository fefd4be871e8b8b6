"""The figure of `induction_survey`."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

MARKED = 7  # heads to name in each map


def survey(
    maps: Mapping[str, Float[np.ndarray, "layers heads"]],
    curves: Mapping[str, Float[np.ndarray, " tokens"]],
    counts: Sequence[int],
    heads: Int[np.ndarray, "n 2"],
    paths: Mapping[str, Float[np.ndarray, " n"]],
    source: Int[np.ndarray, "2"],
) -> Figure:
    """Scores of all heads, losses with some of them silenced, and what composes with what.

    **Arguments:**

    - `maps`: the scores of two kinds of heads, between 0 and 1.
    - `curves`: the losses of the tokens after the first, by what was silenced: `"nothing"`,
        `"3 induction"`, `"3 random"` and so on.
    - `counts`: how many heads were silenced.
    - `heads`: `(layer, head)` pairs.
    - `paths`: the induction scores of these with nothing changed, and when keys, queries or
        values lack what one head wrote.
    - `source`: that head.
    """
    fig = plt.figure(figsize=(14, 10), layout="constrained")
    above, below = np.asarray(fig.subfigures(2, 1, height_ratios=(6, 4)))
    axes = above.subplots(2, 1)
    image = None
    for ax, (kind, scores) in zip(axes, maps.items(), strict=True):
        image = ax.imshow(scores.T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        strongest = np.argsort(-scores, axis=None)[:MARKED]
        for layer, head in zip(*np.unravel_index(strongest, scores.shape), strict=True):
            color = "white" if scores[layer, head] > 0.5 else "black"
            text = {"color": color, "size": 8, "ha": "center", "va": "center"}
            ax.text(layer, head, f"{layer}.{head}", **text)
        ax.set(title=kind.capitalize(), xlabel="layer", ylabel="head")
        ax.set(xticks=range(0, len(scores), 5), yticks=range(scores.shape[1]))
    label = "attention to the token to copy, or to the one before\n(0: none of it, 1: all of it)"
    above.colorbar(image, ax=axes.tolist(), label=label)

    left, middle, right = below.subplots(1, 3)
    end, most = len(curves["nothing"]), max(counts)
    shown = {"nothing": "-", "3 induction": "--", f"{most} induction": "-.", f"{most} random": ":"}
    for name, style in shown.items():
        left.plot(range(1, end + 1), curves[name], style, color="black", label=name)
    left.axvspan((end + 1) / 2, end, color="0.92", zorder=0)
    left.set(title="Loss (shaded: the sequence repeats itself)", xlabel="token")
    left.set(xlim=(1, end), ylim=(0, None), ylabel="loss (nats)")
    left.legend(loc="lower left", title="heads silenced", fontsize=8)

    for kind, style in [("induction", "o--"), ("random", "s:")]:
        names = ["nothing", *(f"{n} {kind}" for n in counts)]
        losses = [curves[name][-(end // 2) :].mean() for name in names]
        middle.plot([0, *counts], losses, style, color="black", label=f"{kind} heads")
    middle.set(title="Loss of the repeated half", xlabel="heads silenced", xticks=[0, *counts])
    middle.set(ylim=(0, None), ylabel="mean loss (nats)")
    middle.legend(loc="center right")

    names = {"nothing": "nothing", "k_in": "keys", "q_in": "queries", "v_in": "values"}
    at = np.arange(len(heads))
    for i, (key, scores) in enumerate(paths.items()):
        options = {"color": f"{1 - i / 3:.2f}", "edgecolor": "black", "label": names[key]}
        right.bar(at + 0.2 * (i - 1.5), scores, width=0.2, **options)
    right.set_xticks(at, [f"{layer}.{head}" for layer, head in heads])
    title = f"What head {source[0]}.{source[1]} wrote, taken out of later layers"
    right.set(title=title, xlabel="induction head", ylabel="induction score", ylim=(0, 1))
    right.legend(title="taken out of")
    return fig
