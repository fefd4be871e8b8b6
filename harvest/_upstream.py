"""When the sites of a program run, and from which other sites their values come."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._entry import united_rows
from ._markers import Mark
from ._walk import Walk

Sources = frozenset[int]  # the numbers of sites; arguments have negative ones, from -1 on


class LoopIndex(NamedTuple):
    """Stands for the index of a loop in a path."""

    reverse: bool


Path = tuple[int | LoopIndex, ...]


class Upstream:
    """For the position of each site: its path, and the nearest sites and arguments above it.

    A path has the number of an equation at each level and, inside a loop, a `LoopIndex` before it:
    with the indices in their places, paths compare as the sites run.
    """

    def __init__(self, walk: Walk, jaxpr: Jaxpr):
        self._walk = walk
        self.paths: dict[int, Path] = {}
        self.sources: dict[int, Sources] = collections.defaultdict(frozenset)
        arguments = [frozenset({-1 - i}) for i in range(len(jaxpr.invars))]
        self._visit(jaxpr, range(len(walk.entries(jaxpr))), arguments, ())

    def _visit(
        self, jaxpr: Jaxpr, ids: Sequence[int], inputs: Sequence[Sources], path: Path
    ) -> list[Sources]:
        """The sources of the outputs; `ids` are the positions of its sites in the program."""
        above: dict[Var, Sources] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Sources:
            return above.get(atom, frozenset()) if isinstance(atom, Var) else frozenset()

        first = 0
        spans = self._walk.spans(jaxpr)
        for number, (eqn, span) in enumerate(zip(jaxpr.eqns, spans, strict=True)):
            here = ids[first : first + len(span)]
            first += len(span)
            into = list(map(read, eqn.invars))
            outs = [frozenset().union(*into)] * len(eqn.outvars)
            if isinstance(_compat.hi_prim(eqn), Mark):
                self.paths[here[0]] = (*path, number)
                self.sources[here[0]] |= frozenset().union(*into)
                above.update((v, frozenset(here)) for v in eqn.invars if isinstance(v, Var))
            elif span:
                outs = self._enter(eqn, here, into, (*path, number))
            above.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _enter(
        self, eqn: JaxprEqn, ids: Sequence[int], into: list[Sources], path: Path
    ) -> list[Sources]:
        for position in ids:
            self.paths.setdefault(position, path)
        outs: list[Sources] = [frozenset()] * len(eqn.outvars)
        for jaxpr, inner in self._inside(eqn, ids):
            # The last inputs of an equation are those of its jaxprs: before them may be an index.
            inputs = into[len(into) - len(jaxpr.invars) :]
            loop = _loop(eqn, jaxpr)
            within = path if loop is None else (*path, LoopIndex(loop.reverse))
            new = self._visit(jaxpr, inner, inputs, within)
            if loop is not None:  # once more, with what the loop carries round
                carried = zip(inputs[loop.carry], new, strict=False)
                inputs[loop.carry] = [a | b for a, b in carried]
                new = self._visit(jaxpr, inner, inputs, within)
            if len(new) == len(outs):
                outs = [a | b for a, b in zip(outs, new, strict=True)]
        return outs

    def _inside(self, eqn: JaxprEqn, ids: Sequence[int]) -> Iterator[tuple[Jaxpr, Sequence[int]]]:
        """The jaxprs of an equation, with the positions of their sites in the program."""
        jaxprs = list(_compat.jaxprs_in(eqn.params))
        entries = list(map(self._walk.entries, jaxprs))
        if sum(map(len, entries)) == len(ids):  # one after the other
            rest = iter(ids)
            for jaxpr, inner in zip(jaxprs, entries, strict=True):
                yield jaxpr, [next(rest) for _ in inner]
        elif len(rows := united_rows(entries)) == len(ids):  # the branches of a `cond`
            for number, jaxpr in enumerate(jaxprs):
                here = {row[number]: i for row, i in zip(rows, ids, strict=True)}
                yield jaxpr, [here[position] for position in range(len(entries[number]))]


class _Loop(NamedTuple):
    carry: slice  # what it carries round, among its inputs
    reverse: bool


def _loop(eqn: JaxprEqn, jaxpr: Jaxpr) -> _Loop | None:
    if eqn.primitive.name == "scan":
        params = _compat.scan_params(eqn)
        carry = slice(params.num_consts, params.num_consts + params.num_carry)
        return _Loop(carry, params.options["reverse"])
    if eqn.primitive.name == "while" and jaxpr is _compat.while_params(eqn).body_jaxpr:
        carry = slice(_compat.while_params(eqn).body_consts, None)
        return _Loop(carry, False)
    return None
