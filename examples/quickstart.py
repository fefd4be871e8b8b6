"""Collect, replace and differentiate the activations of a real language model.

    python -m examples.quickstart

1. What SmolLM2 expects after "The capital of France is".
2. Which of its 270 heads are induction heads: in a sequence that repeats itself, these look
   at the token that came next the last time (Olsson et al., 2022, arXiv:2209.11895).
3. What the loss becomes when the three strongest are silenced, or three others.
4. How much the answer " Paris" depends on the residual stream, layer by layer.

Takes about half a minute, and writes its figures to `examples/out`.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import quickstart as figures
from .models import induction, smollm2
from .models.induction import PERIOD

PROMPT, ANSWER = "The capital of France is", " Paris"
PREVIOUS = 16, 0  # attends to the token before: what it writes is what induction heads look for


@eqx.filter_jit
def silenced(
    model: smollm2.SmolLM2, tokens: Int[Array, "batch T"], keep: Float[Array, "layers heads 1"]
) -> Float[Array, " T-1"]:
    """The loss at each token but the first, with the output of every head times `keep`."""
    heads = harvest.each(harvest.scale(keep))
    return harvest.plant(induction.losses, {"z": heads})(model, tokens)


@eqx.filter_jit
def residual_gradients(
    model: smollm2.SmolLM2, tokens: Int[Array, " T"], answer: int
) -> Float[Array, "layers T D"]:
    """The gradient of the answer's log probability at the residual stream after each layer."""

    def log_p(model, tokens):
        return jax.nn.log_softmax(model(tokens)[-1])[answer]

    return harvest.grad(log_p, "resid_post")(model, tokens)["resid_post"]


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the random tokens and the random heads."""
    report = Report(out)
    token_key, head_key = jax.random.split(jax.random.key(seed))

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()

    with report.step(f"Reading {PROMPT!r}"):
        prompt = tokenizer.encode(PROMPT).ids
        (answer,) = tokenizer.encode(ANSWER).ids
        probability = np.asarray(jax.nn.softmax(eqx.filter_jit(model)(jnp.asarray(prompt))[-1]))
    for i in np.argsort(-probability)[:5]:
        report.console.print(f"  {probability[i]:.3f} {tokenizer.decode([i])!r}")

    with report.step("Scoring the attention patterns of all heads"):
        tokens = induction.repeated(token_key, 4, len(model.embedding))
        pattern = harvest.reap(eqx.filter_vmap(model), "pattern")(tokens)["pattern"]
        scores = np.asarray(induction.scores(pattern))
        ranked = induction.strongest_first(scores)

    with report.step("Silencing the three strongest heads, then three others"):
        others = ranked[3:][(ranked[3:] != PREVIOUS).any(axis=1)]
        others = np.asarray(jax.random.choice(head_key, others, (3,), replace=False))
        off = {"nothing": ranked[:0], "induction heads": ranked[:3], "random heads": others}
        curves = {}
        for name, heads in off.items():
            keep = induction.all_but(heads, scores)
            curves[name] = np.asarray(silenced(model, tokens, keep))

    with report.step(f"Differentiating log P({ANSWER!r}) at every layer"):
        gradients = residual_gradients(model, jnp.asarray(prompt), answer)
        norms = np.asarray(jnp.linalg.norm(gradients, axis=-1))

    with report.step("Drawing"):
        figure = figures.induction_heads(scores, ranked[:3], curves)
        report.save(figure, "quickstart_heads.png")
        words = [tokenizer.decode([i]) for i in prompt]
        figure = figures.residual_gradients(norms, words, ANSWER)
        report.save(figure, "quickstart_gradients.png")

    first = {name: float(curve[: PERIOD - 1].mean()) for name, curve in curves.items()}
    second = {name: float(curve[PERIOD:].mean()) for name, curve in curves.items()}
    drift = max(abs(loss - first["nothing"]) for loss in first.values())
    uniform, rank = math.log(len(model.embedding)), 1 + ranked.tolist().index([18, 6])
    change = second["random heads"] - second["nothing"]
    expect = report.expect
    expect(f"P({ANSWER!r})", float(probability[answer]), 0.768, 0.778, "transformers 5.24")
    expect("rank of head 18.6", rank, 1, 1, "independent survey")
    expect("score of head 18.6", float(scores[18, 6]), 0.85, 1, "independent survey")
    expect("loss, first half", first["nothing"], uniform, math.inf, "random tokens")
    expect("loss, second half", second["nothing"], 0, uniform / 2, "is a copy")
    expect("... no induction heads", second["induction heads"], 6, math.inf, "they copy")
    expect("... change, 3 others off", change, -0.5, 0.5, "others do not")
    expect("... change in first half", drift, 0, 0.3, "nothing to copy")
    expect("gradient, unread tokens", float(norms[-1, :-1].max()), 0, 0, "causal attention")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
