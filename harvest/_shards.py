"""How values inside a `shard_map`, which are shards, look from outside of it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from . import _compat, _types
from ._structure import Structure, is_array


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the shards of one array make up the global one."""

    spec: Any  # of the global array, one item for each axis; or a `HiPspec`
    axis: int | None = None  # of the global array, the one on which shards are stacked

    @property
    def stacked(self) -> tuple[str, ...]:
        """The mesh axes along which shards are stacked."""
        return () if self.axis is None else _names(self.spec[self.axis])

    def aligned(self, ndim: int) -> "Layout":
        """That of an array with more axes in front, or with fewer."""
        if not isinstance(self.spec, PartitionSpec):
            return self
        more = ndim - len(self.spec)
        spec = PartitionSpec(*(None,) * more, *tuple(self.spec)[max(0, -more) :])
        return Layout(spec, None if self.axis is None else self.axis + more)

    def enter(self, shard: Any) -> Any:
        """What there is inside, from an argument of the body."""
        return shard if self.axis is None else jnp.squeeze(shard, self.axis)

    def leave(self, shard: Any) -> Any:
        """What the body returns, from what there is inside."""
        return shard if self.axis is None else jnp.expand_dims(shard, self.axis)


WHOLE = Layout(PartitionSpec())  # every shard has all of it


