"""Patch the activations of a real language model, everywhere, in one call.

    python -m examples.ioi

"When Mary and John went to the store, John gave a drink to" is to end with " Mary": the name that
is there only once (indirect object identification: Wang et al., 2022, arXiv:2211.00593). In a
corrupted prompt, the second " John" is another " Mary". Where does the difference travel?

1. The residual stream of the clean run is patched into the corrupted one, at each of 30 layers and
   14 positions, one at a time: the information waits at the second name, and moves to the last
   token.
2. The same for the output of each of the 270 heads: which ones move it.
3. And to first order from a single backward pass (attribution patching): for heads, nearly as good.

Takes about half a minute, and writes its figure to `examples/out`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import ioi as figures
from .models import smollm2

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
ANSWER, WRONG = " Mary", " John"


def at_position(
    resid: Float[Array, "T D"], clean: Float[Array, "T D"], row: dict[str, Int[Array, ""]]
) -> Float[Array, "T D"]:
    """The edit of one experiment: one position as in the clean run."""
    return resid.at[row["position"]].set(clean[row["position"]])


def at_head(
    z: Float[Array, "T H K"], clean: Float[Array, "T H K"], row: dict[str, Int[Array, ""]]
) -> Float[Array, "T H K"]:
    """The edit of one experiment: the output of one head as in the clean run."""
    return z.at[:, row["head"]].set(clean[:, row["head"]])


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; nothing here is random, and `seed` is not used."""
    report = Report(out)

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        clean, corrupted = (jnp.asarray(tokenizer.encode(p).ids) for p in (CLEAN, CORRUPTED))
        (answer,), (wrong,) = (tokenizer.encode(word).ids for word in (ANSWER, WRONG))
        words = [tokenizer.decode([i]) for i in corrupted]
    (second,) = np.flatnonzero(clean != corrupted)

    def logit_difference(model: smollm2.SmolLM2, tokens: Int[Array, " T"]) -> Float[Array, ""]:
        logits = model(tokens)[-1]
        return logits[answer] - logits[wrong]

    with report.step("Running the clean and the corrupted prompt"):
        best, acts = harvest.capture(logit_difference, ["resid_post", "z"], mode="strict")(
            model, clean
        )
        worst = jax.block_until_ready(logit_difference(model, corrupted))

    def restored(values: Float[Array, "..."]) -> Float[np.ndarray, "..."]:
        """0: as in the corrupted run, 1: as in the clean one."""
        return np.asarray((values - worst) / (best - worst))

    positions, heads = jnp.arange(len(clean)), jnp.arange(acts["z"].shape[2])
    resid_args = {"resid_post": acts["resid_post"]}, at_position, harvest.grid(position=positions)
    head_args = {"z": acts["z"]}, at_head, harvest.grid(head=heads)

    report.console.print("Patching the residual stream, at each layer and position")
    swept = harvest.sweep(logit_difference, *resid_args, progress=True)(model, corrupted)
    by_position = restored(swept["resid_post"])
    report.console.print("Patching each head")
    swept = harvest.sweep(logit_difference, *head_args, progress=True)(model, corrupted)
    by_head = restored(swept["z"])
    with report.step("Estimating that from one backward pass"):
        estimate = restored(harvest.attribute(logit_difference, *head_args)(model, corrupted)["z"])

    with report.step("Drawing"):
        figure = figures.patching(by_position, words, by_head, estimate)
        report.save(figure, "ioi.png")

    agreement = float(np.corrcoef(by_head.ravel(), estimate.ravel())[0, 1])
    expect = report.expect
    expect("logit difference, clean", float(best), 2, math.inf, "it knows the task")
    expect("... corrupted", float(worst), -math.inf, -2, "and follows the names")
    unaffected = float(abs(by_position[:, :second]).max())
    expect("restored before the names differ", unaffected, 0, 1e-4, "equal activations")
    expect("... at the second name, layer 10", by_position[10, second], 0.9, 1.1, "not moved yet")
    expect("... there, layer 28", by_position[28, second], -0.1, 0.1, "moved")
    expect("... at the last token, layer 10", by_position[10, -1], -0.1, 0.1, "not there yet")
    expect("... there, layer 29", by_position[29, -1], 0.999, 1.001, "all that is read")
    expect("correlation, estimate and exact", agreement, 0.9, 1, "Nanda, 2023")
    return report.finish()


if __name__ == "__main__":
    main().exit()
