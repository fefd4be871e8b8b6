"""`jax.custom_jvp` and `jax.custom_vjp`: the user's rule still applies to the outputs.

What is collected inside differentiates by ordinary autodiff. A body in which something is planted
is another function, of which the user's rule knows nothing: it is inlined.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.hijax import HiPrim, Zero, instantiate_zeros

from .. import _compat
from .._edit_nodes import Edit, split_arrays
from .._errors import UnsupportedError
from .._interpreter import Replay
from .._markers import is_side_effect
from .._probe import is_probe, with_tangent_of
from .._reading import CONSUMED, Reading
from .._rule import register_rule
from .._walk import Walk


class _Custom:
    def entries(self, eqn, walk):
        return walk.entries(_compat.called_jaxpr(eqn))

    def rebuild(self, eqn, invals, inside):
        jaxpr = _compat.called_jaxpr(eqn)
        effectful = any(map(is_side_effect, eqn.effects))
        edited = [action for action in inside.actions if isinstance(action, Edit)]
        again = effectful and not inside.replay.effects
        if not all(map(is_probe, edited)) or again or _compat.checks_operations():
            return inside.run(jaxpr, invals, live=inside.live)
        live = (any(inside.live),) * len(jaxpr.outvars)  # the user's rule is for all or none

        # The arrays of reducers are inputs too: the rules must not close over them.
        arrays, fixed = split_arrays((inside.actions, inside.loops))
        leaves, treedef = jax.tree.flatten(arrays)
        count, edits = len(invals), bool(edited)
        without = functools.partial(_without, _read_here(inside))
        bare = dataclasses.replace(inside, actions=(), loops=())

        def split(args):
            return args[:count], *eqx.combine(jax.tree.unflatten(treedef, args[count:]), fixed)

        def original(*args):
            return _compat.bind(eqn, split(args)[0]) if any(live) else [None for _ in live]

        def results(outs, reads):
            outs = outs if any(live) else [None for _ in live]
            return outs, reads, outs if edits else []

        def body(*args):
            args, actions, loops = split(args)
            return results(*bare.run(jaxpr, args, actions=actions, loops=loops, live=live))

        def reads(*args):
            args, actions, loops = split(args)
            if not any(isinstance(action, Reading) for action in actions):
                return []
            alone, dead = _beside(bare, args), (False,) * len(jaxpr.outvars)
            return alone.run(jaxpr, args, actions=actions, loops=loops, live=dead).reads

        def entering(*args):
            """The outputs, as functions of the tangents that enter at sites."""
            if not edits:
                return []
            args, actions, loops = split(args)
            alone = _beside(bare, args)
            eps, probes = split_arrays([a if isinstance(a, Edit) else None for a in actions])
            indices, lengths = split_arrays(loops)

            @_of_second
            def outs(rest, eps):
                args, indices = rest
                actions, loops = eqx.combine(eps, probes), eqx.combine(indices, lengths)
                return alone.run(jaxpr, args, actions=actions, loops=loops, live=live).outs

            return outs((args, indices), eps)

        body = self.with_batching(eqn, inside, body, results, reads)
        fn = self.with_derivatives(body, original, reads, entering, without)
        outs, read, entered = fn(*invals, *leaves)
        if edits and any(live):
            outs = list(map(with_tangent_of, outs, entered))
        return outs, read

    def with_batching(self, eqn, inside, body, results, reads):
        """`body`, with the rule of the user's that `vmap` is to apply, if there is one."""
        return body

    def with_derivatives(self, body, original, reads, entering, without):
        """`body`, each of whose results differentiates as one of the next three functions.

        `without(fn)` is `fn` without the sows that `body` collects: the user's rule may evaluate
        them again.
        """
        raise NotImplementedError


@register_rule("custom_jvp_call")
class CustomJVP(_Custom):
    def with_derivatives(self, body, original, reads, entering, without):
        fn = jax.custom_jvp(body)

        @lambda rule: fn.defjvp(rule, symbolic_zeros=True)
        def _(primals, tangents):
            live = [not _compat.is_symbolic_zero(t) for t in tangents]
            inputs, merge = _split(primals, live)
            tangents = [t for t, nonzero in zip(tangents, live, strict=True) if nonzero]
            outs = without(
                lambda xs, ts: jax.jvp(lambda *xs: original(*merge(xs)), xs, ts), inputs, tangents
            )
            try:
                read = jax.jvp(lambda *xs: reads(*merge(xs)), inputs, tangents)
            except Exception as error:
                read = _without_derivative(reads(*primals), tangents[0], _hint(error))
            entered = jax.jvp(lambda *xs: entering(*merge(xs)), inputs, tangents)
            return tuple(zip(outs, read, entered, strict=True))

        return fn


