"""Generation, with models whose continuation is known."""

import jax
import jax.numpy as jnp
import numpy as np

import harvest
from examples.models.generate import generate

VOCAB = 7
PROMPT, LENGTH = jnp.array([3, 4, 0, 0]), jnp.asarray(2)


def counts_up(tokens, length):
    """Expects the next number; and, since padding must not matter, nothing of what is padding."""
    real = jnp.arange(tokens.size) < length
    step = harvest.sow(jnp.asarray(1), name="step")
    following = jnp.where(real, (tokens + step) % VOCAB, VOCAB - 1)
    return jax.nn.one_hot(following, VOCAB)


def test_the_likeliest_follow():
    got = generate(counts_up, PROMPT, LENGTH, 5)
    np.testing.assert_array_equal(got, [3, 4, 5, 6, 0, 1, 2, 0, 0])


def test_what_is_planted_acts_at_each_token_and_does_not_retrace():
    traces = 0

    def counted(tokens, length):
        nonlocal traces
        traces += 1
        return counts_up(tokens, length)

    for step in (2, 3):
        edit = {"step": harvest.add(jnp.asarray(step - 1))}
        got = generate(harvest.plant(counted, edit), PROMPT, LENGTH, 3)
        np.testing.assert_array_equal(got[:5], [3, *((4 + step * np.arange(4)) % VOCAB)])
        first = traces if step == 2 else first
    assert traces == first > 0


def test_samples_have_the_models_probabilities():
    p = jnp.array([0.5, 0.3, 0.2])
    model = lambda tokens, length: jnp.tile(jnp.log(p), (tokens.size, 1))
    args = model, PROMPT, LENGTH, 2000
    for temperature in (1.0, 0.5):
        got = generate(*args, key=jax.random.key(1), temperature=temperature)[2:2002]
        expected = p ** (1 / temperature)
        share = np.bincount(got, minlength=3) / 2000
        np.testing.assert_allclose(share, expected / expected.sum(), atol=0.04)
    same = generate(*args, key=jax.random.key(1), temperature=0.5)
    np.testing.assert_array_equal(same[2:2002], got)


def test_the_model_writes_as_it_reads(model, tokenizer):
    prompt = tokenizer.encode("The capital of France is").ids
    for length in (len(prompt), len(prompt) + 1):
        padded = jnp.pad(jnp.asarray(prompt), (0, 2))
        got = generate(model, padded, jnp.asarray(len(prompt)), 2)
        expected = jnp.argmax(model(got[:length])[-1])
        assert got[length] == expected
    assert tokenizer.decode([int(got[len(prompt)])]) == " Paris"
