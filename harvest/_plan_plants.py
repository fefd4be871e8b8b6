"""Which sites are planted, and by which edits."""

from collections.abc import Sequence
from typing import Any

import jax

from . import _types
from ._checks import (
    Row,
    check_open,
    check_plantable,
    check_unique,
    fruitless,
    numbered,
    occurrences,
)
from ._edit_nodes import Edit, Replace
from ._edits import as_edit
from ._entry import Entry
from ._errors import PlantError
from ._fit import Mode, prepared
from ._fold import Fold
from ._plan import Plan
from ._select import check_chosen, check_found, matches


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
        check_plantable(select, rows, sown, what)
        check_found(select, keys, argument)
        if not _is_edit(plant) and not (isinstance(select, str) and select in keys):
            raise PlantError(
                f"`{argument}` got a value for {select!r}; wanted an edit or a callable, since "
                "only a key stands for a single site"
            )
        if isinstance(plant, Fold):
            raise PlantError(
                f"`{argument}` got a fold for {select!r}; wanted a value or an edit: folds are for "
                "the `select` of `reap` and `capture`"
            )
        mine = [row for row in rows if matches(select, row[2], keys)]
        check_chosen(select, mine, keys, argument)
        if _is_value(plant, mine):
            plant = Replace(plant)
        for position, entry, _ in mine:
            check_open(entry, what)
            if position in chosen:
                raise PlantError(
                    f"`{argument}`: both {chosen[position][0]!r} and {select!r} reach "
                    f"{entry.describe()}; put them into one edit with `harvest.chain`"
                )
        edits = _edits(plant, mine, occurrences(mine, rows, sown), mode, what)
        for (position, _, _), edit in zip(mine, edits, strict=True):
            chosen[position] = (select, edit)
    planted = [(p, edit) for p, (_, edit) in sorted(chosen.items()) if edit is not None]
    actions: list[Edit | None] = [None] * len(entries)
    for position, edit in planted:
        actions[position] = edit
    return Plan(tuple(actions), warnings=tuple(fruitless([entries[p] for p, _ in planted])))


def _edits(
    plant: Any, rows: Sequence[Row], stood_for: Sequence[Entry], mode: Mode, what: str
) -> list[Edit | None]:
    """The edit for each of the sites that one item of `plants` reaches."""
    if mode == "strict":
        check_unique(stood_for, what)
    if _is_edit(plant):
        return [prepared(as_edit(plant), entry) for _, entry, _ in rows]
    if mode == "strict":
        _check_alike(rows)
        return [prepared(Replace(plant), entry, mode) for _, entry, _ in rows]
    return _appended(plant, rows, stood_for, what)


def _check_alike(rows: Sequence[Row]) -> None:
    """Raise where no value could stand for all evaluations of a site."""
    specs = list(dict.fromkeys(site.spec for _, _, site in rows))
    if len(specs) > 1:
        _, first, site = rows[0]
        raise PlantError(
            f"{first.describe()} is evaluated {len(rows)} times (`jax.checkpoint` repeats it in "
            f"the backward pass), as {' and '.join(specs)}: differentiating has moved it out of "
            "one of the loops, so that no value fits both; plant before differentiating: "
            "`jax.grad(plant(f, ...))`, or plant a function"
        )


def _appended(
    plant: Any, rows: Sequence[Row], stood_for: Sequence[Entry], what: str
) -> list[Edit | None]:
    """One item of a tuple for each occurrence; None leaves an occurrence alone."""
    _, first, site = rows[0]
    if not isinstance(plant, tuple | list) or len(plant) != len(stood_for):
        got = f"{len(plant)} items" if isinstance(plant, tuple | list) else _types.describe(plant)
        raise PlantError(
            f'`{what}(..., mode="append")` got {got} for {first.describe()}, which occurs '
            f"{len(stood_for)} times; wanted a tuple of that many, with None where an "
            "occurrence is to be left alone"
        )
    if len(rows) != len(stood_for):
        raise PlantError(
            f"{site.key!r} is sown {len(stood_for)} times, but evaluated {len(rows)} times "
            "(`jax.checkpoint` repeats it in the backward pass), so that the items of a tuple "
            "cannot be told apart; plant before differentiating: `jax.grad(plant(f, ...))`"
        )
    return [
        None if item is None else prepared(as_edit(item), entry, "append")
        for item, (_, entry, _) in zip(plant, rows, strict=True)
    ]


def _is_edit(plant: Any) -> bool:
    return isinstance(plant, Edit) or callable(plant)


def _is_value(plant: Any, rows: Sequence[Row]) -> bool:
    """Whether a callable is what was sown: a module at a site of modules."""
    if isinstance(plant, Edit) or jax.tree_util.all_leaves([plant]):
        return False
    structure = jax.tree.structure(plant)
    return bool(rows) and all(e.marker.label.structure.treedef == structure for _, e, _ in rows)
