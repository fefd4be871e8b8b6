"""Sequences that repeat themselves, and the heads of a language model that copy from them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .smollm2 import SmolLM2

PERIOD = 40  # tokens before a sequence repeats itself


def repeated(key: PRNGKeyArray, n: int, vocab: int) -> Int[Array, "n T"]:
    """Random tokens, each sequence twice: `T` is two periods."""
    return jnp.tile(jax.random.randint(key, (n, PERIOD), 0, vocab), (1, 2))


def losses(model: SmolLM2, tokens: Int[Array, "batch T"]) -> Float[Array, " T-1"]:
    """The loss at each token but the first, on average over the batch."""
    log_p = jax.nn.log_softmax(jax.vmap(model)(tokens)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0], axis=0)


def scores(
    pattern: Float[Array, "layers batch heads T T"],
) -> Float[Array, "layers heads"]:
    """How much each head attends from a repeated token to the one after its first copy."""
    diagonal = jnp.diagonal(pattern, offset=1 - PERIOD, axis1=-2, axis2=-1)
    # The first entry belongs to the last token of the first half, which repeats nothing.
    return jnp.mean(diagonal[..., 1:], axis=(1, 3))


def strongest_first(scores: Float[np.ndarray, "layers heads"]) -> Int[np.ndarray, "n 2"]:
    """The `(layer, head)` pairs of all heads."""
    order = np.unravel_index(np.argsort(-scores, axis=None), scores.shape)
    return np.stack(order, axis=1)


def all_but(
    heads: Int[np.ndarray, "n 2"], scores: Float[np.ndarray, "layers heads"]
) -> Float[Array, "layers heads 1"]:
    """What the output of every head is multiplied by, to silence some."""
    return jnp.ones((*scores.shape, 1)).at[heads[:, 0], heads[:, 1]].set(0)
