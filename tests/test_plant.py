import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import harvest
from harvest import (
    DuplicateSiteError,
    HarvestWarning,
    PlantError,
    SelectError,
    UnknownSiteError,
    add,
    capture,
    perturb,
    plant,
    reap,
    replace,
    scale,
    scope,
    sow,
    zero,
)

X = jnp.array([1.0, 2.0, 3.0])
V = jnp.array([5.0, 7.0, 9.0])


def f(x):
    h = sow(2 * x, name="h")  # the line that messages name
    return h + 1


LINE = re.escape(f"test_plant.py:{f.__code__.co_firstlineno + 1}")


def site(x):
    return sow(x, name="h")


def two(x):
    a = sow(x + 1, name="a")
    b = sow(10 * a, name="b")
    return a + b


def layers(x):
    for i in range(3):
        with scope(f"layers/{i}"):
            x = sow(x + 1, name="resid")
            x = sow(2 * x, name="mlp_out")
    return x


def repeated(x):
    x = sow(x + 1, name="h")
    x = sow(2 * x, name="h")
    return sow(x - 3, name="h")


# ------------------------------------------------------------------------------ what is planted

PLANTS = [
    (f, {"h": V}, V + 1),
    (f, {"h": lambda h: h + V}, 2 * X + V + 1),
    (f, {"h": replace(V)}, V + 1),
    (f, {}, 2 * X + 1),
    (two, {"a": V}, 11 * V),
    (two, {"b": V}, X + 1 + V),
    (two, {"a": V, "b": X}, V + X),
    (two, {"a": zero(), "b": add(1)}, [1, 1, 1]),
    (two, {"*": add(1)}, 11 * (X + 2) + 1),
    (two, {("a", "b"): add(1)}, 11 * (X + 2) + 1),
    (two, {lambda site: site.name == "b": zero()}, X + 1),
    (layers, {"layers/1/resid": V}, (2 * V + 1) * 2),
    (layers, {"layers/*/mlp_out": zero()}, [0, 0, 0]),
    (layers, {"layers/?/resid": scale(0)}, [0, 0, 0]),
    (layers, {"**": lambda h: h - 1}, 8 * X - 7),
    (layers, {"layers/2/**": add(0)}, 8 * X + 14),
]


@pytest.mark.parametrize("fn, plants, wanted", PLANTS, ids=range(len(PLANTS)))
def test_values_and_edits(fn, plants, wanted):
    np.testing.assert_allclose(plant(fn, plants)(X), wanted, rtol=1e-6)


def test_a_key_with_the_characters_of_a_glob_is_a_key():
    g = lambda x: sow(x, name="a*") - sow(2 * x, name="ab")
    np.testing.assert_array_equal(plant(g, {"a*": V})(X), V - 2 * X)
    np.testing.assert_array_equal(plant(g, {"a?": zero()})(X), [0, 0, 0])


@pytest.mark.parametrize("fn", [f, two, layers])
def test_round_trip(fn):
    np.testing.assert_array_equal(plant(fn, reap(fn)(X))(X), fn(X))
    np.testing.assert_array_equal(plant(fn, capture(fn)(X)[1], mode="append")(X), fn(X))


def test_a_planted_cotangent_goes_on_backwards():
    loss = lambda x: jnp.sum(3 * perturb(x, name="gx") ** 2)
    np.testing.assert_array_equal(plant(jax.grad(loss), {"gx": V})(X), V)
    clipped = plant(jax.grad(loss), {"gx": lambda ct: jnp.clip(ct, -10, 10)})
    np.testing.assert_array_equal(clipped(X), [6, 10, 10])


def test_values_may_be_traced_mapped_and_differentiated():
    run = lambda value: jnp.sum(plant(two, {"a": value})(X))
    np.testing.assert_array_equal(jax.jit(run)(V), 11 * jnp.sum(V))
    np.testing.assert_array_equal(jax.vmap(run)(jnp.stack([V, X])), [231, 66])
    np.testing.assert_array_equal(jax.grad(run)(V), [11, 11, 11])


WEAK = jnp.asarray(3.0)
FITTING = [
    (np.float32(3), jnp.float32),
    (np.array(3, np.float64), jnp.float32),
    (np.float64(3), jnp.float32),
    (3, jnp.float32),
    (3.0, jnp.float32),
    (WEAK, jnp.float32),
    (3, jnp.bfloat16),
    (3.0, jnp.bfloat16),
    (WEAK, jnp.bfloat16),
    (3, jnp.int8),
    (3.0, jnp.complex64),
    (3j, jnp.complex64),
    (True, jnp.bool_),
]


