"""A program with the outputs of some of its equations sown."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from . import _compat
from ._equation import is_marker, opened
from ._markers import SOW, Label, Mark, Marker, Tag
from ._numbers import Before, Number, Numbering
from ._structure import Structure
from ._where import Choice, Choices, Sown

Counts = Mapping[str, int]  # how many sites there are of each name

# The equations that sow something of another one, given its outputs as variables.
Sow = Callable[[JaxprEqn, Sequence[Var], Sown, Number], Iterable[JaxprEqn]]


def rewritten(jaxpr: Jaxpr, choices: Choices | None, sow: Sow) -> Jaxpr:
    """A program with what is chosen sown."""
    return jaxpr if choices is None else _Rewriting(sow).jaxpr(jaxpr, choices)[0]


class _Rewriting:
    """Equations are put in, and all else stays: what JAX derives and compiles is as before.

    A jaxpr that is called twice stays one.
    """

    def __init__(self, sow: Sow):
        self._sow = sow
        self._numbering = Numbering()
        self._done: dict[Any, tuple[Jaxpr, Jaxpr, Counts]] = {}

    def jaxpr(self, jaxpr: Jaxpr, choices: Choices | None) -> tuple[Jaxpr, Counts]:
        key = (id(jaxpr), choices)
        if key not in self._done:
            self._done[key] = (jaxpr, *self._jaxpr(jaxpr, choices))
        return self._done[key][1:]

    def _jaxpr(self, jaxpr: Jaxpr, choices: Choices | None) -> tuple[Jaxpr, Counts]:
        counts: collections.Counter[str] = collections.Counter()
        if choices is None:  # a branch beside one in which something is sown
            return jaxpr.replace(effects=jaxpr.effects | {SOW}), counts
        renamed: dict[Var, Var] = {}
        rest, eqns = iter(choices.items), []
        for eqn in jaxpr.eqns:
            eqn = eqn.replace(invars=[_read(renamed, v) for v in eqn.invars])
            choice = None if is_marker(eqn) else next(rest)
            if choice is not None:
                eqns += self._eqns(eqn, choice, counts, renamed)
            else:
                eqns.append(eqn)
        outvars = [_read(renamed, v) for v in jaxpr.outvars]
        return _compat.with_eqns(jaxpr, eqns, outvars, SOW), counts

    def _eqns(
        self,
        eqn: JaxprEqn,
        choice: Choice,
        counts: collections.Counter[str],
        renamed: dict[Var, Var],
    ) -> list[JaxprEqn]:
        """An equation, and what sows its outputs, which is outside of the scope that it gets."""
        beside = eqn
        if any(choice.inside):
            pairs = zip(opened(eqn), choice.inside, strict=True)
            done = [self.jaxpr(jaxpr, choices) for jaxpr, choices in pairs]
            eqn = _compat.with_jaxprs(eqn, [jaxpr for jaxpr, _ in done], SOW)
            # The i-th sites in the branches of a `cond` are one.
            inner = {name: max(c.get(name, 0) for _, c in done) for _, c in done for name in c}
            if before := {name: counts[name] for name in inner if counts[name]}:
                eqn = _compat.in_scope(eqn, Before(self._numbering, before))
            counts.update(inner)
        if not choice.sown:
            return [eqn]
        outvars = _compat.used_outvars(eqn)
        eqns, current = [eqn.replace(outvars=outvars)], list(outvars)
        for sown in choice.sown:
            number = Number(self._numbering, counts[sown.name])
            counts[sown.name] += 1
            for sowing in self._sow(beside, current, sown, number):
                outs = dict(zip(sown.outs, sowing.outvars, strict=False))
                current = [outs.get(i, v) for i, v in enumerate(current)]
                eqns.append(sowing)
        pairs = zip(eqn.outvars, current, strict=True)
        renamed.update((old, new) for old, new in pairs if old is not new)
        return eqns


def _read(renamed: Mapping[Var, Var], atom: Any) -> Any:
    return renamed.get(atom, atom) if isinstance(atom, Var) else atom


def as_sow(
    source: str, eqn: JaxprEqn, outvars: Sequence[Var], sown: Sown, number: Number
) -> Iterable[JaxprEqn]:
    """The outputs of an equation as `sow` would sow them, at `source` if no line is known."""
    single = len(eqn.outvars) == 1 or len(sown.outs) == 1
    label = _label(eqn, sown, number, "sow", 0 if single else (0,) * len(sown.outs), source)
    leaves = [outvars[i] for i in sown.outs]
    if _compat.PLANTING.value:
        tagged = [Var(v.aval) for v in leaves]
        yield _marking(eqn, Tag, label, leaves, tagged)
        leaves = tagged
    yield _marking(eqn, Mark, label, leaves, [])


def as_watched(
    eqn: JaxprEqn, outvars: Sequence[Var], sown: Sown, number: Number
) -> Iterable[JaxprEqn]:
    """Outputs and inputs of an equation, for `debug.nonfinite`.

    Not of one whose inside is watched, nor of one on references, whose inputs are not among its
    own. Literals are not among them either: a NaN that comes from one is made here, also if it is
    given to what is inside. And a `while_loop` is watched as well: what is inside may be blocked.
    """
    outs = list(filter(_may_be_nan, outvars))
    as_a_whole = eqn.primitive.name == "while" or any(map(_is_bad_literal, eqn.invars))
    if (opened(eqn) and not as_a_whole) or _compat.uses_refs(eqn) or not outs:
        return
    ins = [v for v in dict.fromkeys(_variables(eqn)) if _may_be_nan(v)]
    sizes = (0,) * len(outs), (0,) * len(ins)
    label = _label(eqn, sown, number, "equation", sizes)
    yield _marking(eqn, Mark, label, [*outs, *ins], [])


def as_noted(
    eqn: JaxprEqn, outvars: Sequence[Var], sown: Sown, number: Number
) -> Iterable[JaxprEqn]:
    """Outputs of an equation by a name of their own, for `show`."""
    like = 0 if len(sown.outs) == 1 else (0,) * len(sown.outs)
    label = _label(eqn, sown, None, "equation", like)
    yield _marking(eqn, Mark, label, [outvars[i] for i in sown.outs], [])


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


def _is_bad_literal(atom: Any) -> bool:
    return (
        isinstance(atom, Literal)
        and jnp.issubdtype(np.asarray(atom.val).dtype, jnp.inexact)
        and not np.isfinite(atom.val).all()
    )


def _may_be_nan(v: Var) -> bool:
    aval: Any = v.aval
    return _compat.is_array_type(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def _label(
    eqn: JaxprEqn, sown: Sown, number: Number | None, kind: Any, like: Any, source: str = ""
) -> Label:
    _, structure = Structure.flatten(like, lambda _: True)
    source, primitive = _compat.source_of(eqn.source_info) or source, _compat.primitive_name(eqn)
    return Label(sown.name, kind, structure, source, number=number, primitive=primitive)


def _marking(
    eqn: JaxprEqn,
    kind: type[Marker],
    label: Label,
    leaves: Sequence[Var],
    results: Sequence[Var],
) -> JaxprEqn:
    prim = kind([v.aval for v in leaves], label, ((),) * len(leaves))
    return _compat.applying(prim, leaves, results, eqn)
