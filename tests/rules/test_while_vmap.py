"""A `while_loop` whose predicate `vmap` batched: lanes that are done neither sow nor change.

Whatever is collected is what each lane collects on its own; or it is an error that says where to
put the `vmap`, since the axes of the lanes may not be those of the value.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    HarvestWarning,
    UnsupportedError,
    add,
    at,
    capture,
    chain,
    folds,
    plant,
    reap,
    sites,
    sow,
    zero,
)

NS = np.array([2, 0, 3])  # as long as `YS`, so that to mix up their axes is no error by itself
YS = np.array([0.5, 2.0, -1.0], np.float32)


def loop(h):
    """`x -> x + 1`, `n` times, which sows `h(x, y)`."""

    def f(n, y):
        def body(carry):
            step, x = carry
            sow(h(x, y), name="h")
            return step + 1, x + 1

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, jnp.float32(0)))[1]

    return f


VALUES = {  # what is sown, by JAX and by hand
    "carry": (lambda x, y: 2 * x, lambda x, y: 2 * x),
    "constant": (lambda x, y: jnp.float32(3), lambda x, y: 3),
    "operand": (lambda x, y: 2 * y, lambda x, y: 2 * y),
    "both": (lambda x, y: x + y, lambda x, y: x + y),
    "of a jit": (lambda x, y: jax.jit(lambda x, y: (x, 2 * y))(x, y)[1], lambda x, y: 2 * y),
    "of a barrier": (lambda x, y: lax.optimization_barrier((x, y))[1], lambda x, y: y),
    "of a sow": (lambda x, y: sow((x, y), name="pair")[1], lambda x, y: y),
    "of a scan": (
        lambda x, y: lax.scan(lambda x, _: (x + y, None), x, length=2)[0],
        lambda x, y: x + 2 * y,
    ),
    "of a cond": (lambda x, y: lax.cond(y > 9, jnp.sin, lambda x: 2 * x, x), lambda x, y: 2 * x),
}
OF_Y = [name for name in VALUES if name not in ("carry", "constant")]
OF_Y_ONLY = ["operand", "of a jit", "of a barrier", "of a sow"]
ORDERS = {  # which arguments each `vmap` maps over, outermost first
    "n": ["n"],
    "y": ["y"],
    "together": ["ny"],
    "n, y": ["n", "y"],
    "y, n": ["y", "n"],
}
# Where the axes of the lanes cannot be told from those of the value.
ERRORS = {(value, order) for value in OF_Y for order in ("n, y", "y, n")}
ERRORS |= {(value, "together") for value in OF_Y_ONLY}
REDUCERS = {"h": (folds.count(), folds.last(), folds.stack(2))}


def batched(f, order):
    for level in reversed(order):
        f = jax.vmap(f, in_axes=[0 if name in level else None for name in "ny"])
    return f


def arguments(order):
    levels = "".join(order)
    return NS if "n" in levels else NS[2], YS if "y" in levels else YS[0]


def examples(order):
    """For each example its index in the batch, and its arguments."""
    for lane in np.ndindex((len(NS),) * len(order)):
        position = {name: i for level, i in zip(order, lane, strict=True) for name in level}
        yield lane, int(NS[position.get("n", 2)]), YS[position.get("y", 0)]


def check(collected, by_hand, order, kept):
    """`kept`: which of the `vmap`s there are axes of."""
    for lane, n, y in examples(order):
        lane = tuple(i for i, keep in zip(lane, kept, strict=True) if keep)
        values = [by_hand(np.float32(x), y) for x in range(n)]
        wanted = (n, values[-1] if values else 0, (values + [0, 0])[:2], n, n > 2)
        for got, leaf in zip(jax.tree.leaves(collected), wanted, strict=True):
            np.testing.assert_allclose(got[lane], leaf, rtol=1e-6)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("order", ORDERS)
def test_each_lane_collects_its_own(value, order):
    h, by_hand = VALUES[value]
    levels, args = ORDERS[order], arguments(ORDERS[order])
    inside = batched(reap(loop(h), REDUCERS), levels)
    check(inside(*args)["h"], by_hand, levels, [True] * len(levels))
    around = reap(batched(loop(h), levels), REDUCERS)
    if (value, order) in ERRORS:
        match = (
            r"'h' .* is inside a `while_loop` whose predicate `vmap` batched, .*jax.vmap\(reap\(f"
        )
        with pytest.raises(UnsupportedError, match=match):
            around(*args)
    else:
        kept = ["n" in level or (value in OF_Y and "y" in level) for level in levels]
        check(around(*args)["h"], by_hand, levels, kept)


def nested(outer, inner):
    """Two loops, of which only the inner one sows, and always the same."""

    def repeat(trips, body, total):
        step = lambda carry: (carry[0] + 1, body(carry[1]))
        return lax.while_loop(lambda carry: carry[0] < trips, step, (0, total))[1]

    def f(n, y):
        one = lambda total: total + sow(jnp.float32(1), name="h")
        return repeat(outer(n, y), lambda total: repeat(inner(n, y), one, total), 0.0)

    return f


OF_N, OF_Y_TRIPS, FIXED = lambda n, y: n, lambda n, y: (2 * y).astype(int), lambda n, y: 2


def test_lanes_of_an_outer_or_an_inner_loop():
    for outer, inner in [(OF_N, FIXED), (FIXED, OF_N)]:
        got = reap(batched(nested(outer, inner), ["n"]), {"h": folds.count()})(NS, YS[0])["h"]
        np.testing.assert_array_equal(got, 2 * NS)


@pytest.mark.parametrize("order", [["n", "y"], ["y", "n"], ["ny"]])
@pytest.mark.parametrize("trips", [(OF_N, OF_Y_TRIPS), (OF_Y_TRIPS, OF_N)])
def test_lanes_of_both(order, trips):
    inside = batched(reap(nested(*trips), {"h": folds.count()}), order)(NS, YS)["h"]
    for lane, n, y in examples(order):
        assert inside[lane] == n * max(int(2 * y), 0)
    with pytest.raises(UnsupportedError, match="whose predicate `vmap` batched"):
        reap(batched(nested(*trips), order), {"h": folds.count()})(NS, YS)


def test_the_table_has_the_axes_of_batches():
    f = batched(loop(lambda x, y: x + y), ["ny"])
    axes = sites(f)(jnp.asarray(NS), jnp.asarray(YS))["h"].axes
    assert [(axis.kind, axis.size) for axis in axes] == [("loop", None), ("batch", 3)]


# ------------------------------------------------------------------------------------- planted


def steps(n, y):
    """`x -> (2 x or y) + 1`, of which the part in parentheses is sown."""

    def body(carry):
        step, x = carry
        h = sow({"x": 2 * x, "y": y}, name="h")
        return step + 1, h["x"] + h["y"] + 1

    return lax.while_loop(lambda carry: carry[0] < n, body, (0, jnp.float32(0)))[1]


EDITS = {
    "callable": (lambda h: {"x": -h["x"], "y": h["y"]}, lambda x, y, i: (-x, y)),
    "of both": (lambda h: {"x": h["x"] * h["y"], "y": h["y"]}, lambda x, y, i: (x * y, y)),
    "at": (at(1, zero()), lambda x, y, i: (0, 0) if i == 1 else (x, y)),
    "add": (add(1.0), lambda x, y, i: (x + 1, y + 1)),
    "chain": (chain(add(1.0), at(slice(1), zero())), lambda x, y, i: (i and x + 1, i and y + 1)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("order", ORDERS)
def test_each_lane_is_edited_on_its_own(edit, order):
    edit, by_hand = EDITS[edit]
    levels, args = ORDERS[order], arguments(ORDERS[order])
    inside = batched(plant(steps, {"h": edit}), levels)(*args)
    around = plant(batched(steps, levels), {"h": edit})(*args)
    for lane, n, y in examples(levels):
        x = 0
        for i in range(n):
            x = sum(by_hand(2 * x, y, i)) + 1
        np.testing.assert_allclose(inside[lane], x, rtol=1e-6)
        np.testing.assert_allclose(around[lane], x, rtol=1e-6)


@pytest.mark.parametrize("order", ["n", "together"])
def test_what_is_planted_is_collected(order):
    levels, args = ORDERS[order], arguments(ORDERS[order])
    reducers = {"h": (folds.count(), folds.last().of(lambda h: h["x"]))}
    planted = capture(plant(steps, {"h": add(1.0)}), reducers, mode="strict")
    out, collected = batched(planted, levels)(*args)
    count, last = collected["h"]
    for lane, n, y in examples(levels):
        x = h = 0
        for _ in range(n):
            h = 2 * x + 1
            x = h + y + 1 + 1
        np.testing.assert_allclose((out[lane], count[lane], last[lane]), (x, n, h), rtol=1e-6)


TWICE = {
    "of planted": lambda f: reap(plant(f, {"h": add(1.0)}), {"h": folds.count()}),
    "beside planted": lambda f: reap(plant(f, {"h": add(1.0)}), {"rest": folds.count()}),
    "beside reaped": lambda f: reap(reap(f, {"h": folds.count()}), {"rest": folds.count()}),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_transforms_around_a_batched_loop_are_an_error(name):
    def f(n):
        body = lambda carry: (carry[0] + 1, sow(sow(carry[1] + 1, name="h") * 2, name="rest"))
        return lax.while_loop(lambda carry: carry[0] < n, body, (0, 0.0))[1]

    for counts in jax.vmap(TWICE[name](f))(NS).values():
        np.testing.assert_array_equal(counts, NS)
    with pytest.raises(
        UnsupportedError, match="where one transform collects or plants and another"
    ):
        TWICE[name](jax.vmap(f))(NS)


def test_a_cond_whose_predicate_is_batched_looks_as_if_it_ran():
    def f(n):
        def body(carry):
            step, x = carry
            return step + 1, lax.cond(step > 0, lambda x: sow(x + 1, name="h"), lambda x: x, x)

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, 0.0))[1]

    inside = jax.vmap(reap(f, {"h": folds.count()}))(NS)["h"]
    np.testing.assert_array_equal(inside, np.maximum(NS - 1, 0))
    with pytest.warns(
        HarvestWarning, match="in a branch of a `cond` whose predicate `vmap` batched"
    ):
        reap(jax.vmap(f), {"h": folds.count()})(NS)


def test_a_cond_inside_with_a_predicate_that_is_alike():
    """By hand: the lanes run 2 and 3 times, from 1.0; the site is what was doubled last."""

    def f(n, flag):
        def body(carry):
            step, x = carry
            double = lambda x: sow(2 * x, name="h")
            return step + 1, lax.cond(flag, double, lambda x: x, x)

        return lax.while_loop(lambda carry: carry[0] < n, body, (0, jnp.float32(1.0)))[1]

    ns, over = jnp.array([2, 3]), jax.vmap(f, (0, None))
    chosen = {"h": (folds.last(), folds.count())}
    last, count = reap(over, chosen)(ns, True)["h"]
    np.testing.assert_array_equal(last, [4.0, 8.0])
    np.testing.assert_array_equal(count, [2, 3])
    np.testing.assert_array_equal(reap(over, {"h": folds.count()})(ns, False)["h"], [0, 0])
    np.testing.assert_array_equal(plant(over, {"h": lambda h: h + 1})(ns, True), [7.0, 15.0])
