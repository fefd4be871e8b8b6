"""Traces and compilations are counted; the dead are not kept."""

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    _cache,
    _stage,
    add,
    at,
    capture,
    chain,
    each,
    indexed,
    plant,
    reap,
    scale,
    sites,
    sow,
)

COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


X = np.array([0.5, 1.0, 2.0], np.float32)


def model(x):
    h = sow(jnp.sin(x), name="h")
    return lax.scan(lambda c, _: (sow(c + 1.0, name="r"), None), h, length=4)[0]


class Counted:
    """A callable that counts how often JAX traces it."""

    def __init__(self, fn):
        self.fn, self.traces = fn, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fn(*args, **kwargs)


def full(i, *shape):
    return np.full(shape, i, np.float32)


def double(h, index):
    return 2.0 * h


def cached():
    gc.collect()
    return len(_stage._traces), len(_stage._programs)


AGAIN = {  # called with i = 0, 1, 2: what differs must be no reason to trace
    "reap": lambda f, i: reap(f)(X),
    "capture": lambda f, i: capture(f, ["h", "r"])(X),
    "predicate": lambda f, i: reap(f, lambda site: site.name == "h")(X),
    "predicate of plant": lambda f, i: plant(f, {lambda site: site.name == "r": add(1.0)})(X),
    "sites": lambda f, i: sites(f)(X),
    "inputs": lambda f, i: reap(f)(full(i, 3)),
    "device arrays": lambda f, i: reap(f)(jax.device_put(full(i, 3))),
    "floats": lambda f, i: reap(f)(float(i)),
    "keywords": lambda f, i: reap(f)(x=full(i, 3)),
    "value": lambda f, i: plant(f, {"h": full(i, 3), "r": full(i, 4, 3)})(X),
    "float value": lambda f, i: plant(f, {"h": float(i)})(0.5),
    "replace": lambda f, i: plant(f, {"h": harvest.replace(full(i, 3))})(X),
    "append": lambda f, i: plant(f, {"h": (full(i, 3),)}, mode="append")(X),
    "add": lambda f, i: plant(f, {"h": add(full(i, 3))})(X),
    "add a float": lambda f, i: plant(f, {"*": add(float(i))})(X),
    "each": lambda f, i: plant(f, {"r": each(scale(full(i, 4, 1)))})(X),
    "index": lambda f, i: plant(f, {"r": at(np.array(i), harvest.zero())})(X),
    "indices": lambda f, i: plant(f, {"r": at(np.array([i, 3]), full(i, 3))})(X),
    "mask": lambda f, i: plant(f, {"r": at(np.arange(4) == i, add(1.0))})(X),
    "function": lambda f, i: plant(f, {"r": chain(jnp.cos, indexed(double))})(X),
    "partial": lambda f, i: plant(f, {"h": jax.tree_util.Partial(jnp.add, full(i, 3))})(X),
    "Partial": lambda f, i: capture(jax.tree_util.Partial(f, x=full(i, 3)))(),
    "functools.partial": lambda f, i: reap(functools.partial(f, full(i, 3)))(),
    "nested": lambda f, i: reap(plant(f, {"h": add(float(i))}), "r")(X),
}


@pytest.mark.parametrize("again", AGAIN)
def test_one_trace_and_no_new_compilation(again):
    fn = Counted(model)
    AGAIN[again](fn, 0)
    compiled = len(COMPILED)
    AGAIN[again](fn, 1)
    AGAIN[again](fn, 2)
    assert fn.traces == 1
    assert len(COMPILED) == compiled


def test_one_compilation():
    compiled = len(COMPILED)
    reap(model, "r")(full(0, 11))
    assert len(COMPILED) == compiled + 1


def test_what_collects_shares_a_trace_and_so_does_what_plants():
    traces = []

    def fn(x):
        traces.append(1)
        return model(x)

    reap(fn)(X)
    capture(fn)(X)
    sites(fn)(X)
    assert len(traces) == 1
    plant(fn, {"h": X})(X)
    plant(fn, {"r": harvest.zero()})(X)
    assert len(traces) == 2


