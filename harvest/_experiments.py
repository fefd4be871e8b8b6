"""What `sweep` and `attribute` have in common: sites, edits and sources, and their experiments."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat, _types
from ._batching import Positions, batch_sizes
from ._edit_nodes import At, Call, Each, Edit, Sourced
from ._edits import as_edit
from ._entry import Entry
from ._errors import PlantError, SelectError, UnsupportedError
from ._fit import known
from ._fork import Cell, Index
from ._grid import NoGrid, PerExample, as_grid
from ._lowered import on_arrays
from ._plan import resolve_keys
from ._plan_probes import is_sum, plantable_rows
from ._select import check_found, check_select, is_static, matches
from ._site import Site
from ._stage import Transformed, trace_afresh
from ._structure import Structure, is_array


class Experiment(NamedTuple):
    """A site to edit."""

    position: int  # of its entry
    entry: Entry
    edit: Callable[[Index, Any], Edit]  # for an iteration, and the number of a row


class Experiments(Transformed):
    """What `sweep` and `attribute` are given."""

    _dynamic = ("fn", "source", "edits", "grid")
    _static = ("select", "edit_keys", "batch_size")
    _planted = (("select", "source"), ("edit_keys", "edits"))
    _what: str

    def __init__(self, fn: Callable[..., Any], source: Any, edit: Any, grid: Any, batch_size: int):
        super().__init__(fn, self._what)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise SelectError(f"`batch_size` got {batch_size!r}; wanted a positive int")
        has_values = isinstance(source, Mapping)
        if has_values and not all(isinstance(key, str) for key in source):
            raise SelectError(
                f"`source` got a dict with the keys {list(source)}; wanted the keys of sites, as "
                "`reap` returns them"
            )
        self.select = check_select(tuple(source) if has_values else source, "source")
        self.source = tuple(source.values()) if has_values else None
        edits = edit if isinstance(edit, Mapping) else {None: edit}
        self.edit_keys = tuple(check_select(key, "edit") for key in edits)
        self.edits = tuple(map(_checked_edit, edits.values()))
        self.grid = as_grid(grid)
        self.batch_size = batch_size

    def _resolved(self, args, kwargs, trace):
        if is_static((self.select, self.edit_keys)) or trace is trace_afresh:
            return self
        program = trace(self._what, self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        select, *keys = resolve_keys(entries, (self.select, *self.edit_keys), self._what)
        return self._with(select=select, edit_keys=tuple(keys))

    def _finish(self, value):
        return dict(value)

    def _experiments(self, entries: Sequence[Entry]) -> list[Experiment]:
        """The selected sites of a program, in call order."""
        rows = plantable_rows(entries, self.select, self._what)
        keys = {entry.key: entry.source for entry in entries}
        check_found(self.edit_keys, keys, "edit")
        return [
            Experiment(position, entry, self._edit(entry, site, keys))
            for position, entry, site in rows
        ]

    def _edit(
        self, entry: Entry, site: Site, keys: Mapping[str, str]
    ) -> Callable[[Index, Any], Edit]:
        if is_sum(entry) and not self._takes_sum(entry):
            raise UnsupportedError(
                f"`{self._what}`: {entry.describe()} is sown in some branches of a `cond` only, or "
                "with different types; sow it in every branch, or use `jax.lax.map` over "
                "`harvest.plant`"
            )
        matching = [
            edit
            for key, edit in zip(self.edit_keys, self.edits, strict=True)
            if matches(key, site, keys)
        ]
        if not matching:
            raise SelectError(f"`{self._what}`: nothing in `edit` matches {entry.describe()}")
        edit, source = matching[0], self._source_of(entry)
        if not isinstance(edit, Call):
            return lambda index, number: edit

        def edit_at(index: Index, number: Any) -> Edit:
            here = jax.tree.map(lambda leaf: _item(leaf, index) if is_array(leaf) else leaf, source)
            row = () if isinstance(self.grid, NoGrid) else (self.grid.row(number),)
            return Swept(edit.fn, here, row)

        return edit_at

    def _takes_sum(self, entry: Entry) -> bool:
        """Whether sites whose value is a `CondSum` can be edited."""
        return False

    def _source_of(self, entry: Entry) -> tuple[Any, ...]:
        if self.source is None:
            return ()
        if entry.key not in self.select:
            raise SelectError(
                f"`source` has the keys {list(self.select)}, and none for {entry.describe()}; "
                "wanted the keys of sites, as `reap` returns them"
            )
        value = self.source[self.select.index(entry.key)]
        sown = entry.marker.label.structure.treedef
        if isinstance(value, tuple) and list(map(jax.tree.structure, value)) == [sown]:
            raise PlantError(
                f"`source` got a tuple for {entry.describe()}, as `capture` returns the "
                "occurrences of a key; wanted its value, as from `reap`, or from "
                '`capture(..., mode="strict")`'
            )
        loops = known(entry.loops)
        for leaf in filter(is_array, jax.tree.leaves(value)):
            if _types.leading(leaf, len(loops)) != loops:
                raise PlantError(
                    f"`source` got {_types.describe(leaf)} for {entry.describe()}; wanted the axes "
                    f"{loops} of the loops around it in front, as `reap` returns it"
                )
        return (value,)


def _item(leaf: Any, index: Index) -> Any:
    # Numpy arrays take no traced index.
    return on_arrays(lambda x: jnp.asarray(x)[index], leaf)


def _checked_edit(edit: Any) -> Edit:
    if not callable(edit) and not isinstance(edit, Edit):
        raise PlantError(
            f"`edit` got {edit!r} of type `{type(edit).__name__}`; wanted a function of a value, "
            "its source and a row, an edit, or a mapping from selections to these"
        )
    for node in jax.tree.leaves(edit, is_leaf=lambda node: isinstance(node, At | Each)):
        if isinstance(node, At | Each):
            raise PlantError(
                f"`edit` got `harvest.{type(node).__name__.lower()}`, and each iteration is edited "
                "in a run of its own; pass what differs between them as `source`, with the loop "
                "axes in front"
            )
    return as_edit(edit)


class Swept(Sourced):
    """The user's edit, with what it needs of another run, and the row of an experiment."""

    row: tuple[Any, ...]  # nothing, or one row

    def apply(self, value, context):
        leaves, structure = Structure.flatten(self.source, is_array)
        values, sown = Structure.flatten((value,), is_array)
        alike = structure == sown  # so that its leaves have the axes of those of the value
        examples, shared = eqx.partition(self.row, _per_example(self.row))
        sizes, own = _batch_axes(values, context.positions)
        for leaf, wanted in zip(leaves, own if alike else [sizes] * len(leaves), strict=True):
            _check_batch(leaf, wanted, "`source`", "iteration")
        for leaf in jax.tree.leaves(examples):
            _check_batch(leaf, sizes, "`per_example`", "experiment")

        def edited(value: Any, leaves: list[Any], examples: Any) -> Any:
            row = jax.tree.map(
                lambda node: node.value if isinstance(node, PerExample) else node,
                eqx.combine(examples, shared),
                is_leaf=_is_per_example,
            )
            try:
                return self.fn(value, *structure.unflatten(leaves), *row)
            except Exception as error:
                error.add_note(f"harvest: here, an edit is called with {self._given()}")
                raise

        also = (context.positions,) if alike else ()
        return context.mapped(edited, also)(value, leaves, examples)

    def _given(self) -> str:
        """What the user's function gets."""
        given = ["the value"]
        given += ["the value of the source"] if self.source else ["no source"]
        if not self.row:
            given += ["no row (there is no grid)"]
        elif isinstance(self.row[0], dict):
            given += [f"a row, which is a dict with the keys {list(self.row[0])}"]
        else:
            given += ["a row of the grid"]
        return f"{given[0]}, {given[1]} and {given[2]}"


