"""Logs of backward passes: those of JAX's rules flow on, and `perturb` agrees with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import harvest
from harvest import UnsupportedError, add, capture, perturb, plant, reap, sow
from tests.hi_prims import Exp, Op

X = jnp.float32(0.6)
CT = jnp.float32(2)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def logs_of(f, x=X, ct=CT):
    """The cotangent of `x` and the logs; a `CondSum` of JAX's as a pair."""
    (of_x,), logs = jax.vjp(f, x)[1].with_logs(ct)
    is_sum = lambda node: hasattr(node, "branches")
    pair = lambda node: (node.index, node.branches) if is_sum(node) else node
    return of_x, jax.tree.map(pair, logs, is_leaf=is_sum)


# ----------------------------------------------------------------------- the rules that log


def body(x):
    return sow(jnp.sin(x), name="h") * x


def by_custom_vjp(**options):
    f = jax.custom_vjp(body)
    f.defvjp_with_logs(
        lambda x: (body(x), x), lambda x, ct: ((100 * ct,), {"ct": ct, "x": {"res": x}}), **options
    )
    return f


@jax.custom_gradient(with_logs=True)
def by_custom_gradient(x):
    return body(x), lambda ct: ((100 * ct,), {"ct": ct, "x": {"res": x}})


def by_accums(x):
    f = jax.custom_vjp(body)

    def bwd(x, ct, accum):
        accum.accum(100 * ct)
        return {"ct": ct, "x": {"res": x}}

    f.defvjp_with_accums(lambda x: (body(x), x), bwd)
    return f(x)


class Logging(Op):
    def expand(self, x):
        return body(x)

    def vjp_fwd(self, nzs_in, x):
        return self(x), x

    def vjp_bwd(self, x, ct, accum):
        accum.accum(100 * ct)
        return {"ct": ct, "x": {"res": x}}

    def jvp(self, primals, tangents):
        return by_custom_vjp_jvp(*primals, *tangents)


def by_custom_vjp_jvp(x, tangent):
    """Under `checkpoint` JAX takes the rule for `jvp`, whose transpose has to log."""
    return Logging.apply(x), LoggingTangent(jax.typeof(tangent), jax.typeof(x))(tangent, x)


class LoggingTangent(Op):
    def expand(self, tangent, x):
        return 100 * tangent

    def transpose(self, ct, accum, x):
        accum.accum(100 * ct)
        return {"ct": ct, "x": {"res": x}}


RULES = {
    "custom_vjp": by_custom_vjp(),
    "generic_batching": by_custom_vjp(generic_batching=True),
    "custom_gradient": by_custom_gradient,
    "accums": by_accums,
    "HiPrim": Logging.apply,
}


def over_shards(f, spec, check_vma=True):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


AROUND = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0],
    "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda x: x, x),
    "switch": lambda f: lambda x: lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, f], x),
    "scan of cond": lambda f: (
        lambda x: lax.scan(
            lambda x, i: (lax.cond(i > 0, f, lambda x: 3 * x, x), None), x, jnp.arange(2)
        )[0]
    ),
    "shard_map": lambda f: over_shards(f, PartitionSpec()),
}
rules = pytest.mark.parametrize("rule", RULES)
arounds = pytest.mark.parametrize("around", AROUND)


def beside(f):
    """With zeros as the cotangents of what is collected."""

    def both(x):
        out, collected = capture(f)(x)
        floats = [h for h in jax.tree.leaves(collected) if h.dtype == x.dtype]
        assert floats
        return sum((0 * jnp.sum(h) for h in floats), out)

    return both


TRANSFORMS = {
    "capture": lambda f: lambda x: capture(f)(x)[0],
    "capture nothing": lambda f: lambda x: capture(f, [])(x)[0],
    "capture in capture": lambda f: lambda x: capture(lambda x: capture(f)(x)[0])(x)[0],
    "jit of capture": lambda f: jax.jit(lambda x: capture(f)(x)[0]),
    "plant before": lambda f: plant(lambda x: f(sow(x, name="in")), {"in": add(0.0)}),
    "reap": lambda f: lambda x: reap(lambda x: sow(f(x), name="out"), "out")(x)["out"],
    "collected beside": beside,
}


@rules
@arounds
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_logs_of_rules_flow_through(rule, around, transform):
    f = AROUND[around](RULES[rule])
    close(logs_of(TRANSFORMS[transform](f)), logs_of(f))


