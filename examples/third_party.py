"""Look into two models that were written without harvest, and edit neither.

    python -m examples.third_party

1. A vision transformer of the package `equimo` learns to tell shapes. `harvest.tap` then has all of
   its blocks and attention patterns by their paths: what each block looks at, what it adds, and
   what it costs to silence its attention.
2. MiniLM, a published encoder of sentences: in which layer is the "bank" of a river another word
   than the one that lends money?

Takes about half a minute, and writes its figure to `examples/out`.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import third_party as figures
from .models import minilm, vit

BLOCKS = "blocks/0/blocks/*"  # equimo holds them in one chunk
SIMILAR = ["That is a happy person", "That is a happy dog", "That is a very happy person"]
SIMILAR += ["Today is a sunny day"]
COSINES = 0.6946, 0.9429, 0.2569  # of the first with the others: torch, with the same weights
MONEY = """She opened an account at the bank. The bank raised its interest rates again. He works as
a clerk in a bank downtown. They robbed the bank and took the cash. My bank charges a fee for every
transfer. The bank refused to give us a loan. I have to deposit this cheque at the bank. A bank
lends the money of its customers."""
RIVER = """We sat on the grassy bank of the river. The boat ran aground on the muddy bank. Willows
grow along the bank of the stream. He fished all day from the bank. The river burst its bank after
the storm. They swam across to the other bank. An otter slipped from the bank into the water. The
path follows the bank of the canal."""


@eqx.filter_vmap(in_axes=(None, 0))
def classify(model: Any, image: Float[Array, "1 H W"]) -> Float[Array, " kinds"]:
    """The logits of each image."""
    return model(image, inference=True)


def by_hand(model: Any, image: Float[Array, "1 H W"]) -> Float[Array, "blocks T D"]:
    """The residual stream before the first block and after each, from its author's own parts."""
    x, *_ = model.prepare_tokens(image, key=None, inference=True)
    states = [x]
    for block in model.blocks[0].blocks:
        states.append(block(states[-1], key=None, inference=True))
    return jnp.stack(states)


def on_shape(patch: Int[Array, "n 2"]) -> Float[np.ndarray, "n grid grid"]:
    """1 at the patches that a shape covers."""
    at = np.arange(vit.GRID)[None] - np.asarray(patch)[:, :, None]
    covers = (0 <= at) & (at < vit.SHAPE // vit.PATCH)
    return (covers[:, 0, :, None] & covers[:, 1, None]).astype(np.float32)


def word_sense(vectors: Float[np.ndarray, "2n D"]) -> float:
    """How often a word is nearest to the others of its sense. Those of one sense come first."""
    n, right = len(vectors) // 2, 0
    for i, vector in enumerate(vectors):
        others = np.arange(2 * n) != i
        means = [vectors[:n][others[:n]].mean(axis=0), vectors[n:][others[n:]].mean(axis=0)]
        first, second = (np.linalg.norm(vector - mean) for mean in means)
        right += (first < second) == (i < n)
    return right / (2 * n)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the weights to start from, and the images."""
    report = Report(out)
    model_key, train_key, test_key = jax.random.split(jax.random.key(seed), 3)

    with report.step(f"Training a vision transformer on {64 * vit.STEPS} images"):
        model = jax.block_until_ready(vit.train(vit.make(model_key), train_key))
    with report.step("Collecting from it"):
        x, kind, patch = vit.images(test_key, 256)
        tapped = harvest.tap(model, [BLOCKS, "**/attn", "**/attn_drop"])
        logits, acts = harvest.capture(classify, ["**/out"], mode="strict")(tapped, x)
        states = eqx.filter_jit(eqx.filter_vmap(by_hand, in_axes=(None, 0)))(model, x)
        blocks = harvest.stacked(acts, f"{BLOCKS}/out")
        difference = jnp.max(jnp.abs(blocks - states.swapaxes(0, 1)[1:]))
        # Dropout passes the attention patterns on: (blocks, images, heads, tokens, tokens).
        pattern = harvest.stacked(acts, "**/attn_drop/out")[..., 1:, 1:].mean(axis=3)
        looks = np.asarray(pattern / pattern.sum(axis=-1, keepdims=True))
        looks = looks.reshape(*looks.shape[:3], vit.GRID, vit.GRID)
        share = (looks * on_shape(patch)[None, :, None]).sum(axis=(-2, -1)).mean(axis=1)
        frame = int(jnp.argmax(kind == 3))
        drawn = np.asarray(blocks[:, frame, 1:]).reshape(len(blocks), vit.GRID, vit.GRID, -1)
    with report.step("Silencing the attention of one block at a time"):
        accuracy = lambda logits: float(jnp.mean(logits.argmax(axis=-1) == kind))
        silenced = harvest.sweep(classify, "**/attn/out", lambda h: 0 * h)(tapped, x)
        without = [accuracy(silenced[key]) for key in silenced]

    with report.step("Loading MiniLM"):
        model, tokenizer = minilm.load()
        similar = eqx.filter_jit(eqx.filter_vmap(model))(*minilm.encode(tokenizer, SIMILAR))
    with report.step("Reading of banks"):
        sentences = [s for text in (MONEY, RIVER) for s in text.replace("\n", " ").split(". ")]
        tokens, mask = minilm.encode(tokenizer, sentences)
        layers = harvest.tap(model, ["embeddings", "layers/*"])
        acts = harvest.reap(eqx.filter_vmap(layers))(tokens, mask)
        hidden = [acts["embeddings/out"], *harvest.stacked(acts, "layers/*/out")]
        position = jnp.argmax(tokens == tokenizer.token_to_id("bank"), axis=1)
        senses = [word_sense(np.asarray(h[jnp.arange(len(h)), position])) for h in hidden]

    with report.step("Drawing"):
        attended = looks[np.arange(len(looks)), frame, share.argmax(axis=1)]
        figure = figures.third_party(np.asarray(x[frame, 0]), attended, drawn, without, senses)
        report.save(figure, "third_party.png")

    expect, first, last = report.expect, without[0], without[-1]
    expect("accuracy of the vision transformer", accuracy(logits), 0.95, 1, "it has learnt")
    expect("blocks, by path and by hand", float(difference), 0, 1e-3, "the same computation")
    chance = (vit.SHAPE / vit.SIZE) ** 2
    most = float(share.max())
    expect("attention to the shape, one head", most, 3 * chance, 1, f"{chance:.2f} is its area")
    expect("accuracy, block 0 attends to nothing", first, 0, 0.8, "what the others build on")
    expect("... block 3 attends to nothing", last, 0.9, 1, "by then all is said")
    for sentence, cosine, wanted in zip(
        SIMILAR[1:], similar[1:] @ similar[0], COSINES, strict=True
    ):
        expect(f"similarity, {sentence!r}", float(cosine), wanted - 1e-3, wanted + 1e-3, "torch")
    expect("word sense, embeddings", senses[0], 0.4, 0.85, "the word is the same")
    expect("... best layer", max(senses), 0.9, 1, "its neighbours are not")
    expect("... last layer", senses[-1], 0.9, math.inf, "nor is what is said")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
