"""Train a transformer until it copies, find the heads that do it, and cut the wires between them.

    python -m examples.induction_heads

Random tokens that repeat themselves can be continued by looking up where the current token was
before, and saying what came next: induction (Olsson et al., 2022, arXiv:2209.11895). That takes
two layers of attention, of which the first tells the keys of the second which token came before
them (Elhage et al., 2021, "A Mathematical Framework for Transformer Circuits").

1. A model of two layers learns it; one of a single layer, trained alike, does not.
2. What their heads attend to: the attention patterns are collected. The first layer looks at the
   token before only as long as a first block can last: what is copied later is copied from there.
3. Each wire from a head of the first layer to the queries, keys or values of the second is cut, by
   planting the head's mean output for that one reader (path patching): the keys alone need it.

Takes about a minute, and writes its figure to `examples/out`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import harvest

from ._report import Report
from .figures import induction_heads as figures
from .models import attention_only, training
from .models.attention_only import AttentionOnly

VOCAB, LENGTH = 64, 48
STEPS, BATCH = 800, 64
# Which of the two heads of the first layer are cut off, in each experiment.
CUTS = {"none": (0, 0), "head 0.0": (1, 0), "head 0.1": (0, 1), "both": (1, 1)}


def sequences(key: PRNGKeyArray, n: int) -> tuple[Int[Array, "n T"], Int[Array, " n"]]:
    """Blocks of different tokens, repeated, and the length of each block.

    That length is random: were it always the same, attending to a fixed distance would do.
    """
    token_key, period_key = jax.random.split(key)
    permute = lambda key: jax.random.permutation(key, VOCAB)
    block = jax.vmap(permute)(jax.random.split(token_key, n))
    period = jax.random.randint(period_key, (n,), 6, 21)
    return jnp.take_along_axis(block, jnp.arange(LENGTH)[None] % period[:, None], axis=1), period


def losses(model: AttentionOnly, tokens: Int[Array, "n T"]) -> Float[Array, "n T-1"]:
    """The loss at each token but the first."""
    logits = jax.vmap(model)(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def came_next(tokens: Int[Array, "n T"]) -> Bool[Array, "n T T"]:
    """Whether the key (last axis) comes right after an earlier copy of the query."""
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.tril(tokens[:, :, None] == before[:, None])


def induction_scores(
    pattern: Float[Array, "n H T T"], tokens: Int[Array, "n T"]
) -> Float[Array, " H"]:
    """How much each head attends to what came next, where the query has been there before."""
    right = came_next(tokens)[:, None]
    attended = jnp.sum(pattern, axis=-1, where=right)
    return jnp.mean(attended, axis=(0, 2), where=right.any(axis=-1))


@jax.jit
def by_distance(pattern: Float[Array, "n H T T"]) -> Float[Array, "H T"]:
    """How much each head attends to the token that many places back."""
    back = [jnp.diagonal(pattern, -d, axis1=2, axis2=3) for d in range(pattern.shape[-1])]
    return jnp.stack([attended.mean(axis=(0, 2)) for attended in back], axis=1)


def cut(
    resid: Float[Array, "T D"], change: Float[Array, "T H D"], off: Float[Array, " H"]
) -> Float[Array, "T D"]:
    """The edit of one experiment: a reader gets the mean output of some heads."""
    return resid + jnp.einsum("h,thd->td", off, change)


def train(depth: int, key: PRNGKeyArray, report: Report) -> AttentionOnly:
    """A model of so many layers, taught on new sequences at each step."""
    model_key, data_key = jax.random.split(key)
    model = attention_only.make(model_key, depth, vocab=VOCAB, length=LENGTH)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 50, STEPS, 3e-4)
    optimiser = optax.adamw(schedule, b2=0.98, weight_decay=0)
    loss = lambda model, key: losses(model, sequences(key, BATCH)[0]).mean()
    keys = list(jax.random.split(data_key, (STEPS // 50, 50)))
    chunks = report.track(keys, f"Training with layers: {depth}")
    return training.fit(model, chunks, loss, optimiser)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the weights to start from, and the sequences."""
    report = Report(out)
    test_key, key_one, key_two = jax.random.split(jax.random.key(seed), 3)
    one, two = train(1, key_one, report), train(2, key_two, report)
    tokens, period = sequences(test_key, 256)
    known = jnp.arange(1, LENGTH)[None] > period[:, None]  # the tokens that can be known

    with report.step("Collecting what the heads attend to"):
        select = ["layers/*/pattern", "layers/0/result"]
        loss_one, acts_one = harvest.capture(losses, select, mode="strict")(one, tokens)
        loss, acts = harvest.capture(losses, select, mode="strict")(two, tokens)
        first, second = acts["layers/0/pattern"], acts["layers/1/pattern"]
        alone = induction_scores(acts_one["layers/0/pattern"], tokens)
        scores, distances = induction_scores(second, tokens), by_distance(first)
        previous, induction = int(distances[:, 1].argmax()), int(scores.argmax())

    with report.step("Cutting each wire between the layers"):
        result = acts["layers/0/result"]
        change = result.mean(axis=(0, 1), keepdims=True) - result
        readers = {f"layers/1/{name}_in": change for name in "qkv"}
        off = jnp.asarray(list(CUTS.values()), jnp.float32)
        swept = harvest.sweep(losses, readers, cut, off)(two, tokens)
        wires = np.stack([np.mean(swept[key], axis=(1, 2), where=known) for key in readers])

    with report.step("Drawing"):
        example = int(jnp.argmax(period == 12))
        patterns = {f"0.{previous}": first[example, previous]}
        patterns |= {f"1.{induction}": second[example, induction]}
        figure = figures.induction_heads(patterns, loss_one, loss, period, wires, list(CUTS))
        report.save(figure, "induction_heads.png")

    mean = lambda values: float(np.mean(values, where=known))
    copied, expect, keys = mean(loss), report.expect, "Elhage et al.: K-composition"
    expect("loss, two layers", copied, 0, 0.05, f"a guess costs {math.log(VOCAB):.2f}")
    expect("... tokens given P > 1/2", mean(loss < math.log(2)), 0.99, 1, "it copies")
    expect("... one layer", mean(loss_one), 2, math.inf, "Elhage et al.: skip-trigrams")
    best = float(scores.max())
    expect("induction score, best of layer 1", best, 0.95, 1, "Olsson et al.: prefix matching")
    expect("... of one layer", float(alone.max()), 0, 0.2, "no head can")
    distance = int(distances[previous].argmax())
    expect(f"head 0.{previous} looks back by", distance, 1, 1, keys)
    uncut = float(abs(wires[:, 0] - copied).max())
    expect("loss changed by cutting nothing", uncut, 0, 1e-5, "an identity")
    bounds = {"Q": (0, 0.1), "K": (3, math.inf), "V": (0, 0.1)}
    for (name, bound), loss in zip(bounds.items(), wires[:, -1], strict=True):
        expect(f"... layer 0 cut from {name}", float(loss), *bound, keys)
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
