"""Which sites are read and which are replaced: decided and checked before anything runs."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from . import _types
from ._edit_nodes import Edit, Replace
from ._edits import as_edit
from ._entry import BATCHED_WHILE, PREDICATE, CondSum, Entry
from ._errors import DuplicateSiteError, PlantError, SelectError, UnsupportedError
from ._fit import Mode, prepared
from ._interpreter import Actions
from ._reading import READ, Folded, Reading, reading_of
from ._select import Chosen, check_found, is_static, matches
from ._site import Site, Sites, site_of


def check_mode(mode: str) -> None:
    if mode not in ("strict", "append"):
        raise SelectError(f"`mode` got {mode!r}; wanted 'strict' or 'append'")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done at each entry of a program, and what to say about it."""

    actions: Actions
    reads: tuple[tuple[Entry, Reading], ...] = ()  # each entry to read, and how
    warnings: tuple[str, ...] = ()


def numbered(entries: Sequence[Entry], readable: bool) -> Iterator[tuple[int, Entry, Site]]:
    """The entries that can be read (or planted): position, entry and site, in call order."""
    seen: collections.Counter[str] = collections.Counter()
    for position, entry in enumerate(entries):
        if entry.readable if readable else entry.plantable:
            yield position, entry, site_of(entry, seen[entry.key])
            seen[entry.key] += 1


def sites_of(entries: Sequence[Entry]) -> Sites:
    """The table of what can be collected."""
    return Sites([site for _, _, site in numbered(entries, readable=True)])


def resolve(select: Any, entries: Sequence[Entry], readable: bool, what: str) -> Chosen:
    """What `select` chooses in a program, without the user's function that chose it."""
    table = [site for _, _, site in numbered(entries, readable)]
    keys = {site.key: site.source for site in table}
    check_found(select, keys, what)
    return Chosen((site.key, site.occurrence) for site in table if matches(select, site, keys))


def resolve_keys(entries: Sequence[Entry], keys: Sequence[Any]) -> Iterator[Any]:
    """The keys of `plants`, with what depends on a user's function resolved."""
    rows = list(numbered(entries, readable=False))
    sown = list(numbered(entries, readable=True))
    for key in keys:
        if not is_static(key):
            _check_plantable(key, rows, sown)
            key = resolve(key, entries, False, "plants")
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
        reducer = next((r for select, r in pairs if matches(select, site, keys)), UNSELECTED)
        if reducer is not UNSELECTED:
            _check_open(entry, what)
            reading = reading_of(reducer, entry)
            _check_stackable(reading, entry, what)
            actions[position] = reading
            reads.append((entry, reading))
    chosen = [entry for entry, _ in reads]
    if mode == "strict":
        _check_unique(chosen, what)
    return Plan(tuple(actions), tuple(reads), tuple(_phantoms(chosen, what)))


UNSELECTED = object()


def plan_plants(
    entries: Sequence[Entry],
    plants: Sequence[tuple[Any, Any]],
    mode: Mode,
    what: str = "plant",
    argument: str = "plants",
) -> Plan:
    """Plant `(select, value or edit)` pairs."""
    sown = list(numbered(entries, readable=True))
    rows = list(numbered(entries, readable=False))
    keys = {site.key: site.source for _, _, site in rows}
    chosen: dict[int, tuple[Any, Edit | None]] = {}
    for select, plant in plants:
        _check_plantable(select, rows, sown, what)
        check_found(select, keys, argument)
        if not _is_edit(plant) and not (isinstance(select, str) and select in keys):
            raise PlantError(
                f"`{argument}` got a value for {select!r}; wanted an edit or a callable, since "
                "only a key stands for a single site"
            )
        mine = [row for row in rows if matches(select, row[2], keys)]
        if _is_value(plant, mine):
            plant = Replace(plant)
        for position, entry, _ in mine:
            _check_open(entry, what)
            if position in chosen:
                raise PlantError(
                    f"`{argument}`: both {chosen[position][0]!r} and {select!r} reach "
                    f"{entry.describe()}; put them into one edit with `harvest.chain`"
                )
        edits = _edits(plant, mine, _occurrences(mine, rows, sown), mode)
        for (position, _, _), edit in zip(mine, edits, strict=True):
            chosen[position] = (select, edit)
    planted = [(p, edit) for p, (_, edit) in sorted(chosen.items()) if edit is not None]
    actions: list[Edit | None] = [None] * len(entries)
    for position, edit in planted:
        actions[position] = edit
    return Plan(
        tuple(actions),
        warnings=tuple(_fruitless([entries[p] for p, _ in planted])),
    )


