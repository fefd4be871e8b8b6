"""Writing a program down, line by line, for `show`."""

import dataclasses
import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from . import _compat, _types
from ._compat import UserScope
from ._equation import Around, Node, Reader, is_marker, opened
from ._listing import Line
from ._numbers import key_of
from ._stage import Program
from ._where import Choice, Choices, Sown

# Parameters that say nothing, or what the types say.
TACIT = frozenset(
    "ft_in ft_out name preferred_element_type unroll donated_invars shape dtype new_dtype "
    "num_consts cond_nconsts body_nconsts symbolic_zeros".split()
)
LONGEST = 20  # characters of a parameter

Names = dict[Var, str]  # of the variables of a jaxpr
Scope = tuple[UserScope, ...]


class Lister:
    """The lines of a program, and what to sow for their values.

    A jaxpr that is called twice is written down twice.
    """

    lines: list[Line]
    choices: Choices | None  # every equation, sown by the number of its line

    def __init__(self, program: Program, source: str):
        """`source` is the line of the function, for what has none of its own."""
        jaxpr = program.jaxpr
        self.lines = []
        self._walk = program.walk
        self._letters = _letters()
        self._given: dict[int, Any] = {}  # values of lines that are no equations
        names: Names = {}
        pairs = zip(jaxpr.invars, program.names(), program.leaves, strict=True)
        for var, where, value in pairs:
            self._input("input", var, where, value, names)
        nodes = Reader().nodes(jaxpr, Around(source=source))
        self.choices = self._body(jaxpr, nodes, names, 0, ())

    def with_values(self, values: Mapping[int, Any]) -> list[Line]:
        """The lines with their values, which are given by their numbers."""
        known = {**self._given, **values}
        return [dataclasses.replace(x, value=known.get(i)) for i, x in enumerate(self.lines)]

    def _input(self, kind: Any, var: Var, where: str, value: Any, names: Names) -> None:
        self._given[len(self.lines)] = value
        self._add(kind, 0, f"{self._named(var, names)} = {where}", [var])

    def _add(self, kind: Any, depth: int, text: str, shown: Sequence[Any] = (), **of: Any) -> None:
        types = " ".join(_types.short(atom.aval) for atom in shown)
        self.lines.append(Line(kind, depth, text, types, **of))

    def _named(self, var: Any, names: Names) -> str:
        """A letter for what is computed or passed in; `_` if nothing uses it."""
        if type(var) is not Var:
            return "_"
        return names.setdefault(var, next(self._letters))

    def _body(
        self, jaxpr: Jaxpr, nodes: Sequence[Node], names: Names, depth: int, scope: Scope
    ) -> Choices | None:
        for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            self._input("constant", var, "constant", value, names)
        rest, made = iter(nodes), {}
        choices = []
        for eqn in jaxpr.eqns:
            within = _compat.joined_scopes(scope, _compat.scope_of(eqn))
            if is_marker(eqn):
                self._marker(eqn, names, made, depth, within)
                continue
            made.update(dict.fromkeys(eqn.outvars, len(self.lines)))
            choices.append(self._equation(next(rest), names, depth, within))
        returned = [_text(v, names) for v in jaxpr.outvars]
        self._add("output", depth, " ".join(["return", *returned]), jaxpr.outvars)
        return Choices.of(tuple(choices))

    def _marker(
        self, eqn: JaxprEqn, names: Names, made: dict[Var, int], depth: int, scope: Scope
    ) -> None:
        """What is sown: a key of the line that computes it, or a line of its own."""
        marker = _compat.hi_prim(eqn)
        label = marker.label
        key = key_of(scope, label.name, label.number)
        lines = {made.get(v, -1) if isinstance(v, Var) else -1 for v in eqn.invars}
        if not eqn.outvars and len(lines) == 1 and -1 not in lines:
            (number,) = lines
            line = self.lines[number]
            keys = ", ".join(filter(None, [line.key, key]))
            self.lines[number] = dataclasses.replace(line, key=keys)
            return
        operands = [_text(v, names) for v in eqn.invars]
        results = [self._named(v, names) for v in eqn.outvars]
        made.update(dict.fromkeys(eqn.outvars, len(self.lines)))
        verb = "perturb" if label.kind == "cotangent" else "sow"
        text = _applied(results, verb, operands)
        self._add("sow", depth, text, eqn.invars, key=key, source=label.source)

    def _equation(self, node: Node, names: Names, depth: int, scope: Scope) -> Choice | None:
        eqn, number = node.eqn, len(self.lines)
        operands = [_text(v, names) for v in eqn.invars]
        results = [self._named(v, names) for v in eqn.outvars]
        text = _applied(results, node.equation.label + _params(eqn), operands)
        self._add("equation", depth, text, eqn.outvars, source=node.equation.source)
        closed = self._closed(eqn)
        bodies = zip(opened(eqn), node.inside, strict=True)
        others = ((jaxpr, Reader().nodes(jaxpr, node.around)) for jaxpr in closed)
        inside = []
        for position, (jaxpr, nodes) in enumerate([*bodies, *others]):
            names_inside, heading = self._entered(eqn, jaxpr, position, operands)
            if heading:
                self._add("body", depth + 1, heading)
            inside.append(self._body(jaxpr, nodes, names_inside, depth + 1 + bool(heading), scope))
        inside = tuple(inside[: len(node.inside)])
        used = [i for i in node.outs if type(eqn.outvars[i]) is Var]
        sown = (Sown(str(number), tuple(used)),) if used else ()
        return Choice(sown, inside) if sown or any(inside) else None

    def _closed(self, eqn: JaxprEqn) -> list[Jaxpr]:
        """The jaxprs of an equation that have no values to show.

        Those are predicates, expansions, and what cannot be opened, if anything is sown in it.
        """
        if eqn.primitive.name == "while":
            return [_compat.while_params(eqn).cond_jaxpr]
        if opened(eqn):
            return []
        inside = self._walk.jaxprs(eqn)
        is_hi = _compat.hi_prim(eqn) is not None
        return [jaxpr for jaxpr in inside if is_hi or self._walk.entries(jaxpr)]

    def _entered(
        self, eqn: JaxprEqn, jaxpr: Jaxpr, position: int, operands: Sequence[str]
    ) -> tuple[Names, str]:
        """The names of what a body gets, and its heading.

        Where it is called on the operands as they are, they keep their names.
        """
        names: Names = {}
        match eqn.primitive.name:
            case "scan":
                params = _compat.scan_params(eqn)
                consts, last = params.num_consts, params.num_consts + params.num_carry
                names.update(zip(jaxpr.invars[:consts], operands[:consts], strict=True))
                carry = self._from(
                    jaxpr.invars[consts:last], operands[consts:last], names, "{} starts as {}"
                )
                each = self._from(jaxpr.invars[last:], operands[last:], names, "{} = {}[i]")
                heading = _listed("iteration i", [*carry, *each])
            case "while":
                params = _compat.while_params(eqn)
                in_body = jaxpr is params.body_jaxpr
                count = params.body_consts if in_body else params.cond_consts
                first = params.cond_consts if in_body else 0
                consts = operands[first : first + count]
                names.update(zip(jaxpr.invars[:count], consts, strict=True))
                carry = operands[params.cond_consts + params.body_consts :]
                form = "{} starts as {}" if in_body else "{}"
                carried = self._from(jaxpr.invars[count:], carry, names, form)
                heading = _listed("do" if in_body else "while", carried)
            case "cond":
                names.update(zip(jaxpr.invars, operands[1:], strict=True))
                heading = f"branch {position}"
            case "shard_map":
                shards = self._from(jaxpr.invars, operands, names, "{} of {}")
                heading = _listed("shard", shards)
            case _ if _compat.hi_prim(eqn) is None and not opened(eqn):
                unknown = self._from(jaxpr.invars, jaxpr.invars, names, "{}")
                heading = _listed("inside", unknown)
            case _:
                given = operands[len(operands) - len(jaxpr.invars) :]
                names.update(zip(jaxpr.invars, given, strict=True))
                heading = ""
        return names, heading

    def _from(
        self, variables: Sequence[Var], operands: Sequence[Any], names: Names, form: str
    ) -> list[str]:
        """New names for what a body gets, each with the operand that it is made of."""
        pairs = zip(variables, operands, strict=True)
        return [form.format(self._named(v, names), operand) for v, operand in pairs]


def _listed(what: str, items: Sequence[str]) -> str:
    return f"{what}: {', '.join(items)}" if items else what


def _letters() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def _applied(results: Sequence[str], operation: str, operands: Sequence[str]) -> str:
    return " ".join([*results, *(["="] if results else []), operation, *operands])


def _text(atom: Any, names: Names) -> str:
    if isinstance(atom, Literal):
        return str(atom.val) if np.ndim(atom.val) == 0 else _types.short(atom.aval)
    return names[atom]


def _params(eqn: JaxprEqn) -> str:
    """Those parameters that are short and say something: `[axes=(0,)]`."""
    if _compat.hi_prim(eqn) is not None:
        return ""
    shown = []
    for name, value in eqn.params.items():
        text = str(np.dtype(value)) if _is_dtype(value) else str(value)
        if name not in TACIT and _says_something(value) and len(text) <= LONGEST:
            shown.append(f"{name}={text.replace(' ', '')}")
    return f"[{' '.join(shown)}]" if shown else ""


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )


def _says_something(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    plain = all(isinstance(x, bool | int | float | str) or _is_dtype(x) for x in leaves)
    return plain and bool(leaves) and value is not False
