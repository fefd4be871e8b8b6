"""`jax.custom_jvp`, `jax.custom_vjp` and `HiPrim`s: their rules still apply to their outputs.

What is collected inside differentiates by ordinary autodiff. A body in which something is planted
is another function, of which these rules know nothing: it is inlined.
"""

import dataclasses

import equinox as eqx
import jax

from .. import _compat
from .._derived import Derived, Original, check_no_references
from .._edit_nodes import Edit, split_arrays
from .._expansion import guarded
from .._held import of_first
from .._lowered import lowered, raised
from .._markers import is_side_effect
from .._opened import opened
from .._probe import is_probe, with_tangent_of
from .._reading import Reading
from .._rule import register_rule


@register_rule("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
class Custom:
    def entries(self, eqn, walk):
        return walk.entries(_compat.called_jaxpr(eqn))

    def rebuild(self, eqn, invals, inside):
        return _rebuilt(eqn, invals, inside, _compat.called_jaxpr(eqn))


@register_rule(_compat.HI_PRIM)
class Expanded:
    def entries(self, eqn, walk):
        prim = _compat.hi_prim(eqn)
        entries = [entry for jaxpr in walk.jaxprs(eqn) for entry in walk.entries(jaxpr)]
        return [dataclasses.replace(entry, prim=prim) for entry in entries]

    def rebuild(self, eqn, invals, inside):
        walk = inside.replay.walk
        if (error := walk.why_unseen(eqn)) is not None:
            prim = guarded(_compat.hi_prim(eqn), error)
            return inside.replay.bind(eqn.replace(params={"_prim": prim}), invals), []
        jaxpr = walk.expansion(eqn)
        if jaxpr is None:
            return inside.replay.bind(eqn, invals), []
        return _rebuilt(eqn, invals, inside, jaxpr)


def _rebuilt(eqn, invals, inside, jaxpr):
    effectful = any(map(is_side_effect, eqn.effects | jaxpr.effects))
    edited = [action for action in inside.actions if isinstance(action, Edit)]
    inlined = not all(map(is_probe, edited)) or (effectful and not inside.replay.effects)
    if inlined or _compat.checks_operations():
        return inside.run(jaxpr, invals, live=inside.live)
    live = (any(inside.live),) * len(jaxpr.outvars)  # the user's rule is for all or none

    # The arrays of reducers are inputs too: derivative rules must not close over them.
    arrays, fixed = split_arrays((inside.actions, inside.loops))
    leaves, treedef = jax.tree.flatten(lowered(arrays))  # JAX takes no cotangents of hi types
    count = len(invals)
    bare = dataclasses.replace(inside, actions=(), loops=())

    def split(args):
        arrays = raised(jax.tree.unflatten(treedef, args[count:]))
        return args[:count], *eqx.combine(arrays, fixed)

    def original(*args):
        outs = _compat.bind(eqn, split(args)[0]) if any(live) or effectful else []
        return outs if any(live) else []

    def body(*args):
        args, actions, loops = split(args)
        outs, reads = bare.run(jaxpr, args, actions=actions, loops=loops, live=live)
        outs = outs if any(live) else []
        return outs, lowered(reads), outs if edited else []

    def entering(*args):
        """The outputs, as functions of the tangents that enter at sites."""
        args, actions, loops = split(args)
        check_no_references(args)
        alone = bare.without_effects()
        eps, probes = split_arrays([a if isinstance(a, Edit) else None for a in actions])
        indices, lengths = split_arrays(loops)

        def outs(eps, args, indices):
            actions, loops = eqx.combine(eps, probes), eqx.combine(indices, lengths)
            return alone.run(jaxpr, args, actions=actions, loops=loops, live=live).outs

        return of_first(outs, eps, args, indices) if edited and any(live) else []

    outs, read, entered = opened(
        _compat.primitive_name(eqn),
        body,
        (Original(original, _read_here(inside), eqn), None, Derived(entering)),
        [*invals, *leaves],
        batches=_compat.batches_as_written(eqn),
    )
    if not any(live):
        return [None for _ in live], raised(read)
    return list(map(with_tangent_of, outs, entered)) if edited else outs, raised(read)


def _read_here(inside):
    """The sows that are read at all their sites here: a rule that evaluates the body repeats them.

    A `sow` of which some sites are left to an outer transform must not be silenced. None in an
    evaluation beside another one, which sows whatever there is.
    """
    if not inside.replay.effects:
        return None
    read, left = set(), set()
    for entry, action in zip(inside.entries, inside.actions, strict=True):
        if entry.readable:
            (read if isinstance(action, Reading) else left).add(entry.marker.label.sow)
    return frozenset(read - left)
