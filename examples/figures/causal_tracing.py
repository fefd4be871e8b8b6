"""The figure of `causal_tracing`."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure


def tracing(
    maps: Mapping[str, Float[np.ndarray, "windows tokens"]],
    words: Sequence[str],
    middles: Sequence[int],
    curves: Mapping[str, Float[np.ndarray, "facts windows"]],
) -> Figure:
    """What restoring a window of layers brings back: at each token of one prompt, and by layer.

    **Arguments:**

    - `maps`: for `"mlp_out"` and `"attn_out"`.
    - `words`: the tokens of that prompt.
    - `middles`: the layers in the middle of the windows.
    - `curves`: likewise, for all facts, at one token of each, and for MLPs in `"mlp_out, end"` at
        the last token of each subject.
    """
    fig, axes = plt.subplots(
        1, 3, figsize=(14, 5.5), layout="constrained", width_ratios=(1, 1, 1.1)
    )
    *left, right = axes
    step = middles[1] - middles[0]
    bottom, top = middles[0] - step / 2, middles[-1] + step / 2
    # No more than what there is, and no less than nothing, but for noise.
    options = {"cmap": "Greys", "vmin": 0, "vmax": 1, "aspect": "auto", "origin": "lower"}
    names = {"mlp_out": "MLPs", "attn_out": "attention"}
    for ax, (key, values) in zip(left, maps.items(), strict=True):
        ax.imshow(values, extent=(-0.5, len(words) - 0.5, bottom, top), **options)
        ax.set(title=f"Restored at one token: {names[key]}")
        ax.set(xlabel="token (*: with noise)", ylabel="middle of the window (layer)")
        ax.set_xticks(range(len(words)), words, rotation=60)
    label = "restored (0: as with noise, 1: as without)"
    fig.colorbar(left[0].images[0], ax=left, label=label, pad=0.01)

    styles = {"mlp_out": ("-", "o", "black", "MLPs, best token of the subject")}
    styles |= {"mlp_out, end": (":", "o", "white", "MLPs, last token of the subject")}
    styles |= {"attn_out": ("--", "s", "black", "attention, last token")}
    for key, (style, marker, color, name) in styles.items():
        if color == "black":
            right.plot(middles, curves[key].T, style, color="0.75", lw=0.7)
        options = {"color": "black", "marker": marker, "mfc": color, "label": name}
        right.plot(middles, curves[key].mean(axis=0), style, **options)
    right.axhline(0, color="black", linestyle=":", lw=0.8)
    right.set(title="All facts (grey), and their mean", ylabel=label)
    right.set(xlabel="middle of the window (layer)", ylim=(-0.05, 1.1))
    right.legend(loc="upper center")
    return fig
