import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    CondSum,
    DuplicateSiteError,
    PlantError,
    add,
    at,
    capture,
    plant,
    reap,
    sites,
    sow,
)

X = jnp.array([1.0, 2.0, 3.0])


def same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6)
            assert a.dtype == getattr(b, "dtype", a.dtype)


def cond_sum(index, *branches):
    return CondSum(np.int32(index), branches)


# --------------------------------------------------------------- what the branches have in common


def alike(flag, x):
    return lax.cond(flag, lambda x: sow(2 * x, name="h") + 1, lambda x: -sow(3 * x, name="h"), x)


def one_sided(flag, x):
    return lax.cond(flag, lambda x: sow(2 * x, name="h") + 1, lambda x: -x, x)


def by_shape(flag, x):
    def total(x):
        return sow(jnp.sum(x), name="h") * x

    return lax.cond(flag, lambda x: sow(2 * x, name="h") + 1, total, x)


def by_dtype(flag, x):
    def signs(x):
        return sow(x > 1, name="h").astype(x.dtype)

    return lax.cond(flag, lambda x: sow(2 * x, name="h") + 1, signs, x)


def by_tree(flag, x):
    def pair(x):
        h = sow({"a": x, "b": [2 * x[0]]}, name="h")
        return h["a"] + h["b"][0]

    return lax.cond(flag, lambda x: sow(2 * x, name="h") + 1, pair, x)


def pytrees(flag, x):
    def branch(k):
        def run(x):
            h = sow({"a": k * x, "b": (x[0] - k, "static")}, name="h")
            return h["a"] * h["b"][0]

        return run

    return lax.cond(flag, branch(2), branch(3), x)


Z = np.zeros(3, np.float32)
# For each program, its result and what it collects where the flag is False, and where it is True.
PROGRAMS = {
    alike: [(-3 * X, 3 * X), (2 * X + 1, 2 * X)],
    one_sided: [(-X, cond_sum(0, None, Z)), (2 * X + 1, cond_sum(1, None, 2 * X))],
    by_shape: [(6 * X, cond_sum(0, 6.0, Z)), (2 * X + 1, cond_sum(1, 0.0, 2 * X))],
    by_dtype: [
        (np.array([0, 1, 1], np.float32), cond_sum(0, np.array([0, 1, 1], bool), Z)),
        (2 * X + 1, cond_sum(1, np.zeros(3, bool), 2 * X)),
    ],
    by_tree: [
        (X + 2, cond_sum(0, {"a": X, "b": [2.0]}, Z)),
        (2 * X + 1, cond_sum(1, {"a": Z, "b": [0.0]}, 2 * X)),
    ],
    pytrees: [
        (3 * X * -2, {"a": 3 * X, "b": (np.float32(-2), "static")}),
        (2 * X * -1, {"a": 2 * X, "b": (np.float32(-1), "static")}),
    ],
}


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("f", PROGRAMS)
def test_what_is_collected(f, flag):
    out, collected = capture(f, mode="strict")(jnp.asarray(flag), X)
    wanted, value = PROGRAMS[f][flag]
    same(out, wanted)
    same(collected, {"h": value})


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("f", PROGRAMS)
def test_round_trip(f, flag):
    flag = jnp.asarray(flag)
    same(plant(f, reap(f)(flag, X))(flag, X), f(flag, X))
    same(plant(f, capture(f)(flag, X)[1], mode="append")(flag, X), f(flag, X))


# -------------------------------------------------------------------------------------- plants

NEW = jnp.array([5.0, 7.0, 11.0])


@pytest.mark.parametrize("flag, wanted", [(False, -NEW), (True, NEW + 1)])
def test_a_plain_value_is_planted_in_every_branch(flag, wanted):
    same(plant(alike, {"h": NEW})(jnp.asarray(flag), X), wanted)


@pytest.mark.parametrize("flag, wanted", [(False, -X), (True, NEW + 1)])
def test_a_plain_value_is_planted_in_the_branches_that_have_the_site(flag, wanted):
    same(plant(one_sided, {"h": NEW})(jnp.asarray(flag), X), wanted)


