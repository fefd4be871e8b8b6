"""Random programs of nested scans, in which it is known from which sites each value comes.

A program is a list of statements over named variables: numbers, or rows that a scan has stacked.
"""

import random
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from harvest import sow


class Mix(NamedTuple):
    """A new number, from two others."""

    out: str
    a: str
    b: str
    plus: float


class Sum(NamedTuple):
    """A new number, from a row."""

    out: str
    row: str


class Sow(NamedTuple):
    name: str
    of: str


class Scan(NamedTuple):
    body: list[Any]
    carry: list[tuple[str, str, str, str]]  # before, at the start and end of the body, and after
    xs: list[tuple[str, str]]  # a row, and its number in the body
    ys: list[tuple[str, str]]  # a number in the body, and its row
    length: int
    reverse: bool


class Writer:
    """Writes a random program."""

    def __init__(self, seed):
        self.rng, self.variables, self.sites = random.Random(seed), 0, []
        self.program, *_ = self.block(["x", "y"], {}, 0, 8)

    def new(self):
        self.variables += 1
        return f"v{self.variables}"

    def mixed(self, block, numbers):
        block.append(Mix(self.new(), *self.rng.choices(numbers, k=2), round(self.rng.random(), 3)))
        return block[-1].out

    def block(self, numbers, rows, depth, size):
        block, numbers, rows = [], [*numbers], {**rows}
        for _ in range(size):
            kind = self.rng.choice(["mix"] * 3 + ["sow"] * 3 + ["sum"] * bool(rows) + ["scan"] * 2)
            if kind == "mix":
                numbers.append(self.mixed(block, numbers))
            elif kind == "sow":
                self.sites.append(f"s{len(self.sites)}")
                block.append(Sow(self.sites[-1], self.rng.choice(numbers)))
            elif kind == "sum":
                block.append(Sum(self.new(), self.rng.choice([*rows])))
                numbers.append(block[-1].out)
            elif depth < 2:
                block.append(self.scan(numbers, rows, depth))
                numbers += [after for *_, after in block[-1].carry]
                rows |= {row: block[-1].length for _, row in block[-1].ys}
        return block, numbers, rows

    def scan(self, numbers, rows, depth):
        length = self.rng.choice([2, 3])
        xs = [(row, self.new()) for row, count in rows.items() if count == length][-2:]
        starts = [self.new() for _ in range(self.rng.randint(1, 3))]
        here = [*numbers, *(x for _, x in xs), *starts]
        body, inside, _ = self.block(here, {}, depth + 1, self.rng.randint(2, 4))
        befores = self.rng.choices(numbers, k=len(starts))
        carry = [
            (b, s, self.mixed(body, inside), self.new())
            for b, s in zip(befores, starts, strict=True)
        ]
        ys = [(self.mixed(body, inside), self.new()) for _ in range(self.rng.randint(0, 2))]
        return Scan(body, carry, xs, ys, length, self.rng.random() < 0.3)


def staged(block, env, bad, step=0):
    """Run a program in JAX; the site `bad` is NaN in the iteration of this number."""
    for s in block:
        if isinstance(s, Mix):
            env[s.out] = env[s.a] / 2 + env[s.b] / 4 + s.plus
        elif isinstance(s, Sum):
            env[s.out] = jnp.sum(env[s.row])
        elif isinstance(s, Sow):
            sow((env[s.of], jnp.where(bad[s.name] == step, jnp.nan, jnp.inf)), name=s.name)
        else:
            _staged_scan(s, env, bad, step)


def _staged_scan(s, env, bad, step):
    def body(carry, x):
        index, x = x
        inner = env | dict(zip([start for _, start, *_ in s.carry], carry, strict=True))
        inner |= dict(zip([name for _, name in s.xs], x, strict=True))
        staged(s.body, inner, bad, 10 * step + index + 1)
        return [inner[end] for *_, end, _ in s.carry], [inner[name] for name, _ in s.ys]

    xs = (jnp.arange(s.length), [env[row] for row, _ in s.xs])
    carry, ys = lax.scan(body, [env[before] for before, *_ in s.carry], xs, reverse=s.reverse)
    env |= dict(zip([after for *_, after in s.carry], carry, strict=True))
    env |= dict(zip([row for _, row in s.ys], ys, strict=True))


class Number(NamedTuple):
    value: Any
    sources: frozenset[Any]  # the nearest events and arguments, as if any iteration may be a first


class Event(NamedTuple):
    """A site in one iteration."""

    name: str
    step: int
    value: Any
    sources: frozenset[Any]


def stepwise(block, env, step=0):
    """Run a program in Python, and yield the events."""
    for s in block:
        if isinstance(s, Mix):
            a, b = env[s.a], env[s.b]
            value = a.value / np.float32(2) + b.value / np.float32(4) + np.float32(s.plus)
            env[s.out] = Number(value, a.sources | b.sources)
        elif isinstance(s, Sum):
            values, sources = zip(*env[s.row], strict=True)
            env[s.out] = Number(sum(values), frozenset().union(*sources))
        elif isinstance(s, Sow):
            event = Event(s.name, step, *env[s.of])
            env[s.of] = Number(event.value, frozenset({event}))
            yield event
        else:
            yield from _stepwise_scan(s, env, step)


def _stepwise_scan(s, env, step):
    carry = first = [env[before] for before, *_ in s.carry]
    ends, rows = [], {}
    for index in range(s.length)[:: -1 if s.reverse else 1]:
        inner = env | dict(zip([start for _, start, *_ in s.carry], carry, strict=True))
        inner |= {name: env[row][index] for row, name in s.xs}
        yield from stepwise(s.body, inner, 10 * step + index + 1)
        ends = [inner[end] for *_, end, _ in s.carry]
        carry = [Number(e.value, e.sources | f.sources) for e, f in zip(ends, first, strict=True)]
        rows[index] = [inner[name] for name, _ in s.ys]
    env |= dict(zip([after for *_, after in s.carry], ends, strict=True))
    env |= {row: [rows[i][k] for i in range(s.length)] for k, (_, row) in enumerate(s.ys)}
