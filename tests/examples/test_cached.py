"""Token by token through the cache, against one pass over the whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples.models import cached
from examples.models.generate import generate

NEW, LAYER = 64, 14


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return jnp.asarray(tokenizer.encode("Once upon a time, in a small village").ids)


@pytest.fixture(scope="module")
def written(model, prompt):
    """The tokens that the model writes, and its activations while it does."""
    keys = ["resid_post", "z", "prompt/resid_post"]
    return harvest.capture(cached.generate, keys, mode="strict")(model, prompt, prompt.size, NEW)


@pytest.fixture(scope="module")
def whole(model, prompt, written):
    """The activations of one pass over prompt and continuation."""
    text = jnp.concatenate([prompt, written[0]])
    return harvest.reap(model, ["resid_post", "z"])(text)


@pytest.mark.parametrize("key", ["resid_post", "z"])
def test_activations_of_generation_are_those_of_one_pass(prompt, written, whole, key):
    acts = written[1][key]
    assert acts.shape[:3] == (NEW, 30, 1)
    expected = whole[key][:, prompt.size :].swapaxes(0, 1)[:, :, None]
    np.testing.assert_allclose(acts, expected, atol=1e-3 * float(abs(expected).max()))


def test_activations_of_the_prompt(prompt, written, whole):
    expected = whole["resid_post"][:, : prompt.size]
    atol = 1e-3 * float(abs(expected).max())
    np.testing.assert_allclose(written[1]["prompt/resid_post"], expected, atol=atol)


def test_without_a_cache_the_same_is_written(model, prompt, written):
    slow = generate(model, jnp.pad(prompt, (0, 3)), jnp.asarray(prompt.size), 8)
    np.testing.assert_array_equal(slow[prompt.size :][:8], written[0][:8])


def test_padding_changes_nothing(model, prompt, written):
    padded = jnp.pad(prompt, (0, 5), constant_values=17)
    got = cached.generate(model, padded, jnp.asarray(prompt.size), 8)
    np.testing.assert_array_equal(got, written[0][:8])


def test_an_intervention_at_chosen_steps(model, prompt, written):
    """Before the first of them nothing changes; from there on it is another text."""
    direction = 20 * jax.random.normal(jax.random.key(0), (1, 576))

    @jax.jit
    def steered(steps):
        edit = harvest.at((steps, LAYER), harvest.add(direction))
        plants = {"resid_post": edit}
        out = harvest.capture(harvest.plant(cached.generate, plants), "resid_post", mode="strict")
        return out(model, prompt, prompt.size, 12)

    tokens, acts = steered(jnp.arange(12) == 5)
    np.testing.assert_array_equal(tokens[:6], written[0][:6])
    assert not np.array_equal(tokens[6:], written[0][6:12])
    before = written[1]["resid_post"]
    np.testing.assert_allclose(acts["resid_post"][:5], before[:5], atol=1e-2)
    changed = acts["resid_post"][5, LAYER] - before[5, LAYER]
    np.testing.assert_allclose(changed, direction, atol=1e-2)
    # By hand: the same text again in one pass, with the direction added at that one place.
    text = jnp.concatenate([prompt, tokens])
    add = lambda resid: resid.at[prompt.size + 5].add(direction[0])
    logits = harvest.plant(model, {"resid_post": harvest.at(LAYER, add)})(text)
    np.testing.assert_array_equal(jnp.argmax(logits[prompt.size - 1 : -1], axis=-1), tokens)
    unchanged, _ = steered(jnp.zeros(12, bool))
    np.testing.assert_array_equal(unchanged, written[0][:12])


def test_samples_are_those_of_the_seed(model, prompt):
    direction = jax.random.normal(jax.random.key(1), (1, 576))
    edit = harvest.at((slice(2, None), LAYER), harvest.add(direction))
    sample = harvest.plant(cached.generate, {"resid_post": edit})
    draw = lambda seed: sample(model, prompt, prompt.size, 8, key=jax.random.key(seed))
    np.testing.assert_array_equal(draw(0), draw(0))
    assert not np.array_equal(draw(0), draw(1))
