"""A place in a program where a value is sown: `Site`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax

from . import _compat, _types
from ._batching import batch_sizes
from ._entry import Entry
from ._footprint import arrays_of, collected, nbytes_of, nbytes_per_device, sharding_of
from ._structure import HOLE


class Axis(NamedTuple):
    """An axis that a structure around a site puts in front of its value.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        assert harvest.sites(f)(jnp.ones(3))["h"].axes == (harvest.Axis("loop", 3),)
        ```

    **Arguments:**

    - `kind`: `"loop"`, `"batch"` (of a `vmap`) or `"mesh"` (of a `shard_map`).
    - `size`: its length; None for a `while_loop`, whose length is not known.
    - `names`: of the axes of the mesh, for `"mesh"`: those along which the shards differ, which
        are stacked on this axis.
    """

    kind: Literal["loop", "batch", "mesh"]
    size: int | None
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in a program where a value is sown.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        (site,) = harvest.sites(lambda x: harvest.sow(x, name="h"))(jnp.ones((2, 3)))
        assert site.key == "h" and site.aval.shape == (2, 3) and site.nbytes == 24
        ```

    **Arguments:**

    - `key`: scope and name, joined by `/`.
    - `name`: as given to `sow`; of an equation, its number.
    - `scope`: the scopes around it, joined by `/`; empty outside any.
    - `occurrence`: how many sites of the same key came before.
    - `kind`: `"sow"`, or `"cotangent"` for one made by `perturb`.
    - `aval`: the type of the value as it is sown, in one iteration, for one example of a batch, in
        one shard: a pytree of `jax.ShapeDtypeStruct` and `HiType`, with static leaves as they are.
    - `axes`: what the structures around it put in front of that: [`harvest.Axis`][]s, those of
        loops outermost first, then those of batches, then those on which shards are stacked.
    - `branch`: the branches of the innermost `cond` around it that have it; `None` outside.
    - `source`: the file and line of the `sow`.
    - `nbytes`: the size of the collected value, in bytes, an integer unless the program is shape
        polymorphic; in a `while_loop`, of one iteration.
    - `sharding`: the `NamedSharding` of the collected value (on an abstract mesh), where its type
        says it: under explicit axes of a mesh, and out of a `shard_map`. None where it does not; a
        pytree like the value if that is one.
    - `nbytes_per_device`: how many of the bytes are on each device. Automatic axes of a mesh are
        not taken into account: how the compiler shards a value over them is not known.
    - `spec`: the type of the collected value, as `f32[12,128]`.
    """

    key: str
    name: str
    scope: str
    occurrence: int
    kind: Literal["sow", "cotangent", "equation"]
    aval: Any
    axes: tuple[Axis, ...]
    branch: tuple[int, ...] | None
    source: str
    nbytes: Any
    sharding: Any
    nbytes_per_device: Any
    spec: str
    _collected: Any = dataclasses.field(repr=False, compare=False)  # see `_footprint.collected`


def site_of(entry: Entry, occurrence: int) -> Site:
    marker = entry.marker
    label = marker.label
    pairs = zip(marker.in_avals, marker.positions, strict=True)
    avals = [_on_its_mesh(_types.unbatched(aval, axes), aval) for aval, axes in pairs]
    axes = (
        *(Axis("loop", length) for length in _loops(entry)),
        *(Axis("batch", size) for size in _batch(entry)),
        *_mesh_axes(entry),
    )
    scope, _, name = entry.key.rpartition("/")
    tree = collected(entry)
    types = [leaf.type for leaf in arrays_of(tree)]
    return Site(
        key=entry.key,
        name=name,
        scope=scope,
        occurrence=occurrence,
        kind=label.kind,
        aval=label.structure.unflatten(avals),
        axes=axes,
        branch=_branch(entry),
        source=entry.source,
        nbytes=sum(map(nbytes_of, types)),
        sharding=sharding_of(entry),
        nbytes_per_device=sum(map(nbytes_per_device, types)),
        spec=" ".join(_specs(entry, avals, axes)),
        _collected=tree,
    )


def _on_its_mesh(aval: Any, sown: Any) -> Any:
    """The type of one example; in a `shard_map` also of one that does not vary with its mesh."""
    sharding = getattr(sown, "sharding", None)
    if sharding is None or aval.sharding is not None or not sharding.mesh.manual_axes:
        return aval
    dims = _types.dims(aval)
    sharding = _types.repartitioned(sharding, sharding.mesh, dims)
    return _types.array_type(aval.shape, aval.dtype, aval.weak_type, sharding)


def _specs(entry: Entry, avals: Sequence[Any], axes: Sequence[Axis]) -> Iterator[str]:
    """The type of each leaf of the collected value."""
    sizes = tuple(axis.size for axis in axes if axis.size is not None)
    types = [_in_front(sizes, aval) for aval in avals]
    if entry.crossed and not entry.sums:  # where leaves have axes of their own
        types = entry.type
    arrays = iter(types)
    for static in entry.marker.label.structure.statics:
        yield _types.short(next(arrays)) if static is HOLE else str(static)


def _in_front(sizes: tuple[int, ...], aval: Any) -> Any:
    if not _compat.is_hi_type(aval):
        return jax.ShapeDtypeStruct((*sizes, *aval.shape), aval.dtype)
    try:
        for size in reversed(sizes):
            aval = _types.stacked(aval, size)
    except NotImplementedError:  # by the user's `HiType`, which cannot be collected there
        pass
    return aval


def _loops(entry: Entry) -> tuple[int | None, ...]:
    """The lengths of the loops around it; of those inside a `cond`, what its branches share."""
    if not entry.summed:
        return entry.loops
    first, *others = (_loops(branch) for branch in entry.branches or () if branch is not None)
    return (*entry.loops, *(first if all(loops == first for loops in others) else ()))


def _batch(entry: Entry) -> tuple[int, ...]:
    marker = entry.marker
    lanes = tuple(dim.size for dim in entry.lanes)
    return (*lanes, *batch_sizes(marker.in_avals, marker.positions))


def _mesh_axes(entry: Entry) -> Iterator[Axis]:
    """The axes on which shards are stacked; leaves whose shards are alike do not have them."""
    for shards, layouts in entry.crossed:
        stacked = filter(None, (layout.stacked for layout in jax.tree.leaves(layouts)))
        for names in list(stacked)[:1]:
            yield Axis("mesh", shards.size(names), names)


def _branch(entry: Entry) -> tuple[int, ...] | None:
    if entry.branches is None:
        return None
    present = [(number, b) for number, b in enumerate(entry.branches) if b is not None]
    if len(present) == 1 and present[0][1].branches is not None:
        return _branch(present[0][1])
    return tuple(number for number, _ in present)
