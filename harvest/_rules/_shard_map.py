"""`jax.shard_map`: what is collected in its body, and planted there, are global arrays."""

import jax

from .. import _compat, _layouts
from .._edit_nodes import Edit
from .._rule import register_rule
from .._shards import WHOLE, Shards, axes_named_in
from .._structure import Structure, is_array

# JAX writes it with specs that `jax.shard_map` refuses, and cannot lower it itself.
DIFFERENTIATED = "a `shard_map` inside another one that JAX has differentiated"


@register_rule("shard_map")
class ShardMap:
    def entries(self, eqn, walk):
        params = _compat.shard_map_params(eqn)
        shards = _shards(params)
        with _compat.settings_of(eqn):  # a `HiPrim` in the body may expand to names of mesh axes
            shards.within(lambda _: walk.entries(params.jaxpr), None)
        named = frozenset().union(*map(axes_named_in, (*params.in_specs, *params.out_specs)))
        if not named <= {*params.manual}:
            return [entry.block(DIFFERENTIATED) for entry in walk.entries(params.jaxpr)]
        return [entry.sharded(shards) for entry in walk.entries(params.jaxpr)]

    def rebuild(self, eqn, invals, inside):
        params = _compat.shard_map_params(eqn)
        shards, depth = _shards(params), len(inside.loops)
        entries = inside.replay.walk.entries(params.jaxpr)
        actions = [
            _layouts.spelled_out(action, entry) if isinstance(action, Edit) else action
            for action, entry in zip(inside.actions, entries, strict=True)
        ]
        # The body must not close over arrays, which may be sharded in other ways.
        arrays, rest = Structure.flatten((actions, inside.loops), is_array)
        layouts = jax.tree.leaves(_layouts.of_actions(actions, entries, shards, depth))
        layouts += [WHOLE] * (len(arrays) - len(layouts))  # the indices of the loops
        leaving = _layouts.of_reads(actions, entries, shards, depth)

        def body(invals, arrays):
            arrays = [layout.enter(x) for layout, x in zip(layouts, arrays, strict=True)]
            actions, loops = rest.unflatten(arrays)
            outs, reads = inside.run(
                params.jaxpr, invals, actions=actions, loops=loops, live=inside.live
            )
            reads = jax.tree.map(lambda layout, x: layout.leave(x), leaving, reads)
            return _chosen(outs, inside.live), reads

        in_specs = [layout.spec for layout in layouts]
        sharded = jax.shard_map(
            body,
            in_specs=(list(params.in_specs), in_specs),
            out_specs=(
                _chosen(params.out_specs, inside.live),
                jax.tree.map(lambda layout: layout.spec, leaving),
            ),
            **shards.options,
        )
        # Where nothing is traced, JAX would evaluate it operation by operation, and cannot do so
        # with custom derivative rules. While a program is traced, this leaves no trace in it.
        staged = jax.jit(sharded, inline=True)
        outs, reads = staged(invals, list(map(shards.placed, arrays, in_specs)))
        outs = iter(outs)
        if shards.unchecked:
            reads = jax.tree.map(lambda x: _may_differ(x, shards.unchecked), reads)
        return [next(outs) if live else None for live in inside.live], reads


def _shards(params):
    return Shards(params.mesh, params.manual, params.check_vma)


def _may_differ(value, axes):
    return value if _compat.is_hi(value) else _compat.varying_along(value, axes)


def _chosen(items, live):
    return [item for item, chosen in zip(items, live, strict=True) if chosen]