class Probed(NamedTuple):
    position: int
    entry: Entry
    reducer: Any


class ProbePlan(NamedTuple):
    """Where tangents enter, and what is read beside: which branch of a `cond` ran."""

    actions: Actions
    probed: list[Probed]
    warnings: tuple[str, ...]


def plantable(
    entries: Sequence[Entry], select: Any, what: str, mode: Mode = "strict"
) -> list["Row"]:
    """The tags of what is selected, each of which stands for one occurrence."""
    sown = list(numbered(entries, readable=True))
    rows = list(numbered(entries, readable=False))
    keys = {site.key: site.source for _, _, site in rows}
    _check_plantable(select, rows, sown, what)
    check_found(select, keys, what)
    mine = [row for row in rows if matches(select, row[2], keys)]
    for _, entry, _ in mine:
        _check_open(entry, what)
        _check_differentiable(entry, what)
    occurrences = _occurrences(mine, rows, sown)
    if mode == "strict":
        _check_unique(occurrences, what)
    if len(mine) != len(occurrences):
        raise UnsupportedError(
            f"`{what}`: sites inside a backward pass through `jax.checkpoint` are evaluated twice, "
            f"and cannot be told apart; take `{what}` of the function itself"
        )
    return mine


def plan_probes(
    entries: Sequence[Entry], pairs: Sequence[tuple[Any, Any]], mode: Mode, what: str
) -> ProbePlan:
    """Differentiate with respect to the sites that `(select, reducer)` pairs choose."""
    rows = plantable(entries, tuple(select for select, _ in pairs), what, mode)
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
    warnings = (*_phantoms(found, what), *_fruitless(found, "differentiating"))
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


def _check_differentiable(entry: Entry, what: str) -> None:
    for inner, loops in entry.innermost():
        if None in loops:
            raise UnsupportedError(
                f"`{what}`: {entry.describe()} is inside a `while_loop`, which has no backward "
                "pass; use `lax.scan` or a `fori_loop` with static bounds, or `harvest.jvp`"
            )
        if not all(hasattr(aval, "dtype") for aval in inner.marker.in_avals):
            raise UnsupportedError(
                f"`{what}`: {entry.describe()} is of a hi type, with respect to which harvest "
                "cannot differentiate; sow its components"
            )


def _check_plantable(
    select: Any, rows: Sequence["Row"], sown: Sequence["Row"], what: str = "plant"
) -> None:
    """Raise if of what `select` chooses anything, or any occurrence, cannot be replaced."""
    there = {site.key: site.source for _, _, site in sown}
    tags = collections.Counter(site.key for _, _, site in rows)
    marks = collections.Counter(site.key for _, _, site in sown)
    for _, _, site in sown:
        if marks[site.key] > tags[site.key] and matches(select, site, there):
            raise UnsupportedError(
                f"`{what}`: {site.key!r} (sown at {site.source}) can be collected but not changed: "
                f"it was traced before `{what}` saw it (it is in a jaxpr, in what `jax.vjp` or "
                "`jax.linearize` returned, or in a derivative rule that JAX keeps from an earlier "
                "call until `jax.clear_caches()`); use what it was made from"
            )


def _is_edit(plant: Any) -> bool:
    return isinstance(plant, Edit) or callable(plant)


Row = tuple[int, Entry, Site]


def _is_value(plant: Any, rows: Sequence[Row]) -> bool:
    """Whether a callable is what was sown: a module at a site of modules."""
    if isinstance(plant, Edit) or jax.tree_util.all_leaves([plant]):
        return False
    structure = jax.tree.structure(plant)
    return bool(rows) and all(e.marker.label.structure.treedef == structure for _, e, _ in rows)


def _occurrences(mine: Sequence[Row], rows: Sequence[Row], sown: Sequence[Row]) -> list[Entry]:
    """The occurrences that the chosen tags stand for.

    One for each; unless `jax.checkpoint` evaluates a site again in a backward pass, where it does
    not sow again: then there are more tags of a key than marks. (An inner `reap` has consumed its
    marks; the tags stand for themselves.)
    """
    tags = collections.Counter(site.key for _, _, site in rows)
    marks = collections.Counter(site.key for _, _, site in sown)
    repeated = {key for key, count in marks.items() if tags[key] > count}
    chosen = {site.key for _, _, site in mine}
    return [
        *(entry for _, entry, site in mine if site.key not in repeated),
        *(entry for _, entry, site in sown if site.key in repeated & chosen),
    ]


