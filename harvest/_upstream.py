"""When the sites of a program run, and from which other sites their values come."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._entry import Entry, united_rows
from ._markers import Mark, Marker
from ._rule import rule_for
from ._walk import Walk


class LoopIndex(NamedTuple):
    """Stands for the index of a loop in a path."""

    length: int | None
    reverse: bool

    def order(self, index: Any) -> Any:
        """How many iterations come before that of this index."""
        return self.length - 1 - index if self.reverse and self.length is not None else index


Path = tuple[int | LoopIndex, ...]
Variant = tuple[int, tuple[int | None, ...]]  # the identity of a marker, and the loops around it
Place = tuple[int, int]  # a site, and which of its variants


def variants(entry: Entry) -> dict[Variant, Entry]:
    """What the branches of the `cond`s around a site have of it: markers, or loops of their own."""
    return {(id(inner.marker), loops): inner for inner, loops in entry.innermost()}


def number_of(variants: Sequence[Variant], marker: Marker, loops: Iterable[int | None]) -> int:
    """Which of the variants of a site this is; of loops that a user's rule makes, any."""
    exact = (id(marker), tuple(loops))
    markers = [identity for identity, _ in variants]
    return variants.index(exact) if exact in variants else markers.index(id(marker))


class Stacked(NamedTuple):
    """An axis that a loop has put in front of a value."""

    outer: int | None  # the loop around the site that it stands for
    length: int | None
    offset: int  # its number in that loop, less its index in the axis


class Aligned(NamedTuple):
    """In which iteration of a loop around it a site has made a value.

    Loops are called by their depth.
    """

    outer: int  # the loop around the site
    loop: int | None  # one around the value, which may be another, or None
    offset: int  # the number of the one iteration, less that of the other
    exact: bool  # otherwise it may be an earlier one: the last in which the site ran


class Source(NamedTuple):
    """A site, or an argument, that a value comes from."""

    place: Place  # (-1 - i, 0) for the i-th argument
    aligned: frozenset[Aligned] = frozenset()  # of other loops, it has the last iteration
    stacked: tuple[Stacked, ...] = ()  # or all of them
    rounds: tuple[int, ...] = ()  # how often each of the loops around the value has carried it on

    def sliced(self, loop: int, length: int | None) -> "Source":
        """Inside a loop that slices it."""
        if not self.stacked or self.stacked[0].length != length:
            return self
        (outer, _, offset), *rest = self.stacked
        here = frozenset() if outer is None else {Aligned(outer, loop, offset, True)}
        return self._replace(aligned=self.aligned | here, stacked=tuple(rest))

    def carried(self, loop: int, step: int) -> "Source":
        """In the next iteration of a loop."""
        stay = {a for a in self.aligned if a.loop != loop}
        later = {a._replace(offset=a.offset - step) for a in self.aligned - stay}
        rounds = self.rounds + (0,) * (loop + 1 - len(self.rounds))
        return self._replace(
            aligned=frozenset(stay | later), rounds=(*rounds[:loop], rounds[loop] + 1)
        )

    def left(self, loop: int, last: int | None) -> "Source":
        """After a loop that has carried it, and its last iteration (None if it is not known)."""
        stay = {a for a in self.aligned if a.loop != loop}
        if last is not None:
            stay |= {a._replace(loop=None, offset=last + a.offset) for a in self.aligned - stay}
        return self._replace(aligned=frozenset(stay), rounds=self.rounds[:loop])

    def stack(self, loop: int, length: int | None) -> "Source":
        """After a loop that has stacked it."""
        here = next((a for a in self.aligned if a.loop == loop), None)
        axis = (
            Stacked(None, length, 0) if here is None else Stacked(here.outer, length, here.offset)
        )
        return self.left(loop, None)._replace(stacked=(axis, *self.stacked))


Sources = frozenset[Source]


