"""Which sites are read and which are replaced: decided and checked before anything runs."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from ._checks import check_open, check_plantable, check_stackable, check_unique, numbered, phantoms
from ._entry import Entry
from ._fit import Mode
from ._interpreter import Actions
from ._reading import Reading
from ._reducers import reading_of
from ._select import Chosen, check_chosen, check_found, is_static, matches
from ._sites import Sites


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done at each entry of a program, and what to say about it."""

    actions: Actions
    reads: tuple[tuple[Entry, Reading], ...] = ()  # each entry to read, and how
    warnings: tuple[str, ...] = ()


def sites_of(entries: Sequence[Entry]) -> Sites:
    """The table of what can be collected."""
    return Sites([site for _, _, site in numbered(entries, readable=True)])


def resolve(
    select: Any, entries: Sequence[Entry], readable: bool, what: str, needed: bool = False
) -> Chosen:
    """What `select` chooses in a program, without the user's function that chose it."""
    table = [site for _, _, site in numbered(entries, readable)]
    keys = {site.key: site.source for site in table}
    check_found(select, keys, what)
    chosen = Chosen((site.key, site.occurrence) for site in table if matches(select, site, keys))
    if needed:
        check_chosen(select, chosen, keys, what)
    return chosen


def resolve_keys(
    entries: Sequence[Entry], keys: Sequence[Any], what: str = "plants"
) -> Iterator[Any]:
    """The keys of `plants`, with what depends on a user's function resolved."""
    rows = list(numbered(entries, readable=False))
    sown = list(numbered(entries, readable=True))
    for key in keys:
        if not is_static(key):
            check_plantable(key, rows, sown)
            key = resolve(key, entries, False, what, needed=True)
        yield key


def plan_reads(
    entries: Sequence[Entry], pairs: Sequence[tuple[Any, Any]], mode: Mode, what: str
) -> Plan:
    """Read the sites that `(select, reducer)` pairs choose; the first that does."""
    actions: list[Reading | None] = [None] * len(entries)
    reads = []
    rows = list(numbered(entries, readable=True))
    keys = {site.key: site.source for _, _, site in rows}
    for select, _ in pairs:
        check_found(select, keys, what)
    for position, entry, site in rows:
        reducers = [r for select, r in pairs if matches(select, site, keys)]
        if reducers:
            (reducer, *_) = reducers
            check_open(entry, what)
            reading = reading_of(reducer, entry)
            check_stackable(reading, entry, what)
            actions[position] = reading
            reads.append((entry, reading))
    chosen = [entry for entry, _ in reads]
    if mode == "strict":
        check_unique(chosen, what)
    return Plan(tuple(actions), tuple(reads), tuple(phantoms(chosen, what)))
