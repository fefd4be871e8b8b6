"""Where a language model keeps a fact, and where it reads it.

    python -m examples.causal_tracing

The embeddings of a subject ("The Eiffel Tower") are blurred by noise, so that the model no longer
knows the answer (" Paris"). Then what some layers computed at one token is restored to what it was
without noise: does the answer come back? (Meng et al., 2022, "Locating and editing factual
associations in GPT", arXiv:2202.05262.)

1. Seven facts, and what the noise does to them.
2. MLPs, restored in a window of seven layers: they matter at a token of the subject, early.
3. Attention, likewise: it matters at the last token, late, when the answer is fetched.

Takes about a minute, and writes its figure to `examples/out`.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

import harvest

from ._report import Report
from .figures import causal_tracing as figures
from .models import smollm2

CITY, CAPITAL = " is located in the city of", " is the city of"
FACTS = [("The Eiffel Tower", CITY, " Paris"), ("The Colosseum", CITY, " Rome")]
FACTS += [("The Kremlin", CITY, " Moscow"), ("The Statue of Liberty", CITY, " New")]
FACTS += [("The Acropolis", CITY, " Athens"), ("The capital of France", CAPITAL, " Paris")]
FACTS += [("The capital of Japan", CAPITAL, " Tokyo")]
N_NOISE, STRENGTH = 2, 3  # samples, and standard deviations of the embeddings
MIDDLES, REACH = range(1, 30, 2), 3  # of windows of layers, and how far they go on either side


class Fact(NamedTuple):
    """A prompt and its answer, with noise on the subject; or all facts, with one more axis."""

    tokens: Int[Array, "*facts T"]
    length: Int[Array, "*facts"]
    subject: Int[Array, "*facts"]  # how many of the tokens, from the first one on
    answer: Int[Array, "*facts"]
    noise: Float[Array, "*facts samples T D"]


def encode(tokenizer: Any, embedding: Float[Array, "vocab D"], key: PRNGKeyArray) -> Fact:
    """All facts, with noise on the tokens of their subjects."""
    subjects, relations, answers = zip(*FACTS, strict=True)
    tokens, length = smollm2.encode(tokenizer, list(map(str.__add__, subjects, relations)))
    answer, _ = smollm2.encode(tokenizer, answers)
    _, subject = smollm2.encode(tokenizer, subjects)
    on = jnp.arange(tokens.shape[1])[None] < subject[:, None]
    shape = (len(FACTS), N_NOISE, tokens.shape[1], embedding.shape[1])
    noise = STRENGTH * jnp.std(embedding) * jax.random.normal(key, shape)
    return Fact(tokens, length, subject, answer[:, 0], jnp.where(on[:, None, :, None], noise, 0))


def probabilities(model: smollm2.SmolLM2, fact: Fact, edits: dict[str, Any]) -> Float[Array, "2"]:
    """Of the answer, and of the likeliest word, on average over the noise."""

    def run(noise: Float[Array, "T D"]) -> Float[Array, "2"]:
        planted = harvest.plant(model, {"embed": harvest.add(noise), **edits})
        # The logits of all other tokens are then not computed.
        final = harvest.reap(planted, "final")(fact.tokens, fact.length)["final"]
        p = jax.nn.softmax(model.embedding @ final[fact.length - 1])
        return jnp.stack([p[fact.answer], p.max()])

    return jnp.mean(jax.vmap(run)(fact.noise), axis=0)


@eqx.filter_jit
def restored(
    model: smollm2.SmolLM2,
    facts: Fact,
    clean: Float[Array, "layers facts T D"],
    rows: Int[Array, "rows 2"],
    layer: Int[Array, ""],
    key: str,
) -> Float[Array, " rows"]:
    """The answer's, with `key` around a layer as it was: a row is a fact and a token."""
    near = abs(jnp.arange(len(clean)) - layer) <= REACH

    def run(row: Int[Array, "2"]) -> Float[Array, ""]:
        fact = jax.tree.map(lambda x: x[row[0]], facts)
        at = near[:, None] & (jnp.arange(fact.tokens.size) == row[1])[None]
        at = jnp.where(at, 1.0, 0.0)[..., None]  # (layers, T, 1)
        restore = harvest.chain(harvest.scale(1 - at), harvest.add(at * clean[:, row[0]]))
        return probabilities(model, fact, {key: harvest.each(restore)})[0]

    return jax.lax.map(run, rows, batch_size=8)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the noise."""
    report = Report(out)

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        facts = encode(tokenizer, model.embedding, jax.random.key(seed))
        length, subject = facts.length.tolist(), facts.subject.tolist()

    with report.step(f"Recalling {len(FACTS)} facts, without and with noise"):
        recall = eqx.filter_jit(eqx.filter_vmap(probabilities, in_axes=(None, 0, None)))
        clear = facts._replace(noise=jnp.zeros_like(facts.noise[:, :1]))
        known, likeliest = np.asarray(recall(model, clear, {})).T
        blurred = np.asarray(recall(model, facts, {}))[:, 0]
        acts = harvest.reap(jax.vmap(model), ["mlp_out", "attn_out"])(facts.tokens, facts.length)
    for fact, p, noisy in zip(FACTS, known, blurred, strict=True):
        report.console.print(f"  {''.join(fact)}: {p:.2f}, with noise {noisy:.3f}")

    # All tokens of the first fact, for a map, and those of the others that matter.
    tried = {"mlp_out": [range(n) for n in subject], "attn_out": [[n - 1] for n in length]}
    maps, curves = {}, {}
    for key, tokens in tried.items():
        pairs = {(fact, token) for fact, of in enumerate(tokens) for token in of}
        rows = sorted(pairs | {(0, token) for token in range(length[0])})
        fact, effects = np.asarray(rows)[:, 0], []
        for layer in report.track(MIDDLES, f"Restoring {key} of {2 * REACH + 1} layers"):
            args = model, facts, acts[key], jnp.asarray(rows), jnp.asarray(layer)
            effects.append((restored(*args, key) - blurred[fact]) / (known - blurred)[fact])
        of_row = dict(zip(rows, np.stack(effects, axis=1), strict=True))
        maps[key] = np.stack([of_row[0, token] for token in range(length[0])], axis=1)
        best = [max((of_row[f, t] for t in of), key=np.max) for f, of in enumerate(tokens)]
        curves[key] = np.stack(best)  # (facts, windows)

    with report.step("Drawing"):
        ids = facts.tokens[0, : length[0]].tolist()
        words = [tokenizer.decode([i]) + "*" * (n < subject[0]) for n, i in enumerate(ids)]
        report.save(figures.tracing(maps, words, MIDDLES, curves), "causal_tracing.png")

    mlp, attention = (curves[key].mean(axis=0) for key in tried)
    expect, paper, middle, n = report.expect, "Meng, 2022", np.asarray(MIDDLES), len(FACTS)
    expect("facts it says", int((known == likeliest).sum()), n, n, "so chosen")
    expect("... least likely", known.min(), 0.2, 1, "so chosen")
    expect("with noise, likeliest answer", blurred.max(), 0, 0.1, "other run: 0.04")
    expect("MLPs: best layer", MIDDLES[mlp.argmax()], 0, 7, f"{paper}: early")
    expect("... restored there", mlp.max(), 0.25, 1, "other run: 0.39")
    expect("... from layer 13 on, most", mlp[middle >= 13].max(), -0.05, 0.05, "other run: 0.02")
    expect("attention: best layer", MIDDLES[attention.argmax()], 18, 26, f"{paper}: late")
    expect("... restored there", attention.max(), 0.25, 1, "other run: 0.70")
    expect("... up to layer 13, most", attention[middle <= 13].max(), -0.05, 0.05, "other run: 0")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
