"""A transformer of attention layers alone, as small as induction heads can be had.

Shapes below: `T` tokens, `D` channels, `H` heads of `K` channels each. Positions are added to what
queries and keys are made of, and to nothing else, so that the residual stream says which tokens
there are and not where. The layers run in a Python loop, each in a scope of its own: the sites of
the first are `layers/0/resid_pre` and so on.

| site | shape | |
|---|---|---|
| `embed` | `(T, D)` | token embeddings |
| `resid_pre` | `(T, D)` | residual stream into the layer |
| `q_in`, `k_in`, `v_in` | `(T, D)` | the same, before the norm, once for each consumer |
| `q`, `k`, `v` | `(T, H, K)` | queries, keys and values |
| `pattern` | `(H, T, T)` | attention probabilities, query by key |
| `z` | `(T, H, K)` | output of each head, before the output projection |
| `result` | `(T, H, D)` | what each head adds to the stream |
| `resid_post` | `(T, D)` | residual stream out of the layer |
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import harvest

from .smollm2 import RMSNorm


class Attention(eqx.Module):
    """Causal attention, whose queries, keys and values can be given inputs of their own."""

    norm: RMSNorm
    query: Float[Array, "D H K"]
    key: Float[Array, "D H K"]
    value: Float[Array, "D H K"]
    output: Float[Array, "H K D"]

    def __call__(
        self, resid: Float[Array, "T D"], place: Float[Array, "T D"]
    ) -> Float[Array, "T D"]:
        """**Arguments:**

        - `resid`: the residual stream, before the norm.
        - `place`: the embeddings of the positions.

        **Returns:**

        The residual stream out of the layer.
        """
        resid = harvest.sow(resid, name="resid_pre")
        q_in, k_in, v_in = (harvest.sow(resid, name=f"{name}_in") for name in "qkv")
        q = harvest.sow(jnp.einsum("td,dhk->thk", self.norm(q_in) + place, self.query), name="q")
        k = harvest.sow(jnp.einsum("td,dhk->thk", self.norm(k_in) + place, self.key), name="k")
        v = harvest.sow(jnp.einsum("td,dhk->thk", self.norm(v_in), self.value), name="v")

        scores = jnp.einsum("thk,shk->hts", q, k) / q.shape[-1] ** 0.5
        past = jnp.tril(jnp.ones(scores.shape[1:], bool))
        scores = jnp.where(past[None], scores, -jnp.inf)
        pattern = harvest.sow(jax.nn.softmax(scores, axis=-1), name="pattern")
        z = harvest.sow(jnp.einsum("hts,shk->thk", pattern, v), name="z")
        result = harvest.sow(jnp.einsum("thk,hkd->thd", z, self.output), name="result")
        return harvest.sow(resid + result.sum(axis=1), name="resid_post")


class AttentionOnly(eqx.Module):
    """The model on one sequence; batch it with `jax.vmap`."""

    embedding: Float[Array, "vocab D"]
    position: Float[Array, "max_T D"]
    layers: tuple[Attention, ...]
    norm: RMSNorm
    unembedding: Float[Array, "D vocab"]

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T vocab"]:
        """The logits of each next token."""
        resid = harvest.sow(self.embedding[tokens], name="embed")
        for i, layer in enumerate(self.layers):
            with harvest.scope(f"layers/{i}"):
                resid = layer(resid, self.position[: tokens.size])
        return self.norm(resid) @ self.unembedding


def make(
    key: PRNGKeyArray, depth: int, *, vocab: int, length: int, width: int = 64, heads: int = 2
) -> AttentionOnly:
    """An untrained model of `depth` layers, for sequences of up to `length` tokens."""
    keys = iter(jax.random.split(key, 3 + 4 * depth))

    def normal(*shape: int, scale: float = width**-0.5) -> Array:
        return scale * jax.random.normal(next(keys), shape)

    def layer() -> Attention:
        query, key, value = (normal(width, heads, width // heads) for _ in range(3))
        return Attention(norm(), query, key, value, normal(heads, width // heads, width))

    norm = lambda: RMSNorm(jnp.ones(width), 1e-5)
    # Positions that start larger win: the model then counts instead of looking tokens up.
    embedding, position = normal(vocab, width, scale=0.5), normal(length, width, scale=0.5)
    layers = tuple(layer() for _ in range(depth))
    return AttentionOnly(embedding, position, layers, norm(), normal(width, vocab))
