"""What `vmap` does to a function of the value of a site: it sees one example of a batch.

So that transforming `vmap(f)` is `vmap` of the transformed `f`, up to the order of axes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

# For each leaf the axis that each `vmap` added, outermost first (None if it stayed unbatched).
Positions = Sequence[tuple[int | None, ...]]


def levels(positions: Positions) -> list[tuple[int | None, ...]]:
    """For each `vmap`, outermost first, the axis it added to each leaf."""
    return [level for level in zip(*positions, strict=True) if any(a is not None for a in level)]


def batch_sizes(avals: Sequence[Any], positions: Positions) -> tuple[int, ...]:
    """The size of each `vmap` that batched any leaf, outermost first."""
    sizes = []
    for level in levels(positions):
        batched = [(aval, a) for aval, a in zip(avals, level, strict=True) if isinstance(a, int)]
        sizes += [aval.shape[axis] for aval, axis in batched[:1]]
    return tuple(sizes)


def per_example(
    fn: Callable[..., Any], positions: Positions, *, keeps_axes: bool = False
) -> Callable[..., Any]:
    """`fn(leaves, *others)`, mapped over the axes that `vmap` added in front of the leaves.

    `others` have all of these axes in front. The results have as well; if the function keeps
    axes, they are leaves with the axes of `leaves`.
    """

    def mapped(leaves: Sequence[Any], *others: Any) -> Any:
        inner = fn
        for level in reversed(levels(positions)):
            axes = [None if axis is None else 0 for axis in level]
            in_axes = (axes, *(0 for _ in others))
            inner = jax.vmap(inner, in_axes=in_axes, out_axes=axes if keeps_axes else 0)
        return inner(list(leaves), *others)

    return mapped
