"""Edits of values of hi types: in some iterations, by arithmetic, and what is refused."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    PlantError,
    at,
    chain,
    each,
    folds,
    indexed,
    plant,
    reap,
    replace,
    sow,
)

from .hi_programs import (
    KINDS,
    OTHER,
    STRUCTURES,
    X,
    by_hand,
    close,
    plainly,
    program,
)
from .hi_types import dequantize, quantize, tup, unpack

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.parametrize("structure", [STRUCTURES["scan"], STRUCTURES["scan of cond"]])
@every_kind
def test_values_are_edited_in_some_iterations(kind, structure):
    f = program(kind, structure)
    values = plainly(kind, structure)(OTHER)[1]
    double = lambda parts: [2 * p if i in kind.doubled else p for i, p in enumerate(parts)]
    new, one = reap(f)(OTHER)["h"], reap(f, {"h": folds.at(1)})(OTHER)["h"]
    edits = [
        (at(1, kind.twice), lambda parts, step: double(parts) if step == 1 else parts),
        (at(jnp.array(-1), kind.twice), lambda parts, step: double(parts) if step == 2 else parts),
        (at(slice(1, 3), new), lambda parts, step: [v[step] for v in values] if step else parts),
        (at(0, one), lambda parts, step: parts if step else [v[1] for v in values]),
        (at(0, replace(new)), lambda parts, step: parts if step else [v[0] for v in values]),
        (each(replace(new)), lambda parts, step: [v[step] for v in values]),
        (each(Blend(new, kind)), lambda parts, step: double([v[step] for v in values])),
        (chain(replace(one), kind.twice), lambda parts, step: double([v[1] for v in values])),
        (
            indexed(lambda h, index: kind.make(X * (1 + index[0].astype(float)))),
            lambda parts, step: kind.parts(X * (1.0 + step)),
        ),
    ]
    for edit, by_hand_edit in edits:
        got = plant(f, {"h": edit})(X)
        close(got, plainly(kind, structure, by_hand_edit)(X)[0])


class Blend(eqx.Module):
    """A callable that holds a value."""

    value: Any
    kind: Any

    def __call__(self, h):
        return self.kind.twice(self.value)


# -------------------------------------------------------------------------------- arithmetic


def pair(x):
    """A value that is its own tangent, and so has a zero and a sum."""
    return jnp.stack(unpack(sow(tup(x[0], x[1]), name="h"))) * 2


def test_zero_and_add():
    new = tup(X[1], 3 * X[0])
    close(plant(pair, {"h": harvest.zero()})(X), jnp.zeros((2, 3)))
    close(plant(pair, {"h": harvest.add(new)})(X), 2 * (X + jnp.stack([X[1], 3 * X[0]])))
    batched = jax.vmap(pair)
    close(plant(batched, {"h": harvest.zero()})(jnp.stack([X, OTHER])), jnp.zeros((2, 2, 3)))
    gradient = jax.grad(lambda new: plant(pair, {"h": harvest.add(new)})(X).sum())(new)
    close(by_hand(gradient), [np.full(3, 2.0), np.full(3, 2.0)])
    looped = lambda x: lax.scan(lambda x, _: (pair(x), None), x, length=2)[0]
    close(plant(looped, {"h": at(0, harvest.add(new))})(X), 4 * (X + jnp.stack([X[1], 3 * X[0]])))


def quantized(x):
    return dequantize(sow(quantize(x), name="h"))


BAD = {
    "zero": (quantized, harvest.zero(), r"`zero` for a value of the hi type q8\[2, 3\].*no vector"),
    "add": (quantized, harvest.add(1.0), r"`add` for a value of the hi type q8\[2, 3\]"),
    "scale": (quantized, harvest.scale(2.0), r"`scale` for a value of the hi type q8\[2, 3\]"),
    "scale of a pair": (pair, harvest.scale(2.0), r"`scale`.*no multiplication"),
    "add a number": (pair, harvest.add(1.0), r"operand of type f32\[\].*wanted one of that very"),
    "add another type": (pair, harvest.add(quantize(X)), r"type q8\[2, 3\] for a value of"),
    "another type": (quantized, quantize(jnp.ones((2, 4))), r"got q8\[2, 4\], wanted q8\[2, 3\]"),
    "an array": (quantized, X, r"got f32\[2,3\], wanted q8\[2, 3\], for the site 'h'"),
    "an array by an edit": (quantized, dequantize, r"got f32\[2,3\], wanted q8\[2, 3\]"),
    "for an array": (
        lambda x: sow(x, name="h"),
        quantize(X),
        r"got q8\[2, 3\], wanted f32\[2,3\], for the site 'h'",
    ),
    "add to an array": (lambda x: sow(x, name="h"), harvest.add(quantize(X)), r"of the hi type q8"),
    "one, in a loop": (
        program(KINDS["quantized"], STRUCTURES["scan"]),
        quantize(X),
        r"got q8\[2, 3\], wanted q8\[3, 2, 3\]",
    ),
    "each of another length": (
        program(KINDS["quantized"], STRUCTURES["scan"]),
        each(replace(quantize(jnp.ones((4, 2, 3))))),
        r"loop axes \(3,\), and got q8\[4, 2, 3\]",
    ),
}


@pytest.mark.parametrize("f, plants, message", BAD.values(), ids=BAD)
def test_what_cannot_be_planted(f, plants, message):
    with pytest.raises(PlantError, match=message):
        plant(f, {"h": plants})(X)
