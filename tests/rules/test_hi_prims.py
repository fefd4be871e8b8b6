"""Sows inside of a user's `HiPrim`: it is opened, and its rules still apply to its outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import harvest
from harvest import capture, debug, folds, grad, jvp, plant, reap, sites, sow, sweep
from tests.hi_prims import Exp, ExpByJvp, ExpByLin, Op, Product

X = jnp.float32(0.6)
SIN, COS = np.sin(0.6), np.cos(0.6)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


# ------------------------------------------------------------------------------------- values


def test_values_are_collected_in_the_primitive():
    out, collected = capture(Product.apply)(X)
    close((out, collected), (SIN * 0.6, {"h": (SIN,)}))
    text = str(jax.make_jaxpr(capture(Product.apply))(X))
    assert text.count("name=Product") == 1 and text.count("sin ") == 1
    (site,) = sites(Product.apply)(X)
    assert site.key == "h" and site.source.endswith(f"hi_prims.py:{line_of(Product)}")


def line_of(prim):
    return prim.expand.__code__.co_firstlineno + 1


def test_values_are_replaced_and_edited():
    f = Product.apply
    close(plant(f, {"h": jnp.float32(5)})(X), 5 * 0.6)
    close(plant(f, {"h": lambda h: h + 1})(X), (SIN + 1) * 0.6)
    assert plant(f, reap(f)(X))(X) == f(X)
    assert plant(f, capture(f)(X)[1], mode="append")(X) == f(X)
    # What is planted is an input, and can be collected.
    planted = plant(f, {"h": jnp.float32(5)})
    assert reap(planted)(X)["h"] == 5


def test_it_stays_as_it_is_where_nothing_inside_is_wanted():
    f = lambda x: sow(Product.apply(x), name="z")
    for transformed in (capture(f, "z"), reap(f, "z"), plant(f, {"z": jnp.negative})):
        text = str(jax.make_jaxpr(transformed)(X))
        assert text.count(" = Product ") == 1 and "Opened" not in text
    close(jax.grad(lambda x: capture(f, "z")(x)[0])(X), 100)


class Silent(Product):
    def expand(self, x):
        return jnp.sin(x) * x


def test_it_stays_as_it_is_if_it_sows_nothing():
    f = lambda x: sow(Silent.apply(x), name="z")
    text = str(jax.make_jaxpr(capture(f))(X))
    assert text.count(" = Silent ") == 1 and "Opened" not in text
    close(jax.grad(lambda x: capture(f)(x)[0])(X), 100)
    close(jax.grad(lambda x: plant(f, {"z": jnp.negative})(x))(X), -100)


# ------------------------------------------------------------- its rules apply to its outputs

TANGENT = jnp.float32(2)
RULES = {
    "grad": (jax.grad, X, 100),
    "vjp": (lambda f: lambda x: jax.vjp(f, x)[1](TANGENT)[0], X, 200),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (TANGENT,))[1], X, 100),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](TANGENT), X, 140),
    "transpose": (lambda f: lambda x: jax.linear_transpose(f, x)(TANGENT)[0], X, 60),
    "vmap": (jax.vmap, X[None], 1000 * SIN * 0.6),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f)), X[None], 100),
    "grad of vmap": (lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))), X[None], 100_000),
    "grad of jit": (lambda f: jax.grad(jax.jit(f)), X, 100),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), X, 100),
    "grad of checkpoint": (lambda f: jax.grad(jax.checkpoint(f)), X, 50),
    "jvp of vmap": (lambda f: lambda x: jax.jvp(jax.vmap(f), (x,), (x,))[1], X[None], 30_000),
    "vmap of jvp": (lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))[1]), X[None], 30),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_applies_to_the_output(rule):
    transform, x, wanted = RULES[rule]
    close(jnp.sum(transform(Product.apply)(x)), wanted)
    close(jnp.sum(transform(lambda x: capture(Product.apply)(x)[0])(x)), wanted)


READ = {
    "reap": lambda x: reap(Product.apply)(x)["h"],
    "capture": lambda x: capture(Product.apply)(x)[1]["h"][0],
}


@pytest.mark.parametrize("h", READ.values(), ids=READ)
def test_what_is_collected_differentiates_as_it_is_computed(h):
    close(jax.grad(h)(X), COS)
    close(jax.jvp(h, (X,), (TANGENT,))[1], 2 * COS)
    close(jax.linearize(h, X)[1](TANGENT), 2 * COS)
    close(jax.vmap(h)(X[None]), [SIN])
    close(jax.vmap(jax.grad(h))(X[None]), [COS])
    close(jax.grad(lambda x: jnp.sum(jax.vmap(h)(x)))(X[None]), [COS])
    close(jax.grad(jax.grad(h))(X), -SIN)


def test_both_add_up():
    def both(x):
        out, collected = capture(Product.apply)(x)
        return out + 7 * collected["h"][0]

    close(jax.grad(both)(X), 100 + 7 * COS)
    close(jax.jvp(both, (X,), (TANGENT,))[1], 100 + 14 * COS)
    close(jax.linearize(both, X)[1](TANGENT), 140 + 14 * COS)


def test_a_planted_body_is_differentiated_as_written():
    close(jax.grad(plant(Product.apply, {"h": jnp.float32(5)}))(X), 5)
    close(jax.grad(plant(Product.apply, {"h": jnp.negative}))(X), -(SIN + 0.6 * COS))
    close(jax.vmap(plant(Product.apply, {"h": jnp.negative}))(X[None]), [-SIN * 0.6])
    at_value = lambda v: plant(Product.apply, {"h": v})(X)
    close(jax.grad(at_value)(jnp.float32(5)), 0.6)


def test_derivatives_at_the_site():
    f = lambda x: 3 * Product.apply(x)
    close(grad(f, argnums=0)(X), ({"h": 3 * 0.6}, 300))
    close(jvp(f, {"h": TANGENT})(X)[1:], (6 * 0.6, {"h": 2}))
    close(jax.vmap(grad(f))(X[None]), {"h": [3 * 0.6]})
    close(capture(grad(f))(X), ({"h": 3 * 0.6}, {"h": (SIN,)}))


def test_derivative_rules_see_the_same_symbolic_zeros():
    class Seeing(Op):
        def expand(self, x, y):
            return sow(x * y, name="h")

        def vjp_fwd(self, nzs_in, x, y):
            seen.append(nzs_in)
            return self(x, y), (x, y)

        def vjp_bwd_retval(self, res, ct):
            return ct * res[1], ct * res[0]

    for argnums in (0, 1, (0, 1)):
        both = []
        for f in (Seeing.apply, lambda x, y: capture(Seeing.apply)(x, y)[0]):
            seen = []
            close(jax.grad(lambda x, y: f(x, 3 * y), argnums)(X, X),  # noqa: B023
                  jax.grad(lambda x, y: x * (3 * y), argnums)(X, X))  # fmt: skip
            both.append(seen)
        assert both[0] == both[1] != []


def test_reducers_that_close_over_what_is_differentiated():
    def by_reducer(y):
        return reap(Product.apply, {"h": lambda h: h * y})(y)["h"]

    close(jax.grad(by_reducer)(X), SIN + 0.6 * COS)
    close(jax.jit(jax.grad(by_reducer))(X), SIN + 0.6 * COS)


# ----------------------------------------------------------------------------- inside of others


def repeated(f):
    return lambda x: lax.scan(lambda x, _: (f(x) / 9, None), x, length=3)[0]


def nested(f):
    class Nest(ExpByLin):
        def expand(self, x):
            return f(2 * x) + 1

        def jvp(self, primals, tangents):
            return jax.jvp(lambda x: f(2 * x) + 1, primals, tuple(tangents))

    return Nest.apply


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda vjp, ct: vjp(ct))
    return g


MESH = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
AROUND = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": repeated,
    "scan of checkpoint": lambda f: repeated(jax.checkpoint(f)),
    "cond": lambda f: lambda x: lax.cond(jnp.asarray(True), f, f, x),
    "custom_vjp": in_custom_vjp,
    "shard_map": lambda f: jax.shard_map(
        f, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    ),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "HiPrim": nested,
}
around = pytest.mark.parametrize("around", AROUND)


def h_of(around, x):
    """What `Exp` sows in the structure, and in which shape."""
    if "scan" in around:
        hs = []
        for _ in range(3):
            hs.append(2 * x)
            x = jnp.exp(2 * x) / 9
        return jnp.stack(hs)
    return {"vmap": 2 * x[None], "HiPrim": 4 * x}.get(around, 2 * x)


def out_of(around, x, edit=lambda h: h):
    if "scan" in around:
        return repeated(lambda x: jnp.exp(edit(2 * x)))(x)
    return jnp.exp(edit(4 * x)) + 1 if around == "HiPrim" else jnp.exp(edit(2 * x))


@around
def test_in_other_structures(around):
    f = AROUND[around](Exp.apply)
    out, collected = capture(f)(X)
    close((out, collected), (out_of(around, X), {"h": (h_of(around, X),)}))
    close(plant(f, reap(f)(X))(X), f(X))
    close(plant(f, {"h": jnp.negative})(X), out_of(around, X, jnp.negative))
    xs = jnp.stack([X, 2 * X])
    for both in (jax.vmap(capture(f)), capture(jax.vmap(f))):
        out, collected = both(xs)
        close(out, jax.vmap(functools.partial(out_of, around))(xs))
        (h,) = collected["h"]
        wanted = jax.vmap(functools.partial(h_of, around))(xs)
        close(h, jnp.moveaxis(wanted, 0, 1) if h.shape[0] == 3 else wanted)  # loops come first


@around
@pytest.mark.parametrize("prim", [Exp, ExpByLin])
def test_derivatives_in_other_structures(around, prim):
    f = AROUND[around](prim.apply)
    slope = jax.grad(functools.partial(out_of, around))(X)
    close(jax.grad(lambda x: capture(f)(x)[0])(X), slope)
    total = lambda x: jnp.sum(reap(f)(x)["h"])
    close(jax.grad(total)(X), jax.grad(lambda x: jnp.sum(h_of(around, x)))(X))
    edited = jax.grad(functools.partial(out_of, around, edit=jnp.negative))(X)
    close(jax.grad(plant(f, {"h": jnp.negative}))(X), edited)
    if around != "custom_vjp":  # whose forward mode JAX refuses
        close(jax.jvp(lambda x: capture(f)(x)[0], (X,), (TANGENT,))[1], 2 * slope)


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"])
def remat3(request):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


@around
@pytest.mark.parametrize("prim", [Exp, ExpByLin])
def test_the_forward_pass_of_a_gradient_is_collected_once(around, prim, remat3):
    """Also where `jax.checkpoint` evaluates the primitive again in the backward pass."""
    f = AROUND[around](prim.apply)
    got, collected = capture(jax.grad(f))(X)
    close(got, jax.grad(functools.partial(out_of, around))(X))
    close(collected, {"h": (h_of(around, X),)})


@pytest.mark.parametrize("around", ["itself", "checkpoint", "scan", "scan of checkpoint"])
def test_a_plant_in_a_gradient_reaches_what_is_evaluated_again(around, remat3):
    """The rule of `Exp` then still says `2 * out`, of the output with a negative exponent."""
    slope, x = 1.0, X
    for _ in range(3 if "scan" in around else 1):
        x = jnp.exp(-2 * x) / (9 if "scan" in around else 1)
        slope = slope * 2 * x
    gradient = jax.grad(AROUND[around](Exp.apply))
    close(plant(gradient, {"h": jnp.negative})(X), slope)


def test_what_is_evaluated_in_both_passes_is_collected_twice():
    got, collected = capture(jax.grad(ExpByJvp.apply))(X)
    close((got, collected), (2 * jnp.exp(2 * X), {"h": (2 * X, 2 * X)}))


def test_folds_and_edits_in_loops():
    f = repeated(Exp.apply)
    hs = h_of("scan", X)
    close(reap(f, {"h": folds.last()})(X), {"h": hs[-1]})
    close(jax.grad(lambda x: reap(f, {"h": folds.mean()})(x)["h"])(X),
          jax.grad(lambda x: jnp.mean(h_of("scan", x)))(X))  # fmt: skip
    second = plant(f, {"h": harvest.at(1, harvest.add(1.0))})(X)
    close(second, jnp.exp(2 * (jnp.exp(hs[1] + 1) / 9)) / 9)
    loop = lambda x: lax.while_loop(lambda x: x < 9, Exp.apply, x)
    close(reap(loop, {"h": folds.count()})(X), {"h": 2})
    close(reap(loop, {"h": folds.last()})(X), {"h": 2 * jnp.exp(2 * X)})
    with pytest.raises(harvest.UnsupportedError, match=r"'h' .* is inside a `while_loop`"):
        reap(loop)(X)


def test_a_loop_that_vmap_has_batched():
    loop = lambda x: lax.while_loop(lambda x: x < 9, Exp.apply, x)
    xs = jnp.array([0.6, 2.0, 9.5])
    for counts in (reap(jax.vmap(loop), {"h": folds.count()}),
                   jax.vmap(reap(loop, {"h": folds.count()}))):  # fmt: skip
        close(counts(xs), {"h": [2, 1, 0]})


def test_sweeps_and_nans():
    f = lambda x: repeated(Exp.apply)(x)
    got = sweep(f, "h", lambda h: h + 1)(X)["h"]
    wanted = [plant(f, {"h": harvest.at(i, lambda h: h + 1)})(X) for i in range(3)]
    close(got, jnp.stack(wanted))
    assert not debug.nonfinite(f)(X)
    (fault,) = debug.nonfinite(f)(jnp.float32(jnp.nan))
    assert fault.key == "h" and fault.index == (0,)
