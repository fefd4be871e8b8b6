"""Rules that are wrong on purpose (a hundred times too large) tell which derivative was used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import harvest
from harvest import UnsupportedError, capture, plant, reap, sites, sow


@pytest.fixture(params=["classic", "traced"], autouse=True)
def implementation(request):
    """JAX also has these functions as `HiPrim`s, which are to become the only ones."""
    flags = ["jax_custom_jvp3", "jax_custom_vjp3"]
    before = {flag: getattr(jax.config, flag) for flag in flags}
    for flag in flags:
        jax.config.update(flag, request.param == "traced")
    yield request.param
    for flag in flags:
        jax.config.update(flag, before[flag])


# ---------------------------------------------------------------- sin(x) + x ** 2, with h = sin(x)


def body(x):
    return sow(jnp.sin(x), name="h") + x**2


custom_jvp = jax.custom_jvp(body)
custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), 100 * tangents[0]))

custom_vjp = jax.custom_vjp(body)
custom_vjp.defvjp(lambda x: (body(x), None), lambda _, ct: (100 * ct,))

of_jit = jax.custom_jvp(jax.jit(body))
of_jit.defjvp(lambda primals, tangents: (of_jit(*primals), 100 * tangents[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def nondiff_jvp(fn, x, power):
    return sow(fn(x), name="h") + x**power


@nondiff_jvp.defjvp
def _(fn, power, primals, tangents):
    return nondiff_jvp(fn, *primals, power), 50 * power * tangents[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def nondiff_vjp(fn, x, power):
    return sow(fn(x), name="h") + x**power


nondiff_vjp.defvjp(
    lambda fn, x, power: (nondiff_vjp(fn, x, power), None),
    lambda fn, power, _, ct: (50 * power * ct,),
)


@jax.custom_vjp
def integers(x, n):
    return sow((jnp.sin(x), n + 1), name="h")[0] + x**2, n


integers.defvjp(lambda x, n: (integers(x, n), None), lambda _, cts: (100 * cts[0], None))

ARRAY = jnp.float32(2)


def closed_over_array(x):
    f = jax.custom_jvp(lambda x: sow(jnp.sin(x), name="h") + x**ARRAY)
    f.defjvp(lambda primals, tangents: (f(*primals), 50 * ARRAY * tangents[0]))
    return f(x)


def closed_over_tracer(x):
    # As under `jit`, a body may close over tracers; a rule may not.
    two = jax.lax.stop_gradient(x) * 0 + 2
    f = jax.custom_vjp(lambda x: sow(jnp.sin(x), name="h") + x**two)
    f.defvjp(lambda x: (jnp.sin(x) + x**2, None), lambda _, ct: (100 * ct,))
    return f(x)


PROGRAMS = {
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "of jit": of_jit,
    "in jit": jax.jit(lambda x: custom_jvp(x)),
    "in remat": jax.checkpoint(lambda x: custom_vjp(x)),
    "nondiff custom_jvp": lambda x: nondiff_jvp(jnp.sin, x, 2),
    "nondiff custom_vjp": lambda x: nondiff_vjp(jnp.sin, x, 2),
    "integers": lambda x: integers(x, jnp.int32(3))[0],
    "closed-over array": closed_over_array,
    "closed-over tracer": closed_over_tracer,
}
programs = pytest.mark.parametrize("name", PROGRAMS)
X = jnp.float32(0.6)


def read(f, x):
    return jax.tree.leaves(capture(f)(x)[1]["h"])[0]


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@programs
def test_values(name):
    f = PROGRAMS[name]
    out, collected = capture(f, mode="strict")(X)
    close(out, np.sin(0.6) + 0.36)
    close(jax.tree.leaves(collected)[0], np.sin(0.6))
    assert [site.key for site in sites(f)(X)] == ["h"]


@programs
def test_the_rule_applies_to_the_output(name):
    close(jax.grad(lambda x: capture(PROGRAMS[name])(x)[0])(X), 100)


@programs
def test_what_is_collected_differentiates_as_written(name):
    close(jax.grad(functools.partial(read, PROGRAMS[name]))(X), np.cos(0.6))


@programs
def test_both_add_up(name):
    f = PROGRAMS[name]
    both = lambda x: capture(f)(x)[0] + 7 * read(f, x)
    close(jax.grad(both)(X), 100 + 7 * np.cos(0.6))
    _, vjp = jax.vjp(lambda x: (capture(f)(x)[0], read(f, x)), X)
    close(vjp((jnp.float32(2), jnp.float32(3)))[0], 200 + 3 * np.cos(0.6))


@programs
def test_a_planted_body_is_differentiated_as_written(name):
    f = PROGRAMS[name]
    value = (jnp.float32(5), jnp.int32(4)) if name == "integers" else jnp.float32(5)
    planted = plant(f, {"h": value})
    close(planted(X), 5 + 0.36)
    close(jax.grad(planted)(X), 2 * 0.6)
    close(plant(f, reap(f)(X))(X), f(X))


@programs
def test_vmap(name):
    f, xs = PROGRAMS[name], jnp.array([0.1, 0.6, 2.0])
    for batched in (jax.vmap(capture(f)), capture(jax.vmap(f))):
        out, collected = batched(xs)
        close(out, np.sin(xs) + np.square(xs))
        close(jax.tree.leaves(collected)[0], np.sin(xs))
    close(jax.vmap(jax.grad(lambda x: capture(f)(x)[0]))(xs), [100, 100, 100])
    close(jax.vmap(jax.grad(functools.partial(read, f)))(xs), np.cos(xs))


@pytest.mark.parametrize("name", [n for n in PROGRAMS if "jvp" in n or n == "of jit"])
def test_forward_mode(name):
    f = PROGRAMS[name]
    (out, h), (d_out, d_h) = jax.jvp(
        lambda x: (capture(f)(x)[0], read(f, x)), (X,), (jnp.float32(2),)
    )
    close([out, h, d_out, d_h], [np.sin(0.6) + 0.36, np.sin(0.6), 200, 2 * np.cos(0.6)])


def test_second_derivatives():
    f, g = jax.custom_jvp(body), jax.custom_vjp(body)
    f.defjvp(lambda primals, tangents: (f(*primals), 100 * jnp.sin(primals[0]) * tangents[0]))
    g.defvjp(lambda x: (g(x), x), lambda x, ct: (100 * jnp.sin(x) * ct,))
    reverse = lambda f: jax.jacrev(jax.jacrev(f))
    for fn, hessian in ((f, jax.hessian), (f, reverse), (g, reverse)):
        close(hessian(lambda x, fn=fn: capture(fn)(x)[0])(X), 100 * np.cos(0.6))
        close(hessian(functools.partial(read, fn))(X), -np.sin(0.6))


def test_rules_of_nested_functions_apply_to_what_they_return():
    inner = jax.custom_jvp(lambda x: sow(3 * x, name="inner"))
    inner.defjvp(lambda primals, tangents: (inner(*primals), 7 * tangents[0]))
    outer = jax.custom_vjp(lambda x: sow(inner(x) ** 2, name="outer"))
    outer.defvjp(lambda x: (outer(x), None), lambda _, ct: (100 * ct,))
    collected = lambda key: jax.grad(lambda x: capture(outer)(x)[1][key][0])(X)
    close(jax.grad(lambda x: capture(outer)(x)[0])(X), 100)
    close(collected("outer"), 2 * (3 * 0.6) * 7)
    close(collected("inner"), 3)
    close(jax.grad(plant(outer, {"outer": jnp.negative}))(X), -2 * (3 * 0.6) * 7)
    close(jax.grad(plant(outer, {"inner": jnp.negative}))(X), 2 * 9 * 0.6)


def test_a_rule_that_is_not_asked_is_not_run():
    # Its factor is infinite at 0, where a cotangent of zero would become NaN.
    f = jax.custom_vjp(lambda x: jnp.sqrt(sow(3 * x, name="h")))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct / jnp.sqrt(x),))
    close(jax.grad(functools.partial(read, f))(jnp.float32(0)), 3)


# ----------------------------------------------------------------------------- symbolic zeros


def recording(rule_of, seen):
    """`x * y`, whose rule notes which arguments are differentiated."""

    def f(x, y):
        return sow(x * y, name="h"), sow(x - y, name="g")

    def jvp(primals, tangents):
        seen.append([type(t).__name__ == "SymbolicZero" for t in tangents])
        out = f(*primals)
        zeros = [jnp.zeros(()) if z else t for t, z in zip(tangents, seen[-1], strict=True)]
        return out, (100 * zeros[0] + 10 * zeros[1], zeros[0])

    def fwd(x, y):
        seen.append([x.perturbed, y.perturbed])
        return f(x.value, y.value), None

    def bwd(_, cts):
        seen.append([type(ct).__name__ == "SymbolicZero" for ct in cts])
        ct = cts[1] if seen[-1][0] else 100 * cts[0]
        return ct, ct / 10

    if rule_of == "jvp":
        custom = jax.custom_jvp(f)
        custom.defjvp(jvp, symbolic_zeros=True)
    else:
        custom = jax.custom_vjp(f)
        custom.defvjp(fwd, bwd, symbolic_zeros=True)
    return custom


@pytest.mark.parametrize("rule_of", ["jvp", "vjp"])
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("which", [0, 1])
def test_rules_see_the_same_symbolic_zeros(rule_of, argnums, which):
    seen, seen_captured = [], []
    args = jnp.float32(3), jnp.float32(5)
    plain = jax.grad(lambda x, y: recording(rule_of, seen)(x, y)[which], argnums)(*args)
    captured = jax.grad(
        lambda x, y: capture(recording(rule_of, seen_captured))(x, y)[0][which], argnums
    )(*args)
    np.testing.assert_array_equal(captured, plain)
    assert seen_captured == seen


# ------------------------------------------------------------------------ sows inside of rules


@jax.custom_vjp
def sown_rules(x):
    return sow(jnp.sin(x), name="primal")


def _fwd(x):
    return sow(jnp.sin(x), name="fwd"), sow(jnp.cos(x), name="residual")


def _bwd(residual, ct):
    return (sow(ct * residual, name="bwd"),)


sown_rules.defvjp(_fwd, _bwd)


def test_sites_in_the_rules_of_a_gradient():
    f = lambda x: sown_rules(x) ** 2
    sin, cos = np.sin(0.6), np.cos(0.6)
    assert list(capture(f)(X)[1]) == ["primal"]
    grad, collected = capture(jax.grad(f), mode="strict")(X)
    wanted = {"fwd": sin, "residual": cos, "bwd": 2 * sin * cos}
    assert collected.keys() == wanted.keys()
    for key in wanted:
        close(collected[key], wanted[key])
    close(grad, 2 * sin * cos)


def test_the_table_and_the_round_trip_of_rules():
    grad = jax.grad(lambda x: lax.scan(lambda x, _: (sown_rules(x), None), x, length=3)[0])
    table = sites(grad)(X)
    assert [site.key for site in table] == ["fwd", "residual", "bwd"]
    assert {site.axes for site in table} == {(harvest.Axis("loop", 3),)}
    xs = [0.6, np.sin(0.6), np.sin(np.sin(0.6))]
    cos = np.cos(xs)
    wanted = cos.prod()
    acts = {"fwd": np.sin(xs), "residual": cos, "bwd": [wanted, cos[1] * cos[2], cos[2]]}
    got, collected = capture(grad, mode="strict")(X)
    close(got, wanted)
    for key, values in acts.items():
        close(collected[key], values)
        close(plant(grad, {key: jnp.float32(values)})(X), wanted)
    other = jnp.float32([2.0, 3.0, 5.0])  # the residuals of the steps, whose slopes they are
    close(plant(grad, {"residual": other})(X), 30)
    close(plant(grad, {"bwd": harvest.at(1, harvest.scale(2.0))})(X), 2 * wanted)


PLANTS = [("fwd", 5.0, 10 * np.cos(0.6)), ("residual", 3.0, 6 * np.sin(0.6)), ("bwd", 9.0, 9.0)]


@pytest.mark.parametrize("key, value, wanted", PLANTS)
def test_plants_in_the_rules_of_a_gradient(key, value, wanted):
    grad = jax.grad(lambda x: sown_rules(x) ** 2)
    close(plant(grad, {key: jnp.float32(value)})(X), wanted)
    clipped = plant(grad, {"bwd": lambda ct: jnp.clip(ct, -0.5, 0.5)})
    close(clipped(X), 0.5)


def test_a_site_in_a_jvp_rule():
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda ps, ts: (jnp.sin(*ps), sow(100 * ts[0], name="tangent")))
    tangent = lambda x: jax.jvp(f, (x,), (jnp.float32(2),))[1]
    close(reap(tangent)(X)["tangent"], 200)
    close(plant(tangent, {"tangent": jnp.float32(3)})(X), 3)
    close(capture(jax.grad(f))(X)[0], 100)


# -------------------------------------------------------------------------------- side effects


def noisy(kind, callback, calls):
    def note(x):
        calls.append(float(x))

    def body(x):
        if callback == "io":
            io_callback(note, None, x, ordered=True)
        else:
            jax.debug.callback(note, x)
        return sow(jnp.sin(x), name="h")

    if kind == "custom_jvp":
        f = jax.custom_jvp(body)
        f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0]))
    else:
        f = jax.custom_vjp(body)
        f.defvjp(lambda x: (f(x), None), lambda _, ct: (100 * ct,))
    return f


def test_side_effects_in_a_loop_inside_happen_as_often_as_without():
    calls = []

    def step(carry):
        jax.debug.callback(calls.append, carry[1])
        return carry[0] + 1, jnp.sin(carry[1])

    loop = lambda x: lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]
    f = jax.custom_jvp(lambda x: 2 * sow(loop(x), name="h"))
    f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0]))
    for derivative in (jax.grad(f), jax.grad(lambda x: capture(f)(x)[0])):
        calls.clear()
        close(derivative(X), 100)
        jax.effects_barrier()
        assert len(calls) == 3


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_a_rule_that_evaluates_a_loop_inside_sows_nothing_again(kind):
    def body(x):
        step = lambda x: sow(2 * x, name="h")
        return lax.while_loop(lambda x: x < 10, step, x)

    f = kind(body)
    if kind is jax.custom_jvp:
        f.defjvp(lambda primals, tangents: (body(*primals), 100 * tangents[0]))
    else:
        f.defvjp(lambda x: (body(x), None), lambda _, ct: (100 * ct,))
    select = {"h": harvest.folds.last()}

    def loss(x):
        out, acts = capture(f, select)(x)
        return out, acts["h"][0]

    close(jax.grad(loss, has_aux=True)(jnp.float32(1)), (100, 16))
    assert capture(jax.grad(loss, has_aux=True))(jnp.float32(1))[1] == {}


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_a_collective_is_no_side_effect(kind):
    body = lambda x: 2 * sow(lax.psum(jnp.sin(x), "i"), name="h")
    f = kind(body)
    if kind is jax.custom_jvp:
        f.defjvp(lambda primals, tangents: (body(*primals), 100 * tangents[0]))
    else:
        f.defvjp(lambda x: (body(x), None), lambda _, ct: (100 * ct,))

    def both(x):
        return jax.value_and_grad(lambda x: capture(f)(x), has_aux=True)(x)

    xs = jnp.array([0.5, 1.5])
    (out, acts), grads = jax.vmap(both, axis_name="i")(xs)
    total = np.full(2, np.sin(xs).sum())
    close((out, acts["h"][0], grads), (2 * total, total, np.full(2, 100.0)))


USES = {
    "value": (lambda f: f, lambda f: capture(f)),
    "reap": (lambda f: f, lambda f: reap(f)),
    "plant": (lambda f: f, lambda f: plant(f, {"h": jnp.float32(1)})),
    "grad": (jax.grad, lambda f: jax.grad(lambda x: capture(f)(x)[0])),
    "grad of collected": (jax.grad, lambda f: jax.grad(functools.partial(read, f))),
    "grad of reap": (jax.grad, lambda f: jax.grad(lambda x: reap(f)(x)["h"])),
    "captured grad": (jax.grad, lambda f: capture(jax.grad(f))),
}


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
@pytest.mark.parametrize("callback", ["io", "debug"])
@pytest.mark.parametrize("use", USES)
def test_side_effects_happen_as_often_as_without(kind, callback, use):
    counts = []
    for transform in USES[use]:
        calls = []
        jax.jit(transform(noisy(kind, callback, calls)))(X)
        jax.effects_barrier()
        counts.append(len(calls))
    assert counts == [1, 1]


# -------------------------------------------------------------------- what JAX defines by rules

ACTIVATIONS = [jax.nn.relu, jax.nn.silu, jax.nn.softmax, jax.nn.logsumexp, jax.nn.gelu]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sites_around_functions_with_rules(activation):
    @jax.jit
    def f(x):
        h = sow(activation(sow(2 * x, name="before")), name="after")
        return jnp.sum(h**2)

    def by_hand(x):
        h = activation(2 * x)
        return jnp.sum(h**2), {"before": 2 * x, "after": h}

    x = jnp.array([-1.0, 0.0, 2.0])
    for transform in (lambda g: g, functools.partial(jax.grad, has_aux=True)):
        got = transform(capture(f, mode="strict"))(x)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got,
                     jax.jit(transform(by_hand))(x))  # fmt: skip
    close(plant(f, reap(f)(x))(x), f(x))


@jax.custom_vjp
def scoped(x):
    with harvest.scope("a"):
        h = sow(jnp.sin(x), name="h")
    with harvest.scope("b"):
        return 2 * h + sow(jnp.cos(x), name="h")


def scoped_bwd(x, ct):
    with harvest.scope("bwd"):
        return (sow(7 * ct * x, name="h"),)


scoped.defvjp(lambda x: (scoped(x), x), scoped_bwd)


@pytest.mark.parametrize(
    "select, left",
    [(None, ["bwd/h"]), ("a/h", ["b/h", "bwd/h"]), ("b/h", ["a/h", "bwd/h"])],
)
def test_what_was_collected_is_not_sown_again_by_a_rule(select, left):
    inner = lambda x: capture(scoped, select)(x)[0]
    assert list(capture(jax.grad(inner))(X)[1]) == left
    assert list(capture(jax.grad(scoped))(X)[1]) == ["a/h", "b/h", "bwd/h"]


def hidden(x):
    """What JAX cannot differentiate, for which a custom rule stands in."""
    double = lambda a: 2 * np.asarray(a)
    return 3 * sow(jax.pure_callback(double, jax.ShapeDtypeStruct((), x.dtype), x), name="h")


def test_a_rule_for_what_jax_cannot_differentiate():
    by_vjp, by_jvp = jax.custom_vjp(hidden), jax.custom_jvp(hidden)
    by_vjp.defvjp(lambda x: (hidden(x), None), lambda _, ct: (6 * ct,))
    by_jvp.defjvp(lambda primals, tangents: (hidden(*primals), 6 * tangents[0]))
    for f in (by_vjp, by_jvp):
        grad, collected = jax.grad(capture(f), has_aux=True)(X)
        assert grad == 6
        close(collected["h"][0], 2 * X)
        with pytest.raises(harvest.UnsupportedError, match="JAX cannot differentiate that"):
            jax.grad(lambda x: reap(f)(x)["h"])(X)  # noqa: B023


def test_differentiating_a_capture_silences_nobody_else():
    """JAX keeps the derivative rule of a jitted function once it has traced it."""
    body = lambda x: sow(1.2 * x, name="a")
    rule = jax.custom_jvp(body)
    rule.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    f = jax.jit(rule)
    jax.grad(lambda x: capture(f)(x)[0])(X)
    assert list(capture(jax.grad(lambda x: f(x)))(X)[1]) == ["a"]


def test_a_rule_that_jax_keeps_is_planted_in_whole_or_not_at_all(implementation):
    body = lambda x: sow(jnp.sin(x), name="a")
    rule = jax.custom_vjp(body)
    rule.defvjp(lambda x: jax.vjp(body, x), lambda pullback, ct: pullback(ct))
    f = jax.jit(rule)
    loss = lambda x: f(sow(1.2 * x, name="a")) ** 2
    jax.grad(lambda x: plant(lambda x: f(sow(x, name="z")), {"z": harvest.add(0)})(x))(X)
    if implementation == "classic":
        with pytest.raises(harvest.UnsupportedError, match=r"'a' .*keeps from an earlier call"):
            plant(jax.grad(loss), {"a": jnp.negative}, mode="append")(X)
        jax.clear_caches()
    halves = lambda a: a / 2
    value, slope = jnp.sin(0.6 * X) / 2, jnp.cos(0.6 * X)  # of the edited values
    got = plant(jax.grad(loss), {"a": halves}, mode="append")(X)
    close(got, 2 * value * slope * 1.2)


def test_a_reference_from_outside_may_have_changed_when_the_body_runs_again():
    @jax.custom_vjp
    def f(x, ref):
        ref[...] = 2 * x
        return jnp.sin(sow(ref[...], name="h"))

    f.defvjp(lambda x, ref: (f(x, ref), None), lambda _, ct: (7 * ct, None))
    collected = lambda x: capture(lambda x: f(x, jax.new_ref(x)))(x)
    out, values = collected(jnp.float32(0.5))
    assert values == {"h": (1.0,)} and jnp.allclose(out, jnp.sin(1.0))
    ref = jax.new_ref(jnp.float32(0.0))
    with pytest.raises(UnsupportedError, match="may depend on a `Ref` from outside"):
        jax.grad(lambda x: capture(lambda x: f(x, ref))(x)[0])(jnp.float32(0.5))
