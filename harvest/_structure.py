"""Pytrees as dynamic leaves and a hashable rest."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from . import _compat


class _Hole:
    """Where a dynamic leaf belongs."""

    def __repr__(self) -> str:
        return "*"


HOLE = _Hole()


def is_array(leaf: Any) -> TypeGuard[jax.Array]:
    """A leaf that JAX computes with: arrays of JAX and numpy, and values of hi types."""
    if isinstance(leaf, np.ndarray | np.generic):
        # Text, objects, dates and records are no types of JAX's; `float0` is.
        known = leaf.dtype.kind not in "OSUMm" and leaf.dtype.type is not np.void
        return known or leaf.dtype == jax.dtypes.float0
    return isinstance(leaf, jax.Array) or _compat.is_hi(leaf)


def is_held(leaf: Any) -> bool:
    """A leaf of a callable that is traced: arrays and mutable references."""
    return is_array(leaf) or _compat.is_ref(leaf)


def is_traced(leaf: Any) -> bool:
    """A leaf of an argument that is traced: arrays, mutable references, and Python floats.

    Ints, bools, strings and other objects are static. (A float in a model is static as well, as
    Equinox has it: models branch on theirs.)
    """
    return isinstance(leaf, float | complex) or is_held(leaf)


def is_typed(leaf: Any) -> bool:
    """As `is_traced`, where nothing runs, and a type may stand for an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray) or is_traced(leaf)


class Structure:
    """A pytree without its dynamic leaves: its treedef, and the static leaves in their places.

    Equal structures have equal static leaves of equal types (`1`, `1.0` and `True` differ).
    """

    __slots__ = ("_hash", "statics", "treedef", "unhashable")

    def __init__(self, treedef: Any, statics: Sequence[Any]):
        self.treedef = treedef
        self.statics = tuple(statics)
        parts = (treedef, *self.statics)
        hashes = tuple(map(_hash_of, parts))
        # What a key of a cache must not contain, for a change in it would go unnoticed.
        self.unhashable = [p for p, h in zip(parts, hashes, strict=True) if h is None]
        self._hash = hash((hashes, tuple(map(type, parts))))

    @staticmethod
    def flatten(value: Any, is_dynamic: Callable[[Any], bool]) -> tuple[list[Any], "Structure"]:
        leaves, treedef = jax.tree.flatten(value)
        return Structure.split(leaves, treedef, [is_dynamic(leaf) for leaf in leaves])

    @staticmethod
    def split(
        leaves: Sequence[Any], treedef: Any, dynamic: Sequence[bool]
    ) -> tuple[list[Any], "Structure"]:
        statics = [HOLE if d else leaf for d, leaf in zip(dynamic, leaves, strict=True)]
        kept = [leaf for d, leaf in zip(dynamic, leaves, strict=True) if d]
        return kept, Structure(treedef, statics)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        leaves = iter(leaves)
        filled = [next(leaves) if s is HOLE else s for s in self.statics]
        return jax.tree.unflatten(self.treedef, filled)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Structure)
            and self._hash == other._hash
            and self.treedef == other.treedef
            and all(map(same_static, self.statics, other.statics))
        )

    def __repr__(self) -> str:
        return str(jax.tree.unflatten(self.treedef, self.statics))


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree as its dynamic leaves: its static leaves travel in its treedef.

    So that it can leave a `jit`, or a loop.
    """

    def __init__(self, leaves: list[Any], structure: Structure):
        self.leaves, self.structure = leaves, structure

    @classmethod
    def pack(cls, value: Any, is_dynamic: Callable[[Any], bool] = is_array) -> "Packed":
        return cls(*Structure.flatten(value, is_dynamic))

    def unflatten(self) -> Any:
        return self.structure.unflatten(self.leaves)

    def tree_flatten(self):
        return (self.leaves,), self.structure

    @classmethod
    def tree_unflatten(cls, structure, children):
        (leaves,) = children
        return cls(leaves, structure)


def _hash_of(part: Any) -> int | None:
    try:
        return hash(part)
    except TypeError:
        return None


def same_static(a: Any, b: Any) -> bool:
    """Whether two static leaves are equal and of one type."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


@jax.tree_util.register_pytree_with_keys_class
class Bound:
    """A partial whose function is a leaf, so that a cache need not keep it alive."""

    def __init__(self, func: Any, args: Any, keywords: Any):
        self.func, self.args, self.keywords = func, args, keywords

    @classmethod
    def of(cls, partial: Any) -> "Bound":
        func = partial.func
        inner = cls.of(func) if isinstance(func, functools.partial | eqx.Partial) else func
        return cls(inner, partial.args, partial.keywords)

    @property
    def __wrapped__(self) -> Any:
        return self.func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*self.args, *args, **{**self.keywords, **kwargs})

    def tree_flatten_with_keys(self):
        children = ((GetAttrKey(n), getattr(self, n)) for n in ("func", "args", "keywords"))
        return tuple(children), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Number:
    """A planted Python number: traced, so that a new one does not retrace."""

    value: Any

    def tree_flatten(self):
        return (jnp.asarray(self.value),), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)
