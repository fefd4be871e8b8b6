"""SmolLM2 token by token: keys and values of what was read are kept, and not computed again."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import harvest

from .smollm2 import Block, SmolLM2


class Cache(eqx.Module):
    """The keys and values of the tokens so far, in every layer, with room for more."""

    keys: Float[Array, "layers S kv_heads K"]
    values: Float[Array, "layers S kv_heads K"]

    @staticmethod
    def empty(model: SmolLM2, size: int) -> "Cache":
        """One with room for `size` tokens."""
        assert isinstance(model.blocks, Block)
        n_layers, n_heads, n_channels, _ = model.blocks.attention.key.shape
        room = jnp.zeros((n_layers, size, n_heads, n_channels))
        return Cache(room, room)


def read(
    model: SmolLM2, tokens: Int[Array, " T"], cache: Cache, start: Int[Array, ""] | int
) -> tuple[Float[Array, "T vocab"], Cache]:
    """As `model(tokens)`, for tokens that come after others.

    Its sites are those of the model, of these tokens only. Scores and patterns have an axis for
    each place in the cache.

    **Arguments:**

    - `tokens`: token ids.
    - `cache`: of the tokens before.
    - `start`: how many these are. Whatever the cache holds behind is not attended to.

    **Returns:**

    The logits of each next token, and the cache with these tokens.
    """
    assert isinstance(model.blocks, Block)
    position = start + jnp.arange(tokens.size)
    mask = position[:, None] >= jnp.arange(cache.keys.shape[1])[None]

    def layer(
        resid: Float[Array, "T D"], layer: tuple[Block, Cache]
    ) -> tuple[Float[Array, "T D"], Cache]:
        block, before = layer

        def attend(resid: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], Cache]:
            q, *new = block.attention.heads(resid, start)
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, part, start, axis=0)
                for old, part in zip((before.keys, before.values), new, strict=True)
            )
            return block.attention.read(q, keys, values, mask), Cache(keys, values)

        return block.around(resid, attend)

    resid = harvest.sow(model.embedding[tokens], name="embed")
    resid, cache = jax.lax.scan(layer, resid, (model.blocks, cache))
    return model.read_out(resid), cache


@eqx.filter_jit
def generate(
    model: SmolLM2,
    tokens: Int[Array, " prompt"],
    length: Int[Array, ""] | int,
    new: int,
    *,
    key: PRNGKeyArray | None = None,
    temperature: float = 1.0,
) -> Int[Array, " new"]:
    """Continues a prompt, one token after the other, in one compiled scan.

    The sites of the prompt are in the scope `prompt`. Those of the tokens that are written have an
    axis of `new` in front: `reap(generate, "resid_post")` is `(new, layers, 1, D)`, and
    `plant(generate, {"resid_post": harvest.at((steps, layer), edit)})` acts at chosen steps.

    **Arguments:**

    - `tokens`, `length`: the prompt, padded at the end, and how many of its tokens are real.
    - `new`: how many tokens to write.
    - `key`: to sample with. Without one, each token is the likeliest.
    - `temperature`: what the logits are divided by, to sample.
    """

    def choose(logits: Float[Array, " vocab"], i: Int[Array, ""]) -> Int[Array, ""]:
        if key is None:
            return jnp.argmax(logits).astype(tokens.dtype)
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return drawn.astype(tokens.dtype)

    def step(
        carry: tuple[Float[Array, " vocab"], Cache], i: Int[Array, ""]
    ) -> tuple[tuple[Float[Array, " vocab"], Cache], Int[Array, ""]]:
        logits, cache = carry
        token = choose(logits, i)
        logits, cache = read(model, token[None], cache, length + i)
        return (logits[0], cache), token

    with harvest.scope("prompt"):
        logits, cache = read(model, tokens, Cache.empty(model, tokens.size + new), 0)
    return jax.lax.scan(step, (logits[length - 1], cache), jnp.arange(new))[1]
