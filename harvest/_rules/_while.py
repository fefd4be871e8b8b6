"""`lax.while_loop`, and dynamic `fori_loop`.

Its trip count is not known, so that the values of its iterations have no stack: a site inside
cannot be collected. The rule only leaves out the effects inside, where a replay asks for that.
"""

from jax import lax

from .. import _compat
from .._rule import register_rule


@register_rule("while")
class While:
    def entries(self, eqn, walk):
        params = _compat.while_params(eqn)
        inside = [*walk.entries(params.cond_jaxpr), *walk.entries(params.body_jaxpr)]
        return [entry.block("while") for entry in inside]

    def rebuild(self, eqn, invals, inside):
        params = _compat.while_params(eqn)
        if params.batched:
            return inside.replay.bind(eqn, invals), []
        first, last = params.cond_consts, params.cond_consts + params.body_consts
        cond_consts, body_consts, carry = invals[:first], invals[first:last], invals[last:]

        def run(jaxpr, consts, carry):
            nothing = (None,) * len(inside.replay.walk.entries(jaxpr))
            return inside.run(jaxpr, [*consts, *carry], actions=nothing).outs

        carry = lax.while_loop(
            lambda carry: run(params.cond_jaxpr, cond_consts, carry)[0],
            lambda carry: run(params.body_jaxpr, body_consts, carry),
            carry,
        )
        return carry, []
