"""`reap` and `capture`; the examples of the contract come first."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import capture, perturb, plant, reap, scope, sites, sow, stacked
from harvest._checks import check_mode

X = np.array([0.5, 1.0, 2.0], np.float32)
V = np.array([4.0, 5.0, 6.0], np.float32)


def f(x):
    y = jnp.sin(x)
    sow(y, name="features")
    return 2 * y


def g(x):
    h = sow(jnp.sin(x), name="h")
    return 2 * h


# ---------------------------------------------------------------------------- the contract


def test_capture_returns_result_and_values():
    out, collected = capture(f)(X)
    np.testing.assert_allclose(out, 2 * np.sin(X), rtol=1e-6)
    assert list(collected) == ["features"] and len(collected["features"]) == 1
    np.testing.assert_allclose(collected["features"][0], np.sin(X), rtol=1e-6)


def test_reap_returns_values():
    acts = reap(f)(X)
    assert list(acts) == ["features"]
    np.testing.assert_allclose(acts["features"], np.sin(X), rtol=1e-6)


def test_planting_a_bare_sow_warns():
    line = inspect.getsourcelines(f)[1] + 2
    match = rf"'features'.*test_reap\.py:{line} is not used; write `h = sow"
    with pytest.warns(harvest.HarvestWarning, match=match):
        out = plant(f, {"features": V})(X)
    np.testing.assert_allclose(out, 2 * np.sin(X), rtol=1e-6)


def test_plant_runs_on_with_the_value():
    np.testing.assert_array_equal(plant(g, {"h": V})(X), 2 * V)


class Steer(eqx.Module):
    by: jax.Array

    def __call__(self, h):
        return h + self.by


@pytest.mark.parametrize("edit", [lambda h: h + V, Steer(jnp.asarray(V)), harvest.add(V)])
def test_plant_edits(edit):
    np.testing.assert_allclose(plant(g, {"h": edit})(X), 2 * (np.sin(X) + V), rtol=1e-6)


def loss(x):
    return jnp.sum(perturb(x, name="gx") ** 2)


def test_capture_of_a_gradient_has_the_cotangent():
    grads, collected = capture(jax.grad(loss))(X)
    np.testing.assert_array_equal(grads, 2 * X)
    np.testing.assert_array_equal(collected["gx"][0], 2 * X)


def test_plant_edits_the_cotangent():
    clipped = plant(jax.grad(loss), {"gx": lambda ct: jnp.clip(ct, -1, 1)})
    np.testing.assert_array_equal(clipped(X), [1.0, 1.0, 1.0])


def test_nested_plants_compose_inner_first():
    inner = plant(lambda x: sow(x, name="h"), {"h": lambda h: h + 1})
    assert plant(inner, {"h": lambda h: h * 10})(1.0) == 20


def test_what_is_planted_is_what_is_reaped():
    np.testing.assert_array_equal(reap(plant(g, {"h": V}))(X)["h"], V)


def test_a_python_float_is_traced():
    assert reap(lambda x: sow(x + 1.0, name="y") + 1.0)(1.0) == {"y": 2.0}


# ------------------------------------------------------------------- what is left out, costs


def flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis().get("flops", 0.0)


WRAPPERS = {"plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_reap_costs_what_the_value_needs(wrapper):
    def block(x, w):
        return jnp.tanh(sow(x @ w, name="h") @ w)

    def model(x, w, layers=12):
        for i in range(layers):
            with scope(f"layers/{i}"):
                x = WRAPPERS[wrapper](block)(x, w)
        return x @ w

    def by_hand(x, w, layers):
        for _ in range(layers - 1):
            x = jnp.tanh((x @ w) @ w)
        return x @ w

    x, w = jnp.ones((4, 16)), jnp.eye(16)
    for layers in (1, 3, 12):
        reaped = flops(reap(model, f"layers/{layers - 1}/h"), x, w)
        assert reaped == flops(functools.partial(by_hand, layers=layers), x, w)
    assert flops(reap(model, []), x, w) == 0


def test_capture_costs_what_is_written_by_hand():
    def model(x, w):
        for _ in range(4):
            x = sow(jnp.tanh(x @ w), name="h")
        return x

    def by_hand(x, w):
        xs = []
        for _ in range(4):
            xs.append(x := jnp.tanh(x @ w))
        return x, xs

    args = jnp.ones((4, 16)), jnp.eye(16)
    assert flops(capture(model), *args) == flops(by_hand, *args)
    assert flops(capture(jax.grad(lambda *a: model(*a).sum()), []), *args) == flops(
        jax.grad(lambda *a: by_hand(*a)[0].sum()), *args
    )


# ------------------------------------------------------------------------ modes, duplicates


def twice(x):
    x = sow(x + 1, name="h")
    return sow(10 * x, name="h")


def test_append_has_all_occurrences_in_call_order():
    out, collected = capture(twice)(1.0)
    assert (out, collected) == (20, {"h": (2, 20)})
    assert reap(twice, mode="append")(1.0) == {"h": (2, 20)}
    assert reap(f, mode="append")(0.0) == {"features": (0,)}
    assert capture(g, mode="strict")(0.0) == (0, {"h": 0})


@pytest.mark.parametrize("transform", [reap, lambda fn: capture(fn, mode="strict")])
def test_duplicates_are_refused_with_their_lines(transform):
    first = inspect.getsourcelines(twice)[1] + 1
    lines = rf"test_reap\.py:{first}\n.*test_reap\.py:{first + 1}\n"
    match = rf'(?s)\'h\' is sown 2 times:.*{lines}.*`harvest\.scope`.*mode="append"'
    with pytest.raises(harvest.DuplicateSiteError, match=match):
        transform(twice)(1.0)


def test_only_selected_duplicates_are_refused():
    fn = lambda x: sow(twice(x), name="end")
    assert reap(fn, "end")(1.0) == {"end": 20}


def test_mode_is_one_of_two():
    with pytest.raises(harvest.SelectError, match="`mode` got 'first'; wanted 'strict' or 'app"):
        check_mode("first")  # what the type checker of the tests keeps from happening further out


def test_keys_are_in_call_order():
    def fn(x):
        for name in ["z", "a", "m", "b"]:
            x = jax.jit(lambda x: sow(x + 1, name=name))(x)  # noqa: B023
        return x

    assert list(reap(fn)(1.0)) == list("zamb")
    assert list(capture(fn)(1.0)[1]) == list("zamb")
    assert [site.key for site in sites(fn)(1.0)] == list("zamb")


# ------------------------------------------------------------------------------ composition


def two(x):
    a = sow(x + 1, name="a")
    return sow(2 * a, name="b")


def test_unselected_sites_are_left_to_an_outer_transform():
    assert capture(reap(two, "a"), "b")(1.0) == ({"a": 2}, {"b": (4,)})
    assert capture(capture(two, "a"))(1.0) == ((4, {"a": (2,)}), {"b": (4,)})
    assert reap(reap(two, "b"))(1.0) == {"a": 2}
    assert [site.key for site in sites(reap(two, "b"))(1.0)] == ["a"]


def test_collected_sites_are_consumed():
    assert reap(reap(two))(1.0) == {}
    assert capture(capture(two))(1.0) == ((4, {"a": (2,), "b": (4,)}), {})
    with pytest.raises(harvest.UnknownSiteError, match="the key 'a' matches no site"):
        reap(reap(two), "a")(1.0)


def test_planting_reaches_collected_sites():
    assert plant(reap(two), {"a": lambda a: a + 10})(1.0) == {"a": 12, "b": 24}
    assert plant(capture(two), {"b": lambda b: -b})(1.0) == (-4, {"a": (2,), "b": (-4,)})


def layered(x):
    x = jax.jit(lambda x: sow(jnp.sin(x), name="a"))(x)
    return lax.scan(lambda c, _: (sow(c**2, name="b"), None), x, length=2)[0]


def test_capture_is_differentiated_as_the_function():
    value, vjp, collected = jax.vjp(capture(layered), X, has_aux=True)
    wanted = 4 * np.sin(X) ** 3 * np.cos(X)
    np.testing.assert_allclose(value, np.sin(X) ** 4, rtol=1e-5)
    np.testing.assert_allclose(vjp(np.ones(3, np.float32))[0], wanted, rtol=1e-5)
    np.testing.assert_allclose(collected["a"][0], np.sin(X), rtol=1e-6)
    grads, aux = jax.grad(lambda x: capture(lambda x: layered(x).sum())(x), has_aux=True)(X)
    np.testing.assert_allclose(grads, wanted, rtol=1e-5)
    np.testing.assert_allclose(aux["b"][0], [np.sin(X) ** 2, np.sin(X) ** 4], rtol=1e-5)


def test_collected_values_are_differentiated():
    grads = jax.grad(lambda x: reap(layered)(x)["b"][0].sum())(X)
    np.testing.assert_allclose(grads, 2 * np.sin(X) * np.cos(X), rtol=1e-5)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda fn: jax.jit(jax.jit(fn))])
def test_capture_commutes(around):
    for got in (capture(around(layered))(X), around(capture(layered))(X)):
        np.testing.assert_allclose(got[0], np.sin(X) ** 4, rtol=1e-5)
        np.testing.assert_allclose(got[1]["a"][0], np.sin(X), rtol=1e-6)
        np.testing.assert_allclose(got[1]["b"][0], [np.sin(X) ** 2, np.sin(X) ** 4], rtol=1e-5)


def test_vmap_outside_and_inside():
    xs = np.stack([X, 2 * X])
    outside, inside = jax.vmap(reap(layered))(xs)["b"], reap(jax.vmap(layered))(xs)["b"]
    wanted = [[np.sin(x) ** 2, np.sin(x) ** 4] for x in xs]  # (batch, layers, 3)
    np.testing.assert_allclose(outside, wanted, rtol=1e-5)
    np.testing.assert_allclose(inside, np.swapaxes(wanted, 0, 1), rtol=1e-5)


# ---------------------------------------------------------------------------------- stacked


def test_stacked_is_in_natural_order():
    acts = {f"layers/{i}/h": {"x": jnp.full(2, i)} for i in (10, 9, 0, 2)}
    acts["layers/1/other"] = {"x": jnp.zeros(5)}
    np.testing.assert_array_equal(stacked(acts, "layers/*/h")["x"][:, 0], [0, 2, 9, 10])


def test_stacked_refuses(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as without the import hook
    with pytest.raises(harvest.SelectError, match="`stacked` got 3 of type `int`; wanted a glob"):
        stacked({}, 3)
    acts = {"a/0": jnp.ones(2), "a/1": jnp.ones(3)}
    with pytest.raises(harvest.UnknownSiteError, match=r"'b/\*' matches no key.*'a/0'"):
        stacked(acts, "b/*")
    with pytest.raises(harvest.SelectError, match=r"cannot stack 'a/1'.*f32\[3\].*'a/0'"):
        stacked(acts, "a/*")
