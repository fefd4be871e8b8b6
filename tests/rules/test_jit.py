import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harvest import capture, plant, reap, sites, sow

X = jnp.arange(3.0)
MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
ROWS, COLUMNS, BOTH, NONE = (
    NamedSharding(MESH, PartitionSpec(*spec)) for spec in [("a",), (None, "b"), ("a", "b"), ()]
)
MATRIX = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@jax.jit
def inner(x):
    return 2 * sow(jnp.sin(x), name="inner")


@jax.jit
def middle(x):
    return sow(inner(x) + 1, name="middle")


@jax.jit
def outer(x):
    x = sow(x / 2, name="outer")
    return middle(x) ** 2


def outer_by_hand(x, inner=None, middle=None, outer=None):
    outer = x / 2 if outer is None else outer
    inner = jnp.sin(outer) if inner is None else inner
    middle = 2 * inner + 1 if middle is None else middle
    return middle**2, {"outer": outer, "inner": inner, "middle": middle}


def test_nested_calls_are_collected_once_in_call_order():
    out, collected = capture(outer)(X)
    wanted, values = jax.jit(outer_by_hand)(X)
    np.testing.assert_array_equal(out, wanted)
    assert list(collected) == ["outer", "inner", "middle"]
    for key, (value,) in collected.items():
        np.testing.assert_array_equal(value, values[key])


@pytest.mark.parametrize("key", ["outer", "inner", "middle"])
def test_a_nested_value_is_replaced(key):
    value = jnp.array([7.0, 8.0, 9.0])
    wanted, values = outer_by_hand(X, **{key: value})
    out, collected = capture(plant(outer, {key: value}))(X)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    for name, (got,) in collected.items():
        np.testing.assert_allclose(got, values[name], rtol=1e-6)


@pytest.mark.parametrize("select", [None, "inner", ["outer", "middle"]])
def test_round_trip(select):
    np.testing.assert_array_equal(plant(outer, reap(outer, select)(X))(X), outer(X))


def test_capture_commutes_with_jit():
    within = capture(outer)(X)
    around = jax.jit(capture(outer.__wrapped__))(X)
    assert jax.tree.structure(within) == jax.tree.structure(around)
    jax.tree.map(np.testing.assert_array_equal, within, around)


# --------------------------------------------------------------------------------- arguments


@functools.partial(jax.jit, static_argnums=1, static_argnames=("kind", "flip"))
def with_static(x, power, *, scale, kind, flip=False):
    x = sow(scale * x**power, name=kind)
    return -x if flip else x


@pytest.mark.parametrize(
    "kwargs, sign", [({}, 1), ({"flip": True}, -1), ({"flip": False}, 1)], ids=str
)
def test_keyword_and_static_arguments(kwargs, sign):
    scale = jnp.float32(3)
    out, collected = capture(with_static)(X, 2, scale=scale, kind="h", **kwargs)
    np.testing.assert_array_equal(collected["h"][0], [0, 3, 12])
    np.testing.assert_array_equal(out, sign * collected["h"][0])
    planted = plant(with_static, {"g": jnp.ones(3)})(X, power=2, scale=scale, kind="g", **kwargs)
    np.testing.assert_array_equal(planted, sign * np.ones(3))


def test_static_arguments_of_an_inner_call():
    f = lambda x: with_static(x, 3, scale=2.0, kind="a") + with_static(x, 1, scale=x, kind="b")
    acts = reap(f)(X)
    np.testing.assert_array_equal(acts["a"], [0, 2, 16])
    np.testing.assert_array_equal(acts["b"], [0, 1, 4])


def test_arguments_that_are_not_used_are_kept():
    inner = jax.jit(lambda x, unused: 2 * sow(x, name="h"), keep_unused=True)
    f = lambda x: inner(x, x + 1)
    assert str(jax.make_jaxpr(capture(f))(X)).count("keep_unused=True") == 1
    np.testing.assert_array_equal(capture(f)(X)[0], 2 * X)


def test_inline_calls_leave_no_call():
    layer = jax.jit(lambda x: sow(jnp.sin(x), name="h") * 2, inline=True)
    f = lambda x: layer(layer(x))
    assert jax.jit(capture(f)).lower(X).as_text().count("func.func") == 1
    out, collected = capture(f)(X)
    first = np.sin(X)
    np.testing.assert_allclose(collected["h"], [first, np.sin(2 * first)], rtol=1e-6)
    np.testing.assert_allclose(out, 2 * collected["h"][1], rtol=1e-6)


# ------------------------------------------------------------------------- shared compilation


