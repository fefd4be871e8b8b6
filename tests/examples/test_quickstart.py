import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import harvest
from examples import quickstart


def test_residual_gradients(model, tokenizer):
    tokens = jnp.asarray(tokenizer.encode(quickstart.PROMPT).ids)
    (answer,) = tokenizer.encode(quickstart.ANSWER).ids
    gradients = quickstart.residual_gradients(model, tokens, answer)
    step = jnp.zeros_like(gradients).at[15].set(gradients[15])

    @eqx.filter_jit
    def log_p(model, step):
        nudge = harvest.each(harvest.add(step))
        logits = harvest.plant(model, {"resid_post": nudge})(tokens)
        return jax.nn.log_softmax(logits[-1])[answer]

    slope = log_p(model, step) - log_p(model, -step)
    np.testing.assert_allclose(slope, 2 * jnp.sum(gradients[15] ** 2), rtol=0.02)
