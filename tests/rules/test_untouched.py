"""Primitives that are not opened stay as they are between sites that are collected and planted."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import harvest
from harvest import add, capture, plant, reap, sites, sow
from tests.helpers import equinox_differentiates

X = jnp.array([1.0, 2.0, 3.0, 4.0])
XS = jnp.stack([X, X[::-1] / 2])


class Primitive(NamedTuple):
    fn: Callable[[Any], Any]
    by_hand: Callable[[Any], Any]  # by numpy
    slope: Callable[[Any], Any] | None  # its derivative, elementwise; None if JAX has no gradient
    batches: bool = True  # whether JAX has a `vmap` of it


def by_kernel(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(x)


def by_state(x):
    def body(refs):
        x_ref, out_ref = refs
        out_ref[...] = x_ref[...] ** 2

    return pl.run_state(body)((x, jnp.zeros_like(x)))[1]


def by_linear_solve(x):
    return lax.custom_linear_solve(
        lambda v: 2 * v, jnp.sin(x), lambda matvec, b: b / 2, symmetric=True
    )


def by_root(x):
    newton = lambda f, y: lax.fori_loop(0, 20, lambda _, y: y - f(y) / (2 * y), y)
    solve = lambda g, y: y / g(jnp.ones_like(y))
    return lax.custom_root(lambda y: y * y - x, 1 + x, newton, solve)


def by_reduction(x):
    add = lambda a, b: a + 1 * b  # otherwise JAX knows it as a sum
    return lax.reduce(jnp.stack([x, x]), jnp.float32(0), add, (0,))


def by_scatter(x):
    return x.at[:].apply(lambda v: v * v)


def by_partitioning(x):
    f = custom_partitioning(lambda x: 2 * x)
    f.def_partition(lambda *_: None, lambda *_: None, sharding_rule="i -> i")
    return f(x)


def by_linear_call(x):
    return linear_call(lambda r, x: r * x, lambda r, ct: r * ct, 3.0, x)


exported = jax.export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((4,), jnp.float32)).call


def by_callback(x):
    return jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="sequential")


def by_noinline(x):
    return eqxi.noinline(jnp.sin)(x)


PRIMITIVES = {
    "pallas_call": Primitive(by_kernel, np.square, None),
    "run_state": Primitive(by_state, np.square, None, batches=False),
    "custom_linear_solve": Primitive(
        by_linear_solve, lambda x: np.sin(x) / 2, lambda x: np.cos(x) / 2
    ),
    "CustomRoot": Primitive(by_root, np.sqrt, lambda x: 0.5 / np.sqrt(x)),
    "reduce": Primitive(by_reduction, lambda x: 2 * x, lambda x: 2 + 0 * x),
    "scatter": Primitive(by_scatter, np.square, None),
    "custom_partitioning": Primitive(by_partitioning, lambda x: 2 * x, None, batches=False),
    "linear_call": Primitive(by_linear_call, lambda x: 3 * x, lambda x: 3 + 0 * x, batches=False),
    "call_exported": Primitive(exported, np.sin, np.cos, batches=False),
    "pure_callback": Primitive(by_callback, np.sin, None),
    "noinline": Primitive(by_noinline, np.sin, np.cos),
}


def used(names):
    # The oldest Equinox that we support cannot differentiate `noinline`.
    marks = {"noinline": equinox_differentiates}
    params = [pytest.param(name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("name", params)


everywhere = used(PRIMITIVES)
differentiable = used([name for name, p in PRIMITIVES.items() if p.slope is not None])
batched = used([name for name, p in PRIMITIVES.items() if p.batches])


def around(name):
    """A program with the primitive between two sites."""
    fn = PRIMITIVES[name].fn
    return lambda x: sow(fn(sow(x + 1, name="before")), name="after") ** 2


def by_hand(name, x, before=lambda h: h, after=lambda h: h):
    before = before(np.asarray(x) + 1)
    after = after(PRIMITIVES[name].by_hand(before))
    return after**2, {"before": before, "after": after}


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, wanted)


@everywhere
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_values(name, transform):
    f = transform(around(name))
    close(capture(f, mode="strict")(X), by_hand(name, X))
    close(jax.jit(reap(f))(X), by_hand(name, X)[1])
    assert name in str(jax.make_jaxpr(capture(f))(X))
    assert [(site.key, site.axes, site.branch) for site in sites(f)(X)] == [
        ("before", (), None),
        ("after", (), None),
    ]


@everywhere
def test_plants(name):
    f = around(name)
    close(plant(f, reap(f)(X))(X), by_hand(name, X)[0])
    other = np.float32([2.0, 0.5, 1.0, 3.0])
    close(plant(f, {"before": other})(X), by_hand(name, X, before=lambda h: other)[0])
    close(plant(f, {"after": other})(X), other**2)
    edited = capture(plant(f, {"before": add(1.0), "after": jnp.negative}), mode="strict")
    close(edited(X), by_hand(name, X, lambda h: h + 1, np.negative))


@everywhere
def test_in_loops_and_branches(name):
    f = around(name)
    loop = lambda x: lax.scan(lambda x, _: (lax.cond(x[0] > 0, f, f, x), None), x, length=2)[0]
    x, rows = X / 4, []
    for _ in range(2):
        x, values = by_hand(name, x)
        rows.append(values)
    wanted = x, {key: np.stack([row[key] for row in rows]) for key in ("before", "after")}
    close(capture(loop, mode="strict")(X / 4), wanted)
    close(plant(loop, reap(loop)(X / 4))(X / 4), x)


@everywhere
def test_a_gradient_at_a_site_behind_it_does_not_pass_it(name):
    f = lambda x: jnp.sum(around(name)(x))
    close(harvest.grad(f, "after")(X), {"after": 2 * by_hand(name, X)[1]["after"]})


@differentiable
def test_gradients(name):
    f = lambda x: jnp.sum(around(name)(x))
    _, values = by_hand(name, X)
    at_after = 2 * values["after"]
    at_before = at_after * PRIMITIVES[name].slope(values["before"])
    close(jax.grad(lambda x: capture(f)(x)[0])(X), at_before)
    close(harvest.grad(f)(X), {"before": at_before, "after": at_after})
    gradient, collected = capture(jax.grad(f), ["before", "after"])(X)
    close(gradient, at_before)
    close(collected["after"][0], values["after"])
    close(jax.grad(plant(f, {"before": lambda h: 0 * h + X}))(X), 0 * X)
    of_value = jax.grad(lambda v: plant(f, {"before": v})(X))(jnp.asarray(values["before"]))
    close(of_value, at_before)
    # One at a time, in plain numpy.
    for i in range(len(X)):
        ends = [by_hand(name, X + s * 1e-2 * np.eye(4)[i])[0].sum() for s in (1, -1)]
        np.testing.assert_allclose(at_before[i], (ends[0] - ends[1]) / 2e-2, rtol=1e-2, atol=1e-2)


@batched
def test_batches(name):
    f = around(name)
    wanted = by_hand(name, XS)
    close(jax.vmap(capture(f, mode="strict"))(XS), wanted)
    close(capture(jax.vmap(f), mode="strict")(XS), wanted)
    close(capture(jax.vmap(f, in_axes=1), mode="strict")(XS.T), wanted)
    edited = plant(jax.vmap(f), {"before": add(1.0)})
    close(edited(XS), by_hand(name, XS, before=lambda h: h + 1)[0])
