"""`lax.scan`, and what JAX builds on it: `lax.map`, and a `fori_loop` with static bounds."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .. import _compat
from .._edit_nodes import Loop, split_each
from .._loop_slots import LoopSlots
from .._lowered import lowered, on_arrays, raised
from .._markers import is_side_effect
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
        loop = LoopSlots(inside.actions, len(inside.loops))
        sliced, fixed = split_each(inside.actions)
        states, slots = loop.states()
        # `vmap` takes no batched values of hi types as inputs or outputs of a scan.
        inputs = (xs, lowered(sliced), slots)
        steps = _steps(params, loop, inside)
        # Slices of the inputs of a shortened loop would be copies of them.
        length = params.length if steps is None else len(steps)
        is_short = length < params.length
        live = (*(True,) * params.num_carry, *inside.live[params.num_carry :])

        def body(carry, x):
            (carry, states), (step, rows) = carry, x
            if is_short:
                row = lambda x: lax.dynamic_index_in_dim(x, step, 0, False)
                rows = jax.tree.map(functools.partial(on_arrays, row), inputs)
            xs, sliced, slots = rows
            outs, reads = inside.run(
                params.jaxpr,
                [*consts, *carry, *xs],
                actions=loop.inside(eqx.combine(raised(sliced), fixed), states, slots),
                loops=(*inside.loops, Loop(step, params.length)),
                live=live,
            )
            states, reads = loop.split(reads)
            return (outs[: params.num_carry], states), (outs[params.num_carry :], lowered(reads))

        (carry, states), (ys, reads) = lax.scan(
            body,
            (carry, states),
            (steps, None if is_short else inputs),
            length=length,
            **params.options,
        )
        return [*carry, *ys], loop.merged(states, raised(reads))


def _steps(params, loop, inside):
    """The iterations to run, if anything asks for them; they count forward also in reverse.

    If nothing is wanted but sites in known iterations, the loop ends with the last of them.
    """
    if not inside.plants and not any(loop.states()):
        return None
    wanted = loop.wanted()
    effects = any(map(is_side_effect, params.jaxpr.effects))
    # If somebody else may collect or plant in it, the loop is to look as it is.
    whole = inside.replay.effects and (effects or _compat.WATCHED.value)
    if wanted is None or whole or any(inside.live):
        return jnp.arange(params.length)
    if params.options["reverse"]:
        return jnp.arange(min(wanted), params.length)
    return jnp.arange(max(wanted) + 1)
