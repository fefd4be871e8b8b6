"""What is said of programs, and where they differ. `tests.distributed` has several processes."""

import jax
import jax.numpy as jnp
import pytest

import harvest
from harvest._same_program import described, difference
from harvest._stage import trace_cached

X = jnp.ones(3)


def f(x):
    a = harvest.sow(jnp.sin(x), name="a")
    return harvest.sow(2 * a, name="b").sum()


def description(fn, *args):
    return described(fn, trace_cached("debug.assert_same_program", fn, args, {}))


def test_one_process_runs_it():
    checked = harvest.debug.assert_same_program(harvest.reap(f, "b"))
    assert (checked(X)["b"] == 2 * jnp.sin(X)).all()
    assert jax.jit(harvest.debug.assert_same_program(f))(X) == f(X)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda: harvest.reap(f, {"a", "b"}), lambda: harvest.reap(f, {"b", "a"})),
        (lambda: harvest.reap(f, "a"), lambda: harvest.reap(f, lambda site: site.key == "a")),
        (lambda: harvest.plant(f, {"a": X}), lambda: harvest.plant(f, {"a": 2 * X})),
        (lambda: lambda x: f(x), lambda: lambda x: f(x)),
    ],
)
def test_the_same(one, other):
    assert difference([description(one(), X), description(other(), X)]) is None


@pytest.mark.parametrize(
    "calls, parts",
    [
        (
            [(harvest.reap(f, "a"), X), (harvest.reap(f, "b"), X), (harvest.reap(f, "a"), X)],
            ["transforms differ", "processes 0, 2: reap(select=('a',)", "process 1: reap(select="],
        ),
        (
            [(harvest.plant(f, {"a": X}), X), (harvest.plant(f, {"b": X}), X)],
            ["process 0: plant(keys=('a',)", "process 1: plant(keys=('b',)"],
        ),
        ([(jnp.sin, X), (jnp.sin, jnp.ones(4))], ["arguments differ", "float32[3]", "float32[4]"]),
        (
            [(lambda x: (x, x + 1), X), (lambda x: {"y": x, "z": x + 1}, X)],
            ["results differ", "[0]: f32[3]", "['y']: f32[3]"],
        ),
        (
            [(lambda x: jnp.sin(x) + 1, X), (lambda x: jnp.cos(x) + 1, X)],
            ["equations differ", "process 0: 1 sin", "process 1: 1 cos"],
        ),
        ([(lambda x: x + 1, X), (lambda x: x + 2, X)], ["parameters of equations, or their order"]),
    ],
)
def test_differences(calls, parts):
    message = difference([description(*call) for call in calls])
    for part in parts:
        assert part in message


def test_what_fails_on_one():
    message = difference([description(f, X), {"error": ["UnknownSiteError: no 'c'"]}])
    assert "process 1: UnknownSiteError: no 'c'" in message and "process 0" not in message
