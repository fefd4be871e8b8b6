"""Reads a store for training: whole files in a random order, and their rows shuffled together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import tensorstore as ts
from jaxtyping import Float, Int

from .errors import explained
from .settings import SettingError
from .store import about_of


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
        return about_of(self.array)

    def part(self, file: int) -> slice:
        """The sequences of a file."""
        return slice(int(file) * self._sequences, (int(file) + 1) * self._sequences)

    def read(self, file: int) -> Float[np.ndarray, "rows D"]:
        """The vectors of a file."""
        with explained(f"read file {file}", ""):
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


def batches(
    vectors: Vectors,
    files: Sequence[int],
    epochs: int,
    batch: int,
    *,
    at_once: int,
    together: int,
    seed: int,
) -> grain.IterDataset:
    """Vectors to train on, shuffled, and read ahead.

    A row of a file is near others of the same text. So that a batch is of many texts, some files
    are read together, and their rows shuffled.

    **Arguments:**

    - `files`: their numbers.
    - `epochs`: how often each vector is there, in another order every time.
    - `batch`: how many vectors in a batch.
    - `at_once`: how many batches in an array.
    - `together`: how many files are shuffled together.

    **Returns:**

    A dataset of `(batches, batch, D)` arrays of float32; the last may have fewer batches. Vectors
    that do not fill a batch are left out at the very end only: fewer than one batch.
    """

    def shuffle(rows: Float[np.ndarray, "rows D"], rng: np.random.Generator) -> np.ndarray:
        rng.shuffle(rows)
        return rows

    data = grain.MapDataset.source(files).seed(seed).shuffle().map(vectors.read)
    blocks = data.batch(together, batch_fn=np.concatenate).random_map(shuffle).repeat(epochs)
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    rows = blocks.to_iter_dataset(ahead)
    single = grain.experimental.RebatchIterDataset(rows, batch, drop_remainder=True)
    return single.batch(at_once)


def count(vectors: Vectors, files: Sequence[int], epochs: int, batch: int) -> int:
    """How many batches there are in [`batches`][]."""
    return epochs * len(files) * vectors.rows // batch
