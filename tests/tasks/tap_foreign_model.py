"""Look into a vision transformer whose source is not ours: outputs, weights, a swap, gradients.

The pages are docs/how-to/a-model-i-did-not-write.md and docs/how-to/attention-weights.md.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import harvest


class Encoder(eqx.Module):  # as a third party wrote it
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __call__(self, x, key):
        x = x + self.attention(x, x, x, key=key)
        return x + jax.vmap(self.mlp)(x)


class ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    encoders: list[Encoder]

    def __call__(self, image, key):
        x = self.patches(image).reshape(16, 9).T
        for encoder in self.encoders:
            x = encoder(x, key)
        return x.mean(axis=0)


def main() -> None:
    key = iter(jax.random.split(jax.random.key(0), 7))
    attention = lambda: eqx.nn.MultiheadAttention(4, 16, dropout_p=0.1, key=next(key))
    encoders = [Encoder(attention(), eqx.nn.MLP(16, 16, 32, 1, key=next(key))) for _ in range(2)]
    model = ViT(eqx.nn.Conv2d(1, 16, 4, 4, key=next(key)), encoders)
    call = jax.random.normal(next(key), (5, 1, 12, 12)), jax.random.split(next(key), 5)
    loss = lambda model, *call: -jax.nn.log_softmax(jax.vmap(model)(*call))[:, 3].sum()
    square = lambda eqn: eqn.primitive == "div" and eqn.outputs[0].shape[-2:] == (9, 9)
    is_softmax = lambda eqn: square(eqn) and "Dropout" not in eqn.scope  # which divides them too
    sown = harvest.sow_eqns(harvest.tap(model, [Encoder, "**/attention"]), is_softmax, "weights")
    acts = harvest.reap(loss)(sown, *call)
    x = acts["encoders/0/out"]
    swapped = harvest.plant(loss, {"encoders/1/out": x})(sown, *call)
    slopes = harvest.grad(loss, "encoders/0/out")(sown, *call)["encoders/0/out"]
    patched = jax.vmap(model.patches)(call[0]).reshape(5, 16, 9).mT  # from here on by hand
    assert jnp.allclose(x, jax.vmap(encoders[0])(patched, call[1]), atol=1e-5)
    attn = encoders[1].attention  # of 4 heads of size 4
    q, k = ((x @ p.weight.T).reshape(5, 9, 4, 4) for p in (attn.query_proj, attn.key_proj))
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / 2)
    assert jnp.allclose(acts["encoders/1/attention/weights/1"], weights, atol=1e-5)
    head = lambda x: -jax.nn.log_softmax(x.mean(axis=1))[:, 3].sum()
    expected = jax.grad(lambda x: head(jax.vmap(encoders[1])(x, call[1])))(x)
    assert jnp.allclose(swapped, head(x), atol=1e-4) and jnp.allclose(slopes, expected, atol=1e-5)
    print(f"loss {loss(model, *call):.3f}, without encoder 1 {swapped:.3f}")


if __name__ == "__main__":
    main()
