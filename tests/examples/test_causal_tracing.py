"""Restored windows by hand, in the first layers of the model, and a small whole."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import causal_tracing

FEW = 5  # layers


@pytest.fixture(scope="module")
def small(model):
    """The first layers: a model of its own, of which runs are cheap."""
    blocks = jax.tree.map(lambda w: w[:FEW], model.blocks)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


@pytest.fixture(scope="module")
def facts(tokenizer, model):
    return causal_tracing.encode(tokenizer, model.embedding, jax.random.key(0))


def fact(facts, i):
    return jax.tree.map(lambda x: x[i], facts)


def test_noise_is_on_the_subject(facts, tokenizer, model):
    for i, (subject, relation, answer) in enumerate(causal_tracing.FACTS):
        one = fact(facts, i)
        n = int(one.subject)
        assert tokenizer.decode(one.tokens[:n].tolist()) == subject
        assert tokenizer.decode(one.tokens[n : int(one.length)].tolist()) == relation
        assert tokenizer.decode([int(one.answer)]) == answer
        assert not one.noise[:, n:].any()
        scale = 3 * np.std(np.asarray(model.embedding))
        assert np.std(np.asarray(one.noise[:, :n])) == pytest.approx(scale, rel=0.1)


def test_probabilities(small, facts):
    one = fact(facts, 2)  # shorter than the others, so that there is padding
    got = causal_tracing.probabilities(small, one, {})
    expected = []
    for noise in one.noise:
        n = int(one.length)
        with_noise = small.embedding[one.tokens[:n]] + noise[:n]
        logits = harvest.plant(small, {"embed": with_noise})(one.tokens[:n])[-1]
        p = jax.nn.softmax(logits)
        expected.append([p[one.answer], p.max()])
    np.testing.assert_allclose(got, np.mean(expected, axis=0), rtol=1e-3)


@pytest.mark.parametrize("key", ["mlp_out", "attn_out"])
def test_a_window_restored_by_hand(small, facts, key, monkeypatch):
    monkeypatch.setattr(causal_tracing, "REACH", 1)
    clean = harvest.reap(jax.vmap(small), key)(facts.tokens, facts.length)[key]
    i, token, middle = 1, 9, 1  # the last token
    rows = jnp.array([[i, token]])
    got = causal_tracing.restored(small, facts, clean, rows, jnp.asarray(middle), key)

    one = fact(facts, i)
    mask = jnp.tril(jnp.ones((one.tokens.size, one.tokens.size), bool))

    def by_hand(noise):
        """Layer after layer, with what layers 0, 1 and 2 computed at one token replaced."""
        resid = small.embedding[one.tokens] + noise
        for layer in range(FEW):
            block = jax.tree.map(lambda w, layer=layer: w[layer], small.blocks)
            fix = lambda out, layer=layer: (
                out.at[token].set(clean[layer, i, token]) if layer <= 2 else out
            )
            out = block.attention(resid, mask)
            resid = resid + (fix(out) if key == "attn_out" else out)
            out = block.mlp(resid)
            resid = resid + (fix(out) if key == "mlp_out" else out)
        logits = small.norm(resid)[one.length - 1] @ small.embedding.T
        return jax.nn.softmax(logits)[one.answer]

    expected = np.mean([jax.jit(by_hand)(noise) for noise in one.noise])
    np.testing.assert_allclose(got[0], expected, rtol=1e-3)
    blurred = causal_tracing.probabilities(small, one, {})[0]
    assert abs(got[0] / blurred - 1) > 0.01


def test_a_window_that_reaches_nothing_restores_nothing(small, facts):
    clean = harvest.reap(jax.vmap(small), "mlp_out")(facts.tokens, facts.length)["mlp_out"]
    far = jnp.asarray(-1 - causal_tracing.REACH)  # an index from the end it is not
    got = causal_tracing.restored(small, facts, clean, jnp.array([[0, 2]]), far, "mlp_out")
    expected = causal_tracing.probabilities(small, fact(facts, 0), {})[0]
    np.testing.assert_allclose(got[0], expected, rtol=1e-4)
