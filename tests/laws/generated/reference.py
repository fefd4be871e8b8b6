"""Runs a program operation by operation, in Python, and notes down every sow.

What is collected is then put together from these notes: which values a key has, in which order, and
what their axes are.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .programs import (
    Around,
    Body,
    Do,
    Gradient,
    Path,
    Scan,
    Scope,
    Sites,
    Sow,
    State,
    Switch,
    Twice,
    Vmap,
    While,
    run,
)

Place = tuple[Path, tuple[int, ...], tuple[int, ...]]  # of a value: node, iterations, lanes


class Edit:
    """What a site is given: here, what it has."""

    def __call__(self, node: Sow, path: Path, value: Any, loops: Any, lanes: Any) -> Any:
        return value


class StraightThrough(Sites):
    """Sites in what is differentiated inside of a program.

    What is planted there comes after the differentiation: values change, and no derivative does.
    """

    def __init__(self, edit: Edit):
        self.edit = edit

    def sow(self, node, path, value, state):
        edited = self.edit(node, path, value, state["loops"], state["lanes"])
        return jax.tree.map(_straight_through, value, edited)


def _straight_through(value: Any, edited: Any) -> Any:
    if isinstance(value, str) or not jnp.issubdtype(value.dtype, jnp.floating):
        return edited
    return jax.lax.stop_gradient(edited) + (value - jax.lax.stop_gradient(value))


class Reference:
    """One run of a program."""

    def __init__(self, body: Body, state: State, edit: Edit | None = None):
        self.edit = edit or Edit()
        self.values: dict[Place, Any] = {}
        self.order: list[Place] = []  # in which they were sown
        self.ran: dict[tuple[Path, tuple[int, ...]], int] = {}  # the branch of each switch
        self.out = self._body(body, state, ())

    def _body(self, body: Body, state: State, path: Path) -> State:
        for number, node in enumerate(body):
            state = self._node(node, state, (*path, number))
        return state

    def _node(self, node: Any, state: State, path: Path) -> State:
        match node:
            case Do():
                return node.apply(state, Sites(), path)
            case Sow():
                return self._sow(node, state, path)
            case Twice(body):
                return self._body(body, self._body(body, state, (*path, 0)), (*path, 1))
            case Gradient(body):
                self._body(body, state, path)
                return node.apply(state, StraightThrough(self.edit), path)
            case Vmap(body, size):
                return self._vmap(body, size, state, path)
            case Scan(body, length, reverse):
                steps = range(length)
                return self._loop(body, reversed(steps) if reverse else steps, state, path)
            case While(body):
                return self._loop(body, range(int(state["n"]) % 3), state, path)
            case Switch(branches):
                taken = int(state["n"]) % len(branches)
                self.ran[path, state["loops"]] = taken
                return self._body(branches[taken], state, (*path, taken))
            case Around(body):
                return self._body(body, state, path)
        raise NotImplementedError(node)

    def _sow(self, node: Sow, state: State, path: Path) -> State:
        value = self.edit(node, path, node.get(state), state["loops"], state["lanes"])
        place = path, state["loops"], state["lanes"]
        self.values[place] = value
        self.order.append(place)
        return node.put(state, value) if node.used else state

    def _loop(self, body: Body, steps: Any, state: State, path: Path) -> State:
        loops = state["loops"]
        for step in steps:
            state = {**self._body(body, {**state, "loops": (*loops, step)}, path), "loops": loops}
        return state

    def _vmap(self, body: Body, size: int, state: State, path: Path) -> State:
        results = []
        for lane in range(size):
            inner = {**state, "v": (1 - 0.25 * lane) * state["v"], "lanes": (*state["lanes"], lane)}
            results.append(self._body(body, inner, path)["v"])
        return {**state, "v": sum(results) / size}


# --------------------------------------------------------------------- what is to be collected


class Site(NamedTuple):
    """An occurrence of a key."""

    node: Sow
    path: Path
    loops: tuple[int | None, ...]  # their lengths, or None of a `while`
    lanes: tuple[int, ...]
    hoisted: bool = False  # perhaps out of the loops, by differentiation

    @property
    def shape(self) -> Any:
        return self.node.field, self.loops, self.lanes

    @property
    def leaves(self) -> list["Site"]:
        return [self]


class Choice(NamedTuple):
    """An occurrence that is one of each branch of a `switch`, or of none in some."""

    path: Path  # of the switch
    branches: tuple["Site | Choice | None", ...]
    loops: tuple[int | None, ...]  # around the switch

    @property
    def shape(self) -> Any:
        shapes = {branch.shape if branch else None for branch in self.branches}
        return shapes.pop() if len(shapes) == 1 else self  # a `CondSum`, unlike any other

    @property
    def leaves(self) -> list[Site]:
        return [leaf for branch in self.branches if branch for leaf in branch.leaves]

    @property
    def alike(self) -> bool:
        return not isinstance(self.shape, Choice)


Sown = dict[str, list["Site | Choice"]]


def sites(
    body: Body,
    path: Path = (),
    loops: tuple[int | None, ...] = (),
    lanes: tuple[int, ...] = (),
    scope: str = "",
    hoisted: bool = False,
) -> Sown:
    """The occurrences of each key, in call order."""
    found: Sown = {}

    def add(more: Mapping[str, Sequence[Any]]) -> None:
        for key, occurrences in more.items():
            found.setdefault(key, []).extend(occurrences)

    for number, node in enumerate(body):
        here = (*path, number)
        match node:
            case Sow(name):
                add({scope + name: [Site(node, here, loops, lanes, hoisted)]})
            case Twice(inner):
                for call in range(2):
                    add(sites(inner, (*here, call), loops, lanes, scope, hoisted))
            case Switch(branches):
                each = [
                    sites(branch, (*here, k), loops, lanes, scope, hoisted)
                    for k, branch in enumerate(branches)
                ]
                add(_choices(each, here, loops))
            case Scope(inner, name):
                add(sites(inner, here, loops, lanes, f"{scope}{name}/", hoisted))
            case Gradient(inner):
                add(sites(inner, here, loops, lanes, scope, True))
            case Vmap(inner, size):
                add(sites(inner, here, loops, (*lanes, size), scope, hoisted))
            case Scan(inner, length):
                add(sites(inner, here, (*loops, length), lanes, scope, hoisted))
            case While(inner):
                add(sites(inner, here, (*loops, None), lanes, scope, hoisted))
            case Around(inner):
                add(sites(inner, here, loops, lanes, scope, hoisted))
    return found


def _choices(each: Sequence[Sown], path: Path, loops: tuple[int | None, ...]) -> Sown:
    keys = dict.fromkeys(key for branch in each for key in branch)
    return {
        key: [
            Choice(path, row, loops)
            for row in itertools.zip_longest(*(branch.get(key, []) for branch in each))
        ]
        for key in keys
    }


def in_loop(site: "Site | Choice") -> bool:
    """Whether a `while` is around it, or around one of its branches."""
    return any(None in leaf.loops for leaf in site.leaves)


# ------------------------------------------------------------------------------ their values


class Stack(NamedTuple):
    """The values of an occurrence: each leaf with the axes of the loops and lanes in front."""

    tree: Any
    loops: int
    lanes: int
    hoisted: bool


class Sum(NamedTuple):
    """What a `CondSum` has to be."""

    index: np.ndarray
    branches: tuple["Stack | Sum | None", ...]


def values(found: "Site | Choice", reference: Reference) -> "Stack | Sum":
    if isinstance(found, Choice) and not found.alike:
        lengths = [length or 0 for length in found.loops]
        index = np.zeros(lengths, int)
        for place in np.ndindex(*lengths):
            index[place] = reference.ran.get((found.path, place), 0)
        return Sum(index, tuple(branch and values(branch, reference) for branch in found.branches))
    first, *_ = found.leaves
    axes = (*(length or 0 for length in first.loops), *first.lanes)
    depth = len(first.loops)
    example = first.node.get(_LIKE)
    stacks = jax.tree.map(lambda leaf: _zeros(axes, leaf), example)
    leaves, structure = jax.tree.flatten(stacks)
    for leaf in found.leaves:
        for index in np.ndindex(axes):
            place = leaf.path, index[:depth], index[depth:]
            if place in reference.values:
                parts = structure.flatten_up_to(reference.values[place])
                for stack, part in zip(leaves, parts, strict=True):
                    if isinstance(stack, np.ndarray):
                        stack[index] = plain(part)
    return Stack(
        structure.unflatten(leaves), depth, len(first.lanes), any(x.hoisted for x in found.leaves)
    )


_LIKE: State = {
    "v": jnp.zeros(3),
    "h": jnp.zeros(2, jnp.bfloat16),
    "n": jnp.asarray(0, jnp.int32),
    "k": jax.random.key(0),
}


def plain(value: Any) -> Any:
    """A value as an array of numpy, of keys their data."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and value.dtype == jnp.bfloat16:
        value = value.astype(jnp.float32)
    return value if isinstance(value, str) else np.asarray(value)


def _zeros(axes: tuple[int, ...], leaf: Any) -> Any:
    if isinstance(leaf, str):
        return leaf
    leaf = plain(leaf)
    return np.zeros((*axes, *leaf.shape), leaf.dtype)


def last(site: "Site | Choice", reference: Reference) -> Any:
    """Of all iterations; as a `Stack` of lanes."""
    paths = {leaf.path for leaf in site.leaves}
    first, *_ = site.leaves
    stacks = jax.tree.map(lambda leaf: _zeros(first.lanes, leaf), first.node.get(_LIKE))
    leaves, structure = jax.tree.flatten(stacks)
    for path, loops, lanes in reference.order:
        if path in paths:
            parts = structure.flatten_up_to(reference.values[path, loops, lanes])
            for stack, part in zip(leaves, parts, strict=True):
                if isinstance(stack, np.ndarray):
                    stack[lanes] = plain(part)
    return Stack(structure.unflatten(leaves), 0, len(first.lanes), False)


def unchanged(body: Body, state: State) -> Any:
    """The output of plain JAX."""
    return run(body, state, Sites())
