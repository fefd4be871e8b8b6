"""Values of hi types are collected, replaced and listed as arrays are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    CondSum,
    capture,
    plant,
    reap,
    scope,
    sites,
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
    rounded,
    stacked,
)
from .hi_types import dense, dequantize, quantize, rank_one

everywhere = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@everywhere
@every_kind
def test_values_are_collected(kind, structure):
    f = program(kind, structure)
    out, collected = capture(f, mode="strict")(X)
    wanted, values = plainly(kind, structure)(X)
    close(out, wanted)
    close(by_hand(collected["h"]), stacked(values, structure))
    assert jax.typeof(collected["h"]) == jax.typeof(reap(f)(X)["h"])
    assert structure.primitive is None or structure.primitive in str(jax.make_jaxpr(reap(f))(X))


@everywhere
@every_kind
def test_round_trip(kind, structure):
    f = program(kind, structure)
    close(plant(f, reap(f)(X))(X), f(X))
    acts = reap(f, mode="append")(X)
    close(plant(f, acts, mode="append")(X), f(X))


@everywhere
@every_kind
def test_values_are_planted(kind, structure):
    f = program(kind, structure)
    new = reap(f)(OTHER)
    _, values = plainly(kind, structure)(OTHER)
    edit = lambda parts, step: [v[step] for v in values]
    planted = plant(f, new)
    close(planted(X), plainly(kind, structure, edit)(X)[0])
    close(by_hand(reap(planted)(X)["h"]), stacked(values, structure))
    text = str(jax.make_jaxpr(planted)(X))
    # A body in which something is planted is not that of a custom rule.
    assert (
        structure.primitive is None
        or "custom" in structure.primitive
        or structure.primitive in text
    )


@everywhere
@every_kind
def test_values_are_edited(kind, structure):
    double = lambda parts, step: [2 * p if i in kind.doubled else p for i, p in enumerate(parts)]
    f = plant(program(kind, structure), {"h": kind.twice})
    close(f(X), plainly(kind, structure, double)(X)[0])


@every_kind
def test_values_with_repeated_names(kind):
    def f(x):
        for _ in range(3):
            x = jnp.tanh(x + kind.use(sow(kind.make(x), name="h")))
        return x

    wanted, values = plainly(kind, STRUCTURES["scan"])(X)
    out, collected = capture(f)(X)
    close(out, wanted)
    for number, value in enumerate(collected["h"]):
        close(by_hand(value), [np.asarray(v[number]) for v in values])
    close(plant(f, collected, mode="append")(X), wanted)
    new = reap(f, mode="append")(OTHER)["h"]
    edit = lambda parts, step: [v[1] for v in plainly(kind, STRUCTURES["scan"])(OTHER)[1]]
    only = lambda parts, step: edit(parts, step) if step == 1 else parts
    got = plant(f, {"h": (None, new[1], None)}, mode="append")(X)
    close(got, plainly(kind, STRUCTURES["scan"], only)(X)[0])


@every_kind
def test_unrolled_layers_are_stacked(kind):
    def f(x):
        for i in range(3):
            with scope(f"layers/{i}"):
                x = jnp.tanh(x + kind.use(sow(kind.make(x), name="h")))
        return x

    stack = harvest.stacked(reap(f)(X), "layers/*/h")
    structure = STRUCTURES["scan"]
    close(by_hand(stack), stacked(plainly(kind, structure)(X)[1], structure))
    close(plant(program(kind, structure), {"h": stack})(X), f(X))


# ---------------------------------------------------------------------------------- branches


def of_two_kinds(x, index):
    def quantized(x):
        return dequantize(sow(quantize(x), name="h"))

    def product(x):
        return dense(sow(rank_one(x[0], x[1]), name="h"))[:2]

    return lax.switch(index, [quantized, product, lambda x: x], x)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_branches_of_different_types(taken):
    h = reap(of_two_kinds)(X, jnp.asarray(taken))["h"]
    assert isinstance(h, CondSum) and h.index == taken and h.branches[2] is None
    wanted = [[np.asarray(rounded(X))], [np.asarray(X[0]), np.asarray(X[1])]]
    for number, parts in enumerate(wanted):
        live = parts if number == taken else [0 * p for p in parts]
        close(by_hand(h.branches[number]), live)
    f = plant(of_two_kinds, {"h": h})
    close(f(X, jnp.asarray(taken)), of_two_kinds(X, jnp.asarray(taken)))
    new = CondSum(h.index, (quantize(2 * X), rank_one(X[1], X[0]), None))
    planted = [rounded(2 * X), jnp.outer(X[1], X[0])[:2], X]
    close(plant(of_two_kinds, {"h": new})(X, jnp.asarray(taken)), planted[taken])


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_gradients_in_branches_of_different_types(taken):
    weights = jnp.array([[1.0, -2.0, 0.5], [0.3, 1.5, -0.7]])
    loss = lambda x, index: jnp.sum(weights * of_two_kinds(x, index))
    h = harvest.grad(loss)(X, jnp.asarray(taken))["h"]
    matrix = lambda u, v: jnp.sum(weights * jnp.outer(u, v)[:2])
    wanted = [[np.asarray(weights)], list(map(np.asarray, jax.grad(matrix, (0, 1))(X[0], X[1])))]
    assert h.index == taken and h.branches[2] is None
    for number, parts in enumerate(wanted):
        live = parts if number == taken else [0 * p for p in parts]
        close(by_hand(h.branches[number]), live)


def test_branches_of_different_types_in_a_loop():
    def f(x):
        step = lambda x, i: (jnp.tanh(of_two_kinds(x, i)), None)
        return lax.scan(step, x, jnp.arange(3))[0]

    h = reap(f)(X)["h"]
    first = rounded(X)
    second = jnp.tanh(first)
    close(h.index, np.arange(3))
    zeros = np.zeros((2, 3))
    close(by_hand(h.branches[0]), [np.stack([first, zeros, zeros])])
    rows = [np.stack([0 * row, row, 0 * row]) for row in map(np.asarray, second)]
    close(by_hand(h.branches[1]), rows)
    close(plant(f, {"h": h})(X), f(X))


# ------------------------------------------------------------------------------ what is there


def test_sites():
    f = program(KINDS["quantized"], STRUCTURES["scan of scan"])
    (site,) = sites(f)(X)
    assert site.aval == jax.typeof(quantize(X))
    assert (site.spec, [axis.size for axis in site.axes]) == ("q8[3, 2, 2, 3]", [3, 2])
    assert site.nbytes == 3 * 2 * (2 * 3 + 2 * 4)  # a byte for each value, a float for each row
    assert site.source.startswith(__file__.rpartition("/")[0]) and "q8[3, 2, 2, 3]" in repr(
        sites(f)(X)
    )
    assert list(reap(f, lambda site: site.aval == jax.typeof(quantize(X)))(X)) == ["h"]
    q = quantize(X)
    (site,) = sites(lambda q: dequantize(sow(q, name="h")))(q)
    assert site.nbytes == 2 * 3 + 2 * 4


@everywhere
@every_kind
def test_sites_of_structures(kind, structure):
    (site,) = sites(program(kind, structure))(X)
    assert site.aval == jax.typeof(kind.make(X))
    assert [(axis.kind, axis.size) for axis in site.axes] == [("loop", n) for n in structure.loops]
    assert (site.branch is not None) == (structure.primitive == "cond[")


def test_arguments_and_results():
    """Hi types come in and go out, and so does what is static."""

    def f(q, pair):
        h = sow({"q": q, "n": 3, "pair": pair}, name="h")
        return h["pair"], h["q"], "text"

    q, pair = quantize(X), (X, rank_one(X[0], X[1]))
    (got, same, text), collected = capture(f, mode="strict")(q, pair)
    assert text == "text" and collected["h"]["n"] == 3
    close(by_hand(same), by_hand(q))
    close(by_hand(got[1]), by_hand(pair[1]))
    new = {"q": quantize(OTHER), "n": 3, "pair": (OTHER, rank_one(X[1], X[0]))}
    out, planted, _ = plant(f, {"h": new})(q, pair)
    close(by_hand(planted), by_hand(quantize(OTHER)))
    close(by_hand(out[1]), [np.asarray(X[1]), np.asarray(X[0])])


def test_a_planted_value_does_not_retrace():
    traces = []

    def f(x):
        traces.append(x)
        return dequantize(sow(quantize(x), name="h"))

    for scale in (1.0, 2.0, 3.0):
        close(plant(f, {"h": quantize(scale * OTHER)})(X), rounded(scale * OTHER))
    assert len(traces) == 1


@every_kind
def test_nested_transforms(kind):
    f = program(kind, STRUCTURES["scan"])
    new = reap(f)(OTHER)["h"]
    values = plainly(kind, STRUCTURES["scan"])(OTHER)[1]
    edit = lambda parts, step: [
        2 * v[step] if i in kind.doubled else v[step] for i, v in enumerate(values)
    ]
    nested = plant(plant(f, {"h": new}), {"h": kind.twice})
    out, collected = capture(nested, mode="strict")(X)
    wanted, sown = plainly(kind, STRUCTURES["scan"], edit)(X)
    close(out, wanted)
    close(by_hand(collected["h"]), list(map(np.asarray, sown)))
    close(jax.jit(nested)(X), wanted)


def test_free_when_off():
    """And what is collected costs what the arrays of a value cost."""
    kind, structure = KINDS["quantized"], STRUCTURES["scan"]
    with_sow, without = program(kind, structure), program(kind, structure, lambda h: h)
    texts = [
        jax.jit(lambda x, f=f: f(x)).lower(X).as_text(debug_info=False) for f in (with_sow, without)
    ]
    assert texts[0] == texts[1]
    compiled = jax.jit(capture(with_sow, mode="strict")).lower(X).compile()
    assert "s8[3,2,3]" in compiled.as_text() and "f32[3,2,3]" not in compiled.as_text()


# --------------------------------------------------------------------------- other transforms


@every_kind
def test_sweep(kind):
    structure = STRUCTURES["scan"]
    f = lambda x: jnp.sum(program(kind, structure)(x))
    source = reap(f)(OTHER)

    def wanted(step, new):
        edit = lambda parts, i: new if i == step else parts
        return jnp.sum(plainly(kind, structure, edit)(X)[0])

    patch = lambda h, clean, row: kind.make(row["scale"] * X)
    out = harvest.sweep(f, source, patch, harvest.grid(scale=jnp.array([0.5, 1.5])))(X)["h"]
    for step in range(3):
        for row, scale in enumerate((0.5, 1.5)):
            close(out[step, row], wanted(step, kind.parts(scale * X)))
    swapped = harvest.sweep(f, source, lambda h, clean: clean)(X)["h"]
    values = plainly(kind, structure)(OTHER)[1]
    for step in range(3):
        close(swapped[step], wanted(step, [v[step] for v in values]))


def test_sweep_of_results_of_hi_types():
    f = lambda x: quantize(dequantize(sow(quantize(x), name="h")) + 1)
    grid = harvest.grid(scale=jnp.array([0.5, 1.5, 2.0]))
    out = harvest.sweep(f, "h", lambda h, row: quantize(row["scale"] * X), grid)(X)["h"]
    close(
        by_hand(out), [np.stack([rounded(rounded(s * X) + 1) for s in (0.5, 1.5, 2.0)])], atol=0.02
    )


def test_attribute_is_refused():
    quantized = program(KINDS["quantized"], STRUCTURES["plain"])
    with pytest.raises(harvest.UnsupportedError, match=r"'h'.*is of a hi type.*use `sweep`"):
        harvest.attribute(lambda x: quantized(x).sum(), "h", lambda h: quantize(X))(X)


def test_nonfinite():
    f = lambda x: dequantize(sow(quantize(jnp.log(x)), name="h")).sum()
    assert not harvest.debug.nonfinite(f)(jnp.abs(X))
    (fault,) = harvest.debug.nonfinite(f)(X)
    assert (fault.key, fault.value.nan) == ("h", True)
