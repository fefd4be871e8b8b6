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
from .models import smollm2

PROMPT, ANSWER = "The capital of France is", " Paris"
PERIOD = 40  # tokens before a sequence repeats itself
PREVIOUS = 16, 0  # attends to the token before: what it writes is what induction heads look for


def induction_scores(
    pattern: Float[Array, "layers batch heads T T"],
) -> Float[Array, "layers heads"]:
    """How much each head attends from a repeated token to the one after its first copy."""
    diagonal = jnp.diagonal(pattern, offset=1 - PERIOD, axis1=-2, axis2=-1)
    # The first entry belongs to the last token of the first half, which repeats nothing.
    return jnp.mean(diagonal[..., 1:], axis=(1, 3))


def strongest_first(scores: Float[np.ndarray, "layers heads"]) -> Int[np.ndarray, "n 2"]:
    """The `(layer, head)` pairs of all heads."""
    order = np.unravel_index(np.argsort(-scores, axis=None), scores.shape)
    return np.stack(order, axis=1)


def all_but(
    heads: Int[np.ndarray, "n 2"], scores: Float[np.ndarray, "layers heads"]
) -> Float[Array, "layers heads 1"]:
    """What the output of every head is multiplied by, to silence some."""
    return jnp.ones((*scores.shape, 1)).at[heads[:, 0], heads[:, 1]].set(0)


@eqx.filter_jit
def losses(
    model: smollm2.SmolLM2, tokens: Int[Array, "batch T"], keep: Float[Array, "layers heads 1"]
) -> Float[Array, " T-1"]:
    """The loss at each token but the first, with the output of every head times `keep`."""
    heads = harvest.each(harvest.scale(keep))
    logits = harvest.plant(jax.vmap(model), {"z": heads})(tokens)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0], axis=0)


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
        half = jax.random.randint(token_key, (4, PERIOD), 0, len(model.embedding))
        tokens = jnp.tile(half, (1, 2))
        pattern = harvest.reap(eqx.filter_vmap(model), "pattern")(tokens)["pattern"]
        scores = np.asarray(induction_scores(pattern))
        ranked = strongest_first(scores)

    with report.step("Silencing the three strongest heads, then three others"):
        others = ranked[3:][(ranked[3:] != PREVIOUS).any(axis=1)]
        others = np.asarray(jax.random.choice(head_key, others, (3,), replace=False))
        silenced = {"nothing": ranked[:0], "induction heads": ranked[:3], "random heads": others}
        curves = {}
        for name, heads in silenced.items():
            curves[name] = np.asarray(losses(model, tokens, all_but(heads, scores)))

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
