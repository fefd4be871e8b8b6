"""The sites of a program as a table: `Sites`."""

from collections.abc import Sequence
from typing import Any, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from ._columns import aligned, human, near
from ._cost import Cost
from ._costing import cost_of
from ._errors import UnknownSiteError, nearest
from ._footprint import is_split
from ._site import Site


class Sites(Sequence[Site]):
    """The sites of a program, in call order: a sequence that prints as a table.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            h = harvest.sow(jnp.sin(x), name="h")
            return harvest.sow(h @ h, name="out")

        table = harvest.sites(f)(jnp.ones(3))
        assert [site.key for site in table] == ["h", "out"]
        assert table["h"] is table[0] and table.nbytes == 12 + 4
        print(table)
        ```
    """

    def __init__(self, sites: Sequence[Site]):
        self._sites = tuple(sites)

    @overload
    def __getitem__(self, index: int | str) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> "Sites": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return Sites(self._sites[index])
        if isinstance(index, str):
            for site in self._sites:
                if site.key == index:
                    return site
            sources = {site.key: site.source for site in self._sites}
            raise UnknownSiteError(f"no site has the key {index!r}; {nearest(index, sources)}")
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def nbytes(self) -> Any:
        """The size of all collected values together, in bytes."""
        return sum(site.nbytes for site in self._sites)

    @property
    def nbytes_per_device(self) -> Any:
        """How many of these bytes are on each device, as far as the types say."""
        return sum(site.nbytes_per_device for site in self._sites)

    def cost(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        specs: Any = None,
        *,
        tokens: Any = None,
        dtype: Any = None,
    ) -> Cost:
        """How many bytes the collected values would take: all together, and on each device.

        Nothing runs, and the devices need not exist.

        !!! Example

            ```python
            import harvest
            import jax
            import jax.numpy as jnp
            from jax.sharding import AbstractMesh, PartitionSpec as P

            def model(x, ws):
                layer = lambda x, w: (harvest.sow(jnp.tanh(x @ w), name="resid"), None)
                return jax.lax.scan(layer, x, ws)[0]

            types = jax.ShapeDtypeStruct((4096, 512), jnp.float32), jnp.ones((12, 512, 512))
            mesh = AbstractMesh((64, 8), ("data", "model"))
            specs = {"resid": P(None, "data", "model")}  # layers, tokens, channels
            cost = harvest.sites(model)(*types).cost(mesh, specs, tokens=4096, dtype=jnp.bfloat16)
            assert cost.nbytes == 12 * 4096 * 512 * 2
            assert cost.nbytes_per_device == cost.nbytes // 512
            assert cost.nbytes_per_token == 12 * 512 * 2
            print(cost)
            ```

        **Arguments:**

        - `mesh`: the devices. An `AbstractMesh` will do. None for a single device; or where types
            or shardings name a mesh, for that.
        - `specs`: how the collected values are split, by the axes of `mesh`: a `PartitionSpec` for
            all sites, or a mapping from keys to these, in which globs, predicates and annotations
            may stand for keys, as in a `select`; the first that matches counts. A spec is that of
            the collected value, with the axes of loops and batches in front (as `out_shardings` of
            a `jit` has it); for a pytree, a prefix of it. Where nothing is told, the type counts if
            it says anything ([`harvest.Site`][]`.sharding`); and otherwise each device has all of
            the value. So it is for automatic axes: the compiler chooses how values are split over
            these. What it chose is in
            `jax.jit(harvest.reap(f)).lower(*args).compile().output_shardings`, which can be given
            as it is (with `capture`, its second item). Of a `NamedSharding` the spec counts, on
            `mesh` if there is one.
        - `tokens`: how many tokens one call processes, for bytes per token.
        - `dtype`: what floating-point values are stored as, by a reducer that casts, or in files.
            Others keep their dtypes, and so does what is in values of hi types.

        **Returns:**

        A [`harvest.Cost`][], with a [`harvest.SiteCost`][] for each site.

        **Raises:**

        - [`harvest.UnknownSiteError`][]: a key in `specs` is that of no site.
        - [`harvest.ShardingError`][], a `ValueError`: a spec names an axis that the mesh does not
            have, or one twice; has more items than the value has axes; or splits an axis into parts
            of different sizes. Or the type of a value is split over another mesh than `mesh`.
        - `ValueError`: `tokens` is less than one, or `dtype` is none of floating-point numbers.
        """
        return cost_of(self._sites, mesh, specs, tokens, dtype)

    def __repr__(self) -> str:
        rows = [_HEADER, *map(_row, self._sites)]
        split = any(map(is_split, jax.tree.leaves([site.sharding for site in self._sites])))
        if not split:
            rows = [
                [cell for cell, name in zip(row, _HEADER, strict=True) if name not in _SHARDED]
                for row in rows
            ]
        lines = aligned(rows)
        total = f"{len(self)} site{'' if len(self) == 1 else 's'}, {human(self.nbytes)}"
        if split:
            total += f", {human(self.nbytes_per_device)} on each device"
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], total])


_HEADER = ("key", "kind", "type", "axes", "size", "sharding", "per device", "source")
_SHARDED = ("sharding", "per device")  # shown if any site is sharded


def _row(site: Site) -> tuple[str, ...]:
    axes = " ".join(f"{axis.kind}:{'?' if axis.size is None else axis.size}" for axis in site.axes)
    if site.branch is not None:
        axes = f"{axes} branch:{','.join(map(str, site.branch))}".strip()
    specs = " ".join(str(sharding.spec) for sharding in jax.tree.leaves(site.sharding))
    on_each = human(site.nbytes_per_device)
    size = human(site.nbytes)
    return (site.key, site.kind, site.spec, axes, size, specs, on_each, near(site.source))
