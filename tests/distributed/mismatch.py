"""Processes that would run different programs: what each of them is told."""

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

import harvest
from harvest import plant, reap, sow

from .model import Jit

LIMIT = 60  # seconds, after which a process would not know what is wrong


def mismatches(index: int, way: Jit) -> dict[str, tuple[str, float]]:
    """By the name of the call, the error of this process and the seconds until it came."""
    found = {}
    for name, fn, args in _calls(index, way):
        start = time.monotonic()
        try:
            harvest.debug.assert_same_program(fn, timeout=LIMIT / 4)(*args)
            error = ""
        except harvest.ProcessError as raised:
            error = str(raised)
        found[name] = error, time.monotonic() - start
    return found


def _calls(index: int, way: Jit) -> Iterator[tuple[str, Callable, tuple]]:
    """The last process collects or plants something else."""
    other = index == jax.process_count() - 1
    f = lambda x: sow(sow(jnp.sin(x), name="a") + 1, name="b").sum()
    yield "the same", reap(way, "resid"), way.arguments()
    yield "collects", reap(way, "neurons" if other else "resid"), way.arguments()
    yield "plants", plant(f, {"a" if other else "b": jnp.ones(3)}), (jnp.ones(3),)
    yield "no such key", reap(f, "c" if other else "a"), (jnp.ones(3),)
    if not other:  # which has gone on, and is not coming
        yield "absent", reap(f), (jnp.ones(3),)


def wrong(parts: list[dict[str, tuple[str, float]]]) -> Iterator[str]:
    """What is not as it should be, of what the processes were told."""
    for name in parts[0]:
        told = [part[name] for part in parts if name in part]
        errors = {error for error, _ in told}
        if len(errors) != 1:
            yield f"{name}: not the same error on each process: {sorted(errors)}"
        if ("" in errors) != (name == "the same"):
            yield f"{name}: {sorted(errors)}"
        if any(seconds > LIMIT for _, seconds in told):
            yield f"{name}: took {max(seconds for _, seconds in told):.0f} s"
