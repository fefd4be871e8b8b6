"""Put an autoencoder's reconstruction in place of a site, keep its error, then clamp one latent.

And the gradient of the output by that latent. Answered by docs/how-to/splice-an-sae.md.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import harvest


def layer(x, weights):
    up, down = weights
    return x + harvest.sow(jax.nn.gelu(x @ up), name="hidden") @ down, None


def mean_output(params, batch):
    x, _ = jax.lax.scan(layer, batch, params["layers"])
    return jnp.tanh(x @ params["readout"]).mean()


class Tied(eqx.Module):
    weight: jax.Array  # (latents, size): of the encoder, and transposed of the decoder

    def __call__(self, hidden):
        latents = jax.nn.relu(hidden @ self.weight.T)
        error = hidden - latents @ self.weight
        # Sown after the error, which has to stay as it is when a latent is edited.
        return harvest.sow(latents, name="latents") @ self.weight + error


def by_hand(params, batch, weight, latent):
    """The mean output, with latent 7 of each example set in the third layer."""
    x = batch
    for i, (up, down) in enumerate(zip(*params["layers"], strict=True)):
        hidden = jax.nn.gelu(x @ up)
        change = latent - jax.nn.relu(hidden @ weight[7])
        x = x + (hidden + (i == 2) * change[:, None] * weight[7]) @ down
    return jnp.tanh(x @ params["readout"]).mean()


def main() -> None:
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) / 3
    params = {"layers": (draw(0, 4, 6, 12), draw(1, 4, 12, 6)), "readout": draw(2, 6)}
    batch, weight = draw(3, 5, 6), draw(4, 20, 12)

    spliced = harvest.plant(mean_output, {"hidden": harvest.at(2, Tied(weight))})
    assert jnp.allclose(spliced(params, batch), mean_output(params, batch), atol=1e-5)
    # The latents are a site of the spliced model, so to clamp one is to edit it.
    clamped = harvest.plant(spliced, {"latents": lambda latents: latents.at[:, 7].set(1.5)})
    value, grads = harvest.value_and_grad(clamped, "latents")(params, batch)
    grad = grads["latents"].branches[-1][2, :, 7]  # in the branch and the layer of the autoencoder
    expected, d_latent = jax.value_and_grad(by_hand, 3)(params, batch, weight, jnp.full(5, 1.5))
    assert jnp.allclose(value, expected, atol=1e-5) and jnp.allclose(grad, d_latent, atol=1e-5)
    print(f"clamped, the mean output is {value:.4f}, and its gradient is {grad}")


if __name__ == "__main__":
    main()