@pytest.mark.parametrize("flag, wanted", [(False, 4 * X), (True, NEW + 1)])
def test_a_cond_sum_is_planted_branch_by_branch(flag, wanted):
    values = CondSum(jnp.int32(0), (jnp.float32(4), NEW))
    same(plant(by_shape, {"h": values})(jnp.asarray(flag), X), wanted)


@pytest.mark.parametrize("flag, wanted", [(False, -3 * X), (True, NEW + 1)])
def test_a_cond_sum_tells_branches_apart_that_sow_the_same_type(flag, wanted):
    same(plant(alike, {"h": CondSum(0, (None, NEW))})(jnp.asarray(flag), X), wanted)


@pytest.mark.parametrize("flag, wanted", [(False, -3 * X - 10), (True, 2 * X + 11)])
def test_an_edit_reaches_every_branch(flag, wanted):
    same(plant(alike, {"h": add(10.0)})(jnp.asarray(flag), X), wanted)
    same(plant(alike, {"h": lambda h: h + 10})(jnp.asarray(flag), X), wanted)


MISFITS = [
    (by_shape, NEW, r"got f32\[3\], wanted f32\[\], for the site 'h' \(sown at .*test_cond.py:\d+"),
    (by_shape, CondSum(0, (NEW, NEW)), r"got f32\[3\], wanted f32\[\]"),
    (one_sided, CondSum(0, (NEW, NEW)), r"value for branch 0 of the site 'h'.*wanted None there"),
    (one_sided, CondSum(0, (None, NEW, NEW)), r"`CondSum` of 3 branches, wanted 2.*'h'"),
]


@pytest.mark.parametrize("f, value, message", MISFITS)
def test_values_that_fit_no_branch_are_refused(f, value, message):
    with pytest.raises(PlantError, match=message):
        plant(f, {"h": value})(jnp.asarray(True), X)


# ----------------------------------------------------------------------- several sites and names


@jax.jit
def helper(x):
    return sow(x + 1, name="t")


def disordered(index, x):
    def first(x):
        return sow(sow(x, name="a") * 2, name="b")

    def second(x):
        return sow(sow(x + 5, name="b") * 2, name="a")

    def third(x):
        return sow(helper(helper(x)), name="b")

    return lax.switch(index, [first, second, third], x)


DISORDERED = [  # the result, "a" and "b", and what the third branch sows as "t"
    (2.0, cond_sum(0, 1.0, 0.0, None), 2.0, (0.0, 0.0)),
    (12.0, cond_sum(1, 0.0, 12.0, None), 6.0, (0.0, 0.0)),
    (3.0, cond_sum(2, 0.0, 0.0, None), 3.0, (2.0, 3.0)),
]


@pytest.mark.parametrize("index, taken", [(0, 0), (1, 1), (2, 2), (7, 2), (-1, 0)])
def test_sites_match_by_key_and_occurrence(index, taken):
    args = jnp.int32(index), jnp.float32(1)
    out, collected = capture(disordered)(*args)
    wanted, a, b, t = DISORDERED[taken]
    t = tuple(cond_sum(taken, None, None, value) for value in t)
    same((out, collected), (wanted, {"a": (a,), "b": (b,), "t": t}))
    same(plant(disordered, collected, mode="append")(*args), out)


def test_repeated_names_in_branches_are_matched_in_call_order():
    def f(flag, x):
        twice = lambda x: helper(helper(x))
        once = lambda x: sow(10 * x, name="t")
        return lax.cond(flag, twice, once, x)

    x = jnp.float32(1)
    same(reap(f, mode="append")(jnp.asarray(True), x), {"t": (2.0, cond_sum(1, None, 3.0))})
    same(reap(f, mode="append")(jnp.asarray(False), x), {"t": (10.0, cond_sum(0, None, 0.0))})
    planted = plant(f, {"t": (None, jnp.float32(7))}, mode="append")
    same([planted(jnp.asarray(flag), x) for flag in (False, True)], [10.0, 7.0])


