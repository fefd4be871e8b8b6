"""What a rule is, and the table of them: one rule for each primitive that holds jaxprs.

Reap, capture, plant and sites are different plans over the same rules. A rule says which sites
its primitive holds, and rebuilds the primitive with JAX's public combinator, threading planted
values into, and collected values out of, the jaxprs inside.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import equinox as eqx
import jax
from jax.extend.core import JaxprEqn

from . import _compat, _types
from ._compat import UserScope
from ._markers import Mark, Tag

if TYPE_CHECKING:
    from ._interpreter import Inside
    from ._walk import Walk


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
    loops: tuple[int, ...] = ()  # lengths of the loops around it, outermost first
    branches: "tuple[Entry | None, ...] | None" = None  # of the `cond` around it
    summed: bool = False  # those branches differ
    blocked: str | None = None  # the primitive around it that cannot be opened
    feeds: bool = True  # something besides marks uses the result of this `Tag`

    @staticmethod
    def of(marker: Mark | Tag, scope: tuple[UserScope, ...], feeds: bool) -> "Entry":
        avals = zip(marker.in_avals, marker.positions, strict=True)
        return Entry(marker, scope, [_types.moved(*a) for a in avals], feeds=feeds)

    @property
    def key(self) -> str:
        return "/".join((*self.scope, self.marker.label.name))

    @property
    def source(self) -> str:
        """The user's file and line."""
        return self.marker.label.source

    @property
    def readable(self) -> bool:
        return isinstance(self.marker, Mark)

    @property
    def plantable(self) -> bool:
        # A value without arrays has no `Tag`: nothing in it can change, which is checked.
        return isinstance(self.marker, Tag) or not self.marker.in_avals

    @property
    def around(self) -> tuple[int, ...]:
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

    def looped(self, length: int) -> "Entry":
        """As seen from outside a loop that stacks what is read in its body."""
        stacked = jax.tree.map(lambda aval: _types.stacked(aval, length), self.type)
        return dataclasses.replace(self, type=stacked, loops=(length, *self.loops))

    def block(self, primitive: str) -> "Entry":
        """As seen from outside a primitive that cannot be opened."""
        return dataclasses.replace(self, blocked=self.blocked or primitive)

    def innermost(self, outer: tuple[int, ...] = ()) -> "Iterator[tuple[Entry, tuple[int, ...]]]":
        """The entries inside all branches, each with all the loops around it."""
        if self.branches is None:
            yield self, (*outer, *self.loops)
            return
        for branch in self.branches:
            if branch is not None:
                yield from branch.innermost((*outer, *self.around))


@runtime_checkable
class Rule(Protocol):
    """How one primitive that holds jaxprs is opened.

    !!! Example

        ```python
        import harvest.internal as hi

        class Call:
            def entries(self, eqn, walk):
                return walk.entries(eqn.params["call_jaxpr"])

            def rebuild(self, eqn, invals, inside):
                return inside.run(eqn.params["call_jaxpr"], invals)

        assert isinstance(Call(), hi.Rule)
        ```

    Both methods see one equation. `entries` is called once for each equation before anything
    runs; `rebuild` only if something in it is read or planted.
    """

    def entries(self, eqn: JaxprEqn, walk: "Walk") -> Sequence[Entry]:
        """The sites the equation holds, in call order, as seen from outside it.

        Use `walk.entries(jaxpr)` for those of a jaxpr inside.
        """
        ...

    def rebuild(
        self, eqn: JaxprEqn, invals: list[Any], inside: "Inside"
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate the equation; returns its outputs and what was read in it.

        `inside.run(jaxpr, args)` evaluates a jaxpr and returns its outputs, and one item for each
        entry to read. `inside.plants` has an edit for each entry to plant. An output that is not
        live (`inside.live`) may be None.
        """
        ...


_RULES: dict[str, Rule] = {}
ON_NEW_RULE: list[Callable[[], None]] = []  # what was decided by the rules there were


def register_rule(*primitives: str) -> Callable[[type[Rule]], type[Rule]]:
    """Teach harvest to open a primitive.

    !!! Example

        ```python
        import harvest.internal as hi
        import jax

        @hi.register_rule("my_call")
        class MyCall:
            def entries(self, eqn, walk):
                return walk.entries(eqn.params["call_jaxpr"])

            def rebuild(self, eqn, invals, inside):
                return inside.run(eqn.params["call_jaxpr"], invals)
        ```

    **Arguments:**

    - `*primitives`: names of primitives (`eqn.primitive.name`), or of `HiPrim` classes.

    **Returns:**

    A decorator for a class without arguments that is a [`harvest.internal.Rule`][]. A later rule
    for the same primitive replaces the earlier one.
    """

    def decorator(rule: type[Rule]) -> type[Rule]:
        for name in primitives:
            _RULES[name] = rule()
        for forget in ON_NEW_RULE:
            forget()
        return rule

    return decorator


def rule_for(eqn: JaxprEqn) -> Rule | None:
    return _RULES.get(_compat.primitive_name(eqn))
