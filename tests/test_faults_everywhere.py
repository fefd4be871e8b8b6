"""Every transform of the library: after errors in it, under threads, and what it leaves behind."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import attribute, capture, debug, folds, grad, jvp, plant, reap, sites, sow, sweep
from tests.test_stage import cached

X = np.array([0.5, 1.0, 2.0], np.float32)
WITH_NAN = np.array([0.5, np.nan, 2.0], np.float32)
ONES = np.ones(3, np.float32)
PLACES = harvest.grid(k=jnp.arange(3))


class Mine(Exception):
    """Not among those that JAX or harvest know."""


class Once:
    """Something that a user wrote, which raises the first time only."""

    def __init__(self, error, fn=lambda x, *_: x):
        self.error, self.fn = error, fn

    def __call__(self, *args):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self.fn(*args)


def model(weights, then=lambda h: h):
    """The sum of the squares of `h`, which is `weights * sin(x)`."""
    return lambda x: jnp.sum(then(sow(weights * jnp.sin(x), name="h")) ** 2)


def h_of(weights):
    return np.asarray(weights) * np.sin(X)


def double(h, row=None):
    return 2.0 * h


def add_one(h, row):
    return h.at[row["k"]].add(1.0)


# Of a model: what a transform gives, and what it should for the model's weights.
TRANSFORMS = {
    "reap": (lambda fn: reap(fn)(X)["h"], h_of),
    "capture": (lambda fn: capture(fn)(X)[0], lambda w: np.sum(h_of(w) ** 2)),
    "fold": (lambda fn: reap(fn, {"h": folds.mean()})(X)["h"], h_of),
    "plant": (lambda fn: plant(fn, {"h": double})(X), lambda w: 4 * np.sum(h_of(w) ** 2)),
    "grad": (lambda fn: grad(fn, "h")(X)["h"], lambda w: 2 * h_of(w)),
    "jvp": (lambda fn: jvp(fn, {"h": ONES})(X)[1], lambda w: np.sum(2 * h_of(w))),
    "sweep": (
        lambda fn: sweep(fn, "h", double, PLACES)(X)["h"],
        lambda w: np.full(3, 4 * np.sum(h_of(w) ** 2)),
    ),
    "attribute": (
        lambda fn: attribute(fn, "h", add_one, PLACES)(X)["h"],
        lambda w: np.sum(h_of(w) ** 2) + 2 * h_of(w),
    ),
    "nonfinite": (
        lambda fn: debug.nonfinite(fn)(WITH_NAN)[0].value.high,
        lambda w: np.max(h_of(w)[[0, 2]]),
    ),
    "sites": (lambda fn: sites(fn)(X)[0].nbytes, lambda w: 12),
}
STRUCTURES = {
    "straight": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fn: lambda x: lax.cond(x[0] > 0, fn, lambda x: 0 * fn(x), x),
}
each = pytest.mark.parametrize("transform", TRANSFORMS)
inside = pytest.mark.parametrize("structure", STRUCTURES)
raised_in = pytest.mark.parametrize(
    "error, structure",
    [
        (Mine, "straight"),
        (KeyboardInterrupt, "jit"),
        (Mine, "checkpoint"),
        (KeyboardInterrupt, "cond"),
    ],
)


@raised_in
@each
def test_after_an_error_in_the_function_the_next_call_works(error, transform, structure):
    call, wanted = TRANSFORMS[transform]
    fn = STRUCTURES[structure](model(2 * ONES, Once(error("no matter"))))
    with pytest.raises(error, match=r"^no matter"):
        call(fn)
    np.testing.assert_allclose(call(fn), wanted(2 * ONES), rtol=1e-5)
    assert list(reap(lambda x: sow(x, name="h"))(X)) == ["h"]  # in no scope


@inside
@each
def test_no_tracer_leaks(transform, structure):
    call, wanted = TRANSFORMS[transform]
    run = lambda w: call(STRUCTURES[structure](model(w)))
    with jax.checking_leaks():
        # Of Python is what `nonfinite` returns.
        value = run(2 * ONES) if transform == "nonfinite" else jax.vmap(run)(2 * ONES[None])[0]
    np.testing.assert_allclose(value, wanted(2 * ONES), rtol=1e-5)


class UserCode(NamedTuple):
    """Where a transform calls what a user wrote: `call(fn, code)`, with the identity as `code`."""

    call: Any
    wanted: Any


class Sum(harvest.Fold):
    """Each part calls what a user wrote, or is the identity."""

    on_init: Any
    on_update: Any
    on_finish: Any

    def init(self, aval):
        return self.on_init(jnp.zeros(aval.shape, aval.dtype))

    def update(self, state, value, index):
        return self.on_update(state + value)

    def finish(self, state, count):
        return self.on_finish(state)


def _folded(**parts):
    identity = dict.fromkeys(("on_init", "on_update", "on_finish"), Once(None))
    return Sum(**{**identity, **parts})


USER_CODE = {
    "reducer": UserCode(lambda fn, code: reap(fn, {"h": code})(X)["h"], h_of),
    "one of two reducers": UserCode(
        lambda fn, code: reap(fn, {"h": (jnp.sum, code)})(X)["h"][1], h_of
    ),
    "fold of a function": UserCode(
        lambda fn, code: reap(fn, {"h": folds.mean().of(code)})(X)["h"], h_of
    ),
    "init": UserCode(lambda fn, code: reap(fn, {"h": _folded(on_init=code)})(X)["h"], h_of),
    "update": UserCode(lambda fn, code: reap(fn, {"h": _folded(on_update=code)})(X)["h"], h_of),
    "finish": UserCode(lambda fn, code: reap(fn, {"h": _folded(on_finish=code)})(X)["h"], h_of),
    "edit": UserCode(lambda fn, code: plant(fn, {"h": code})(X), lambda w: np.sum(h_of(w) ** 2)),
    "edit of a chain": UserCode(
        lambda fn, code: plant(fn, {"h": harvest.chain(double, code)})(X),
        lambda w: 4 * np.sum(h_of(w) ** 2),
    ),
    "edit of a sweep": UserCode(
        lambda fn, code: sweep(fn, "h", code, PLACES)(X)["h"],
        lambda w: np.full(3, np.sum(h_of(w) ** 2)),
    ),
    "edit of an attribution": UserCode(
        lambda fn, code: attribute(fn, "h", code, PLACES)(X)["h"],
        lambda w: np.full(3, np.sum(h_of(w) ** 2)),
    ),
    "row of a sweep": UserCode(
        lambda fn, code: sweep(fn, "h", lambda h, row: code(h), PLACES)(X)["h"],
        lambda w: np.full(3, np.sum(h_of(w) ** 2)),
    ),
}


@raised_in
@pytest.mark.parametrize("where", USER_CODE)
def test_after_an_error_in_what_a_user_wrote_the_next_call_works(error, where, structure):
    call, wanted = USER_CODE[where]
    fn = STRUCTURES[structure](model(2 * ONES))
    code = Once(error("no matter"))
    site = r"(?s:\nharvest: .*'h')" if issubclass(error, Exception) else "$"
    with pytest.raises(error, match="^no matter" + site):
        call(fn, code)
    np.testing.assert_allclose(call(fn, code), wanted(2 * ONES), rtol=1e-5)


def test_threads():
    """Sixteen of them: a function for all, one for each transform, and one for each call."""
    shared, of_transform = model(2 * ONES), {name: model(3 * ONES) for name in TRANSFORMS}

    def work(number):
        name = list(TRANSFORMS)[number % len(TRANSFORMS)]
        call, wanted = TRANSFORMS[name]
        own = (number + 1) * ONES
        found = [call(shared), call(of_transform[name]), call(model(own))]
        return found, [wanted(2 * ONES), wanted(3 * ONES), wanted(own)]

    with ThreadPoolExecutor(16) as pool:
        for found, wanted in pool.map(work, range(4 * len(TRANSFORMS))):
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5)


@each
def test_nothing_stays_alive(transform):
    """Of twenty calls; of five hundred in `test_stage`."""
    call, wanted = TRANSFORMS[transform]

    def run(k):
        weights = jnp.full(3, float(k + 1))
        fn = model(weights)
        value = call(fn)
        if k % 10 == 0:
            np.testing.assert_allclose(value, wanted(weights), rtol=1e-5)
        return weakref.ref(fn), weakref.ref(weights)

    kept = cached()
    refs = [ref for k in range(20) for ref in run(k)]
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
    assert cached() == kept
