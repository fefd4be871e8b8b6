"""The flags to which `debug.nonfinite` reduces values, inside of the program."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._fold import Fold, Level
from ._structure import is_array


class Watch(Fold):
    """The range of the first iteration that is not finite; before, of the last one.

    Loops whose length is known keep all iterations.
    """

    infinities: bool = eqx.field(static=True)
    loops: int = eqx.field(static=True, default=0)

    def within(self, lengths):
        levels = tuple(Level(length is None) for length in lengths)
        return Watch(self.infinities, sum(level.folded for level in levels)), levels

    def init(self, aval):
        index = jnp.zeros(self.loops, int)
        return {"found": jnp.asarray(False), "index": index, **stats_of(())}

    def update(self, state, value, index):
        stats = stats_of(value)
        found = stats["nan"] | (stats["inf"] & self.infinities)
        new = {"found": found, "index": jnp.asarray(index, int).reshape(-1), **stats}
        return jax.tree.map(lambda old, new: jnp.where(state["found"], old, new), state, new)

    def finish(self, state, count):
        return {**state, "ran": count > 0}


def stats_of(value: Any) -> dict[str, Any]:
    """The range of all floating-point numbers in a pytree."""
    low, high = jnp.asarray(jnp.inf), jnp.asarray(-jnp.inf)
    nan = inf = jnp.asarray(False)
    for leaf in filter(is_array, jax.tree.leaves(value)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        nan |= jnp.any(jnp.isnan(leaf))
        inf |= jnp.any(jnp.isinf(leaf))
        size = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else jnp.asarray(leaf)
        size = size.astype(low.dtype)
        finite = jnp.isfinite(size)
        low = jnp.minimum(low, jnp.min(size, initial=jnp.inf, where=finite))
        high = jnp.maximum(high, jnp.max(size, initial=-jnp.inf, where=finite))
    return {"low": low, "high": high, "nan": nan, "inf": inf}
