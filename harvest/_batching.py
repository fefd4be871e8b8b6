"""What `vmap` does to a function of the value of a site: it sees one example of a batch.

So that transforming `vmap(f)` is `vmap` of the transformed `f`, up to the order of axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# For each leaf the axis that each `vmap` added, outermost first (None if it stayed unbatched).
Positions = Sequence[tuple[int | None, ...]]


def levels(positions: Positions) -> list[tuple[int, tuple[int | None, ...]]]:
    """For each `vmap` that batched any leaf, outermost first: its number, and its axes."""
    rows = enumerate(zip(*positions, strict=True))
    return [(number, axes) for number, axes in rows if any(a is not None for a in axes)]


def batch_sizes(avals: Sequence[Any], positions: Positions) -> tuple[int, ...]:
    """The size of each `vmap` that batched any leaf, outermost first."""
    sizes = []
    for _, axes in levels(positions):
        batched = [(aval, a) for aval, a in zip(avals, axes, strict=True) if isinstance(a, int)]
        sizes += [aval.shape[axis] for aval, axis in batched[:1]]
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
        inner = fn
        for number, axes in reversed(levels(positions)):
            alike = [_fronted(tuple(row[number] for row in rows)) for rows in also]
            in_axes = (_fronted(axes), *alike, *(0,) * (len(others) - len(also)))
            inner = jax.vmap(inner, in_axes=in_axes, out_axes=_fronted(axes) if keeps_axes else 0)
        return inner(list(leaves), *others)

    return mapped


def _fronted(axes: tuple[int | None, ...]) -> list[int | None]:
    return [None if axis is None else 0 for axis in axes]
