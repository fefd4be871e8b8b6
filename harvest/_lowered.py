"""Values of hi types as arrays, and back.

JAX returns no hi value from a `cond`, moves none of their axes, and has no zeros of them. Where
that is needed, a value goes as the arrays it is lowered to, which can do all that arrays can.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.hijax import (
    GradAccum,
    HiPrim,
    Zero,
    bdims_at_front,
    instantiate_zeros,
    linearize_from_jvp,
    vjp_from_lin,
)

from . import _compat, _hi_types
from ._errors import UnsupportedError
from ._hi_types import HiAxis


class _Converter(HiPrim):
    """What `Lower` and `Raise` share.

    The arrays of a value (`parts`) need not have derivatives, as those of a quantized one. So they
    are accompanied by zeros of its tangent type (`carriers`), which have the derivatives. Where
    values are their own tangents, there are none: the parts are linear in the value.
    """

    type: Any

    def __init__(self, type: Any):
        carriers = [] if _hi_types.is_linear(type) else _hi_types.tangent_arrays(type)
        arrays = (tuple(type.lo_ty()), tuple(carriers or ()))
        self.in_avals, self.out_aval = self.signature(type, arrays)
        self.params = {"type": type}
        super().__init__()

    def signature(self, type: Any, arrays: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_lin


class Lower(_Converter):
    """The arrays of a value."""

    def signature(self, type, arrays):
        return (type,), arrays

    def expand(self, *args):
        return tuple(self.type.lower_val(*args)), tuple(map(_compat.zeros, self.out_aval[1]))

    def jvp(self, primals, tangents):
        parts, carriers = self(*primals)
        (tangent,) = tangents
        if _hi_types.is_linear(self.type):
            return (parts, carriers), self(instantiate_zeros(tangent))
        no_tangents = tuple(Zero(lo.to_tangent_aval()) for lo in self.out_aval[0])
        if carriers:
            arrays, _ = _arrays(instantiate_zeros(tangent))
            return (parts, carriers), (no_tangents, tuple(arrays))
        if not _is_zero(tangent) and _hi_types.tangent_arrays(self.type) is None:
            raise UnsupportedError(
                f"a value of the hi type {self.type} has to go through a `cond`, a `vmap` or a "
                "fold as arrays, and is differentiated there; its tangents, of the type "
                f"{self.type.to_tangent_aval()}, are no vector space of floating-point arrays"
            )
        return (parts, carriers), (no_tangents, ())

    def transpose(self, out_ct, *maybe_accums):
        cts, _ = jax.tree.map(instantiate_zeros, out_ct, is_leaf=_is_zero)
        (accum,) = maybe_accums
        accum.accum(Raise(self.type.to_ct_aval())(cts, ()))

    def batch(self, axis_data, args, dims):
        (value,) = args
        type = jax.typeof(value)
        outs = Lower(type)(value)
        if dims[0] is None:
            return outs, jax.tree.map(lambda _: None, outs)
        rows = _hi_types.places(type, [HiAxis(dims[0], axis_data.size)])
        parts, carriers = (tuple(place for (place,) in row) for row in rows)
        return outs, (parts, carriers[: len(outs[1])])


class Raise(_Converter):
    """The inverse of `Lower`."""

    def signature(self, type, arrays):
        return arrays, type

    def expand(self, *args):
        return self.type.raise_val(*args[0])

    def jvp(self, primals, tangents):
        parts, carriers = tangents
        if _hi_types.is_linear(self.type):
            return self(*primals), self(tuple(map(instantiate_zeros, parts)), ())
        tangent = self.type.to_tangent_aval()
        if all(map(_is_zero, carriers)):
            return self(*primals), Zero(tangent)
        carriers = tuple(map(instantiate_zeros, carriers))
        hi = _compat.is_hi_type(tangent)
        return self(*primals), Raise(tangent)(carriers, ()) if hi else carriers[0]

    def transpose(self, out_ct, *maybe_accums):
        parts, _ = _arrays(instantiate_zeros(out_ct))
        for accum, ct in zip(maybe_accums[0], parts, strict=True):
            if isinstance(accum, GradAccum):
                accum.accum(ct)

    def batch(self, axis_data, args, dims):
        if not jax.tree.leaves(dims):
            return self(*args), None
        type = _hi_types.stacked(self.type, axis_data.size)
        return Raise(type)(*bdims_at_front(axis_data, args, dims)), type.leading_axis_spec()


def _arrays(value: Any) -> tuple[list[Any], list[Any]]:
    """The parts and the carriers of a value; of an array, itself."""
    type = jax.typeof(value)
    if not _compat.is_hi_type(type):
        return [value], []
    parts, carriers = Lower(type)(value)
    return list(parts), list(carriers)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, Zero)


# ------------------------------------------------------------------------------ in pytrees


@jax.tree_util.register_pytree_node_class
class Lowered:
    """A value of a hi type, as arrays; with other leading axes than those of the type, maybe."""

    def __init__(self, type: Any, parts: Sequence[Any], carriers: Sequence[Any]):
        self.type, self.parts, self.carriers = type, parts, carriers

    @staticmethod
    def of(value: Any) -> "Lowered":
        return Lowered(jax.typeof(value), *_arrays(value))

    def raised(self) -> Any:
        type = self.type
        if self.parts:
            part, more = self.parts[0], self.parts[0].ndim - len(type.lo_ty()[0].shape)
            for _ in range(-more):
                type = _hi_types.dropped(type)
            for size in reversed(part.shape[: max(more, 0)]):
                type = _hi_types.stacked(type, size)
        return Raise(type)(tuple(self.parts), tuple(self.carriers))

    def map(self, fn: Callable[..., Any], *others: "Lowered") -> "Lowered":
        """A function of the arrays, of each one by itself, and linear in it."""
        parts = list(map(fn, self.parts, *(other.parts for other in others)))
        carriers = list(map(fn, self.carriers, *(other.carriers for other in others)))
        return Lowered(self.type, parts, carriers)

    def tree_flatten(self):
        return (self.parts, self.carriers), self.type

    @classmethod
    def tree_unflatten(cls, type, children):
        return cls(type, *children)


def _is_lowered(node: Any) -> bool:
    return isinstance(node, Lowered)


def lowered(tree: Any) -> Any:
    """A pytree with the values of hi types as arrays."""
    if not any(map(_compat.is_hi, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(lambda leaf: Lowered.of(leaf) if _compat.is_hi(leaf) else leaf, tree)


def raised(tree: Any) -> Any:
    """The inverse of `lowered`."""
    if not any(map(_is_lowered, jax.tree.leaves(tree, is_leaf=_is_lowered))):
        return tree
    raise_node = lambda node: node.raised() if _is_lowered(node) else node
    return jax.tree.map(raise_node, tree, is_leaf=_is_lowered)


def on_arrays(fn: Callable[..., Any], *values: Any) -> Any:
    """`fn` of arrays or, for values of one hi type, of each of their arrays.

    It has to be linear, and the same for all arrays but for their last axes.
    """
    if not _compat.is_hi(values[0]):
        return fn(*values)
    first, *others = map(Lowered.of, values)
    return first.map(fn, *others).raised()


def arrays_of(tree: Any) -> list[Any]:
    """The leaves of a pytree, of hi types the arrays that they are lowered to."""
    leaves = jax.tree.leaves(tree)
    return [x for leaf in leaves for x in (_arrays(leaf)[0] if _compat.is_hi(leaf) else [leaf])]


def zeros(aval: Any) -> Any:
    """Zeros of a type; of a hi type, zeros of its arrays."""
    if not _compat.is_hi_type(aval):
        return _compat.zeros(aval)
    arrays = jax.tree.map(_compat.zeros, Raise(aval).in_avals)
    return Raise(aval)(*arrays)


def zeros_like(value: Any) -> Any:
    return zeros(jax.typeof(value)) if _compat.is_hi(value) else jnp.zeros_like(value)
