"""Reads a store for training: whole files in a random order, and their rows shuffled together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import tensorstore as ts
from jaxtyping import Float, Int

from . import SettingError
from .store import explained


@dataclasses.dataclass(frozen=True)
class Vectors:
    """The vectors of one site, `(sequences, T, D)`, of which no sequence's first is used.

    What a model writes at the first position is like nothing else: attention that has nothing to
    look at goes there (Xiao et al., 2023, arXiv:2309.17453).
    """

    array: ts.TensorStore

    def __post_init__(self):
        if self.array.rank != 3:
            shape = "(sequences, T, D)"
            raise SettingError(
                f"an array of vectors is {shape}, and this one is {self.array.shape}"
            )

    @property
    def files(self) -> int:
        """How many files there are."""
        return self.array.shape[0] // self._sequences

    @property
    def rows(self) -> int:
        """How many vectors a file has."""
        return self._sequences * (self.array.shape[1] - 1)

    @property
    def about(self) -> dict[str, Any]:
        """How the model was set when they were collected."""
        return self.array.spec().to_json()["metadata"]["attributes"]

    def part(self, file: int) -> slice:
        """The sequences of a file."""
        return slice(int(file) * self._sequences, (int(file) + 1) * self._sequences)

    def read(self, file: int) -> Float[np.ndarray, "rows D"]:
        """The vectors of a file."""
        with explained(f"read file {file}"):
            values = self.array[self.part(file), 1:].read().result()
        return np.asarray(values, np.float32).reshape(-1, self.array.shape[-1])

    @property
    def _sequences(self) -> int:
        sizes = self.array.chunk_layout.write_chunk.shape
        assert sizes is not None and sizes[0] is not None
        return sizes[0]


def split(
    vectors: Vectors, held_out: int, seed: int
) -> tuple[Int[np.ndarray, " a"], Int[np.ndarray, " b"]]:
    """The numbers of the files to train on, and of those to test on."""
    order = np.random.default_rng(seed).permutation(vectors.files)
    return order[held_out:], order[:held_out]


def blocks(
    vectors: Vectors, files: Sequence[int], epochs: int, batch: int, together: int, seed: int
) -> grain.IterDataset:
    """Vectors to train on, in blocks that are shuffled, and are read ahead.

    A row of a file is near others of the same text. So that a batch is of many texts, some files
    are read together, and their rows shuffled.

    **Arguments:**

    - `files`: their numbers.
    - `epochs`: how often each is read, in another order every time.
    - `batch`: how many vectors in a batch.
    - `together`: how many files in a block.

    **Returns:**

    A dataset of `(batches, batch, D)` arrays of float32.
    """

    def shuffle(rows: Float[np.ndarray, "rows D"], rng: np.random.Generator) -> np.ndarray:
        rng.shuffle(rows)
        count = len(rows) // batch
        return rows[: count * batch].reshape(count, batch, -1)

    data = grain.MapDataset.source(files).seed(seed).shuffle().repeat(epochs).map(vectors.read)
    data = data.batch(together, drop_remainder=True, batch_fn=np.concatenate)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    return data.random_map(shuffle).to_iter_dataset(ahead)
