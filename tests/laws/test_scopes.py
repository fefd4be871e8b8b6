"""Keys of sows and of cotangents are those of the source, whatever is between the scopes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import harvest


def _custom_jvp(fn):
    rule = jax.custom_jvp(fn)
    rule.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return rule


def _custom_vjp(fn):
    rule = jax.custom_vjp(fn)
    rule.defvjp(lambda x: jax.vjp(fn, x), lambda pullback, ct: pullback(ct))
    return rule


STRUCTURES = {
    "call": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "scan": lambda fn: lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=2)[0],
    "cond": lambda fn: lambda x: lax.cond(True, fn, fn, x),
}


@pytest.fixture(params=[False, True], ids=["remat", "remat3"])
def remat3(request):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("site", [harvest.sow, harvest.perturb])
@pytest.mark.parametrize("inner", STRUCTURES)
@pytest.mark.parametrize("outer", STRUCTURES)
def test_scopes_around_structures(outer, inner, site, remat3):
    def innermost(x):
        with harvest.scope("s"):
            return site(2 * x, name="h")

    def middle(x):
        with harvest.scope("m"), harvest.scope("m"):
            return STRUCTURES[inner](innermost)(x)

    def f(x):
        with harvest.scope("o"):
            return jnp.sum(STRUCTURES[outer](middle)(x))

    assert set(harvest.capture(jax.grad(f))(jnp.ones(3))[1]) == {"o/m/m/s/h"}
