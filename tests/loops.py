"""Programs with loops, written once: JAX runs them, and so does Python, as their reference.

Each is called as `program(run, x, trips)`: `run` is one of the classes below, `trips` how often a
`while_loop` runs. It sows one value, of the type of `x`, as "h".
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import harvest


class ByJAX:
    def site(self, h):
        return harvest.sow(h, name="h")

    def scan(self, body, x, length, reverse=False):
        step = lambda x, i: (body(x, i), None)
        return lax.scan(step, x, jnp.arange(length), reverse=reverse)[0]

    def loop(self, body, x, trips):
        step = lambda carry: (carry[0] + 1, body(carry[1], carry[0]))
        return lax.while_loop(lambda carry: carry[0] < trips, step, (0, x))[1]

    def where(self, predicate, fn, x):
        return lax.cond(predicate, fn, lambda x: x, x)

    def wrapped(self, wrap, fn):
        return wrap(fn)


class ByHand:
    """Records each value with the indices of the loops around it, in the order of evaluation."""

    def __init__(self):
        self.index: list[int] = []
        self.records: list[Record] = []

    def site(self, h):
        self.records.append(Record(tuple(self.index), np.asarray(h)))
        return h

    def scan(self, body, x, length, reverse=False):
        for i in reversed(range(length)) if reverse else range(length):
            self.index.append(i)
            x = body(x, jnp.asarray(i))
            self.index.pop()
        return x

    def loop(self, body, x, trips):
        return self.scan(body, x, int(trips))

    def where(self, predicate, fn, x):
        return fn(x) if predicate else x

    def wrapped(self, wrap, fn):
        return fn


class Record(NamedTuple):
    index: tuple[int, ...]
    value: np.ndarray


class Program(NamedTuple):
    fn: Callable[..., Any]
    loops: tuple[int | None, ...]  # lengths of the loops around the site; None for a `while_loop`

    def __call__(self, x, trips=3):
        return self.fn(ByJAX(), x, trips)

    def by_hand(self, x, trips=3) -> tuple[Any, list[Record]]:
        run = ByHand()
        return self.fn(run, x, trips), run.records


def _step(run, x, i, j=0):
    """A contraction, in which no two values are equal."""
    h = jnp.sin(x) + 0.37 * jnp.asarray(i, x.dtype) - 0.11 * jnp.asarray(j, x.dtype)
    return x / 2 + run.site(h) / 2


def once(run, x, trips):
    return _step(run, x, 1)


def scan(run, x, trips):
    return run.scan(lambda x, i: _step(run, x, i), x, 4)


def scan_reverse(run, x, trips):
    return run.scan(lambda x, i: _step(run, x, i), x, 4, reverse=True)


def scan_of_scan(run, x, trips):
    def outer(x, i):
        return run.scan(lambda x, j: _step(run, x, i, j), x * 0.9, 2, reverse=True) + 0.1

    return run.scan(outer, x, 3)


def _scan_of(wrap):
    def program(run, x, trips):
        step = run.wrapped(wrap, lambda x, shift: _step(run, x, shift))
        return run.scan(lambda x, i: step(x, i.astype(x.dtype) / 2), x, 4)

    return program


def _custom_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def _custom_vjp(fn):
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, ct: vjp(ct))
    return wrapped


def scan_of_cond(run, x, trips):
    def body(x, i):
        return run.where(i % 3 != 1, lambda x: _step(run, x, i), x) * 0.9

    return run.scan(body, x, 5)


def cond_of_scan(run, x, trips):
    return run.where(jnp.asarray(True), lambda x: scan(run, x, trips), x)


def jit_of_scan(run, x, trips):
    return run.wrapped(jax.jit, lambda x: scan(run, x, trips))(x)


def while_loop(run, x, trips):
    return run.loop(lambda x, i: _step(run, x, i), x, trips)


def while_of_cond(run, x, trips):
    def body(x, i):
        return run.where(i % 3 != 1, lambda x: _step(run, x, i), x) * 0.9

    return run.loop(body, x, trips)


def scan_in_while(run, x, trips):
    def outer(x, i):
        return run.scan(lambda x, j: _step(run, x, i, j), x, 2) + 0.1

    return run.loop(outer, x, trips)


def while_in_scan(run, x, trips):
    def outer(x, i):
        return run.loop(lambda x, j: _step(run, x, i, j), x, trips - i % 2) + 0.1

    return run.scan(outer, x, 3)


def while_in_while(run, x, trips):
    def outer(x, i):
        return run.loop(lambda x, j: _step(run, x, i, j), x, trips - i) + 0.1

    return run.loop(outer, x, trips)


PROGRAMS = {
    "once": Program(once, ()),
    "scan": Program(scan, (4,)),
    "scan_reverse": Program(scan_reverse, (4,)),
    "scan_of_scan": Program(scan_of_scan, (3, 2)),
    "scan_of_jit": Program(_scan_of(jax.jit), (4,)),
    "scan_of_checkpoint": Program(_scan_of(jax.checkpoint), (4,)),
    "scan_of_custom_jvp": Program(_scan_of(_custom_jvp), (4,)),
    "scan_of_custom_vjp": Program(_scan_of(_custom_vjp), (4,)),
    "scan_of_cond": Program(scan_of_cond, (5,)),
    "cond_of_scan": Program(cond_of_scan, (4,)),
    "jit_of_scan": Program(jit_of_scan, (4,)),
    "while_loop": Program(while_loop, (None,)),
    "while_of_cond": Program(while_of_cond, (None,)),
    "scan_in_while": Program(scan_in_while, (None, 2)),
    "while_in_scan": Program(while_in_scan, (3, None)),
    "while_in_while": Program(while_in_while, (None, None)),
}
