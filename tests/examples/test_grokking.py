"""A model that adds: its parts, and what it is like without a frequency, against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import grokking
from examples._report import Report
from examples.models import modular

P = grokking.P
FREQUENCIES = np.arange(1, 27)  # of a number between 0 and 52
PAIRS = np.stack(np.divmod(np.arange(P * P), P), axis=1)


@pytest.fixture(scope="module")
def model():
    return modular.make(jax.random.key(0), P)


def relu(x):
    return np.maximum(x, 0)


def neurons(model, pair):
    """The neurons at the last token, and the residual stream that they read."""
    resid = np.asarray(model.embedding)[[*pair, P]] + np.asarray(model.position)
    mid = resid[-1]
    for h in range(model.query.shape[1]):
        q = resid[-1] @ np.asarray(model.query)[:, h]
        k, v = (resid @ np.asarray(w)[:, h] for w in (model.key, model.value))
        weight = np.exp(k @ q / np.sqrt(q.size))
        mid = mid + weight @ v / weight.sum() @ np.asarray(model.output)[h]
    return relu(mid @ np.asarray(model.up)), mid


def logits(model, neurons, mid):
    return (mid + neurons @ np.asarray(model.down)) @ np.asarray(model.unembedding)


def cross_entropy(logits, pairs):
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(len(pairs)), pairs.sum(axis=1) % P]


def test_model(model):
    pair = np.array([5, 50])
    got, acts = harvest.capture(model, mode="strict")(jnp.asarray(pair))
    expected, mid = neurons(model, pair)
    np.testing.assert_allclose(acts["mlp_post"], expected, atol=1e-5)
    np.testing.assert_allclose(acts["resid_mid"], mid, atol=1e-5)
    np.testing.assert_allclose(got, logits(model, expected, mid), atol=1e-5)
    assert list(acts) == "embed q k v pattern z resid_mid mlp_post resid_post".split()


def test_when_it_knows_what_is_taught():
    seen = np.array([[50, 0.9, 0.5, 0], [100, 1, 0.6, 0], [150, 0.99, 0.7, 0], [200, 1, 0.8, 0]])
    assert grokking.knows_at(seen) == 100
    assert grokking.knows_at(seen[::2]) == math.inf  # nothing learnt is not learnt at step 0


def test_steps_that_are_no_whole_number_of_looks(monkeypatch, tmp_path):
    monkeypatch.setattr(grokking, "STEPS", 5)
    monkeypatch.setattr(grokking, "CHUNK", 2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _, seen = grokking.train(0, PAIRS, Report(tmp_path))
    assert seen[:, 0].tolist() == [2, 4, 5]


def test_losses(model):
    pairs = PAIRS[::300]
    expected = np.stack([logits(model, *neurons(model, pair)) for pair in pairs])
    loss, right = grokking.losses(model, pairs)
    np.testing.assert_allclose(loss, cross_entropy(expected, pairs), rtol=1e-4)
    np.testing.assert_array_equal(right, expected.argmax(axis=1) == pairs.sum(axis=1) % P)


@pytest.mark.parametrize("numbers", [np.arange(P), PAIRS.sum(axis=1)], ids=["numbers", "sums"])
def test_waves_are_an_orthonormal_basis(numbers):
    basis = np.asarray(grokking.waves(FREQUENCIES, numbers)).swapaxes(0, 1)
    basis = basis.reshape(len(numbers), -1)
    assert basis.shape[1] == P - 1  # all that depends on a remainder, but for the mean
    np.testing.assert_allclose(basis.T @ basis, np.eye(P - 1), atol=1e-5)
    np.testing.assert_allclose(basis.sum(axis=0), 0, atol=1e-3)


def test_taking_out_a_frequency(model):
    """Against what is left of the neurons by least squares."""
    sums, rng = PAIRS.sum(axis=1), np.random.default_rng(0)
    fits = [np.stack([f(2 * np.pi * k * sums / P) for f in (np.cos, np.sin)], 1) for k in (1, 17)]
    acts = np.hstack(fits) @ rng.normal(size=(4, 256)) + rng.normal(size=(P * P, 256))
    planted = harvest.plant(grokking.losses, {"mlp_post": jnp.asarray(acts, jnp.float32)})
    wave = grokking.waves(FREQUENCIES, sums)
    along = jnp.einsum("fnw,nm->fwm", wave, jnp.asarray(acts, jnp.float32))
    grid = {"wave": harvest.per_example(wave), "along": along}
    swept = harvest.sweep(planted, "mlp_post", grokking.take_out, grid)(model, PAIRS)
    without, _ = swept["mlp_post"]

    mid = np.asarray(harvest.reap(grokking.losses, "resid_mid")(model, PAIRS)["resid_mid"])
    before = cross_entropy(logits(model, acts, mid), PAIRS)
    for k, fit in zip([1, 17], fits, strict=True):
        left = acts - fit @ np.linalg.lstsq(fit, acts)[0]
        expected = cross_entropy(logits(model, left, mid), PAIRS)
        assert np.max(abs(expected - before)) > 0.1
        np.testing.assert_allclose(without[k - 1], expected, rtol=1e-4, atol=1e-4)
