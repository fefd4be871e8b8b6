"""Folds over loop iterations, against the values that the same program in Python records."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import capture, folds, reap, scope, sow
from tests.folds_by_hand import EDGES, FOLDS, Weighted, every, same, stacked
from tests.loops import PROGRAMS

X = jnp.array([0.7, -1.2])
# ----------------------------------------------------------------------------- all programs

LOOPS = [name for name, program in PROGRAMS.items() if program.loops]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "once"])
def test_all_folds_in_one_pass(name):
    program = PROGRAMS[name]
    out, records = program.by_hand(X)
    reducers = tuple(fold for fold, _ in FOLDS.values())
    got, collected = capture(program, {"h": reducers}, mode="strict")(X)
    same(got, out)
    for result, (_, by_hand) in zip(collected["h"], FOLDS.values(), strict=True):
        same(result, by_hand(records))


@pytest.mark.parametrize("name", ["scan_of_scan", "while_loop"])
@pytest.mark.parametrize("fold", FOLDS)
def test_each_fold_alone(name, fold):
    _, records = PROGRAMS[name].by_hand(X)
    reducer, by_hand = FOLDS[fold]
    same(reap(PROGRAMS[name], {"h": reducer})(X)["h"], by_hand(records))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("name", [n for n in LOOPS if None not in PROGRAMS[n].loops])
def testevery(name, n):
    program = PROGRAMS[name]
    _, records = program.by_hand(X)
    same(reap(program, {"h": folds.every(n)})(X)["h"], every(records, n, program.loops))


def _from_the_end(index, loops):
    return tuple(i if n is None else i - n for i, n in zip(index, loops, strict=True))


def _arrays(index, loops):
    return tuple(map(jnp.asarray, index))


AS_INDEX = {
    "static": [lambda index, loops: index, _from_the_end],
    "array": [
        _arrays,
        lambda index, loops: _arrays(_from_the_end(index, loops), loops),
        lambda index, loops: tuple(map(np.int8, index)),
        lambda index, loops: tuple(map(np.uint8, index)),
        lambda index, loops: (index[0], *map(jnp.asarray, index[1:])),
    ],
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", AS_INDEX)
def test_at(name, kind):
    program = PROGRAMS[name]
    _, records = program.by_hand(X)
    chosen = [records[0], records[len(records) // 2], records[-1]] * len(AS_INDEX[kind])
    given = [spell(r.index, program.loops) for spell in AS_INDEX[kind] for r in chosen[:3]]
    got = reap(program, {"h": tuple(map(folds.at, given))})(X)["h"]
    same(got, tuple(record.value for record in chosen))


def test_a_narrow_index_into_a_long_loop():
    f = lambda xs: lax.map(lambda x: sow(x, name="h"), xs)
    reducers = tuple(map(folds.at, (np.int8(-128), np.uint8(255), np.int8(127))))
    same(reap(f, {"h": reducers})(jnp.arange(300)), {"h": (172, 255, 127)})


def test_at_where_nothing_ran():
    zeros = np.zeros(2)
    reducers = {"h": (folds.at(1), folds.at(jnp.array(3)), folds.at(jnp.array(-6)))}
    _, records = PROGRAMS["scan_of_cond"].by_hand(X)
    same(reap(PROGRAMS["scan_of_cond"], reducers)(X)["h"], (zeros, records[-1].value, zeros))
    reducers = {"h": (folds.at(3), folds.at(jnp.array(3)), folds.at(jnp.array(-1)))}
    same(reap(PROGRAMS["while_loop"], reducers)(X)["h"], (zeros, zeros, zeros))


@pytest.mark.parametrize("index", [(..., -1), (..., 1), (2, ...), (-3, ...), (..., ...)])
@pytest.mark.parametrize("traced", [False, True])
def test_at_keeps_the_loops_of_an_ellipsis(index, traced):
    program = PROGRAMS["scan_of_scan"]
    _, records = program.by_hand(X)
    values = np.zeros((3, 2, 2), np.float32)
    for record in records:
        values[record.index] = record.value
    wanted = values[tuple(slice(None) if i is ... else i for i in index)]
    given = tuple(jnp.asarray(i) if traced and i is not ... else i for i in index)
    same(reap(program, {"h": folds.at(given)})(X)["h"], wanted)


OVER = {  # which loops, and the axes of the stacked values that they are
    "outer": ((0,), 0),
    "inner": ((1,), 1),
    "inner from the end": ((-1,), 1),
    "both": ((1, 0), (0, 1)),
    "none": ((), ()),
}


@pytest.mark.parametrize("name", OVER)
def test_over_some_loops(name):
    loops, axes = OVER[name]
    program = PROGRAMS["scan_of_scan"]
    _, records = program.by_hand(X)
    values = np.zeros((3, 2, 2), np.float32)
    for record in records:
        values[record.index] = record.value
    reducers = (folds.mean().over(*loops), folds.maximum().of(jnp.negative).over(*loops))
    same(reap(program, {"h": reducers})(X)["h"], (values.mean(axes), (-values).max(axes)))


def test_over_inside_and_around_a_while_loop():
    def rows(name, axis, keep):
        _, records = PROGRAMS[name].by_hand(X)
        return [stacked([r for r in records if r.index[axis] == k]) for k in range(keep)]

    inner = {"h": (folds.mean().over(1), folds.count().over(-1), folds.at((..., 1)))}
    wanted = rows("while_in_scan", 0, 3)
    same(
        reap(PROGRAMS["while_in_scan"], inner)(X)["h"],
        (
            np.stack([v.mean(axis=0) for v in wanted]),
            np.array([len(v) for v in wanted]),
            np.stack([v[1] for v in wanted]),
        ),
    )
    outer = {"h": (folds.mean().over(0), folds.at((2, ...)))}
    wanted = rows("scan_in_while", 1, 2)
    same(
        reap(PROGRAMS["scan_in_while"], outer)(X)["h"],
        (np.stack([v.mean(axis=0) for v in wanted]), np.stack([v[2] for v in wanted])),
    )


# ------------------------------------------------------------------------ outside of any loop


def test_outside_of_any_loop_there_is_one_value():
    h = PROGRAMS["once"].by_hand(X)[1][0].value
    alone = (folds.at(7), folds.at((1, ...)), folds.last(), folds.maximum(), folds.mean())
    same(reap(PROGRAMS["once"], {"h": (*alone, folds.every(3))})(X)["h"], (h,) * 6)
    least = np.full_like(h, -np.inf)
    others = (folds.count(), folds.moments(), folds.stack(2), folds.top_k(2), folds.top_k(1))
    wanted = (1, (h, 0 * h), (np.stack([h, 0 * h]), 1, False), np.stack([h, least]), h[None])
    same(reap(PROGRAMS["once"], {"h": others})(X)["h"], wanted)
    in_bins = (folds.histogram(EDGES), folds.mean().of(jnp.sum), Weighted(jnp.float32(3)))
    wanted = (np.histogram(h, EDGES)[0], h.sum(), (3 * h, 1))
    same(reap(PROGRAMS["once"], {"h": in_bins})(X)["h"], wanted)


def test_no_iterations():
    f = lambda xs: lax.map(lambda x: sow(x, name="h"), xs)
    reducers = (folds.count(), folds.last(), folds.stack(1), folds.every(2), folds.top_k(1))
    zeros, least = np.zeros(2), np.full((1, 2), -np.inf)
    wanted = (0, zeros, (zeros[None], 0, False), np.zeros((0, 2)), (least, np.full((1, 2), -1)))
    same(reap(f, {"h": reducers})(jnp.zeros((0, 2)))["h"], wanted)
    undefined = (folds.mean(), folds.moments(), folds.maximum())
    nan = np.full(2, np.nan)
    same(reap(f, {"h": undefined})(jnp.zeros((0, 2)))["h"], (nan, nan, nan, least[0]))


# --------------------------------------------------------------------------- where they stand


def test_occurrences_and_scopes_have_reducers_of_their_own():
    def f(x):
        with scope("a"):
            x, _ = lax.scan(
                lambda x, _: (sow(sow(x + 1, name="h") * 2, name="h"), None), x, length=2
            )
        with scope("b"):
            return sow(x, name="h")

    select = {"a/*": (folds.last(), folds.count()), "**": None}
    _, got = capture(f, select)(jnp.float32(0))
    same(got, {"a/h": ((3, 2), (6, 2)), "b/h": (6,)})


def test_memory_is_needed_for_the_result_only():
    def f(x):
        return lax.scan(lambda x, _: (sow(jnp.sin(x), name="h"), None), x, length=1000)[0]

    reducers = (folds.mean(), folds.maximum(), folds.at(-1), folds.every(500), folds.top_k(2))
    compiled = jax.jit(reap(f, {"h": reducers})).lower(jnp.zeros(1000)).compile()
    memory = compiled.memory_analysis()
    values = 4 * 1000
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 50 * values


def test_the_first_key_that_matches_counts():
    def f(x):
        step = lambda x, _: (sow(2 * sow(x + 1, name="g"), name="h"), None)
        return lax.scan(step, x, length=3)[0]

    x = jnp.float32(1)
    g, h = np.array([2, 5, 11]), np.array([4, 10, 22])
    same(reap(f, {"g": folds.last(), "*": folds.mean()})(x), {"g": 11, "h": 12})
    same(reap(f, {"*": folds.mean(), "g": folds.last()})(x), {"g": 6, "h": 12})
    same(reap(f, {("g", "h"): lambda v: -v})(x), {"g": -g, "h": -h})
    same(reap(f, {lambda site: site.name == "h": (None, folds.last())})(x), {"h": (h, 22)})
    same(reap(f, {})(x), {})
    same(reap(f, {"g": ()})(x), {"g": ()})
