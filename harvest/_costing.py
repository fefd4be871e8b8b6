"""Counts the bytes of collected values: what `Sites.cost` does."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from . import _types
from ._cost import Cost, SiteCost, per_token
from ._cost_specs import Split, splits_of
from ._entry import CondSum
from ._errors import ShardingError
from ._footprint import Array
from ._site import Site


def cost_of(sites: Sequence[Site], mesh: Any, specs: Any, tokens: Any, dtype: Any) -> Cost:
    """See `Sites.cost`."""
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise ShardingError(
            f"`cost` got the mesh {mesh!r} of type `{type(mesh).__name__}`; wanted a "
            "`jax.sharding.Mesh`, or a `jax.sharding.AbstractMesh` as `AbstractMesh((64, 8), "
            "('data', 'model'))`"
        )
    tokens = None if tokens is None else _count(tokens)
    dtype = None if dtype is None else _floating(dtype)
    rows = zip(sites, splits_of(sites, specs, mesh), strict=True)
    devices = None if mesh is None else mesh.size
    return Cost([_of_site(*row, tokens, dtype) for row in rows], devices, tokens)


def _count(tokens: Any) -> Any:
    """A number, from one of numpy or JAX too; or a size of a shape polymorphic program."""
    try:
        tokens = (
            tokens.item() if isinstance(tokens, np.generic | np.ndarray | jax.Array) else tokens
        )
        no_count = isinstance(tokens, bool) or (isinstance(tokens, float) and math.isinf(tokens))
        if not no_count and tokens >= 1:
            return tokens
    except (TypeError, ValueError):  # it is no number
        pass
    raise ValueError(
        f"`cost` got tokens={tokens!r}; wanted how many tokens one call processes: the size of the "
        "batch times the length of its sequences"
    )


def _floating(dtype: Any) -> Any:
    try:
        known = jax.dtypes.canonicalize_dtype(dtype)  # `float` is what JAX makes of it
    except (TypeError, ValueError):  # those with types of their own, as keys have
        known = None
    # numpy has floats of more bits than any array of JAX.
    if known is None or not jnp.issubdtype(known, jnp.floating) or known.itemsize > 8:
        raise ValueError(
            f"`cost` got dtype={dtype!r}; wanted the floating-point dtype as which values of such "
            "dtypes are stored, as `jax.numpy.bfloat16` (others keep theirs)"
        )
    return known


@dataclasses.dataclass(frozen=True)
class _Stored:
    """An array as it is stored. (No pytree: it is a leaf.)"""

    array: Array
    split: Split
    dtype: Any

    @staticmethod
    def of(array: Array, split: Split, dtype: Any) -> "_Stored":
        own = array.type.dtype
        # What is in a value of a hi type is its own affair.
        cast = dtype is not None and array.number is None and jnp.issubdtype(own, jnp.floating)
        return _Stored(array, split, dtype if cast else own)

    @property
    def whole(self) -> list[tuple[Any, int]]:
        """For each axis its size, and into how many parts it is split."""
        return list(zip(self.array.type.shape, self.split.parts, strict=True))

    @property
    def folded(self) -> list[tuple[Any, int]]:
        """The same after a fold."""
        parts = [1 if axis is None else self.split.parts[axis] for axis in self.array.axes]
        return list(zip(self.array.folded.shape, parts, strict=True))

    def nbytes(self, axes: Sequence[tuple[Any, int]]) -> Any:
        return math.prod(size for size, _ in axes) * self.dtype.itemsize

    def per_device(self, axes: Sequence[tuple[Any, int]]) -> Any:
        shard = [size if part == 1 else size // part for size, part in axes]
        return math.prod(shard) * self.dtype.itemsize

    def described(self, loops: Sequence[int | None]) -> str:
        """Its type, with a `?` for the length of a `while_loop`."""
        shape = [*self.array.type.shape]
        if self.array.loops == sum(loop is not None for loop in loops):
            shape[: self.array.loops] = ["?" if loop is None else loop for loop in loops]
        dtype = _types.short(jax.ShapeDtypeStruct((), self.dtype)).removesuffix("[]")
        return f"{dtype}[{','.join(map(str, shape))}]"


def _of_site(site: Site, splits: Sequence[Split], tokens: Any, dtype: Any) -> SiteCost:
    rest = iter(splits)
    of_leaf = lambda leaf: _Stored.of(leaf, next(rest), dtype) if isinstance(leaf, Array) else leaf
    tree = jax.tree.map(of_leaf, site._collected)
    whole, folded = list(_whole(tree)), list(_folded(tree))
    loops = tuple(axis.size for axis in site.axes if axis.kind == "loop")
    nbytes = sum(s.nbytes(s.whole) for s in whole)
    nbytes_folded = sum(s.nbytes(s.folded) for s in folded)
    return SiteCost(
        key=site.key,
        occurrence=site.occurrence,
        source=site.source,
        type=" ".join(
            leaf.described(loops) if isinstance(leaf, _Stored) else str(leaf)
            for leaf in jax.tree.leaves(tree)
        ),
        loops=loops,
        spec=jax.tree.map(
            lambda leaf: leaf.split.spec if isinstance(leaf, _Stored) else None, tree
        ),
        nbytes=nbytes,
        nbytes_folded=nbytes_folded,
        nbytes_per_device=sum(s.per_device(s.whole) for s in whole),
        nbytes_folded_per_device=sum(s.per_device(s.folded) for s in folded),
        nbytes_per_token=per_token(nbytes, tokens),
        nbytes_folded_per_token=per_token(nbytes_folded, tokens),
    )


def _whole(tree: Any) -> Iterator[_Stored]:
    return (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, _Stored))


def _folded(tree: Any) -> list[_Stored]:
    """What is there after a fold: branches of a `cond` update one state, if they have one type."""
    index = getattr(tree, "index", None)
    if not (isinstance(tree, CondSum) and isinstance(index, _Stored) and index.array.chooses):
        return list(_whole(tree))
    branches = [_folded(branch) for branch in tree.branches if branch is not None]
    types = [[(s.array.folded.shape, s.dtype) for s in branch] for branch in branches]
    if all(row == types[0] for row in types):
        return branches[0]
    return list(itertools.chain.from_iterable(branches))