def test_branches_that_are_not_taken_have_zeros_of_key_types():
    def f(flag, key):
        draw = lambda key: jax.random.uniform(sow(jax.random.fold_in(key, 1), name="key"))
        return lax.cond(flag, draw, lambda key: jax.random.uniform(key), key)

    key, data = jax.random.key(0), jax.random.key_data
    for flag in (True, False):
        acts = reap(f)(jnp.asarray(flag), key)
        taken = data(jax.random.fold_in(key, 1)) if flag else np.zeros(2)
        np.testing.assert_array_equal(data(acts["key"].branches[1]), taken)
        same(plant(f, acts)(jnp.asarray(flag), key), f(jnp.asarray(flag), key))
    same(plant(f, {"key": key})(jnp.asarray(True), key), jax.random.uniform(key))


# -------------------------------------------------------------------------------------- nesting


def in_loop(flags, xs):
    def branch(x):
        return sow(2 * x, name="h")

    def body(total, x):
        flag, x = x
        return total + lax.cond(flag, branch, lambda x: -x, x), None

    return lax.scan(body, jnp.float32(0), (flags, xs))[0]


FLAGS = jnp.array([True, False, True])


def test_in_a_loop_the_index_has_the_loop_axis():
    acts = reap(in_loop)(FLAGS, X)
    same(acts, {"h": cond_sum(np.array([1, 0, 1]), None, np.array([2, 0, 6], np.float32))})
    same(plant(in_loop, acts)(FLAGS, X), 2 - 2 + 6)
    same(plant(in_loop, {"h": CondSum(0, (None, NEW))})(FLAGS, X), 5 - 2 + 11)
    same(plant(in_loop, {"h": NEW})(FLAGS, X), 5 - 2 + 11)
    same(plant(in_loop, {"h": at(2, add(1.0))})(FLAGS, X), 2 - 2 + 7)
    assert sites(in_loop)(FLAGS, X)["h"].branch == (1,)


def around_loops(flag, x, lengths):
    def branch(length, k):
        def run(x):
            return lax.scan(lambda x, _: (sow(k * x, name="h"), None), x, length=length)[0]

        return run

    return lax.cond(flag, branch(lengths[1], 2.0), branch(lengths[0], 3.0), x)


def test_loops_of_one_length_in_all_branches_are_stacked():
    f, x = around_loops, jnp.float32(1)
    for flag, values in [(False, np.array([3, 9])), (True, np.array([2, 4]))]:
        acts = reap(f)(jnp.asarray(flag), x, (2, 2))
        same(acts, {"h": values.astype(np.float32)})
        same(plant(f, {"h": jnp.array([7.0, 8.0])})(jnp.asarray(flag), x, (2, 2)), 8.0)


def test_loops_of_different_lengths_are_a_cond_sum():
    f, x = around_loops, jnp.float32(1)
    for flag, values in [(False, ([3, 9, 27], [0, 0])), (True, ([0, 0, 0], [2, 4]))]:
        acts = reap(f)(jnp.asarray(flag), x, (3, 2))
        same(acts, {"h": cond_sum(int(flag), *(np.array(v, np.float32) for v in values))})
        same(plant(f, acts)(jnp.asarray(flag), x, (3, 2)), values[flag][-1])


def nested(outer, inner, x):
    def both(x):
        return lax.cond(inner, lambda x: sow(2 * x, name="h"), lambda x: sow(3 * x, name="h"), x)

    def one(x):
        return lax.cond(inner, lambda x: sow(5 * x, name="h"), lambda x: x, x)

    return lax.cond(outer, both, one, x)


