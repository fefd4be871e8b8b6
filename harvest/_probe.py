"""Edits that change nothing but derivatives: tangents enter, and cotangents leave, at sites."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import _compat, _hi_types, _types
from ._batching import Positions, over_examples
from ._edit_nodes import Branches, Chain, Each, Edit
from ._entry import Entry
from ._lowered import Lowered, raised, zeros
from ._reading import Mapped, Reading
from ._structure import HOLE, Packed, Structure, is_array


class Probe(Edit):
    """The identity of a value, with the derivative of `value + eps`.

    `eps` has a tangent for each array of the value, and None where it has no derivative. It is
    never read: in a compiled program it costs nothing.
    """

    eps: Any  # a list; in an `Each` if loops slice it

    def apply(self, value, context):
        leaves, structure = Structure.flatten(value, is_array)
        pairs = zip(leaves, raised(_sliced(self.eps)), strict=True)
        return structure.unflatten(v if e is None else with_tangent_of(v, e) for v, e in pairs)


@jax.custom_jvp
def with_tangent_of(value: Any, eps: Any) -> Any:
    """`value`, with the derivative of `value + eps`."""
    return value


@with_tangent_of.defjvp
def _(primals, tangents):
    tangent, entering = tangents
    if _compat.is_hi(tangent):
        tangent = jax.typeof(tangent).vspace_add(tangent, entering)
    elif tangent.dtype != jax.dtypes.float0:
        tangent = tangent + entering
    return with_tangent_of(*primals), tangent


class Push(Edit):
    """A tangent that is to enter at a site, as the user gives it."""

    value: Any


class ReducedProbe(Edit):
    """The identity of a value, where the cotangent of `eps` is a function of that of the value.

    So that in a loop only the result of the function is stacked. Beside it is a one: where nothing
    depends on the value there is no cotangent, and `eps` has zeros.
    """

    fn: Callable[[Any], Any]
    eps: Any  # a `Packed`; in an `Each` if loops slice it

    def apply(self, value, context):
        leaves, structure = Structure.flatten(value, is_array)
        arrays, static = eqx.partition(self.fn, is_array)
        positions = context.positions

        @jax.custom_vjp
        def identity(leaves, eps, arrays):
            return leaves

        def fwd(leaves, eps, arrays):
            return leaves, arrays

        def bwd(arrays, cts):
            cts = [ct if jnp.issubdtype(ct.dtype, jnp.inexact) else None for ct in cts]
            with _compat.mesh_of([jax.typeof(leaf) for leaf in leaves]):
                reduced = reducing(eqx.combine(arrays, static), structure, positions)(cts)
            return cts, reduced, None

        identity.defvjp(fwd, bwd)
        return structure.unflatten(identity(leaves, _sliced(self.eps), arrays))


def _sliced(eps: Any) -> Any:
    return eps.edit if isinstance(eps, Each) else eps


def reducing(fn: Callable[[Any], Any], structure: Structure, positions: Positions) -> Callable:
    """`fn` of a cotangent that is given by leaves, with their batch axes in front; and a one."""
    pair = lambda cts: Packed.pack((fn(as_tangent(structure, cts)), jnp.ones(())))
    return over_cotangents(pair, positions)


def over_cotangents(fn: Callable[[Any], Any], positions: Positions) -> Callable[[Any], Any]:
    """`fn(cts)`, mapped over the axes that `vmap` added in front; those of leaves that exist."""

    def mapped(cts: Sequence[Any]) -> Any:
        pairs = zip(cts, positions, strict=True)
        return over_examples(fn, [(None,) * len(p) if ct is None else p for ct, p in pairs])(cts)

    return mapped


class Branch(Mapped):
    """Nothing but, by the `cond` around the site, which branch ran.

    What is there can still be collected.
    """

    fn: Callable[[Any], Any] = lambda value: None

    def read(self, marker, leaves, loops):
        marker(*leaves)
        return super().read(marker, leaves, loops)


BRANCH = Reading((Branch(),), single=True)


def as_tangent(structure: Structure, leaves: Iterable[Any]) -> Any:
    """A pytree like a sown value, with None for leaves that have no derivative."""
    rest = iter(leaves)
    filled = [next(rest) if static is HOLE else None for static in structure.statics]
    return jax.tree.unflatten(structure.treedef, filled)


def is_probe(edit: Edit) -> bool:
    """Whether an edit leaves values as they are."""
    if isinstance(edit, Branches):
        return all(map(is_probe, edit.edits))
    return isinstance(edit, Probe | ReducedProbe) or (isinstance(edit, Chain) and not edit.edits)


def zeros_at(entry: Entry) -> Any:
    """A zero tangent of what is read at an entry: None for each leaf without derivative."""
    return jax.tree.map(zero_tangent, entry.type)


def zero_tangent(aval: Any) -> Any:
    """A zero tangent, to be differentiated: of a hi type as arrays.

    For JAX does not transpose a `cond`, nor a `checkpoint`, by an argument that has cotangents of a
    hi type.
    """
    tangent = _types.tangent_of(aval)
    if tangent is None:
        return None
    if _compat.is_array_type(tangent):
        return _compat.zeros(tangent)
    return as_arrays(zeros(tangent) if _hi_types.is_linear(tangent) else tangent.vspace_zero())


def as_arrays(tangent: Any) -> Any:
    """A tangent as arrays if it is of a hi type, and its arrays are linear in it."""
    hi = _compat.is_hi(tangent) and _hi_types.is_linear(jax.typeof(tangent))
    return Lowered.of(tangent) if hi else tangent


def has_derivative(aval: Any) -> bool:
    return _types.tangent_of(aval) is not None


def probing(
    entry: Entry, eps: Any, make: Callable[[Any], Edit] = Probe, outer: tuple[Any, ...] = ()
) -> Edit:
    """The edit for an entry with an `eps` of the form of `zeros_at`."""
    if not entry.sums:
        stacked = any(length is not None for length in (*outer, *entry.loops))
        return make(Each(eps) if stacked else eps)
    assert entry.branches is not None
    parts = eps.branches if entry.summed else (eps,) * len(entry.branches)
    outer = (*outer, *entry.around)
    return Branches(
        tuple(
            Chain(()) if branch is None else probing(branch, part, make, outer)
            for branch, part in zip(entry.branches, parts, strict=True)
        )
    )
