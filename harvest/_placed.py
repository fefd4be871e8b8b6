"""Whether a spec fits an array, on the mesh axes that a `shard_map` makes manual."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from . import _compat
from ._annotated_specs import Unread
from ._errors import ShardingError
from ._mapped_specs import Leaf
from ._observed import partitions_of


def axes_of(spec: Any) -> frozenset[str]:
    """The mesh axes that a spec names."""
    partitions = partitions_of(spec) if isinstance(spec, PartitionSpec) else ()
    return frozenset[str]().union(*partitions)


class Placed(NamedTuple):
    """The mesh axes that a `shard_map` makes manual, with their sizes."""

    mesh: Any
    axes: frozenset[str]

    @staticmethod
    def on(mesh: Any, axis_names: frozenset[str]) -> "Placed":
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        if mesh.empty:
            raise ShardingError(
                "`filter_shard_map` has no mesh: give it one, or set it by `jax.set_mesh`"
            )
        if unknown := sorted(axis_names - {*mesh.axis_names}):
            raise ShardingError(
                f"`axis_names` has {unknown[0]!r}; the axes of the mesh are {mesh.axis_names}"
            )
        free = {*mesh.axis_names} - {*getattr(mesh, "manual_axes", ())}
        return Placed(mesh, axis_names or frozenset(free))

    def inferred(self, value: Any) -> PartitionSpec | None:
        """How an array is split already, where its type says so: if all axes are explicit."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if any(kinds[axis] != AxisType.Explicit for axis in self.axes) or _compat.is_hi(value):
            return None
        sharding = jax.typeof(value).sharding
        entries = [
            tuple(n for n in names if n in self.axes) for names in partitions_of(sharding.spec)
        ]
        return PartitionSpec(*(names or None for names in entries))

    def check_axes(self, spec: Any, where: str) -> None:
        """Raise if a spec names an axis that does not become manual."""
        if unknown := sorted(axes_of(spec) - self.axes):
            raise ShardingError(
                f"{where}; there is no axis {unknown[0]!r}, but {sorted(self.axes)}"
            )

    def checked(self, spec: Any, array: Leaf, what: str, divides: bool = False) -> Any:
        """The spec itself, if it fits; of arguments, it also has to divide the array."""
        if spec is None:
            raise ShardingError(
                f"`{what}` says no spec for {array.describe()}: give one, or one for all that is "
                "left (`...: P()`), or annotate it by `harvest.Sharded`"
            )
        if isinstance(spec, Unread):
            raise ShardingError(
                f"`{what}` says no spec for {array.describe()}, and its annotation {spec.text!r} "
                f"cannot be evaluated ({spec.error}): give one, or import at run time what it needs"
            )
        if not isinstance(spec, PartitionSpec):
            return spec
        where = f"`{what}` has the spec {spec} for {array.describe()}"
        wanted, shape = partitions_of(spec), jax.typeof(array.value).shape
        self.check_axes(spec, where)
        if len(wanted) > len(shape):
            raise ShardingError(f"{where}; wanted at most one item for each of its axes")
        for size, names in zip(shape if divides else (), wanted, strict=False):
            shards = math.prod(self.mesh.shape[name] for name in names)
            if size % shards:
                raise ShardingError(f"{where}; {size} cannot be divided into {shards} shards")
        return spec
