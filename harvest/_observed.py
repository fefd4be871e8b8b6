"""What can be seen of where an array is on a mesh: of values, tracers, types and sites."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from . import _compat
from ._site import Site
from ._structure import is_array

Partitions = tuple[tuple[str, ...], ...]  # for each axis of an array, the mesh axes that split it


class Observed(NamedTuple):
    """An array, as far as it can be seen how it is split over a mesh."""

    shape: tuple[int, ...]  # in a `shard_map`, of one shard
    dtype: Any
    sizes: dict[str, int] | None = None  # of the axes of the mesh; None if it is on none
    partitions: Partitions = ()  # by axes that are not manual; what is left out is not split
    unseen: frozenset[str] | None = frozenset()  # mesh axes of which it says nothing; None: of all
    manual: frozenset[str] = frozenset()  # mesh axes of the `shard_map`s around
    varying: frozenset[str] | None = frozenset()  # which of those it varies over; None: not told
    assembled: Partitions | None = None  # of the global array, where a shard was sown with a `spec`

    @property
    def named(self) -> frozenset[str]:
        """The mesh axes over which it is seen to be split."""
        return (self.varying or frozenset()).union(*self.partitions)

    @property
    def whole(self) -> bool:
        """Whether nothing is left unseen."""
        return self.unseen == frozenset() and self.varying is not None

    def global_shape(self, spec: PartitionSpec) -> tuple[int, ...]:
        """That of the array of which this is a shard, if it is split as `spec` says."""
        shape = list(self.shape)
        for axis, names in enumerate(partitions_of(spec)):
            for name in self.manual.intersection(names):
                shape[axis] *= (self.sizes or {})[name]
        return tuple(shape)

    def misfit(self, spec: PartitionSpec) -> str:
        """What is seen that `spec` does not say, or the other way around; empty if nothing."""
        wanted = partitions_of(spec)
        names = frozenset[str]().union(*wanted)
        if len(wanted) > len(self.shape):
            return f"this array has {len(self.shape)} dimensions, and {spec} has {len(wanted)}"
        if self.sizes is not None and (unknown := sorted(names - {*self.sizes})):
            return f"the mesh has no axis {unknown[0]!r}, but {tuple(self.sizes)}"
        if self.varying is not None and self.varying != names & self.manual:
            return (
                f"this shard varies over {_axes(self.varying)}, and {spec} wants one that varies "
                f"over exactly {_axes(names & self.manual)}"
            )
        if self.unseen is None:
            return ""
        if self.assembled is not None and self.assembled != _without(wanted, frozenset()):
            return f"shards of this array are assembled as {_spec(self.assembled)}, not as {spec}"
        ignored = self.unseen | self.manual | self._trivial
        if _without(self.partitions, ignored) != _without(wanted, ignored):
            got = "on one device" if self.sizes is None else f"sharded as {_spec(self.partitions)}"
            return f"this array is {got}, not as {spec}"
        return ""

    @property
    def _trivial(self) -> frozenset[str]:
        """Mesh axes of size 1, which JAX may leave out of a sharding."""
        return frozenset(name for name, size in (self.sizes or {}).items() if size == 1)


class StandIn:
    """What `isinstance` takes for an array of a type, without there being one."""

    __slots__ = ("dtype", "observed", "shape")

    def __init__(self, observed: Observed, shape: tuple[int, ...] | None = None):
        self.shape = observed.shape if shape is None else shape
        self.dtype, self.observed = observed.dtype, observed

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return jax.Array

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def observe(x: Any) -> Observed | None:
    """What can be seen of an array, or of a type; None for anything else."""
    if type(x) is StandIn:
        return x.observed
    if isinstance(x, jax.ShapeDtypeStruct):
        return _of_type(x)
    if not is_array(x) or _compat.is_hi(x):
        return None
    if isinstance(x, np.ndarray | np.generic) and not _compat.manual_axes():
        return Observed(x.shape, x.dtype)
    aval = jax.typeof(x)
    if _compat.manual_axes():
        return _of_shard(aval)
    if isinstance(x, jax.core.Tracer):
        return _of_type(aval)
    return _of_sharding(aval, x.sharding)


def leaves_of(site: Site) -> Iterator[tuple[Any, Observed | None]]:
    """The leaves of the type of a site, with what can be seen of each."""
    leaves = jax.tree.leaves(site.aval)
    shardings = jax.tree.leaves(site.sharding, is_leaf=lambda node: node is None)
    if len(shardings) != len(leaves):
        shardings = [None] * len(leaves)
    is_stacked = any(axis.kind == "mesh" for axis in site.axes)
    for leaf, sharding in zip(leaves, shardings, strict=True):
        observed = observe(leaf)
        if observed is not None and observed.manual:
            observed = _of_site(observed, sharding, is_stacked)
        yield leaf, observed


def _of_site(shard: Observed, collected: NamedSharding | None, is_stacked: bool) -> Observed:
    """What the sharding of the collected array tells of its shards besides."""
    if is_stacked or collected is None:
        # Without `check_vma` the type of a shard says nothing.
        return shard if shard.varying or not is_stacked else shard._replace(varying=None)
    # By the `spec` that it is sown with; axes of loops and batches are in front.
    own = partitions_of(collected.spec)[-len(shard.shape) :] if shard.shape else ()
    named = frozenset[str]().union(*own) & shard.manual
    return shard._replace(varying=shard.varying or named, assembled=_without(own, frozenset()))


def is_definite(spec: PartitionSpec) -> bool:
    """Whether a spec says for each axis how it is split, and nothing else."""
    is_free = PartitionSpec.UNCONSTRAINED in spec.partitions
    return not (is_free or spec.unreduced or spec.reduced)


def partitions_of(spec: PartitionSpec) -> Partitions:
    """The mesh axes in each item of a spec. (One that has unreduced axes cannot be iterated.)"""
    return tuple(map(_names, spec.partitions))


def _names(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()


def _of_type(aval: Any) -> Observed:
    """What a type says: of explicit axes all, of automatic ones nothing."""
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return Observed(aval.shape, aval.dtype, unseen=None)
    mesh = sharding.mesh
    if isinstance(mesh, Mesh):
        return _of_sharding(aval, sharding)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = frozenset(name for name, kind in kinds.items() if kind == AxisType.Manual)
    unseen = frozenset(name for name, kind in kinds.items() if kind == AxisType.Auto)
    partitions = _without(partitions_of(sharding.spec), unseen | manual)
    return Observed(
        aval.shape,
        aval.dtype,
        dict(mesh.shape),
        partitions,
        unseen,
        manual,
        _compat.varying(aval),
    )


def _of_shard(aval: Any) -> Observed:
    """What is seen inside a `shard_map`; of what comes from outside, every shard has all."""
    mesh = jax.sharding.get_abstract_mesh()
    # A constant of another mesh, or of none, is there as a whole.
    is_constant = not aval.sharding.mesh.manual_axes
    observed = Observed(aval.shape, aval.dtype) if is_constant else _of_type(aval)
    varying = _compat.varying(aval)
    told = bool(varying) or _compat.checks_varying()
    return observed._replace(
        sizes=dict(mesh.shape),
        manual=frozenset(mesh.manual_axes),
        varying=varying if told else None,
    )


def _of_sharding(aval: Any, sharding: Sharding) -> Observed:
    """What the sharding of an array says, which is all."""
    if isinstance(sharding, NamedSharding):
        partitions = partitions_of(sharding.spec)
        return Observed(aval.shape, aval.dtype, dict(sharding.mesh.shape), partitions)
    alike = sharding.is_fully_replicated
    return Observed(aval.shape, aval.dtype, unseen=frozenset() if alike else None)


def _without(partitions: Partitions, names: frozenset[str]) -> Partitions:
    """The partitions by other mesh axes, up to the last axis that is split."""
    kept = [tuple(name for name in entry if name not in names) for entry in partitions]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _axes(names: frozenset[str]) -> str:
    return f"the mesh axes {sorted(names)}" if names else "no mesh axis"


def _spec(partitions: Partitions) -> PartitionSpec:
    entries = (names if len(names) > 1 else next(iter(names), None) for names in partitions)
    return PartitionSpec(*entries)
