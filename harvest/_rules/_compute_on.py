"""`jax.experimental.compute_on`: what is collected inside stays in the memory that it is in."""

from typing import Any

import jax
from jax.experimental.compute_on import compute_on

from .. import _compat
from .._lowered import lowered, raised
from .._rule import register_rule


@register_rule("compute_on")
class ComputeOn:
    def entries(self, eqn, walk):
        return walk.entries(_compat.compute_on_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.compute_on_params(eqn)
        edits = lowered(inside.actions)  # hi types, and their cotangents, are in no memory space

        def body(*args):
            actions = raised(edits)
            return lowered(inside.run(params.jaxpr, args, actions=actions, live=inside.live))

        if _compat.checks_operations():
            return raised(body(*invals))
        # Which memory the outputs are in has to be said beforehand.
        jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(*invals)
        given = [s for s, live in zip(params.out_spaces, inside.live, strict=True) if live]
        spaces = [*given, *map(_compat.memory_space, jaxpr.out_avals[len(given) :])]
        spaces = jax.tree.unflatten(jax.tree.structure(shapes), spaces)
        call: Any = compute_on(body, out_memory_spaces=spaces, **params.options)
        return raised(call(*invals))
