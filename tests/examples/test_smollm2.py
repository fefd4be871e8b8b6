import importlib.util
import pathlib
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples.models import smollm2

REFERENCE = np.load(pathlib.Path(__file__).parents[1] / "data" / "smollm2_reference.npz")
PROMPTS = [0, 1]

T, D = 5, 576
IN_LAYER = {
    "resid_pre": (T, D),
    "q_in": (T, D),
    "k_in": (T, D),
    "v_in": (T, D),
    "q": (T, 9, 64),
    "k": (T, 3, 64),
    "v": (T, 3, 64),
    "scores": (9, T, T),
    "pattern": (9, T, T),
    "z": (T, 9, 64),
    "attn_out": (T, D),
    "resid_mid": (T, D),
    "mlp_post": (T, 1536),
    "mlp_out": (T, D),
    "resid_post": (T, D),
}
OUTSIDE = {"embed": (T, D), "final_scale": (T, 1), "final": (T, D)}


@pytest.fixture(scope="module")
def unrolled(model):
    return model.unroll()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(REFERENCE["smollm2_ids0"], jnp.int32)


@pytest.fixture(scope="module")
def logits(model, tokens):
    return eqx.filter_jit(model)(tokens)


@pytest.fixture(scope="module")
def acts(model, tokens):
    return harvest.reap(model)(tokens)


def ids(prompt):
    return jnp.asarray(REFERENCE[f"smollm2_ids{prompt}"], jnp.int32)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokenizer(tokenizer, prompt):
    text = str(REFERENCE[f"smollm2_prompt{prompt}"])
    encoded = tokenizer.encode(text).ids
    assert encoded == REFERENCE[f"smollm2_ids{prompt}"].tolist()
    assert tokenizer.decode(encoded) == text


def test_tokenizer_keeps_special_tokens_whole(tokenizer):
    assert tokenizer.encode("<|im_start|>12").tokens == ["<|im_start|>", "1", "2"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_against_reference(model, prompt):
    logits = eqx.filter_jit(model)(ids(prompt))
    top = np.take_along_axis(np.asarray(logits), REFERENCE[f"smollm2_top_ids{prompt}"], axis=-1)
    np.testing.assert_allclose(top, REFERENCE[f"smollm2_top_logits{prompt}"], atol=2e-3)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_hidden_states_against_reference(model, prompt):
    acts = harvest.reap(model, ["embed", "resid_post", "final"])(ids(prompt))
    hidden = np.concatenate(
        [acts["embed"][None, -1], acts["resid_post"][:-1, -1], acts["final"][None, -1]]
    )
    expected = REFERENCE[f"smollm2_hidden_last{prompt}"]
    np.testing.assert_allclose(hidden, expected, rtol=1e-3, atol=2e-3)


def test_encode_pads_at_the_end(tokenizer):
    texts = ["The", "The capital of France is"]
    padded, lengths = smollm2.encode(tokenizer, texts)
    assert padded.shape == (2, T) and lengths.tolist() == [1, T]
    for row, n, text in zip(padded, lengths, texts, strict=True):
        assert tokenizer.decode(row[:n].tolist()) == text
    assert not padded[0, 1:].any()


def test_encode_without_padding(tokenizer):
    texts = ["Mary gave it to John", "John gave it to Mary"]
    tokens = smollm2.encode_equal(tokenizer, texts)
    assert [tokenizer.decode(row) for row in tokens.tolist()] == texts
    with pytest.raises(ValueError, match=r"'Mary gave it to John' has 5 tokens, and 'Mary' has 1"):
        smollm2.encode_equal(tokenizer, [texts[0], "Mary"])


def test_encode_words(tokenizer):
    words = [" Mary", " John", "John"]
    ids = smollm2.encode_words(tokenizer, words)
    assert [tokenizer.decode([i]) for i in ids.tolist()] == words
    with pytest.raises(ValueError, match=r"' Maryland!' is the tokens \[' Maryland', '!'\]"):
        smollm2.encode_words(tokenizer, [" Mary", " Maryland!"])


def test_probability_of_paris(tokenizer, logits):
    (paris,) = tokenizer.encode(" Paris").ids
    assert jax.nn.softmax(logits[-1])[paris] == pytest.approx(0.773, abs=0.005)


@pytest.mark.parametrize("length", ["static", "traced"])
def test_padding_changes_nothing(model, tokens, logits, length):
    padded = jnp.pad(tokens, (0, 4), constant_values=7)
    n = T if length == "static" else jnp.asarray(T)
    got = eqx.filter_jit(model)(padded, n)
    np.testing.assert_allclose(got[:T], logits, atol=1e-4)
    assert jnp.all(jnp.isfinite(got))


def test_padding_is_never_attended_to(model, tokens):
    padded = jnp.pad(tokens, (0, 4))
    pattern = harvest.reap(model, "pattern")(padded, T)["pattern"]
    assert jnp.all(pattern[..., T:] == 0)
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)


