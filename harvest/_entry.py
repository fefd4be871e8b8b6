"""A site as seen from the program around it, before anything runs."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax

from . import _compat, _types
from ._batching import batch_sizes
from ._compat import UserScope
from ._markers import Mark, Tag
from ._numbers import key_of
from ._shards import Layout, Shards
from ._types import Dim

# Places in a `while_loop` that cannot be opened.
PREDICATE = "the predicate of a `while_loop`"
BATCHED_WHILE = "a `while_loop` whose predicate `vmap` batched"
UNEVEN_WHILE = "a `while_loop` that `vmap` batched, and that runs unevenly in a `shard_map`"

# A loop that does not know how to stack values of a hi type.
UNSTACKED = "a loop that cannot stack its hi type"


class CondSum(eqx.Module):
    """What was collected in a `cond` or `switch` whose branches sow different things.

    Where all branches sow a key with the same type, the value of the branch that ran is
    collected, and there is no `CondSum`. As the `CondSum` of JAX's backward-pass logs.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.cond(x > 0, lambda x: harvest.sow(2 * x, name="h"), lambda x: x, x)

        h = harvest.reap(f)(3.0)["h"]
        assert h.index == 1 and h.branches[1] == 6.0
        assert h.branches[0] is None  # `false_fun`, the first branch, sows no "h"
        ```

    **Arguments:**

    - `index`: which branch ran, an integer array. In a loop it has the loop axes.
    - `branches`: one item for each branch: the value if that branch ran, zeros if another did,
        `None` if the branch has no such site. For `jax.lax.cond`, `false_fun` comes first.
    """

    index: Any
    branches: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A site as seen from some jaxpr around it.

    !!! Example

        ```python
        import harvest.internal as hi

        def entries(self, eqn, walk) -> list[hi.Entry]:  # of a rule, for a loop of ten iterations
            return [entry.looped(10) for entry in walk.entries(eqn.params["jaxpr"])]
        ```

    A `Mark` is an entry that can be read, a `Tag` one that can be planted. `type` is that of what
    is read there: one aval for each leaf, with loop axes, then batch axes, then the leaf's own; a
    `CondSum` of such lists if `summed`.
    """

    marker: Mark | Tag
    scope: tuple[UserScope, ...]
    type: Any
    own: tuple[int, ...]  # how many axes, the last ones, each leaf has of its own
    loops: tuple[int | None, ...] = ()  # their lengths, outermost first; None if not known
    branches: "tuple[Entry | None, ...] | None" = None  # of the `cond` around it
    summed: bool = False  # those branches differ
    blocked: str | None = None  # the primitive around it that cannot be opened
    feeds: bool = True  # something besides marks uses the result of this `Tag`
    lanes: tuple[Dim, ...] = ()  # batch axes that it only has because it does not run in all lanes
    # The `shard_map`s around it, outermost first, each with its layouts: a tree like `type`.
    crossed: tuple[tuple[Shards, Any], ...] = ()
    # Mesh axes along which it may differ though its type does not say so: not all shards run it.
    uneven: frozenset[str] = frozenset()
    prim: Any = None  # the `HiPrim` of a user's in whose expansion it is, the outermost
    called_at: str = ""  # the user's line for an equation of JAX's own, in a function of JAX's
    again: bool = False  # in what `jax.checkpoint` evaluates again in a backward pass

    @staticmethod
    def of(marker: Mark | Tag, scope: tuple[UserScope, ...], feeds: bool) -> "Entry":
        pairs = list(zip(marker.in_avals, marker.positions, strict=True))
        own = tuple(_types.rank(_types.unbatched(*pair)) for pair in pairs)
        return Entry(marker, scope, [_types.moved(*pair) for pair in pairs], own, feeds=feeds)

    @property
    def key(self) -> str:
        label = self.marker.label
        return key_of(self.scope, label.name, label.number)

    @property
    def source(self) -> str:
        """The user's file and line."""
        return self.marker.label.source or self.called_at

    @property
    def shards(self) -> tuple[Shards, ...]:
        """The `shard_map`s around it, outermost first."""
        return tuple(shards for shards, _ in self.crossed)

    @property
    def readable(self) -> bool:
        return isinstance(self.marker, Mark)

    @property
    def plantable(self) -> bool:
        # A value without arrays has no `Tag`: nothing in it can change, which is checked.
        return isinstance(self.marker, Tag) or not self.marker.in_avals

    @property
    def sums(self) -> bool:
        """Whether a `CondSum` is read: that of the `cond` around it, or of one in each branch."""
        return isinstance(self.type, CondSum)

    @property
    def around(self) -> tuple[int | None, ...]:
        """Of `loops`, those around the `cond`; the branches know those inside it."""
        if self.summed or self.branches is None:
            return self.loops
        inner = next(len(b.loops) for b in self.branches if b is not None)
        return self.loops[: len(self.loops) - inner]

    def describe(self) -> str:
        return f"the site {self.key!r} (sown at {self.source})"

    def scoped(self, scope: tuple[UserScope, ...]) -> "Entry":
        """As seen from outside a scope."""
        if not scope:
            return self
        return dataclasses.replace(self, scope=_compat.joined_scopes(scope, self.scope))

    def looped(self, length: int | None) -> "Entry":
        """As seen from outside a loop that stacks what is read in its body.

        A loop whose length is not known (None) cannot: what is read there has to be folded.
        """
        type, blocked = self.type, self.blocked
        if length is not None:
            try:
                type = jax.tree.map(lambda aval: _types.stacked(aval, length), type)
            except NotImplementedError:  # by the user's `HiType`
                blocked = blocked or UNSTACKED
        return dataclasses.replace(self, type=type, blocked=blocked, loops=(length, *self.loops))

    def in_lanes(self, lanes: tuple[Dim, ...], varies: bool) -> "Entry":
        """As seen from outside a `while_loop` whose predicate `vmap` has batched.

        `varies`: whether the value depends on what the loop carries, which has these axes.
        """
        if self.branches is not None:
            inside = tuple(b and b.in_lanes(lanes, varies) for b in self.branches)
            blocked = next((b.blocked for b in inside if b is not None and b.blocked), None)
            return dataclasses.replace(self, branches=inside, blocked=blocked)
        batch = batch_sizes(self.marker.in_avals, self.marker.positions)
        if not batch and not self.lanes:
            return dataclasses.replace(self, lanes=lanes)
        # Otherwise the axes of the lanes cannot be told from those of another `vmap`.
        known = varies and len(batch) == len(lanes)
        return self if known or not self.readable else self.block(BATCHED_WHILE)

    def sharded(self, shards: Shards) -> "Entry":
        """As seen from outside a `shard_map`."""
        if obstacle := self._obstacle(shards):
            return self.block(obstacle)
        layouts = self.layouts(shards)
        branches = self.branches and tuple(b and b.sharded(shards) for b in self.branches)
        outside = dataclasses.replace(
            self,
            type=jax.tree.map(shards.outside, self.type, layouts),
            own=self.own if self.sums else tuple(map(_own_outside, self.own, layouts)),
            branches=branches,
            crossed=((shards, layouts), *self.crossed),
        )
        return outside.running_unevenly(shards.unchecked)

    def _obstacle(self, shards: Shards) -> str | None:
        for inner, loops in self.innermost():
            marker = inner.marker
            if split := sorted(marker.split & {*shards.axes}):
                return f"a `shard_map` under a `vmap` with `spmd_axis_name` {split}"
            specs = marker.label.spec or (None,) * len(marker.in_avals)
            for aval, spec in zip(marker.in_avals, specs, strict=True):
                alone = not loops and not any(map(any, marker.positions))
                if obstacle := shards.obstacle(aval, spec, alone):
                    return obstacle
        return None

    def layouts(self, shards: Shards, type: Any = None) -> Any:
        """How the shards of what is read here make up what is seen outside: a tree like `type`."""
        type = self.type if type is None else type
        branches = self.branches or ()
        if self.summed:
            index = shards.stacking(type.index, len(type.index.shape))
            rows = zip(branches, type.branches, strict=True)
            return CondSum(index, tuple(b and b.layouts(shards, t) for b, t in rows))
        if self.sums:
            return next(filter(None, branches)).layouts(shards, type)
        specs = self.marker.label.spec or (None,) * len(type)
        return [shards.layout(*leaf) for leaf in zip(type, self.own, specs, strict=True)]

    def running_unevenly(self, axes: frozenset[str]) -> "Entry":
        """As seen from outside a structure that not all shards along mesh axes run alike."""
        if not axes:
            return self
        branches = self.branches and tuple(b and b.running_unevenly(axes) for b in self.branches)
        type = jax.tree.map(lambda aval: _types.with_varying(aval, axes), self.type)
        uneven = self.uneven | axes
        return dataclasses.replace(self, type=type, branches=branches, uneven=uneven)

    def block(self, primitive: str) -> "Entry":
        """As seen from outside a primitive that cannot be opened."""
        return dataclasses.replace(self, blocked=self.blocked or primitive)

    def innermost(
        self, outer: tuple[int | None, ...] = ()
    ) -> "Iterator[tuple[Entry, tuple[int | None, ...]]]":
        """The entries inside all branches, each with all the loops around it."""
        if self.branches is None:
            yield self, (*outer, *self.loops)
            return
        for branch in self.branches:
            if branch is not None:
                yield from branch.innermost((*outer, *self.around))


def _own_outside(own: int, layout: Layout) -> int:
    return own + (layout.axis is not None)


def united_rows(branches: Sequence[Sequence[Entry]]) -> list[list[int | None]]:
    """A row for each site of a `cond`, in call order: its position in each of the branches.

    The i-th sites of one key in the branches are one site.
    """
    rows: dict[tuple, list[int | None]] = {}
    for number, entries in enumerate(branches):
        seen: dict[tuple, int] = {}
        for position, entry in enumerate(entries):
            key = (entry.readable, entry.key)
            seen[key] = seen.get(key, 0) + 1
            row = rows.setdefault((*key, seen[key]), [None] * len(branches))
            row[number] = position
    return list(rows.values())
