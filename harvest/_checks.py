"""What a transform checks of the sites that it is about, and what it warns of."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from . import _compat
from ._entry import BATCHED_WHILE, PREDICATE, UNEVEN_WHILE, UNSTACKED, Entry
from ._errors import DuplicateSiteError, SelectError, UnsupportedError
from ._reading import Folded, Reading
from ._select import matches
from ._site import Site, site_of

Row = tuple[int, Entry, Site]  # with its position among the entries of the program


def numbered(entries: Sequence[Entry], readable: bool) -> Iterator[Row]:
    """The entries that can be read (or planted): position, entry and site, in call order."""
    seen: collections.Counter[str] = collections.Counter()
    first = {id(entry.prim) for entry in entries if not entry.again}
    for position, entry in enumerate(entries):
        # Where `jax.checkpoint` evaluates a `HiPrim` again, it does not sow again.
        repeats = entry.again and entry.prim is not None and id(entry.prim) in first
        if not (readable and repeats) and (entry.readable if readable else entry.plantable):
            yield position, entry, site_of(entry, seen[entry.key])
            seen[entry.key] += 1


def check_mode(mode: str) -> None:
    if mode not in ("strict", "append"):
        raise SelectError(f"`mode` got {mode!r}; wanted 'strict' or 'append'")


def check_open(entry: Entry, what: str) -> None:
    if entry.blocked is None:
        return
    hint = {
        PREDICATE: "sow it in the body of the loop",
        BATCHED_WHILE: "which lanes run cannot be told apart from the other axes of its value; "
        + _inside_vmap(what),
        UNEVEN_WHILE: "where JAX takes a part of what it carries for alike in all shards: let that "
        "differ from the beginning, by `jax.lax.pcast(..., to='varying')`, or "
        + _inside_vmap(what),
        UNSTACKED: "which lacks the methods `inc_rank` or `leading_axis_spec`: write them, sow its "
        "components, or leave the site out by `select`",
    }.get(
        entry.blocked,
        "which cannot be opened: sow its inputs or outputs instead, or leave the site out by "
        "`select`",
    )
    inside = entry.blocked if " " in entry.blocked else f"`{entry.blocked}`"
    raise UnsupportedError(f"`{what}`: {entry.describe()} is inside {inside}, {hint}")


def _inside_vmap(what: str) -> str:
    if what == "debug.nonfinite":  # which reports on values, and is the outermost
        return "run it on one example at a time"
    return f"put `{what}` inside: `jax.vmap({what}(f))`"


def check_stackable(reading: Reading, entry: Entry, what: str) -> None:
    dynamic = any(None in loops for _, loops in entry.innermost())
    if dynamic and not all(isinstance(part, Folded) for part in reading.parts):
        before = "f, tangents" if what == "jvp" else "f"
        raise UnsupportedError(
            f"`{what}`: {entry.describe()} is inside a `while_loop`, whose trip count is not "
            "known, so that its values have no stack: combine them by a fold, as in "
            f"`{what}({before}, {{{entry.key!r}: harvest.folds.last()}})`; there are `at`, "
            "`count`, `histogram`, `last`, `maximum`, `mean`, `moments`, `stack`, `top_k` and your "
            "own `harvest.Fold`"
        )


def check_unique(entries: Sequence[Entry], what: str) -> None:
    """Raise if any key is sown more than once."""
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    for key, group in by_key.items():
        sources = [entry.source for entry in group]
        if len(sources) > 1:
            lines = "".join(
                f"\n    {source}" + (f" ({count} times)" if count > 1 else "")
                for source, count in list(collections.Counter(sources).items())[:10]
            )
            others = len(set(sources)) - 10
            more = f"\n    and {others} more lines" if others > 0 else ""
            in_order = ', or treat them in call order with mode="append"'
            hint = "" if what in ("sweep", "attribute") else in_order  # which have no modes
            advice = f"tell them apart with `harvest.scope`{hint}"
            if any(entry.marker.selected for entry in group):
                advice = (
                    "they are in branches of a `cond` whose predicate `vmap` batched, so that all "
                    f"of them run: {_inside_vmap(what)}"
                )
            raise DuplicateSiteError(
                f"`{what}`: {key!r} is sown {len(sources)} times:{lines}{more}\n{advice}"
            )


def check_plantable(
    select: Any, rows: Sequence[Row], sown: Sequence[Row], what: str = "plant"
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


def occurrences(mine: Sequence[Row], rows: Sequence[Row], sown: Sequence[Row]) -> list[Entry]:
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


def check_differentiable(entry: Entry, what: str) -> None:
    for inner, loops in entry.innermost():
        if None in loops:
            backward = "" if what == "sweep" else ", and which has no backward pass"
            raise UnsupportedError(
                f"`{what}`: {entry.describe()} is inside a `while_loop`, whose iterations are not "
                f"known beforehand{backward}; use `lax.scan` or a `fori_loop` with static bounds"
            )
        if what == "attribute" and any(map(_compat.is_hi_type, inner.marker.in_avals)):
            raise UnsupportedError(
                f"`attribute`: {entry.describe()} is of a hi type, values of which have no "
                "difference; use `sweep`, or sow its components"
            )


def phantoms(entries: Sequence[Entry], what: str) -> Iterator[str]:
    """Warnings about sites that look as if they ran."""
    keys = {entry.key: entry for entry in entries if entry.marker.selected}
    for key, entry in keys.items():
        yield (
            f"{key!r} (sown at {entry.source}) is in a branch of a `cond` whose predicate `vmap` "
            "batched: JAX then evaluates all branches for all examples, so that it looks as if "
            f"each had run; {_inside_vmap(what)}"
        )


def fruitless(entries: Sequence[Entry], doing: str = "planting") -> Iterator[str]:
    """Warnings about keys whose values nothing uses."""
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.key, []).append(entry)
    for key, group in by_key.items():
        if not any(entry.feeds for entry in group):
            label = group[0].marker.label
            yield f"{doing} {key!r} changes nothing: " + (
                f"the result of the `sow` at {label.source} is not used; write "
                f"`h = sow(h, name={label.name!r})`"
                if label.number is None
                else f"nothing uses the result of the equation at {group[0].source}"
            )
