"""How collected values are split over a mesh: as a user says, or else as their types do."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.hijax import HiPspec
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from . import _types
from ._entry import CondSum
from ._errors import ShardingError
from ._footprint import Array
from ._select import check_chosen, check_found, check_select, matches
from ._site import Site

_WANTED = (
    "a `jax.sharding.PartitionSpec` or a sharding, or a mapping from keys to these (or to pytrees "
    "of these, like the values)"
)


class Split(NamedTuple):
    """How an array is split."""

    spec: Any
    parts: tuple[int, ...]  # into how many, along each axis


def splits_of(sites: Sequence[Site], specs: Any, mesh: Any) -> list[list[Split]]:
    """For each site, how each of its arrays is split."""
    counts = collections.Counter(site.key for site in sites)
    rows = zip(sites, _told(specs, sites), strict=True)
    return [_of_site(site, given, counts[site.key], mesh) for site, given in rows]


def _told(specs: Any, sites: Sequence[Site]) -> list[Any]:
    """What is told of each site; None if nothing is."""
    if not isinstance(specs, Mapping):
        if not _is_spec(specs):
            got = f"{_brief(specs)} of type `{type(specs).__name__}`"
            raise ShardingError(f"`cost` got the specs {got}; wanted {_WANTED}")
        return [specs] * len(sites)
    keys = {site.key: site.source for site in sites}
    told: list[Any] = [None] * len(sites)
    for given, spec in reversed(list(specs.items())):  # the first one counts
        select = check_select(given, "specs")
        check_found(select, keys, "cost")
        chosen = [number for number, site in enumerate(sites) if matches(select, site, keys)]
        check_chosen(select, chosen, keys, "cost")
        for number in chosen:
            told[number] = spec
    return told


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | HiPspec | Sharding)


def _of_site(site: Site, given: Any, count: int, mesh: Any) -> list[Split]:
    tree = site._collected
    where = f"{site.key!r} (sown at {site.source})"
    leaves = _for_each_leaf(given, tree)
    if leaves is None and isinstance(given, tuple) and len(given) == count:
        leaves = _for_each_leaf(given[site.occurrence], tree)  # as `capture` returns it
    if leaves is None:
        outline = jax.tree.structure(tree)
        raise ShardingError(
            f"`cost` got the spec {_brief(given)} for {where}, which is no prefix of its value, "
            f"{outline}; wanted {_WANTED}"
        )
    pairs = zip(leaves, jax.tree_util.tree_leaves_with_path(tree), strict=True)
    return [
        _Leaf(leaf, f"{where}, {_types.short(leaf.type)}{jax.tree_util.keystr(path)}").split(
            spec, mesh
        )
        for spec, (path, leaf) in pairs
        if isinstance(leaf, Array)
    ]


def _for_each_leaf(given: Any, tree: Any) -> list[Any] | None:
    """What is given for each leaf of a tree; None if that is no prefix of it."""
    try:
        full = jax.tree.broadcast(_spelled_out(given, tree), tree, is_leaf=_is_spec)
        leaves = jax.tree.structure(tree).flatten_up_to(full)
    except ValueError:
        return None
    return leaves if all(map(_is_spec, leaves)) else None


def _spelled_out(given: Any, tree: Any) -> Any:
    """One spec for a `CondSum` is that of its values; its index has the axes of loops only."""
    is_one = isinstance(given, PartitionSpec | NamedSharding)
    if not (is_one and isinstance(tree, CondSum) and getattr(tree.index, "chooses", False)):
        return given
    spec = given.spec if isinstance(given, NamedSharding) else given
    loops = spec.update(partitions=spec.partitions[: len(tree.index.type.shape)])
    if isinstance(given, NamedSharding):
        loops = NamedSharding(given.mesh, loops)
    return CondSum(loops, tuple(b and _spelled_out(given, b) for b in tree.branches))


@dataclasses.dataclass(frozen=True)
class _Leaf:
    array: Array
    where: str

    def split(self, given: Any, mesh: Any) -> Split:
        if given is None:
            return self._by_type(mesh)
        if isinstance(given, HiPspec):
            given = self._of_hi(given)
        if isinstance(given, NamedSharding):
            given, mesh = given.spec, given.mesh if mesh is None else mesh
        if isinstance(given, Sharding):
            return self._by_sharding(given)
        return self._by_spec(given, mesh)

    def _by_type(self, mesh: Any) -> Split:
        dims = _types.dims(self.array.type)
        parts = tuple(1 if dim.mesh is None else self._of_dim(dim, mesh) for dim in dims)
        is_whole = all(part == 1 for part in parts)
        return Split(PartitionSpec() if is_whole else self.array.type.sharding.spec, parts)

    def _of_dim(self, dim: _types.Dim, mesh: Any) -> int:
        sizes = {name: dim.mesh.shape[name] for name in _names(dim.partition)}
        for name, size in sizes.items():
            given = size if mesh is None else mesh.shape.get(name)
            if given != size:
                has = "no such axis" if given is None else f"one of size {given}"
                raise ShardingError(
                    f"`cost`: the type of {self.where}, is split over the mesh axis {name!r} of "
                    f"size {size}, and `mesh` has {has}: trace the function with the mesh that is "
                    "to be planned for (an `AbstractMesh` will do), or tell by `specs` how the "
                    "value is split"
                )
        return math.prod(sizes.values())

    def _of_hi(self, given: HiPspec) -> Any:
        low, number = given.to_lo(), self.array.number
        if number is None or number >= len(low):
            wanted = "a `jax.sharding.PartitionSpec`" if number is None else "that of its hi type"
            raise ShardingError(f"`cost` got the spec {given} for {self.where}; wanted {wanted}")
        return low[number]

    def _by_sharding(self, sharding: Sharding) -> Split:
        shape = self.array.type.shape
        try:
            shard = sharding.shard_shape(shape)
        except (ValueError, TypeError) as error:
            raise ShardingError(
                f"`cost` got the sharding {sharding} for {self.where}: {error}"
            ) from None
        parts = tuple(size // part if part else 1 for size, part in zip(shape, shard, strict=True))
        return Split(PartitionSpec() if all(p == 1 for p in parts) else sharding, parts)

    def _by_spec(self, spec: PartitionSpec, mesh: Any) -> Split:
        shape, partitions = self.array.type.shape, spec.partitions
        where = f"`cost` got the spec {spec} for {self.where}"
        if len(partitions) > len(shape):
            raise ShardingError(
                f"{where}; wanted at most one item for each of its {len(shape)} axes (those of "
                "loops come first, then those of batches, then its own)"
            )
        seen: set[Any] = set()
        parts = []
        for size, partition in zip(shape, partitions, strict=False):
            names = _names(partition)
            if partition is PartitionSpec.UNCONSTRAINED:
                raise ShardingError(f"{where}; wanted one with nothing that is unconstrained")
            for name in names:
                if mesh is None or name not in mesh.shape:
                    axes = "there is no mesh: pass one, `cost(mesh, ...)`"
                    if mesh is not None:
                        axes = f"the mesh has no axis {name!r}; its axes: {_axes(mesh)}"
                    raise ShardingError(f"{where}; {axes}")
                if name in seen:
                    raise ShardingError(f"{where}, which names the mesh axis {name!r} twice")
                seen.add(name)
            part = math.prod(mesh.shape[name] for name in names)
            rest = size % part
            if isinstance(rest, int) and rest:  # of a symbolic size it may not be known
                raise ShardingError(
                    f"{where}: its axis {len(parts)} of size {size} cannot be split into {part}, "
                    f"by the mesh axes {_axes(mesh, names)}"
                )
            parts.append(part)
        return Split(spec, (*parts, *(1,) * (len(shape) - len(parts))))


def _names(partition: Any) -> tuple[Any, ...]:
    if partition is None or partition is PartitionSpec.UNCONSTRAINED:
        return ()
    return partition if isinstance(partition, tuple) else (partition,)


def _brief(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 200 else text[:197] + "..."


def _axes(mesh: Any, names: Any = None) -> str:
    names = mesh.shape if names is None else names
    return ", ".join(f"{name!r} (of size {mesh.shape[name]})" for name in names) or "none"