class Upstream:
    """For each variant of the watched sites its path, and the nearest sites and arguments above.

    A path has the number of an equation at each level and, inside a loop, a `LoopIndex` before it:
    with the indices in their places, paths compare as the sites run.
    """

    def __init__(self, walk: Walk, jaxpr: Jaxpr, watched: Sequence[bool]):
        self._walk = walk
        self._variants = [
            list(variants(entry)) if chosen else []
            for entry, chosen in zip(walk.entries(jaxpr), watched, strict=True)
        ]
        self.paths: dict[Place, Path] = {}
        self.sources: dict[Place, Sources] = collections.defaultdict(frozenset)
        arguments = [frozenset({Source((-1 - i, 0))}) for i in range(len(jaxpr.invars))]
        self._visit(jaxpr, range(len(self._variants)), arguments, ())

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
            if isinstance(marker, Mark):
                if self._variants[here[0]]:
                    itself = self._mark(here[0], marker, into, (*path, number))
                    above.update((v, itself) for v in _own(eqn, marker) if isinstance(v, Var))
            elif span or (any(into) and rule_for(eqn) is not None):
                outs = self._enter(eqn, here, into, (*path, number))
            above.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def _mark(self, site: int, marker: Mark, into: list[Sources], path: Path) -> Sources:
        loops = [part.length for part in path if isinstance(part, LoopIndex)]
        place = (site, number_of(self._variants[site], marker, loops))
        self.paths[place] = path
        self.sources[place] |= frozenset().union(*into)
        aligned = frozenset(Aligned(loop, loop, 0, False) for loop in range(len(loops)))
        return frozenset({Source(place, aligned)})

    def _enter(
        self, eqn: JaxprEqn, ids: Sequence[int], into: list[Sources], path: Path
    ) -> list[Sources]:
        for site in ids:
            for number in range(len(self._variants[site])):
                self.paths.setdefault((site, number), path)  # for what cannot be opened
        results = []
        for jaxpr, inner in self._inside(eqn, ids):
            # The last inputs of an equation are those of its jaxprs: before them may be an index.
            inputs = into[len(into) - len(jaxpr.invars) :]
            loop = _loop(eqn, jaxpr)
            if loop is None and eqn.primitive.name == "while":
                continue  # the predicate: its sites cannot be watched, and no result comes from it
            if len(inputs) != len(jaxpr.invars):
                continue
            if loop is None:
                results.append(self._visit(jaxpr, inner, inputs, path))
            else:
                results.append(self._iterate(loop, jaxpr, inner, inputs, path))
        if any(len(outs) != len(eqn.outvars) for outs in results) or not results:
            results = [[frozenset().union(*into)] * len(eqn.outvars)]
        return [frozenset().union(*sources) for sources in zip(*results, strict=True)]

    def _iterate(
        self,
        loop: "_Loop",
        jaxpr: Jaxpr,
        ids: Sequence[int],
        inputs: list[Sources],
        path: Path,
    ) -> list[Sources]:
        depth = sum(isinstance(part, LoopIndex) for part in path)
        within = (*path, LoopIndex(loop.length, loop.reverse))
        step = -1 if loop.reverse else 1
        carried = inputs[loop.carry]
        xs = [_each(x, Source.sliced, depth, loop.length) for x in inputs[loop.carry.stop :]]
        while True:  # until nothing new is carried round
            new = self._visit(jaxpr, ids, [*inputs[: loop.carry.start], *carried, *xs], within)
            outs, ys = new[: len(carried)], new[len(carried) :]
            before = carried
            carried = [
                c | _each(out, Source.carried, depth, step)
                for c, out in zip(carried, outs, strict=True)
            ]
            if list(map(_places, before)) == list(map(_places, carried)):
                last = loop.length and (0 if loop.reverse else loop.length - 1)
                return [
                    *(_each(out, Source.left, depth, last) for out in outs),
                    *(_each(y, Source.stack, depth, loop.length) for y in ys),
                ]

    def _inside(self, eqn: JaxprEqn, ids: Sequence[int]) -> Iterator[tuple[Jaxpr, Sequence[int]]]:
        """The jaxprs of an equation, with the positions of their sites in the program."""
        jaxprs = self._walk.jaxprs(eqn)
        entries = list(map(self._walk.entries, jaxprs))
        if sum(map(len, entries)) == len(ids):  # one after the other
            rest = iter(ids)
            for jaxpr, inner in zip(jaxprs, entries, strict=True):
                yield jaxpr, [next(rest) for _ in inner]
        elif len(rows := united_rows(entries)) == len(ids):  # the branches of a `cond`
            for number, jaxpr in enumerate(jaxprs):
                here = {row[number]: i for row, i in zip(rows, ids, strict=True)}
                yield jaxpr, [here[position] for position in range(len(entries[number]))]


def _own(eqn: JaxprEqn, marker: Mark) -> Sequence[Any]:
    """What a `Mark` is about; of an equation the outputs, which it has beside its inputs."""
    label = marker.label
    return label.structure.unflatten(eqn.invars)[0] if label.kind == "equation" else eqn.invars


class _Loop(NamedTuple):
    carry: slice  # what it carries round, among its inputs
    reverse: bool
    length: int | None  # None if it is not known: then it neither slices nor stacks


def _loop(eqn: JaxprEqn, jaxpr: Jaxpr) -> _Loop | None:
    if eqn.primitive.name == "scan":
        params = _compat.scan_params(eqn)
        carry = slice(params.num_consts, params.num_consts + params.num_carry)
        return _Loop(carry, params.options["reverse"], params.length)
    if eqn.primitive.name == "while" and jaxpr is _compat.while_params(eqn).body_jaxpr:
        carry = slice(_compat.while_params(eqn).body_consts, len(jaxpr.invars))
        return _Loop(carry, False, None)
    return None


def _each(sources: Sources, change: Callable[..., Source], *args: Any) -> Sources:
    return frozenset(change(source, *args) for source in sources)


def _places(sources: Sources) -> frozenset[Place]:
    return frozenset(source.place for source in sources)
