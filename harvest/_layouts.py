"""How what is read, and the arrays of edits, pass the boundary of a `shard_map`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from . import _compat, _types
from ._batching import levels
from ._edit_nodes import Add, Branches, Call, Each, Edit, Indexed, Replace, Scale, Sourced
from ._entry import CondSum, Entry
from ._errors import PlantError, UnsupportedError
from ._fit import known
from ._interpreter import Actions
from ._probe import Probe
from ._reading import Folded, Mapped, Part, Reading
from ._shards import WHOLE, Layout, Shards
from ._structure import HOLE, Structure, is_array


def of_reads(
    actions: Actions, entries: Sequence[Entry], shards: Shards, depth: int
) -> list[list[Any]]:
    """For each part of each reading, a tree like what it reads, of a `Layout` for each array.

    `entries` are as seen inside the `shard_map`, `depth` is how many loops are around it.
    """
    pairs = zip(actions, entries, strict=True)
    return [
        [_of_read(part, entry, shards, depth) for part in action.parts]
        for action, entry in pairs
        if isinstance(action, Reading)
    ]


def of_actions(actions: Actions, entries: Sequence[Entry], shards: Shards, depth: int) -> Any:
    """A tree like `actions`, of a `Layout` for each array."""
    return [
        _of_reading(action, shards, depth)
        if isinstance(action, Reading)
        else action and _Edits(entry, shards).of(action)
        for action, entry in zip(actions, entries, strict=True)
    ]


# ------------------------------------------------------------------------ what is read


def _of_read(part: Part, entry: Entry, shards: Shards, depth: int) -> Any:
    if isinstance(part, Folded):
        return part.layouts(shards, depth)
    if not isinstance(part, Mapped):
        return entry.layouts(shards)
    return _of_mapped(entry, shards.within(lambda part: part.type_of(entry), part), shards, 0)


def _of_mapped(entry: Entry, type: Any, shards: Shards, outer: int) -> Any:
    loops = outer + len(known(entry.loops))
    if entry.sums and not entry.summed:
        inside = next(filter(None, entry.branches or ()))
        return _of_mapped(inside, type, shards, outer + len(known(entry.around)))
    if entry.summed:
        rows = zip(entry.branches or (), type.branches, strict=True)
        branches = tuple(b and _of_mapped(b, t, shards, loops) for b, t in rows)
        return CondSum(shards.stacking(type.index, len(type.index.shape)), branches)
    inner, _ = next(entry.innermost())
    front = loops + len(levels(inner.marker.positions))
    return jax.tree.map(lambda aval: shards.stacking(aval, front), type)


def _of_reading(reading: Reading, shards: Shards, depth: int) -> Reading:
    def of(part: Part) -> Any:
        layouts = _all_whole(part)
        if not isinstance(part, Folded):
            return layouts
        return dataclasses.replace(layouts, slot=part.layouts(shards, depth))

    return Reading(tuple(map(of, reading.parts)), reading.single)


def _all_whole(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: WHOLE if is_array(leaf) else None, tree)


# ------------------------------------------------------------------------------- edits


def spelled_out(edit: Any, entry: Entry) -> Any:
    """The edit, with one for each branch, and with one operand for each leaf."""
    if isinstance(edit, Branches) or entry.sums:
        branches = entry.branches or ()
        edits = edit.edits if isinstance(edit, Branches) else (edit,) * len(branches)
        pairs = zip(edits, branches, strict=True)
        return Branches(tuple(spelled_out(e, b) if b else e for e, b in pairs))
    structure = entry.marker.label.structure

    def spelled(node: Any) -> Any:
        match node:
            case Add():
                return Add(_for_each_leaf(node.value, structure))
            case Scale():
                return Scale(_for_each_leaf(node.factor, structure))
            case Each():
                return Each(spelled_out(node.edit, entry))
            case _:
                return node

    return jax.tree.map(spelled, edit, is_leaf=lambda node: isinstance(node, _SEEN))


def _for_each_leaf(operand: Any, structure: Structure) -> Any:
    single = jax.tree_util.all_leaves([operand])
    same = jax.tree.structure(operand) == structure.treedef
    return (
        jax.tree.unflatten(structure.treedef, [operand] * len(structure.statics))
        if (single and not same)
        else operand
    )


# Nodes in which arrays are more than what every shard has all of.
_SEEN = Branches | Each | Replace | Add | Scale | Probe | Call | Indexed


@dataclasses.dataclass(frozen=True)
class _Edits:
    """The layouts of an edit of one entry, as seen inside the `shard_map`."""

    entry: Entry
    shards: Shards
    loops: int = 0  # how many axes `Each` has put in front of the arrays

    def of(self, edit: Any) -> Any:
        """A tree like an edit, or a part of one."""
        is_seen = lambda node: isinstance(node, _SEEN)
        return jax.tree.map(
            lambda node: self._seen(node) if is_seen(node) else _all_whole(node),
            edit,
            is_leaf=is_seen,
        )

    def _seen(self, edit: Edit) -> Any:
        match edit:
            case Branches():
                pairs = zip(edit.edits, self.entry.branches or (), strict=True)
                of = lambda e, b: dataclasses.replace(self, entry=b).of(e) if b else _all_whole(e)
                return Branches(tuple(of(e, b) for e, b in pairs))
            case Each():
                _, loops = next(self.entry.innermost())
                return Each(dataclasses.replace(self, loops=len(known(loops))).of(edit.edit))
            case Replace():
                return Replace(self._leafwise(edit.value, self._value))
            case Probe():
                is_each = isinstance(edit.eps, Each)
                eps = edit.eps.edit if is_each else edit.eps
                layouts = [self._tangent(*pair) for pair in zip(eps, self._leaves, strict=True)]
                return Probe(Each(layouts) if is_each else layouts)
            case Add():
                return Add(self._leafwise(edit.value, self._operand))
            case Scale():
                return Scale(self._leafwise(edit.factor, self._operand))
            case Sourced():
                source = tuple(self._leafwise(value, self._value) for value in edit.source)
                leaves, treedef = jax.tree.flatten(edit, is_leaf=lambda n: n is edit.source)
                rows = [source if x is edit.source else _all_whole(x) for x in leaves]
                return jax.tree.unflatten(treedef, rows)
            case _:
                return _all_whole(edit)  # its function sees one shard

    @property
    def _leaves(self) -> list["_Leaf"]:
        rows = zip(self.entry.type, self.entry.own, self.entry.layouts(self.shards), strict=True)
        return [_Leaf(*row) for row in rows]

    def _leafwise(self, value: Any, of: Callable[[Any, "_Leaf"], Any]) -> Any:
        structure = self.entry.marker.label.structure
        leaves, treedef = jax.tree.flatten(value)
        if treedef != structure.treedef:
            return _all_whole(value)  # which is an error when it is applied
        mine = iter(self._leaves)
        pairs = zip(leaves, structure.statics, strict=True)
        layouts = [of(leaf, next(mine)) if static is HOLE else None for leaf, static in pairs]
        return jax.tree.unflatten(treedef, layouts)

    def _value(self, value: Any, leaf: "_Leaf") -> Layout | None:
        if _compat.is_hi_type(leaf.type):
            return leaf.layout  # that it is of this type has been checked
        if not is_array(value):
            return None
        whole = self.shards.outside(leaf.type, leaf.layout)
        own = leaf.own + (leaf.layout.axis is not None)
        if value.shape[value.ndim - own :] != whole.shape[len(whole.shape) - own :]:
            raise PlantError(
                f"got {_types.describe(value)} for {self.entry.describe()}, wanted the global "
                f"value, of type {_types.describe(whole)}"
            )
        return leaf.layout.aligned(value.ndim)

    def _tangent(self, eps: Any, leaf: "_Leaf") -> Any:
        if eps is None or not _compat.is_hi_type(leaf.type):
            return self._value(eps, leaf)
        if not is_array(eps) or _compat.is_hi(eps):
            raise UnsupportedError(
                f"{self.entry.describe()} is inside a `shard_map`, of the hi type {leaf.type}, "
                "whose tangents are of a hi type too: differentiate with respect to its arrays"
            )
        return Layout(leaf.layout.spec.to_tangent_spec())

    def _operand(self, operand: Any, leaf: "_Leaf") -> Layout | None:
        """That of what broadcasts against the global value."""
        if not is_array(operand):
            return None
        if _compat.is_hi_type(leaf.type):
            return leaf.layout if _compat.is_hi(operand) else WHOLE
        whole = self.shards.outside(leaf.type, leaf.layout)
        stacked = leaf.layout.axis is not None
        own = leaf.own + stacked
        count = min(operand.ndim - self.loops, own)
        rows = zip(
            operand.shape[operand.ndim - count :],
            whole.shape[len(whole.shape) - count :],
            tuple(leaf.layout.spec)[len(whole.shape) - count :],
            strict=True,
        )
        split = []
        for got, wanted, entry in rows:
            if got not in (1, wanted):
                raise PlantError(
                    f"got an operand of type {_types.describe(operand)} for "
                    f"{self.entry.describe()}, which does not broadcast to the global value, of "
                    f"type {_types.describe(whole)}"
                )
            split.append(None if got == 1 else entry)
        layout = Layout(PartitionSpec(*split)).aligned(operand.ndim)
        meets = stacked and count == own
        return dataclasses.replace(layout, axis=operand.ndim - own if meets else None)


class _Leaf(NamedTuple):
    """One leaf of the value."""

    type: Any  # inside
    own: int  # how many axes it has of its own, inside
    layout: Layout
