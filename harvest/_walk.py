"""The static walk over a jaxpr: which sites it holds, before anything runs."""

import dataclasses
from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._entry import Entry
from ._errors import HarvestError
from ._expansion import expansion
from ._markers import Mark, Tag
from ._rule import rule_for


class Walk:
    """The sites of a jaxpr and of all jaxprs inside it.

    Each jaxpr is visited once, however often it is called: entries are relative to the jaxpr that
    holds them. (Keyed on identity; the outermost jaxpr keeps all others alive.)
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[Jaxpr, list[Sequence[Entry]]]] = {}
        self._expansions: dict[int, tuple[JaxprEqn, Jaxpr | None]] = {}
        self._unseen: dict[int, tuple[JaxprEqn, Exception]] = {}

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
            inside = [e for jaxpr in self.jaxprs(eqn) for e in self.entries(jaxpr)]
            entries = [e.block(_compat.primitive_name(eqn)) for e in inside]
        if _compat.is_recomputed(eqn):
            entries = [dataclasses.replace(entry, again=True) for entry in entries]
        if not all(entry.source for entry in entries):
            source = _compat.source_of(eqn.source_info)
            entries = [e if e.source else dataclasses.replace(e, called_at=source) for e in entries]
        return [entry.scoped(scope) for entry in entries]

    def jaxprs(self, eqn: JaxprEqn) -> list[Jaxpr]:
        """The jaxprs inside of an equation."""
        if _compat.hi_prim(eqn) is None:
            return list(_compat.inner_jaxprs(eqn))
        expansion = self.expansion(eqn)
        return [] if expansion is None else [expansion]

    def expansion(self, eqn: JaxprEqn) -> Jaxpr | None:
        """What a `HiPrim` expands to; None if nothing can be sown in it, or it cannot be told."""
        if id(eqn) not in self._expansions:
            self._expansions[id(eqn)] = (eqn, self._expanded(eqn))
        return self._expansions[id(eqn)][1]

    def why_unseen(self, eqn: JaxprEqn) -> Exception | None:
        """Why an equation may sow something that cannot be found out beforehand."""
        return self._unseen[id(eqn)][1] if id(eqn) in self._unseen else None

    @property
    def unseen(self) -> Sequence[tuple[JaxprEqn, Exception]]:
        return list(self._unseen.values())

    def _expanded(self, eqn: JaxprEqn) -> Jaxpr | None:
        if _compat.is_harmless(_compat.hi_prim(eqn)):
            return None
        try:
            return expansion(eqn)
        except HarvestError:
            raise
        except Exception as error:
            self._unseen[id(eqn)] = (eqn, error)
            return None


def _fed(jaxpr: Jaxpr) -> set[Var]:
    """The variables that something besides a `Mark` uses."""
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in jaxpr.eqns:
        if not isinstance(_compat.hi_prim(eqn), Mark):
            used.update(v for v in eqn.invars if isinstance(v, Var))
    return used
