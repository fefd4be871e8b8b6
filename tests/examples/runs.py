"""Runs of `examples.harvest_activations`, in this process and in others, and what they store."""

import os
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from examples.activations import store

from . import small

BATCH, T, LAYER = 8, 16, 1


def options(archive, folder, *more, batches):
    settings = {"batch": BATCH, "length": T, "layer": LAYER, "batches": batches}
    numbers = [f"--{name}={value}" for name, value in settings.items()]
    return [f"--texts={archive}", f"--out={folder}", *numbers, *more]


def files(folder):
    """All bytes of a store."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if "progress" not in path.parts
    }


def contents(folder):
    found = store.read(folder)
    return {name: np.asarray(array.read().result()) for name, array in found.arrays.items()}


def beginning(folder):
    """The sequences before the first that is missing."""
    found, rows = store.read(folder), []
    for number in range(len(found)):
        futures = {name: array[number].read() for name, array in found.arrays.items()}
        try:
            rows.append({name: np.asarray(future.result()) for name, future in futures.items()})
        except ValueError as error:
            assert "is missing" in str(error)
            break
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def by_hand(tokens):
    """The residual stream out of the layer, by the parts of the model."""
    model, _ = small.load()
    mask = jnp.tril(jnp.ones((T, T), bool))
    resid = model.embedding[tokens]
    for layer in range(LAYER + 1):
        resid = jax.tree.map(lambda w, layer=layer: w[layer], model.blocks)(resid, mask)
    return np.asarray(resid)


def check(found, batches):
    assert found["tokens"].shape == (BATCH * batches, T)
    stored = found["resid_post"]
    assert stored.shape == (BATCH * batches, T, small.D) and stored.dtype == ml_dtypes.bfloat16
    expected = np.stack([by_hand(row) for row in found["tokens"]])
    np.testing.assert_allclose(stored.astype(np.float32), expected, rtol=2**-7, atol=2**-10)


COMMAND = [sys.executable, "-m", "tests.examples.small"]


started = []


def process(archive, folder, *more, batches, devices=1):
    running = subprocess.Popen(
        [*COMMAND, *options(archive, folder, *more, batches=batches)],
        # A limit of file sizes would be one of what Python compiles, too.
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(running)
    return running


def finish(running):
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed


def written(folder):
    """How many files there are of one site."""
    return sum(1 for _ in folder.glob("resid_post/c/*/0/0"))


def wait(running, condition):
    start = time.monotonic()
    while not condition():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() - start < 120
        time.sleep(0.001)


def wait_for_more(folder, running, count):
    """Until there are so many files, and one more than there are now."""
    count = max(count, written(folder) + 1)
    wait(running, lambda: written(folder) >= count)


def kill(running):
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert running.returncode == -signal.SIGKILL


def processes(archive, folder, *more, batches):
    """Two, each with two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    split = ("--model=2", "--processes=2", f"--coordinator={address}")
    return [
        process(archive, folder, *split, f"--process={i}", *more, batches=batches, devices=2)
        for i in range(2)
    ]
