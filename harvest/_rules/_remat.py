"""`jax.checkpoint`: it keeps saving what it saved, and what is collected is an output."""

import equinox as eqx
import jax
from jax import lax

from .. import _compat
from .._edit_nodes import split_arrays
from .._rule import register_rule


@register_rule("remat2", "checkpoint", "RematTraced")
class Remat:
    def entries(self, eqn, walk):
        return walk.entries(_compat.remat_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.remat_params(eqn)
        arrays, fixed = split_arrays(inside.actions)

        def body(args, arrays):
            actions = eqx.combine(arrays, fixed)
            return inside.run(params.jaxpr, args, actions=actions, live=inside.live)

        if _compat.checks_operations():
            return body(invals, arrays)
        if params.differentiated:
            # The recomputation in a backward pass has no public spelling; it is lowered to this.
            return body(_barrier(invals, params.prevent_cse), arrays)
        prevent_cse = params.prevent_cse
        if not isinstance(prevent_cse, bool):  # one for each input
            prevent_cse = any(prevent_cse)
        return jax.checkpoint(body, policy=params.policy, prevent_cse=prevent_cse)(invals, arrays)


def _barrier(invals, prevent_cse):
    """Keep XLA from merging the recomputation with the forward pass."""
    if isinstance(prevent_cse, bool):
        prevent_cse = [prevent_cse] * len(invals)
    held = iter(
        lax.optimization_barrier([v for v, b in zip(invals, prevent_cse, strict=True) if b])
    )
    return [next(held) if b else v for v, b in zip(invals, prevent_cse, strict=True)]
