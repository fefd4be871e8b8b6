"""Activations on disk: arrays in zarr's third format, written and read by TensorStore.

Each array is `(sequences, T, ...)`. A file of it holds the sequences that one device has of one
batch, so that two never write to the same file, and no part of it is written without the rest. A
single sequence can be read from it.
"""

import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  (numpy learns of bfloat16)
import numpy as np
import tensorstore as ts

from .errors import GO_ON, StoreError, explained
from .settings import check_same


class Store:
    """A folder with an array for each name."""

    def __init__(self, folder: pathlib.Path, arrays: Mapping[str, ts.TensorStore]):
        self.folder = folder
        self.arrays = dict(arrays)

    def __getitem__(self, name: str) -> ts.TensorStore:
        return self.arrays[name]

    def __len__(self) -> int:
        """How many sequences there are."""
        return min(array.shape[0] for array in self.arrays.values())

    def check(self) -> None:
        """**Raises:** `StoreError` if some of it is not written, by a run that was stopped."""
        for name, array in self.arrays.items():
            with explained(f"read the store in {self.folder}", ""):
                there = array.storage_statistics(query_fully_stored=True).result().fully_stored
            if not there:
                what = f"Some of {name!r} in {self.folder} is not written"
                raise StoreError(f"{what}. {GO_ON}")

    def write(self, batch: Mapping[str, jax.Array], number: int) -> list[ts.Future]:
        """Begins to write what this process has of a batch.

        Waits until it is computed. Other threads write it from where it is in memory. What several
        devices have is written by one of them.
        """
        futures = []
        for name, value in batch.items():
            start = number * len(value)
            rows = self.arrays[name][start : start + len(value)].translate_to[(0,) * value.ndim]
            for shard in value.addressable_shards:
                if shard.replica_id == 0:
                    on_host = np.asarray(shard.data)
                    part = rows[shard.index]
                    futures.append(part.write(on_host, can_reference_source_data_indefinitely=True))
        return futures

    def wait(self, futures: Iterable[ts.Future]) -> None:
        """Until they are done.

        **Raises:**

        `StoreError` if something could not be written. What was before it is in the store.
        """
        with explained(f"write into {self.folder}"):
            for future in futures:
                future.result()

    def resize(self, sequences: int, *, grow: bool = False, shrink: bool = False) -> None:
        """Makes room for so many sequences, if there is less (`grow`) or more (`shrink`)."""
        with explained(f"write into {self.folder}"):
            for name, array in self.arrays.items():
                there, *rest = array.shape
                if (grow and there < sequences) or (shrink and there > sequences):
                    size = [sequences, *[None for _ in rest]]
                    self.arrays[name] = array.resize(
                        exclusive_max=size,
                        resize_metadata_only=True,  # else it visits every file that never was
                        expand_only=grow,
                        shrink_only=shrink,
                    ).result()


def create(
    folder: pathlib.Path,
    types: Mapping[str, jax.ShapeDtypeStruct],
    batches: int,
    about: Mapping[str, Any],
    *,
    is_begun: bool = False,
) -> Store:
    """A store with room for so many batches. If there is one, it is that, with more room.

    **Arguments:**

    - `folder`: where it is, or is to be.
    - `types`: of one batch, by name, with shardings.
    - `batches`: how many.
    - `about`: what else is decided, as JSON; it is written beside each array.
    - `is_begun`: whether there has to be one.

    **Raises:**

    `SettingError` if the one that is there was made in another way; `StoreError` if it cannot
    be written.
    """
    paths = {name: folder / urllib.parse.quote(name, safe="") for name in types}
    there = [name for name, path in paths.items() if (path / "zarr.json").exists()]
    arrays = {}
    with explained(f"make a store in {folder}"):
        for name in there:
            check_same(folder, about_of(ts.open(_spec(paths[name]), open=True).result()), about)
        for name in types:
            if is_begun and name not in there:
                raise StoreError(f"{folder} has lost {name!r}. Delete all of it, to begin again.")
            arrays[name] = _create(paths[name], types[name], batches, about, name not in there)
    store = Store(folder, arrays)
    store.resize(batches * min(type.shape[0] for type in types.values()), grow=True)
    return store


def _create(
    path: pathlib.Path,
    batch: jax.ShapeDtypeStruct,
    batches: int,
    about: Mapping[str, Any],
    is_new: bool,
) -> ts.TensorStore:
    size, *rest = batch.shape
    part = batch.sharding.shard_shape(batch.shape)
    return ts.open(
        _spec(path, about),
        open=True,
        create=is_new,  # by several processes at once: one of them does
        dtype=ts.dtype(batch.dtype),
        shape=(size * batches, *rest) if is_new else None,
        chunk_layout=ts.ChunkLayout(write_chunk_shape=part, read_chunk_shape=(1, *part[1:])),
    ).result()


def about_of(array: ts.TensorStore) -> dict[str, Any]:
    """What is written beside an array."""
    return array.spec().to_json()["metadata"].get("attributes", {})


def read(folder: str | pathlib.Path) -> Store:
    """The store in a folder, as it is.

    **Raises:**

    `StoreError` if there is none.
    """
    folder = pathlib.Path(folder).absolute()
    paths = sorted(path.parent for path in folder.glob("*/zarr.json"))
    if not paths:
        raise StoreError(f"There is no store in {folder}. examples.harvest_activations makes one.")
    with explained(f"read the store in {folder}", ""):
        arrays = {
            urllib.parse.unquote(path.name): ts.open(_spec(path), open=True).result()
            for path in paths
        }
    return Store(folder, arrays)


def _spec(path: pathlib.Path, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path.absolute())},
        # What is not written yet is an error to who reads it, and no zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return spec if about is None else {**spec, "metadata": {"attributes": dict(about)}}
