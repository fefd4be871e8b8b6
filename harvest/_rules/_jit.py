"""`jax.jit` inside the program: its boundary, name and shardings stay."""

from typing import Any, cast

import jax

from .. import _compat
from .._interpreter import Result, asks_for_loops
from .._rule import register_rule
from .._structure import Structure, is_array


@register_rule("jit")
class Jit:
    def entries(self, eqn, walk):
        return walk.entries(_compat.jit_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.jit_params(eqn)
        if _compat.checks_operations():
            return inside.run(params.jaxpr, invals, live=inside.live)
        # Calls of one jaxpr with one plan share one function, so that a layer that is called
        # twelve times is traced and lowered once. What knows the loops around it is not shared.
        arrays, actions = Structure.flatten(inside.actions, is_array)
        shared = not any(map(asks_for_loops, inside.actions)) and not actions.unhashable
        key = (
            id(params.jaxpr),
            params.in_shardings,
            params.out_shardings,
            tuple(params.options.items()),
            actions,
            inside.live,
            inside.replay.effects,
        )
        jitted = inside.replay.jits.get(key) if shared else None
        if jitted is None:
            jitted = _jitted(params, inside, actions)
            if shared:
                inside.replay.jits[key] = jitted
        # Donation is void: what is collected may be the donated buffer.
        return jitted(invals, arrays)


def _jitted(params, inside, actions):
    def body(args, arrays):
        return inside.run(params.jaxpr, args, actions=actions.unflatten(arrays), live=inside.live)

    body.__name__ = body.__qualname__ = params.name
    options = dict(params.options)
    if any(s is not None for s in params.in_shardings):
        options["in_shardings"] = (list(params.in_shardings), None)
    if any(s is not None for s in params.out_shardings):
        # An output that is not live is None, and so is its sharding.
        shardings = zip(params.out_shardings, inside.live, strict=True)
        outs: list[Any] = [s if live else None for s, live in shardings]
        options["out_shardings"] = Result(outs, cast(Any, None))
    return jax.jit(body, **options)
