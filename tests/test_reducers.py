"""Reducers that are refused, that raise, and that must be no reason to trace again."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import Fold, SelectError, capture, folds, reap, sow
from tests.loops import PROGRAMS

X = jnp.array([0.7, -1.2])
SITE = r"for the site 'h' \(sown at .*\.py:\d+\)"


class Total(Fold):
    """A fold of a user, of which a part may be replaced."""

    start: object = np.float32(0)
    step: object = lambda state, value: state + value.sum()
    end: object = lambda state: state

    def init(self, aval):
        return self.start() if callable(self.start) else jnp.asarray(self.start)

    def update(self, state, value, index):
        return self.step(state, value)

    def finish(self, state, count):
        return self.end(state)


# ----------------------------------------------------------------------------------- refused

WRONG = {
    "number": (
        3,
        r"got the reducer 3 of type `int`; wanted None .*, a function of the value, a fold",
    ),
    "key": ("last", "got the reducer 'last' of type `str`"),
    "one of several": ((folds.last(), 2.5), "got the reducer 2.5 of type `float`"),
    "nested": ((None, (None, folds.last())), "got the reducer .* of type `tuple`"),
    "array": (np.zeros(3), "got the reducer .* of type `ndarray`"),
    "uncalled": (folds.last, r"got `folds.last` as a reducer; .*: call it, as `folds.last\(...\)`"),
    "one uncalled": ([None, folds.at], r"got `folds.at` as a reducer"),
    "class": (Total, r"got `Total` as a reducer; .*: call it, as `Total\(...\)`"),
}


@pytest.mark.parametrize("transform", [reap, capture])
@pytest.mark.parametrize("name", WRONG)
def test_reducers_of_a_wrong_type(name, transform):
    reducer, match = WRONG[name]
    with pytest.raises(SelectError, match=match):
        transform(PROGRAMS["scan"], {"h": reducer})


@pytest.mark.parametrize(
    "index",
    [1.5, "a", True, None, slice(1), [1], np.array([1]), jnp.float32(1), np.bool_(True), (0, 1.5)],
)
def test_indices_of_a_wrong_type(index):
    match = r"`folds.at` got the index .*; wanted an int, an integer array of rank 0, `...`, or a"
    with pytest.raises(SelectError, match=match):
        folds.at(index)


@pytest.mark.parametrize("fold", [folds.top_k, folds.every, folds.stack])
@pytest.mark.parametrize("number", [0, -2, True])
def test_numbers_that_are_not_positive(fold, number):
    with pytest.raises(SelectError, match=rf"`folds.{fold.__name__}` got {number}; wanted a pos"):
        fold(number)


@pytest.mark.parametrize("bins", [10, [1.0], jnp.float32(1), "auto", None, np.zeros((2, 2))])
def test_bins_that_are_no_edges(bins):
    with pytest.raises(
        SelectError, match=r"`folds.histogram` got .*; wanted the edges of the bins"
    ):
        folds.histogram(bins)


MISFITS = {  # program, fold, message
    "too large": ("scan", folds.at(4), r"got `folds.at\(4\)` in a loop of length 4"),
    "too small": ("scan", folds.at(-5), r"got `folds.at\(-5\)` in a loop of length 4"),
    "of": ("scan", folds.at(4).of(jnp.sum), r"got `folds.at\(4\)` in a loop of length 4"),
    "inner": ("scan_of_scan", folds.at((0, 2)), r"got `folds.at\(2\)` in a loop of length 2"),
    "over": ("scan_of_scan", folds.at(3).over(0), r"got `folds.at\(3\)` in a loop of length 3"),
    "scalar": ("scan_of_scan", folds.at(0), r"with 1 index\(es\) in 2 nested loops of lengths \(3"),
    "pair": ("scan", folds.at((0, 0)), r"with 2 index\(es\) in 1 nested loops of lengths \(4"),
    "no index": ("scan", folds.at(()), r"with 0 index\(es\) in 1 nested loops"),
    "no loop": ("scan", folds.last().over(1), r"got a fold `.over\(1,\)` in 1 nested loops"),
    "outside": ("once", folds.last().over(0), r"got a fold `.over\(0,\)` in 0 nested loops"),
    "from the end": ("while_loop", folds.at(-1), r"got `folds.at\(-1\)` in a `while_loop`, .*last"),
    "every": ("while_loop", folds.every(2), r"got `folds.every` in a `while_loop`.*folds.stack\("),
    "every, inside": ("scan_in_while", folds.every(2), "got `folds.every` in a `while_loop`"),
    "stacked": ("while_loop", folds.at(...), "a fold has to fold a `while_loop`, whose length"),
    "not over": ("while_in_scan", folds.last().over(0), "a fold has to fold a `while_loop`"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_folds_that_do_not_fit_the_loops(name):
    program, fold, match = MISFITS[name]
    with pytest.raises(SelectError, match=f"{match}.*, {SITE}"):
        reap(PROGRAMS[program], {"h": fold})(X)


STATES = {  # what `update` returns, and what is wrong with it
    "shape": (lambda s, v: v, r"of type f32\[2\]; wanted that of `init`, f32\[\]"),
    "dtype": (lambda s, v: s.astype(int), r"of type i32\[\]; wanted that of `init`, f32\[\]"),
    "tree": (lambda s, v: (s, s), r"of structure \(\*, \*\); wanted that of `init`, \*"),
    "number": (lambda s, v: 0.0, r"of structure 0.0; .*, \*; what changes has to be an array"),
    "weak shape": (lambda s, v: jnp.zeros(3) * 1.0, r"of type f32\[3\]; wanted .* f32\[\]"),
}


@pytest.mark.parametrize("program", ["once", "scan", "while_loop"])
@pytest.mark.parametrize("name", STATES)
def test_updates_that_change_the_type_of_the_state(name, program):
    step, match = STATES[name]
    with pytest.raises(SelectError, match=f"`update` of the fold `total` returned .*{match}"):
        reap(PROGRAMS[program], {"h": Total(step=step)})(X)


def test_states_of_weak_types_fit():
    reducers = (
        Total(start=jnp.zeros((), jnp.bfloat16), step=lambda s, v: jnp.asarray(2.0)),
        Total(start=jnp.asarray(1.0), step=lambda s, v: jnp.asarray(3)),
    )
    first, second = reap(PROGRAMS["scan"], {"h": reducers})(X)["h"]
    assert (first.dtype, first, second.dtype, second) == (jnp.bfloat16, 2, np.float32, 3)
    with pytest.raises(SelectError, match=r"of type f32\[\]; wanted that of `init`, i32\[\]"):
        half = Total(start=jnp.asarray(1), step=lambda s, v: jnp.asarray(0.5))
        reap(PROGRAMS["scan"], {"h": half})(X)


def test_branches_of_different_types_or_loops_have_no_fold():
    def shapes(x):
        return lax.cond(x[0] > 0, lambda x: sow(x, name="h"), lambda x: sow(x[:1], name="h") + x, x)

    def lengths(x):
        step = lambda n: lambda x: lax.fori_loop(0, n, lambda i, x: sow(x + 1, name="h"), x)
        return lax.cond(x[0] > 0, step(2), step(3), x)

    match = "a fold needs values of one type, and the branches .* sow it under two names"
    for f, fold in [
        (shapes, folds.mean()),
        (lengths, folds.at(-1)),
        (lengths, folds.at(...)),
        (lengths, folds.every(2)),
    ]:
        with pytest.raises(SelectError, match=match):
            reap(f, {"h": fold})(X)
    assert reap(lengths, {"h": folds.count()})(X)["h"] == 2
    assert reap(lengths, {"h": folds.at(1).of(jnp.sum)})(X)["h"] == X.sum() + 4


# ------------------------------------------------------------------------------------ raising


def broken(*args):
    raise ZeroDivisionError("mine")


RAISING = {
    "function": broken,
    "of": folds.mean().of(broken),
    "init": Total(start=broken),
    "update": Total(step=broken),
    "finish": Total(end=broken),
    "one of several": (None, folds.last(), broken),
}


@pytest.mark.parametrize("program", ["once", "scan", "cond_of_scan", "scan_of_custom_vjp"])
@pytest.mark.parametrize("name", RAISING)
def test_an_exception_keeps_its_type_and_says_where(name, program):
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        reap(PROGRAMS[program], {"h": RAISING[name]})(X)
    notes = [note for note in error.value.__notes__ if "harvest" in note]
    assert len(notes) == 1
    assert notes[0].startswith("harvest: raised by the reducer of the site 'h' (sown at ")


# ------------------------------------------------------------------------------- traced once

COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


class Counted:
    """A callable that counts how often JAX traces it."""

    def __init__(self, fn):
        self.fn, self.traces = fn, 0

    def __call__(self, *args):
        self.traces += 1
        return self.fn(*args)


class Probe(eqx.Module):
    weight: jax.Array

    def __call__(self, h):
        return self.weight * h


def times(weight, h):
    return weight * h


def number(i):
    return jnp.asarray(i, jnp.float32)


AGAIN = {  # with i = 0, 1, 2: what differs must be no reason to trace
    "at": lambda i: folds.at(jnp.asarray(i)),
    "at numpy": lambda i: folds.at(np.int32(i)),
    "edges": lambda i: folds.histogram(np.arange(3.0) + i),
    "module": lambda i: Probe(number(i)),
    "module of numpy": lambda i: Probe(np.float32(i)),
    "partial": lambda i: jax.tree_util.Partial(times, number(i)),
    "functools": lambda i: functools.partial(times, number(i)),
    "of": lambda i: folds.mean().of(Probe(number(i))),
    "fold": lambda i: Total(start=number(i)),
    "new objects": lambda i: (folds.mean(), folds.at(-1), folds.top_k(2), folds.last().over(0)),
    "several": lambda i: (None, Probe(number(i)), folds.at((jnp.asarray(i),))),
}


@pytest.mark.parametrize("name", AGAIN)
def test_new_arrays_in_a_reducer_neither_trace_nor_compile(name):
    f, reducer = Counted(PROGRAMS["scan"]), AGAIN[name]
    reap(f, {"h": reducer(0)})(X)
    before = len(COMPILED)
    results = [reap(f, {"h": reducer(i)})(X)["h"] for i in (1, 2)]
    assert (f.traces, len(COMPILED)) == (1, before)
    fresh = [reap(PROGRAMS["scan"].__call__, {"h": reducer(i)})(X)["h"] for i in (1, 2)]
    jax.tree.map(np.testing.assert_array_equal, results, fresh)


def test_the_function_is_traced_once_for_all_reducers():
    f = Counted(PROGRAMS["scan"])
    for reducer in [None, jnp.sum, folds.at(1), folds.at(2), folds.mean(), (None, folds.last())]:
        reap(f, {"h": reducer})(X)
        capture(f, {"*": reducer})(X)
    assert f.traces == 1


def test_reducers_may_hold_what_is_being_traced():
    _, records = PROGRAMS["scan"].by_hand(X)
    values = np.stack([record.value for record in records])
    at = lambda i: reap(PROGRAMS["scan"], {"h": folds.at(i)})(X)["h"]
    scaled = lambda w: reap(PROGRAMS["scan"], {"h": folds.last().of(lambda h: w * h)})(X)["h"]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    close(jax.jit(at)(jnp.asarray(2)), values[2])
    close(jax.vmap(at)(jnp.arange(4)), values)
    close(lax.map(at, jnp.array([3, -4])), values[[3, 0]])
    close(jax.jacobian(scaled)(2.0), values[-1])
    close(jax.vmap(scaled)(jnp.arange(3.0)), np.arange(3.0)[:, None] * values[-1])


def test_reducers_are_methods_and_modules_too():
    class Model:
        def reduced(self, h):
            return -h

    model = Model()
    got = reap(PROGRAMS["scan"], {"h": (model.reduced, Probe(number(2)), jnp.sum)})(X)["h"]
    h = harvest.reap(PROGRAMS["scan"])(X)["h"]
    jax.tree.map(np.testing.assert_array_equal, got, (-h, 2 * h, h.sum(axis=1)))
