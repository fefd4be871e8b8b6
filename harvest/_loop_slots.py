"""How what is read goes through a loop: carried on, sliced or stacked."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._fold import Level
from ._reading import Folded, Part, Reading, Slot


class LoopSlots:
    """How the slots of folds go through a loop: carried on if it is folded, else sliced."""

    def __init__(self, actions: Sequence[Any], depth: int):
        self._depth = depth
        self.readings = [a for a in actions if isinstance(a, Reading)]
        self.parts = [part for reading in self.readings for part in reading.parts]

    def _is_carried(self, part: Part) -> bool:
        return isinstance(part, Folded) and part.level(self._depth).folded

    def states(self) -> tuple[list[Slot], list[Slot]]:
        """The slots that the loop carries on, and those that it slices."""
        folded = [part for part in self.parts if isinstance(part, Folded)]
        carried = [part.slot for part in folded if self._is_carried(part)]
        return carried, [part.slot for part in folded if not self._is_carried(part)]

    def inside(self, actions: Sequence[Any], carried: Any, sliced: Any) -> tuple[Any, ...]:
        """The actions in one iteration."""
        carried, sliced = iter(carried), iter(sliced)

        def part_inside(part: Part) -> Part:
            if not isinstance(part, Folded):
                return part
            slot = next(carried) if self._is_carried(part) else next(sliced)
            return dataclasses.replace(part, slot=slot)

        return tuple(
            Reading(tuple(map(part_inside, a.parts)), a.single) if isinstance(a, Reading) else a
            for a in actions
        )

    def split(self, reads: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What the loop carries on of what was read in an iteration, and what it stacks."""
        flat = [r for read in reads for r in read]
        pairs = list(zip(self.parts, flat, strict=True))
        carried = [r for part, r in pairs if self._is_carried(part)]
        return carried, [r for part, r in pairs if not self._is_carried(part)]

    def merged(self, carried: Any, stacked: Any) -> list[Any]:
        """The inverse of `split`, after the loop."""
        carried, stacked = iter(carried), iter(stacked)
        flat = (next(carried) if self._is_carried(p) else next(stacked) for p in self.parts)
        return [[next(flat) for _ in reading.parts] for reading in self.readings]

    def masked(self, mask: Any, new: list[Slot], old: list[Slot]) -> list[Slot]:
        """The new slots where a batched loop still runs, and the old ones elsewhere."""
        folded = [part for part in self.parts if isinstance(part, Folded)]
        slots = []
        for part, n, o in zip(filter(self._is_carried, folded), new, old, strict=True):
            front = jnp.expand_dims(mask, tuple(range(part.kept_inside(self._depth))))
            slots.append(jax.tree.map(functools.partial(_where, front), n, o))
        return slots

    def wanted(self) -> list[int] | None:
        """The only iterations that anything is wanted of, if these are known."""
        levels = [p.level(self._depth) if isinstance(p, Folded) else Level() for p in self.parts]
        wanted = [level.only for level in levels if level.only is not None]
        return wanted if wanted and len(wanted) == len(levels) else None


def _where(mask: Any, new: Any, old: Any) -> Any:
    return jnp.where(jnp.expand_dims(mask, tuple(range(mask.ndim, new.ndim))), new, old)
