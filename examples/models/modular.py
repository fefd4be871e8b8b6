"""A transformer of one layer that adds two numbers modulo a prime.

It reads "a b =", with a token for each of the `p` numbers and one for "=", at which it answers.
Without norms and biases, as small as the arithmetic can be had. Shapes below: `D` = 128 channels,
`H` = 4 heads of `K` = 32 channels, `M` = 256 neurons. Since the answer is all that is read, there
are queries, and neurons, at the last token only.

| site | shape | |
|---|---|---|
| `embed` | `(3, D)` | embeddings of tokens and positions, added up |
| `q` | `(H, K)` | query of the last token |
| `k`, `v` | `(3, H, K)` | keys and values |
| `pattern` | `(H, 3)` | attention probabilities of the last token |
| `z` | `(H, K)` | output of each head, before the output projection |
| `resid_mid` | `(D,)` | residual stream between attention and MLP |
| `mlp_post` | `(M,)` | neurons |
| `resid_post` | `(D,)` | residual stream at the end |
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import harvest


class ModularAdder(eqx.Module):
    """The model on one pair; batch it with `jax.vmap`."""

    embedding: Float[Array, "p+1 D"]
    position: Float[Array, "3 D"]
    query: Float[Array, "D H K"]
    key: Float[Array, "D H K"]
    value: Float[Array, "D H K"]
    output: Float[Array, "H K D"]
    up: Float[Array, "D M"]
    down: Float[Array, "M D"]
    unembedding: Float[Array, "D p"]

    def __call__(self, pair: Int[Array, " 2"]) -> Float[Array, " p"]:
        """The logits of the sum."""
        tokens = jnp.append(pair, len(self.embedding) - 1)
        resid = harvest.sow(self.embedding[tokens] + self.position, name="embed")
        q = harvest.sow(jnp.einsum("d,dhk->hk", resid[-1], self.query), name="q")
        k = harvest.sow(jnp.einsum("td,dhk->thk", resid, self.key), name="k")
        v = harvest.sow(jnp.einsum("td,dhk->thk", resid, self.value), name="v")
        scores = jnp.einsum("hk,shk->hs", q, k) / q.shape[-1] ** 0.5
        pattern = harvest.sow(jax.nn.softmax(scores, axis=-1), name="pattern")
        z = harvest.sow(jnp.einsum("hs,shk->hk", pattern, v), name="z")
        mid = resid[-1] + jnp.einsum("hk,hkd->d", z, self.output)
        mid = harvest.sow(mid, name="resid_mid")
        neurons = harvest.sow(jax.nn.relu(mid @ self.up), name="mlp_post")
        post = harvest.sow(mid + neurons @ self.down, name="resid_post")
        return post @ self.unembedding


def make(key: PRNGKeyArray, p: int) -> ModularAdder:
    """An untrained model for numbers below `p`."""
    d, h, k, m = 128, 4, 32, 256
    keys = iter(jax.random.split(key, 9))
    normal = lambda *shape, by: jax.random.normal(next(keys), shape) / by**0.5
    # Small embeddings: large ones are memorised, and it takes longer to see what they share.
    embedding, position = 0.5 * normal(p + 1, d, by=d), 0.5 * normal(3, d, by=d)
    query, key, value = (normal(d, h, k, by=d) for _ in range(3))
    output, up, down = normal(h, k, d, by=d), normal(d, m, by=d), normal(m, d, by=m)
    return ModularAdder(
        embedding, position, query, key, value, output, up, down, normal(d, p, by=d)
    )
