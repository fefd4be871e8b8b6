"""What `vmap` does to a function of the value of a site: it sees one example of a batch.

So that transforming `vmap(f)` is `vmap` of the transformed `f`, up to the order of axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._hi_types import HiAxis
from ._lowered import lowered, raised

# For each leaf the axis that each `vmap` added, outermost first (None if it stayed unbatched).
Axis = int | HiAxis | None
Positions = Sequence[tuple[Axis, ...]]


def levels(positions: Positions) -> list[tuple[int, tuple[Axis, ...]]]:
    """For each `vmap` that batched any leaf, outermost first: its number, and its axes."""
    rows = enumerate(zip(*positions, strict=True))
    return [(number, axes) for number, axes in rows if any(a is not None for a in axes)]


def batch_sizes(avals: Sequence[Any], positions: Positions) -> tuple[int, ...]:
    """The size of each `vmap` that batched any leaf, outermost first."""
    sizes = []
    for _, axes in levels(positions):
        batched = [(aval, a) for aval, a in zip(avals, axes, strict=True) if a is not None]
        aval, axis = batched[0]
        sizes.append(axis.size if isinstance(axis, HiAxis) else aval.shape[axis])
    return tuple(sizes)


def over_examples(
    fn: Callable[..., Any],
    positions: Positions,
    *,
    also: Sequence[Positions] = (),
    keeps_axes: bool = False,
) -> Callable[..., Any]:
    """`fn(leaves, *others)`, mapped over the axes that `vmap` added in front of the leaves.

    `others` have all of these axes in front; the first ones, if there are positions for them in
    `also`, are lists of leaves with those axes in front. The results have all of the axes in front
    or, if the function keeps axes, are leaves with the axes of `leaves`.
    """

    def mapped(leaves: Sequence[Any], *others: Any) -> Any:
        if not levels(positions):
            return fn(list(leaves), *others)
        # As arrays, values of hi types need no `MappingSpec`s.
        inner = lambda *args: lowered(fn(*raised(args)))
        for number, axes in reversed(levels(positions)):
            alike = [_fronted(tuple(row[number] for row in rows)) for rows in also]
            in_axes = (_fronted(axes), *alike, *(0,) * (len(others) - len(also)))
            inner = jax.vmap(inner, in_axes=in_axes, out_axes=_fronted(axes) if keeps_axes else 0)
        return raised(inner(*lowered((list(leaves), *others))))

    return mapped


def _fronted(axes: tuple[Axis, ...]) -> list[int | None]:
    return [None if axis is None else 0 for axis in axes]
