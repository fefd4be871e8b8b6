"""`eval_jaxpr`, `composite`, `remat_opt`: plain calls, which are inlined."""

from .. import _compat
from .._rule import register_rule


@register_rule("eval_jaxpr", "composite", "remat_opt")
class Call:
    def entries(self, eqn, walk):
        return walk.entries(_compat.called_jaxpr(eqn))

    def rebuild(self, eqn, invals, inside):
        # A `composite` with a site inside is no longer the operation that a backend may replace,
        # nor a `remat_opt` the forward rule that JAX undoes where nothing needs its residuals.
        return inside.run(_compat.called_jaxpr(eqn), invals, live=inside.live)
