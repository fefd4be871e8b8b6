"""`jax.checkpoint`: it keeps saving what it saved, and what is collected is an output."""

import equinox as eqx
import jax
from jax import lax

from .. import _compat
from .._edit_nodes import split_arrays
from .._lowered import lowered, raised
from .._rule import register_rule


@register_rule("remat2", "RematTraced")
class Remat:
    def entries(self, eqn, walk):
        return walk.entries(_compat.remat_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.remat_params(eqn)
        arrays, fixed = split_arrays(inside.actions)
        arrays = lowered(arrays)  # neither a value of a hi type comes out of it, nor a cotangent

        def body(args, arrays):
            actions = eqx.combine(raised(arrays), fixed)
            return lowered(inside.run(params.jaxpr, args, actions=actions, live=inside.live))

        if _compat.checks_operations():
            return raised(body(invals, arrays))
        if params.differentiated:
            # The recomputation in a backward pass has no public spelling; it is lowered to this.
            return raised(body(_barrier(invals, params.prevent_cse), arrays))
        prevent_cse = params.prevent_cse
        if not isinstance(prevent_cse, bool):  # one for each input
            prevent_cse = any(prevent_cse)
        remat = jax.checkpoint(body, policy=params.policy, prevent_cse=prevent_cse)
        return raised(remat(invals, arrays))


def _barrier(invals, prevent_cse):
    """Keep XLA from merging the recomputation with the forward pass."""
    if isinstance(prevent_cse, bool):
        prevent_cse = [prevent_cse] * len(invals)
    chosen = lowered([v for v, b in zip(invals, prevent_cse, strict=True) if b])
    held = iter(raised(lax.optimization_barrier(chosen)))
    return [next(held) if b else v for v, b in zip(invals, prevent_cse, strict=True)]