@pytest.mark.parametrize("value, dtype", FITTING)
def test_numbers_take_the_dtype_of_the_site(value, dtype):
    assert WEAK.weak_type
    out = plant(site, {"h": value})(jnp.ones((), dtype))
    assert out == value and out.dtype == dtype and not out.weak_type


MISFITTING = [
    (3.0, jnp.int32, r"got f32\[\], wanted i32\[\]"),
    (3j, jnp.float32, r"got c64\[\], wanted f32\[\]"),
    (True, jnp.float32, r"got bool\[\], wanted f32\[\]"),
    (1, jnp.bool_, r"got i32\[\], wanted bool\[\]"),
    (np.int32(3), jnp.float32, r"got i32\[\], wanted f32\[\].*cast it with `.astype\('float32'\)`"),
    (jnp.float32(3), jnp.bfloat16, r"got f32\[\], wanted bf16\[\].*`.astype\('bfloat16'\)`"),
    ("3", jnp.float32, r"got a `str`, wanted f32\[\]"),
    (jax.random.key(0), jnp.float32, r"got key<fry>\[\], wanted f32\[\]"),
]


@pytest.mark.parametrize("value, dtype, message", MISFITTING)
def test_numbers_of_another_kind_are_refused(value, dtype, message):
    with pytest.raises(PlantError, match=message):
        plant(site, {"h": value})(jnp.ones((), dtype))


# --------------------------------------------------------------------------------- what is refused

UNKNOWN = [
    (f, "g", "the key 'g' matches no site; there are 'h'"),
    (two, "aa", "the key 'aa' matches no site; did you mean 'a'"),
    (layers, "layers/1/redis", "did you mean 'layers/1/resid'"),
    (layers, "resid", "the key 'resid' matches no site"),
    (
        layers,
        "layers/*/rseid",
        "the glob 'layers/[*]/rseid' matches no site; did you mean 'layers/",
    ),
    (layers, "*", "the glob '[*]' matches no site"),
    (layers, ("**", "typo"), "the key 'typo' matches no site"),
    (lambda x: x, "h", "the key 'h' matches no site; there are none"),
]


@pytest.mark.parametrize("fn, key, message", UNKNOWN)
def test_unknown_keys_are_refused_with_the_nearest(fn, key, message):
    with pytest.raises(UnknownSiteError, match=message):
        plant(fn, {key: zero()})(X)


def pair(x):
    h = sow({"a": x, "b": [x[0], 3, None, "s"]}, name="h")
    return h["a"] * h["b"][0] + h["b"][1]


WRONG = [
    (f, V[:2], rf"got f32\[2\], wanted f32\[3\], for the site 'h' \(sown at .*{LINE}\)"),
    (f, V[None], r"got f32\[1,3\], wanted f32\[3\]"),
    (f, V > 0, r"got bool\[3\], wanted f32\[3\]"),
    (f, [V], rf"got a value of structure .*\[\*\].*, wanted PyTreeDef\(\*\), .*'h' .*{LINE}"),
    (pair, {"a": V, "b": [V, 3, None, "s"]}, r"got f32\[3\] at \['b'\]\[0\], wanted f32\[\]"),
    (pair, {"a": V}, "got a value of structure .*'h'"),
    (pair, {"a": V, "b": [V[0], 4, None, "s"]}, r"got 4 at \['b'\]\[1\].* has the static leaf 3"),
    (pair, {"a": V, "b": [V[0], 3, None, "t"]}, "got 't' .* has the static leaf 's'"),
    (pair, {"a": V, "b": [V[0], 3.0, None, "s"]}, "got 3.0 .* has the static leaf 3"),
]


@pytest.mark.parametrize("fn, value, message", WRONG)
def test_values_that_do_not_fit_are_refused(fn, value, message):
    with pytest.raises(PlantError, match=message):
        plant(fn, {"h": value})(X)
    with pytest.raises(PlantError, match=message):
        plant(fn, {"h": (value,)}, mode="append")(X)


def test_tuples_and_none_are_no_values_in_strict_mode():
    with pytest.raises(PlantError, match=r"got a tuple for the site 'h'.*pass mode=\"append\""):
        plant(f, {"h": (V,)})(X)
    with pytest.raises(PlantError, match=r"structure PyTreeDef\(None\), wanted PyTreeDef\(\*\)"):
        plant(f, {"h": None})(X)


def test_static_leaves_that_are_equal_fit():
    value = {"a": V, "b": [V[0], 3, None, "s"]}
    np.testing.assert_array_equal(plant(pair, {"h": value})(X), V * V[0] + 3)


