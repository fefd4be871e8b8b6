"""`jax.experimental.xla_metadata.xla_metadata_call`: the metadata stays on the call."""

from typing import Any

from jax.experimental.xla_metadata import xla_metadata_call2

from .. import _compat
from .._rule import register_rule


@register_rule("xla_metadata_call")
class XlaMetadataCall:
    def entries(self, eqn, walk):
        return walk.entries(_compat.metadata_params(eqn).jaxpr)

    def rebuild(self, eqn, invals, inside):
        params = _compat.metadata_params(eqn)

        def body(*args):
            return inside.run(params.jaxpr, args, live=inside.live)

        if _compat.checks_operations():
            return body(*invals)
        call: Any = xla_metadata_call2(body, params.metadata, ad_metadata=params.of_derivatives)
        return call(*invals)
