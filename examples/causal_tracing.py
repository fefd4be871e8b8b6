"""Hide the subject of a fact under noise, and find what restores the answer.

    python -m examples.causal_tracing

Noise on the embeddings of a subject ("The Eiffel Tower") makes a model lose the answer (" Paris").
Then what some layers computed at one token is made what it was without noise: does the answer come
back? (Meng et al., 2022, "Locating and Editing Factual Associations in GPT", arXiv:2202.05262.)

1. MLPs, in windows of seven layers, for seven facts: they matter about layers 1 to 3 of 30, at the
   best token of the subject. (In the paper: in middle layers, at its last token; drawn as well.)
2. Attention, likewise: it matters in late layers, at the last token.

Takes about a minute, and writes its figure to `examples/out`. "Other run" in the table: the same
from independent code that was thrown away, with other noise (JAX 0.12.0, Equinox 0.13.8).
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
    answer = smollm2.encode_words(tokenizer, answers)
    _, subject = smollm2.encode(tokenizer, subjects)
    on = jnp.arange(tokens.shape[1])[None] < subject[:, None]
    shape = (len(FACTS), N_NOISE, tokens.shape[1], embedding.shape[1])
    noise = STRENGTH * jnp.std(embedding) * jax.random.normal(key, shape)
    return Fact(tokens, length, subject, answer, jnp.where(on[:, None, :, None], noise, 0))


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
    near = (abs(jnp.arange(len(clean)) - layer) <= REACH)[:, None, None]

    def run(row: Int[Array, "2"]) -> Float[Array, ""]:
        fact = jax.tree.map(lambda x: x[row[0]], facts)
        at = jnp.where(near & (jnp.arange(fact.tokens.size) == row[1])[None, :, None], 1.0, 0.0)
        restore = harvest.chain(harvest.scale(1 - at), harvest.add(at * clean[:, row[0]]))
        return probabilities(model, fact, {key: harvest.each(restore)})[0]

    return jax.lax.map(run, rows, batch_size=8)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the noise."""
    report = Report(out)

    with report.step("Loading SmolLM2-135M-Instruct, and reading the facts"):
        model, tokenizer = smollm2.load()
        facts = encode(tokenizer, model.embedding, jax.random.key(seed))
        length, subject = facts.length.tolist(), facts.subject.tolist()
        clean = harvest.reap(jax.vmap(model), ["mlp_out", "attn_out"])(facts.tokens, facts.length)

    recall, recalled = eqx.filter_jit(probabilities), []
    for i, what in enumerate(report.track(FACTS, "Recalling facts, without and with noise")):
        fact = jax.tree.map(lambda x, i=i: x[i], facts)
        clear, noisy = (recall(model, fact._replace(noise=k * fact.noise), {}) for k in (0, 1))
        recalled.append([*clear, noisy[0]])
        report.console.print(f"  {''.join(what)}: {clear[0]:.2f}, with noise {noisy[0]:.3f}")
    known, likeliest, blurred = (np.asarray(values) for values in zip(*recalled, strict=True))

    tried = {"mlp_out": [range(n) for n in subject], "attn_out": [[n - 1] for n in length]}
    maps, curves = {}, {}
    for key, tokens in tried.items():
        pairs = {(fact, token) for fact, of in enumerate(tokens) for token in of}
        rows = sorted(pairs | {(0, token) for token in range(length[0])})  # all of one, for a map
        fact, effects = np.asarray(rows)[:, 0], []
        for layer in report.track(MIDDLES, f"Restoring {key} of {2 * REACH + 1} layers"):
            args = model, facts, clean[key], jnp.asarray(rows), jnp.asarray(layer)
            effects.append((restored(*args, key) - blurred[fact]) / (known - blurred)[fact])
        of_row = dict(zip(rows, np.stack(effects, axis=1), strict=True))
        maps[key] = np.stack([of_row[0, token] for token in range(length[0])], axis=1)
        best = [max((of_row[f, t] for t in of), key=np.max) for f, of in enumerate(tokens)]
        curves[key] = np.stack(best)  # (facts, windows)
        curves[f"{key}, end"] = np.stack([of_row[f, of[-1]] for f, of in enumerate(tokens)])

    with report.step("Drawing"):
        ids = facts.tokens[0, : length[0]].tolist()
        words = [tokenizer.decode([i]) + "*" * (n < subject[0]) for n, i in enumerate(ids)]
        report.save(figures.tracing(maps, words, MIDDLES, curves), "causal_tracing.png")

    mlp, end, attention, _ = (values.mean(axis=0) for values in curves.values())
    expect, paper, middle, n = report.expect, "Meng et al., fig. 2", np.asarray(MIDDLES), len(FACTS)
    expect("facts it says", int((known == likeliest).sum()), n, n, "so chosen")
    expect("... least likely", float(known.min()), 0.2, 1, "so chosen")
    expect("with noise, likeliest answer", float(blurred.max()), 0, 0.1, "other run: 0.04")
    expect("MLPs: best layer", MIDDLES[mlp.argmax()], 0, 7, f"{paper}: early site")
    expect("... restored there", mlp.max(), 0.25, 1, "other run: 0.39")
    expect("... at the subject's last token", end.max(), 0.05, mlp.max(), f"{paper}: its token")
    expect("... from layer 13 on, most", mlp[middle >= 13].max(), -0.05, 0.05, "other run: 0.02")
    expect("attention: best layer", MIDDLES[attention.argmax()], 18, 26, f"{paper}: late site")
    expect("... restored there", attention.max(), 0.25, 1, "other run: 0.70")
    expect("... up to layer 13, most", attention[middle <= 13].max(), -0.05, 0.05, "other run: 0")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