@rules
def test_logs_are_what_the_rule_says(rule):
    f = lambda x: capture(RULES[rule])(x)[0]
    close(logs_of(f), (200, {"ct": 2, "x": {"res": 0.6}}))
    # In the first of two steps the cotangent has passed through the second.
    two = lambda x: lax.scan(lambda x, _: (RULES[rule](x), None), x, length=2)[0]
    close(
        logs_of(lambda x: capture(two)(x)[0]),
        (20_000, {"ct": [200, 2], "x": {"res": [0.6, np.sin(0.6) * 0.6]}}),
    )


@rules
def test_logs_of_a_batch(rule):
    f, xs, cts = RULES[rule], jnp.stack([X, 2 * X]), jnp.array([2.0, 3.0])
    wanted = 100 * cts, {"ct": cts, "x": {"res": xs}}
    close(logs_of(jax.vmap(f), xs, cts), wanted)
    close(logs_of(lambda xs: capture(jax.vmap(f))(xs)[0], xs, cts), wanted)
    close(logs_of(lambda xs: jax.vmap(capture(f))(xs)[0], xs, cts), wanted)
    close(jax.vmap(lambda x, ct: logs_of(lambda x: capture(f)(x)[0], x, ct))(xs, cts), wanted)


def test_a_planted_body_has_no_rule_that_could_log():
    f = by_custom_vjp()
    of_x, logs = logs_of(plant(f, {"h": jnp.negative}))
    close(of_x, -2 * (np.sin(0.6) + 0.6 * np.cos(0.6)))
    assert logs == {}


def test_a_rule_is_not_asked_for_what_is_only_collected():
    of_x, logs = logs_of(lambda x: reap(by_custom_vjp())(x)["h"])
    close(of_x, 2 * np.cos(0.6))
    assert logs == {}


def test_a_log_that_is_made_twice():
    tag = functools.partial(perturb, name="g", log=True)
    f = jax.custom_vjp(lambda x: sow(2 * tag(x), name="h"))
    f.defvjp_with_logs(lambda x: (f(x), None), lambda _, ct: ((100 * ct,), {"g": ct}))
    _, pullback = jax.vjp(capture(f), X)
    with pytest.raises(UnsupportedError, match="the backward-pass log 'g' is made twice"):
        pullback.with_logs((CT, {"h": (CT,)}))


def test_the_log_of_a_rule_for_transposes():
    class Linear(Op):
        def expand(self, tangent):
            return sow(100 * tangent, name="tangent")

        def transpose(self, ct, accum):
            accum.accum(100 * ct)
            return {"ct": ct}

    for linear in (Linear.apply, lambda t: capture(Linear.apply)(t)[0]):
        f = jax.custom_jvp(jnp.sin)
        f.defjvp(lambda primals, tangents: (jnp.sin(*primals), linear(*tangents)))  # noqa: B023
        close(logs_of(f), (200, {"ct": 2}))


# ----------------------------------------------------------------------- structured residuals


class Structured(Op):
    def expand(self, x):
        return body(x)

    def vjp_fwd(self, nzs_in, x):
        return self(x), x, True, {"factor": 100 * x}

    def vjp_bwd(self, x, structured, ct, accum):
        accum.accum(structured["factor"] * ct)
        return {"ct": ct, "x": x}


@pytest.mark.parametrize("around", ["itself", "jit", "scan", "switch"])
def test_structured_residuals_are_those_of_the_rule(around):
    f = AROUND[around](Structured.apply)
    plain = jax.vjp(f, X)[1]
    captured = jax.vjp(lambda x: capture(f)(x)[0], X)[1]
    assert jax.tree.leaves(plain.structured_residuals)
    close(captured.structured_residuals, plain.structured_residuals)
    close(logs_of(lambda x: capture(f)(x)[0]), logs_of(f))
    # They may be replaced before the backward pass.
    twice = jax.tree.map(
        lambda r: 2 * r if jnp.issubdtype(r.dtype, jnp.floating) else r,
        captured.structured_residuals,
    )
    close(captured.replace(structured_residuals=twice)(CT),
          plain.replace(structured_residuals=twice)(CT))  # fmt: skip


# ----------------------------------------------------------------------------------- `perturb`


def layer(x, tag):
    return jnp.sin(tag(x**2)) * x


PERTURBED = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0],
    "scan of checkpoint": lambda f: (
        lambda x: lax.scan(jax.checkpoint(lambda x, _: (f(x), None)), x, length=3)[0]
    ),
    "custom_vjp": lambda f: in_custom_vjp(f),
}


def in_custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: jax.vjp(f, x), lambda pullback, ct: pullback(ct))
    return g


