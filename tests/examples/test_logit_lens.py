"""The lens against the same arithmetic in numpy, and the experiment as a whole."""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import harvest
from examples import logit_lens
from examples.figures import logit_lens as figures

PROMPT, ANSWER = "The opposite of hot is", " cold"


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return jnp.asarray(tokenizer.encode(PROMPT).ids)


@pytest.fixture(scope="module")
def answer(tokenizer):
    (answer,) = tokenizer.encode(ANSWER).ids
    return jnp.asarray(answer)


def by_hand(model, resid, answer):
    """The likeliest words, their probabilities, and the rank of the answer, by sorting."""
    x = np.asarray(resid, np.float64)
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(model.norm.weight)
    logits = x @ np.asarray(model.embedding, np.float64).T
    order = np.argsort(-logits, axis=-1)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return order[:, 0], p.max(axis=-1) / p.sum(axis=-1), np.argmax(order == answer, axis=-1)


def test_the_lens_is_the_last_layers_arithmetic(model, tokens, answer):
    padded = jnp.pad(tokens, (0, 3))
    readings, own = logit_lens.read(model, padded[None], jnp.asarray([tokens.size]), answer[None])
    acts = harvest.reap(model, ["embed", "resid_post"])(tokens)
    for layer in (0, 1, 17, 30):
        resid = acts["embed"] if layer == 0 else acts["resid_post"][layer - 1]
        word, probability, ahead = by_hand(model, resid, int(answer))
        got = [np.asarray(leaf)[0, layer, : tokens.size] for leaf in readings]
        np.testing.assert_array_equal(got[0], word)
        np.testing.assert_allclose(got[1], probability, rtol=1e-3)
        # Words that are equally likely to the last bits may change places.
        np.testing.assert_allclose(got[2], ahead, atol=2)
    np.testing.assert_allclose(own[0, : tokens.size], readings.probability[0, 30, : tokens.size])


@pytest.mark.parametrize(
    ("ahead", "layers"),
    [([5, 3, 0, 0], 2), ([0, 1, 0, 2, 0], 4), ([0, 0, 0], 0), ([3, 0, 1], None)],
    ids=["late", "not for good", "throughout", "never"],
)
def test_when_the_answer_leads(ahead, layers):
    assert logit_lens.leads_after(np.array(ahead)) == layers


def test_a_figure_of_many_prompts():
    n, ahead = 12, np.arange(12 * 31).reshape(12, 31)
    words = [["a", " "]] * 31
    figure = figures.logit_lens(["x", "y"], words, np.zeros((31, 2)), ["z"] * n, ahead)
    assert len(figure.axes[1].lines) == n
    plt.close(figure)


def test_what_is_ahead_of_the_answer(model, answer):
    # The embedding of the answer, read with a norm that does nothing, is nearest to itself.
    unit = model.embedding / jnp.linalg.norm(model.embedding, axis=-1, keepdims=True)
    norm = type(model.norm)(jnp.ones_like(model.norm.weight), 1e-5)
    reading = logit_lens.Lens(norm, unit, answer)(jnp.stack([unit[answer], -unit[answer]]))
    assert reading.word[0] == answer
    assert reading.ahead.tolist() == [0, len(unit) - 1]
