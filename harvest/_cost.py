"""How many bytes collected values take, on a cluster and in files: `Cost`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import jax

from ._columns import aligned, human
from ._errors import UnknownSiteError, nearest


@dataclasses.dataclass(frozen=True)
class SiteCost:
    """How many bytes the collected value of a site takes: a row of [`harvest.Cost`][].

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp
        from jax.sharding import AbstractMesh, PartitionSpec as P

        f = lambda x: harvest.sow(x, name="h")
        mesh = AbstractMesh((8,), ("data",))  # which this machine does not have
        h = harvest.sites(f)(jnp.ones((16, 4))).cost(mesh, P("data"))["h"]
        assert h.nbytes == 16 * 4 * 4 and h.nbytes_per_device == 2 * 4 * 4
        ```

    **Arguments:**

    - `key`, `occurrence`, `source`: of its [`harvest.Site`][].
    - `type`: of each array that is collected, as it is stored: `bf16[4,16,32]`. The length of a
        `while_loop`, which is not known, is `?`.
    - `loops`: the lengths of the loops around it, outermost first; None for a `while_loop`. Of
        loops in a `cond`, those that its branches share.
    - `spec`: the `PartitionSpec` that it is counted with; a pytree like the value if that is one.
    - `nbytes`: the size of the collected value, on all devices together, each part counted once. In
        a `while_loop`, of one iteration: there is no stack of all, only what a fold makes of it
        (`harvest.folds.stack(n)` takes `n` times `nbytes_folded`, and its counters.) Numbers of
        fewer than 8 bits have a byte each, as in `array.nbytes` and in files; a device may pack
        several into one.
    - `nbytes_folded`: the size of what a fold such as `harvest.folds.last()` or `mean()` makes of
        it, which has the axes and the dtype of the value: the axes of loops are gone. (A mean of
        integers or booleans is float32, which is not counted. Of a pytree,
        all arrays have the axes of batches then. In a `shard_map` it takes more if some of the
        arrays differ between shards and some do not: it stacks them all.)
    - `nbytes_per_device`, `nbytes_folded_per_device`: how many of these each device has.
    - `nbytes_per_token`, `nbytes_folded_per_token`: how many of these are of each token; None if
        `tokens` is not given.
    """

    key: str
    occurrence: int
    source: str
    type: str
    loops: tuple[int | None, ...]
    spec: Any
    nbytes: Any
    nbytes_folded: Any
    nbytes_per_device: Any
    nbytes_folded_per_device: Any
    nbytes_per_token: Any
    nbytes_folded_per_token: Any


class Cost(Sequence[SiteCost]):
    """What [`harvest.Sites.cost`][] returns: a row for each site, and their sums.

    A sequence that prints as a table.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def model(x):
            layer = lambda x, _: (harvest.sow(jnp.tanh(x), name="h"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        cost = harvest.sites(model)(jnp.ones((10, 3))).cost(tokens=10, dtype=jnp.bfloat16)
        assert cost["h"] is cost[0]
        assert cost.nbytes == 4 * 10 * 3 * 2 and cost.nbytes_folded == 10 * 3 * 2
        assert cost.nbytes_per_token == 4 * 3 * 2 and cost.nbytes_folded_per_token == 3 * 2
        print(cost)
        ```

    **Arguments:**

    - `rows`: for each site.
    - `devices`: how many there are in the mesh; None if none is given.
    - `tokens`: how many one call processes, if that is known.
    """

    def __init__(self, rows: Sequence[SiteCost], devices: int | None = None, tokens: Any = None):
        self._rows = tuple(rows)
        self.devices = devices
        self.tokens = tokens

    @overload
    def __getitem__(self, index: int | str) -> SiteCost: ...
    @overload
    def __getitem__(self, index: slice) -> "Cost": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return Cost(self._rows[index], self.devices, self.tokens)
        if isinstance(index, str):
            for row in self._rows:
                if row.key == index:
                    return row
            sources = {row.key: row.source for row in self._rows}
            raise UnknownSiteError(f"no site has the key {index!r}; {nearest(index, sources)}")
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> Any:
        """The size of all collected values, on all devices together."""
        return sum(row.nbytes for row in self._rows)

    @property
    def nbytes_folded(self) -> Any:
        """The size of all values if each is folded over all loops around it."""
        return sum(row.nbytes_folded for row in self._rows)

    @property
    def nbytes_per_device(self) -> Any:
        """How many of the bytes each device has."""
        return sum(row.nbytes_per_device for row in self._rows)

    @property
    def nbytes_folded_per_device(self) -> Any:
        """How many of the bytes of folded values each device has."""
        return sum(row.nbytes_folded_per_device for row in self._rows)

    @property
    def nbytes_per_token(self) -> Any:
        """The size of all values for each token; None if `tokens` was not given."""
        return per_token(self.nbytes, self.tokens)

    @property
    def nbytes_folded_per_token(self) -> Any:
        """The size of all folded values for each token; None if `tokens` was not given."""
        return per_token(self.nbytes_folded, self.tokens)

    def __repr__(self) -> str:
        count = f"{len(self)} site{'' if len(self) == 1 else 's'}"
        several = self.devices is not None and self.devices > 1
        split = f"{self.devices} devices" if several else ""
        rows = [_HEADER, *map(_row, self._rows), (count, "", split, *map(human, _sizes(self)))]
        shown = {"key", "type", "size"}
        if any(row.loops for row in self._rows):
            shown |= {"folded"}
        if several or any(row.nbytes_per_device != row.nbytes for row in self._rows):
            shown |= {"split", "per device"}
            if "folded" in shown:
                shown |= {"folded per device"}
        if self.tokens is not None:
            shown |= {"per token"}
            if "folded" in shown:
                shown |= {"folded per token"}
        columns = [number for number, name in enumerate(_HEADER) if name in shown]
        head, *lines, total = aligned([[row[number] for number in columns] for row in rows])
        rule = "-" * max(map(len, (head, *lines, total)))
        note = "? is the length of a `while_loop`, of which one iteration is counted"
        dynamic = any(None in row.loops for row in self._rows)
        return "\n".join([head, rule, *lines, rule, total, *([note] if dynamic else [])])


_HEADER = (
    "key",
    "type",
    "split",
    "size",
    "folded",
    "per device",
    "folded per device",
    "per token",
    "folded per token",
)


def _sizes(cost: SiteCost | Cost) -> tuple[Any, ...]:
    per_device = cost.nbytes_per_device, cost.nbytes_folded_per_device
    each = cost.nbytes_per_token, cost.nbytes_folded_per_token
    of_tokens = (0 if size is None else size for size in each)
    return (cost.nbytes, cost.nbytes_folded, *per_device, *of_tokens)


def _row(row: SiteCost) -> tuple[str, ...]:
    specs = [str(spec) for spec in jax.tree.leaves(row.spec) if _splits(spec)]
    size, folded, on_each, folded_on_each, each, folded_each = map(human, _sizes(row))
    if None in row.loops:
        size, on_each, each = (f"? x {cell}" for cell in (size, on_each, each))
    split = " ".join(specs) or "not split"
    return (row.key, row.type, split, size, folded, on_each, folded_on_each, each, folded_each)


def _splits(spec: Any) -> bool:
    return any(part is not None for part in getattr(spec, "partitions", (spec,)))


def per_token(nbytes: Any, tokens: Any) -> Any:
    """Bytes for each token; of a shape polymorphic program, rounded down if they are no integer.

    None if it is not known how many tokens there are.
    """
    if tokens is None:
        return None
    known = isinstance(nbytes, int) and isinstance(tokens, int | float)
    return nbytes / tokens if known else nbytes // tokens