def _batch_axes(
    leaves: Sequence[Any], positions: Positions
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The sizes of the axes that `vmap` gives to a value, and of those in front of each leaf."""
    fronted = []
    for axes in positions:
        numbers = itertools.count()
        fronted.append(tuple(next(numbers) if isinstance(a, int) else a for a in axes))
    pairs = zip(leaves, fronted, strict=True)
    own = [_types.leading(leaf, len(axes) - axes.count(None)) for leaf, axes in pairs]
    return batch_sizes(leaves, fronted), own


def _check_batch(leaf: Any, sizes: tuple[int, ...], what: str, once: str) -> None:
    if _types.leading(leaf, len(sizes)) != sizes:
        raise PlantError(
            f"{what} got {_types.describe(leaf)} for one {once}; wanted the axes {sizes} that "
            "`vmap` gives to the site in front"
        )


def _is_per_example(node: Any) -> bool:
    return isinstance(node, PerExample)


def _per_example(row: Any) -> Any:
    """Which leaves of a row are those of one example."""

    def spec(node: Any) -> Any:
        return jax.tree.map(lambda _: _is_per_example(node), node)

    return jax.tree.map(spec, row, is_leaf=_is_per_example)


class Cells(NamedTuple):
    """Runs the experiments of a grid, in chunks, in every iteration of the loops around a site."""

    shape: tuple[int, ...]  # of the grid
    batch_size: int
    tick: Callable[[int], None]

    def __call__(self, lengths: Sequence[int], cell: Cell) -> Any:
        if not lengths:
            return self._experiments(cell, ())
        indices = jnp.asarray(np.indices(lengths).reshape(len(lengths), -1))
        results = _map(lambda index: self._experiments(cell, index), tuple(indices))
        return jax.tree.map(lambda x: x.reshape(*lengths, *x.shape[1:]), results)

    def _experiments(self, cell: Cell, index: Index) -> Any:
        size = math.prod(self.shape)
        chunks = -(-size // self.batch_size)
        count = -(-size // max(chunks, 1))  # chunks of one size; the last row may be repeated

        def chunk(number: Any) -> Any:
            rows = jnp.minimum(number * count + jnp.arange(count), size - 1)
            if count == 1:  # so that a `cond` stays one, and what has no batching rule runs
                results = jax.tree.map(lambda x: jnp.asarray(x)[None], cell(index, rows[0]))
            else:
                results = jax.vmap(lambda row: cell(index, row))(rows)
            self.tick(count)
            return results

        results = _map(chunk, jnp.arange(chunks))

        def flat(x: Any) -> Any:
            rows = x.reshape(chunks * count, *x.shape[2:])[:size]
            return rows.reshape(*self.shape, *x.shape[2:])

        return jax.tree.map(flat, results)


def _map(fn: Callable[[Any], Any], xs: Any) -> Any:
    """`lax.map`; but a loop where JAX looks for NaNs, which then names the operation."""
    count = len(jax.tree.leaves(xs)[0])
    if not count or not _compat.checks_operations():
        return lax.map(fn, xs)
    item = lambda i: fn(jax.tree.map(lambda x: x[i], xs))
    return jax.tree.map(lambda *rows: jnp.stack(rows), *map(item, range(count)))
