"""MiniLM against torch, and its layers, which nobody sowed, against itself split by hand."""

import importlib.util
import inspect
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import third_party
from examples.models import minilm


@pytest.fixture(scope="module")
def loaded():
    return minilm.load()


@pytest.fixture(scope="module")
def sentences(loaded):
    return minilm.encode(loaded[1], third_party.SIMILAR)


def test_similarities_against_torch(loaded, sentences):
    embeddings = eqx.filter_jit(eqx.filter_vmap(loaded[0]))(*sentences)
    np.testing.assert_allclose(embeddings[1:] @ embeddings[0], third_party.COSINES, atol=1e-4)
    np.testing.assert_allclose(jnp.linalg.norm(embeddings, axis=-1), 1, rtol=1e-5)


def test_padding_changes_nothing(loaded, sentences):
    model, (tokens, mask) = loaded[0], sentences
    n = int(mask[0].sum())
    assert n < mask.shape[1]
    np.testing.assert_allclose(
        model(tokens[0], mask[0]), model(tokens[0, :n], mask[0, :n]), atol=1e-5
    )


def test_layers_by_path_and_by_hand(loaded, sentences):
    assert "import harvest" not in inspect.getsource(minilm)
    model, (tokens, mask) = loaded[0], (sentences[0][0], sentences[1][0])
    tapped = harvest.tap(model, ["embeddings", "layers/*", "layers/*/attention"])
    x = model.embeddings(tokens)
    expected = {"embeddings/out": x}
    for i, layer in enumerate(model.layers):
        attended = layer.attention(x, mask)
        x = jax.vmap(layer.attention_norm)(x + attended)
        neurons = jax.nn.gelu(jax.vmap(layer.up)(x), approximate=False)
        x = jax.vmap(layer.mlp_norm)(x + jax.vmap(layer.down)(neurons))
        expected |= {f"layers/{i}/attention/out": attended, f"layers/{i}/out": x}
    acts = harvest.reap(tapped)(tokens, mask)
    assert list(acts) == list(expected)
    for key, value in acts.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-4)

    # The last layer's output is all that the embedding is made of.
    planted = harvest.plant(tapped, {"layers/5/out": jnp.ones_like(x).at[:, 0].set(2)})(
        tokens, mask
    )
    by_hand = np.append(2, np.ones(383))
    np.testing.assert_allclose(planted, by_hand / np.linalg.norm(by_hand), rtol=1e-5)


def test_word_sense():
    first, second = np.eye(4)[:2], np.eye(4)[2:]
    near = np.concatenate([first.mean(0) + 0.1 * first, second.mean(0) + 0.1 * second])
    assert third_party.word_sense(near) == 1
    assert third_party.word_sense(near[[0, 2, 1, 3]]) == 0


def test_missing_weights(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(minilm.INSTALL)):
        minilm.load()


def test_missing_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tokenizers"):
        minilm.load()
