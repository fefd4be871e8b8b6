"""The report of `debug.nonfinite`, and the programs it can run on."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from harvest import SelectError, UnknownSiteError, UnsupportedError, debug, perturb, sow
from harvest._stage import trace_afresh

X = np.array([1.0, 2.0, 3.0], np.float32)


def log(x):
    return sow(jnp.log(x), name="log")


def ranges(fault):
    return {value.name: (value.low, value.high) for value in fault.inputs}


# ----------------------------------------------------------------------------- the report


def test_the_printed_report():
    def loss(params, xs):
        def layer(x, w):
            h = sow(jnp.log(x), name="h")
            return perturb(sow(h * w, name="out"), name="out"), None

        return jnp.sum(jax.vmap(lambda x: lax.scan(layer, x, params["w"])[0])(xs))

    params = {"w": np.array([2, 0.5, 1], np.float32)}
    first = loss.__code__.co_firstlineno
    # Of the first example `out` is 0, then -inf: its logarithm is NaN, as is the gradient 0 / 0.
    wanted = f"""\
of 3 sites, the first that is not finite:
'h', iteration 2, example 0, sown at {__file__}:{first + 2}
    h: nothing finite, NaN
    from args[1]: 1 .. 3
    from out: nothing finite, inf
the cotangent of 'out', iteration 0, example 0, sown at {__file__}:{first + 3}
    the cotangent of out: nothing finite, NaN
    from args[0]['w']: 0.5 .. 2
    from args[1]: 1 .. 3
    from out: 0 .. 0
    from the cotangent of out: 0 .. 0"""
    assert str(debug.nonfinite(jax.value_and_grad(loss))(params, X)) == wanted


def test_a_report_is_a_tuple():
    report = debug.nonfinite(log)(-X)
    (fault,) = report
    assert isinstance(report, tuple) and report and report.watched == 1
    for same in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert same == report and str(same) == str(report) and same.watched == 1
    assert str(fault) in str(report) == repr(report)


@pytest.mark.parametrize(
    "fn, wanted",
    [
        (lambda x: x, "nothing is wrong at 0 sites"),
        (log, "nothing is wrong at 1 site"),
        (lambda x: log(log(x + 3)), "nothing is wrong at 2 sites"),
    ],
)
def test_nothing_is_wrong(fn, wanted):
    report = debug.nonfinite(fn)(X)
    assert not report and str(report) == repr(report) == wanted


# -------------------------------------------------------------------------------- programs


def test_a_training_step():
    optimizer = optax.sgd(0.5)

    def loss(params, x, y):
        h = sow(perturb(params["w"], name="w") * x, name="h")
        return -jnp.mean(sow(jnp.log(h), name="logp") * y)

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state)
        updates = sow(updates, name="updates")
        return sow(optax.apply_updates(params, updates), name="params"), state, value

    watch = debug.nonfinite(step)
    params = {"w": jnp.float32(0.5)}
    state = optimizer.init(params)
    assert not watch(params, state, X, -jnp.ones(3))
    params, state, value = step(params, state, X, -jnp.ones(3))
    assert np.isfinite(value) and params["w"] == -0.5  # 0.5 - 0.5 / 0.5
    (fault,) = watch(params, state, X, -jnp.ones(3))
    assert fault.key == "logp" and ranges(fault) == {"h": (-1.5, -0.5)}


def test_a_second_call_traces_nothing():
    traces = []

    def f(x):
        traces.append(1)
        return log(x)

    for _ in range(2):
        for x in (X, -X, X + 1):
            assert bool(debug.nonfinite(f)(x)) == (x[0] < 0)
            assert bool(debug.nonfinite(f, "log", infinities=True)(x)) == (x[0] < 0)
    assert len(traces) == 1


def test_no_stack_of_values_is_kept():
    def f(x):
        body = lambda x, _: (sow(jnp.sin(sow(x + 1, name="a")), name="b"), None)
        return jax.vmap(lambda x: lax.scan(body, x, length=500)[0])(x)

    x = jnp.zeros((2, 1000))
    compiled = jax.jit(lambda x: debug.nonfinite(f)._inline((x,), {}, trace_afresh)[0][1])
    memory = compiled.lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 20 * x.nbytes


def test_the_checks_of_jax_do_not_interfere():
    with jax.debug_nans(True), jax.debug_infs(True):
        (fault,) = debug.nonfinite(log)(X * np.nan)
        assert fault.key == "log"
        assert debug.nonfinite(log, infinities=True)(X - 1)
    with jax.disable_jit():
        (fault,) = debug.nonfinite(log)(-X)
        assert ranges(fault) == {"args[0]": (-3, -1)}


def test_side_effects_happen_once():
    calls = []

    def f(x):
        jax.debug.callback(lambda x: calls.append(float(x[0])), log(x))
        return x

    assert debug.nonfinite(f)(-X)
    jax.effects_barrier()
    assert len(calls) == 1


# ---------------------------------------------------------------------------------- errors

TRANSFORMS = {"jit": jax.jit, "vmap": jax.vmap, "grad": jax.grad, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_stands_outside_of_transforms(name):
    x = 1.0 if name == "grad" else X
    with pytest.raises(UnsupportedError, match=r"under `jit` or another transform.*put it outside"):
        TRANSFORMS[name](debug.nonfinite(log))(x)


@pytest.mark.parametrize("select, message", [("lgo", "did you mean 'log'"), ("a/*", "the glob")])
def test_unknown_sites(select, message):
    with pytest.raises(UnknownSiteError, match=f"`debug.nonfinite`: .*{message}"):
        debug.nonfinite(log, select)(X)


def test_what_cannot_be_watched():
    with pytest.raises(SelectError, match="`select` got 3 of type `int`"):
        debug.nonfinite(log, 3)
    with pytest.raises(SelectError, match=r"`select` got .* of type `dict`"):
        debug.nonfinite(log, {"log": None})

    def f(x):
        return lax.while_loop(lambda x: sow(x, name="p") < 3, lambda x: log(-x), x)

    line = f.__code__.co_firstlineno + 1
    message = rf"the site 'p' \(sown at .*:{line}\) is inside the predicate of a `while_loop`"
    with pytest.raises(UnsupportedError, match=message):
        debug.nonfinite(f)(1.0)
    (fault,) = debug.nonfinite(f, "log")(1.0)
    assert re.fullmatch(rf".*:{log.__code__.co_firstlineno + 1}", fault.source)
