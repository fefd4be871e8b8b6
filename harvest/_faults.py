"""Which site was the first that is not finite, from what all of them were reduced to."""

import collections
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from ._report import Fault, Range, Report
from ._upstream import LoopIndex, Path, Place, Source

Kind = Literal["sow", "cotangent", "equation"]
Arguments = Callable[[Sequence[int]], list[Range]]


@dataclasses.dataclass(frozen=True)
class Watched:
    """What is known of a variant of a site before anything runs."""

    place: Place
    key: str
    kind: Kind
    source: str
    known: tuple[bool, ...]  # for each loop around it, whether its results have an axis
    mesh: tuple[dict[str, int], ...]  # for each axis of shards of its results, the mesh axes in it
    path: Path
    sources: frozenset[Source]
    shapes: tuple[tuple[int, ...], ...]  # of the outputs of an equation
    primitive: str | None


def report(
    watched: Sequence[Watched], found: Sequence[Any], arguments: Arguments, of: str
) -> Report:
    """From what a `Watch` has made of each site, and a function for the ranges of arguments."""
    positions = sorted({site.place[0] for site in watched})
    results = dict(zip(positions, found, strict=True))
    runs = {site.place: _Runs(site, results[site.place[0]]) for site in watched}
    when = lambda run: (run[0].time[run[1]], run[0].lane[run[1]].tolist())
    firsts = []
    for kind in get_args(Kind):
        rows = [(r, row) for r in runs.values() if r.site.kind == kind for row in r.found]
        firsts += [min(rows, key=when)] if rows else []
    firsts.sort(key=when)
    return Report([_fault(run, row, runs, arguments) for run, row in firsts], len(found), of)


class _Runs:
    """When a site ran, and the ranges it had: a row for each iteration, example and shard."""

    def __init__(self, site: Watched, result: Any):
        self.site = site
        tables = [_table(site, row) for row in result["rows"]]
        self.index, self.lane, self.stats = jax.tree.map(lambda *x: np.concatenate(x), *tables)
        steps = iter(self.index.T)
        columns = [_column(part, steps, len(self.index)) for part in site.path]
        self.loops = [part for part in site.path if isinstance(part, LoopIndex)]
        self.time = np.stack(columns, axis=1).tolist()
        # In the first of the tables: the others have what was before.
        self.found = np.flatnonzero(result["found"][_ran(site, result["rows"][0])]).tolist()

    def range(self, rows: Any) -> Range:
        stats = {name: column[rows] for name, column in self.stats.items()}
        return range_of(self.site.key, self.site.kind, stats)


def _ran(site: Watched, row: Any) -> Any:
    return row["ran"] & (row["variant"] == site.place[1])


def _table(site: Watched, row: Any) -> tuple[Any, Any, dict[str, Any]]:
    ran, known = _ran(site, row), np.array(site.known, bool)
    cells, folded = np.argwhere(ran), row["index"][ran]
    index = np.zeros((len(cells), len(known)), int)
    index[:, known] = cells[:, : known.sum()]
    index[:, ~known] = folded[:, : (~known).sum()]
    noted = {name: row[name][ran] for name in row.keys() - {"ran", "variant", "index"}}
    return index, cells[:, known.sum() :], noted


def _column(part: int | LoopIndex, steps: Iterator[Any], count: int) -> Any:
    if not isinstance(part, LoopIndex):
        return np.full(count, part)
    return part.order(next(steps))


def range_of(name: str, kind: Any, stats: Any) -> Range:
    low, high = float(np.min(stats["low"])) + 0.0, float(np.max(stats["high"])) + 0.0  # no -0
    return Range(name, kind, low, high, bool(np.any(stats["nan"])), bool(np.any(stats["inf"])))


def _fault(runs: _Runs, row: int, others: Mapping[Place, _Runs], arguments: Arguments) -> Fault:
    site, index, lane = runs.site, runs.index[row].tolist(), runs.lane[row].tolist()
    batch = len(lane) - len(site.mesh)
    orders = [loop.order(i) for loop, i in zip(runs.loops, index, strict=False)]
    reaching = [s for s in site.sources if all(map(operator.ge, orders, s.rounds))]
    given = {-1 - source.place[0] for source in reaching if source.place[0] < 0}
    inputs = arguments(sorted(given))
    ways = collections.defaultdict(list)
    for source in reaching:
        if source.place in others and (rows := _before(runs, row, others[source.place], source)):
            ways[source.place[0]].append((source, others[source.place], rows))
    for position in sorted(ways):
        _, other, rows = max(ways[position], key=_nearness)
        inputs.append(other.range(rows))
    return Fault(
        site.key,
        site.kind,
        site.source,
        tuple(index),
        () if site.primitive else tuple(lane[:batch]),  # those of a loop that a `vmap` batched
        _shard(lane[batch:], site.mesh),
        runs.range(row),
        tuple(value for value in inputs if value.low <= value.high or value.nan or value.inf),
        site.primitive,
        _element(site.shapes, int(runs.stats["element"][row])) if site.primitive else (),
    )


def _element(shapes: Sequence[tuple[int, ...]], count: int) -> tuple[int, ...]:
    """The index in an output, from one that counts through all of them."""
    shape, *others = shapes
    if others and count >= math.prod(shape):
        return _element(others, count - math.prod(shape))
    return tuple(int(i) for i in np.unravel_index(count, shape))


def _shard(indices: Sequence[int], mesh: Sequence[dict[str, int]]) -> dict[str, int]:
    """Where on the mesh the shards are that have these indices."""
    pairs = zip(indices, mesh, strict=True)
    places = [(axes, np.unravel_index(index, tuple(axes.values()))) for index, axes in pairs]
    return {name: int(i) for axes, place in places for name, i in zip(axes, place, strict=True)}


def _before(runs: _Runs, row: int, other: _Runs, source: Source) -> list[int]:
    """The rows of a source that a value is computed from, the last one last."""
    chosen = np.array([time < runs.time[row] for time in other.time], bool)
    for outer, loop, offset, exact in source.aligned:
        number = offset if loop is None else offset + runs.index[row, loop]
        later = other.loops[outer].order(other.index[:, outer]) - other.loops[outer].order(number)
        chosen &= (later == 0) if exact else (later <= 0)
    for outer, length, offset in source.stacked:
        if outer is not None:
            steps = other.index[:, outer] - offset
            chosen &= (0 <= steps) & (steps < length)
    if other.lane.shape[1] == runs.lane.shape[1]:
        same = chosen & (other.lane == runs.lane[row]).all(axis=1)
        chosen = same if same.any() else chosen
    rows = sorted(np.flatnonzero(chosen).tolist(), key=lambda row: other.time[row])
    stacked = {axis.outer for axis in source.stacked}
    loops = [loop for loop in range(other.index.shape[1]) if loop not in stacked]
    return [r for r in rows if (other.index[r] == other.index[rows[-1]])[loops].all()]


def _nearness(way: tuple[Source, _Runs, list[int]]) -> tuple[Any, ...]:
    """Of the ways from a site to a value, the one with most of the same iterations is reported."""
    source, other, rows = way
    aligned = sum(a.loop is not None for a in source.aligned)
    return aligned, -len(source.stacked), [-count for count in source.rounds], other.time[rows[-1]]