def by_hand(around, x):
    """The gradient with respect to what is added at the site, in each iteration."""
    if "scan" not in around:
        return jax.grad(lambda eps: layer(x, lambda v: v + eps))(jnp.float32(0))

    def steps(eps):
        y = x
        for i in range(3):
            y = layer(y, lambda v: v + eps[i])  # noqa: B023
        return y

    return jax.grad(steps)(jnp.zeros(3))


@pytest.mark.parametrize("around", PERTURBED)
def test_jax_logs_harvest_collects_and_a_hand_finds_the_same(around):
    tag = functools.partial(perturb, name="g", log=True)
    f = PERTURBED[around](lambda x: layer(x, tag))
    wanted = by_hand(around, X)
    if around != "custom_vjp":  # whose rule calls a pullback, which drops its logs
        for through in (f, lambda x: capture(f)(x)[0], lambda x: plant(f, {})(x)):
            close(logs_of(through, ct=jnp.float32(1))[1], {"g": wanted})
    close(capture(jax.grad(f))(X)[1], {"g": (wanted,)})


def test_branches_log_a_sum():
    tag = functools.partial(perturb, name="g", log=True)
    f = lambda x: lax.cond(x > 0, lambda x: layer(x, tag), lambda x: 2 * x, x)
    for through in (f, lambda x: capture(f)(x)[0]):
        for x in (X, -X):
            logs = jax.vjp(through, x)[1].with_logs(jnp.float32(1))[1]["g"]
            (collected,) = capture(jax.grad(f))(x)[1]["g"]
            wanted = by_hand("cond", x) if x > 0 else 0.0
            assert logs.index == collected.index == int(x > 0)
            assert logs.branches[0] is collected.branches[0] is None
            close([logs.branches[1], collected.branches[1]], [wanted, wanted])


@pytest.mark.parametrize("in_axes", [0, 1])
def test_batches_log_with_their_axis_in_front(in_axes):
    xs = jnp.arange(6.0).reshape(2, 3) / 5
    f = lambda x: jnp.sum(layer(x, functools.partial(perturb, name="g", log=True)))
    batched = jax.vmap(f, in_axes=in_axes)
    wanted = jax.vmap(jax.grad(lambda eps, x: jnp.sum(layer(x, lambda v: v + eps))), (0, in_axes))
    zeros = jnp.zeros_like(jnp.moveaxis(xs, in_axes, 0))
    ones = jnp.ones(xs.shape[in_axes])
    for through in (batched, lambda xs: capture(batched)(xs)[0]):
        logs = jax.vjp(through, xs)[1].with_logs(ones)[1]
        close(logs, {"g": wanted(zeros, xs)})
    total = lambda xs: jnp.sum(batched(xs))
    close(capture(jax.grad(total))(xs)[1], {"g": (wanted(zeros, xs),)})


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_log_as_they_make_up_the_whole(check_vma):
    xs, spec = jnp.linspace(0.2, 1.4, 4), PartitionSpec("i")
    tag = functools.partial(perturb, name="g", log=True, spec=spec)
    f = over_shards(lambda x: layer(x, tag), spec, check_vma)
    wanted = jax.grad(lambda eps: jnp.sum(layer(xs, lambda v: v + eps)))(jnp.zeros(4))
    for through in (f, lambda x: capture(f)(x)[0]):
        close(jax.vjp(through, xs)[1].with_logs(jnp.ones(4))[1], {"g": wanted})
    close(capture(jax.grad(lambda x: jnp.sum(f(x))))(xs)[1], {"g": (wanted,)})


def test_a_plant_is_upstream_of_a_log():
    tag = functools.partial(perturb, name="g", log=True)
    f = lambda x: sow(layer(x, tag), name="y") ** 2
    wanted = jax.grad(lambda eps: (3 * layer(X, lambda v: v + eps)) ** 2)(jnp.float32(0))
    close(logs_of(plant(f, {"y": lambda y: 3 * y}), ct=jnp.float32(1))[1], {"g": wanted})
    close(logs_of(plant(f, {"y": CT}), ct=jnp.float32(1))[1], {})


def test_logs_inside_of_a_primitive_that_is_differentiated_as_written():
    class Inner(Exp):
        def expand(self, x):
            return perturb(super().expand(x), name="g", log=True) * 3

    # By its own rule nothing is logged; what is planted inside is no longer under its rule.
    assert logs_of(lambda x: capture(Inner.apply)(x)[0])[1] == {}
    close(logs_of(plant(Inner.apply, {"h": harvest.add(0.0)})), (12 * np.exp(1.2), {"g": 6}))
