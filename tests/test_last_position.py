"""The last position of many prompts of different lengths, and nothing else of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.tree_util import Partial

import harvest

PROMPTS, LENGTH, SIZE, LAYERS = 10_000, 12, 8, 3


def model(weights, tokens):
    """Each token sees the mean of those up to it."""
    x = weights["embedding"][tokens]
    seen = jnp.arange(1.0, LENGTH + 1)[:, None]

    def layer(x, w):
        x = x + jnp.tanh((jnp.cumsum(x, axis=0) / seen) @ w)
        return harvest.sow(x, name="resid_post"), None

    return lax.scan(layer, x, weights["layers"])[0]


def last(length, resid):
    return resid[length - 1]


def last_by_hand(weights, tokens):
    """Of a prompt as it is, without padding."""
    embedding, layers = np.asarray(weights["embedding"]), np.asarray(weights["layers"])
    x = embedding[tokens]
    rows = []
    for w in layers:
        x = x + np.tanh(np.cumsum(x, axis=0) / np.arange(1, len(x) + 1)[:, None] @ w)
        rows.append(x[-1])
    return np.stack(rows)


@pytest.fixture(scope="module")
def weights():
    embedding, layers = jax.random.split(jax.random.key(0))
    return {
        "embedding": jax.random.normal(embedding, (50, SIZE)),
        "layers": jax.random.normal(layers, (LAYERS, SIZE, SIZE)) / 2,
    }


@pytest.fixture(scope="module")
def prompts():
    tokens, lengths = jax.random.split(jax.random.key(1))
    return (
        jax.random.randint(tokens, (PROMPTS, LENGTH), 0, 50),
        jax.random.randint(lengths, (PROMPTS,), 1, LENGTH + 1),
    )


def collected(fn, weights, tokens, lengths):
    def one(tokens, length):
        return harvest.reap(fn, {"resid_post": Partial(last, length)})(weights, tokens)

    return jax.vmap(one)(tokens, lengths)["resid_post"]


def test_each_is_that_of_the_prompt_alone(weights, prompts):
    tokens, lengths = map(np.asarray, prompts)
    traces = 0

    def counted(weights, tokens):
        nonlocal traces
        traces += 1
        return model(weights, tokens)

    resid = jax.jit(lambda *args: collected(counted, *args))(weights, tokens, lengths)
    assert resid.shape == (PROMPTS, LAYERS, SIZE) and traces == 1
    for i in range(0, PROMPTS, 500):
        by_hand = last_by_hand(weights, tokens[i, : lengths[i]])
        np.testing.assert_allclose(resid[i], by_hand, rtol=1e-4, atol=1e-5)


def test_memory_is_that_of_the_model_and_of_what_is_wanted(weights, prompts):
    def temp_bytes(fn, *args):
        return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes

    plain = temp_bytes(lambda w, t: jax.vmap(model, (None, 0))(w, t)[:, 0], weights, prompts[0])
    wanted = PROMPTS * LAYERS * SIZE * 4
    mine = temp_bytes(lambda *args: collected(model, *args), weights, *prompts)
    assert mine < plain + 2 * wanted
    assert PROMPTS * LAYERS * LENGTH * SIZE * 4 > 2 * wanted  # what a stack would add


def test_many_batches_are_one_program(weights, prompts):
    """Where not even the model runs on all prompts at once."""
    tokens, lengths = prompts

    def one(row):
        return collected(model, weights, row[0][None], row[1][None])[0]

    in_chunks = jax.jit(lambda *rows: lax.map(one, rows, batch_size=64))
    np.testing.assert_allclose(
        in_chunks(tokens[:200], lengths[:200]),
        collected(model, weights, tokens[:200], lengths[:200]),
        rtol=1e-5,
        atol=1e-6,
    )
