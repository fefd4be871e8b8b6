"""Read the residual stream after every layer as if it were the last.

    python -m examples.logit_lens

The last residual is normalised and compared with the embedding of every word; that makes the
logits. The same can be done after any layer, to see what the model would say if it stopped there:
the logit lens (nostalgebraist, 2020, "interpreting GPT: the logit lens"; tested by Belrose et al.,
2023, arXiv:2303.08112).

1. The lens is a reducer: it runs at the site, in each layer, and no residual is kept.
2. Five prompts: how many words are likelier than the answer, layer by layer. Hundreds to thousands
   for two thirds of the layers, none at the end.
3. What each token of one prompt would be followed by, after each layer.

Takes about ten seconds, and writes its figure to `examples/out`. "Other run" in the table: the same
from independent code that was thrown away (JAX 0.12.0, Equinox 0.13.8).
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import logit_lens as figures
from .models import smollm2

PROMPTS = {  # and the answer to each, of which the first token is read
    "The capital of France is": " Paris",
    "The capital of Japan is": " Tokyo",
    "The Eiffel Tower is located in the city of": " Paris",
    "The opposite of hot is": " cold",
    "The chemical symbol for gold is": " Au",
}
DRAWN = 2  # which of them the figure shows word for word


class Reading(NamedTuple):
    """What the lens sees at each token."""

    word: Int[Array, "*layers T"]  # the likeliest next
    probability: Float[Array, "*layers T"]  # of that word
    ahead: Int[Array, "*layers T"]  # how many words are likelier than the answer


class Lens(eqx.Module):
    """A reducer: a residual stream, read as the model reads its last one."""

    norm: smollm2.RMSNorm
    embedding: Float[Array, "vocab D"]
    answer: Int[Array, ""]

    def __call__(self, resid: Float[Array, "T D"]) -> Reading:
        logits = self.norm(resid) @ self.embedding.T  # (T, vocab)
        probability = jax.nn.softmax(logits).max(axis=-1)
        ahead = jnp.sum(logits > logits[:, self.answer, None], axis=-1)
        return Reading(logits.argmax(axis=-1), probability, ahead)


@eqx.filter_jit
@eqx.filter_vmap(in_axes=(None, 0, 0, 0))
def read(
    model: smollm2.SmolLM2,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    answer: Int[Array, ""],
) -> tuple[Reading, Float[Array, " T"]]:
    """The lens after no layer, after one, and so on; and the model's own probabilities."""
    lens = Lens(model.norm, model.embedding, answer)
    select = {"embed": lens, "resid_post": lens}
    logits, seen = harvest.capture(model, select, mode="strict")(tokens, length)
    prepend = lambda first, rest: jnp.concatenate([first[None], rest])
    readings = jax.tree.map(prepend, seen["embed"], seen["resid_post"])
    return readings, jax.nn.softmax(logits).max(axis=-1)


def leads_after(ahead: Int[np.ndarray, " layers"]) -> int | None:
    """How many layers have been read when the answer leads for good; `None` if it never does."""
    layers = int(np.flatnonzero(ahead > 0).max(initial=-1)) + 1
    return layers if layers < len(ahead) else None


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; nothing here is random, and `seed` is not used."""
    report = Report(out)

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        tokens, length = smollm2.encode(tokenizer, list(PROMPTS))
        answers, _ = smollm2.encode(tokenizer, list(PROMPTS.values()))

    with report.step(f"Reading {len(PROMPTS)} prompts after every layer"):
        seen = read(model, tokens, length, answers[:, 0])
        readings, own = jax.tree.map(np.asarray, seen)
        last = np.asarray(length) - 1
        ahead = readings.ahead[np.arange(len(last)), :, last]  # (prompts, layers)
    for line, (prompt, answer) in zip(ahead, PROMPTS.items(), strict=True):
        layers = leads_after(line)
        what = "does not lead" if layers is None else f"leads once {layers} layers have been read"
        report.console.print(f"  {prompt!r}: {answer!r} {what}")

    with report.step("Drawing"):
        shown = slice(0, last[DRAWN] + 1)
        words = [[tokenizer.decode([i]) for i in row[shown]] for row in readings.word[DRAWN]]
        prompt = [tokenizer.decode([i]) for i in tokens[DRAWN, shown].tolist()]
        labels = [f"{prompt} ...{answer}" for prompt, answer in PROMPTS.items()]
        probability = readings.probability[DRAWN, :, shown]
        figure = figures.logit_lens(prompt, words, probability, labels, ahead)
        report.save(figure, "logit_lens.png")

    difference = np.abs(readings.probability[:, -1] - own)
    off = max(float(row[: n + 1].max()) for row, n in zip(difference, last, strict=True))
    nearer = int(np.sum(ahead[:, 27] < ahead[:, 20]))
    expect, n = report.expect, len(last)
    late = "nostalgebraist: late"
    expect("words ahead, 20 layers, least", ahead[:, 20].min(), 101, math.inf, late)
    expect("... 30 layers, most", ahead[:, 30].max(), 0, 0, "so chosen")
    expect("prompts with fewer at 27 than 20", nearer, n, n, late)
    expect("ahead of ' Paris', least of 0-23", ahead[0, :24].min(), 2000, math.inf, "other run")
    expect("... 24 layers", ahead[0, 24], 350, 440, "other run")
    expect("last layer, lens and model", off, 0, 1e-4, "same computation")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
