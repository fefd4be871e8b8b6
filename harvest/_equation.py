"""The equations of a program, as `sow_eqns` shows them to its predicates."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._compat import Frame
from ._markers import Marker
from ._numbers import Before
from ._rule import rule_for
from ._walk import Walk


@dataclasses.dataclass(frozen=True)
class Equation:
    """One operation of a program, as a predicate of [`harvest.sow_eqns`][] gets it.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            return jnp.sum(x @ x) + x @ x[0]

        is_matrix = lambda eqn: eqn.primitive == "dot_general" and eqn.outputs[0].ndim == 2
        acts = harvest.reap(harvest.sow_eqns(f, is_matrix, "product"))(jnp.eye(2))
        assert (acts["product/0"] == jnp.eye(2)).all() and len(acts) == 1
        ```

    **Arguments:**

    - `primitive`: its name, as `jax.make_jaxpr` prints it: `"dot_general"`. Of a `HiPrim`, the name
        of its class.
    - `jit`: of a jitted function that is called, its name; else None.
    - `checkpoint_name`: of a `jax.ad_checkpoint.checkpoint_name`, the name; else None.
    - `scope`: the names of the `jax.named_scope`s around it, outermost first, joined by `/`. (Linen
        and Haiku have a scope for each module.)
    - `leaves`: those of these scopes that its outputs leave: something outside uses them.
    - `transforms`: the transforms that JAX notes on it, outermost first: `"vmap"`, `"jvp"`,
        `"transpose"` (it computes cotangents).
    - `inside`: the equations around it, outermost first: `("scan", "jit:layer")`.
    - `inputs`, `outputs`: their types, as `jax.typeof` returns them.
    - `source`: the user's file and line, as `file:line`; inside of a jitted function of JAX's, that
        of its call.
    """

    primitive: str
    jit: str | None
    checkpoint_name: str | None
    scope: str
    leaves: tuple[str, ...]
    transforms: tuple[str, ...]
    inside: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    source: str

    @property
    def label(self) -> str:
        """How it is called in `inside`, and by a shorthand for it: `"jit:layer"`, `"scan"`."""
        return self.primitive if self.jit is None else f"jit:{self.jit}"


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation with what is inside of it."""

    eqn: JaxprEqn
    equation: Equation
    outs: tuple[int, ...]  # those of its outputs that are values
    leaving: Mapping[str, tuple[int, ...]]  # those that leave a scope
    inside: "tuple[tuple[Node, ...], ...]"  # of each jaxpr that can be opened
    around: "Around"  # the jaxprs inside


@dataclasses.dataclass(frozen=True)
class Around:
    """What is around a jaxpr."""

    frames: tuple[Frame, ...] = ()
    inside: tuple[str, ...] = ()
    source: str = ""

    def entered(self, eqn: JaxprEqn) -> tuple[Frame, ...]:
        """The frames of an equation that are not around its jaxpr.

        When JAX traces a body again for its derivative, it pushes scopes a second time.
        """
        known = {id(frame.entry) for frame in self.frames}
        frames = [f for f in _compat.frames_of(eqn) if id(f.entry) not in known]
        return tuple(f for f in frames if not isinstance(f.name, Before))


class Reader:
    """The equations of a program; those of a jaxpr once for each place it is called in."""

    def __init__(self) -> None:
        self._nodes: dict[Any, tuple[Jaxpr, Around, tuple[Node, ...]]] = {}

    def nodes(self, jaxpr: Jaxpr, around: Around = Around()) -> tuple[Node, ...]:
        frames = tuple(id(f.entry) for f in around.frames)
        place = (id(jaxpr), frames, around.inside, around.source)
        if place not in self._nodes:
            eqns = [eqn for eqn in jaxpr.eqns if not is_marker(eqn)]
            rows = zip(eqns, _leaving(jaxpr, eqns, around), strict=True)
            nodes = tuple(self._node(eqn, leaving, around) for eqn, leaving in rows)
            self._nodes[place] = (jaxpr, around, nodes)
        return self._nodes[place][2]

    def _node(self, eqn: JaxprEqn, leaving: Any, around: Around) -> Node:
        frames = (*around.frames, *around.entered(eqn))
        jit, name = _compat.names_in(eqn)
        equation = Equation(
            primitive=_compat.primitive_name(eqn),
            jit=jit,
            checkpoint_name=name,
            scope=_path(frames),
            leaves=tuple(leaving),
            transforms=tuple(f.name for f in frames if not f.is_scope),
            inside=around.inside,
            inputs=tuple(v.aval for v in eqn.invars),
            outputs=tuple(v.aval for v in eqn.outvars),
            source=_compat.source_of(eqn.source_info) or around.source,
        )
        outs = tuple(i for i, v in enumerate(eqn.outvars) if _compat.has_value(v))
        within = Around(frames, (*around.inside, equation.label), equation.source)
        inside = tuple(self.nodes(jaxpr, within) for jaxpr in opened(eqn))
        return Node(eqn, equation, outs, leaving, inside, within)

    def every(self, nodes: Sequence[Node], seen: set[int] | None = None) -> Iterator[Node]:
        """All equations, those inside of others too; once each."""
        seen = set() if seen is None else seen
        if id(nodes) in seen:
            return
        seen.add(id(nodes))
        for node in nodes:
            yield from (inner for jaxpr in node.inside for inner in self.every(jaxpr, seen))
            yield node

    def closed(self, nodes: Sequence[Node]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
        """Equations with others inside that cannot be reached, and those."""
        for node in self.every(nodes):
            reached = {id(jaxpr) for jaxpr in opened(node.eqn)}
            for jaxpr in Walk().jaxprs(node.eqn):
                if id(jaxpr) not in reached:
                    yield node, tuple(self.every(self.nodes(jaxpr, node.around)))


def is_marker(eqn: JaxprEqn) -> bool:
    return isinstance(_compat.hi_prim(eqn), Marker)


def opened(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs of an equation whose equations are seen.

    Those of a `HiPrim` are what it is expanded to, and not a part of it.
    """
    return [] if rule_for(eqn) is None else _compat.opened_jaxprs(eqn)


def _leaving(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], around: Around
) -> list[dict[str, tuple[int, ...]]]:
    """For each equation, the scopes that its outputs leave, innermost first, and which do."""
    scopes = [_scopes(around, eqn) for eqn in eqns]
    users: dict[Var, list[set[Any]]] = collections.defaultdict(list)
    for eqn, mine in zip(eqns, scopes, strict=True):
        for v in eqn.invars:
            if isinstance(v, Var):
                users[v].append(set(mine))
    for v in jaxpr.outvars:
        if isinstance(v, Var):
            users[v].append(set())
    rows = []
    for eqn, mine in zip(eqns, scopes, strict=True):
        row: dict[str, tuple[int, ...]] = {}
        for instance, path in reversed(mine.items()):
            outs = [i for i, v in enumerate(eqn.outvars) if _compat.has_value(v)]
            left = tuple(i for i in outs if any(instance not in u for u in users[eqn.outvars[i]]))
            if left:
                row[path] = left
        rows.append(row)
    return rows


def _scopes(around: Around, eqn: JaxprEqn) -> dict[Any, str]:
    """The scopes around an equation in its jaxpr: each `with`, under each transform, and its path.

    A scope that is entered twice is two.
    """
    frames = around.entered(eqn)
    found = {}
    for end, frame in enumerate(frames, 1):
        if frame.is_scope:
            instance = tuple(id(f.entry) if f.is_scope else f.name for f in frames[:end])
            found[instance] = _path((*around.frames, *frames[:end]))
    return found


def _path(frames: Sequence[Frame]) -> str:
    return "/".join(frame.name for frame in frames if frame.is_scope)