@register_rule("custom_vjp_call")
class CustomVJP(_Custom):
    def with_derivatives(self, body, original, reads, entering, without):
        fn = jax.custom_vjp(body)

        def fwd(*args):
            perturbed = tuple(a.perturbed for a in args)
            inputs, merge = _split([a.value for a in args], perturbed)
            outs, vjp_outs = without(
                lambda *xs: jax.vjp(lambda *xs: original(*merge(xs)), *xs), *inputs
            )
            try:
                read, vjp_reads = jax.vjp(lambda *xs: reads(*merge(xs)), *inputs)
            except Exception as error:
                read, vjp_reads = reads(*merge(inputs)), _Static(_hint(error))
            entered, vjp_entered = jax.vjp(lambda *xs: entering(*merge(xs)), *inputs)
            vjps = vjp_outs, vjp_reads, vjp_entered
            return (outs, read, entered), (vjps, _Static(perturbed))

        def bwd(residuals, cotangents):
            vjps, perturbed = residuals
            # Neither is asked where nothing is differentiated: a rule may make NaNs of zeros.
            results = []
            for vjp, cts in zip(vjps, cotangents, strict=True):
                if not all(map(_compat.is_symbolic_zero, _leaves(cts))):
                    if isinstance(vjp, _Static):
                        raise UnsupportedError(vjp.value)
                    zeros = jax.tree.map(_as_zero, cts, is_leaf=_compat.is_symbolic_zero)
                    results.append(vjp(zeros))
            totals = iter([functools.reduce(_add, cts) for cts in zip(*results, strict=True)])
            return tuple(next(totals, None) if p else None for p in perturbed.value)

        fn.defvjp(fwd, bwd, symbolic_zeros=True)
        return fn


def _beside(inside, args):
    """For a second evaluation: the side effects are those of the original."""
    if any(map(_compat.is_ref, args)):
        raise UnsupportedError(
            "what is collected inside a function with a custom rule may depend on a `Ref` from "
            "outside, which the function may have changed when it is evaluated again beside the "
            "rule; sow outside of that function, or collect outside of `jax.grad`"
        )
    return inside.without_effects()


def _of_second(fn):
    """`fn(a, b)`, with derivatives with respect to `b` only: those do depend on `a`."""
    of_second = jax.custom_jvp(fn)

    @lambda rule: of_second.defjvp(rule, symbolic_zeros=True)
    def _(primals, tangents):
        a, b = primals
        leaves, treedef = jax.tree.flatten(b)
        tangents = _leaves(tangents[1])
        live = [not _compat.is_symbolic_zero(t) for t in tangents]
        inputs, merge = _split(leaves, live)
        nonzero, _ = _split(tangents, live)
        at_a = lambda inputs: fn(a, jax.tree.unflatten(treedef, merge(inputs)))
        return of_second(a, b), jax.jvp(at_a, (inputs,), (nonzero,))[1]

    return of_second


def _hint(error):
    """Why what was collected in a custom body has no derivative: the user's rule is not for it."""
    return (
        "a value that was collected inside a function with a custom derivative rule differentiates "
        "as it is computed, and JAX cannot differentiate that: use `jax.lax.stop_gradient` on it, "
        f"or sow it outside ({type(error).__name__}: {error})"
    )


class _NoDerivative(HiPrim):
    """A tangent that may exist, but not be used."""

    hint: str

    def __init__(self, in_aval, out_aval, hint):
        self.in_avals, self.out_aval = (in_aval,), out_aval
        self.params = {"hint": hint}
        super().__init__()

    def expand(self, *args):
        return jnp.full(self.out_aval.shape, jnp.nan, self.out_aval.dtype)

    def jvp(self, primals, tangents):
        return self(*primals), self(*map(instantiate_zeros, tangents))

    def lin(self, nzs_in, *primals):
        return self(*primals), (), True

    def linearized(self, residuals, *tangents):
        return self(*map(instantiate_zeros, tangents))

    def transpose(self, out_ct, *maybe_accums):
        raise UnsupportedError(self.hint)

    def batch(self, axis_data, args, dims):
        return _NoDerivative(jax.typeof(args[0]), self.out_aval, self.hint)(*args), None


def _without_derivative(reads, tangent, hint):
    """The reads, and tangents that are an error to transpose, and NaN otherwise."""

    def tangent_of(read):
        aval = jax.typeof(read).to_tangent_aval()
        if aval.dtype == jax.dtypes.float0:
            return np.zeros(aval.shape, aval.dtype)
        return _NoDerivative(jax.typeof(tangent), aval, hint)(tangent)

    return reads, jax.tree.map(tangent_of, reads)


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
            sow = (entry.marker.label.name, entry.source)
            (read if isinstance(action, Reading) else left).add(sow)
    return frozenset(read - left)


def _without(sows, fn, *args):
    """`fn(*args)`, without these sows (None: without any)."""
    if sows is not None and not sows:
        return fn(*args)
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    walk = Walk()
    gone = lambda e: sows is None or (e.marker.label.name, e.source) in sows
    actions = [CONSUMED if e.readable and gone(e) else None for e in walk.entries(jaxpr)]
    live = (True,) * len(jaxpr.outvars)
    outs, _ = Replay(walk).run(jaxpr, jax.tree.leaves(args), actions, (), live)
    return jax.tree.unflatten(jax.tree.structure(out), outs)


@jax.tree_util.register_static
class _Static:
    """Carries a constant from the forward to the backward rule."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


def _split(args, live):
    """The arguments that are differentiated, and a function that puts them among the others."""
    inputs = [a for a, chosen in zip(args, live, strict=True) if chosen]

    def merge(inputs):
        inputs = iter(inputs)
        return [next(inputs) if chosen else a for a, chosen in zip(args, live, strict=True)]

    return inputs, merge


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=_compat.is_symbolic_zero)


def _as_zero(ct):
    """The zero that the functions of `jax.vjp` take, so that the user's rule sees it as one."""
    return Zero(ct.aval) if _compat.is_symbolic_zero(ct) else ct


def _add(a, b):
    return a if a.dtype == jax.dtypes.float0 else a + b
