"""Sequences that repeat themselves, and what is said about heads that copy from them."""

import jax
import jax.numpy as jnp
import numpy as np

from examples.models import induction

PERIOD = induction.PERIOD


def test_each_sequence_comes_twice():
    tokens = np.asarray(induction.repeated(jax.random.key(0), 3, 100))
    np.testing.assert_array_equal(tokens[:, :PERIOD], tokens[:, PERIOD:])
    assert tokens.shape == (3, 80) and len(np.unique(tokens)) > 60 and tokens.max() < 100


def test_losses():
    logits = np.random.default_rng(0).normal(size=(2, 7, 5)).astype(np.float32)
    tokens = np.array([[0, 1, 2, 3, 4, 0, 1], [4, 4, 3, 3, 2, 2, 1]])
    of = dict(zip((0, 4), logits, strict=True))  # by the first token
    model = lambda tokens: jnp.where(tokens[0] == 0, of[0], of[4])
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = [-np.mean([np.log(p[b, t, tokens[b, t + 1]]) for b in (0, 1)]) for t in range(6)]
    np.testing.assert_allclose(induction.losses(model, jnp.asarray(tokens)), expected, rtol=1e-5)


def test_induction_scores():
    perfect = jnp.eye(2 * PERIOD, k=1 - PERIOD)  # each query attends to the key `PERIOD - 1` before
    previous = jnp.eye(2 * PERIOD, k=-1)
    pattern = jnp.stack([perfect, previous, 0.5 * (perfect + previous)])[None, None]
    np.testing.assert_allclose(induction.scores(pattern), [[1, 0, 0.5]])


def test_strongest_first():
    scores = np.array([[0.1, 0.7], [0.9, 0.3]])
    assert induction.strongest_first(scores).tolist() == [[1, 0], [0, 1], [1, 1], [0, 0]]
    keep = induction.all_but(induction.strongest_first(scores)[:2], scores)
    np.testing.assert_array_equal(keep[..., 0], [[1, 0], [0, 1]])
