"""`lax.cond`, `lax.switch` and `lax.platform_dependent`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat, _types
from .._edit_nodes import in_branch
from .._entry import CondSum, Entry, united_rows
from .._lowered import lowered, raised, zeros
from .._reading import Folded, Reading
from .._rule import register_rule


@register_rule("cond")
class Cond:
    """The i-th sites of one key in the branches are one site."""

    def entries(self, eqn, walk):
        branches = [walk.entries(b) for b in _compat.cond_params(eqn).branches]
        # To JAX the outputs of a `cond` are alike in shards that run different branches.
        uneven = _compat.varying(eqn.invars[0].aval)
        return [
            _united(
                [None if i is None else b[i] for b, i in zip(branches, row, strict=True)]
            ).running_unevenly(uneven)
            for row in united_rows(branches)
        ]

    def rebuild(self, eqn, invals, inside):
        params = _compat.cond_params(eqn)
        index, *operands = invals
        rows = united_rows([inside.replay.walk.entries(b) for b in params.branches])

        # JAX returns no value of a hi type from a `cond`, and no cotangent of what it closes over.
        actions = lowered(inside.actions)

        def branch(number, jaxpr):
            def fn(*operands):
                here = dataclasses.replace(inside, actions=raised(actions))
                return lowered(_run_branch(number, jaxpr, operands, rows, here))

            return fn

        branches = [branch(number, jaxpr) for number, jaxpr in enumerate(params.branches)]
        outs, reads = raised(_select(index, branches, operands, params.platforms))
        read = [
            (action, entry)
            for action, entry in zip(inside.actions, inside.entries, strict=True)
            if isinstance(action, Reading)
        ]
        return outs, [
            [_result(part, entry, index, v) for part, v in zip(action.parts, values, strict=True)]
            for (action, entry), values in zip(read, reads, strict=True)
        ]


def _united(row: Sequence[Entry | None]) -> Entry:
    present = [entry for entry in row if entry is not None]
    first = present[0]
    same = len(present) == len(row) and all(_same_type(first, entry) for entry in present)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    branches = tuple(entry and entry.type for entry in row)
    return dataclasses.replace(
        first,
        type=_types.united(branches) if same else CondSum(index, branches),
        loops=first.loops if same else (),
        branches=tuple(row),
        summed=not same,
        blocked=next((entry.blocked for entry in present if entry.blocked), None),
        feeds=any(entry.feeds for entry in present),
    )


def _same_type(a: Entry, b: Entry) -> bool:
    return (
        a.marker.label.structure == b.marker.label.structure
        and a.marker.label.spec == b.marker.label.spec
        and (a.loops, a.own) == (b.loops, b.own)
        and _types.same_types(a.type, b.type)
    )


def _run_branch(number, jaxpr, operands, rows, inside):
    """Evaluate one branch with its part of the plan; what it reads, in the order of the rows."""
    here = {row[number]: action for row, action in zip(rows, inside.actions, strict=True)}
    actions = [here[position] for position in range(len(here) - (None in here))]
    outs, reads = inside.run(jaxpr, operands, actions=in_branch(actions, number), live=inside.live)
    positions = [p for p, action in enumerate(actions) if isinstance(action, Reading)]
    read = dict(zip(positions, reads, strict=True))
    return outs, [
        [
            _filled(part, entry, number, read[row[number]][i] if row[number] in read else None)
            for i, part in enumerate(action.parts)
        ]
        for entry, row, action in zip(inside.entries, rows, inside.actions, strict=True)
        if isinstance(action, Reading)
    ]


def _filled(part, entry, number, value):
    """What one branch returns for a site: its own value, and zeros for the other branches."""
    if isinstance(part, Folded):
        return part.slot if value is None else value
    if not entry.summed:
        return _as_uneven(value, part, entry)
    return [
        other
        and (
            _as_uneven(value, part, other)
            if k == number
            else jax.tree.map(zeros, part.type_of(other))
        )
        for k, other in enumerate(entry.branches)
    ]


def _as_uneven(value, part, entry):
    """What one branch returns, differing along the mesh axes that what any branch returns does."""
    if not _compat.manual_axes():
        return value
    return jax.tree.map(_compat.placed_like, value, part.type_of(entry))


def _result(part, entry, index, value):
    is_sum = entry.summed and not isinstance(part, Folded)
    return CondSum(index, tuple(value)) if is_sum else value


def _select(index, branches, operands, platforms):
    if platforms is not None:
        named = {
            name: branch
            for branch, names in zip(branches, platforms, strict=True)
            for name in names or ("default",)
        }
        return lax.platform_dependent(*operands, **named)
    if len(branches) == 2:  # `lax.switch` would clamp the index
        return lax.cond(index != 0, branches[1], branches[0], *operands)
    return lax.switch(index, branches, *operands)
