"""Strategies for programs: bodies of nodes, at most three structures deep."""

from collections.abc import Callable
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from .programs import (
    FIELDS,
    OPERATIONS,
    Body,
    CustomJvp,
    CustomVjp,
    Do,
    Gradient,
    Jit,
    Remat,
    Scan,
    Scope,
    Sow,
    Switch,
    Twice,
    Vmap,
    While,
    nodes,
)

KEYS = ("a", "b")
STRUCTURES = (Jit, Remat, Scope, CustomJvp, CustomVjp, Twice, Gradient, Vmap, Scan, Switch, While)
LARGEST = 20  # nodes

seeds = st.integers(0, 5)


@st.composite
def programs(draw: Callable, dynamic: bool = False, depth: int = 3) -> Body:
    """Programs with a sow; `dynamic` ones may have a `while_loop`, which has no reverse mode."""
    body = _body(draw, dynamic, depth, True)
    assume(any(isinstance(node, Sow) for node, _ in nodes(body)))
    assume(len(list(nodes(body))) <= LARGEST)
    return body


def is_dynamic(body: Body) -> bool:
    return any(isinstance(node, While) for node, _ in nodes(body))


def _body(draw: Callable, dynamic: bool, depth: int, structured: bool = False) -> Body:
    kinds = ["sow", "operation", *(["structure"] * 2 if depth else [])]
    size = draw(st.integers(1, 3))
    chosen = [draw(st.sampled_from(kinds)) for _ in range(size)]
    if structured and "structure" not in chosen:
        chosen[-1] = "structure"
    return tuple(_node(draw, kind, dynamic, depth) for kind in chosen)


def _node(draw: Callable, kind: str, dynamic: bool, depth: int) -> Any:
    if kind == "operation":
        return Do(draw(st.sampled_from(sorted(OPERATIONS))))
    if kind == "sow":
        return Sow(draw(st.sampled_from(KEYS)), draw(st.sampled_from(FIELDS)), draw(st.booleans()))
    structure = draw(st.sampled_from(STRUCTURES if dynamic else STRUCTURES[:-1]))
    inner = lambda: _body(draw, dynamic and structure is not Gradient, depth - 1)
    if structure is Switch:
        return Switch(tuple(inner() for _ in range(draw(st.integers(2, 3)))))
    if structure is Scope:
        return Scope(inner(), draw(st.sampled_from(["s", "t"])))
    if structure is Vmap:
        return Vmap(inner(), draw(st.sampled_from([2, 4])), draw(st.sampled_from([0, 1])))
    if structure is Scan:
        return Scan(inner(), draw(st.integers(1, 3)), draw(st.booleans()))
    return structure(inner())
