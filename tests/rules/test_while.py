"""`while_loop` and dynamic `fori_loop`: what is collected is folded, what is planted is an edit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from harvest import (
    Axis,
    PlantError,
    UnsupportedError,
    add,
    at,
    capture,
    chain,
    each,
    folds,
    indexed,
    plant,
    reap,
    replace,
    scale,
    sites,
    sow,
    zero,
)
from tests.loops import PROGRAMS

DYNAMIC = [name for name, program in PROGRAMS.items() if None in program.loops]
X = jnp.array([0.7, -1.2])


def double(x, trips):
    """Numbers that are exact: `x -> 2 x + 1`, of which `2 x` is sown."""

    def body(carry):
        step, x = carry
        return step + 1, sow(2 * x, name="h") + 1

    return lax.while_loop(lambda carry: carry[0] < trips, body, (0, x))[1]


LINE = double.__code__.co_firstlineno + 5


def doubled(x, trips, edit=lambda h, i: h):
    values = []
    for i in range(trips):
        values.append(edit(2 * x, i))
        x = values[-1] + 1
    return x, values


# ------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_output_is_that_of_the_plain_program(name):
    f = PROGRAMS[name]
    wanted = jax.jit(lambda x, n: f(x, n))(X, 4)
    got, _ = capture(f, {"h": (folds.mean(), folds.stack(3))})(X, jnp.asarray(4))
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(capture(f, [])(X, jnp.asarray(4))[0], wanted)


@pytest.mark.parametrize("trips", [0, 1, 5])
def test_pytrees_that_are_carried(trips):
    def f(trips):
        def body(carry):
            h = sow({"n": carry["n"] + 1, "key": carry["key"], "name": "n"}, name="h")
            return {"n": h["n"], "key": jax.random.fold_in(h["key"], h["n"])}

        init = {"n": jnp.int32(0), "key": jax.random.key(0)}
        return lax.while_loop(lambda carry: carry["n"] < trips, body, init)["n"]

    key = jax.random.key(0)
    for n in range(1, trips):
        key = jax.random.fold_in(key, n)
    last, count = reap(f, {"h": (folds.last(), folds.count())})(jnp.asarray(trips))["h"]
    assert (last["n"], last["name"], count) == (trips, "n", trips)
    wanted = np.asarray(jax.random.key_data(key)) * (trips > 0)  # zeros if nothing ran
    np.testing.assert_array_equal(jax.random.key_data(last["key"]), wanted)


def test_nothing_runs():
    reducers = (folds.count(), folds.last(), folds.stack(2), folds.at(0), folds.top_k(1))
    out, collected = capture(double, {"h": (*reducers, folds.mean())}, mode="strict")(3.0, 0)
    count, last, stack, first, top, mean = collected["h"]
    assert (out, count, last, stack.count, stack.overflow, first) == (3, 0, 0, 0, False, 0)
    assert stack.values.tolist() == [0, 0] and jnp.isnan(mean)
    assert top.values.tolist() == [-np.inf] and top.indices[0].tolist() == [-1]


@pytest.mark.parametrize("low, high", [(2, 5), (0, 3), (4, 4), (5, 2)])
def test_a_dynamic_fori_loop_counts_its_iterations_from_zero(low, high):
    f = lambda low, high: lax.fori_loop(low, high, lambda i, x: x + sow(10 * i, name="h"), 0)
    reducers = (folds.count(), folds.stack(3), folds.at(1), folds.top_k(1))
    got = capture(f, {"h": reducers}, mode="strict")(jnp.asarray(low), jnp.asarray(high))
    out, (count, stack, second, top) = got[0], got[1]["h"]
    values = [10 * i for i in range(low, high)]
    assert (out, count) == (sum(values), len(values))
    assert stack.values.tolist() == (values + [0, 0, 0])[:3]
    assert second == (values[1] if values else 0)
    assert top.indices[0].tolist() == [len(values) - 1]


@pytest.mark.parametrize("transform", [capture, lambda f, select: plant(f, {"h": lambda h: h})])
def test_side_effects_happen_once(transform):
    seen = []

    def f(trips):
        def predicate(step):
            io_callback(lambda step: seen.append(("predicate", int(step))), None, step)
            return step < trips

        def body(step):
            io_callback(lambda step: seen.append(("body", int(step))), None, step)
            return sow(step + 1, name="h")

        return lax.while_loop(predicate, body, 0)

    transform(f, {"h": folds.count()})(jnp.asarray(3))
    jax.effects_barrier()
    assert sorted(seen) == [("body", i) for i in range(3)] + [("predicate", i) for i in range(4)]


def test_forward_mode():
    def folded(x):
        reducers = (folds.last(), folds.mean(), folds.maximum(), folds.stack(3))
        out, collected = capture(double, {"h": reducers}, mode="strict")(x, 3)
        last, mean, largest, stack = collected["h"]
        return out, last, mean, largest, stack.values

    primals, tangents = jax.jvp(folded, (1.0,), (1.0,))
    # The values are 2 x, 4 x + 2 and 8 x + 6.
    for got, wanted in zip(primals, (15, 14, 22 / 3, 14, [2, 6, 14]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    for got, wanted in zip(tangents, (8, 8, 14 / 3, 8, [2, 4, 8]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


# ------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "select", [None, "h", {"h": None}, {"h": jnp.sin}, {"*": (folds.last(), None)}]
)
@pytest.mark.parametrize("transform", [reap, capture])
def test_values_without_a_fold_have_no_stack(transform, select):
    match = (
        rf"`{transform.__name__}`: the site 'h' \(sown at .*{re.escape(__file__)}:{LINE}\) is "
        r"inside a `while_loop`, whose trip count .* harvest.folds.last\(\)}\)`; there are `at`, "
        "`count`, `histogram`, `last`, `maximum`, `mean`, `moments`, `stack`, `top_k` and your own"
    )
    with pytest.raises(UnsupportedError, match=match):
        transform(double, select)(1.0, 3)


@pytest.mark.parametrize("name", ["scan_in_while", "while_in_scan", "while_in_while"])
def test_nor_have_those_in_loops_around_and_inside(name):
    with pytest.raises(
        UnsupportedError, match=r"'h' .* is inside a `while_loop`, whose trip count"
    ):
        reap(PROGRAMS[name])(X)


def test_sites_that_are_not_selected_are_left_alone():
    f = lambda x: sow(double(sow(x, name="before"), 3), name="after")
    assert reap(f, ["before", "after"])(1.0) == {"before": 1, "after": 15}
    assert reap(f, {"h": folds.last(), "*": None})(1.0) == {"before": 1, "h": 14, "after": 15}


def counting(x):
    return lax.while_loop(lambda x: sow(x, name="p") < 3, lambda x: sow(x + 1, name="h"), x)


TRANSFORMS = {
    "reap": lambda f: reap(f),
    "capture": lambda f: capture(f, {"p": folds.last()}),
    "plant": lambda f: plant(f, {"p": lambda x: x}),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_site_in_the_predicate_cannot_be_opened(name):
    match = rf"`{name}`: the site 'p' \(sown at .*\) is inside the predicate of a `while_loop`, sow"
    with pytest.raises(UnsupportedError, match=match):
        TRANSFORMS[name](counting)(0.0)
    assert reap(counting, {"h": folds.count()})(0.0) == {"h": 3}
    assert plant(counting, {"h": add(1.0)})(0.0) == 4


# ------------------------------------------------------------------------------------- planted

EDITS = {
    "callable": (jnp.negative, lambda h, i: -h),
    "value": (jnp.float32(5), lambda h, i: 5),
    "number": (5.0, lambda h, i: 5),
    "replace": (replace(5.0), lambda h, i: 5),
    "zero": (zero(), lambda h, i: 0),
    "chain": (chain(add(1.0), scale(2.0)), lambda h, i: 2 * (h + 1)),
    "at": (at(1, zero()), lambda h, i: 0 if i == 1 else h),
    "at value": (at(1, 7.0), lambda h, i: 7 if i == 1 else h),
    "at array": (at(jnp.array([0, 2]), zero()), lambda h, i: 0 if i in (0, 2) else h),
    "at slice": (at(slice(1, None, 2), zero()), lambda h, i: 0 if i % 2 else h),
    "at stop": (at(slice(2), add(1.0)), lambda h, i: h + (i < 2)),
    "at all": (at(..., add(1.0)), lambda h, i: h + 1),
    "at none": (at(9, zero()), lambda h, i: h),
    "indexed": (indexed(lambda h, index: h + index[0].astype(h.dtype)), lambda h, i: h + i),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("trips", [0, 4])
def test_edits(name, trips):
    edit, by_hand = EDITS[name]
    out, values = doubled(1, trips, by_hand)
    assert plant(double, {"h": edit})(1.0, trips) == out
    planted = capture(plant(double, {"h": edit}), {"h": folds.stack(4)}, mode="strict")
    got, collected = planted(1.0, trips)
    assert got == out and collected["h"].values.tolist() == (values + [0] * 4)[:4]


MISFITS = {
    "stacked": (jnp.ones(3), r"got f32\[3\], wanted f32\[\]"),
    "each": (
        each(add(jnp.ones(3))),
        "got `each.* where there is no loop of a length that is known",
    ),
    "from the end": (
        at(-1, zero()),
        "got `at` with -1 in a `while_loop`, whose length is not known",
    ),
    "from the end, array": (at(np.array([True, False]), zero()), "in a `while_loop`, whose length"),
    "backwards": (
        at(slice(None, None, -1), zero()),
        "in a `while_loop`, whose length is not known",
    ),
    "pair": (at((0, 1), zero()), r"with 2 index\(es\) in 1 nested loops of lengths \(None,\)"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_edits_that_need_a_length(name):
    edit, match = MISFITS[name]
    with pytest.raises(PlantError, match=f"{match}.*, for the site 'h'") as error:
        plant(double, {"h": edit})(1.0, 3)
    if name == "stacked":
        assert "which has one value for all iterations of its `while_loop`" in str(error.value)


def scanned(x):
    """A scan of two `while_loop`s of three iterations."""
    return lax.scan(lambda x, _: (double(x, 3), None), x, length=2)[0]


def scanning(x):
    """A `while_loop` of two scans of three iterations."""
    body = lambda x, _: (sow(2 * x, name="h") + 1, None)
    step = lambda carry: (carry[0] + 1, lax.scan(body, carry[1], length=3)[0])
    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1]


def looped(x, edit):
    for i in range(2):
        for j in range(3):
            x = edit(2 * x, i, j) + 1
    return x


ROWS = jnp.array([3.0, 1.0, 2.0])


@pytest.mark.parametrize("f, axis, length", [(scanned, 0, 2), (scanning, 1, 3)])
def test_a_scan_around_or_inside_has_the_axis(f, axis, length):
    rows = ROWS[:length]
    added = lambda h, *index: h + float(rows[index[axis]])
    replaced = lambda h, *index: float(rows[index[axis]])
    assert plant(f, {"h": each(add(rows))})(1.0) == looped(1, added)
    assert plant(f, {"h": rows})(1.0) == looped(1, replaced)
    assert plant(f, {"h": at((1, ...), replace(rows))})(1.0) == looped(
        1, lambda h, i, j: replaced(h, i, j) if i == 1 else h
    )
    assert plant(f, {"h": at((1, 2), zero())})(1.0) == looped(
        1, lambda h, i, j: 0 if (i, j) == (1, 2) else h
    )
    with pytest.raises(PlantError, match=rf"got f32\[\], wanted f32\[{length}\]"):
        plant(f, {"h": jnp.float32(1)})(1.0)
    index = (..., -1) if axis == 0 else (-1, ...)
    with pytest.raises(PlantError, match="in a `while_loop`, whose length is not known"):
        plant(f, {"h": at(index, zero())})(1.0)


def test_nested_plants_compose():
    f = plant(plant(double, {"h": add(1.0)}), {"h": at(1, scale(10.0))})
    assert f(1.0, 3) == doubled(1, 3, lambda h, i: (h + 1) * (10 if i == 1 else 1))[0]


# --------------------------------------------------------------------------------------- sites


def test_the_table_has_an_axis_of_unknown_length():
    site = sites(double)(jnp.ones(2), 3)["h"]
    assert site.axes == (Axis("loop", None),)
    assert (site.aval.shape, site.nbytes, site.branch) == ((2,), 8, None)
    assert "loop:?" in str(sites(double)(1.0, 3))
    loops = lambda f: tuple(axis.size for axis in sites(f)(1.0)["h"].axes)
    assert (loops(scanned), loops(scanning)) == ((2, None), (None, 3))
    assert [site.key for site in sites(counting)(1.0)] == ["p", "h"]
