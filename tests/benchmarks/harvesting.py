"""What writing activations costs the run that computes them: time, and memory of the host.

Run as `python -m tests.benchmarks.harvesting [--texts ARCHIVE]`, with the settings of
`examples.harvest_activations`; exits with 1 above its limits. Batches with and without writing take
turns, so that whatever else the machine does slows both. On Linux only, which says in `/proc` how
much memory a process has.
"""

import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable

import numpy as np

from examples import harvest_activations as harvesting
from examples.activations import parallel, shakespeare, store
from examples.models import smollm2

BATCHES, TURN = 200, 20  # with and without writing each, and how many in a turn
WARM_UP = 2  # turns of each kind, which are not counted
SLOWER, GROWTH = 1.15, 0.1  # limits: times, and MB for each batch


def resident() -> float:
    """The memory of this process, in MB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def seconds(batches: Iterable[int], memory: list[float]) -> float:
    """How long a turn takes; notes the memory after each batch."""
    start = time.perf_counter()
    memory.extend(resident() for _ in batches)
    return time.perf_counter() - start


def main(folder: pathlib.Path) -> None:
    given = harvesting.options()
    mesh = parallel.make_mesh(given.model)
    model, tokenizer = smollm2.load()
    model = parallel.place(model, mesh)
    compiled = parallel.collector(given.sites, given.layer, harvesting.DTYPE, mesh)
    collect = lambda tokens: compiled(model, parallel.place_batch(tokens, mesh))
    texts = shakespeare.works(given.texts)
    stream = iter(shakespeare.batches(texts, tokenizer, given.batch, given.length, given.seed))
    types = parallel.types(compiled, model, (given.batch, given.length), mesh)
    turns = WARM_UP + BATCHES // TURN
    into = store.create(folder, types, turns * TURN, {})
    saved, _ = harvesting.progress(folder)

    writing, not_writing, memory = [], [], []
    for done in range(0, turns * TURN, TURN):
        run = harvesting.run(stream, collect, into, saved, done, done + TURN)
        writing.append(seconds(run, memory))
        not_writing.append(seconds(harvesting.run_dry(stream, collect, TURN), []))
        print(f"{done + TURN} batches: {writing[-1]:.2f} s, {not_writing[-1]:.2f} s without")
    saved.close()

    ratio = sum(writing[WARM_UP:]) / sum(not_writing[WARM_UP:])
    memory = memory[WARM_UP * TURN :]
    slope = np.polyfit(np.arange(len(memory)), memory, 1)[0]
    size = sum(np.prod(t.shape) * t.dtype.itemsize for t in types.values()) / 1e6
    print(f"{BATCHES} batches of {size:.2f} MB: writing takes {ratio:.3f} of the time without")
    print(f"memory {memory[0]:.0f} to {memory[-1]:.0f} MB, {slope:.3f} MB more each batch")
    sys.exit(bool(ratio >= SLOWER or slope >= GROWTH))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
