"""Tangents pushed in at sites: every structure, against plain JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harvest import (
    add,
    capture,
    folds,
    grad,
    jvp,
    plant,
    reap,
    sow,
)
from tests.helpers import PROGRAMS, SIZE
from tests.nesting import loops, nested, without_rules

X = jnp.linspace(0.4, 1.3, SIZE)
XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)
FORWARD = [program for program in PROGRAMS if program != "custom_vjp"]


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def tangent(*shape):
    return jnp.cos(jnp.arange(1.0, 1.0 + math.prod(shape))).reshape(shape)


def at_site(program, x):
    return program(x, lambda h, step: sow(h, name="h"))


def by_hand(program, loops, x, eps):
    """The output of plain JAX, and its tangent, where `eps` is the tangent of what is added."""

    def added(eps):
        return program(x, lambda h, step: h + (eps if step is None else eps[step]))

    return jax.jvp(added, (jnp.zeros((*loops, SIZE)),), (eps,))


CASES = [(p, remat3) for p in FORWARD for remat3 in ([False, True] if "remat" in p else [False])]


@pytest.mark.parametrize("program, remat3", CASES, indirect=["remat3"])
def test_as_of_what_is_added_at_the_site(program, remat3):
    fn, lengths, _ = PROGRAMS[program]
    # JAX differentiates no custom rule with respect to what its function closes over.
    plain = PROGRAMS["plain"].fn if program.startswith("custom") else fn
    f, t = lambda x: at_site(fn, x), tangent(*lengths, SIZE)
    wanted = by_hand(plain, lengths, X, t)
    for transform in (lambda g: g, jax.jit):
        close(transform(jvp(f, {"h": t}, []))(X), (*wanted, {}))
    close(jvp(jax.jit(f), {"h": t}, [])(X), (*wanted, {}))
    each = jax.vmap(lambda x: by_hand(plain, lengths, x, t))(XS)
    close(jax.vmap(jvp(f, {"h": t}, []))(XS)[:2], each)
    ts = jnp.stack([t, 2 * t], axis=len(lengths))
    inside = jvp(jax.vmap(f), {"h": ts}, [])(XS)
    close(inside[:2], (each[0], each[1] * jnp.array([[1.0], [2.0]])))


@pytest.mark.parametrize("program", FORWARD)
def test_duality_with_the_gradient(program):
    """<gradient, tangent> is the tangent of the loss."""
    fn, lengths, _ = PROGRAMS[program]
    loss = lambda x: jnp.sum(at_site(fn, x) ** 2)
    t = tangent(*lengths, SIZE)
    value, slope, _ = jvp(loss, {"h": t}, [])(X)
    close((value, slope), (loss(X), jnp.sum(grad(loss)(X)["h"] * t)))


NESTED = ["scan/remat/cond", "cond/scan/jit", "scan/map", "custom_jvp/scan", "reverse/custom_jvp"]


@pytest.mark.parametrize("names", NESTED)
def test_nested_structures(names):
    t = tangent(*loops(names), SIZE)
    wanted = by_hand(without_rules(names), loops(names), X, t)
    close(jvp(lambda x: at_site(nested(names), x), {"h": t}, [])(X), (*wanted, {}))


def test_finite_differences():
    fn, lengths, _ = PROGRAMS["scan"]
    t, step = tangent(*lengths, SIZE), 1e-2
    moved = lambda s: fn(X, lambda h, i: h + s * step * t[i])
    _, got, _ = jvp(lambda x: at_site(fn, x), {"h": t})(X)
    np.testing.assert_allclose(got, (moved(1) - moved(-1)) / (2 * step), rtol=2e-3, atol=1e-3)


# ------------------------------------------------------------------------- tangents of sites


def f(x):
    a = sow(x**2, name="a")
    b = sow(jnp.sin(a) * x, name="b")
    c = sow(2 * x, name="c")
    return sow(b * c, name="out")


COS = jnp.cos(X**2) * X


def test_tangents_of_other_sites():
    t, s = tangent(SIZE), X + 1
    zero = 0 * X
    through_a = {"a": t, "b": COS * t, "c": zero, "out": 2 * X * COS * t}
    through_c = {"a": zero, "b": zero, "c": s, "out": jnp.sin(X**2) * X * s}
    out, out_tangent, tangents = jvp(f, {"a": t})(X)
    assert list(tangents) == ["a", "b", "c", "out"]
    close((out, out_tangent, tangents), (f(X), through_a["out"], through_a))
    both = jax.tree.map(jnp.add, through_a, through_c)
    close(jvp(f, {"a": t, "c": s})(X)[1:], (both["out"], both))
    # At a site of tangents, what comes in there is added to what arrives.
    close(jvp(f, {"a": t, "b": s}, "b")(X)[2], {"b": COS * t + s})
    close(jvp(f, {})(X), (f(X), zero, jax.tree.map(jnp.zeros_like, through_a)))


def test_the_part_behind_the_site_written_out():
    behind = lambda a: (jnp.sin(a) * X) * (2 * X)
    t = tangent(SIZE)
    close(jvp(f, {"a": t})(X)[:2], jax.jvp(behind, (X**2,), (t,)))


SELECTED = {
    "all": (None, ["a", "b", "c", "out"]),
    "key": ("b", ["b"]),
    "sequence": (["out", "a"], ["a", "out"]),
    "predicate": (lambda site: site.name < "c", ["a", "b"]),
    "glob": ("?", ["a", "b", "c"]),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_sites_in_call_order(name):
    select, keys = SELECTED[name]
    assert list(jvp(f, {"a": X}, select)(X)[2]) == keys


def test_reducers_of_what_is_returned():
    fn, lengths, _ = PROGRAMS["scan"]
    t = tangent(*lengths, SIZE)
    g = lambda x: at_site(fn, x)
    whole, values = jvp(g, {"h": t})(X)[2]["h"], reap(g)(X)["h"]
    reducers = {"h": (lambda h: jnp.sum(h**2), folds.mean(), jnp.argmax, None)}
    squares, mean, largest, same = jvp(g, {"h": t}, reducers)(X)[2]["h"]
    close((mean, same), (whole.mean(axis=0), whole))
    close(squares, jnp.sum(2 * values * whole, axis=1))
    assert largest.dtype == jax.dtypes.float0


def test_occurrences_in_call_order():
    g = lambda x: sow(3 * sow(x**2, name="h"), name="h") ** 2
    t, slope = tangent(SIZE), 6 * X**2
    pushed = lambda tangents: jvp(g, {"h": tangents}, mode="append")(X)[1:]
    close(pushed((t, None)), (3 * slope * t, {"h": (t, 3 * t)}))
    close(pushed((None, t)), (slope * t, {"h": (0 * t, t)}))
    close(pushed((t, t)), (4 * slope * t, {"h": (t, 4 * t)}))


# ------------------------------------------------------------------------------- composition


def test_the_tangent_is_an_argument_like_another():
    fn, lengths, _ = PROGRAMS["scan"]
    g = lambda x: at_site(fn, x)
    run = lambda t: jvp(g, {"h": t}, [])(X)[1]
    jacobian = jax.jacobian(lambda e: by_hand(fn, lengths, X, e)[1])(tangent(*lengths, SIZE))
    close(jax.jacfwd(run)(tangent(*lengths, SIZE)), jacobian)
    close(jax.jit(run)(tangent(*lengths, SIZE)), run(tangent(*lengths, SIZE)))
    basis = jnp.eye(math.prod(lengths) * SIZE).reshape(-1, *lengths, SIZE)
    rows = jnp.moveaxis(jacobian.reshape(SIZE, -1), 0, 1)
    close(jax.vmap(run)(basis), rows)


def test_second_derivatives():
    t = tangent(SIZE)
    behind = lambda x: jnp.cos(x**2) * x * t * 2 * x  # the tangent of `f`, for one of `a`
    run = lambda x: jvp(f, {"a": t}, [])(x)[1]
    close(jax.jacfwd(run)(X), jax.jacfwd(behind)(X))
    close(jax.jacrev(run)(X), jax.jacfwd(behind)(X))


def test_other_transforms():
    t = tangent(SIZE)
    g = lambda x: sow(2 * x, name="h") ** 3
    slope = lambda h: 3 * h**2 * t
    close(jvp(plant(g, {"h": add(1.0)}), {"h": t}, [])(X)[1], slope(2 * X + 1))
    close(plant(jvp(g, {"h": t}, []), {"h": add(1.0)})(X)[1], slope(2 * X + 1))
    (_, got, _), values = capture(jvp(g, {"h": t}, []))(X)
    close((got, values), (slope(2 * X), {"h": (2 * X,)}))
    twice = jvp(lambda x: jvp(g, {"h": t}, [])(x)[1], {"h": t}, [])
    close(twice(X)[1], 6 * 2 * X * t**2)
    of_grad = jvp(lambda x: grad(lambda x: jnp.sum(g(x)))(x)["h"], {"h": t}, [])
    close(of_grad(X)[1], 6 * 2 * X * t)


AGAIN = {
    "inputs": lambda g, i: jvp(g, {"h": X}, [])(X + i),
    "tangents": lambda g, i: jvp(g, {"h": X + i})(X),
    "numpy": lambda g, i: jvp(g, {"h": np.full(SIZE, i, np.float32)})(X),
    "predicate": lambda g, i: jvp(g, {"h": X}, lambda site: True)(X),
}


@pytest.mark.parametrize("again", AGAIN)
def test_one_trace(again):
    traces = []

    def g(x):
        traces.append(1)
        return sow(2 * x, name="h") ** 3

    for i in range(3):
        AGAIN[again](g, i)
    assert len(traces) == 1