def test_nothing_runs_before_a_plant_is_refused():
    calls = []

    def noisy(x):
        jax.debug.callback(lambda: calls.append(1))
        return f(x)

    for plants in ({"h": V[:2]}, {"typo": V}):
        with pytest.raises((PlantError, UnknownSiteError), match="'h'"):
            plant(noisy, plants)(X)
    jax.effects_barrier()
    assert calls == []
    plant(noisy, {"h": V})(X)
    jax.effects_barrier()
    assert calls == [1]


def test_a_value_stands_for_one_key():
    with pytest.raises(PlantError, match=r"got a value for 'layers/\*/resid'; wanted an edit"):
        plant(layers, {"layers/*/resid": V})(X)
    with pytest.raises(PlantError, match=r"got a value for \('a', 'b'\); wanted an edit"):
        plant(two, {("a", "b"): V})(X)


def test_two_plants_may_not_reach_one_site():
    message = r"both 'a' and '\*' reach the site 'a' .*one edit with `harvest.chain`"
    with pytest.raises(PlantError, match=message):
        plant(two, {"a": zero(), "*": add(1)})(X)


def test_keys_of_a_wrong_type_are_refused_at_once():
    with pytest.raises(SelectError, match="`plants` got 3 of type `int`"):
        plant(f, {3: V})


# --------------------------------------------------------------------------- repeated occurrences


def test_a_repeated_key_is_an_error_in_strict_mode():
    first = repeated.__code__.co_firstlineno + 1
    lines = "".join(rf"\n    .*test_plant.py:{line}" for line in range(first, first + 3))
    for value in (V, zero()):
        with pytest.raises(
            DuplicateSiteError, match=f"'h' is sown 3 times:{lines}\n.*`harvest.scope`"
        ):
            plant(repeated, {"h": value})(X)


def test_occurrences_are_planted_in_call_order():
    planted = lambda *values: plant(repeated, {"h": values}, mode="append")(X)
    np.testing.assert_array_equal(planted(V, None, None), 2 * V - 3)
    np.testing.assert_array_equal(planted(None, V, None), V - 3)
    np.testing.assert_array_equal(planted(None, None, V), V)
    np.testing.assert_array_equal(planted(V, add(1), jnp.negative), -(2 * V + 1 - 3))
    np.testing.assert_array_equal(planted(None, None, None), 2 * (X + 1) - 3)
    everywhere = plant(repeated, {"h": add(1)}, mode="append")
    np.testing.assert_array_equal(everywhere(X), 2 * (X + 2) + 1 - 3 + 1)
    np.testing.assert_array_equal(
        plant(repeated, capture(repeated)(X)[1], mode="append")(X), repeated(X)
    )


MISCOUNTED = [((V, V), "got 2 items"), (V, r"got f32\[3\]"), ((), "got 0 items")]


@pytest.mark.parametrize("value, got", MISCOUNTED)
def test_there_is_one_item_for_each_occurrence(value, got):
    with pytest.raises(PlantError, match=f"{got} for the site 'h' .*which occurs 3 times"):
        plant(repeated, {"h": value}, mode="append")(X)


# ---------------------------------------------------------------------------- what feeds nothing


def bare(x):
    sow(2 * x, name="h")
    return x + 1


