"""A model that copies: its parts, and the wires between its layers, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import induction_heads
from examples.figures import induction_heads as figures
from examples.models import attention_only

T, D, H = 9, 8, 2


@pytest.fixture(scope="module")
def model():
    return attention_only.make(jax.random.key(0), 2, vocab=11, length=T, width=D, heads=H)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (3, T), 0, 11)


def norm(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def heads(layer, place, q_in, k_in, v_in):
    """What each head of a layer adds, token by token."""
    out = np.zeros((T, H, D))
    for h in range(H):
        q = (norm(q_in) + place) @ np.asarray(layer.query)[:, h]
        k = (norm(k_in) + place) @ np.asarray(layer.key)[:, h]
        v = norm(v_in) @ np.asarray(layer.value)[:, h]
        for t in range(T):
            weight = np.exp(k[: t + 1] @ q[t] / np.sqrt(D // H))
            out[t, h] = weight @ v[: t + 1] / weight.sum() @ np.asarray(layer.output)[h]
    return out


def by_hand(model, tokens, change=0, reader=None):
    """The logits, with `change` added to what one of "qkv" in the second layer reads."""
    place, embed = np.asarray(model.position), np.asarray(model.embedding)[tokens]
    first = heads(model.layers[0], place, embed, embed, embed)
    resid = embed + first.sum(axis=1)
    inputs = [resid + change if name == reader else resid for name in "qkv"]
    resid = resid + heads(model.layers[1], place, *inputs).sum(axis=1)
    return first, norm(resid) @ np.asarray(model.unembedding)


def losses(logits, tokens):
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(T - 1), tokens[1:]]


def test_model(model, tokens):
    logits, acts = harvest.capture(model, "layers/0/result", mode="strict")(tokens[0])
    first, expected = by_hand(model, tokens[0])
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(acts["layers/0/result"], first, atol=1e-4)


def test_sites(model, tokens):
    acts = harvest.reap(model)(tokens[0])
    wide, per_head = (T, D), (T, H, D // H)
    inside = {"resid_pre": wide, "q_in": wide, "k_in": wide, "v_in": wide, "q": per_head}
    inside |= {"k": per_head, "v": per_head, "pattern": (H, T, T), "z": per_head}
    inside |= {"result": (T, H, D), "resid_post": wide}
    layers = {f"layers/{i}/{name}": shape for i in range(2) for name, shape in inside.items()}
    assert {key: value.shape for key, value in acts.items()} == {"embed": wide} | layers


@pytest.mark.parametrize("reader", "qkv")
def test_wires(model, tokens, reader):
    """A sweep over one reader is a forward pass in which that reader alone is told otherwise."""
    first = np.stack([by_hand(model, row)[0] for row in tokens])
    change = first.mean(axis=(0, 1)) - first
    off = jnp.asarray(list(induction_heads.CUTS.values()), jnp.float32)
    source = {f"layers/1/{reader}_in": jnp.asarray(change, jnp.float32)}
    swept = harvest.sweep(induction_heads.losses, source, induction_heads.cut, off)
    (got,) = swept(model, tokens).values()
    for i, which in enumerate(induction_heads.CUTS.values()):
        for n, row in enumerate(tokens):
            cut = np.einsum("h,thd->td", which, change[n])
            expected = losses(by_hand(model, row, cut, reader)[1], row)
            np.testing.assert_allclose(got[i, n], expected, atol=1e-4)
    assert np.max(abs(got[-1] - got[0])) > 0.01


def test_sequences_repeat_themselves():
    tokens, period = induction_heads.sequences(jax.random.key(0), 50)
    assert len(set(period.tolist())) > 5
    for row, p in zip(np.asarray(tokens), np.asarray(period), strict=True):
        assert len(set(row[:p])) == p and (row[p:] == row[:-p]).all()


def test_came_next(tokens):
    expected = np.zeros((3, T, T), bool)
    for n in range(3):
        for query in range(T):
            for key in range(1, query + 1):
                expected[n, query, key] = tokens[n, key - 1] == tokens[n, query]
    assert expected.any()
    np.testing.assert_array_equal(induction_heads.came_next(tokens), expected)


def test_induction_scores():
    tokens = jnp.array([[1, 2, 3, 1, 2, 3], [4, 5, 4, 5, 4, 5]])
    heads = [np.eye(6, k=1 - period) for period in (3, 2)]
    pattern = jnp.asarray(np.broadcast_to(heads, (2, 2, 6, 6)), jnp.float32)
    # Three queries of the first sequence have been there before, and four of the second. To them,
    # a head that looks back by one or two is right in one of the sequences.
    np.testing.assert_allclose(induction_heads.induction_scores(pattern, tokens), [3 / 7, 4 / 7])


def test_attention_by_distance():
    pattern = jnp.stack([jnp.eye(T), 0.5 * jnp.eye(T, k=-2)])[None]
    expected = np.zeros((2, T))
    expected[0, 0], expected[1, 2] = 1, 0.5
    np.testing.assert_allclose(induction_heads.by_distance(pattern), expected)


def test_losses_by_place():
    period = jnp.array([4, 6])
    token = jnp.arange(1.0, 12.0)[None] + jnp.zeros((2, 1))  # each loss is where its token is
    got = figures.by_place(token, period, np.arange(-2, 4))
    np.testing.assert_allclose(got, 5 + np.arange(-2, 4))
