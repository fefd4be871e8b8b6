"""Watch a transformer grok addition modulo 53, then show that it adds by turning circles.

    python -m examples.grokking

Taught 40% of all pairs, a small transformer soon knows these by heart, and that a + b is b + a, but
none of the others; long after, it suddenly adds all (Power et al., 2022, arXiv:2201.02177). By then
a number is an angle on each of a few circles, and the neurons hold cosines and sines of the sum
(Nanda et al., 2023, arXiv:2301.05217).

1. The model is trained until it has grokked.
2. Which frequencies its embedding of the numbers is made of: four or five of 26.
3. The neurons are collected for all pairs, and planted with nothing but these frequencies of a + b,
   and without them. Then each of all frequencies is taken out in turn.

Takes about half a minute, and writes its figure to `examples/out`. It is up to the seed when the
model groks: by step 900 with the default, which is one of the fastest; with others up to 2500.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

import harvest

from ._report import Report
from .figures import grokking as figures
from .models import modular, training
from .models.modular import ModularAdder

P, SHARE = 53, 0.4  # the modulus, which is odd, and the share of pairs that are taught
STEPS, CHUNK = 4000, 50  # at most so many, and how many between two looks at the accuracy
EARLY = 200  # the step at which it knows by heart, and is asked for what it was not taught
GROKKED = 1e-3  # when the loss of pairs that are new to it is below this


def losses(
    model: ModularAdder, pairs: Int[Array | np.ndarray, "n 2"]
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """The loss of each pair, and whether it is added right."""
    logits, answers = jax.vmap(model)(jnp.asarray(pairs)), pairs.sum(axis=1) % P
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
    return loss, logits.argmax(axis=1) == answers


def waves(frequency: Int[np.ndarray, " f"], n: Int[np.ndarray, " n"]) -> Float[Array, "f n 2"]:
    """Cosine and sine at each `n`: with every remainder equally often, vectors of length one."""
    angle = 2 * math.pi / P * (frequency[:, None] * n[None] % P)
    wave = np.stack([np.cos(angle), np.sin(angle)], axis=-1) * (2 / n.size) ** 0.5
    return jnp.asarray(wave, jnp.float32)


def take_out(neurons: Float[Array, " M"], row: dict[str, Array]) -> Float[Array, " M"]:
    """The edit of one experiment: the neurons without one frequency of the sum."""
    return neurons - row["wave"] @ row["along"]


def train(
    seed: int, pairs: Int[np.ndarray, "p*p 2"], report: Report
) -> tuple[ModularAdder, Float[np.ndarray, "looks 4"]]:
    """The model when it has grokked, and what was seen on the way there.

    **Returns:**

    The model, and for each look at it the steps so far, and the accuracy on the pairs that are
    taught, on their mirror images (b, a), and on all others.
    """
    model_key, pair_key = jax.random.split(jax.random.key(seed + 1))  # 1 groks earlier than 0
    taught = np.zeros((P, P), bool)
    taught.flat[np.asarray(jax.random.permutation(pair_key, P * P))[: int(SHARE * P * P)]] = True
    groups = [m.ravel() for m in (taught, taught.T & ~taught, ~(taught | taught.T))]
    model = modular.make(model_key, P)
    optimiser = optax.adamw(optax.linear_schedule(0, 5e-3, 10), b2=0.98, weight_decay=1.0)
    state, seen, look = training.init(model, optimiser), [], eqx.filter_jit(losses)
    loss = lambda model, _: losses(model, jnp.asarray(pairs[groups[0]]))[0].mean()
    chunks = np.split(np.arange(STEPS), range(CHUNK, STEPS, CHUNK))
    for steps in report.track(chunks, "Training until it groks"):
        model, state, _ = training.steps(model, state, steps, loss, optimiser)
        each, right = (np.asarray(x) for x in look(model, pairs))
        seen.append([steps[-1] + 1, *(right[group].mean() for group in groups)])
        if each[groups[2]].mean() < GROKKED:
            break
    return model, np.asarray(seen)


def knows_at(seen: Float[np.ndarray, "looks 4"]) -> float:
    """The first step at which all that is taught is known: infinity if there is none."""
    return float(min(seen[seen[:, 1] == 1, 0], default=math.inf))


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the weights to start from, and the pairs that are taught."""
    report = Report(out)
    pairs = np.stack(np.divmod(np.arange(P * P), P), axis=1)
    frequencies = np.arange(1, P // 2 + 1)
    model, seen = train(seed, pairs, report)

    with report.step("Finding the frequencies of the embedding"):
        numbers = jnp.einsum("fnw,nd->fwd", waves(frequencies, np.arange(P)), model.embedding[:P])
        power = np.asarray(jnp.sum(numbers**2, axis=(1, 2)))
        power = power / power.sum()
        strongest = np.argsort(-power)
        keys = strongest[: 1 + np.searchsorted(np.cumsum(power[strongest]), 0.85)]

    with report.step("Planting neurons with and without them"):
        run = lambda plants: harvest.plant(losses, plants)(model, pairs)
        (loss, right), acts = harvest.capture(losses, "mlp_post", mode="strict")(model, pairs)
        neurons, wave = acts["mlp_post"], waves(frequencies, pairs.sum(axis=1))
        along = jnp.einsum("fnw,nm->fwm", wave, neurons)
        part = jnp.einsum("fnw,fwm->nm", wave[keys], along[keys])
        _, restricted = run({"mlp_post": neurons.mean(axis=0, keepdims=True) + part})
        _, excluded = run({"mlp_post": neurons - part})

    with report.step("Taking out each frequency in turn"):
        grid = {"wave": harvest.per_example(wave), "along": along}
        swept = harvest.sweep(losses, "mlp_post", take_out, grid)(model, pairs)
        without, _ = swept["mlp_post"]
        added = np.asarray(without.mean(axis=1) - loss.mean())

    with report.step("Drawing"):
        # Each number, along the directions in which one frequency goes.
        ahead = numbers[keys[:4]] / jnp.linalg.norm(numbers[keys[:4]], axis=2, keepdims=True)
        points = jnp.einsum("nd,fwd->fnw", model.embedding[:P], ahead)
        circles = dict(zip(frequencies[keys[:4]].tolist(), points, strict=True))
        figure = figures.grokking(seen, power, added, keys, circles)
        report.save(figure, "grokking.png")

    early = min(np.searchsorted(seen[:, 0], EARLY), len(seen) - 1)
    step, _, mirrored, found = seen[early].tolist()
    expect, accuracy = report.expect, lambda right: float(right.mean())
    expect("step by which it knows what is taught", knows_at(seen), 0, 300, "Power et al., fig. 1")
    expect(f"mirror images, accuracy at step {step:.0f}", mirrored, 0.5, 1, "a + b = b + a")
    expect("... all other pairs, then", found, 0, 0.1, f"chance is {1 / P:.3f}")
    expect("... in the end", float(seen[-1, 3]), 0.99, 1, "Power et al., fig. 1")
    expect("frequencies with 85% of the embedding", len(keys), 1, 6, "Nanda et al., 4.1: 5 of 56")
    expect("accuracy with these alone", accuracy(restricted), 0.99, 1, "Nanda et al., section 5")
    expect("... without them", accuracy(excluded), 0, 0.1, "Nanda et al., section 5")
    others = float(np.delete(added, keys).max())
    expect("loss added without any one other", others, -math.inf, 0.01, "Nanda et al., section 4.4")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
