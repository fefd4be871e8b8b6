import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import at, capture, plant, reap, sites, sow

X = jnp.array([0.5, 1.0, 2.0])


def body(x, y=0.0):
    return sow(jnp.sin(x) + y, name="h") * x


by_composite = lax.composite(body, name="test.body")


def by_composite_with_attributes(x):
    f = lambda x, *, power: sow(jnp.sin(x), name="h") * x**power
    return lax.composite(f, name="test.power", version=2)(x, power=1)


def by_eval_jaxpr(x):
    # A `Traced` is called by a primitive that holds its jaxpr.
    return jax.jit(body).trace(x)(x)


def by_nested_composites(x):
    return lax.composite(lambda x: by_composite(x) * 1, name="test.outer")(x)


def in_scan_and_jit(x):
    step = jax.jit(lambda total, x: (total, by_composite(x)))
    return lax.scan(step, jnp.float32(0), x)[1]


PROGRAMS = [
    by_composite,
    by_composite_with_attributes,
    by_eval_jaxpr,
    by_nested_composites,
    in_scan_and_jit,
]
programs = pytest.mark.parametrize("f", PROGRAMS)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@programs
def test_values_are_collected_once(f):
    out, collected = capture(f, mode="strict")(X)
    close(out, np.sin(X) * X)
    assert list(collected) == ["h"]
    close(collected["h"], np.sin(X))
    assert [site.key for site in sites(f)(X)] == ["h"]


@programs
def test_values_are_replaced_and_edited(f):
    value = jnp.array([3.0, 4.0, 5.0])
    close(plant(f, {"h": value})(X), value * X)
    close(plant(f, {"h": lambda h: h + 1})(X), (np.sin(X) + 1) * X)
    close(plant(f, reap(f)(X))(X), f(X))


@programs
def test_derivatives_are_those_of_the_body(f):
    # JAX refuses to differentiate a `composite`; one that is opened is none.
    out = lambda x: jnp.sum(capture(f)(x)[0])
    close(jax.grad(out)(X), np.sin(X) + X * np.cos(X))
    close(jax.grad(lambda x: jnp.sum(reap(f)(x)["h"]))(X), np.cos(X))


def test_a_gradient_has_the_sites_of_a_call():
    grad, collected = capture(jax.grad(lambda x: jnp.sum(by_eval_jaxpr(x))), mode="strict")(X)
    close(grad, np.sin(X) + X * np.cos(X))
    close(collected["h"], np.sin(X))


@pytest.mark.parametrize("f", [by_composite, by_eval_jaxpr])
def test_calls_stay_where_nothing_inside_is_wanted(f):
    program = lambda x: sow(f(x), name="out")
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(program)(X).eqns]
    call = names[0]
    assert call in ("composite", "eval_jaxpr")
    kept = jax.make_jaxpr(reap(program, "out"))(X)
    assert [eqn.primitive.name for eqn in kept.eqns].count(call) == 1
    opened = jax.make_jaxpr(reap(program, "h"))(X)
    assert [eqn.primitive.name for eqn in opened.eqns].count(call) == 0


def test_arguments_of_a_call_are_matched():
    f = lambda x: by_composite(2 * x, x)
    out, collected = capture(f, mode="strict")(X)
    close(collected["h"], np.sin(2 * X) + X)
    close(out, collected["h"] * 2 * X)


def test_iterations_are_counted_through_calls():
    edit = at(1, lambda h: 10 * h)
    close(plant(in_scan_and_jit, {"h": edit})(X), np.sin(X) * X * np.float32([1, 10, 1]))
