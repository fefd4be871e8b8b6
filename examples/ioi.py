"""Patch a real language model everywhere: all residual streams in one call, all heads in another.

    python -m examples.ioi

"When Mary and John went to the store, John gave a drink to" is to end with " Mary": the name that
is there only once (indirect object identification: Wang et al., 2022, arXiv:2211.00593). In a
corrupted prompt, the second " John" is another " Mary". Where does the difference travel?

1. With other names, too, the model is right; and what it says is a sum, of what each head and each
   MLP adds for the right name and against the wrong one (direct logit attribution).
2. The residual stream of the clean run is patched into the corrupted one, at each of 30 layers and
   14 positions: the information waits at the second name, and moves to the last token.
3. The same for the output of each of the 270 heads: which ones move it.
4. Both to first order, each from one backward pass (Neel Nanda, "Attribution Patching: Activation
   Patching At Industrial Scale", 2023): nearly as good for heads, worse for the residual stream.

Takes about half a minute, and writes its figure to `examples/out`. "Other run" in the table:
independent code for the same, which was thrown away (JAX 0.12.0, Equinox 0.13.8).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import ioi as figures
from .models import smollm2

PROMPT = "When {} and {} went to the store, {} gave a drink to"
CLEAN, CORRUPTED = PROMPT.format("Mary", "John", "John"), PROMPT.format("Mary", "John", "Mary")
ANSWER, WRONG = " Mary", " John"
NAMES = "Mary John Tom James Sarah Anna David Paul Mark Peter Alice Robert".split()


def logit_difference(
    model: smollm2.SmolLM2, tokens: Int[Array, " T"], answer: Array, wrong: Array
) -> Float[Array, ""]:
    """How much likelier the right name is to come next, in nats."""
    logits = model(tokens)[-1]
    return logits[answer] - logits[wrong]


@eqx.filter_jit
@eqx.filter_vmap(in_axes=(None, 0, 0, 0))
def contributions(
    model: smollm2.SmolLM2, *args: Int[Array, "..."]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, "L H"], Float[Array, " L"]]:
    """The logit difference, and what embeddings, heads and MLPs add to it: it is their sum."""
    last = {key: lambda x: x[-1] for key in ("embed", "z", "mlp_out", "final_scale")}
    difference, acts = harvest.capture(logit_difference, last, mode="strict")(model, *args)
    _, answer, wrong = args
    towards = (model.embedding[answer] - model.embedding[wrong]) * model.norm.weight
    towards *= acts["final_scale"]  # of the last norm, at the last token
    assert isinstance(model.blocks, smollm2.Block)
    heads = jnp.einsum("lhk,lhkd,d->lh", acts["z"], model.blocks.attention.output, towards)
    return difference, acts["embed"] @ towards, heads, acts["mlp_out"] @ towards


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
        clean, corrupted = smollm2.encode_equal(tokenizer, [CLEAN, CORRUPTED])
        answer, wrong = smollm2.encode_words(tokenizer, [ANSWER, WRONG])
        words = [tokenizer.decode([i]) for i in corrupted.tolist()]
    (second,) = np.flatnonzero(clean != corrupted)

    with report.step("Other names, and what each part of the model adds"):
        pairs = [(a, NAMES[i - back]) for i, a in enumerate(NAMES) for back in (1, 2)]
        ids = smollm2.encode_words(tokenizer, [f" {name}" for pair in pairs for name in pair])
        tokens = smollm2.encode_equal(tokenizer, [PROMPT.format(a, b, b) for a, b in pairs])
        differences, *parts = map(np.asarray, contributions(model, tokens, *ids.reshape(-1, 2).T))
        n = len(pairs)
        total = sum(part.reshape(n, -1).sum(axis=1) for part in parts)
        _, direct, mlps = (part.mean(axis=0) for part in parts)

    with report.step("Running the clean and the corrupted prompt"):
        capture = harvest.capture(logit_difference, ["resid_post", "z"], mode="strict")
        best, acts = capture(model, clean, answer, wrong)
        args = model, corrupted, answer, wrong
        worst = jax.block_until_ready(logit_difference(*args))

    def restored(values: Float[Array, "..."]) -> Float[np.ndarray, "..."]:
        """0: as in the corrupted run, 1: as in the clean one."""
        return np.asarray((values - worst) / (best - worst))

    positions, heads = jnp.arange(len(clean)), jnp.arange(acts["z"].shape[2])
    resid_args = {"resid_post": acts["resid_post"]}, at_position, harvest.grid(position=positions)
    head_args = {"z": acts["z"]}, at_head, harvest.grid(head=heads)

    report.console.print("Patching the residual stream at each layer and position, then each head")
    swept = harvest.sweep(logit_difference, *resid_args, progress=True)(*args)
    by_position = restored(swept["resid_post"])
    swept = harvest.sweep(logit_difference, *head_args, progress=True)(*args)
    by_head = restored(swept["z"])
    with report.step("Estimating both, each from one backward pass"):
        of_heads = by_head, restored(harvest.attribute(logit_difference, *head_args)(*args)["z"])
        coarse = restored(harvest.attribute(logit_difference, *resid_args)(*args)["resid_post"])
        of_resid = by_position[:, second:], coarse[:, second:]  # from where the prompts differ on

    with report.step("Drawing"):
        figure = figures.patching(by_position, words, of_heads, of_resid, direct, mlps, n)
        report.save(figure, "ioi.png")

    heads_r, resid_r = (float(np.corrcoef([*map(np.ravel, x)])[0, 1]) for x in (of_heads, of_resid))
    rank = int((by_head > by_head.flat[direct.argmax()]).sum()) + 1
    expect, mean, off = report.expect, float(differences.mean()), abs(total - differences).max()
    lower = max(direct[29, 0], direct[24, 4])
    expect(f"right names, of {n}", int((differences > 0).sum()), n, n, "other run")
    expect("mean logit difference", mean, 3.8, 5.8, "other run: 4.79")
    expect("... sum of the parts, off by", float(off), 0, 1e-4, "identity")
    expect("... heads 29.0 and 24.4 add", lower, -math.inf, -0.3, "Wang et al.: negative heads")
    expect("best head: its rank by patching", rank, 1, 1, "Wang et al.: name mover")
    expect("logit difference, clean", float(best), 2, math.inf, "it knows the task")
    expect("... corrupted", float(worst), -math.inf, -2, "and follows the names")
    unaffected = float(abs(by_position[:, :second]).max())
    expect("restored before the names differ", unaffected, 0, 1e-4, "equal activations")
    expect("... at the second name, layer 10", by_position[10, second], 0.9, 1.1, "not moved yet")
    expect("... there, layer 28", by_position[28, second], -0.1, 0.1, "moved")
    expect("... at the last token, layer 10", by_position[10, -1], -0.1, 0.1, "not there yet")
    expect("... there, layer 29", by_position[29, -1], 0.999, 1.001, "all that is read")
    expect("estimate and exact: correlation, heads", heads_r, 0.9, 1, "Nanda, 2023")
    expect("... residual stream", resid_r, -math.inf, heads_r, "Nanda, 2023: worse")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