def test_planting_what_feeds_nothing_warns_in_every_call():
    planted = plant(bare, {"h": V})
    line = bare.__code__.co_firstlineno + 1
    message = (
        rf"planting 'h' changes nothing.*test_plant.py:{line} .*write `h = sow\(h, name='h'\)`"
    )
    for _ in range(3):
        with pytest.warns(HarvestWarning, match=message):
            np.testing.assert_array_equal(planted(X), X + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planted(X)
        jax.jit(planted)(X)
        jax.grad(lambda x: planted(x)[0])(X)
    assert [w.category for w in caught] == [HarvestWarning] * 3
    assert {w.filename for w in caught} == {__file__}


def test_one_use_of_a_key_is_enough():
    g = lambda x: sow(x, name="h") + bare(x)
    np.testing.assert_array_equal(plant(g, {"h": zero()}, mode="append")(X), X + 1)


# ------------------------------------------------------------------------------------- composition


def test_plants_compose_inner_first():
    increased, multiplied = {"h": lambda h: h + 1}, {"h": lambda h: h * 10}
    planted = plant(plant(site, increased), multiplied)
    assert planted(1.0) == 20 and reap(planted)(1.0)["h"] == 20
    assert plant(plant(site, multiplied), increased)(1.0) == 11


def test_what_is_planted_is_collected():
    out, collected = capture(plant(two, {"a": V}))(X)
    np.testing.assert_array_equal(collected["a"], (V,))
    np.testing.assert_array_equal(collected["b"], (10 * V,))
    np.testing.assert_array_equal(out, 11 * V)
    np.testing.assert_array_equal(reap(plant(f, {"h": V}))(X)["h"], V)


def test_plants_reach_through_an_inner_reap():
    acts = plant(reap(two), {"a": V})(X)
    np.testing.assert_array_equal(acts["b"], 10 * V)
    np.testing.assert_array_equal(plant(capture(two, "b"), {"a": V})(X)[0], 11 * V)
    np.testing.assert_array_equal(reap(plant(reap(two, "b"), {"a": V}), "a")(X)["a"], V)


def test_plants_reach_through_transforms_of_jax():
    step = lambda x, _: (sow(2 * x, name="h"), None)
    loop = jax.jit(lambda x: jnp.sum(lax.scan(step, x, length=2)[0]))
    np.testing.assert_array_equal(plant(loop, {"h": jnp.stack([V, X])})(X), 6)
    np.testing.assert_array_equal(plant(jax.grad(loop), {"h": add(1)})(X), [4, 4, 4])
    np.testing.assert_array_equal(jax.grad(plant(loop, {"h": add(1)}))(X), [4, 4, 4])
    np.testing.assert_array_equal(jax.vmap(plant(loop, {"h": scale(0)}))(jnp.stack([X, V])), [0, 0])


def test_what_was_traced_before_can_be_collected_but_not_planted():
    traced = jaxpr_as_fun(jax.make_jaxpr(lambda x: 2 * sow(x, name="h"))(X))
    np.testing.assert_array_equal(reap(traced)(X)["h"], X)
    with pytest.raises(harvest.UnsupportedError, match=r"'h' \(sown at .*traced before `plant`"):
        plant(traced, {"h": zero()})(X)


def test_cotangents_of_a_function_that_vjp_returned():
    pullback = jax.vjp(lambda x: harvest.perturb(2 * x, name="ct"), X)[1]
    np.testing.assert_array_equal(harvest.capture(pullback)(X)[1]["ct"][0], X)
    np.testing.assert_array_equal(plant(pullback, {"ct": harvest.add(1)})(X)[0], 2 * (X + 1))


def test_a_module_where_a_module_was_sown_is_a_value():
    class Scaled(eqx.Module):
        factor: jax.Array

        def __call__(self, x):
            return self.factor * x

    f = lambda x: sow(Scaled(jnp.float32(2)), name="h")(x)
    np.testing.assert_array_equal(plant(f, reap(f)(X))(X), 2 * X)
    np.testing.assert_array_equal(plant(f, {"h": Scaled(jnp.float32(5))})(X), 5 * X)


def test_new_numbers_do_not_retrace():
    compiled = len(COMPILED)
    f = lambda x: sow((x, jnp.sum(x)), name="h")[0] + 1
    for k in range(3):
        plant(f, {"h": (X, float(k))})(X)
        plant(f, {"h": ((X, k),)}, mode="append")(X)
        if k == 0:
            compiled = len(COMPILED)
    assert len(COMPILED) == compiled


COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


def test_static_numbers_round_trip_in_nested_transforms():
    f = lambda x: sow({"p": x, "n": 7, "f": 2.5}, name="b")["p"]
    nested = lambda x: reap(plant(f, reap(f)(x)))(x)["b"]["p"]
    np.testing.assert_array_equal(nested(X), X)
    np.testing.assert_array_equal(jax.jit(nested)(X), X)
    np.testing.assert_array_equal(jax.vmap(nested)(X[None]), X[None])


def test_a_transposed_function_may_be_planted():
    """JAX transposes the markers of both kinds."""

    def transposed(x):
        def f(x):
            h, _ = sow((3 * x, jnp.float32(1.0)), name="h")
            return 2 * h

        return sow(jax.linear_transpose(f, x)(x)[0], name="ct")

    x = jnp.float32(5.0)
    assert transposed(x) == 30 and plant(transposed, {"ct": lambda ct: ct + 1})(x) == 31
    assert reap(transposed)(x) == {"ct": 30}


class Incomparable:
    def __eq__(self, other):
        raise TypeError("no")

    __hash__ = object.__hash__


def test_a_static_leaf_that_cannot_be_compared_is_another_one():
    mine, other, two = Incomparable(), Incomparable(), jnp.float32(2.0)
    f = lambda x: sow({"x": x, "static": mine}, name="h")["x"]
    assert plant(f, {"h": {"x": two, "static": mine}})(jnp.float32(1.0)) == 2
    with pytest.raises(PlantError, match=r"the site 'h' .* has the static leaf .*Incomparable"):
        plant(f, {"h": {"x": two, "static": other}})(jnp.float32(1.0))
