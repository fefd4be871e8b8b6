import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import at, capture, grad, indexed, plant, reap, sites, sow

XS = {"u": jnp.array([1.0, 2.0, 3.0, 4.0, 5.0]), "v": (jnp.array([2.0, 0.5, -1.0, 3.0, 1.0]),)}
INIT = (jnp.float32(1), {"product": jnp.float32(2)})


def loop(init, xs, reverse=False, unroll=1):
    """A carry and xs that are pytrees, and a sown pytree that feeds both results."""

    def body(carry, x):
        total, rest = carry
        h = {"sum": total + x["u"], "product": rest["product"] * x["v"][0]}
        h = sow(h, name="h")
        return (h["sum"], {"product": h["product"]}), [h["sum"] - h["product"]]

    return lax.scan(body, init, xs, reverse=reverse, unroll=unroll)


def loop_by_hand(init, xs, reverse=False, edit=lambda h, i: h):
    total, product = float(init[0]), float(init[1]["product"])
    length = len(xs["u"])
    ys, sums, products = np.zeros(length), np.zeros(length), np.zeros(length)
    for i in reversed(range(length)) if reverse else range(length):
        total, product = total + float(xs["u"][i]), product * float(xs["v"][0][i])
        h = edit({"sum": total, "product": product}, i)
        sums[i], products[i] = total, product = h["sum"], h["product"]
        ys[i] = total - product
    return ((total, {"product": product}), [ys]), {"h": {"sum": sums, "product": products}}


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


OPTIONS = [(r, u, n) for r in (False, True) for u in (1, 2, True) for n in (0, 1, 5)]


@pytest.mark.parametrize("reverse, unroll, length", OPTIONS)
def test_values_are_stacked_in_the_order_of_xs(reverse, unroll, length):
    xs = jax.tree.map(lambda x: x[:length], XS)
    out, collected = capture(loop, mode="strict")(INIT, xs, reverse=reverse, unroll=unroll)
    wanted, values = loop_by_hand(INIT, xs, reverse)
    same(out, wanted)
    same(collected, values)


@pytest.mark.parametrize("reverse, unroll, length", OPTIONS)
def test_stacked_values_are_planted_one_slice_each(reverse, unroll, length):
    xs = jax.tree.map(lambda x: x[:length], XS)
    new = {"sum": 10 * jnp.arange(1.0, 6.0)[:length], "product": jnp.arange(-5.0, 0.0)[:length]}
    f = plant(loop, {"h": new})
    edit = lambda h, i: {name: float(new[name][i]) for name in h}
    same(f(INIT, xs, reverse=reverse, unroll=unroll), loop_by_hand(INIT, xs, reverse, edit)[0])


@pytest.mark.parametrize("transform", [capture, reap, lambda f: plant(f, {"h": doubled})])
def test_a_loop_keeps_its_options(transform):
    f = lambda init, xs: loop(init, xs, reverse=True, unroll=2)
    text = str(jax.make_jaxpr(transform(f))(INIT, XS))
    assert text.count("scan[") == text.count("reverse=True") == text.count("unroll=2") == 1


@pytest.mark.parametrize("reverse, unroll, length", OPTIONS)
def test_round_trip(reverse, unroll, length):
    xs, options = jax.tree.map(lambda x: x[:length], XS), {"reverse": reverse, "unroll": unroll}
    acts = reap(loop)(INIT, xs, **options)
    same(plant(loop, acts)(INIT, xs, **options), loop(INIT, xs, **options))


def doubled(h):
    return jax.tree.map(lambda x: 2 * x, h)


def plus_index(h, index):
    (i,) = index
    return jax.tree.map(lambda x: x + 10 * i.astype(x.dtype), h)


