"""A sparse autoencoder of which each vector has so many latents, and no more.

Shapes below: `D` channels, `L` latents.

| site | shape | |
|---|---|---|
| `latents` | `(L,)` | how much of each direction is in the vector; `k` are not zero |
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import harvest


class TopK(eqx.Module):
    """Keeps the `k` largest latents of each vector (Gao et al., 2024, arXiv:2406.04093).

    It maps a value to a value, and so is an edit that can be planted.
    """

    encoder: Float[Array, "D L"]
    bias: Float[Array, " L"]
    decoder: Float[Array, "L D"]
    offset: Float[Array, " D"]
    k: int = eqx.field(static=True)

    def encode(self, x: Float[Array, " D"]) -> Float[Array, " L"]:
        """The latents of a vector."""
        before = jax.nn.relu((x - self.offset) @ self.encoder + self.bias)
        least = jax.lax.top_k(before, self.k)[0][-1]
        return jnp.where(before >= least, before, 0)

    def __call__(self, x: Float[Array, " D"]) -> Float[Array, " D"]:
        """What the latents know of a vector."""
        return harvest.sow(self.encode(x), name="latents") @ self.decoder + self.offset

    def rescaled(self, factor: float | Float[Array, ""]) -> "TopK":
        """The same for vectors that are longer by a factor."""
        return TopK(self.encoder, self.bias * factor, self.decoder, self.offset * factor, self.k)


def topk(key: PRNGKeyArray, mean: Float[Array, " D"], latents: int, k: int) -> TopK:
    """An untrained one, which reads along the directions that it writes, around a mean."""
    decoder = jax.random.normal(key, (latents, mean.size))
    decoder = decoder / jnp.linalg.norm(decoder, axis=1, keepdims=True)
    return TopK(decoder.T, jnp.zeros(latents), decoder, mean, k)


class Principal(eqx.Module):
    """What is left of a vector in a few directions around a mean: an autoencoder that is linear."""

    directions: Float[Array, "k D"]
    mean: Float[Array, " D"]

    def __call__(self, x: Float[Array, " D"]) -> Float[Array, " D"]:
        """What the directions have of a vector."""
        return (x - self.mean) @ self.directions.T @ self.directions + self.mean


def principal(x: Float[np.ndarray, "rows D"], k: int) -> Principal:
    """The first `k` principal components of vectors."""
    vectors = np.linalg.eigh(np.cov(x.T))[1]  # the largest last
    return Principal(jnp.asarray(vectors.T[len(vectors) - k :]), jnp.asarray(x.mean(axis=0)))
