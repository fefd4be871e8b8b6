"""The flags to which `debug.nonfinite` reduces values, inside of the program."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from ._entry import Entry
from ._fold import Fold, Level
from ._lowered import arrays_of
from ._reading import Folded, Reading
from ._structure import is_array
from ._upstream import Variant, number_of, variants


class Watch(Fold):
    """The range of the first iteration that is not finite; before, of the last one.

    Loops whose length is known keep all iterations. Others keep that one, and the one before.
    """

    infinities: bool = eqx.field(static=True)
    depth: int | None = eqx.field(static=True, default=None)  # fold all loops, at most so many
    loops: int = eqx.field(static=True, default=0)  # that are folded
    variant: int = eqx.field(static=True, default=0)  # of the site

    def within(self, lengths):
        levels = tuple(Level(self.depth is not None or length is None) for length in lengths)
        loops = sum(level.folded for level in levels) if self.depth is None else self.depth
        return dataclasses.replace(self, loops=loops), levels

    def init(self, aval):
        ran = jnp.asarray(False)
        row = {"ran": ran, **self._place(()), **self._row(())}
        return {"found": ran, "rows": [row] * (2 if self.loops else 1)}

    def update(self, state, value, index):
        row = {"ran": jnp.asarray(True), **self._place(index), **self._row(value)}
        rows = [row, *state["rows"]][: len(state["rows"])]
        new = {"found": self._is_found(value, row), "rows": rows}
        return jax.tree.map(lambda old, new: jnp.where(state["found"], old, new), state, new)

    def _row(self, value):
        """What is noted of a value in each iteration."""
        return stats_of(value)

    def _is_found(self, value, row):
        return row["nan"] | (row["inf"] & self.infinities)

    def _place(self, index):
        steps = jnp.asarray(index, int).reshape(-1)
        return {
            "variant": jnp.asarray(self.variant),
            "index": jnp.pad(steps, (0, self.loops - steps.size)),
        }


class WatchEquation(Watch):
    """Of an equation, which is sown as its outputs and inputs: those are bad, and these are not."""

    def _row(self, value):
        outs = value[0] if value else ()
        first = jnp.asarray(0)  # bad element, counted through all outputs
        for out in reversed(outs):
            bad = self._is_bad(out).ravel()
            first = jnp.where(jnp.any(bad), jnp.argmax(bad), first + bad.size)
        return {**stats_of(outs), "element": first}

    def _is_found(self, value, row):
        return super()._is_found(value, row) & ~super()._is_found(value, stats_of(value[1]))

    def _is_bad(self, leaf):
        return jnp.isnan(leaf) | (jnp.isinf(leaf) & self.infinities)


class Noted(Folded):
    """A `Watch` that notes which of its variants the site has run in."""

    variants: tuple[Variant, ...] = eqx.field(static=True, default=())

    @staticmethod
    def of(reading: Reading, entry: Entry) -> Reading:
        (part,) = reading.parts
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        noted = Noted(**fields, variants=tuple(variants(entry)))
        return dataclasses.replace(reading, parts=(noted,))

    def read(self, marker, leaves, loops):
        number = number_of(self.variants, marker, (loop.length for loop in loops))
        fold = dataclasses.replace(self.fold, variant=number)
        return Folded.read(dataclasses.replace(self, fold=fold), marker, leaves, loops)


def stats_of(value: Any) -> dict[str, Any]:
    """The range of the floating-point numbers in a pytree or, if there are none, of its integers.

    Empty, from inf to -inf, if it has no finite numbers.
    """
    low, high = jnp.asarray(jnp.inf), jnp.asarray(-jnp.inf)
    nan = inf = jnp.asarray(False)
    leaves = [leaf for leaf in arrays_of(value) if is_array(leaf)]
    of = lambda *kinds: [x for x in leaves if any(jnp.issubdtype(x.dtype, k) for k in kinds)]
    for leaf in of(jnp.inexact) or of(jnp.integer, jnp.bool_):
        leaf = lax.optimization_barrier(leaf)  # else XLA computes it again for each reduction
        nan |= jnp.any(jnp.isnan(leaf))
        inf |= jnp.any(jnp.isinf(leaf))
        size = jnp.abs(leaf) if jnp.iscomplexobj(leaf) else jnp.asarray(leaf)
        size = size.astype(low.dtype)
        finite = jnp.isfinite(size)
        low = jnp.minimum(low, jnp.min(size, initial=jnp.inf, where=finite))
        high = jnp.maximum(high, jnp.max(size, initial=-jnp.inf, where=finite))
    return {"low": low, "high": high, "nan": nan, "inf": inf}
