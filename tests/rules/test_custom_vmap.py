"""The user's rule applies to the outputs under `vmap`; what is collected is that of the body."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental import io_callback
from jax.sharding import AxisType, PartitionSpec

import harvest
from harvest import UnsupportedError, at, capture, folds, plant, reap, sites, sow

X = jnp.array([0.3, -1.2, 2.0])
XS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def tagged(value):
    return sow(value, name="h")


def untagged(value):
    return value


def by_rule(x):
    """What the rule computes of one example: something else than the body."""
    return 5 * jnp.cos(x)


def with_rule(body):
    """`body`, with a rule that says `by_rule`."""
    fn = custom_vmap(body)
    fn.def_vmap(lambda size, batched, x: (by_rule(x), batched[0]))
    return fn


def f(x, tag=tagged):
    return with_rule(lambda x: 2 * tag(jnp.sin(x)))(x) + 1


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def calls(fn, *args):
    """How many are left, as they are or opened."""
    return len(re.findall(r"\bcustom_vmap_call\b", str(jax.make_jaxpr(fn)(*args))))


# -------------------------------------------------------------------------------------- collecting


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_values_are_collected_and_the_call_stays(around):
    close(capture(around(f))(X), (2 * np.sin(X) + 1, {"h": (np.sin(X),)}))
    assert [site.key for site in sites(around(f))(X)] == ["h"]
    assert calls(capture(around(f)), X) == 1
    assert calls(reap(around(f)), X) == 1


def test_the_rule_applies_to_the_outputs_under_vmap():
    wanted = by_rule(XS) + 1, {"h": (np.sin(XS),)}
    close(jax.vmap(f)(XS), wanted[0])
    close(jax.vmap(capture(f))(XS), wanted)
    close(jax.jit(jax.vmap(capture(f)))(XS), wanted)
    close(jax.vmap(capture(f), in_axes=1)(XS.T), wanted)
    close(jax.vmap(jax.vmap(capture(f)))(XS), wanted)
    close(jax.vmap(reap(f))(XS), {"h": np.sin(XS)})


def test_under_an_inner_vmap_there_is_no_body():
    # JAX evaluates the rule in its place.
    close(capture(jax.vmap(f))(XS), (by_rule(XS) + 1, {}))

    fn = custom_vmap(lambda x: tagged(jnp.sin(x)))
    fn.def_vmap(lambda size, batched, x: (sow(jnp.cos(x), name="by_rule"), True))
    close(capture(jax.vmap(fn))(XS), (np.cos(XS), {"by_rule": (np.cos(XS),)}))


def test_outputs_that_the_rule_leaves_unbatched_stay_so():
    fn = custom_vmap(lambda x, y: (tagged(x) * 1, {"y": y * 1}))
    fn.def_vmap(lambda size, batched, x, y: ((x * 1, {"y": y * 1}), (batched[0], {"y": False})))

    mapped = jax.vmap(capture(fn), (0, None), ((0, {"y": None}), 0))
    close(mapped(XS, X), ((XS, {"y": X}), {"h": (XS,)}))


def test_inputs_are_trees_and_closures_are_inputs():
    def run(x, scale):
        fn = custom_vmap(lambda tree, power: tagged(tree["x"] * scale) ** power["n"])

        @fn.def_vmap
        def _(size, batched, tree, power):
            assert size == 2 and batched == [{"x": True}, {"n": False}]
            return -tree["x"] * power["n"], True

        return fn({"x": x}, power={"n": 2.0})

    close(capture(run)(X, 3.0), ((3 * X) ** 2, {"h": (3 * X,)}))
    mapped = jax.vmap(capture(run), (0, None))
    close(mapped(XS, 3.0), (-XS * 2, {"h": (3 * XS,)}))


def test_scans_around_and_inside():
    def step(x):
        body = lambda x, i: (0.5 * tagged(jnp.sin(x) + i), None)
        return lax.scan(body, x, jnp.arange(2.0))[0]

    def loop(x):
        return lax.scan(lambda x, _: (with_rule(step)(x), None), x, length=3)[0]

    def by_hand(x):
        values = []
        for _ in range(3):
            row = []
            for i in range(2):
                row.append(np.sin(x) + i)
                x = 0.5 * row[-1]
            values.append(np.stack(row))
        return x, {"h": np.stack(values)}

    close(capture(loop, mode="strict")(X), by_hand(X))
    assert calls(capture(loop), X) == 1
    # The rule has nothing of the step: each of them is `by_rule` of what came before.
    outs, acts = jax.vmap(capture(loop, mode="strict"))(XS)
    steps = [XS, by_rule(XS), by_rule(by_rule(XS))]
    close(outs, by_rule(steps[-1]))
    first = [np.sin(x) for x in steps]
    second = [np.sin(0.5 * h) + 1 for h in first]
    close(acts["h"], np.stack([np.stack(first, 1), np.stack(second, 1)], 2))


def test_reducers_and_folds_are_applied_to_each_example():
    weights = jnp.array([1.0, 2.0, 3.0])

    def loop(x):
        return lax.scan(lambda x, _: (f(x), None), x, length=4)[0]

    def run(x, weights):
        reducers = (jax.tree_util.Partial(jnp.vdot, weights), folds.maximum(), folds.at(-1))
        return capture(loop, {"h": reducers}, mode="strict")(x)

    def by_hand(x, weights, step):
        values = []
        for _ in range(4):
            values.append(np.sin(x))
            x = step(x)
        values = np.stack(values)
        return x, {"h": (values @ weights, values.max(0), values[-1])}

    close(run(X, weights), by_hand(X, weights, lambda x: 2 * np.sin(x) + 1))
    both = jax.vmap(run)(XS, jnp.stack([weights, -weights]))
    for i, sign in enumerate([1, -1]):
        wanted = by_hand(XS[i], sign * weights, lambda x: by_rule(x) + 1)
        close(jax.tree.map(lambda v: v[i], both), wanted)  # noqa: B023


def test_a_rule_that_evaluates_the_body_sows_nothing_again():
    fn = sequential_vmap(lambda x: 2 * tagged(jnp.sin(x)))
    wanted = 2 * np.sin(XS), {"h": (np.sin(XS),)}
    close(jax.vmap(capture(fn))(XS), wanted)
    close(capture(jax.vmap(capture(fn)))(XS), (wanted, {}))
    close(capture(jax.vmap(lambda x: capture(fn, [])(x)[0]))(XS), wanted)


def test_sites_that_are_left_reach_an_outer_transform():
    fn = custom_vmap(lambda x: sow(2 * tagged(jnp.sin(x)), name="g"))
    fn.def_vmap(lambda size, batched, x: (by_rule(x), True))
    (out, inner), outer = capture(capture(fn, "g"))(X)
    close((out, inner, outer), (2 * np.sin(X), {"g": (2 * np.sin(X),)}, {"h": (np.sin(X),)}))


def test_sows_are_free_in_lowered_programs():
    def text(fn, tag, *args):
        def run(x):
            return f(x, tag)

        return jax.jit(fn(run)).lower(*args).as_text()

    for fn, arg in (
        (lambda f: f, X),
        (jax.vmap, XS),
        (lambda f: lambda x: jax.jvp(f, (x,), (x,)), X),
    ):
        assert text(fn, tagged, arg) == text(fn, untagged, arg)


# -------------------------------------------------------------------------------------- derivatives


def tangents(f):
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))


def test_forward_mode_around_and_inside():
    value = 2 * np.sin(X) + 1, 2 * np.cos(X)
    site = np.sin(X), np.cos(X)
    (out, acts), (dout, dacts) = tangents(capture(f))(X)
    close((out, dout), value)
    close((acts["h"][0], dacts["h"][0]), site)
    close(capture(tangents(f))(X), (value, {"h": (np.sin(X),)}))


def test_forward_mode_under_vmap_is_that_of_the_rule():
    (out, acts), (dout, dacts) = jax.vmap(tangents(capture(f)))(XS)
    close((out, dout), jax.vmap(tangents(f))(XS))
    close((out, dout), (5 * np.cos(XS) + 1, -5 * np.sin(XS)))
    close((acts["h"][0], dacts["h"][0]), (np.sin(XS), np.cos(XS)))
    # With the tangents inside, the rule is the one that JAX made of the user's.
    (out, dout), acts = jax.vmap(capture(tangents(f)))(XS)
    close((out, dout, acts["h"][0]), (5 * np.cos(XS) + 1, -5 * np.sin(XS), np.sin(XS)))


def test_forward_mode_under_vmap_with_a_fold():
    # Its counter is batched and has no tangent.
    def loop(x):
        return lax.scan(lambda x, _: (f(x), None), x, length=2)[0]

    run = capture(loop, {"h": folds.mean()}, mode="strict")
    (out, acts), (dout, dacts) = jax.vmap(tangents(run))(XS)
    first = by_rule(XS) + 1
    dfirst = -5 * np.sin(XS)
    close((out, dout), (by_rule(first) + 1, -5 * np.sin(first) * dfirst))
    close(acts["h"], (np.sin(XS) + np.sin(first)) / 2)
    close(dacts["h"], (np.cos(XS) + np.cos(first) * dfirst) / 2)


def test_jax_differentiates_no_custom_vmap_in_reverse_mode():
    for fn in (f, capture(f), capture(jax.grad(lambda x: jnp.sum(f(x))))):
        with pytest.raises(ValueError, match="does not support reverse-mode"):
            jax.grad(lambda x: jnp.sum(jax.tree.leaves(fn(x))[0]))(X)  # noqa: B023


def test_the_two_custom_rules_together():
    """A `custom_vjp` around it, as the documentation of JAX has it."""
    fn = jax.custom_vjp(with_rule(lambda x: 2 * tagged(jnp.sin(x))))
    fn.defvjp(lambda x: (fn(x), x), lambda x, ct: (ct * 7.0,))
    out, acts = capture(fn)(X)
    close((out, acts["h"][0]), (2 * np.sin(X), np.sin(X)))
    close(jax.grad(lambda x: jnp.sum(capture(fn)(x)[0]))(X), np.full(3, 7.0))
    out, acts = jax.vmap(capture(fn))(XS)
    close((out, acts["h"][0]), (by_rule(XS), np.sin(XS)))
    close(jax.vmap(jax.grad(lambda x: jnp.sum(capture(fn)(x)[0])))(XS), np.full((2, 3), 7.0))
    grad, acts = capture(jax.grad(lambda x: jnp.sum(fn(x))), mode="strict")(X)
    close((grad, acts["h"]), (np.full(3, 7.0), np.sin(X)))


def test_a_gradient_at_a_site_enters_by_the_body_and_keeps_the_value():
    loss = lambda x: jnp.sum(f(x) ** 2)
    close(harvest.grad(loss)(X), {"h": 2 * (2 * np.sin(X) + 1) * 2})
    value, grads = jax.vmap(harvest.value_and_grad(loss))(XS)
    out = by_rule(XS) + 1
    close((value, grads["h"]), (np.sum(out**2, 1), 2 * out * 2))


# ------------------------------------------------------------------------------------------ plants


def test_values_are_replaced_and_edited():
    close(plant(f, {"h": X})(X), 2 * X + 1)
    close(plant(f, {"h": lambda h: h * h})(X), 2 * np.sin(X) ** 2 + 1)
    close(plant(f, reap(f)(X))(X), f(X))
    acts = capture(f)(X)[1]
    close(plant(f, acts, mode="append")(X), f(X))
    close(jax.jit(plant(jax.jit(f), {"h": X}))(X), 2 * X + 1)


def test_a_planted_body_is_another_function_than_the_rule_is_for():
    planted = plant(f, {"h": lambda h: h + 1})
    assert calls(planted, X) == 0
    close(jax.vmap(planted)(XS), 2 * (np.sin(XS) + 1) + 1)
    grad = jax.grad(lambda x: jnp.sum(planted(x)))(X)
    close(grad, 2 * np.cos(X))
    # Where nothing is planted inside, it is the function that it was.
    beside = plant(lambda x: f(sow(x, name="x")), {"x": lambda x: x + 1})
    assert calls(beside, X) == 1
    close(jax.vmap(beside)(XS), by_rule(XS + 1) + 1)


def test_plants_in_an_iteration():
    def loop(x):
        return lax.scan(lambda x, _: (f(x), None), x, length=3)[0]

    def by_hand(x):
        for i in range(3):
            x = 2 * (np.sin(x) + (i == 1)) + 1
        return x

    close(plant(loop, {"h": at(1, lambda h: h + 1)})(X), by_hand(X))
    close(plant(loop, reap(loop)(X))(X), loop(X))


# ------------------------------------------------------------------------------------- the odd ones


def test_side_effects_are_those_of_the_rule():
    seen = []

    def record(kind, x):
        io_callback(lambda x: seen.append(kind), None, x)

    def body(x):
        record("body", x)
        return 2 * tagged(jnp.sin(x))

    fn = custom_vmap(body)

    @fn.def_vmap
    def _(size, batched, x):
        record("rule", x)
        return by_rule(x), True

    close(capture(fn)(X), (2 * np.sin(X), {"h": (np.sin(X),)}))
    assert seen == ["body"]
    seen.clear()
    close(jax.vmap(capture(fn))(XS), (by_rule(XS), {"h": (np.sin(XS),)}))
    jax.effects_barrier()
    assert seen == ["rule"]


def test_a_site_that_depends_on_a_side_effect_is_an_error_under_vmap():
    def body(x):
        return tagged(io_callback(lambda x: x, jax.typeof(x), x))

    fn = custom_vmap(body)
    fn.def_vmap(lambda size, batched, x: (x, True))
    close(capture(fn)(X), (X, {"h": (X,)}))
    with pytest.raises(UnsupportedError, match=r"depends on a side effect \(`io_callback`"):
        jax.vmap(capture(fn))(XS)


def test_collectives():
    def summed(x):
        fn = custom_vmap(lambda x: 2 * tagged(lax.psum(x, "i")))
        fn.def_vmap(lambda size, batched, x: (jnp.broadcast_to(2 * x.sum(0), x.shape), True))
        return fn(x)

    close(jax.vmap(summed, axis_name="i")(XS), np.broadcast_to(2 * np.sum(XS, 0), (2, 3)))
    for around in (lambda f: f, jax.jit):
        out, collected = around(jax.vmap(capture(summed), axis_name="i"))(XS)
        close(out, np.broadcast_to(2 * np.sum(XS, 0), (2, 3)))
        close(collected, {"h": (np.broadcast_to(np.sum(XS, 0), (2, 3)),)})
    with_site = lambda x: summed(sow(x, name="x"))
    close(jax.vmap(reap(with_site, "x"), axis_name="i")(XS), {"x": XS})
    close(
        jax.vmap(capture(with_site, "x"), axis_name="i")(XS)[0], jax.vmap(summed, axis_name="i")(XS)
    )


def test_collectives_over_a_mesh():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    fn = custom_vmap(lambda x: 2 * tagged(lax.psum(x, "i")))
    fn.def_vmap(lambda size, batched, x: (3 * lax.psum(x, "i"), True))
    each = lambda xs: jax.vmap(capture(fn))(xs)
    total = np.sum(XS, axis=0, keepdims=True)  # of two shards with an example each
    spec = PartitionSpec("i")
    run = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    close(run(XS), (3 * total, {"h": (total,)}))


@pytest.mark.parametrize(
    "result, match",
    [
        (lambda x: (x, x), "structure of output returned by custom vmap rule"),
        (lambda x: [], "rule"),
    ],
)
def test_a_wrong_rule_is_an_error_of_jax(result, match):
    fn = custom_vmap(lambda x: tagged(jnp.sin(x)))
    fn.def_vmap(lambda size, batched, x: (result(x), jax.tree.map(lambda _: True, result(x))))
    for call in (fn, capture(fn)):
        with pytest.raises(ValueError, match=match):
            jax.vmap(call)(XS)


def test_nans_are_found_in_the_body():
    fn = with_rule(lambda x: jnp.log(tagged(x)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as info:
        capture(fn)(-jnp.ones(2))
    assert any("`log`" in note for note in info.value.__notes__)
    with jax.debug_nans(True):
        close(capture(f)(X), (2 * np.sin(X) + 1, {"h": (np.sin(X),)}))
