"""When the sites of a program run, and from which other sites their values come."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._entry import united_rows
from ._markers import Mark
from ._walk import Walk


class LoopIndex(NamedTuple):
    """Stands for the index of a loop in a path."""

    reverse: bool


Path = tuple[int | LoopIndex, ...]
Place = tuple[int, int]  # a site, and which of the markers that the branches of `cond`s have of it


class Source(NamedTuple):
    """A site, or an argument, that a value comes from.

    Loops are called by their depth around the site (of `aligned`, also around that value).
    """

    place: Place  # (-1 - i, 0) for the i-th argument
    stacked: tuple[tuple[int | None, int], ...] = ()  # axes in front of the value: loop and length
    aligned: frozenset[tuple[int, int]] = frozenset()  # loops of which it has the same iteration

    def sliced(self, loop: int, length: int) -> "Source":
        """Inside a loop that slices it."""
        if not self.stacked or self.stacked[0][1] != length:
            return self
        (stack, _), *rest = self.stacked
        aligned = self.aligned if stack is None else self.aligned | {(stack, loop)}
        return self._replace(stacked=tuple(rest), aligned=aligned)

    def carried(self, loop: int) -> "Source":
        """In the next iteration of a loop, or after it."""
        return self._replace(aligned=frozenset(p for p in self.aligned if p[1] != loop))

    def stack(self, loop: int, length: int, inside: bool) -> "Source":
        """After a loop that stacks it; `inside`: whether the site is in that loop."""
        stack = loop if inside else next((a for a, b in self.aligned if b == loop), None)
        return self.carried(loop)._replace(stacked=((stack, length), *self.stacked))


Sources = frozenset[Source]


class Upstream:
    """For each marker of the watched sites: its path, and the nearest of them and arguments above.

    A path has the number of an equation at each level and, inside a loop, a `LoopIndex` before it:
    with the indices in their places, paths compare as the sites run.
    """

    def __init__(self, walk: Walk, jaxpr: Jaxpr, watched: Sequence[bool]):
        self._walk = walk
        self._markers = [
            [id(inner.marker) for inner, _ in entry.innermost()] if chosen else []
            for entry, chosen in zip(walk.entries(jaxpr), watched, strict=True)
        ]
        self.paths: dict[Place, Path] = {}
        self.sources: dict[Place, Sources] = collections.defaultdict(frozenset)
        arguments = [frozenset({Source((-1 - i, 0))}) for i in range(len(jaxpr.invars))]
        self._visit(jaxpr, range(len(self._markers)), arguments, ())

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
            marker = _compat.hi_prim(eqn)
            outs = [frozenset().union(*into)] * len(eqn.outvars)
            if isinstance(marker, Mark) and self._markers[here[0]]:
                place = (here[0], self._markers[here[0]].index(id(marker)))
                self.paths[place] = (*path, number)
                self.sources[place] |= frozenset().union(*into)
                itself = frozenset({Source(place)})
                above.update((v, itself) for v in eqn.invars if isinstance(v, Var))
            elif span:
                outs = self._enter(eqn, here, into, (*path, number))
            above.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _enter(
        self, eqn: JaxprEqn, ids: Sequence[int], into: list[Sources], path: Path
    ) -> list[Sources]:
        outs: list[Sources] = [frozenset()] * len(eqn.outvars)
        for jaxpr, inner in self._inside(eqn, ids):
            # The last inputs of an equation are those of its jaxprs: before them may be an index.
            inputs = into[len(into) - len(jaxpr.invars) :]
            loop = _loop(eqn, jaxpr)
            if loop is None:
                new = self._visit(jaxpr, inner, inputs, path)
            else:
                new = self._iterate(loop, jaxpr, inner, inputs, path)
            if len(new) == len(outs):
                outs = [a | b for a, b in zip(outs, new, strict=True)]
        return outs

    def _iterate(
        self,
        loop: "_Loop",
        jaxpr: Jaxpr,
        ids: Sequence[int],
        inputs: list[Sources],
        path: Path,
    ) -> list[Sources]:
        depth = sum(isinstance(part, LoopIndex) for part in path)
        within = (*path, LoopIndex(loop.reverse))
        carry = loop.carry
        carried = inputs[carry]
        xs = [_each(x, lambda s: s.sliced(depth, loop.length)) for x in inputs[carry.stop :]]
        while True:  # until nothing new is carried round
            new = self._visit(jaxpr, ids, [*inputs[: carry.start], *carried, *xs], within)
            outs = [_each(c, lambda s: s.carried(depth)) for c in new[: len(carried)]]
            ys = new[len(carried) :]
            before, carried = carried, [a | b for a, b in zip(carried, outs, strict=True)]
            if list(map(_places, before)) == list(map(_places, carried)):
                stack = lambda s: s.stack(depth, loop.length, s.place[0] in ids)
                return [*outs, *(_each(y, stack) for y in ys)]

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
    length: int  # of what it slices and stacks


def _loop(eqn: JaxprEqn, jaxpr: Jaxpr) -> _Loop | None:
    if eqn.primitive.name == "scan":
        params = _compat.scan_params(eqn)
        carry = slice(params.num_consts, params.num_consts + params.num_carry)
        return _Loop(carry, params.options["reverse"], params.length)
    if eqn.primitive.name == "while" and jaxpr is _compat.while_params(eqn).body_jaxpr:
        carry = slice(_compat.while_params(eqn).body_consts, len(jaxpr.invars))
        return _Loop(carry, False, 0)
    return None


def _each(sources: Sources, change: Callable[[Source], Source]) -> Sources:
    return frozenset(map(change, sources))


def _places(sources: Sources) -> frozenset[Place]:
    return frozenset(source.place for source in sources)
