"""One of the processes: runs every case in every way, and saves the shards that it has."""

import pickle
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .cases import cases
from .mismatch import mismatches
from .model import DATA, MODEL, WAYS, Jit


class Saved(NamedTuple):
    """An array: what one process has of it."""

    shape: tuple[int, ...]
    shards: dict[int, tuple[Any, np.ndarray]]  # by position in the mesh: which part it is, and that


def saved(value: Any, way: Jit) -> Saved:
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if isinstance(value, np.ndarray):
        return Saved(value.shape, {-1: ((slice(None),) * value.ndim, value)})
    positions = {device: i for i, device in enumerate(way.mesh.devices.flat)}
    shards = {
        positions[shard.device]: (shard.index, np.asarray(shard.data))
        for shard in value.addressable_shards
    }
    return Saved(value.shape, shards)


def main(address: str, index: int, count: int, results: Path) -> None:
    jax.config.update("jax_num_cpu_devices", DATA * MODEL // count)
    if count > 1:
        jax.distributed.initialize(address, count, index, initialization_timeout=60)
    assert len(jax.devices()) == DATA * MODEL and jax.process_count() == count
    found = {}
    for way in (make() for make in WAYS):
        with way.context():
            for case in cases(way):
                start = time.monotonic()
                result = jax.tree.map(lambda x, way=way: saved(x, way), case.run())
                found[way.name, case.name] = result, case.wanted
                seconds = time.monotonic() - start
                print(f"{way.name}, {case.name}: {seconds:.1f} s", flush=True)
    told = mismatches(index, way) if count > 1 else {}
    (results / f"{count}.{index}.pickle").write_bytes(pickle.dumps((found, told)))
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
