"""A model that holds more features than it has channels, and an autoencoder that tells them apart.

Shapes below: `n` features, `m` channels, `L` latents.

| site | shape | |
|---|---|---|
| `hidden` | `(m,)` | the features, squeezed into the channels of [`Toy`][] |
| `latents` | `(L,)` | what [`SAE`][] finds in them |
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import harvest


class Toy(eqx.Module):
    """Squeezes features into fewer channels, and reads them from there with the same weights."""

    weight: Float[Array, "*models m n"]
    bias: Float[Array, "*models n"]

    def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
        """**Arguments:**

        - `x`: the features.

        **Returns:**

        The features as far as they can be read: `ReLU(W^T W x + b)`.
        """
        hidden = harvest.sow(self.weight @ x, name="hidden")
        return jax.nn.relu(self.weight.T @ hidden + self.bias)


def toy(key: PRNGKeyArray, n: int, m: int) -> Toy:
    """An untrained model for `n` features in `m` channels."""
    return Toy(jax.random.normal(key, (m, n)) / n**0.5, jnp.zeros(n))


class SAE(eqx.Module):
    """A sparse autoencoder: writes a vector as a sum of few directions, out of many.

    It is an edit that can be planted: what runs on is what it makes of a value.
    """

    encoder: Float[Array, "m L"]
    threshold: Float[Array, " L"]
    decoder: Float[Array, "L m"]
    offset: Float[Array, " m"]

    @property
    def directions(self) -> Float[Array, "L m"]:
        """What each latent adds, a vector of length one, so that the latents say how much."""
        return self.decoder / jnp.linalg.norm(self.decoder, axis=1, keepdims=True)

    def encode(self, hidden: Float[Array, " m"]) -> Float[Array, " L"]:
        """How much of each direction is in a vector."""
        return jax.nn.relu((hidden - self.offset) @ self.encoder + self.threshold)

    def __call__(self, hidden: Float[Array, " m"]) -> Float[Array, " m"]:
        """What the latents know of the vector."""
        latents = harvest.sow(self.encode(hidden), name="latents")
        return latents @ self.directions + self.offset


def sae(key: PRNGKeyArray, m: int, latents: int) -> SAE:
    """An untrained autoencoder, which begins by reading along the directions that it writes."""
    decoder = jax.random.normal(key, (latents, m))
    decoder = decoder / jnp.linalg.norm(decoder, axis=1, keepdims=True)
    return SAE(decoder.T, jnp.zeros(latents), decoder, jnp.zeros(m))
