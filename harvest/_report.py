"""What `debug.nonfinite` reports."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ._upstream import LoopIndex, Path


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that something had, as [`harvest.debug.Fault`][] lists them.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        f = lambda x: harvest.sow(jnp.log(x), name="log")
        (fault,) = harvest.debug.nonfinite(f)(jnp.array([-1.0, 4.0]))
        (x,) = fault.inputs
        assert (x.name, x.low, x.high, x.nan) == ("args[0]", -1, 4, False)
        ```

    **Arguments:**

    - `name`: the key of a site, or where it is among the arguments: `args[0]["w"]`.
    - `low`, `high`: the least and the largest of its finite values (absolute values, if it is
        complex); infinite if there are none.
    - `nan`, `inf`: whether it had NaNs, or infinities.
    """

    name: str
    low: float
    high: float
    nan: bool
    inf: bool

    def __str__(self) -> str:
        has = [word for word, has in (("NaN", self.nan), ("inf", self.inf)) if has]
        finite = f"{self.low:.4g} .. {self.high:.4g}" if self.low <= self.high else "nothing finite"
        return f"{self.name}: {', '.join([finite, *has])}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first site that holds a NaN, as [`harvest.debug.nonfinite`][] reports it.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):
            layer = lambda x, _: (harvest.sow(jnp.log(x), name="log"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        (fault,) = harvest.debug.nonfinite(f)(jnp.float32(5))
        assert fault.key == "log" and fault.index == (3,)  # log of log(log(log(5))) = -0.74
        print(fault)
        ```

    **Arguments:**

    - `key`, `kind`, `source`: as of its [`harvest.Site`][].
    - `index`: the iteration of the loops around it, outermost first.
    - `lane`: which example of the batches that `vmap` made.
    - `value`: the [`harvest.debug.Range`][] of the site itself.
    - `inputs`: those of the nearest sites and arguments that it is computed from, in that iteration
        (or the last one in which they ran).
    """

    key: str
    kind: str
    source: str
    index: tuple[int, ...]
    lane: tuple[int, ...]
    value: Range
    inputs: tuple[Range, ...]

    def __str__(self) -> str:
        what = "the cotangent of " if self.kind == "cotangent" else ""
        where = [f"iteration {_listed(self.index)}"] if self.index else []
        where += [f"example {_listed(self.lane)}"] if self.lane else []
        lines = [", ".join([f"{what}{self.key!r}", *where, f"sown at {self.source}"])]
        lines += [f"    {self.value}"]
        lines += [f"    from {value}" for value in self.inputs]
        return "\n".join(lines)


def _listed(index: Sequence[int]) -> str:
    return str(index[0]) if len(index) == 1 else str(tuple(index))


class Report(tuple[Fault, ...]):
    """The faults that [`harvest.debug.nonfinite`][] found: empty, and so false, if there are none.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        report = harvest.debug.nonfinite(lambda x: harvest.sow(jnp.log(x), name="log"))(jnp.ones(3))
        assert not report
        print(report)  # nothing is wrong at 1 site
        ```

    A tuple of [`harvest.debug.Fault`][]s: the first among sown values, and the first among
    cotangents.
    """

    watched: int

    def __new__(cls, faults: Iterable[Fault], watched: int) -> "Report":
        self = super().__new__(cls, faults)
        self.watched = watched
        return self

    def __repr__(self) -> str:
        sites = f"{self.watched} site{'' if self.watched == 1 else 's'}"
        if not self:
            return f"nothing is wrong at {sites}"
        return "\n".join([f"of {sites}, the first that is not finite:", *map(str, self)])

    __str__ = __repr__


@dataclasses.dataclass(frozen=True)
class Watched:
    """What is known of a site before anything runs."""

    position: int
    key: str
    kind: str
    source: str
    known: tuple[bool, ...]  # for each loop around it, whether it has an axis
    path: Path
    sources: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Event:
    """A site at one iteration, in one example of a batch."""

    site: Watched
    stats: dict[str, np.ndarray]
    cell: tuple[int, ...]  # into its arrays

    @property
    def index(self) -> tuple[int, ...]:
        axes = iter(self.cell)
        folded = iter(self.stats["index"][self.cell].tolist())
        return tuple(next(axes) if known else next(folded) for known in self.site.known)

    @property
    def lane(self) -> tuple[int, ...]:
        return self.cell[sum(self.site.known) :]

    @property
    def time(self) -> tuple[int, ...]:
        index = iter(self.index)
        return tuple(_step(part, index) for part in self.site.path)

    def range(self) -> Range:
        return _range(self.site.key, {k: v[self.cell] for k, v in self.stats.items()})


def _step(part: int | LoopIndex, index: Iterator[int]) -> int:
    if not isinstance(part, LoopIndex):
        return part
    return -next(index) if part.reverse else next(index)


def _range(name: str, stats: dict[str, Any]) -> Range:
    return Range(
        name, float(stats["low"]), float(stats["high"]), bool(stats["nan"]), bool(stats["inf"])
    )


def faults(watched: Any, found: Any, arguments: Any, names: Any) -> Iterator[Fault]:
    stats = {site.position: row for site, row in zip(watched, found, strict=True)}
    sites = {site.position: site for site in watched}
    for kind in ("sow", "cotangent"):
        events = [
            _Event(site, stats[site.position], tuple(map(int, cell)))
            for site in watched
            if site.kind == kind
            for cell in np.argwhere(stats[site.position]["found"])
        ]
        if events:
            first = min(events, key=lambda event: (event.time, event.lane))
            inputs = [
                _range(names[-1 - s], arguments[-1 - s])
                for s in sorted(first.site.sources, reverse=True)
                if -1 - s in arguments
            ]
            before = (_before(first, sites.get(s), stats) for s in sorted(first.site.sources))
            inputs += [event.range() for event in before if event is not None]
            site = first.site
            yield Fault(
                site.key,
                site.kind,
                site.source,
                first.index,
                first.lane,
                first.range(),
                tuple(inputs),
            )


def _before(fault: _Event, site: Watched | None, stats: Any) -> _Event | None:
    """The last time that a site ran before a fault, as far as is known."""
    if site is None:
        return None
    rows = stats[site.position]
    events = [_Event(site, rows, tuple(map(int, cell))) for cell in np.argwhere(rows["ran"])]
    same = [e for e in events if e.lane == fault.lane] or events
    earlier = [event for event in same if event.time < fault.time]
    return max(earlier, key=lambda event: event.time, default=None)
