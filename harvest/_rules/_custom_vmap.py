"""`jax.custom_batching.custom_vmap`: the user's rule still applies to the outputs.

Under `vmap`, what is collected inside is that of the body, for each example. What is true of
custom derivatives is true here: a body in which something is planted is another function, of which
the user's rule knows nothing, and is inlined.
"""

import jax
from jax.custom_batching import custom_vmap

from .. import _compat
from .._errors import UnsupportedError
from .._reading import Reading
from .._rule import register_rule
from ._custom_derivatives import CustomJVP, _read_here, _without


@register_rule("custom_vmap_call")
class CustomVmap(CustomJVP):
    """As a `custom_jvp` whose rule differentiates the call as it stands.

    So that JAX derives a rule for the tangents from the user's rule alone: it confuses the axes of
    what is batched where its tangent is not, as are the counters of folds.
    """

    def with_batching(self, eqn, inside, body, results, reads):
        count, sown = len(eqn.invars), _read_here(inside)
        by_rule = _compat.custom_vmap_rule(eqn)
        fn = custom_vmap(body)

        @fn.def_vmap
        def rule(size, batched, *args):
            _check_collectives(eqn, inside)
            mapped = []

            def by_rule_alone(*args):
                outs, mapped[:] = by_rule(size, batched[:count], args)
                return outs

            outs = _without(sown, by_rule_alone, *args[:count])
            axes = [0 if b else None for b in batched]
            read = jax.vmap(reads, axes, axis_size=size)(*args)
            return results(outs, read), results(mapped, jax.tree.map(lambda _: True, read))

        return fn


def _check_collectives(eqn, inside):
    """What is read must not be computed over the axis of this `vmap`, whose name JAX hides."""
    known = jax.sharding.get_abstract_mesh().axis_names
    axes = [axis for e in eqn.effects if (axis := _compat.collective_over(e)) not in (None, *known)]
    for action, entry in zip(inside.actions, inside.entries, strict=True):
        if axes and isinstance(action, Reading):
            raise UnsupportedError(
                f"{entry.describe()} is inside a `custom_vmap` that computes over the axis "
                f"{axes[0]!r}; under `vmap`, which evaluates the rule in its place, it cannot be "
                "told for each example: sow outside of the `custom_vmap`"
            )
