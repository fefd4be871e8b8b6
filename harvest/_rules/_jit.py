"""`jax.jit` inside the program: its boundary, name and shardings stay."""

from typing import Any, cast

import equinox as eqx
import jax

from .. import _compat
from .._edit_nodes import split_arrays
from .._interpreter import Result
from .._rule import register_rule


@register_rule("jit", "pjit")
class Jit:
    def entries(self, eqn, walk):
        return walk.entries(_compat.jit_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.jit_params(eqn)
        if _compat.checks_operations():
            return inside.run(params.jaxpr, invals, live=inside.live)
        # Calls of one jaxpr with one plan share one function, so that a layer that is called
        # twelve times is traced and lowered once. Edits may differ from call to call.
        key = (
            id(params.jaxpr),
            params.in_shardings,
            params.out_shardings,
            tuple(params.options.items()),
            inside.actions,
            inside.live,
            inside.replay.effects,
        )
        jitted = None if inside.plants else inside.replay.jits.get(key)
        if jitted is None:
            jitted = inside.replay.jits[key] = _jitted(params, inside)
        # Donation is void: what is collected may be the donated buffer.
        return jitted(invals, split_arrays(inside.plants)[0])


def _jitted(params, inside):
    _, fixed = split_arrays(inside.plants)

    def body(args, arrays):
        plants = eqx.combine(arrays, fixed)
        return inside.run(params.jaxpr, args, plants=plants, live=inside.live)

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