def test_lengths_differ_in_a_batch(model, tokens, logits):
    batch = jnp.stack([tokens, jnp.pad(tokens[:3], (0, 2))])
    got = eqx.filter_jit(eqx.filter_vmap(model))(batch, jnp.array([5, 3]))
    np.testing.assert_allclose(got[0], logits, atol=1e-4)
    np.testing.assert_allclose(got[1, :3], logits[:3], atol=1e-4)


def test_unrolled_is_scanned(unrolled, tokens, logits):
    np.testing.assert_allclose(eqx.filter_jit(unrolled)(tokens), logits, atol=1e-4)


def test_sites_of_scanned(acts):
    expected = {name: (30, *shape) for name, shape in IN_LAYER.items()} | OUTSIDE
    assert {key: value.shape for key, value in acts.items()} == expected


def test_sites_of_unrolled(unrolled, acts, tokens):
    unrolled_acts = harvest.reap(unrolled)(tokens)
    layers = {f"layers/{i}/{name}": s for i in range(30) for name, s in IN_LAYER.items()}
    assert {key: value.shape for key, value in unrolled_acts.items()} == layers | OUTSIDE
    for name in IN_LAYER:
        stacked = harvest.stacked(unrolled_acts, f"layers/*/{name}")
        np.testing.assert_allclose(stacked, acts[name], rtol=1e-3, atol=1e-3)


def test_batched_patterns_have_layers_first(model, tokens):
    batch = jnp.stack([tokens, tokens[::-1]])
    pattern = harvest.reap(jax.vmap(model), "pattern")(batch)["pattern"]
    assert pattern.shape == (30, 2, 9, T, T)


def test_capture_computes_the_same(model, acts, tokens, logits):
    out, captured = harvest.capture(model, "resid_*")(tokens)
    np.testing.assert_allclose(out, logits, atol=1e-4)
    assert set(captured) == {"resid_pre", "resid_mid", "resid_post"}
    np.testing.assert_allclose(captured["resid_mid"][0], acts["resid_mid"], rtol=1e-3, atol=1e-3)


# What is planted makes all before it irrelevant, so that each site is a test of its own.
@pytest.mark.parametrize(
    "keys", [["embed"], ["q", "k", "v"], ["scores"], ["z"], ["mlp_post"], ["resid_post"], ["*"]]
)
def test_plant_round_trip(model, acts, tokens, logits, keys):
    planted = acts if keys == ["*"] else {key: acts[key] for key in keys}
    np.testing.assert_allclose(harvest.plant(model, planted)(tokens), logits, atol=1e-4)


def test_head_can_be_silenced(model, acts, tokens, logits):
    keep = jnp.ones((30, 9, 1)).at[18, 6].set(0)
    planted = harvest.plant(model, {"z": harvest.each(harvest.scale(keep))})
    out, got = harvest.capture(planted, "z")(tokens)
    np.testing.assert_allclose(got["z"][0][:18], acts["z"][:18], atol=1e-4)
    np.testing.assert_allclose(got["z"][0][18], acts["z"][18] * keep[18][None], atol=1e-4)
    assert jnp.max(jnp.abs(out - logits)) > 0.1


def test_consumers_can_be_edited_apart(model, acts, tokens):
    edit = harvest.at(10, harvest.zero())
    got = harvest.reap(harvest.plant(model, {"q_in": edit}), ["q", "k", "v"])(tokens)
    assert jnp.all(got["q"][10] == 0)
    np.testing.assert_allclose(got["k"][10], acts["k"][10], atol=1e-4)
    np.testing.assert_allclose(got["v"][10], acts["v"][10], atol=1e-4)


def test_residual_is_the_sum_of_its_parts(model, acts):
    heads = jnp.einsum("lthk,lhkd->ltd", acts["z"], model.blocks.attention.output)
    np.testing.assert_allclose(heads, acts["attn_out"], rtol=1e-3, atol=1e-3)
    resid = acts["embed"] + jnp.sum(acts["attn_out"] + acts["mlp_out"], axis=0)
    np.testing.assert_allclose(resid, acts["resid_post"][-1], rtol=1e-3, atol=1e-3)


def test_direct_logit_attribution(model, acts, logits):
    read = model.norm.weight[None] * model.embedding
    parts = jnp.concatenate([acts["embed"][None], acts["attn_out"], acts["mlp_out"]])
    contributions = (parts * acts["final_scale"][None]) @ read.T
    error = jnp.max(jnp.abs(contributions.sum(0) - logits))
    assert error < 1e-3 * jnp.max(jnp.abs(logits))


def test_missing_weights(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(smollm2.INSTALL)):
        smollm2.load()


def test_missing_tokenizers(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install tokenizers"):
        smollm2.load()
