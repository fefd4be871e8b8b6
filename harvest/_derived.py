"""Results of one function that are differentiated, batched and transposed as those of another."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.hijax import GradAccum, HiPrim, Zero, instantiate_zeros, vmap_rule
from jax.extend.core import Jaxpr, JaxprEqn

from . import _compat
from ._entry import Entry
from ._errors import UnsupportedError
from ._interpreter import Replay
from ._reading import CONSUMED
from ._walk import Walk


@jax.tree_util.register_static
class Constant:
    """Carries a constant from a forward to a backward rule."""

    def __init__(self, value: Any):
        self.value = value


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """Some of the results of a function, with the derivatives that JAX finds for `fn`.

    `fn` takes the inputs of that function, and returns a list of these results.
    """

    fn: Callable[..., list[Any]]

    def of(self, count: int) -> "Derived":
        """The same, of the first arguments."""
        fn = lambda *args: jax.tree.leaves(self.fn(*args[:count]))
        return dataclasses.replace(self, fn=fn)

    def evaluate(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)`, where `fn` evaluates that of this."""
        return fn(*args)

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        live = [not _compat.is_symbolic_zero(t) for t in tangents]
        inputs, at = self._inputs(primals, live)
        tangents = [t for t, nonzero in zip(tangents, live, strict=True) if nonzero]
        return self.evaluate(lambda xs, ts: jax.jvp(at, xs, ts), inputs, tangents)

    def linearize(self, args: Sequence[Any], live: Sequence[bool]) -> tuple[list[Any], Any]:
        """The results, and a pytree that is their linear function of the live tangents."""
        inputs, at = self._inputs(args, live)
        return self.evaluate(lambda *xs: jax.linearize(at, *xs), *inputs)

    def vjp(self, args: Sequence[Any], live: Sequence[bool]) -> tuple[list[Any], Any]:
        """The results, and a pytree that is JAX's pullback of the live inputs."""
        inputs, at = self._inputs(args, live)
        return self.evaluate(lambda *xs: jax.vjp(at, *xs), *inputs)

    def transpose(self, cts: list[Any], args: Sequence[Any]) -> dict[str, Any] | None:
        """Give cotangents to those of the arguments that are accumulators."""
        live = [isinstance(a, GradAccum) for a in args]
        accums, at = self._inputs(args, live)
        cts = [instantiate_zeros(ct) for ct in cts]
        transposed = jax.linear_transpose(at, *(accum.aval for accum in accums))
        for accum, ct in zip(accums, transposed(cts), strict=True):
            accum.accum(ct)
        return None

    def batched(self, axis_data: Any, dims: Sequence[Any], out_dims: Any) -> "Derived":
        """The same for a batch, whose results have the axes `out_dims`."""
        return dataclasses.replace(self, fn=vmap_rule(axis_data, self.fn, tuple(dims), out_dims))

    def _inputs(self, args: Sequence[Any], live: Sequence[bool]) -> tuple[list[Any], Callable]:
        """The live arguments, and the results as a function of them."""

        def at(*inputs: Any) -> list[Any]:
            rest = iter(inputs)
            return self.fn(*(next(rest) if on else a for a, on in zip(args, live, strict=True)))

        return [a for a, on in zip(args, live, strict=True) if on], at


@dataclasses.dataclass(frozen=True, eq=False)
class Original(Derived):
    """Results of an equation: with its derivative rules, and without sows that are read elsewhere.

    Its rules may evaluate these again. `read` has the `sow` of labels; None stands for all sows.
    """

    read: frozenset[tuple[Any, ...]] | None
    eqn: JaxprEqn | None = None  # None if it is batched

    def evaluate(self, fn, *args):
        if self.read is not None and not self.read:
            return fn(*args)
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = without(self.read, jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    def transpose(self, cts, args):
        prim = self.eqn and _compat.hi_prim(self.eqn)
        if prim is None:
            return super().transpose(cts, args)
        # By its own rule, which may log.
        args = jax.tree.unflatten(prim.in_tree, args[: len(prim.in_avals_flat)])
        return prim.transpose(jax.tree.unflatten(prim.out_tree, cts), *args)

    def batched(self, axis_data, dims, out_dims):
        return dataclasses.replace(super().batched(axis_data, dims, out_dims), eqn=None)


class Collected(Derived):
    """Results that need not have a derivative: then it is an error to use that."""

    def jvp(self, primals, tangents):
        try:
            return super().jvp(primals, tangents)
        except Exception as error:
            nonzero = [t for t in tangents if not _compat.is_symbolic_zero(t)]
            results = self.fn(*primals)
            return results, no_tangents(map(jax.typeof, results), nonzero[0], _hint(error))

    def linearize(self, args, live):
        try:
            return super().linearize(args, live)
        except Exception as error:
            return self.fn(*args), Constant(_hint(error))

    def vjp(self, args, live):
        try:
            return super().vjp(args, live)
        except Exception as error:
            return self.fn(*args), Constant(_hint(error))


def check_no_references(args: Sequence[Any]) -> None:
    """Raise if a second evaluation may see what the first one has changed."""
    if any(map(_compat.is_ref, args)):
        raise UnsupportedError(
            "what is collected inside a function with a custom derivative rule may depend "
            "on a `Ref` from outside, which the function may have changed when it is "
            "evaluated again to be differentiated; collect outside of `jax.grad`"
        )


def _hint(error: Exception) -> str:
    """Why what was collected in a custom body has no derivative: the user's rule is not for it."""
    return (
        "a value that was collected inside a function with a custom derivative rule differentiates "
        "as it is computed, and JAX cannot differentiate that: use `jax.lax.stop_gradient` on it, "
        f"or sow it outside ({type(error).__name__}: {error})"
    )


def no_tangents(types: Iterable[Any], tangent: Any, hint: str) -> list[Any]:
    """Tangents of results of these types: an error to transpose, and NaN otherwise."""

    def tangent_of(type: Any) -> Any:
        aval = type.to_tangent_aval()
        if aval.dtype == jax.dtypes.float0:
            return instantiate_zeros(Zero(aval))
        return _NoDerivative(jax.typeof(tangent), aval, hint)(tangent)

    return list(map(tangent_of, types))


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

    def vjp_fwd(self, nzs_in, *primals):
        return self(*primals), None

    def vjp_bwd(self, res, out_ct, *maybe_accums):
        if not isinstance(out_ct, Zero):
            raise UnsupportedError(self.hint)

    def transpose(self, out_ct, *maybe_accums):
        raise UnsupportedError(self.hint)

    def batch(self, axis_data, args, dims):
        return _NoDerivative(jax.typeof(args[0]), self.out_aval, self.hint)(*args), None


def without(
    sows: frozenset[tuple[Any, ...]] | None, jaxpr: Jaxpr, args: Sequence[Any]
) -> list[Any]:
    """The outputs of a jaxpr, evaluated without these sows (None: without any)."""
    walk = Walk()

    def is_left_out(entry: Entry) -> bool:
        is_meant = sows is None or entry.marker.label.sow in sows
        return entry.readable and not entry.blocked and is_meant

    actions = tuple(CONSUMED if is_left_out(entry) else None for entry in walk.entries(jaxpr))
    return Replay(walk).run(jaxpr, args, actions, (), (True,) * len(jaxpr.outvars)).outs