EDITS = {
    "callable": (doubled, lambda h, i: {k: 2 * v for k, v in h.items()}),
    "at": (at(3, doubled), lambda h, i: {k: 2 * v for k, v in h.items()} if i == 3 else h),
    "indexed": (indexed(plus_index), lambda h, i: {k: v + 10 * i for k, v in h.items()}),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("reverse", [False, True])
def test_edits_see_one_iteration_and_its_position(name, reverse):
    edit, by_hand = EDITS[name]
    out, collected = capture(plant(loop, {"h": edit}), mode="strict")(INIT, XS, reverse=reverse)
    wanted, values = loop_by_hand(INIT, XS, reverse, by_hand)
    same(out, wanted)
    same(collected, values)


@pytest.mark.parametrize("reverse, unroll, length", OPTIONS)
def test_gradients_at_each_iteration(reverse, unroll, length):
    xs = jax.tree.map(lambda x: x[:length], XS)
    weighed = lambda out: (
        out[0][0] + 2 * out[0][1]["product"] + jnp.vdot(jnp.arange(float(length)), out[1][0])
    )
    f = lambda init, xs: weighed(loop(init, xs, reverse, unroll))
    eps = {name: jnp.zeros(length) for name in ("sum", "product")}

    def with_eps(eps):
        total, rest, ys = INIT[0], INIT[1]["product"], [0.0] * length
        for i in reversed(range(length)) if reverse else range(length):
            total = total + xs["u"][i] + eps["sum"][i]
            rest = rest * xs["v"][0][i] + eps["product"][i]
            ys[i] = total - rest
        return total + 2 * rest + sum(i * y for i, y in enumerate(ys))

    same(grad(f)(INIT, xs), {"h": jax.grad(with_eps)(eps)})


# ------------------------------------------------------------------------------------ nested


def nested(x, rows):
    """`rows` is scanned over, and so is each row; sites before, in and after the inner loop."""

    def inner(x, r):
        x = sow(jnp.sin(x) + r, name="inner")
        return x, None

    def outer(x, row):
        x = sow(2 * x, name="before")
        x, _ = lax.scan(inner, x, row, reverse=True)
        return sow(x - 1, name="after"), None

    return lax.scan(outer, x, rows)[0]


def nested_by_hand(x, rows, edit=lambda h, i, j: h):
    inner = np.zeros(rows.shape)
    before, after = [], []
    for i, row in enumerate(rows):
        x = 2 * x
        before.append(x)
        for j in reversed(range(len(row))):
            x = inner[i, j] = edit(np.sin(x) + row[j], i, j)
        x = x - 1
        after.append(x)
    return x, {"before": np.array(before), "inner": inner, "after": np.array(after)}


ROWS = np.arange(12, dtype=np.float32).reshape(3, 4) / 10


def test_axes_of_nested_loops_nest_outermost_first():
    out, collected = capture(nested, mode="strict")(jnp.float32(0.5), ROWS)
    wanted, values = nested_by_hand(0.5, ROWS)
    same((out, collected), (wanted, values))
    assert list(collected) == ["before", "inner", "after"]
    table = sites(nested)(jnp.float32(0.5), ROWS)
    assert [tuple(axis.size for axis in site.axes) for site in table] == [(3,), (3, 4), (3,)]


@pytest.mark.parametrize("select", ["before", "inner", "after", ["before", "inner"], None])
def test_nested_round_trip(select):
    acts = reap(nested, select)(jnp.float32(0.5), ROWS)
    same(plant(nested, acts)(jnp.float32(0.5), ROWS), nested(jnp.float32(0.5), ROWS))


def test_a_nested_value_is_planted_one_slice_each():
    new = jnp.arange(12.0).reshape(3, 4)
    got = plant(nested, {"inner": new})(jnp.float32(0.5), ROWS)
    same(got, nested_by_hand(0.5, ROWS, lambda h, i, j: float(new[i, j]))[0])


def test_nested_indices_are_outermost_first():
    edit = indexed(lambda h, index: h + 10 * index[0].astype(h.dtype) + index[1].astype(h.dtype))
    got = capture(plant(nested, {"inner": edit}), mode="strict")(jnp.float32(0.5), ROWS)
    same(got, nested_by_hand(0.5, ROWS, lambda h, i, j: h + 10 * i + j))


# ------------------------------------------------------------------- what is built on a scan


def by_map(xs, batch_size=None):
    return lax.map(lambda x: 2 * sow(x + 1, name="h"), xs, batch_size=batch_size)


@pytest.mark.parametrize("length", [0, 1, 6])
def test_map(length):
    xs = jnp.arange(2.0 * length).reshape(length, 2)
    out, collected = capture(by_map, mode="strict")(xs)
    same((out, collected), (2 * (xs + 1), {"h": xs + 1}))
    same(plant(by_map, {"h": 3 * xs})(xs), 6 * xs)


def test_a_batched_map_has_a_loop_and_a_batch_axis():
    xs = jnp.arange(6.0)
    same(reap(by_map)(xs, batch_size=2), {"h": (xs + 1).reshape(3, 2)})
    same(plant(by_map, {"h": xs.reshape(3, 2)})(xs, batch_size=2), 2 * xs)


def by_fori(x, low, high):
    return lax.fori_loop(low, high, lambda i, x: sow(x + i.astype(x.dtype), name="h"), x)


@pytest.mark.parametrize("low, high, values", [(0, 4, [1, 2, 4, 7]), (2, 4, [3, 6]), (1, 1, [])])
def test_a_fori_loop_with_static_bounds(low, high, values):
    out, collected = capture(by_fori, mode="strict")(jnp.float32(1), low, high)
    same((out, collected["h"]), ([1, *values][-1], np.array(values)))
    planted = plant(by_fori, {"h": 5 * jnp.arange(float(high - low))})(jnp.float32(1), low, high)
    same(planted, [1, *(5 * i for i in range(high - low))][-1])


def test_a_scan_is_one_occurrence_and_stays_one_loop():
    def f(x):
        x, _ = lax.scan(lambda x, _: (sow(x + 1, name="h"), None), x, length=2)
        x, _ = lax.scan(lambda x, _: (sow(x * 2, name="h"), None), x, length=3)
        return x

    same(capture(f)(jnp.float32(0))[1], {"h": (np.array([1, 2]), np.array([4, 8, 16]))})
    assert str(jax.make_jaxpr(capture(f))(0.0)).count("scan[") == 2
    planted = plant(f, {"h": (None, jnp.array([1.0, 2.0, 7.0]))}, mode="append")
    same(planted(jnp.float32(0)), 7)


def test_two_sites_of_one_name_in_a_body_are_two_occurrences():
    def f(x):
        return lax.scan(lambda x, _: (sow(sow(x + 1, name="h") * 2, name="h"), None), x, length=2)

    same(capture(f)(jnp.float32(0))[1], {"h": (np.array([1, 3]), np.array([2, 6]))})


def test_values_that_do_not_float_are_stacked_and_planted():
    def f(key, n):
        def body(carry, _):
            key, n = carry
            key, n = sow((jax.random.fold_in(key, n), n + 1), name="h")
            return (key, n), sow(n % 2 == 0, name="even")

        return lax.scan(body, (key, n), length=3)

    args = jax.random.key(0), jnp.int32(4)
    acts = reap(f)(*args)
    keys = [args[0]]
    for n in (4, 5, 6):
        keys.append(jax.random.fold_in(keys[-1], n))
    data = jax.random.key_data
    np.testing.assert_array_equal(data(acts["h"][0]), [data(key) for key in keys[1:]])
    np.testing.assert_array_equal(acts["h"][1], [5, 6, 7])
    np.testing.assert_array_equal(acts["even"], [False, True, False])
    (key, n), even = plant(f, {"h": (acts["h"][0][::-1], jnp.arange(3))})(*args)
    np.testing.assert_array_equal(data(key), data(keys[1]))
    assert n == 2
    np.testing.assert_array_equal(even, [True, False, True])
