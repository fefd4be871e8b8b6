"""The figure of `induction_heads`."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure


def induction_heads(
    patterns: Mapping[str, Float[Array, "T T"]],
    one: Float[Array, "n T-1"],
    two: Float[Array, "n T-1"],
    period: Int[Array, " n"],
    wires: Float[np.ndarray, "3 cuts"],
    cuts: Sequence[str],
) -> Figure:
    """What two heads attend to, what is learnt, and what each wire between the layers is for.

    **Arguments:**

    - `patterns`: the attention patterns of a head of each layer, on one sequence.
    - `one`, `two`: the losses of the tokens after the first, by how many layers there are.
    - `period`: how long the block is that each sequence repeats.
    - `wires`: the loss with some heads cut from the queries, keys or values.
    - `cuts`: which heads those are.
    """
    fig, axes = plt.subplots(2, 2, figsize=(11, 9.5), layout="constrained")
    longest = int(period.max())
    titles = [f"attends to the previous token\nup to token {longest}, as long as a block can be"]
    titles += ["attends to what came next\nwhen its token was there before"]
    for ax, title, (name, pattern) in zip(axes[0], titles, patterns.items(), strict=True):
        ax.imshow(np.asarray(pattern), cmap="Greys", vmin=0, vmax=1)
        ax.set(title=f"Head {name} {title}", xlabel="token attended to", ylabel="token")
    label = "attention (0: none of it, 1: all of it)"
    fig.colorbar(axes[0, 0].images[0], ax=axes[0].tolist(), label=label)

    left, right = axes[1]
    places = np.arange(-5, 28)
    for curves, style, name in [(one, "k--", "one layer"), (two, "k-", "two layers")]:
        left.plot(places, by_place(curves, period, places), style, label=name)
    left.axvspan(0.5, places[-1], color="0.92", zorder=0, label="can be copied")
    left.set(title="What is learnt", xlabel="token, counted from the first repeated one")
    left.set(ylabel="loss (nats)", xlim=(places[0], places[-1]), ylim=(0, None))
    left.legend()

    image = right.imshow(wires, cmap="Greys", vmin=0, vmax=wires.max(), aspect="auto")
    for (i, j), loss in np.ndenumerate(wires):
        color = "white" if loss > wires.max() / 2 else "black"
        right.text(j, i, f"{loss:.3f}", color=color, ha="center", va="center")
    right.set_yticks(range(3), ["queries", "keys", "values"])
    right.set_xticks(range(len(cuts)), cuts)
    right.set(title="Wires cut between the layers", xlabel="cut from layer 0")
    right.set(ylabel="read by, in layer 1")
    fig.colorbar(image, ax=right, label="loss of repeated tokens (nats; 0: copied perfectly)")
    return fig


def by_place(
    losses: Float[Array, "n T-1"], period: Int[Array, " n"], places: Int[np.ndarray, " p"]
) -> Float[Array, " p"]:
    """The mean loss of tokens by where they are, counted from the first that is repeated."""
    # The first loss is that of token 1.
    index = period[:, None] + jnp.asarray(places)[None] - 1
    return jnp.take_along_axis(losses, index, axis=1).mean(axis=0)
