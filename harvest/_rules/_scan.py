"""`lax.scan`, and what JAX builds on it: `lax.map`, and a `fori_loop` with static bounds."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._edit_nodes import Loop, split_each
from .._rule import register_rule


@register_rule("scan")
class Scan:
    def entries(self, eqn, walk):
        params = _compat.scan_params(eqn)
        return [entry.looped(params.length) for entry in walk.entries(params.jaxpr)]

    def rebuild(self, eqn, invals, inside):
        params = _compat.scan_params(eqn)
        first, last = params.num_consts, params.num_consts + params.num_carry
        consts, carry, xs = invals[:first], invals[first:last], invals[last:]
        sliced, fixed = split_each(inside.plants)
        # Only edits ask for the index; it counts forward also if the scan runs in reverse.
        steps = jnp.arange(params.length) if inside.plants else None

        def body(carry, x):
            xs, sliced, step = x
            plants = eqx.combine(sliced, fixed)
            loops = (*inside.loops, Loop(step, params.length))
            outs, reads = inside.run(
                params.jaxpr, [*consts, *carry, *xs], plants=plants, loops=loops
            )
            return outs[: params.num_carry], (outs[params.num_carry :], reads)

        carry, (ys, reads) = lax.scan(
            body, carry, (xs, sliced, steps), length=params.length, **params.options
        )
        return [*carry, *ys], reads