class Shards(NamedTuple):
    """One `shard_map` around a site."""

    mesh: Any
    axes: tuple[str, ...]  # that become manual by it, in the order of the mesh
    check_vma: bool

    @property
    def options(self) -> dict[str, Any]:
        """For `jax.shard_map`."""
        # Without names, `jax.shard_map` would take all that are not manual yet.
        names = self.axes or tuple(self.mesh.manual_axes)
        return {"mesh": self.mesh, "axis_names": set(names), "check_vma": self.check_vma}

    @property
    def unchecked(self) -> frozenset[str]:
        """The mesh axes of `shard_map`s around, along which values inside of this one may differ.

        With `check_vma=False` the types of what comes out of it say nothing of those either.
        """
        outer = frozenset(self.mesh.manual_axes) - {*self.axes}
        return frozenset() if self.check_vma else outer

    def differing(self, varying: frozenset[str]) -> tuple[str, ...]:
        """The mesh axes along which shards of a value may differ."""
        return tuple(axis for axis in self.axes if axis in varying or not self.check_vma)

    def size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def obstacle(self, aval: Any, spec: Any, alone: bool) -> str | None:
        """Where a value is, if there is no layout for it; `alone`: without loops or `vmap`."""
        if _compat.is_hi_type(aval):
            if spec is None:
                return f"a `shard_map`, of the hi type {aval}, without a `spec` (its `HiPspec`)"
            return (
                None if alone else "a loop in a `shard_map`, of a hi type, whose spec is not that"
            )
        if unfinished := sorted(_compat.partly_reduced(aval)):
            return f"a `shard_map`, and unreduced or reduced over the mesh axes {unfinished}"
        for entry in spec or ():
            names = _names(entry)
            mine = tuple(name for name in names if name in self.axes)
            outer = [name for name in names if name in self.mesh.manual_axes and name not in mine]
            if mine and outer and names[-len(mine) :] != mine:
                return f"a `shard_map` over {mine}, of which its spec has {outer} inside"
        return None

    def layout(self, aval: Any, own: int, spec: Any) -> Layout:
        """That of a value whose last axes are its own, and the others those of loops and batches.

        By its `spec`; or stacked on a new axis, if its shards differ.
        """
        if _compat.is_hi_type(aval):
            return Layout(spec)
        if spec is None:
            return self.stacking(aval, len(aval.shape) - own)
        return self.by_spec(spec, own).aligned(len(aval.shape))

    def by_spec(self, spec: PartitionSpec, own: int) -> Layout:
        """That of an array with as many axes, whose shards make up the global one by its spec."""
        mine = [_entry(tuple(n for n in _names(entry) if n in self.axes)) for entry in spec]
        return Layout(PartitionSpec(*mine, *(None,) * (own - len(mine))))

    def stacking(self, aval: Any, front: int) -> Layout:
        """That of an array whose shards make up nothing else: they are stacked behind its front."""
        return self.stacked(self.differing(_compat.varying(aval)), front, len(aval.shape))

    def stacked(self, axes: tuple[str, ...], front: int, ndim: int) -> Layout:
        """That of an array of which each shard has `ndim` axes, and which differ along `axes`."""
        behind = (None,) * (ndim - front)
        if not axes:
            return Layout(PartitionSpec(*(None,) * ndim))
        return Layout(PartitionSpec(*(None,) * front, _entry(axes), *behind), front)

    def outside(self, aval: Any, layout: Layout) -> Any:
        """The type of the global array."""
        if _compat.is_hi_type(aval):
            return aval.unshard(self.mesh, self.check_vma, layout.spec)
        shape = list(aval.shape)
        # By mesh axes that stay explicit inside.
        inner = [dim.partition for dim in _types.dims(aval)]
        if layout.axis is not None:
            shape.insert(layout.axis, 1)
            inner.insert(layout.axis, None)
        pairs = zip(shape, layout.spec, strict=True)
        shape = [size * self.size(_names(entry)) for size, entry in pairs]
        merged = [_merged(a, b) for a, b in zip(layout.spec, inner, strict=True)]
        rest = frozenset(a for a in _compat.varying(aval) if a not in self.axes)
        sharding = NamedSharding(self.mesh, PartitionSpec(*merged))
        return _types.array_type(shape, aval.dtype, aval.weak_type, sharding, rest)

    def within(self, fn: Callable[[Any], Any], held: Any) -> Any:
        """`fn(held)` as it is inside, where its axes have names. For types, not for values.

        Every shard has all of the arrays in `held`, which `fn` must not close over.
        """
        arrays, rest = Structure.flatten(held, is_array)
        types = [_types.array_type(a.shape, a.dtype, a.weak_type) for a in map(jax.typeof, arrays)]
        results = []

        def body(arrays: list[Any]) -> tuple[()]:
            results.append(fn(rest.unflatten(arrays)))
            return ()

        whole = [WHOLE.spec] * len(types)
        mapped = jax.shard_map(body, in_specs=(whole,), out_specs=(), **self.options)
        jax.eval_shape(mapped, types)
        return results[0]

    def around(
        self, fn: Callable[[Sequence[Any]], list[Any]], layouts: Sequence[Layout]
    ) -> Callable[[Sequence[Any]], list[Any]]:
        """`fn` of shards, as a function of the global arrays that they make up."""

        def mapped(values: Sequence[Any]) -> list[Any]:
            pairs = zip(layouts, values, strict=True)
            mine = [layout.aligned(value.ndim) for layout, value in pairs]

            def body(values: Sequence[Any]) -> list[Any]:
                shards = fn([layout.enter(x) for layout, x in zip(mine, values, strict=True)])
                return [layout.leave(x) for layout, x in zip(mine, shards, strict=True)]

            specs = [layout.spec for layout in mine]
            return jax.shard_map(body, in_specs=(specs,), out_specs=specs, **self.options)(values)

        return mapped

    def placed(self, value: Any, spec: Any) -> Any:
        """Where axes of the mesh are explicit, `shard_map` wants an argument sharded as it says."""
        if not isinstance(spec, PartitionSpec):
            return value
        # Axes that do not become manual here may split it as well.
        given = [_names(dim.partition) for dim in _types.dims(jax.typeof(value))]
        other = [_entry(tuple(n for n in names if n not in self.axes)) for names in given]
        pairs = itertools.zip_longest(spec, other)
        spec = PartitionSpec(*(_merged(a, b) for a, b in pairs))
        return _compat.placed(value, NamedSharding(self.mesh, spec))


def inside(around: Sequence[Shards], fn: Callable[[Any], Any], held: Any) -> Any:
    """`fn(held)` as it is inside all of these, the outermost first; see `Shards.within`."""
    for shards in reversed(around):
        fn = functools.partial(shards.within, fn)
    return fn(held)


def axes_named_in(spec: Any) -> frozenset[str]:
    """The mesh axes that a `PartitionSpec` names; of anything else, none."""
    entries = spec if isinstance(spec, PartitionSpec) else ()
    return frozenset(axis for entry in entries for axis in _names(entry))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _merged(a: Any, b: Any) -> Any:
    return _entry((*_names(a), *_names(b)))


def _entry(names: tuple[str, ...]) -> Any:
    """An item of a spec, as JAX writes it."""
    return names if len(names) > 1 else next(iter(names), None)
