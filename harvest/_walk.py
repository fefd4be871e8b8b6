"""The static walk over a jaxpr: which sites it holds, before anything runs."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._entry import Entry
from ._markers import Mark, Tag
from ._rule import rule_for


class Walk:
    """The sites of a jaxpr and of all jaxprs inside it.

    Each jaxpr is visited once, however often it is called: entries are relative to the jaxpr that
    holds them. (Keyed on identity; the outermost jaxpr keeps all others alive.)
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[Jaxpr, list[Sequence[Entry]]]] = {}

    @property
    def visits(self) -> int:
        """How many jaxprs have been visited."""
        return len(self._spans)

    def entries(self, jaxpr: Jaxpr) -> list[Entry]:
        """All sites of `jaxpr`, in call order."""
        return [entry for span in self.spans(jaxpr) for entry in span]

    def spans(self, jaxpr: Jaxpr) -> list[Sequence[Entry]]:
        """The sites of each equation of `jaxpr`."""
        if id(jaxpr) not in self._spans:
            fed = _fed(jaxpr)
            self._spans[id(jaxpr)] = (jaxpr, [self._span(eqn, fed) for eqn in jaxpr.eqns])
        return self._spans[id(jaxpr)][1]

    def _span(self, eqn: JaxprEqn, fed: set[Var]) -> Sequence[Entry]:
        scope = _compat.scope_of(eqn)
        marker = _compat.hi_prim(eqn)
        if isinstance(marker, Mark | Tag):
            feeds = not eqn.outvars or any(v in fed for v in eqn.outvars)
            return [Entry.of(marker, scope, feeds)]
        if (rule := rule_for(eqn)) is not None:
            entries = rule.entries(eqn, self)
        else:
            inside = [e for jaxpr in _compat.inner_jaxprs(eqn) for e in self.entries(jaxpr)]
            entries = [e.block(_compat.primitive_name(eqn)) for e in inside]
        return [entry.scoped(scope) for entry in entries]


def _fed(jaxpr: Jaxpr) -> set[Var]:
    """The variables that something besides a `Mark` uses."""
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        if not isinstance(_compat.hi_prim(eqn), Mark):
            used.update(v for v in eqn.invars if isinstance(v, Var))
    return used
