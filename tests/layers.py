"""Models of Equinox's, some of them split by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from harvest import sow

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4,))


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


def mlp(seed=0, **kwargs):
    return eqx.nn.MLP(4, 3, 8, depth=2, key=jax.random.key(seed), **kwargs)


def linears(n, seed=0, size=4):
    keys = jax.random.split(jax.random.key(seed), n)
    return [eqx.nn.Linear(size, size, key=key) for key in keys]


def mlp_by_hand(model, x, replaced=None):
    """The outputs of the layers, and of the whole."""
    outs = []
    for i, layer in enumerate(model.layers):
        x = layer.weight @ x + layer.bias
        outs.append(x)
        if i == replaced:
            x = 2 * x
        x = jnp.maximum(x, 0) if i < 2 else x
    return outs, x


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(4)
        self.linear = eqx.nn.Linear(4, 4, key=key)

    def __call__(self, x):
        h = sow(self.norm(x), name="resid")
        return x + self.linear(h)


def blocks_by_hand(blocks, x):
    outs = []
    for block in blocks:
        x = x + block.linear.weight @ block.norm(x) + block.linear.bias
        outs.append(x)
    return jnp.stack(outs)


def make_blocks(n=3):
    return [Block(key) for key in jax.random.split(KEY, n)]


def square(x):
    return x**2
