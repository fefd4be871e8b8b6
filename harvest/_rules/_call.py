"""`eval_jaxpr`, `composite`: plain calls, which are inlined."""

from .. import _compat
from .._rule import register_rule


@register_rule("eval_jaxpr", "closed_call", "core_call", "composite")
class Call:
    def entries(self, eqn, walk):
        return walk.entries(_compat.called_jaxpr(eqn))

    def rebuild(self, eqn, invals, inside):
        # A `composite` with a site inside is no longer the operation that a backend may replace.
        return inside.run(_compat.called_jaxpr(eqn), invals, live=inside.live)
