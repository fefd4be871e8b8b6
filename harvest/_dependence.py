"""What depends on which inputs of a jaxpr."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from . import _compat
from ._markers import Mark, Tag
from ._walk import Walk


def varying(walk: Walk, jaxpr: Jaxpr, inputs: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which outputs of a jaxpr surely depend on any of the chosen inputs; and which equations.

    An equation does if all sites in it do. Where it cannot be told, the answer is no.
    """
    chosen = {v for v, is_chosen in zip(jaxpr.invars, inputs, strict=True) if is_chosen}
    equations = []
    for eqn in jaxpr.eqns:
        into = [isinstance(v, Var) and v in chosen for v in eqn.invars]
        outs, sites = _through(walk, eqn, into)
        chosen.update(v for v, is_chosen in zip(eqn.outvars, outs, strict=True) if is_chosen)
        equations.append(sites)
    return [isinstance(v, Var) and v in chosen for v in jaxpr.outvars], equations


def _through(walk: Walk, eqn: JaxprEqn, into: list[bool]) -> tuple[list[bool], bool]:
    marker = _compat.hi_prim(eqn)
    if isinstance(marker, Tag):
        return into, any(into)
    inner = walk.jaxprs(eqn)
    if not inner or isinstance(marker, Mark):
        # Several outputs may each depend on an input of its own.
        surely = any(into) if len(eqn.outvars) < 2 else all(into)
        return [surely] * len(eqn.outvars), any(into)
    if _compat.primitive_name(eqn) == "while":
        return _through_while(walk, _compat.while_params(eqn), into)
    outs, sites = [any(into)] * len(eqn.outvars), True
    for jaxpr in inner:
        # The last inputs of an equation are those of its jaxprs: before them may be an index.
        count = len(jaxpr.invars)
        if count > len(into) or len(jaxpr.outvars) != len(eqn.outvars):
            return [False] * len(eqn.outvars), False
        these, equations = varying(walk, jaxpr, into[len(into) - count :])
        outs = [a and b for a, b in zip(outs, these, strict=True)]
        sites = sites and all(_with_sites(walk, jaxpr, equations))
    return outs, sites


def _through_while(
    walk: Walk, params: _compat.WhileParams, into: list[bool]
) -> tuple[list[bool], bool]:
    body = params.body_jaxpr
    outs, equations = varying(walk, body, into[params.cond_consts :])
    carry = into[len(into) - len(outs) :]
    outs = [a or b for a, b in zip(carry, outs, strict=True)]
    return outs, all(_with_sites(walk, body, equations))


def _with_sites(walk: Walk, jaxpr: Jaxpr, equations: Sequence[bool]) -> list[bool]:
    """Of one item for each equation, those of equations that sow."""
    spans = zip(equations, walk.spans(jaxpr), strict=True)
    return [item for item, span in spans if any(entry.readable for entry in span)]