def test_after_clearing_the_caches_of_jax():
    fn = Counted(model)
    first = capture(fn)(X)[0]
    jax.clear_caches()
    np.testing.assert_array_equal(capture(fn)(X)[0], first)
    assert fn.traces == 2


def test_results_stay_on_the_device():
    for device in jax.devices()[-2:]:
        x = jax.device_put(X, device)
        assert capture(model)(x)[1]["h"][0].devices() == {device}
        assert plant(model, {"h": x})(x).devices() == {device}


class Net(eqx.Module):
    weight: jax.Array
    traces: list = eqx.field(static=True)
    power: int = 1

    def __call__(self, x):
        self.traces.append(1)
        return sow(self.weight * x**self.power, name="h") + 1.0

    def half(self, x):
        return self(x) / 2.0


def test_new_parameters_are_no_reason_to_trace():
    net = Net(jnp.ones(3), traces := [])
    for i in range(3):
        net = eqx.tree_at(lambda net: net.weight, net, jnp.full(3, float(i)))
        np.testing.assert_allclose(reap(net)(X)["h"], i * X)
        np.testing.assert_allclose(capture(net)(X)[0], i * X + 1)
        np.testing.assert_allclose(plant(net, {"h": add(1.0)})(X), i * X + 2)
    assert len(traces) == 2  # one to collect, one to plant
    for i in range(3):
        net = eqx.tree_at(lambda net: net.weight, net, jnp.full(3, float(i)))
        np.testing.assert_allclose(capture(net.half)(X)[0], (i * X + 1) / 2)
    assert len(traces) == 3
    np.testing.assert_allclose(reap(Net(jnp.ones(3), traces, power=2))(X)["h"], X**2)
    assert len(traces) == 4


@pytest.mark.parametrize("statics", [(2, 3), (True, False), (1, True), ("a", "b"), (None, 0)])
def test_other_objects_are_static(statics):
    seen = []

    def fn(x, static):
        seen.append(static)
        return sow(x, name="h")

    for static in statics * 2:
        reap(fn)(X, static)
    assert [(type(s), s) for s in seen] == [(type(s), s) for s in statics]


def test_floats_and_numpy_are_traced():
    def fn(*args):
        assert all(isinstance(arg, jax.core.Tracer) for arg in args)
        return sow(args, name="h")

    values = reap(fn)(1.5, 1.5j, np.float32(2), np.ones(2, np.int8))["h"]
    assert [v.dtype.name for v in values] == ["float32", "complex64", "float32", "int8"]
    assert [v.weak_type for v in values] == [True, True, False, False]


def test_types_are_a_reason_to_trace():
    fn = Counted(lambda x: sow(x, name="h"))
    for x in [X, X[:2], X.astype(np.int32), 1.0, (X,), {"x": X}] * 2:
        reap(fn)(x)
    assert fn.traces == 6


def test_a_new_function_at_each_call_is_traced_and_warned_about():
    traces = []
    with pytest.warns(harvest.HarvestWarning, match=r"test_stage.py:\d+\) was traced \d+ times"):
        for _ in range(12):
            reap(lambda x: sow(traces.append(1) or x, name="h"))(X)
    assert len(traces) == 12


