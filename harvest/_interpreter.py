"""The replay: evaluate a jaxpr, reading some of its sites and replacing others."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from . import _compat
from ._apply import apply_edit
from ._edit_nodes import Edit, Loop
from ._entry import Entry
from ._errors import UnsupportedError
from ._markers import Mark, Tag, is_side_effect
from ._reading import Folded, Reading
from ._rule import Rule, rule_for
from ._walk import Walk

# What is done at each entry: it is read, edited, or left alone.
Actions = Sequence[Reading | Edit | None]


class Result(NamedTuple):
    outs: list[Any]  # of the jaxpr
    reads: list[Any]  # for each entry to read, what each part of its `Reading` has read


@dataclasses.dataclass(frozen=True)
class Inside:
    """What is to be done inside one equation: what a rule is given.

    !!! Example

        ```python
        import harvest.internal as hi

        def rebuild(self, eqn, invals, inside: hi.Inside):  # of a rule, for a plain call
            return inside.run(eqn.params["call_jaxpr"], invals, live=inside.live)
        ```

    **Arguments:**

    - `replay`: the evaluation of the whole program.
    - `entries`: the sites of the equation, as the rule's `entries` returned them.
    - `actions`: for each entry a `Reading`, an `Edit`, or `None` to leave it alone. Pytrees, with
        the arrays of reducers and edits, and the states of folds.
    - `loops`: index and length of the loops around the equation, outermost first.
    - `live`: which outputs of the equation are needed.
    """

    replay: "Replay"
    entries: Sequence[Entry]  # of the equation
    actions: Actions  # one for each entry
    loops: tuple[Loop, ...]  # around the equation, outermost first
    live: tuple[bool, ...]  # which outputs of the equation are needed

    def run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Any],
        *,
        actions: Actions | None = None,
        loops: tuple[Loop, ...] | None = None,
        live: Sequence[bool] | None = None,
    ) -> Result:
        """Evaluate a jaxpr of this equation, by default with the actions of the equation.

        Which is right if the entries of the equation are those of the jaxpr, one for one.
        """
        return self.replay.run(
            jaxpr,
            args,
            self.actions if actions is None else actions,
            self.loops if loops is None else loops,
            (True,) * len(jaxpr.outvars) if live is None else live,
        )

    @property
    def plants(self) -> bool:
        """Whether anything in the equation is edited."""
        return any(isinstance(action, Edit) for action in self.actions)

    def without_effects(self) -> "Inside":
        """The same, for a second evaluation beside one that has the side effects."""
        return dataclasses.replace(self, replay=dataclasses.replace(self.replay, effects=False))


@dataclasses.dataclass(frozen=True)
class Replay:
    """One evaluation of a program: what all its levels share."""

    walk: Walk
    effects: bool = True  # False: leave out whatever is there for its effects only
    marks: bool = True  # False: leave out what is there only to be collected by somebody else
    jits: dict[Any, Any] = dataclasses.field(default_factory=dict)  # for the rule of `jit`

    def run(
        self,
        jaxpr: Jaxpr,
        args: Sequence[Any],
        actions: Actions,
        loops: tuple[Loop, ...],
        live: Sequence[bool],
    ) -> Result:
        """Evaluate `jaxpr`, doing `actions[i]` at its i-th entry.

        Outputs that are not `live` come back as None, and what only they need is left out.
        """
        env = Env(jaxpr, args)
        reads: list[Any] = []
        for step in self.steps(jaxpr, actions, live):
            reads += self.advance(step, env, loops)
        return Result(env.outs(live), reads)

    def unchanged(self, jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
        """The outputs of `jaxpr`, with nothing done at its entries: they are sown again."""
        nothing = (None,) * len(self.walk.entries(jaxpr))
        return self.run(jaxpr, args, nothing, (), (True,) * len(jaxpr.outvars)).outs

    def advance(self, step: "Step", env: "Env", loops: tuple[Loop, ...]) -> list[Any]:
        """Evaluate one equation in the environment; what is read in it."""
        inside = Inside(self, step.entries, step.actions, loops, step.live)
        outs, reads = self.evaluate(step.eqn, env.invals(step.eqn), inside)
        env.write(step.eqn, outs)
        return reads

    def evaluate(self, eqn: JaxprEqn, invals: list[Any], inside: Inside) -> Result:
        """Evaluate an equation, doing the actions of `inside`."""
        marker = _compat.hi_prim(eqn)
        if isinstance(marker, Tag) and not any(inside.actions):
            return Result(_retagged(eqn, invals), [])
        rule = None if isinstance(marker, Mark) else rule_for(eqn)
        opened = any(inside.actions)
        if rule is not None and not opened:
            # Also to leave out the effects inside, or to see where a NaN is made.
            hides = not self.effects and bool(eqn.effects or inside.entries)
            opened = _compat.checks_operations() or hides or self.walk.why_unseen(eqn) is not None
        with _compat.locating_nans(eqn):
            if not opened:
                return Result(self.bind(eqn, invals), [])
            return self._open(eqn, invals, inside, rule)

    def bind(self, eqn: JaxprEqn, invals: list[Any]) -> list[Any]:
        """Evaluate an equation as it stands."""
        effects = any(map(is_side_effect, eqn.effects))
        if effects and not self.effects and not _compat.uses_refs(eqn):
            raise UnsupportedError(
                "what is collected inside a function with a custom rule depends on a side effect "
                f"(`{_compat.primitive_name(eqn)}`, at {_compat.source_of(eqn.source_info)}), "
                "which would happen once more beside the rule when `jax.grad` or `jax.vmap` "
                "applies it; sow outside of that function, or collect outside of `jax.grad`"
            )
        return _compat.bind(eqn, invals)

    def _open(self, eqn: JaxprEqn, invals: list[Any], inside: Inside, rule: Rule | None) -> Result:
        marker = _compat.hi_prim(eqn)
        with _compat.equation_context(eqn):
            if isinstance(marker, Mark | Tag):
                invals = list(map(_compat.as_array, invals, marker.in_avals))
                ((action, entry),) = zip(inside.actions, inside.entries, strict=True)
                where = entry.describe()
                action, loops = _compat.in_this_mesh((action, inside.loops))
                if isinstance(action, Reading):
                    return Result([], [action.read(marker, invals, loops, where)])
                assert action is not None
                edited = apply_edit(action, marker, invals, loops=loops, where=where)
                return Result(_retagged(eqn, edited), [])
            assert rule is not None, "a site that cannot be opened was planned for"
            return Result(*rule.rebuild(eqn, invals, inside))

    def steps(self, jaxpr: Jaxpr, actions: Actions, live: Sequence[bool]) -> "list[Step]":
        """The equations to evaluate, in order, each with its part of the plan."""
        spans = self.walk.spans(jaxpr)
        assert len(actions) == sum(map(len, spans))
        everything = all(live) and self.effects
        outs = zip(jaxpr.outvars, live, strict=True)
        needed = {v for v, used in outs if used and isinstance(v, Var)}
        steps = []
        end = len(actions)
        for eqn, span in zip(reversed(jaxpr.eqns), reversed(spans), strict=True):
            here = actions[end - len(span) : end]
            end -= len(span)
            used = tuple(everything or v in needed for v in eqn.outvars)
            kept = self._is_kept(eqn, span)
            if everything or any(used) or any(here) or kept:
                needed.update(v for v in eqn.invars if isinstance(v, Var))
                steps.append(Step(eqn, span, end, here, used))
        return steps[::-1]

    def _is_kept(self, eqn: JaxprEqn, span: Sequence[Entry]) -> bool:
        """Whether an equation is evaluated even if nobody needs its results."""
        if not self.effects:
            # A second evaluation makes references of its own, and has to write to them.
            return _compat.uses_refs(eqn)
        if any(map(is_side_effect, eqn.effects)) or self.walk.why_unseen(eqn) is not None:
            return True
        # A `HiPrim` of a user's has no effect that would tell of the sows in it.
        return self.marks and any(entry.readable for entry in span)


def _retagged(eqn: JaxprEqn, leaves: list[Any]) -> list[Any]:
    """The result of a `Tag`, which is there as well if an outer `plant` is tracing."""
    if isinstance(_compat.hi_prim(eqn), Tag) and not _compat.PLANTING.value:
        return leaves
    return _compat.bind(eqn, leaves)


class Step(NamedTuple):
    """An equation to evaluate, with its part of the plan."""

    eqn: JaxprEqn
    entries: Sequence[Entry]
    first: int  # of its entries, among those of the jaxpr
    actions: Actions
    live: tuple[bool, ...]


class Env:
    """The values of the variables of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr, args: Sequence[Any]):
        self._jaxpr = jaxpr
        self._values: dict[Var, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
        self._values.update(zip(jaxpr.invars, args, strict=True))

    def _read(self, atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else self._values[atom]

    def invals(self, eqn: JaxprEqn) -> list[Any]:
        return list(map(self._read, eqn.invars))

    def write(self, eqn: JaxprEqn, outs: Sequence[Any]) -> None:
        self._values.update(zip(eqn.outvars, outs, strict=True))

    def outs(self, live: Sequence[bool]) -> list[Any]:
        """The outputs of the jaxpr; None for those that are not live."""
        pairs = zip(self._jaxpr.outvars, live, strict=True)
        return [self._read(v) if used else None for v, used in pairs]

    def copy(self) -> "Env":
        new = Env.__new__(Env)
        new._jaxpr, new._values = self._jaxpr, dict(self._values)
        return new


def asks_for_loops(action: Reading | Edit | None) -> bool:
    """Whether what is done at an entry may depend on the iteration."""
    parts = action.parts if isinstance(action, Reading) else ()
    return isinstance(action, Edit) or any(isinstance(part, Folded) for part in parts)
