"""Squeeze five features into two channels, then take forty out of sixteen with an autoencoder.

    python -m examples.superposition

A model can hold more features than it has channels if most of them are zero most of the time, in
directions as far apart as can be (Elhage et al., 2022, arXiv:2209.10652). A sparse autoencoder
finds these directions from the channels alone (Cunningham et al., 2023, arXiv:2309.08600).

1. 24 models of two channels are trained at once, on features that are rarer and rarer: they hold
   two dimensions of them all, then four as two pairs of opposites, then five as a pentagon.
2. A model of 16 channels learns to hold 40. Its hidden values are collected, and an autoencoder is
   trained on them.
3. The autoencoder is planted where they were collected, and each of its latents is set to one, to
   see which features of the model's output move.

Takes about half a minute, and writes its figure to `examples/out`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray

import harvest

from ._report import Report
from .figures import superposition as figures
from .models import superposition, training
from .models.superposition import SAE, Toy

PRESENT = (1, 0.5, 0.25, 0.1, 0.05, 0.02)  # how often a feature is not zero
RESTARTS = 4
FEATURES, CHANNELS, RARE = 40, 16, 0.03
STEPS, STEPS_SAE, L1 = 8000, 12000, 0.05


def features(key: PRNGKeyArray, shape: tuple[int, ...], p: Array | float) -> Float[Array, "..."]:
    """Features that are uniform between 0 and 1 as often as `p`, and else zero."""
    size_key, present_key = jax.random.split(key)
    there = jax.random.uniform(present_key, shape) < p
    return jnp.where(there, jax.random.uniform(size_key, shape), 0)


@eqx.filter_jit
def error(model: Callable, x: Float[Array, "batch n"]) -> Float[Array, ""]:
    """The squared error of all features of an example, on average."""
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - x) ** 2, axis=1))


def errors(toys: Toy, x: Float[Array, "sparsities batch n"]) -> Float[Array, "sparsities restarts"]:
    """The error of all restarts at all sparsities."""
    return jax.vmap(jax.vmap(error, (0, None)))(toys, x)


def loss_sae(sae: SAE, toy: Toy, x: Float[Array, "batch n"]) -> Float[Array, ""]:
    """What the autoencoder does not know of what is hidden, and the sum of its latents (L1)."""
    hidden = harvest.reap(jax.vmap(toy), "hidden")(x)["hidden"]
    known, acts = harvest.capture(jax.vmap(sae), "latents", mode="strict")(hidden)
    missed = jnp.sum((known - hidden) ** 2, axis=1)
    return jnp.mean(missed + L1 * jnp.sum(acts["latents"], axis=1))


def clamp(latents: Float[Array, " L"], latent: Array) -> Float[Array, " L"]:
    """The edit of one experiment: one latent is set to one."""
    return latents.at[latent].set(1)


def gaps(weight: Float[np.ndarray, "2 n"]) -> Float[np.ndarray, " held"]:
    """The angles between neighbours, in degrees, of the features that are held."""
    x, y = weight[:, np.linalg.norm(weight, axis=0) > 0.5]
    angle = np.sort(np.degrees(np.arctan2(y, x)))
    return np.diff(angle, append=angle[:1] + 360)


def cosines(toy: Toy, sae: SAE) -> Float[np.ndarray, "n L"]:
    """Between the direction of each feature and that of each latent."""
    weight = toy.weight / jnp.linalg.norm(toy.weight, axis=0, keepdims=True)
    return np.asarray(weight.T @ sae.directions.T)


def fit(
    model: Any, loss: Callable, steps: int, key: PRNGKeyArray, report: Report, what: str
) -> Any:
    """The model after so many steps of Adam; `loss` is given a new key at each."""
    keys = list(jax.random.split(key, (20, steps // 20)))
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    return training.fit(model, report.track(keys, f"Training {what}"), loss, optimiser)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the weights to start from, and the features."""
    report = Report(out)
    keys = jax.random.split(jax.random.key(seed), 8)

    present = jnp.asarray(PRESENT)[:, None, None]
    make = lambda key: superposition.toy(key, 5, 2)
    toys = jax.vmap(jax.vmap(make))(jax.random.split(keys[0], (len(PRESENT), RESTARTS)))
    loss = lambda toys, key: errors(toys, features(key, (len(PRESENT), 512, 5), present)).sum()
    toys = fit(toys, loss, STEPS, keys[1], report, "models of two channels")
    test = errors(toys, features(keys[2], (len(PRESENT), 20000, 5), present))
    best = np.asarray(toys.weight)[np.arange(len(PRESENT)), np.asarray(test).argmin(axis=1)]

    toy = superposition.toy(keys[3], FEATURES, CHANNELS)
    batch = lambda key: features(key, (1024, FEATURES), RARE)
    loss = lambda toy, key: error(toy, batch(key))
    toy = fit(toy, loss, STEPS, keys[4], report, f"a model of {CHANNELS} channels")
    untrained = superposition.sae(keys[5], CHANNELS, FEATURES)
    loss = lambda sae, key: loss_sae(sae, toy, batch(key))
    sae = fit(untrained, loss, STEPS_SAE, keys[6], report, "an autoencoder")
    before, found = cosines(toy, untrained), cosines(toy, sae)

    with report.step("Planting the autoencoder, and setting its latents one by one"):
        spliced = harvest.plant(toy, {"hidden": sae})
        x = features(keys[7], (5000, FEATURES), RARE)
        whole, through = (jax.vmap(model)(x) for model in (toy, spliced))
        lost = float(jnp.mean((through - whole) ** 2) / jnp.var(whole))
        grid = jnp.arange(FEATURES)
        swept = harvest.sweep(spliced, "latents", clamp, grid)(jnp.zeros(FEATURES))
        moved = np.asarray(swept["latents"] - spliced(jnp.zeros(FEATURES)))

    with report.step("Drawing"):
        figure = figures.superposition(PRESENT, best, before, found, moved)
        report.save(figure, "superposition.png")

    expect, score = report.expect, lambda cosine: float(cosine.max(axis=1).mean())
    lengths = float((best[0] ** 2).sum())
    expect("never zero: all lengths squared", lengths, 1.9, 2.1, "a projection on two channels")
    for i, n, shape in ((2, 4, "antipodal pairs"), (4, 5, "a pentagon")):
        between, paper = gaps(best[i]), f"Elhage et al.: {shape}"
        expect(f"P = {PRESENT[i]}: features held", len(between), n, n, paper)
        off = float(np.max(abs(between - 360 / n), initial=0))
        expect(f"... angles off {360 / n:.0f} degrees, at most", off, 0, 1, paper)
    expect("mean largest cosine, autoencoder", score(found), 0.99, 1, "it finds the features")
    expect("... random directions", score(before), 0, 0.7, "which are none of them")
    expect("output lost by the autoencoder, share", lost, 0, 0.05, "it knows what is hidden")
    count = (abs(moved) > 0.1).sum(axis=1)
    expect("outputs that a latent moves, least", int(count.min()), 1, 1, "one latent, one feature")
    expect("... most", int(count.max()), 1, 1, "one latent, one feature")
    right = float(np.mean(moved.argmax(axis=1) == found.argmax(axis=0)))
    expect("... are the one it points along, share", right, 1, 1, "one latent, one feature")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