def _edits(
    plant: Any, rows: Sequence[Row], occurrences: Sequence[Entry], mode: Mode
) -> list[Edit | None]:
    """The edit for each of the sites that one item of `plants` reaches."""
    if mode == "strict":
        _check_unique(occurrences, "plant")
    if _is_edit(plant):
        return [prepared(as_edit(plant), entry) for _, entry, _ in rows]
    if mode == "strict":
        return [prepared(Replace(plant), entry, mode) for _, entry, _ in rows]
    return _appended(plant, rows, occurrences)


def _appended(plant: Any, rows: Sequence[Row], occurrences: Sequence[Entry]) -> list[Edit | None]:
    """One item of a tuple for each occurrence; None leaves an occurrence alone."""
    _, first, site = rows[0]
    if not isinstance(plant, tuple | list) or len(plant) != len(occurrences):
        got = f"{len(plant)} items" if isinstance(plant, tuple | list) else _types.describe(plant)
        raise PlantError(
            f'`plant(..., mode="append")` got {got} for {first.describe()}, which occurs '
            f"{len(occurrences)} times; wanted a tuple of that many, with None where an "
            "occurrence is to be left alone"
        )
    if len(rows) != len(occurrences):
        raise PlantError(
            f"{site.key!r} is sown {len(occurrences)} times, but evaluated {len(rows)} times "
            "(`jax.checkpoint` repeats it in the backward pass), so that the items of a tuple "
            "cannot be told apart; plant before differentiating: `jax.grad(plant(f, ...))`"
        )
    return [
        None if item is None else prepared(as_edit(item), entry, "append")
        for item, (_, entry, _) in zip(plant, rows, strict=True)
    ]


def _check_open(entry: Entry, what: str) -> None:
    if entry.blocked is None:
        return
    hint = {
        PREDICATE: "sow it in the body of the loop",
        BATCHED_WHILE: "which lanes run cannot be told apart from the other axes of its value; put "
        f"`{what}` inside: `jax.vmap({what}(f))`",
    }.get(
        entry.blocked,
        "which cannot be opened: sow its inputs or outputs instead, or leave the site out by "
        "`select`",
    )
    inside = entry.blocked if " " in entry.blocked else f"`{entry.blocked}`"
    raise UnsupportedError(f"`{what}`: {entry.describe()} is inside {inside}, {hint}")


def _check_stackable(reading: Reading, entry: Entry, what: str) -> None:
    dynamic = any(None in loops for _, loops in entry.innermost())
    if dynamic and not all(isinstance(part, Folded) for part in reading.parts):
        raise UnsupportedError(
            f"`{what}`: {entry.describe()} is inside a `while_loop`, whose trip count is not "
            "known, so that its values have no stack: combine them by a fold, as in "
            f"`{what}(f, {{{entry.key!r}: harvest.folds.last()}})`; there are `at`, `count`, "
            "`histogram`, `last`, `maximum`, `mean`, `moments`, `stack`, `top_k` and your own "
            "`harvest.Fold`"
        )


def _check_unique(entries: Sequence[Entry], what: str) -> None:
    by_key: dict[str, list[str]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry.source)
    for key, sources in by_key.items():
        if len(sources) > 1:
            lines = "".join(f"\n    {source}" for source in sources[:10])
            more = f"\n    and {len(sources) - 10} more" if len(sources) > 10 else ""
            raise DuplicateSiteError(
                f"`{what}`: {key!r} is sown {len(sources)} times:{lines}{more}\n"
                "tell them apart with `harvest.scope`, or treat them in call order with "
                'mode="append"'
            )


def _phantoms(entries: Sequence[Entry], what: str) -> Iterator[str]:
    """Warnings about sites that look as if they ran."""
    keys = {entry.key: entry for entry in entries if entry.marker.selected}
    for key, entry in keys.items():
        yield (
            f"{key!r} (sown at {entry.source}) is in a branch of a `cond` whose predicate `vmap` "
            "batched: JAX then evaluates all branches for all examples, so that it looks as if "
            f"each had run; put `{what}` inside: `jax.vmap({what}(f))`"
        )


def _fruitless(entries: Sequence[Entry], doing: str = "planting") -> Iterator[str]:
    """Warnings about keys whose values nothing uses."""
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    for key, group in by_key.items():
        if not any(entry.feeds for entry in group):
            name = group[0].marker.label.name
            yield (
                f"{doing} {key!r} changes nothing: the result of the `sow` at "
                f"{group[0].source} is not used; write `h = sow(h, name={name!r})`"
            )
