"""`jax.experimental.compute_on`: what is collected inside stays in the memory that it is in."""

from typing import Any

import jax
from jax.experimental.compute_on import compute_on

from .. import _compat
from .._rule import register_rule


@register_rule("compute_on")
class ComputeOn:
    def entries(self, eqn, walk):
        return walk.entries(_compat.compute_on_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.compute_on_params(eqn)

        def body(*args):
            return inside.run(params.jaxpr, args, live=inside.live)

        if _compat.checks_operations():
            return body(*invals)
        # Which memory the outputs are in has to be said beforehand.
        jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(*invals)
        given = [s for s, live in zip(params.out_spaces, inside.live, strict=True) if live]
        spaces = [*given, *map(_compat.memory_space, jaxpr.out_avals[len(given) :])]
        spaces = jax.tree.unflatten(jax.tree.structure(shapes), spaces)
        call: Any = compute_on(body, out_memory_spaces=spaces, **params.options)
        return call(*invals)