@pytest.mark.filterwarnings("error")
def test_a_function_defined_once_is_not_warned_about():
    def fn(x, power):
        return sow(x**power, name="h")

    for power in range(12):
        np.testing.assert_allclose(reap(fn)(X, power)["h"], X**power, rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_different_functions_in_one_wrapper_are_not_warned_about():
    for fn in [jnp.sin, jnp.cos, jnp.tan, jnp.exp, jnp.log, jnp.sqrt, jnp.abs, jnp.sinh, jnp.tanh]:
        np.testing.assert_allclose(capture(jax.vmap(fn))(X)[0], fn(X), rtol=1e-6)


# --------------------------------------------------------------------------- ambient traces


# No loop: JAX's linearization of a scan with effects does not pass `checking_leaks`, with
# `jax.debug.callback` as little as with ours.
def straight(x):
    h = jax.jit(lambda x: sow(jnp.sin(x), name="h"))(x)
    return sow(h + 1.0, name="r")


INSIDE = {  # each is `sin(2 * x)`, by a closure over whatever `x` is outside
    "reap": lambda fn, x: reap(fn)(x)["h"],
    "predicate": lambda fn, x: reap(fn, lambda site: site.name == "h")(x)["h"],
    "capture": lambda fn, x: capture(fn)(x)[1]["h"][0],
    "plant": lambda fn, x: plant(fn, {"h": jnp.sin(2 * x)})(x) - 1,
    "edit": lambda fn, x: plant(fn, {"r": lambda r: r + x})(x) - x - 1,
}
AROUND = {
    "jit": lambda fn: jax.jit(fn)(X),
    "vmap": lambda fn: jax.vmap(fn)(X),
    "grad": lambda fn: jax.grad(lambda x: fn(x).sum())(X),
    "jvp": lambda fn: jax.jvp(fn, (X,), (X,))[1],
    "scan": lambda fn: lax.scan(lambda c, x: (c, fn(x)), 0.0, X)[1],
    "cond": lambda fn: lax.cond(X[0] > 0, fn, lambda x: x, X),
    "checkpoint": lambda fn: jax.grad(lambda x: jax.checkpoint(fn)(x).sum())(X),
    "jit of grad of vmap": lambda fn: jax.jit(jax.grad(lambda x: jax.vmap(fn)(x).sum()))(X),
    "eval_shape": lambda fn: np.zeros(jax.eval_shape(fn, X).shape),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("inside", INSIDE)
def test_inlined_in_an_ambient_trace(inside, around):
    kept = cached()
    with jax.checking_leaks():
        value = AROUND[around](lambda x: INSIDE[inside](lambda y: straight(x + y), x))
    np.testing.assert_allclose(value, AROUND[around](lambda x: jnp.sin(2 * x)), atol=1e-6)
    assert cached() == kept


# -------------------------------------------------------------------------- threads, memory


def test_threads():
    def call(k):
        own = Counted(lambda x: sow(k * x, name="h"))
        return reap(own)(X)["h"], reap(model, "h")(full(k, 5))["h"], plant(model, {"h": k * X})(X)

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(call, map(np.float32, range(48))))
    for k, (own, shared, planted) in enumerate(results):
        np.testing.assert_allclose(own, k * X)
        np.testing.assert_allclose(shared, np.sin(full(k, 5)), rtol=1e-6)
        np.testing.assert_allclose(planted, k * X + 4)


def test_dead_functions_and_their_arrays_are_freed():
    def call(k):
        weights = jnp.full(3, float(k))
        fn = lambda x: sow(weights * x, name="h")
        assert len(sites(fn)(X)) == 1
        if k % 10 == 0:  # compiling is what takes time
            np.testing.assert_allclose(reap(fn)(X)["h"], k * X)
            np.testing.assert_allclose(plant(fn, {"h": weights})(X), k)
        return weakref.ref(fn), weakref.ref(weights)

    kept = cached()
    refs = [ref for k in range(500) for ref in call(k)]
    assert cached() == kept
    assert [ref() for ref in refs if ref() is not None] == []


def test_a_function_in_the_place_of_a_dead_one_is_traced():
    places = set()
    for k in range(200):
        fn = Counted(lambda x: sow(x + k, name="h"))  # noqa: B023
        np.testing.assert_allclose(reap(fn)(X)["h"], X + k)
        if id(fn) in places:
            return
        places.add(id(fn))
        del fn
        gc.collect()
    pytest.fail("no function took the place of a dead one")


@pytest.mark.parametrize("edit", [harvest.replace, add])
def test_arguments_and_planted_values_are_not_kept(edit):
    x, value = jnp.ones(3), jnp.zeros(3)
    refs = weakref.ref(x), weakref.ref(value)
    plant(model, {"h": edit(value)})(x).block_until_ready()
    del x, value
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_caches_are_bounded(monkeypatch):
    monkeypatch.setattr(_cache, "_MAX_ENTRIES", 4)
    fn = Counted(lambda x, k: sow(x + k, name="h"))
    for k in [*range(8), *range(8)]:
        np.testing.assert_allclose(reap(fn)(X, k)["h"], X + k)
        assert max(cached()) <= 4
    assert fn.traces == 16


@pytest.mark.parametrize("mutable", [{1}, [1], bytearray(b"a")])
def test_what_cannot_be_hashed_is_refused_since_it_may_change(mutable):
    fn = lambda x, held: sow(x * len(held.value), name="h")
    with pytest.raises(harvest.UnsupportedError, match="cannot be hashed"):
        reap(fn)(X, Unhashable(mutable))


class Unhashable:
    __hash__ = None

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.value == other.value


def test_the_function_of_a_partial_is_freed():
    def call():
        weights = jnp.ones(3)
        fn = lambda a, x: sow(a * weights * x, name="h")
        np.testing.assert_allclose(reap(functools.partial(fn, 2.0))(X)["h"], 2 * X)
        return weakref.ref(weights)

    weights = call()
    gc.collect()
    assert weights() is None


def test_predicates_of_nested_transforms_are_no_reason_to_trace():
    fn = Counted(model)
    for k in range(3):
        anything = lambda site: True
        edit = {(lambda site: site.key == "h"): add(float(k))}
        assert len(capture(plant(fn, edit), anything)(X)[1]) == 2
        traces = fn.traces if k == 0 else traces
    assert fn.traces == traces


def test_a_result_that_closes_over_a_traced_value_is_refused():
    def fn(x):
        h = sow(2 * x, name="h")
        return lambda: h

    with pytest.raises(harvest.UnsupportedError, match="holds what is being traced"):
        capture(fn)(X)


def test_floats_of_models_are_static_as_equinox_has_them():
    class Scaled(eqx.Module):
        weight: jax.Array
        factor: float

        def __call__(self, x):
            return sow(x * self.weight * (self.factor if self.factor > 0 else 1.0), name="h")

    net = Scaled(jnp.ones(3), 0.5)
    np.testing.assert_allclose(reap(net)(X)["h"], X / 2)
    np.testing.assert_allclose(plant(model, {"h": net})(X), np.sin(X) / 2 + 4, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Python iterable type 'generator'")
@pytest.mark.parametrize(
    "holding",
    [
        lambda h: functools.partial(max, h),
        lambda h: Counted(lambda: h).__call__,
        lambda h: (h for _ in range(3)),
    ],
    ids=["partial", "method", "generator"],
)
def test_other_objects_that_hold_a_traced_value(holding):
    with pytest.raises(harvest.UnsupportedError, match="holds what is being traced"):
        capture(lambda x: holding(sow(2 * x, name="h")))(X)


def test_functions_whose_body_does_not_run_when_they_are_called():
    def generator(x):
        yield sow(x, name="h")

    async def coroutine(x):
        return sow(x, name="h")

    for fn in (generator, coroutine):
        with pytest.raises(harvest.UnsupportedError, match="a generator or coroutine function"):
            capture(fn)


def test_a_float_that_is_to_be_static_says_how():
    power = jax.jit(lambda x, k: sow(x**k, name="h"), static_argnums=1)
    with pytest.raises(ValueError, match="static argument") as caught:
        capture(power)(X, 2.0)
    assert any("can be bound by `functools.partial`" in note for note in caught.value.__notes__)
    np.testing.assert_allclose(reap(functools.partial(power, k=2.0))(X)["h"], X**2.0)
