"""The inputs of a fault that `debug.nonfinite` reports: which, of which iteration, their ranges."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import debug, perturb, sow

from . import dataflow, helpers

X = np.array([1.0, 2.0, 3.0], np.float32)


def ranges(fault):
    return {value.name: (value.low, value.high) for value in fault.inputs}


def same(got, wanted):
    assert list(got) == list(wanted)
    np.testing.assert_allclose(list(got.values()), list(wanted.values()), rtol=1e-4)


# ----------------------------------------------------------------------------------- inputs


def log(x):
    return sow(jnp.log(x), name="log")


def nearest(x, w):
    a = sow(x * w, name="a")
    b = sow(a - 5, name="b")
    return log(b + 0 * w)


def used_twice(x):
    a = sow({"x": x, "n": 7}, name="a")["x"]
    return log(sow(a - 9, name="b") * a)


def of_integers(table, tokens, key):
    rows = table.at[tokens].get(mode="fill") + jax.random.normal(key)
    return sow(rows, name="rows")


def before_in_the_body(x, w):
    def body(c, _):
        a = sow(c - w, name="a")
        return log(a) * 0 + a, None

    return lax.scan(body, x, length=5)


def after_in_the_body(x, w):
    def body(c, _):
        log(c)
        return sow(c - w, name="a"), None

    return lax.scan(body, x, length=6)


def reverse(xs):
    def body(c, x):
        log(c)
        return sow(x, name="a"), None

    return lax.scan(body, 1.0, xs, reverse=True)


def round_the_carry(x, y, z):
    def body(carry, _):
        a, b, c = carry
        return (log(c), a, b), None

    return lax.scan(body, (x, y, z), length=9)


def of_the_last_iteration(xs):
    last, _ = lax.scan(lambda c, x: (sow(2 * x, name="a"), None), 0.0, xs)
    return log(-last)


def of_all_iterations(xs):
    _, stack = lax.scan(lambda c, x: (c, sow(2 * x, name="a")), 0.0, xs)
    return log(-jnp.sum(stack))


def of_the_same_iteration(xs):
    _, stack = lax.scan(lambda c, x: (c, sow(2 * x, name="a")), 0.0, xs)
    return lax.scan(lambda c, a: (c, log(5 - a)), 0.0, stack)


def of_all_in_another_loop(xs):
    _, stack = lax.scan(lambda c, x: (c, sow(2 * x, name="a")), 0.0, xs)
    return lax.map(lambda x: log(x - jnp.sum(stack)), xs)


def of_a_row(xs):
    def outer(c, x):
        return c, lax.scan(lambda c, y: (c, sow(x * y, name="a")), c, xs)[1]

    _, table = lax.scan(outer, 0.0, xs)
    return lax.map(lambda row: log(3.5 - jnp.sum(row) / 2), table)


def of_an_entry(xs):
    _, table = lax.scan(lambda c, x: (c, lax.map(lambda y: sow(x * y, name="a"), xs)), 0.0, xs)
    return lax.map(lambda row: lax.map(lambda a: log(5 - a), row), table)


def of_the_example(xs):
    return jax.vmap(lambda x: log(sow(2 - x, name="a")))(xs)


def of_all_examples(xs):
    return log(-jnp.sum(jax.vmap(lambda x: sow(x, name="a"))(xs)))


def of_the_same_step(x):
    def body(carry):
        i, c = carry
        a = sow(c - 1, name="a")
        return i + 1, a + 0 * log(a)

    return lax.while_loop(lambda carry: carry[0] < 9, body, (0, x))


def of_the_last_step(x):
    steps = lax.while_loop(lambda c: c < 7, lambda c: sow(2 * c, name="a"), x)
    return log(-steps)


def of_a_branch(x, y, index):
    log_of = lambda i: lambda *args: log(args[i])
    return lax.switch(index, [log_of(0), log_of(1)], x, y)


INPUTS = {
    "nearest": (nearest, (X, np.float32(0.5)), {"args[1]": (0.5, 0.5), "b": (-4.5, -3.5)}),
    "used twice": (used_twice, (X,), {"a": (1, 3), "b": (-8, -6)}),
    "of integers": (
        of_integers,
        (X, np.array([0, 5]), jax.random.key(0)),
        {"args[0]": (1, 3), "args[1]": (0, 5)},
    ),
    "before in the body": (before_in_the_body, (3.5, 1.0), {"a": (-0.5, -0.5)}),
    "after in the body": (
        after_in_the_body,
        (3.5, 1.0),
        {"args[0]": (3.5, 3.5), "a": (-0.5, -0.5)},
    ),
    "first iteration": (after_in_the_body, (-1.0, 1.0), {"args[0]": (-1, -1)}),
    "reverse": (reverse, (X - 2.5,), {"a": (-0.5, -0.5)}),
    "round the carry": (
        round_the_carry,
        (3.0, 20.0, 0.5),
        {"args[0]": (3, 3), "args[1]": (20, 20), "args[2]": (0.5, 0.5), "log": (-0.6931, -0.6931)},
    ),
    "last iteration": (of_the_last_iteration, (X,), {"a": (6, 6)}),
    "all iterations": (of_all_iterations, (X,), {"a": (2, 6)}),
    "same iteration": (of_the_same_iteration, (X,), {"a": (6, 6)}),
    "another loop": (of_all_in_another_loop, (X,), {"args[0]": (1, 3), "a": (2, 6)}),
    "a row": (of_a_row, (X,), {"a": (2, 6)}),
    "an entry": (of_an_entry, (X,), {"a": (6, 6)}),
    "example": (of_the_example, (X,), {"a": (-1, -1)}),
    "all examples": (of_all_examples, (X,), {"a": (1, 3)}),
    "same step": (of_the_same_step, (3.5,), {"a": (-0.5, -0.5)}),
    "last step": (of_the_last_step, (1.0,), {"a": (8, 8)}),
    "first branch": (of_a_branch, (-1.0, 2.0, np.int32(0)), {"args[0]": (-1, -1)}),
    "second branch": (of_a_branch, (1.0, -2.0, np.int32(1)), {"args[1]": (-2, -2)}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    fn, args, wanted = INPUTS[name]
    for transform in (lambda f: f, jax.jit):
        (fault,) = debug.nonfinite(transform(fn))(*args)
        same(ranges(fault), wanted)


@pytest.mark.parametrize("name", helpers.PROGRAMS)
def test_inputs_in_each_structure(name):
    """In a loop, those of the iteration before; else the argument."""
    fn, loops, values = helpers.PROGRAMS[name]
    *_, before, last = itertools.product(*map(range, loops)) if loops else (None, ())
    ends = jnp.array([*last], jnp.int32)

    def f(x):
        def site(h, step):
            steps = jnp.array([*jax.tree.leaves(step)], jnp.int32)
            return sow(jnp.where(jnp.all(steps == ends), jnp.nan, h), name="h")

        return fn(x, site)

    x = np.array([0.5, 1.0, 1.5, 2.0], np.float32)
    (fault,) = debug.nonfinite(f)(x)
    h = np.asarray(values(jnp.asarray(x)))[before] if loops else None
    wanted = {"args[0]": (0.5, 2)} | ({} if h is None else {"h": (h.min(), h.max())})
    same(ranges(fault), wanted)
    assert fault.index == last


def test_inputs_of_a_cotangent_are_of_the_same_layer():
    def loss(ws):
        def layer(c, w):
            h = perturb(sow(w, name="h"), name="d")
            return c + 0 * jnp.sqrt(h), None

        return lax.scan(layer, 0.0, ws)[0]

    (fault,) = debug.nonfinite(jax.grad(loss))(np.array([1, 0, 2, 3], np.float32))
    assert (fault.kind, fault.index) == ("cotangent", (1,))
    assert ranges(fault) == {"h": (0, 0)}


def test_a_cotangent_comes_from_the_one_behind():
    def loss(x):
        h = perturb(x, name="h") ** 2
        return jnp.sum(0 * jnp.sqrt(perturb(h - 1, name="g")))

    (fault,) = debug.nonfinite(jax.value_and_grad(loss))(X)
    assert (fault.key, fault.kind) == ("g", "cotangent")
    (fault,) = debug.nonfinite(jax.value_and_grad(loss), "h")(X)
    assert [str(value) for value in fault.inputs] == ["args[0]: 1 .. 3"]


def test_sites_that_are_not_watched_are_looked_through():
    args = (X, np.float32(0.5))
    (fault,) = debug.nonfinite(nearest, ("a", "log"))(*args)
    assert ranges(fault) == {"args[1]": (0.5, 0.5), "a": (0.5, 1.5)}
    (fault,) = debug.nonfinite(nearest, lambda site: site.key == "log")(*args)
    assert ranges(fault) == {"args[0]": (1, 3), "args[1]": (0.5, 0.5)}
    (fault,) = debug.nonfinite(nearest, "l*g")(*args)
    assert list(ranges(fault)) == ["args[0]", "args[1]"]
    assert not debug.nonfinite(nearest, "a")(*args)


def test_a_nan_in_an_argument():
    (fault,) = debug.nonfinite(lambda x: sow(sow(x + 1, name="a") * 2, name="b"))(X * np.nan)
    assert fault.key == "a"
    assert fault.inputs == (debug.Range("args[0]", "argument", np.inf, -np.inf, True, False),)
    assert str(fault.inputs[0]) == "args[0]: nothing finite, NaN"


# ---------------------------------------------------------------------------- random programs


@pytest.mark.parametrize("seed", range(8))
def test_inputs_in_random_programs(seed):
    writer = dataflow.Writer(seed)
    x, y = np.float32(1.5), np.float32(-2.25)
    start = {"x": ("args[0]", x), "y": ("args[1]", y)}
    env = {name: dataflow.Number(v[1], frozenset({v})) for name, v in start.items()}
    watch = debug.nonfinite(
        lambda x, y, bad: dataflow.staged(writer.program, {"x": x, "y": y}, bad)
    )
    events = list(dataflow.stepwise(writer.program, env))
    for event in events[:: max(1, len(events) // 10)]:
        bad = dict.fromkeys(writer.sites, np.int32(-1)) | {event.name: np.int32(event.step)}
        (fault,) = watch(x, y, bad)
        assert fault.key == event.name and fault.value.nan
        assert fault.index == tuple(int(digit) - 1 for digit in str(event.step or ""))
        np.testing.assert_allclose(fault.value.low, event.value, rtol=1e-4)
        got = ranges(fault)
        for name in {source[0] for source in event.sources}:
            # Where it comes from several iterations, one of them, or all.
            values = [s[2] if len(s) > 2 else s[1] for s in event.sources if s[0] == name]
            assert all(np.isclose(end, values, rtol=1e-4).any() for end in got[name])


# -------------------------------------------------------------------------- names and lines


class Scaled(eqx.Module):
    scale: jax.Array
    layers: list

    def __call__(self, x):
        return log(-jnp.abs(self.scale * self.layers[0](x)))


MODEL = Scaled(jnp.ones(2), [eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))])
NAMES = {
    "float": (lambda x: log(x), (-1.0,), {}, ["args[0]"]),
    "numpy": (lambda x, y: log(x - y), (X, X + 1), {}, ["args[0]", "args[1]"]),
    "dict": (
        lambda p: log(p["w"] * p["b"][1]),
        ({"w": -X, "b": (X, X)},),
        {},
        ["args[0]['b'][1]", "args[0]['w']"],
    ),
    "keyword": (
        lambda x, *, p: log(x - p["w"]),
        (X,),
        {"p": {"w": X + 1}},
        ["args[0]", "kwargs['p']['w']"],
    ),
    "static": (lambda x, n: log(x - n), (X, 3), {}, ["args[0]"]),
    "unused": (lambda x, y: log(y), (X, -X), {}, ["args[1]"]),
    "module": (MODEL, (X,), {}, ["fn.scale", "fn.layers[0].weight", "args[0]"]),
    "module among arguments": (
        lambda m, x: m(x),
        (MODEL,),
        {"x": X},
        ["args[0].scale", "args[0].layers[0].weight", "kwargs['x']"],
    ),
    "closure": (lambda: log(jnp.asarray(-X)), (), {}, []),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_arguments(name):
    fn, args, kwargs, wanted = NAMES[name]
    (fault,) = debug.nonfinite(fn)(*args, **kwargs)
    assert list(ranges(fault)) == wanted


def test_the_line_is_that_of_the_branch_that_ran():
    def f(x, index):
        one = lambda x: sow(jnp.log(x), name="h")
        two = lambda x: sow((jnp.sqrt(x), 1), name="h")[0]
        return lax.switch(index, [one, two], x)

    line = f.__code__.co_firstlineno + 1
    for index in range(2):
        (fault,) = debug.nonfinite(f)(-X, np.int32(index))
        assert fault.source == f"{__file__}:{line + index}"


def test_a_function_that_branches_call_in_different_loops():
    step = jax.jit(lambda x: log(x - 1))

    def f(x, index):
        loop = lambda x: lax.scan(lambda c, _: (step(c) * 0 + c - 1, None), x, length=9)[0]
        return lax.switch(index, [step, loop, lambda x: step(loop(x))], x)

    for start, index, wanted in ((0.5, 0, ()), (0.5, 1, (0,)), (2.5, 1, (2,)), (5.0, 0, None)):
        report = debug.nonfinite(f)(start, np.int32(index))
        assert [fault.index for fault in report] == [wanted] * (wanted is not None)
