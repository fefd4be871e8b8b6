"""The `HiPrim`s of JAX that hold jaxprs: custom derivatives of every kind, and `checkpoint`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from harvest import Axis, UnsupportedError, at, capture, grad, plant, reap, sites, sow

X = jnp.float32(0.6)
SIN, COS = np.sin(0.6), np.cos(0.6)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


@pytest.fixture(params=[(), ("custom_vjp3",), ("custom_vjp3", "remat3")], ids=str, autouse=True)
def flags(request):
    names = [f"jax_{flag}" for flag in ("custom_vjp3", "remat3")]
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        jax.config.update(name, name.removeprefix("jax_") in request.param)
    yield request.param
    for name in names:
        jax.config.update(name, before[name])


def body(x):
    return sow(jnp.sin(x), name="h") * x


def fwd(x):
    return body(x), sow(2 * x, name="residual")


def bwd(residual, ct):
    return (sow(50 * ct * residual, name="bwd"),)


def with_options(**options):
    f = jax.custom_vjp(body)
    f.defvjp(fwd, bwd, **options)
    return f


def with_logs():
    f = jax.custom_vjp(body)
    f.defvjp_with_logs(fwd, lambda x, ct: (bwd(x, ct), {"g": ct}))
    return f


def with_accums():
    f = jax.custom_vjp(body)

    def accumulating(x, ct, accum):
        accum.accum(bwd(x, ct)[0])

    f.defvjp_with_accums(fwd, accumulating)
    return f


KINDS = {
    "plain": with_options,
    "generic_batching": lambda: with_options(generic_batching=True),
    "optimize_remat": lambda: with_options(optimize_remat=True),
    "logs": with_logs,
    "accums": with_accums,
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_values_and_plants(kind):
    f = KINDS[kind]()
    close(capture(f, mode="strict")(X), (SIN * 0.6, {"h": SIN}))
    close(plant(f, {"h": jnp.float32(5)})(X), 3)
    close(jax.grad(plant(f, {"h": jnp.negative}))(X), -(SIN + 0.6 * COS))
    close(plant(f, reap(f)(X))(X), f(X))
    assert [site.key for site in sites(f)(X)] == ["h"]


@kinds
def test_its_rule_applies_to_the_output_and_autodiff_to_what_is_collected(kind, flags):
    f = KINDS[kind]()
    out = lambda x: capture(f)(x)[0]
    close(jax.grad(out)(X), 60)
    close(jax.grad(jax.jit(out))(X), 60)
    close(jax.grad(jax.checkpoint(out))(X), 60)
    close(jax.grad(lambda x: reap(f)(x)["h"])(X), COS)
    close(jax.jacrev(jax.grad(out))(X), 100)
    close(grad(f, argnums=0)(X), ({"h": 0.6}, 60))


@kinds
def test_the_primitive_stays_where_nothing_inside_is_wanted(kind, flags):
    f = KINDS[kind]()
    name = "CustomVJPTraced" if flags or kind == "generic_batching" else "custom_vjp_call"
    text = str(jax.make_jaxpr(capture(lambda x: sow(f(x), name="z"), "z"))(X))
    assert text.count(f"= {name}[") == 1
    assert f"name={name}" in str(jax.make_jaxpr(capture(f))(X))


@kinds
def test_batches(kind):
    f, xs = KINDS[kind](), jnp.stack([X, 2 * X])
    for both in (jax.vmap(capture(f)), capture(jax.vmap(f))):
        close(both(xs), (np.sin(xs) * xs, {"h": (np.sin(xs),)}))
    for derivative in (
        jax.vmap(jax.grad(lambda x: capture(f)(x)[0])),
        jax.grad(lambda xs: jnp.sum(jax.vmap(capture(f))(xs)[0])),
        jax.grad(lambda xs: jnp.sum(capture(jax.vmap(f))(xs)[0])),
    ):
        close(derivative(xs), 100 * xs)
    close(jax.vmap(jax.grad(lambda x: reap(f)(x)["h"]))(xs), np.cos(xs))


@kinds
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_sites_of_the_rules(kind, around, flags):
    f = around(KINDS[kind]())
    got, collected = capture(jax.grad(f))(X)
    close(got, 60)
    for key, value in {"h": SIN, "residual": 1.2, "bwd": 60}.items():
        values = collected[key]
        assert np.allclose(values, value)
        # Here the forward rule is a part of what JAX evaluates again, with its sows.
        again = around is jax.checkpoint and "remat3" in flags and key != "bwd"
        assert len(values) in ((1, 2) if again else (1,))
    close(plant(jax.grad(f), {"residual": lambda r: jnp.full_like(r, 2)})(X), 100)
    close(plant(jax.grad(f), {"bwd": lambda ct: jnp.clip(ct, -1, 1)})(X), 1)


@kinds
def test_in_loops(kind):
    f = KINDS[kind]()
    steps = lambda x: lax.scan(lambda x, _: (f(x), None), x, length=2)[0]
    x1 = SIN * 0.6
    close(capture(steps)(X), (np.sin(x1) * x1, {"h": ([SIN, np.sin(x1)],)}))
    close(jax.grad(lambda x: capture(steps)(x)[0])(X), 60 * 100 * x1)
    close(capture(jax.grad(steps))(X)[1]["bwd"], ([6000 * x1, 100 * x1],))


def test_the_rule_of_custom_gradient():
    @jax.custom_gradient
    def f(x):
        return body(x), lambda ct: sow(100 * ct, name="bwd")

    close(capture(f)(X), (SIN * 0.6, {"h": (SIN,)}))
    close(jax.grad(lambda x: capture(f)(x)[0])(X), 100)
    close(capture(jax.grad(f))(X)[1], {"h": (SIN,), "bwd": (100,)})


def test_the_forward_rule_of_optimize_remat():
    """It is a primitive of its own, which is differentiated as it is written."""
    f = with_options(optimize_remat=True)
    forward = lambda x: jax.vjp(f, x)[0]
    close(capture(forward)(X), (SIN * 0.6, {"h": (SIN,), "residual": (1.2,)}))
    close(plant(forward, {"h": jnp.float32(5)})(X), 3)


def test_the_rules_of_defremat(flags):
    f = jax.custom_vjp(body)
    f.defremat(lambda x: (body(x), x), lambda saved, x: fwd(x), bwd)
    if not flags:
        with pytest.raises(NotImplementedError, match="requires the jax_custom_vjp3"):
            capture(f)(X)
        return
    close(capture(f)(X), (SIN * 0.6, {"h": (SIN,)}))
    for transform in (lambda f: f, jax.checkpoint):
        close(jax.grad(transform(lambda x: capture(f)(x)[0]))(X), 60)
        assert np.isclose(capture(jax.grad(transform(f)))(X)[1]["bwd"][0], 60)
    close(plant(f, {"h": jnp.float32(5)})(X), 3)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("saved")])
def test_checkpoint_and_its_names(policy):
    layer = lambda x: jnp.sin(checkpoint_name(sow(2 * x, name="h"), "saved"))
    f = jax.checkpoint(layer, policy=policy)
    close(capture(f)(X), (np.sin(1.2), {"h": (1.2,)}))
    close(capture(jax.grad(f))(X), (2 * np.cos(1.2), {"h": (1.2,)}))
    close(jax.grad(lambda x: capture(f)(x)[0])(X), 2 * np.cos(1.2))
    close(plant(f, {"h": jnp.float32(5)})(X), np.sin(5))


def test_a_root_finder():
    def newton(f, y):
        return lax.fori_loop(0, 4, lambda _, y: y - f(y) / (2 * y), y)

    def f(x):
        solve_tangent = lambda g, y: sow(y / g(jnp.float32(1)), name="tangent")
        return lax.custom_root(lambda y: sow(y * y, name="h") - x, 1 + x, newton, solve_tangent)

    y, values = 1.6, []
    for _ in range(4):
        values.append(y * y)
        y = y - (y * y - 0.6) / (2 * y)
    close(capture(f)(X), (y, {"h": (values,)}))
    close(plant(f, reap(f)(X))(X), y)
    # By the implicit function theorem, through which nothing is differentiated but `f`.
    close(jax.grad(lambda x: capture(f)(x)[0])(X), 0.5 / np.sqrt(0.6))
    tangent = lambda x: jax.jvp(f, (x,), (jnp.float32(2),))[1]
    # JAX solves for the negative of the tangent.
    close(capture(tangent, "tangent")(X), (1 / np.sqrt(0.6), {"tangent": (-1 / np.sqrt(0.6),)}))
    with pytest.raises(UnsupportedError, match=r"'h' .* is inside the predicate of a `while_loop`"):
        dynamic = lambda f, y: lax.while_loop(lambda y: abs(f(y)) > 1e-3, lambda y: y / 2, y)
        reap(lambda x: lax.custom_root(lambda y: sow(y, name="h"), x, dynamic, newton))(X)


def test_sites_in_a_root_finder_are_those_of_its_iterations():
    def f(x):
        newton = lambda f, y: lax.fori_loop(0, 4, lambda _, y: y - f(y) / (2 * y), y)
        square = lambda y: sow(y * y, name="h") - x
        return lax.custom_root(square, 1 + x, newton, lambda g, y: y / g(jnp.float32(1)))

    def by_hand(x, edit=lambda h, i: h):
        y, values = 1 + x, []
        for i in range(4):
            values.append(edit(y * y, i))
            y = y - (values[-1] - x) / (2 * y)
        return y, values

    (site,) = sites(f)(X)
    assert site.axes == (Axis("loop", 4),) and site.nbytes == 16
    tenth = lambda h: h + 0.1
    close(plant(f, {"h": tenth})(X), by_hand(0.6, lambda h, i: h + 0.1)[0])
    second = plant(f, {"h": at(1, tenth)})
    close(second(X), by_hand(0.6, lambda h, i: h + 0.1 * (i == 1))[0])
    # A planted body is differentiated as it is written, and so is it from a site on.
    close(
        jax.grad(second)(X), jax.grad(lambda x: by_hand(x, lambda h, i: h + 0.1 * (i == 1))[0])(X)
    )
    of_eps = lambda eps: by_hand(X, lambda h, i: h + eps[i])[0]
    close(grad(f)(X)["h"], jax.grad(of_eps)(jnp.zeros(4)))
    xs = jnp.array([0.6, 2.0])
    outs, values = by_hand(xs)
    close(jax.vmap(capture(f))(xs), (outs, {"h": (jnp.stack(values, 1),)}))
    close(capture(jax.vmap(f))(xs), (outs, {"h": (jnp.stack(values),)}))
    close(jax.vmap(jax.grad(lambda x: capture(f)(x)[0]))(xs), 0.5 / np.sqrt(xs))


def test_numpy_functions_that_are_primitives_are_not_looked_into():
    def f(x):
        index = jnp.searchsorted(x, sow(x[1], name="value"))
        where = jnp.nonzero(x > 1, size=2)[0]
        return sow(index, name="index"), where

    x = jnp.array([0.5, 1.5, 2.5])
    (index, where), collected = capture(f)(x)
    assert index == 1 and list(where) == [1, 2]
    close(collected, {"value": (1.5,), "index": (1,)})
