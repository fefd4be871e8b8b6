"""Reducers of values of hi types: functions, folds of loops, and loops that end early."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import Fold, SelectError, UnsupportedError, folds, grad, plant, reap, sow

from .hi_programs import KINDS, STRUCTURES, X, by_hand, close, plainly, program, stacked
from .hi_types import dequantize, quantize, rank_one, unpack

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
LOOPS = [
    "scan",
    "reverse",
    "unrolled",
    "scan of remat",
    "remat of scan",
    "scan of jit",
    "scan of cond",
    "cond of scan",
]
in_loops = pytest.mark.parametrize("structure", [STRUCTURES[n] for n in LOOPS], ids=LOOPS)
XS = jnp.stack([X, 2 * X, X - 0.3, 0.1 - X])


@in_loops
@every_kind
def test_one_iteration(kind, structure):
    f = program(kind, structure)
    _, values = plainly(kind, structure)(X)
    last = 0 if structure is STRUCTURES["reverse"] else 2  # `last` is what ran last
    chosen = {"h": (folds.at(1), folds.at(jnp.array(-1)), folds.last(), folds.count())}
    at_1, at_2, ran_last, count = reap(f, chosen)(X)["h"]
    close(by_hand(at_1), [v[1] for v in map(np.asarray, values)])
    close(by_hand(at_2), [v[2] for v in map(np.asarray, values)])
    close(by_hand(ran_last), [v[last] for v in map(np.asarray, values)])
    assert count == 3


@in_loops
@every_kind
def test_some_iterations(kind, structure):
    _, values = plainly(kind, structure)(X)
    if structure is STRUCTURES["reverse"]:
        values = [v[::-1] for v in values]
    f = program(kind, structure)
    few, many = reap(f, {"h": (folds.stack(2), folds.stack(4))})(X)["h"]
    close(by_hand(few.values), [np.asarray(v[:2]) for v in values])
    assert few.overflow and few.count == 3 and not many.overflow
    close(by_hand(many.values), [np.concatenate([v, 0 * v[:1]]) for v in map(np.asarray, values)])
    every = reap(f, {"h": folds.every(2)})(X)["h"]
    order = slice(None, None, -1) if structure is STRUCTURES["reverse"] else slice(None)
    close(by_hand(every), [np.asarray(v[order][::2]) for v in values])


@every_kind
def test_loops_that_are_not_folded(kind):
    structure = STRUCTURES["scan of scan"]
    f = program(kind, structure)
    values = stacked(plainly(kind, structure)(X)[1], structure)
    inner, outer = folds.last().over(1), folds.at((..., 1))
    by_inner, by_outer = reap(f, {"h": (inner, outer)})(X)["h"]
    close(by_hand(by_inner), [v[:, 1] for v in values])
    close(by_hand(by_outer), [v[:, 1] for v in values])
    both = reap(f, {"h": folds.at((2, 0))})(X)["h"]
    close(by_hand(both), [v[2, 0] for v in values])


@every_kind
def test_folds_of_a_batch(kind):
    structure = STRUCTURES["scan"]
    f = jax.vmap(program(kind, structure))
    last, few = reap(f, {"h": (folds.last(), folds.stack(2))})(XS)["h"]
    each = [plainly(kind, structure)(x)[1] for x in XS]
    close(by_hand(last), [np.stack([v[2] for v in rows]) for rows in zip(*each, strict=True)])
    close(
        by_hand(few.values), [np.stack([v[:2] for v in rows]) for rows in zip(*each, strict=True)]
    )


@every_kind
def test_while_loops(kind):
    def f(x):
        step = lambda x: jnp.tanh(x + kind.use(sow(kind.make(x), name="h")))
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x))[1]

    wanted, values = plainly(kind, STRUCTURES["scan"])(X)
    last, stack = reap(f, {"h": (folds.last(), folds.stack(3))})(X)["h"]
    close(by_hand(last), [np.asarray(v[2]) for v in values])
    close(by_hand(stack.values), list(map(np.asarray, values)))
    first = reap(f, {"h": folds.at(0)})(X)["h"]
    same = lambda parts, step: [v[0] for v in values]
    close(plant(f, {"h": first})(X), plainly(kind, STRUCTURES["scan"], same)(X)[0])
    with pytest.raises(UnsupportedError, match="combine them by a fold"):
        reap(f)(X)
    batched = reap(jax.vmap(f), {"h": folds.last()})(XS)["h"]
    for number, x in enumerate(XS):
        alone = by_hand(reap(f, {"h": folds.last()})(x)["h"])
        close([v[number] for v in by_hand(batched)], alone)


def test_lanes_of_a_batched_while_loop():
    def f(x, trips):
        step = lambda x: x + dequantize(sow(quantize(x), name="h"))
        return lax.while_loop(lambda s: s[0] < trips, lambda s: (s[0] + 1, step(s[1])), (0, x))[1]

    trips = jnp.array([1, 3, 0, 2])
    last, stack = reap(jax.vmap(f), {"h": (folds.last(), folds.stack(3))})(XS, trips)["h"]
    for number, x in enumerate(XS):
        one = reap(f, {"h": (folds.last(), folds.stack(3))})(x, trips[number])["h"]
        close(by_hand(last)[0][number], *by_hand(one[0]))
        close(by_hand(stack.values)[0][number], *by_hand(one[1].values))
        assert stack.count[number] == trips[number]


# ---------------------------------------------------------------------------- your own folds


class Blend(Fold):
    """A state of a hi type: half of the state, and half of the value."""

    def init(self, aval):
        assert str(aval) == "q8[2, 3]"
        return {"mean": quantize(jnp.ones(aval.shape)), "steps": jnp.zeros((), int)}

    def update(self, state, value, index):
        mean = (dequantize(state["mean"]) + dequantize(value)) / 2
        return {"mean": quantize(mean), "steps": state["steps"] + 1}

    def finish(self, state, count):
        return state["mean"], state["steps"] - count


class Norms(Fold):
    """A state that is an array."""

    def init(self, aval):
        return jnp.zeros(())

    def update(self, state, value, index):
        return state + jnp.sum(dequantize(value) ** 2) * (index[0] + 1).astype(float)


def blended(values):
    mean = np.ones((2, 3), np.float32)
    for value in values:
        mean = (mean + value) / 2
        scale = np.abs(mean).max(-1, keepdims=True) / 127
        mean = np.round(mean / scale) * scale
    return mean


@pytest.mark.parametrize("name", ["scan", "scan of cond", "cond of scan", "remat of scan"])
def test_a_fold_of_your_own(name):
    kind, structure = KINDS["quantized"], STRUCTURES[name]
    mean, zero = reap(program(kind, structure), {"h": Blend()})(X)["h"]
    (values,) = plainly(kind, structure)(X)[1]
    close(by_hand(mean), [blended(np.asarray(values))], atol=0.01)
    assert zero == 0
    batched, _ = reap(jax.vmap(program(kind, structure)), {"h": Blend()})(XS)["h"]
    for number, x in enumerate(XS):
        mean, _ = reap(program(kind, structure), {"h": Blend()})(x)["h"]
        close(by_hand(batched)[0][number], *by_hand(mean))
    norms = reap(program(kind, structure), {"h": Norms()})(X)["h"]
    close(norms, sum((i + 1) * np.sum(np.asarray(v) ** 2) for i, v in enumerate(values)))


def test_a_fold_that_stacks():
    kind, structure = KINDS["quantized"], STRUCTURES["scan of scan"]
    means, _ = reap(program(kind, structure), {"h": Blend().over(1)})(X)["h"]
    (values,) = stacked(plainly(kind, structure)(X)[1], structure)
    close(by_hand(means), [np.stack([blended(row) for row in values])], atol=0.01)


class Changing(Fold):
    def init(self, aval):
        return quantize(jnp.ones((2, 3)))

    def update(self, state, value, index):
        return quantize(jnp.ones((2, 4)))


NUMBERS = [folds.mean(), folds.maximum(), folds.moments(), folds.top_k(2)]


@pytest.mark.parametrize("fold", [*NUMBERS, folds.histogram(jnp.arange(3.0))])
def test_folds_of_numbers(fold):
    f = program(KINDS["quantized"], STRUCTURES["scan"])
    with pytest.raises(SelectError, match=r"values of the hi type q8\[2, 3\].*\.of\(fn\).*'h'"):
        reap(f, {"h": fold})(X)
    of_arrays = program(KINDS["quantized"], STRUCTURES["scan"], lambda q: _sow_array(q))
    got, wanted = reap(f, {"h": fold.of(dequantize)})(X)["h"], reap(of_arrays, {"h": fold})(X)["h"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)


def _sow_array(q):
    sow(dequantize(q), name="h")
    return q


def test_a_state_of_another_type():
    f = program(KINDS["quantized"], STRUCTURES["scan"])
    message = r"state of type q8\[2, 4\]; wanted that of `init`, q8\[2, 3\], for .*'h'"
    with pytest.raises(SelectError, match=message):
        reap(f, {"h": Changing()})(X)


# --------------------------------------------------------------------------------- functions


@in_loops
def test_functions(structure):
    kind = KINDS["quantized"]
    f = program(kind, structure)
    (values,) = plainly(kind, structure)(X)[1]
    norm, matrix = reap(f, {"h": (_norm, _first_rows)})(X)["h"]
    close(norm, np.sum(np.asarray(values) ** 2, (1, 2)))
    close(by_hand(matrix), [np.asarray(values[:, 0]), np.asarray(values[:, 1])])
    f = jax.vmap(f)
    norm, matrix = reap(f, {"h": (_norm, _first_rows)})(XS)["h"]
    values = np.stack([plainly(kind, structure)(x)[1][0] for x in XS], 1)
    close(norm, np.sum(values**2, (2, 3)))
    close(by_hand(matrix), [values[:, :, 0], values[:, :, 1]])


def _norm(q):
    return jnp.sum(dequantize(q) ** 2)


def _first_rows(q):
    return rank_one(*dequantize(q))


@pytest.mark.parametrize("structure", [STRUCTURES["plain"], STRUCTURES["scan of cond"]])
@every_kind
def test_functions_of_gradients(kind, structure):
    """Of hi types or not, the cotangents are reduced."""
    loss = lambda x: jnp.sum(program(kind, structure)(x) ** 2)
    total = lambda ct: sum(jnp.sum(a) for a in _arrays(ct))
    gradients = by_hand(grad(loss)(X)["h"])
    summed = sum(g.sum(tuple(range(len(structure.loops), g.ndim))) for g in gradients)
    close(grad(loss, {"h": total})(X)["h"], summed, atol=1e-4)
    if structure.loops:
        last = grad(loss, {"h": folds.at(1)})(X)["h"]
        close(by_hand(last), [g[1] for g in gradients], atol=1e-4)


def _arrays(tangent):
    if isinstance(tangent, jax.Array) and not hasattr(jax.typeof(tangent), "parts"):
        return [tangent]
    return [a for part in unpack(tangent) for a in _arrays(part)]


# ------------------------------------------------------------------------------- early exits


def layers(x, weights):
    """Weights that are quantized, one layer after the other."""

    def layer(x, w):
        return jnp.tanh(sow(x @ dequantize(w), name="h")), None

    return lax.scan(layer, x, weights, length=4)[0]


def test_a_loop_over_values_ends_early():
    weights = quantize(jnp.sin(jnp.arange(36.0)).reshape(4, 3, 3))
    dense_weights = np.asarray(weights.values, np.float32) * np.asarray(weights.scale)
    x, wanted = np.asarray(X), []
    for w in dense_weights:
        wanted.append(x @ w)
        x = np.tanh(wanted[-1])
    close(layers(X, weights), x)
    for k in range(4):
        f = reap(layers, {"h": folds.at(k)})
        close(f(X, weights)["h"], wanted[k])
        assert f"length={k + 1}" in str(jax.make_jaxpr(f)(X, weights))


def test_an_early_exit_by_a_value():
    f = program(KINDS["quantized"], STRUCTURES["scan"])
    early = reap(f, {"h": folds.at(1)})
    (values,) = plainly(KINDS["quantized"], STRUCTURES["scan"])(X)[1]
    close(by_hand(early(X)["h"]), [np.asarray(values[1])])
    assert "length=2" in str(jax.make_jaxpr(early)(X))
