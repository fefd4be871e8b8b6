"""Folds of all kinds of values: dtypes, keys, pytrees with static leaves, infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from harvest import SelectError, folds, reap, sow

EDGES = np.array([0.0, 1.0, 2.5, 6.0])
FLOAT, INT = np.float32, np.int32
VALUES = {  # values, and the dtype of their mean
    "float32": (jnp.array([[2.0, 5.0], [-1.5, 0.5], [4.0, 1.0]]), FLOAT),
    "bfloat16": (jnp.array([[2, 5], [-1.5, 0.5], [4, 1]], jnp.bfloat16), jnp.bfloat16),
    "float16": (jnp.array([[2, 5], [-1.5, 0.5], [4, 1]], jnp.float16), np.float16),
    "int32": (jnp.array([[2, 5], [-1, 0], [4, 1]]), FLOAT),
    "uint8": (jnp.array([[2, 250], [1, 0], [4, 1]], jnp.uint8), FLOAT),
    "bool": (jnp.array([[False, True], [True, False], [False, False]]), FLOAT),
    "complex64": (jnp.array([[2 + 1j, 5], [-1j, 0.5], [4, 1 - 2j]]), np.complex64),
}
STORED_ONLY = {  # dtypes that JAX does not promote; most of these floats have no infinities
    "float8_e4m3fn": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e4m3fn),
    "float8_e4m3fnuz": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e4m3fnuz),
    "float8_e4m3b11fnuz": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e4m3b11fnuz),
    "float8_e5m2": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e5m2),
    "float8_e5m2fnuz": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e5m2fnuz),
    "float8_e3m4": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e3m4),
    "float8_e4m3": ([[2, -5], [-1.5, -0.5], [4, -1]], jnp.float8_e4m3),
    "float4_e2m1fn": ([[2, -6], [-1.5, -0.5], [4, -1]], jnp.float4_e2m1fn),
    "int4": ([[2, -5], [-1, -8], [7, -6]], FLOAT),
    "uint4": ([[2, 15], [1, 0], [7, 3]], FLOAT),
}
VALUES |= {name: (jnp.array(xs, name), dtype) for name, (xs, dtype) in STORED_ONLY.items()}
ORDERED = [name for name in VALUES if name != "complex64"]


def rows(xs):
    return lax.map(lambda x: sow(x, name="h"), xs)


def folded(reducers, xs):
    return reap(rows, {"h": reducers})(xs)["h"]


def same(got, wanted, dtype):
    assert got.dtype == dtype
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    eps = float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
    np.testing.assert_allclose(np.asarray(got, wide), np.asarray(wanted, wide), rtol=2 * eps)


@pytest.mark.parametrize("name", VALUES)
def test_values_keep_their_dtype(name):
    xs, _ = VALUES[name]
    last, at, every, stack = folded(
        (folds.last(), folds.at(-2), folds.every(2), folds.stack(4)), xs
    )
    same(last, xs[2], xs.dtype)
    same(at, xs[1], xs.dtype)
    same(every, xs[::2], xs.dtype)
    same(stack.values, jnp.concatenate([xs, jnp.zeros_like(xs[:1])]), xs.dtype)


@pytest.mark.parametrize("name", VALUES)
def test_means_have_the_dtype_of_jnp_mean(name):
    xs, dtype = VALUES[name]
    wide = np.asarray(xs, np.complex128 if name == "complex64" else np.float64)
    mean, moments = folded((folds.mean(), folds.moments()), xs)
    same(mean, wide.mean(axis=0), dtype)
    same(moments.mean, wide.mean(axis=0), dtype)
    same(moments.variance, wide.var(axis=0), FLOAT if name == "complex64" else dtype)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_two_bits(dtype):
    """XLA cannot do all with these; `jnp.mean` would round what it returns to an integer."""
    xs = jnp.array([[1, 0], [1, 1], [0, 0]], dtype)
    mean, moments = folded((folds.mean(), folds.moments()), xs)
    same(mean, [2 / 3, 1 / 3], FLOAT)
    same(moments.variance, [2 / 9, 2 / 9], FLOAT)


@pytest.mark.parametrize("name", ORDERED)
def test_values_are_compared_in_their_dtype(name):
    xs, _ = VALUES[name]
    wide = np.asarray(xs, np.float64)
    largest, top, counts = folded((folds.maximum(), folds.top_k(2), folds.histogram(EDGES)), xs)
    same(largest, wide.max(axis=0), xs.dtype)
    same(top.values, -np.sort(-wide, axis=0)[:2], xs.dtype)
    same(top.indices[0], np.argsort(-wide, axis=0, kind="stable")[:2], INT)
    same(counts, np.histogram(wide, EDGES)[0], INT)


@pytest.mark.parametrize("fold", [folds.maximum(), folds.top_k(1), folds.histogram(EDGES)])
def test_what_has_no_order_is_not_compared(fold):
    match = r"compares values, which those of type `complex64` cannot be, for the site 'h' \(sown"
    with pytest.raises(SelectError, match=match):
        folded(fold, VALUES["complex64"][0])


@pytest.mark.parametrize("edges", [[0, 2, 4], (0.0, 2.0, 4.0), np.array([0, 2, 4], np.int8)])
def test_edges_of_any_dtype(edges):
    for name in ORDERED:
        xs = VALUES[name][0]
        wanted = np.histogram(np.asarray(xs, np.float64), [0, 2, 4])[0]
        same(folded(folds.histogram(edges), xs), wanted, INT)


def test_sums_of_low_precision_do_not_stop_growing():
    xs = jnp.ones(1000, jnp.bfloat16)
    mean, moments = folded((folds.mean(), folds.moments()), xs)
    assert mean == moments.mean == 1 and moments.variance == 0


def test_variances_do_not_cancel():
    xs = 1e4 + np.linspace(0, 1, 20, dtype=np.float32)
    variance = folded(folds.moments(), xs).variance
    np.testing.assert_allclose(variance, np.var(xs.astype(np.float64)), rtol=2e-2)


@pytest.mark.parametrize(
    "xs, indices",
    [
        ([-np.inf, 1.0, -np.inf], [1, 0, 2, -1]),
        ([False, True, False], [1, 0, 2, -1]),
        (np.array([-128, -128, 3], np.int8), [2, 0, 1, -1]),
        ([1.0, 1.0, 2.0], [2, 0, 1, -1]),
    ],
)
def test_the_least_values_are_among_the_largest_too(xs, indices):
    top = folded(folds.top_k(4), jnp.asarray(xs))
    np.testing.assert_array_equal(top.values[:3], np.asarray(xs)[indices[:3]])
    np.testing.assert_array_equal(top.indices[0], indices)


def test_nan():
    xs = jnp.array([1.0, jnp.nan, 3.0])
    reducers = (folds.mean(), folds.maximum(), folds.last(), folds.count())
    mean, largest, last, count = folded(reducers, xs)
    assert jnp.isnan(mean) and jnp.isnan(largest) and last == 3 and count == 3
    np.testing.assert_array_equal(folded(folds.histogram([0.0, 2.0, 4.0]), xs), [1, 1])
    np.testing.assert_array_equal(folded(folds.top_k(2), xs).values, [np.nan, 3])


def test_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    data = np.asarray(jax.random.key_data(keys))
    reducers = (folds.last(), folds.at(1), folds.at(jnp.array(2)), folds.every(2), folds.stack(3))
    last, one, two, every, stack = folded(reducers, keys)
    wanted = (data[3], data[1], data[2], data[::2], data[:3])
    for got, key in zip((last, one, two, every, stack.values), wanted, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(got), key)
    assert folded(folds.count(), keys) == 4
    with pytest.raises(SelectError, match="of type `key<fry>` cannot be"):
        folded(folds.maximum(), keys)
    with pytest.raises(SelectError, match=r"a fold that adds, and values of .* the site 'h'"):
        folded(folds.mean(), keys)


# ----------------------------------------------------------------------------------- pytrees


def trees(xs):
    def body(x):
        return sow({"x": x, "rest": ("name", None, 3, [x.sum() > 2])}, name="h")["x"]

    return lax.map(body, xs)


def rest(leaf):
    return ("name", None, 3, [leaf])


def test_static_leaves_stay():
    xs = np.array([[2, 5], [-1, 0], [4, 1]], np.float32)
    positive = np.array([True, False, True])
    wanted = [
        (folds.last(), {"x": xs[2], "rest": rest(True)}),
        (folds.at(1), {"x": xs[1], "rest": rest(False)}),
        (folds.mean(), {"x": xs.mean(axis=0), "rest": rest(np.float32(2 / 3))}),
        (folds.maximum(), {"x": xs.max(axis=0), "rest": rest(True)}),
        (folds.every(2), {"x": xs[::2], "rest": rest(positive[::2])}),
        (folds.histogram([0, 1, 9]), {"x": np.array([1, 4]), "rest": rest(np.array([1, 2]))}),
        (folds.count(), 3),
    ]
    got = reap(trees, {"h": tuple(fold for fold, _ in wanted)})(jnp.asarray(xs))["h"]
    for result, (_, tree) in zip(got, wanted, strict=True):
        assert jax.tree.structure(result) == jax.tree.structure(tree)
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True):
            assert a == b if isinstance(b, str) else np.allclose(a, b)
    top = reap(trees, {"h": folds.top_k(1)})(jnp.asarray(xs))["h"]
    assert top.values["x"].tolist() == [[4, 5]] and top.indices[0]["x"].tolist() == [[2, 0]]
    assert top.values["rest"][:3] == top.indices[0]["rest"][:3] == ("name", None, 3)


def test_functions_of_values_may_return_static_leaves():
    xs = jnp.arange(6.0).reshape(3, 2)
    got = reap(rows, {"h": (lambda v: {"max": v.max(), "name": "h", "n": 3, "none": None})})(xs)
    assert got["h"].pop("max").tolist() == [1, 3, 5]
    assert got["h"] == {"name": "h", "n": 3, "none": None}
    got = reap(rows, {"h": folds.last().of(lambda v: (v.sum(), "sum"))})(xs)["h"]
    assert got == (9, "sum")


# --------------------------------------------------------------------------------- sharded


@pytest.mark.parametrize("batched", [False, True])
def test_explicit_shardings_are_kept(batched):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    reducers = {
        folds.last(): P("d"),
        folds.at(1): P("d"),
        folds.mean(): P("d"),
        folds.maximum(): P("d"),
        folds.moments(): P("d"),
        folds.every(2): P(None, "d"),
        folds.stack(2): P(None, "d"),
        folds.top_k(2): P(None, "d"),
        folds.count(): P(),
    }
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    doubled = lambda x: lax.scan(lambda x, _: (sow(2 * x, name="h"), None), x, length=3)[0]
    with jax.set_mesh(mesh):
        select = {"h": (*reducers, folds.histogram([-9, 0, 9]))}
        if batched:
            xs = jax.device_put(x[None], NamedSharding(mesh, P(None, "d")))
            got = jax.tree.map(lambda a: a[0], reap(jax.vmap(doubled), select)(xs)["h"])
        else:
            got = reap(doubled, select)(jax.device_put(x, NamedSharding(mesh, P("d"))))["h"]
        for result, spec in zip(got, reducers.values(), strict=False):
            assert jax.typeof(jax.tree.leaves(result)[0]).sharding.spec == spec
    np.testing.assert_array_equal(got[0], 8 * x)
    np.testing.assert_array_equal(got[6].values, [2 * x, 4 * x])
    np.testing.assert_array_equal(got[7].indices[0], np.where(x > 0, [[2], [1]], [[0], [1]]))
    np.testing.assert_array_equal(got[9], [12, 12])


# ------------------------------------------------------------------------- partially batched


def pairs(x, y):
    return lax.scan(lambda c, _: (sow({"c": c + 1, "y": y}, name="h")["c"], None), x, length=3)[0]


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_leaves_of_which_only_some_are_batched(in_axes):
    args = [jnp.arange(4.0) if axis == 0 else jnp.float32(7) for axis in in_axes]
    reducers = {"h": (folds.mean(), folds.last(), lambda v: v["c"] * v["y"])}
    mean, last, product = reap(jax.vmap(pairs, in_axes), reducers)(*args)["h"]
    x, y = np.broadcast_arrays(*args, np.zeros(4))[:2]
    np.testing.assert_allclose(mean["c"], x + 2)
    np.testing.assert_allclose(mean["y"], y)
    np.testing.assert_allclose(last["c"], x + 3)
    np.testing.assert_allclose(product, np.stack([(x + n) * y for n in (1, 2, 3)]))


def test_what_is_the_same_for_all_examples_has_no_axis():
    f = jax.vmap(lambda x, y: pairs(x, 2.0) + y, in_axes=(None, 0))
    reducers = {"h": (folds.count(), folds.stack(3), lambda v: -v["c"])}
    count, stack, negative = reap(f, reducers)(jnp.float32(1), jnp.arange(4.0))["h"]
    assert count == 3 and stack.values["c"].tolist() == [2, 3, 4]
    assert negative.tolist() == [-2, -3, -4]


def test_moments_have_the_mean_of_mean():
    f = lambda xs: lax.map(lambda x: sow(x, name="h"), xs)
    xs = jnp.array([1.0, jnp.inf, 2.0])
    mean, moments = reap(f, {"h": (folds.mean(), folds.moments())})(xs)["h"]
    assert mean == moments.mean == jnp.inf and jnp.isnan(moments.variance)
