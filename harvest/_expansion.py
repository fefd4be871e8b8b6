"""What a user's `HiPrim` expands to, so that sites inside of it are found."""

import copy
from typing import Any

import jax
import jax.core
from jax.experimental.hijax import HiPrim
from jax.extend.core import Jaxpr, JaxprEqn

from . import _compat
from ._errors import UnsupportedError
from ._markers import SOW


def expansion(eqn: JaxprEqn) -> Jaxpr:
    """What JAX evaluates for a `HiPrim`, as a jaxpr of its inputs.

    Traced in the mesh and the configuration of the equation, with both kinds of markers. Inside a
    `shard_map`, that rule has given the axes of the mesh their names.
    """
    prim = _compat.hi_prim(eqn)

    def flat(*args: Any) -> list[Any]:
        values = map(_concrete, args, prim.in_avals_flat)
        out = prim.expand(*jax.tree.unflatten(prim.in_tree, values))
        outs = prim.out_tree.flatten_up_to(out)
        return list(map(_traced, outs, prim.out_avals_flat))

    watched, plants = _compat.WATCHED(True), _compat.PLANTING(True)
    with _compat.settings_of(eqn), watched, plants, jax.disable_jit(False):
        jaxpr = jax.make_jaxpr(flat)(*prim.in_avals_flat)
    if any(map(_compat.is_hi, jaxpr.consts)):
        raise NotImplementedError("it binds a value of a hi type that it has made by hand")
    return jaxpr


def _concrete(value: Any, aval: Any) -> Any:
    """A value as `expand` gets it: those of hi types are no tracers."""
    return aval.raise_val(*_Lower(aval)(value)) if _compat.is_hi_type(aval) else value


def _traced(value: Any, aval: Any) -> Any:
    """The inverse of `_concrete`."""
    if isinstance(value, jax.core.Tracer) or not _compat.is_hi_type(aval):
        return value
    return _Raise(aval)(*aval.lower_val(value))


class _Converts(HiPrim):
    """Between a value of a hi type and its components, which have no derivative in common."""

    skip_linearization_on_zero_tangents = True
    aval: Any

    def __init__(self, aval: Any):
        self.params = {"aval": aval}
        super().__init__()

    def vjp_fwd(self, nzs_in, *args):
        self._refuse("derivative")

    def lin(self, nzs_in, *args):
        self._refuse("derivative")

    def jvp(self, primals, tangents):
        self._refuse("derivative")

    def batch(self, axis_data, args, dims):
        self._refuse("batch axis")

    def _refuse(self, what: str) -> None:
        raise UnsupportedError(
            f"what is collected or planted inside of a `HiPrim` takes a {what} through a value of "
            f"the hi type {self.aval}, of which only the rules of that `HiPrim` know: collect "
            "or plant outside of `jax.grad` and of `jax.vmap`"
        )


class _Lower(_Converts):
    def __init__(self, aval):
        self.in_avals, self.out_aval = (aval,), tuple(aval.lo_ty())
        super().__init__(aval)

    def expand(self, *args):
        return tuple(self.aval.lower_val(*args))


class _Raise(_Converts):
    def __init__(self, aval):
        self.in_avals, self.out_aval = tuple(aval.lo_ty()), aval
        super().__init__(aval)

    def expand(self, *args):
        return self.aval.raise_val(*args)


def why_without_program(prim: HiPrim, error: Exception) -> str:
    name = type(prim).__name__
    return f"`{name}`, which cannot be traced by itself ({type(error).__name__}: {error})"


def guarded(prim: HiPrim, error: Exception) -> HiPrim:
    """A `HiPrim` that could not be looked into, in which a sow is an error when it is lowered.

    Its rules are those of its class, so that what they bind is guarded if it is of `type(self)`.
    """
    name, reason = type(prim).__name__, why_without_program(prim, error)

    class Guarded(type(prim)):
        def expand(self, *args):
            with _compat.UNSEEN(reason):
                return super().expand(*args)

    Guarded.__name__, Guarded.__module__ = name, type(prim).__module__
    copied = copy.copy(prim)
    copied.__class__ = Guarded
    copied.effects = prim.effects | {SOW}  # JAX must not drop it
    return copied
