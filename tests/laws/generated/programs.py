"""Programs as data: bodies of nodes, each a function from states to states.

A state has a vector `v`, an array `h` of low precision, an integer `n` and a key `k`. Neither `n`
nor `k` ever depends on the others, so that a predicate is never batched. And it knows where it is:
the indices of the loops around it, and of the lanes of each `vmap`.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

State = dict[str, Any]
Path = tuple[int, ...]  # of a node, by its position in each body around it

LOW = jnp.bfloat16
MIX = jnp.array([[0.6, -0.8, 0.1], [0.8, 0.6, -0.2], [0.1, 0.2, 0.9]])  # closed over


def initial(seed: int) -> State:
    return {
        "v": jnp.array([0.3, -0.9, 1.2]) + 0.1 * seed,
        "h": jnp.array([0.5, -1.5], LOW),
        "n": jnp.asarray(seed, jnp.int32),
        "k": jax.random.key(seed),
        "loops": (),
        "lanes": (),
    }


class Sites:
    """What happens at the sites of a program. Here: nothing."""

    def sow(self, node: "Sow", path: Path, value: Any, state: State) -> Any:
        return value

    def scope(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


Body = tuple["Node", ...]


def run(body: Body, state: State, sites: Sites, path: Path = ()) -> State:
    for number, node in enumerate(body):
        state = node.apply(state, sites, (*path, number))
    return state


@dataclasses.dataclass(frozen=True)
class Node:
    def apply(self, state: State, sites: Sites, path: Path) -> State:
        raise NotImplementedError


# ---------------------------------------------------------------------------- statements


def _sine(s):
    return {**s, "v": 1.1 * jnp.sin(s["v"])}


def _mix(s):
    return {**s, "v": MIX @ s["v"]}


def _cast(s):
    return {**s, "h": s["h"] * 0.5 + s["v"][:2].astype(LOW)}


def _back(s):
    return {**s, "v": s["v"].at[:2].add(s["h"].astype(jnp.float32))}


def _count(s):
    return {**s, "n": (s["n"] * 3 + 1) % 7}


def _scale(s):
    return {**s, "v": s["v"] * (1 + s["n"] % 3).astype(jnp.float32) * 0.5}


def _noise(s):
    key, used = jax.random.split(s["k"])
    return {**s, "k": key, "v": s["v"] + jax.random.uniform(used, (3,))}


OPERATIONS = {
    "sine": _sine,
    "mix": _mix,
    "cast": _cast,
    "back": _back,
    "count": _count,
    "scale": _scale,
    "noise": _noise,
}


@dataclasses.dataclass(frozen=True)
class Do(Node):
    operation: str

    def apply(self, state, sites, path):
        return OPERATIONS[self.operation](state)


FIELDS = ("v", "h", "n", "k", "first", "tree")


@dataclasses.dataclass(frozen=True)
class Sow(Node):
    name: str
    field: str
    used: bool  # whether what `sow` returns goes on, or is ignored

    def apply(self, state, sites, path):
        value = sites.sow(self, path, self.get(state), state)
        return self.put(state, value) if self.used else state

    def get(self, state: State) -> Any:
        if self.field == "first":
            return state["v"][0]
        if self.field == "tree":
            return {"v": state["v"], "pair": (state["h"], state["n"]), "label": "x"}
        return state[self.field]

    def put(self, state: State, value: Any) -> State:
        if self.field == "first":
            return {**state, "v": state["v"].at[0].set(value)}
        if self.field == "tree":
            return {**state, "v": value["v"], "h": value["pair"][0], "n": value["pair"][1]}
        return {**state, self.field: value}


# ---------------------------------------------------------------------------- structures


@dataclasses.dataclass(frozen=True)
class Around(Node):
    body: Body

    def apply(self, state, sites, path):
        return self.wrap(lambda s: run(self.body, s, sites, path))(state)

    def wrap(self, fn: Callable[[State], State]) -> Callable[[State], State]:
        raise NotImplementedError


class Jit(Around):
    def wrap(self, fn):
        return jax.jit(fn)


class Remat(Around):
    def wrap(self, fn):
        return jax.checkpoint(fn)


@dataclasses.dataclass(frozen=True)
class Scope(Around):
    name: str

    def apply(self, state, sites, path):
        with sites.scope(self.name):
            return run(self.body, state, sites, path)


class Custom(Around):
    """A custom derivative rule, of twice the derivative."""

    def apply(self, state, sites, path):
        body = lambda s: run(self.body, s, sites, path)
        return self.ruled(body, lambda s: run(self.body, s, Sites(), path))(state)

    def ruled(self, fn: Callable, plain: Callable) -> Callable:
        raise NotImplementedError


def _twice(tangents: State) -> State:
    return {**tangents, "v": 2 * tangents["v"]}


class CustomJvp(Custom):
    def ruled(self, fn, plain):
        fn = jax.custom_jvp(fn)

        @fn.defjvp
        def rule(primals, tangents):
            return fn(*primals), _twice(jax.jvp(plain, primals, tangents)[1])

        return fn


class CustomVjp(Custom):
    def ruled(self, fn, plain):
        ruled = jax.custom_vjp(fn)
        backward = lambda s, cts: (_twice(jax.vjp(plain, s)[1](cts)[0]),)
        ruled.defvjp(lambda s: (fn(s), s), backward)
        return ruled


class Twice(Around):
    """One jitted function that is called two times."""

    def apply(self, state, sites, path):
        return self._called(1, self._called(0, state, sites, path), sites, path)

    def _called(self, number, state, sites, path):
        return jax.jit(lambda s: run(self.body, s, sites, (*path, number)))(state)


class Gradient(Around):
    """Adds a gradient of the body; whatever else it computes is ignored."""

    def apply(self, state, sites, path):
        def loss(v):
            return jnp.sum(run(self.body, {**state, "v": v}, sites, path)["v"])

        return {**state, "v": 0.5 * state["v"] + 0.1 * jax.grad(loss)(state["v"])}


@dataclasses.dataclass(frozen=True)
class Vmap(Around):
    size: int
    axis: int  # of `v`

    def apply(self, state, sites, path):
        lanes = jnp.arange(self.size)
        factors = 1 - 0.25 * lanes.astype(jnp.float32)
        v = jnp.moveaxis(jnp.outer(factors, state["v"]), 0, self.axis)

        def example(v, lane):
            inner = {**state, "v": v, "lanes": (*state["lanes"], lane)}
            return run(self.body, inner, sites, path)["v"]

        return {**state, "v": jax.vmap(example, (self.axis, 0))(v, lanes).mean(axis=0)}


@dataclasses.dataclass(frozen=True)
class Scan(Around):
    length: int
    reverse: bool = False

    def apply(self, state, sites, path):
        def step(state, index):
            inner = {**state, "loops": (*state["loops"], index)}
            return {**run(self.body, inner, sites, path), "loops": state["loops"]}, None

        return lax.scan(step, state, jnp.arange(self.length), reverse=self.reverse)[0]


class While(Around):
    """As often as `n` says, which is not known while the program is traced."""

    def apply(self, state, sites, path):
        times = state["n"] % 3

        def step(carry):
            index, state = carry
            inner = {**state, "loops": (*state["loops"], index)}
            return index + 1, {**run(self.body, inner, sites, path), "loops": state["loops"]}

        return lax.while_loop(lambda c: c[0] < times, step, (jnp.asarray(0), state))[1]


@dataclasses.dataclass(frozen=True)
class Switch(Node):
    branches: tuple[Body, ...]

    def apply(self, state, sites, path):
        def branch(number: int) -> Callable[[State], State]:
            return lambda s: run(self.branches[number], s, sites, (*path, number))

        branches = list(map(branch, range(len(self.branches))))
        if len(branches) == 2:
            return lax.cond(state["n"] % 2 == 1, branches[1], branches[0], state)
        return lax.switch(state["n"] % len(branches), branches, state)


def nodes(body: Body, path: Path = ()) -> Any:
    """All nodes, each with its path, in call order."""
    for number, node in enumerate(body):
        here = (*path, number)
        yield node, here
        if isinstance(node, Twice):
            inner = [(node.body, (*here, call)) for call in range(2)]
        elif isinstance(node, Switch):
            inner = [(branch, (*here, k)) for k, branch in enumerate(node.branches)]
        else:
            inner = [(node.body, here)] if isinstance(node, Around) else []
        for part, where in inner:
            yield from nodes(part, where)
