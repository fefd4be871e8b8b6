"""Programs with sites in loops and branches, run in JAX, or in Python step by step.

Each has two sites, `a` and `b`, whose values may hold a NaN in one iteration, and is called as
`program(ops)`.
"""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from harvest import scope, sow


class Staged:
    """Runs a program in JAX.

    A site holds the number of the iteration and, in that of the number `bad[name]`, a NaN.
    """

    def __init__(self, bad):
        self.bad = bad

    def site(self, name, step, wrap=lambda value: value):
        bad = jnp.where(self.bad[name] == step, jnp.nan, 0)
        sow(wrap(jnp.stack([jnp.asarray(step, jnp.float32), bad])), name=name)

    def scan(self, body, length, reverse=False):
        lax.scan(lambda c, i: (body(i), c)[::-1], None, jnp.arange(length), reverse=reverse)

    def loop(self, body, length):
        lax.while_loop(lambda i: i < length, lambda i: (body(i), i + 1)[1], 0)

    def switch(self, index, *branches):
        lax.switch(index, [lambda branch=branch: branch() for branch in branches])

    def within(self, transform, body, *args):
        transform(lambda *args: (body(*args), jnp.zeros(()))[1])(*map(jnp.asarray, args))

    scope = staticmethod(scope)


class Event(NamedTuple):
    """One iteration of a site."""

    key: str
    index: tuple[int, ...]
    step: int
    is_bad: bool
    time: tuple[int, ...]  # compares with that of other examples of a batch, which keep in step


class Stepwise:
    """Runs a program in Python, and lists the sites as they run."""

    def __init__(self, bad):
        self.bad, self.events = bad, []
        self.scopes, self.index, self.time = (), (), [0]

    def site(self, name, step, wrap=None):
        self.time[-1] += 1
        key, is_bad = "/".join((*self.scopes, name)), self.bad[name] == step
        self.events.append(Event(key, self.index, int(step), is_bad, tuple(self.time)))

    def scan(self, body, length, reverse=False):
        self.time[-1] += 1
        for count in range(length):
            step = length - 1 - count if reverse else count
            self.index, self.time = (*self.index, step), [*self.time, count, 0]
            body(step)
            self.index, self.time = self.index[:-1], self.time[:-2]

    loop = scan

    def switch(self, index, *branches):
        branches[index]()

    def within(self, transform, body, *args):
        body(*args)

    @contextlib.contextmanager
    def scope(self, name):
        self.scopes = (*self.scopes, name)
        yield
        self.scopes = self.scopes[:-1]


def both(ops, step):
    ops.site("a", step)
    ops.site("b", step)


def nothing():
    pass


def straight(ops):
    both(ops, 0)


def repeated(ops):
    ops.site("a", 0)
    ops.site("b", 0)
    ops.site("a", 1)
    ops.site("b", 1)


def scopes(ops):
    for i in range(2):
        with ops.scope(f"layer{i}"):
            both(ops, i)


def one_scan(ops):
    ops.scan(lambda i: both(ops, i), 4)


def reverse_scan(ops):
    ops.scan(lambda i: both(ops, i), 4, reverse=True)


def two_scans(ops):
    ops.scan(lambda i: ops.site("b", i), 3)
    ops.scan(lambda i: ops.site("a", i), 3, reverse=True)


def before_a_scan(ops):
    ops.site("b", 0)
    ops.scan(lambda i: ops.site("a", i), 2)


def nested_scan(ops, reverse=False):
    def body(i):
        ops.scan(lambda j: ops.site("a", 2 * i + j), 2, reverse=reverse)
        ops.site("b", i)

    ops.scan(body, 3)


def nested_reverse_scan(ops):
    nested_scan(ops, reverse=True)


def one_sided(ops):
    ops.switch(1, nothing, lambda: ops.site("a", 0))
    ops.switch(0, nothing, lambda: ops.site("b", 0))


def cond_in_scan(ops):
    ops.scan(lambda i: ops.switch(i % 2, lambda: both(ops, i), lambda: ops.site("b", i)), 4)


def other_order(ops):
    """The branches sow in another order."""

    def swapped(i):
        ops.site("b", i)
        ops.site("a", i)

    ops.scan(lambda i: ops.switch(i // 2, lambda: both(ops, i), lambda: swapped(i)), 4)


def other_types(ops):
    def body(i):
        ops.switch(
            i,
            lambda: ops.site("a", i),
            lambda: ops.site("a", i, lambda value: {"x": value[None], "n": 3}),
            lambda: ops.site("b", i),
        )

    ops.scan(body, 3)


def other_loops(ops):
    """The branches sow in different loops."""
    for i in range(2):
        ops.switch(i, lambda: ops.scan(lambda j: both(ops, j), 2), lambda: both(ops, 2))
    ops.switch(1, lambda: both(ops, 9), lambda: ops.loop(lambda j: both(ops, 3 + j), 2))


def while_loop(ops):
    ops.loop(lambda i: both(ops, i), 4)


def while_in_scan(ops):
    def body(i):
        ops.loop(lambda j: ops.site("a", 2 * i + j), 2)
        ops.site("b", i)

    ops.scan(body, 2)


def scan_in_while(ops):
    def body(i):
        ops.site("b", i)
        ops.scan(lambda j: ops.site("a", 2 * i + j), 2, reverse=True)

    ops.loop(body, 2)


def while_in_while(ops):
    ops.loop(lambda i: ops.loop(lambda j: both(ops, 2 * i + j), 2), 2)


def cond_in_while(ops):
    def body(i):
        ops.switch(i % 2, lambda: ops.site("b", i), lambda: ops.site("a", i))

    ops.loop(body, 4)


def trips(ops):
    """In a batch, each example may have a number of iterations of its own."""
    ops.scan(lambda i: ops.loop(lambda j: both(ops, 3 * i + j), ops.bad["trips"]), 2)


def custom_jvp(fn):
    custom = jax.custom_jvp(fn)
    custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))
    return custom


def custom_vjp(fn):
    custom = jax.custom_vjp(fn)
    custom.defvjp(lambda *args: (fn(*args), None), lambda _, ct: (ct,))
    return custom


def called(transform):
    def program(ops):
        step = lambda i: ops.within(transform, lambda i: both(ops, i), i)
        step(0)
        ops.scan(lambda i: step(i + 1), 2)

    return program


PROGRAMS = {
    **{
        fn.__name__: fn
        for fn in (
            straight,
            repeated,
            scopes,
            one_scan,
            reverse_scan,
            two_scans,
            before_a_scan,
            nested_scan,
            nested_reverse_scan,
            one_sided,
            cond_in_scan,
            other_order,
            other_types,
            other_loops,
            while_loop,
            while_in_scan,
            scan_in_while,
            while_in_while,
            cond_in_while,
            trips,
        )
    },
    **{t.__name__: called(t) for t in (jax.jit, jax.checkpoint, custom_jvp, custom_vjp)},
}
