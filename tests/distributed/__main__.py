"""A sharded program on several processes, against one process and numpy.

Run as `python -m tests.distributed [PROCESSES ...]`, by default two; exits with 1 if anything
differs, or if processes that are made to run different programs are not told so. They have eight
devices between them, and JAX's collectives for CPUs.
"""

import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .mismatch import wrong
from .worker import Saved

TIMEOUT = 300  # seconds, for all cases
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def run(count: int, results: Path) -> list[tuple[dict[Any, Any], dict[str, Any]]]:
    """What each of so many processes has found, and what errors it was told."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", f"{__package__}.worker", address]
    logs = [(results / f"{count}.{index}.log").open("w+") for index in range(count)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(count), str(results)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for index, log in enumerate(logs)
    ]
    try:
        _wait(processes, logs)
    finally:
        for process in processes:
            process.kill()
    if failed := [index for index, process in enumerate(processes) if process.returncode != 0]:
        for index in failed:
            logs[index].seek(0)
            print(f"--- process {index} of {count}:", logs[index].read()[-4000:], sep="\n")
        sys.exit(f"{len(failed)} of {count} processes failed")
    return [pickle.loads((results / f"{count}.{i}.pickle").read_bytes()) for i in range(count)]


def _wait(processes: Sequence[subprocess.Popen], logs: Sequence[Any]) -> None:
    """Until all have ended; when one fails, the others would wait for it."""
    deadline = time.monotonic() + TIMEOUT
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() for process in processes)
        if failed or time.monotonic() > deadline:
            if not failed:
                print(f"no end after {TIMEOUT} s", file=sys.stderr)
            time.sleep(5 if failed else 0)
            return
        with open(logs[0].name) as log:
            line = (log.read().splitlines() or [""])[-1]
        if sys.stderr.isatty():
            print(
                f"\r\033[K{len(processes)} processes: {line}", end="", file=sys.stderr, flush=True
            )
        time.sleep(0.2)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def differences(alone: dict[Any, Any], parts: Sequence[dict[Any, Any]]) -> Iterator[str]:
    """Of what several processes have found, from what one has found alone and from numpy."""
    for case, (single, wanted) in alone.items():
        is_saved = lambda node: isinstance(node, Saved)
        tree, structure = jax.tree.flatten(single, is_leaf=is_saved)
        expected = structure.flatten_up_to(wanted)
        split = [structure.flatten_up_to(part[case][0]) for part in parts]
        for leaf, value, *pieces in zip(tree, expected, *split, strict=True):
            name = ", ".join(case)
            yield from (f"{name}: {text}" for text in _differing(leaf, value, pieces))


def _differing(single: Saved, wanted: np.ndarray, pieces: Sequence[Saved]) -> Iterator[str]:
    wanted = np.asarray(wanted)
    if single.shape != wanted.shape or any(piece.shape != wanted.shape for piece in pieces):
        yield f"shapes {single.shape}, {[piece.shape for piece in pieces]}, not {wanted.shape}"
        return
    positions = sorted(place for piece in pieces for place in piece.shards)
    everywhere = sorted([*single.shards] if min(single.shards) >= 0 else [-1] * len(pieces))
    if positions != everywhere:
        yield f"on the devices {positions}, not {everywhere}"
        return
    for piece in pieces:
        for place, (index, shard) in piece.shards.items():
            of_one = single.shards[place]
            if index != of_one[0]:
                yield f"device {place} has {index} of it, not {of_one[0]}"
            elif not np.allclose(shard, wanted[index], **TOLERANCE):
                yield f"device {place} differs by {np.abs(shard - wanted[index]).max():.1g}"
            elif not np.allclose(shard, of_one[1], **TOLERANCE):
                yield f"device {place} differs from that of one process"


def main(counts: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory)
        ((alone, _),) = run(1, results)
        failed = False
        for count in counts:
            start = time.monotonic()
            parts, told = zip(*run(count, results), strict=True)
            found = [*differences(alone, parts), *wrong(told)]
            seconds = time.monotonic() - start
            cases = f"{len(alone)} cases and {len(told[0])} checks of programs"
            print(f"{count} processes: {cases}, {len(found)} wrong ({seconds:.0f} s)")
            print(*found, sep="\n", end="\n" if found else "")
            failed = failed or bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]] or [2])