def test_a_layer_that_is_called_twelve_times_is_traced_and_lowered_once():
    traces = []

    @jax.jit
    def layer(x):
        traces.append(1)
        return sow(jnp.tanh(x @ x.T), name="h")

    @jax.jit
    def layer_by_hand(x):
        h = jnp.tanh(x @ x.T)
        return h, h

    def model(x):
        for _ in range(12):
            x = layer(x)
        return x

    def model_by_hand(x):
        hs = []
        for _ in range(12):
            x, h = layer_by_hand(x)
            hs.append(h)
        return x, {"h": tuple(hs)}

    x = jnp.eye(3)
    functions = [
        jax.jit(f).lower(x).as_text().count("func.func") for f in (capture(model), model_by_hand)
    ]
    assert functions[0] == functions[1]
    assert len(traces) == 1
    jax.tree.map(np.testing.assert_array_equal, capture(model)(x), jax.jit(model_by_hand)(x))


def test_calls_of_one_function_with_other_options_are_told_apart():
    double = lambda x: 2 * sow(x, name="h")
    columns, kept = jax.jit(double, out_shardings=COLUMNS), jax.jit(double, keep_unused=True)
    f = lambda x: (jax.jit(double, out_shardings=ROWS)(x), columns(x), kept(x))
    by_rows, by_columns, _ = capture(f)(MATRIX)[0]
    assert by_rows.sharding.is_equivalent_to(ROWS, 2)
    assert by_columns.sharding.is_equivalent_to(COLUMNS, 2)
    assert str(jax.make_jaxpr(capture(f))(MATRIX)).count("keep_unused=True") == 1


def test_names_of_inner_functions_stay():
    assert "@middle" in jax.jit(capture(outer)).lower(X).as_text()
    assert "@middle" in jax.jit(plant(outer, {"middle": X})).lower(X).as_text()


def test_sites_are_listed_once_for_each_call():
    f = lambda x: inner(inner(x))
    assert [(site.key, site.occurrence) for site in sites(f)(X)] == [("inner", 0), ("inner", 1)]


def test_an_edit_reaches_every_call_of_one_function():
    f = lambda x: inner(inner(x))
    np.testing.assert_array_equal(plant(f, {"inner": jnp.ones_like}, mode="append")(X), [2, 2, 2])
    value = jnp.array([4.0, 5.0, 6.0])
    for edits, wanted in [
        ((None, value), 2 * value),
        ((value, value + 1), 2 * (value + 1)),
        ((jnp.ones_like, jnp.negative), -2 * jnp.sin(2 * jnp.ones(3))),
        ((jnp.zeros_like, jnp.cos), 2 * jnp.ones(3)),
    ]:
        planted = plant(f, {"inner": edits}, mode="append")
        np.testing.assert_allclose(planted(X), wanted, rtol=1e-6)


# -------------------------------------------------------------------- shardings and donation

SHARDINGS = [
    {"out_shardings": ROWS},
    {"in_shardings": COLUMNS},
    {"in_shardings": ROWS, "out_shardings": BOTH},
    {"in_shardings": BOTH, "out_shardings": NONE},
]


@pytest.mark.parametrize("options", SHARDINGS)
@pytest.mark.parametrize("nested", [False, True])
def test_shardings_apply_as_without_the_transform(options, nested):
    f = jax.jit(lambda x: 2 * sow(x + 1, name="h"), **options)
    program = (lambda x: f(x)) if nested else f
    out, collected = capture(program)(MATRIX)
    np.testing.assert_array_equal(collected["h"][0], MATRIX + 1)
    np.testing.assert_array_equal(out, 2 * (MATRIX + 1))
    assert out.sharding.is_equivalent_to(jax.jit(program)(MATRIX).sharding, 2)
    assert out.sharding.is_equivalent_to([*options.values()][-1], 2)


@functools.partial(jax.jit, in_shardings=(ROWS, None), out_shardings=(ROWS, COLUMNS))
def with_shardings(x, y):
    x = sow(x + 1, name="h")
    return 2 * x, x + y


@pytest.mark.parametrize("transform, constraints", [(capture, 3), (reap, 1)])
def test_shardings_of_outputs_that_are_not_computed_are_left_out(transform, constraints):
    text = jax.jit(transform(with_shardings)).lower(MATRIX, MATRIX).as_text()
    assert text.count("sdy.sharding_constraint") == constraints


def test_shardings_stay_where_values_are_planted():
    ones = np.ones((8, 8), np.float32)
    double, added = plant(with_shardings, {"h": ones})(MATRIX, MATRIX)
    np.testing.assert_array_equal(double, 2 * ones)
    np.testing.assert_array_equal(added, MATRIX + 1)
    assert double.sharding.is_equivalent_to(ROWS, 2)
    assert added.sharding.is_equivalent_to(COLUMNS, 2)


def test_donation_is_for_the_outer_call():
    f = lambda x: 2 * sow(x + 1, name="h")
    kept, donated = jnp.ones(3), jnp.ones(3)
    np.testing.assert_array_equal(capture(jax.jit(f, donate_argnums=0))(kept)[0], [4, 4, 4])
    assert not kept.is_deleted()
    out, collected = jax.jit(capture(f), donate_argnums=0)(donated)
    assert donated.is_deleted()
    np.testing.assert_array_equal(out, [4, 4, 4])
    np.testing.assert_array_equal(collected["h"][0], [2, 2, 2])
