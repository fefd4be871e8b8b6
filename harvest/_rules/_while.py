"""`lax.while_loop`, and dynamic `fori_loop`.

Its trip count is not known, so that the values of its iterations have no stack: what is collected
needs a fold. The predicate of a loop that `vmap` has batched is an array, which no public function
can spell: such a loop runs while any lane does, and lanes that are done keep what they have.
"""

import jax.numpy as jnp
from jax import lax

from .. import _compat, _types
from .._dependence import varying
from .._edit_nodes import Loop
from .._entry import BATCHED_WHILE, PREDICATE, UNEVEN_WHILE
from .._errors import UnsupportedError
from .._loop_slots import LoopSlots
from .._rule import register_rule


@register_rule("while")
class While:
    def entries(self, eqn, walk):
        params = _compat.while_params(eqn)
        predicate = walk.entries(params.cond_jaxpr)
        body = walk.entries(params.body_jaxpr)
        if params.lanes:
            count = len(params.body_jaxpr.invars)
            carried = [i >= params.body_consts for i in range(count)]
            varies = varying(walk, params.body_jaxpr, carried)[1]
            spans = zip(walk.spans(params.body_jaxpr), varies, strict=True)
            lanes = tuple(_types.dims(params.cond_jaxpr.out_avals[0]))
            body = [_in_lanes(e, lanes, varies) for span, varies in spans for e in span]
        uneven = _compat.varying(params.cond_jaxpr.out_avals[0])
        if params.lanes and not all(uneven <= _compat.varying(a) for a in _carried(params)):
            # Lanes that are done keep what they have, so that it differs: JAX does not check that.
            body = [entry.block(UNEVEN_WHILE) for entry in body]
        body = [entry.running_unevenly(uneven).looped(None) for entry in body]
        return [*(e.block(PREDICATE) for e in predicate), *body]

    def rebuild(self, eqn, invals, inside):
        params = _compat.while_params(eqn)
        first, last = params.cond_consts, params.cond_consts + params.body_consts
        cond_consts, body_consts, carry = invals[:first], invals[first:last], invals[last:]
        of_predicate = len(inside.replay.walk.entries(params.cond_jaxpr))
        alone, actions = inside.actions[:of_predicate], inside.actions[of_predicate:]
        if params.lanes and _compat.WATCHED.value:
            _check_nothing_is_left(inside)
        loop = LoopSlots(actions, len(inside.loops))
        states, _ = loop.states()
        # Only edits and folds ask for the number of the iteration.
        step = jnp.asarray(0) if any(a is not None for a in actions) else None

        def predicate(state):
            carry, _, _ = state
            return inside.run(params.cond_jaxpr, [*cond_consts, *carry], actions=alone).outs[0]

        def body(state):
            carry, states, step = state
            outs, reads = inside.run(
                params.body_jaxpr,
                [*body_consts, *carry],
                actions=loop.inside(actions, states, ()),
                loops=(*inside.loops, Loop(step, None)),
            )
            new, _ = loop.split(reads)
            if params.lanes:
                runs = predicate(state)
                outs = [_where(runs, o, c) for o, c in zip(outs, carry, strict=True)]
                new = loop.masked(runs, new, states)
            return outs, new, step if step is None else step + 1

        def runs(state):
            return jnp.any(predicate(state)) if params.lanes else predicate(state)

        carry, states, _ = lax.while_loop(runs, body, (carry, states, step))
        return carry, loop.merged(states, ())


def _carried(params):
    """The types of the arrays that a loop carries."""
    carried = params.body_jaxpr.in_avals[params.body_consts :]
    return [aval for aval in carried if _compat.is_array_type(aval)]


def _in_lanes(entry, lanes, varies):
    """A site of the body as seen from outside a loop whose predicate has these axes."""
    if entry.readable and any(inner.lanes for inner, _ in entry.innermost()):
        # Those of an inner loop may be the axes of another `vmap`.
        return entry.block(BATCHED_WHILE)
    return entry.in_lanes(lanes, varies)


def _check_nothing_is_left(inside):
    """The loop as it is rebuilt has no lanes: whoever collects in it would not know which run."""
    for entry, action in zip(inside.entries, inside.actions, strict=True):
        if entry.readable and action is None:
            raise UnsupportedError(
                f"{entry.describe()} is inside {BATCHED_WHILE}, where one transform collects or "
                "plants and another one around it may too; put the `vmap` around both, as in "
                "`jax.vmap(reap(plant(f, ...), ...))`"
            )


def _where(runs, new, old):
    mask = jnp.expand_dims(runs, tuple(range(runs.ndim, jnp.ndim(new))))
    return jnp.where(mask, new, old)
