"""A model with more features than channels, and an autoencoder for it, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import superposition as example
from examples.models import superposition

N, M, L = 7, 3, 5


def relu(x):
    return np.maximum(x, 0)


@pytest.fixture(scope="module")
def toy():
    bias = jnp.linspace(-0.2, 0.2, N)
    return superposition.Toy(superposition.toy(jax.random.key(0), N, M).weight, bias)


@pytest.fixture(scope="module")
def sae():
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = [(M, L), (L,), (L, M), (M,)]
    leaves = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return superposition.SAE(*leaves)


@pytest.fixture(scope="module")
def x():
    return np.asarray(jax.random.uniform(jax.random.key(2), (4, N)))


def latents(sae, hidden):
    encoder, threshold, offset = (np.asarray(w) for w in (sae.encoder, sae.threshold, sae.offset))
    return relu((hidden - offset) @ encoder + threshold)


def decode(sae, latents):
    decoder = np.asarray(sae.decoder)
    return latents @ (decoder / np.sqrt((decoder**2).sum(axis=1))[:, None]) + np.asarray(sae.offset)


def test_toy(toy, x):
    w, b = np.asarray(toy.weight), np.asarray(toy.bias)
    out, acts = harvest.capture(jax.vmap(toy), mode="strict")(jnp.asarray(x))
    np.testing.assert_allclose(acts["hidden"], x @ w.T, atol=1e-5)
    np.testing.assert_allclose(out, relu(x @ w.T @ w + b), atol=1e-5)


def test_an_autoencoder_planted_and_clamped(toy, sae, x):
    w, b = np.asarray(toy.weight), np.asarray(toy.bias)
    found = latents(sae, x @ w.T)
    spliced = jax.vmap(harvest.plant(toy, {"hidden": sae}))
    out, acts = harvest.capture(spliced, "latents", mode="strict")(jnp.asarray(x))
    np.testing.assert_allclose(acts["latents"], found, atol=1e-5)
    np.testing.assert_allclose(out, relu(decode(sae, found) @ w + b), atol=1e-5)

    swept = harvest.sweep(spliced, "latents", example.clamp, jnp.arange(L))(jnp.asarray(x))
    for i in range(L):
        clamped = found.copy()
        clamped[:, i] = 1
        expected = relu(decode(sae, clamped) @ w + b)
        np.testing.assert_allclose(swept["latents"][i], expected, atol=1e-5)


def test_loss_of_the_autoencoder(toy, sae, x):
    hidden = x @ np.asarray(toy.weight).T
    found = latents(sae, hidden)
    missed = ((decode(sae, found) - hidden) ** 2).sum(axis=1)
    expected = np.mean(missed + example.L1 * found.sum(axis=1))
    np.testing.assert_allclose(example.loss_sae(sae, toy, jnp.asarray(x)), expected, rtol=1e-5)


def test_an_untrained_autoencoder_reads_where_it_writes():
    sae = superposition.sae(jax.random.key(0), M, L)
    np.testing.assert_allclose(jnp.linalg.norm(sae.directions, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(sae.encoder, sae.directions.T, rtol=1e-5)


def test_errors_of_many_models():
    keys = jax.random.split(jax.random.key(3), (2, 3))
    toys = jax.vmap(jax.vmap(lambda key: superposition.toy(key, N, M)))(keys)
    x = np.asarray(jax.random.uniform(jax.random.key(4), (2, 10, N)))
    got = example.errors(toys, jnp.asarray(x))
    assert got.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            w = np.asarray(toys.weight)[i, j]
            expected = ((relu(x[i] @ w.T @ w) - x[i]) ** 2).sum(axis=1).mean()
            np.testing.assert_allclose(got[i, j], expected, rtol=1e-4)


def test_features_are_rare():
    p = jnp.array([1, 0.25])[:, None]
    x = np.asarray(example.features(jax.random.key(0), (2, 20000), p))
    np.testing.assert_allclose((x > 0).mean(axis=1), [1, 0.25], atol=0.02)
    np.testing.assert_allclose([row[row > 0].mean() for row in x], 0.5, atol=0.02)


def test_gaps():
    angle = np.radians([200, 20, 80, 320, 140])
    weight = np.stack([np.cos(angle), np.sin(angle)])
    np.testing.assert_allclose(np.sort(example.gaps(weight)), [60, 60, 60, 60, 120], atol=1e-4)
    weight[:, 1] *= 0.4  # not held
    np.testing.assert_allclose(np.sort(example.gaps(weight)), [60, 60, 120, 120], atol=1e-4)


def test_cosines(toy, sae):
    expected = np.zeros((N, L))
    for i, feature in enumerate(np.asarray(toy.weight).T):
        for j, latent in enumerate(np.asarray(sae.decoder)):
            expected[i, j] = feature @ latent / np.linalg.norm(feature) / np.linalg.norm(latent)
    np.testing.assert_allclose(example.cosines(toy, sae), expected, atol=1e-5)
