"""Shardings, layouts and kinds of memory that are given to an inner `jit` still apply."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from harvest import capture, folds, grad, plant, reap, scope, sow
from tests.meshes import MESHES, P, X, check_same

MESH = MESHES["auto"]
ROWS, COLUMNS = NamedSharding(MESH, P("d", "m")), NamedSharding(MESH, P("m", "d"))
HOST = NamedSharding(MESH, P("d"), memory_kind="pinned_host")
BY_COLUMNS = Format(Layout((1, 0)), ROWS)


def twice(f):
    def g(x):
        for name in ("first", "second"):
            with scope(name):
                x = f(x)
        return x

    return g


AROUND = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "cond": lambda f: lambda x: lax.cond(x[0, 0] < 5, f, lambda x: x, x),
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0],
    "while": lambda f: lambda x: lax.fori_loop(0, x.shape[1], lambda _, x: f(x), x),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "shared": twice,
}
SHARDINGS = {
    "inputs": {"in_shardings": (COLUMNS, None)},
    "outputs": {"out_shardings": (COLUMNS, ROWS)},
    "one output": {"out_shardings": (None, ROWS)},
    "layouts": {"in_shardings": (None, BY_COLUMNS), "out_shardings": (BY_COLUMNS, None)},
}
everywhere = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
of_any_kind = pytest.mark.parametrize("options", SHARDINGS.values(), ids=SHARDINGS)


def constraints(fn, *args):
    """All that the lowered program says of shardings, layouts and memory, in order."""
    text = jax.jit(fn).lower(*args).as_text()
    said = r"(?:sdy\.sharding_constraint [^:]*|mhlo\.(?:layout_mode|memory_kind) = \S+)"
    return [re.sub(r"%\w+", "%", found) for found in re.findall(said, text)]


def called(fn, *args):
    return set(constraints(fn, *args))


def program(around, options, mark):
    def body(x, y):
        h = mark(jnp.sin(x) * y)
        return h + 0.5, jnp.cos(h) * y

    inner = jax.jit(body, **options)
    return around(lambda x: sum(inner(x, x / 2)))


@everywhere
@of_any_kind
def test_the_lowered_program_says_the_same(around, options):
    plain = program(around, options, lambda h: h)
    f = program(around, options, lambda h: sow(h, name="h"))
    # Where a function is called twice, it may be lowered once, or twice.
    said = constraints if around not in map(AROUND.get, ("checkpoint", "shared")) else called
    wanted = said(plain, X)
    assert wanted
    assert said(f, X) == wanted
    assert said(capture(f, {"**h": folds.last()}), X) == wanted
    halved = lambda h: h / 2
    assert said(plant(f, {"**h": halved}), X) == said(program(around, options, halved), X)
    if around is not AROUND["checkpoint"]:  # whose forward pass becomes constant by hand
        fixed = lambda h: jnp.asarray(X)
        assert said(plant(f, {"**h": fixed}), X) == said(program(around, options, fixed), X)


@everywhere
@of_any_kind
def test_values(around, options):
    f = program(around, options, lambda h: sow(h, name="h"))
    plain = program(around, {}, lambda h: h)
    np.testing.assert_allclose(capture(f)(X)[0], plain(X), rtol=1e-5, atol=1e-6)
    if around is not AROUND["while"]:  # which has no reverse mode
        got = jax.jit(jax.grad(lambda x: capture(f)(x)[0].sum()))(X)
        np.testing.assert_allclose(got, jax.grad(lambda x: plain(x).sum())(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharding", [ROWS, COLUMNS, HOST], ids=["rows", "columns", "host"])
def test_results_are_where_they_are_under_jit(sharding):
    inner = lambda mark: jax.jit(lambda x: mark(2 * x) + 1, out_shardings=sharding)
    # Under another `jit`, JAX forgets the kind of memory that an inner one gives to its outputs.
    plain, f = jax.jit(inner(lambda h: h)), inner(lambda h: sow(h, name="h"))
    check_same(capture(f)(X)[0], plain(X))
    check_same(plant(f, reap(f)(X))(X), plain(X))
    assert plain(X).sharding.memory_kind == capture(f)(X)[0].sharding.memory_kind
    np.testing.assert_array_equal(reap(f)(X)["h"], 2 * X)


def test_what_is_sown_in_the_memory_of_the_host_stays_there():
    def by_hand(x):
        h = jax.device_put(2 * x, HOST)
        return jax.device_put(h, ROWS) + 1, h

    def f(x):
        h = sow(jax.device_put(2 * x, HOST), name="h")
        return jax.device_put(h, ROWS) + 1

    h = reap(jax.jit(f))(X)["h"]
    assert h.sharding.memory_kind == jax.jit(by_hand)(X)[1].sharding.memory_kind == "pinned_host"
    planted = plant(jax.jit(f), {"h": h})(X)
    np.testing.assert_array_equal(planted, 2 * X + 1)
    loss = lambda x: (jax.jit(lambda x: sow(x, name="h") ** 2, in_shardings=ROWS)(x)).sum()
    check_same(grad(loss)(X)["h"], jax.jit(jax.grad(lambda x: (x**2).sum()), in_shardings=ROWS)(X))