@pytest.mark.parametrize("outer, inner", [(a, b) for a in (False, True) for b in (False, True)])
def test_nested_conds_nest_their_values(outer, inner):
    args = jnp.asarray(outer), jnp.asarray(inner), jnp.float32(1)
    acts = reap(nested)(*args)
    from_one = cond_sum(int(inner) if not outer else 0, None, 5.0 if inner and not outer else 0.0)
    from_both = (2.0 if inner else 3.0) if outer else 0.0
    same(acts, {"h": cond_sum(int(outer), from_one, from_both)})
    same(plant(nested, acts)(*args), nested(*args))
    planted = plant(nested, {"h": jnp.float32(9)})(*args)
    same(planted, 9.0 if outer or inner else 1.0)


def test_platforms_are_branches():
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: sow(2 * x, name="h"), tpu=lambda x: sow(3 * x, name="h"), default=jnp.sin
    )
    x = jnp.float32(1)
    h = reap(f)(x)["h"]
    values = [float(v) for v in h.branches if v is not None]
    assert sorted(values) == [0, 2] and float(h.branches[int(h.index)]) == 2
    same(plant(f, {"h": jnp.float32(7)})(x), 7.0)
    g = lambda x: lax.platform_dependent(x, cpu=branch(2), default=branch(3))
    branch = lambda k: lambda x: sow(k * x, name="h") + 1
    same(capture(g)(x), (3.0, {"h": (2.0,)}))
    same(plant(g, {"h": lambda h: 10 * h})(x), 21.0)


def test_vmap_around_keeps_branches_apart():
    acts = jax.vmap(reap(one_sided))(FLAGS, jnp.stack([X, X + 1, X + 2]))
    rows = np.stack([2 * X, Z, 2 * (X + 2)])
    same(acts, {"h": cond_sum(np.array([1, 0, 1]), None, rows)})


def test_branches_that_hold_the_same_sum():
    def inner(p, x):
        return lax.cond(p, lambda x: sow(x, name="m"), lambda x: x, x)

    def f(p, q, x):
        return lax.cond(q, lambda x: inner(p, x), lambda x: 2 * inner(p, x), x)

    args = (jnp.asarray(True), jnp.asarray(False), X)
    h = reap(f)(*args)["m"]
    assert h.index == 1 and h.branches[0] is None
    np.testing.assert_array_equal(h.branches[1], X)
    np.testing.assert_array_equal(plant(f, {"m": h})(*args), 2 * X)
    np.testing.assert_array_equal(plant(f, {"m": 10 * X})(*args), 20 * X)
    np.testing.assert_array_equal(plant(f, {"m": add(1)})(*args), 2 * (X + 1))


def test_static_numbers_in_branches_of_another_structure():
    def first(x):
        return sow({"p": x, "n": 7, "f": 2.5}, name="b")["p"]

    f = lambda x: lax.cond(x[0] > 0, first, lambda x: sow(2 * x, name="b"), x)
    for x in (X, -X):
        np.testing.assert_array_equal(plant(f, reap(f)(x))(x), f(x))


def test_explicit_sharding_of_the_zeros_of_other_branches():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.P("a", "b"))
        f = lambda x: lax.cond(x.sum() > 0, lambda x: sow(x, name="h"), lambda x: -x, x)
        h = reap(f)(x)["h"].branches[1]
        assert h.sharding.spec == jax.P("a", "b")
        np.testing.assert_array_equal(h, x)
        planted = plant(f, {"h": jnp.ones((8, 4))})(x)
        assert planted.sharding.spec == jax.P("a", "b")
        np.testing.assert_array_equal(planted, np.ones((8, 4)))


def test_strict_collection_of_a_batched_predicate_says_what_to_do():
    branch = lambda factor: lambda x: factor * sow(jnp.sin(x), name="h")
    f = lambda p, x: lax.cond(p, branch(2.0), branch(3.0), x)
    p, x = jnp.array([True, False]), jnp.arange(2.0)
    match = r"`vmap` batched, so that all of them run: put `reap` inside: `jax\.vmap\(reap\(f\)\)`"
    with pytest.raises(DuplicateSiteError, match=match):
        reap(jax.vmap(f))(p, x)
    np.testing.assert_allclose(jax.vmap(reap(f))(p, x)["h"], np.sin(x), rtol=1e-6)
