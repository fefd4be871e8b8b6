"""Which sites are differentiated, or edited one after the other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ._checks import (
    Row,
    check_differentiable,
    check_open,
    check_plantable,
    check_unique,
    fruitless,
    numbered,
    occurrences,
    phantoms,
)
from ._entry import CondSum, Entry
from ._errors import UnsupportedError
from ._fit import Mode
from ._interpreter import Actions
from ._reading import READ, Reading
from ._select import check_found, matches


class Probed(NamedTuple):
    position: int
    entry: Entry
    reducer: Any


class ProbePlan(NamedTuple):
    """Where tangents enter, and what is read beside: which branch of a `cond` ran."""

    actions: Actions
    probed: list[Probed]
    warnings: tuple[str, ...]


def plantable_rows(
    entries: Sequence[Entry], select: Any, what: str, mode: Mode = "strict"
) -> list[Row]:
    """The tags of what is selected, each of which stands for one occurrence."""
    sown = list(numbered(entries, readable=True))
    rows = list(numbered(entries, readable=False))
    keys = {site.key: site.source for _, _, site in rows}
    check_plantable(select, rows, sown, what)
    check_found(select, keys, what)
    mine = [row for row in rows if matches(select, row[2], keys)]
    for _, entry, _ in mine:
        check_open(entry, what)
        check_differentiable(entry, what)
    stood_for = occurrences(mine, rows, sown)
    if mode == "strict":
        check_unique(stood_for, what)
    if len(mine) != len(stood_for):
        raise UnsupportedError(
            f"`{what}`: sites inside a backward pass through `jax.checkpoint` are evaluated twice, "
            f"and cannot be told apart; take `{what}` of the function itself"
        )
    return mine


def plan_probes(
    entries: Sequence[Entry], pairs: Sequence[tuple[Any, Any]], mode: Mode, what: str
) -> ProbePlan:
    """Differentiate with respect to the sites that `(select, reducer)` pairs choose."""
    rows = plantable_rows(entries, tuple(select for select, _ in pairs), what, mode)
    keys = {entry.key: entry.source for entry in entries}
    probed = [
        Probed(position, entry, next(r for select, r in pairs if matches(select, site, keys)))
        for position, entry, site in rows
    ]
    actions: list[Reading | None] = [None] * len(entries)
    chosen = {(site.key, site.occurrence) for _, entry, site in rows if is_sum(entry)}
    for position, _, site in numbered(entries, readable=True):
        if (site.key, site.occurrence) in chosen:
            actions[position] = READ
    found = [entry for _, entry, _ in rows]
    warnings = (*phantoms(found, what), *fruitless(found, "differentiating"))
    return ProbePlan(tuple(actions), probed, warnings)


def with_reads(plan: ProbePlan, entries: Sequence[Entry]) -> ProbePlan:
    """A plan that reads the values of its sites as well, in the same order."""
    keys = {probed.entry.key for probed in plan.probed}
    actions = [
        READ if entry.readable and entry.key in keys else action
        for entry, action in zip(entries, plan.actions, strict=True)
    ]
    return plan._replace(actions=actions)


def is_sum(entry: Entry) -> bool:
    """Whether what is read at an entry is, or holds, a `CondSum`."""
    return isinstance(entry.type, CondSum)
