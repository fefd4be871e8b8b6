"""Two prompts differ in one token: at which (layer, position) of the residual stream is that known?

Answered by docs/how-to/sweep-a-grid.md and, as the layers are unrolled, layers-under-scan.md.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import harvest


class Block(eqx.Module):  # one causal head, then an MLP
    head: jax.Array
    mlp: eqx.nn.MLP

    def __call__(self, resid):
        q, k, v = resid @ self.head
        causal = jnp.tril(jnp.ones((len(q), len(k)), bool))
        resid = resid + jax.nn.softmax(jnp.where(causal, q @ k.T / 8, -1e9)) @ v
        return resid + jax.vmap(self.mlp)(resid)


def score(embed, blocks, tokens):
    """The difference of two logits at the last position."""
    resid = embed[tokens]
    for i, block in enumerate(blocks):
        with harvest.scope(f"blocks/{i}"):
            resid = block(harvest.sow(resid, name="resid_pre"))
    return resid[-1] @ (embed[3] - embed[5])


def main() -> None:
    embed, *heads = jax.random.normal(jax.random.key(0), (5, 3, 8, 8)) / 8**0.5
    embed = embed.reshape(24, 8)
    blocks = [Block(w, eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(i))) for i, w in enumerate(heads)]
    clean, corrupt = jnp.array([1, 7, 2, 8, 4]), jnp.array([1, 7, 6, 8, 4])

    patch = lambda resid, clean, row: resid.at[row["pos"]].set(clean[row["pos"]])
    source = harvest.reap(score)(embed, blocks, clean)
    sweep = harvest.sweep(score, source, patch, harvest.grid(pos=jnp.arange(5)))
    swept = eqx.filter_jit(sweep)(embed, blocks, corrupt)  # under `jit`: it is one program
    worst, best = score(embed, blocks, corrupt), score(embed, blocks, clean)
    heat = (harvest.stacked(swept, "blocks/*/resid_pre") - worst) / (best - worst)

    for layer, pos in np.ndindex(4, 5):  # by hand
        good, resid = embed[clean], embed[corrupt]
        for i, block in enumerate(blocks):
            resid = resid.at[pos].set(good[pos]) if i == layer else resid
            good, resid = block(good), block(resid)
        expected = (resid[-1] @ (embed[3] - embed[5]) - worst) / (best - worst)
        assert jnp.allclose(heat[layer, pos], expected, atol=1e-4)
    assert jnp.allclose(heat[:, :2], 0, atol=1e-4)  # no model looks ahead of the token
    assert jnp.allclose(heat[0], jnp.arange(5) == 2, atol=1e-4)  # at first only the token knows
    print(f"restored, by layer and position:\n{np.asarray(heat).round(2)}")


if __name__ == "__main__":
    main()
