"""A whole grid of patches of a real model, against one `plant` after the other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import ioi

LAYERS, HEADS = 30, 9


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [jnp.asarray(tokenizer.encode(p).ids) for p in (ioi.CLEAN, ioi.CORRUPTED)]


@pytest.fixture(scope="module")
def metric(tokenizer):
    (answer,), (wrong,) = (tokenizer.encode(word).ids for word in (ioi.ANSWER, ioi.WRONG))

    def logit_difference(model, tokens):
        logits = model(tokens)[-1]
        return logits[answer] - logits[wrong]

    return logit_difference


@pytest.fixture(scope="module")
def acts(model, metric, prompts):
    return harvest.reap(metric, ["resid_post", "z"])(model, prompts[0])


def test_a_sweep_is_a_loop_of_plants(model, metric, prompts, acts):
    clean, corrupted = prompts
    traces = 0

    def counted(model, tokens):
        nonlocal traces
        traces += 1
        return metric(model, tokens)

    source = {"resid_post": acts["resid_post"]}
    grid = harvest.grid(position=jnp.arange(len(clean)))
    swept = harvest.sweep(counted, source, ioi.at_position, grid)(model, corrupted)["resid_post"]
    assert swept.shape == (LAYERS, 14) and traces == 1

    @eqx.filter_jit
    def patched(model, layer, position):
        row = {"position": position}
        clean = acts["resid_post"][layer]
        edit = harvest.at(layer, lambda resid: ioi.at_position(resid, clean, row))
        return harvest.plant(metric, {"resid_post": edit})(model, corrupted)

    one_by_one = [
        [patched(model, jnp.asarray(layer), jnp.asarray(p)) for p in range(14)]
        for layer in range(0, LAYERS, 6)
    ]
    np.testing.assert_allclose(swept[::6], np.asarray(one_by_one), atol=1e-4)


def test_attribution_agrees_with_patching_over_the_heads(model, metric, prompts, acts):
    args = {"z": acts["z"]}, ioi.at_head, harvest.grid(head=jnp.arange(HEADS))
    exact = harvest.sweep(metric, *args)(model, prompts[1])["z"]
    estimate = harvest.attribute(metric, *args)(model, prompts[1])["z"]
    assert exact.shape == estimate.shape == (LAYERS, HEADS)
    assert np.corrcoef(exact.ravel(), estimate.ravel())[0, 1] > 0.9


def test_an_estimate_is_the_gradient_times_the_change(model, metric, prompts, acts):
    corrupted = prompts[1]
    args = {"z": acts["z"]}, ioi.at_head, harvest.grid(head=jnp.arange(HEADS))
    estimate = harvest.attribute(metric, *args)(model, corrupted)["z"]

    @eqx.filter_jit
    def by_hand(model, t):
        """`t` of the way from the corrupted output of head 17.4 to the clean one."""
        towards = lambda z: z.at[:, 4].add(t * (acts["z"][17] - z)[:, 4])
        return harvest.plant(metric, {"z": harvest.at(17, towards)})(model, corrupted)

    slope = jax.jvp(lambda t: by_hand(model, t), (0.0,), (1.0,))[1]
    np.testing.assert_allclose(estimate[17, 4], metric(model, corrupted) + slope, rtol=1e-4)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"NAMES": ["Mary", "John", "Ulaanbaatar"]}, "' Ulaanbaatar' is the tokens"),
        ({"ANSWER": " Ulaanbaatar"}, "' Ulaanbaatar' is the tokens"),
        ({"CORRUPTED": "When Mary left"}, "has 14 tokens, and 'When Mary left' has 3"),
    ],
    ids=["name", "answer", "prompt"],
)
def test_what_would_be_compared_token_by_token(loaded, monkeypatch, tmp_path, constants, message):
    monkeypatch.setattr(ioi.smollm2, "load", lambda: loaded)
    for name, value in constants.items():
        monkeypatch.setattr(ioi, name, value)
    with pytest.raises(ValueError, match=message):
        ioi.main(out=str(tmp_path))


def test_attribution_is_worse_for_the_residual_stream(model, metric, prompts, acts):
    clean, corrupted = prompts
    (second,) = np.flatnonzero(clean != corrupted)
    grid = harvest.grid(position=jnp.arange(len(clean)))
    args = {"resid_post": acts["resid_post"]}, ioi.at_position, grid
    estimate = harvest.attribute(metric, *args)(model, corrupted)["resid_post"]

    # At the last layer, the metric is all but linear; at the first, it is not.
    @eqx.filter_jit
    def patched(layer):
        clean = harvest.at(layer, lambda r: r.at[second].set(acts["resid_post"][layer, second]))
        return harvest.plant(metric, {"resid_post": clean})(model, corrupted)

    worst, exact = metric(model, corrupted), patched(jnp.asarray(2))
    assert (estimate[2, second] - worst) / (exact - worst) < 0.6
    np.testing.assert_allclose(estimate[:, :second], worst, atol=1e-3)


def test_contributions(model, tokenizer):
    words = ["Mary", "John"], ["Paul", "Anna"]
    tokens = [tokenizer.encode(ioi.PROMPT.format(a, b, b)).ids for a, b in words]
    ids = [[tokenizer.encode(f" {word}").ids[0] for word in pair] for pair in words]
    args = jnp.asarray(tokens), *jnp.asarray(ids).T
    difference, embed, heads, mlps = ioi.contributions(model, *args)
    total = embed + heads.sum(axis=(1, 2)) + mlps.sum(axis=1)
    np.testing.assert_allclose(total, difference, atol=1e-4)

    for i, (right, wrong) in enumerate(ids):
        logits = model(args[0][i])[-1]
        np.testing.assert_allclose(difference[i], logits[right] - logits[wrong], atol=1e-4)
        # What each layer added to the residual stream, read as the last layer's residual is.
        names = ["embed", "resid_pre", "resid_mid", "resid_post", "z"]
        acts = {key: np.asarray(x) for key, x in harvest.reap(model, names)(args[0][i]).items()}
        resid = acts["resid_post"][-1, -1]
        read = np.asarray(model.embedding[right] - model.embedding[wrong]) * model.norm.weight
        read = np.asarray(read) / np.sqrt(np.mean(resid**2) + model.norm.eps)
        by_attention = (acts["resid_mid"] - acts["resid_pre"])[:, -1] @ read
        by_mlps = (acts["resid_post"] - acts["resid_mid"])[:, -1] @ read
        np.testing.assert_allclose(embed[i], acts["embed"][-1] @ read, atol=1e-5)
        np.testing.assert_allclose(heads[i].sum(axis=1), by_attention, atol=1e-4)
        np.testing.assert_allclose(mlps[i], by_mlps, atol=1e-4)
        wrote = acts["z"][23, -1, 3] @ np.asarray(model.blocks.attention.output[23, 3])
        np.testing.assert_allclose(heads[i, 23, 3], wrote @ read, atol=1e-4)
