"""`debug.nonfinite` names the first site in time: against programs that are run step by step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import HarvestWarning, capture, debug, perturb, plant, scale, sow

from . import helpers
from .steps import PROGRAMS, Staged, Stepwise

NEVER = -1
X = np.array([0.5, 1.0, 1.5, 2.0], np.float32)


def events(program, bad):
    steps = Stepwise(bad)
    program(steps)
    return steps.events


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_site_in_time(name):
    program = PROGRAMS[name]
    watch = debug.nonfinite(lambda bad: program(Staged(bad)))
    for a, b in itertools.product(range(NEVER, 6), repeat=2):
        bad = {"a": a, "b": b, "trips": 2}
        report = watch(jax.tree.map(np.int32, bad))
        wanted = next((event for event in events(program, bad) if event.is_bad), None)
        if wanted is None:
            assert not report
            continue
        (fault,) = report
        assert (fault.key, fault.kind, fault.index) == (wanted.key, "sow", wanted.index)
        assert fault.lane == () and fault.value.nan and not fault.value.inf
        assert fault.value.low == fault.value.high == wanted.step


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_example_of_a_batch(name):
    program = PROGRAMS[name]
    watch = debug.nonfinite(jax.vmap(lambda bad: program(Staged(bad))))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        bad = {key: rng.integers(NEVER, 9, 4, np.int32) for key in "ab"}
        bad["trips"] = rng.integers(0, 4, 4, np.int32)
        lanes = [events(program, {k: v[i] for k, v in bad.items()}) for i in range(4)]
        found = [(e.time, i, e) for i, lane in enumerate(lanes) for e in lane if e.is_bad]
        report = watch(bad)
        if not found:
            assert not report
            continue
        (fault,), (_, lane, event) = report, min(found)
        assert (fault.key, fault.index, fault.lane) == (event.key, event.index, (lane,))
        assert fault.value.low == fault.value.high == event.step


# -------------------------------------------------------------------------------- cotangents


def faulty(h, bad):
    """`h`, with a cotangent that is NaN if it is bad."""
    z = jnp.where(bad, 0, 1).astype(h.dtype)
    return h + jnp.sqrt(0 * h + z) - z


def scan_reversed(x, site):
    return helpers.scan(x, site, reverse=True)


BACKWARD = {
    **helpers.PROGRAMS,
    "scan_reversed": helpers.Program(scan_reversed, (helpers.LENGTH,), lambda x: None),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_first_cotangent_in_time(name):
    """The backward pass runs the iterations in reverse."""
    fn, loops, _ = BACKWARD[name]

    def loss(x, bad):
        def site(h, step):
            steps = jnp.stack([jnp.asarray(s, jnp.int32) for s in jax.tree.leaves(step)] or [0])
            is_bad = jnp.any(jnp.all(bad == steps[None], axis=1))
            return faulty(perturb(sow(h, name="h"), name="ct"), is_bad)

        return jnp.sum(fn(x, site))

    watch = debug.nonfinite(jax.value_and_grad(loss))
    cells = list(itertools.product(*map(range, loops or (1,))))
    assert not watch(X, np.full((2, len(cells[0])), NEVER))
    for pair in itertools.combinations_with_replacement(cells, 2):
        (fault,) = watch(X, np.array(pair))
        first = min if name == "scan_reversed" else max
        assert (fault.key, fault.kind) == ("ct", "cotangent")
        assert fault.index == (first(pair) if loops else ())


def test_a_cotangent_may_be_nan_where_no_value_is():
    def f(x):
        x = perturb(sow(x, name="x"), name="x")
        return jnp.sum(sow(jnp.where(x > 0, jnp.sqrt(x), 0.0), name="root"))

    assert not debug.nonfinite(f)(X - 0.5)
    (fault,) = debug.nonfinite(jax.value_and_grad(f))(X - 0.5)
    assert (fault.key, fault.kind) == ("x", "cotangent")
    assert not debug.nonfinite(jax.value_and_grad(f))(X)


def test_faults_are_listed_in_the_order_in_which_they_happen():
    def loss(w):
        return jnp.sqrt(perturb(sow(w, name="w"), name="w"))

    def train(w):
        step = lambda w, _: (w - jax.grad(loss)(w), None)
        return lax.scan(step, w, length=5)[0]

    # 0.25 - 1 / (2 * 0.5) is -0.75, whose root and gradient are NaN in the next step.
    cotangent, value = debug.nonfinite(jax.jit(train))(0.25)
    assert (cotangent.kind, cotangent.index) == ("cotangent", (1,))
    assert (value.kind, value.index) == ("sow", (2,))


def test_a_rule_of_the_user_that_sows_its_cotangent():
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, x), lambda x, ct: (sow(ct * jnp.log(x), name="ct"),))
    (fault,) = debug.nonfinite(jax.grad(f))(-1.0)
    assert (fault.key, fault.kind) == ("ct", "sow")


# ---------------------------------------------------------------------------------- batches


def test_examples_of_nested_batches_and_of_a_batch_in_a_loop():
    log = lambda x: sow(jnp.log(x), name="log")
    x = np.ones((2, 3), np.float32)
    x[1, 2] = -1
    (fault,) = debug.nonfinite(jax.vmap(jax.vmap(log)))(x)
    assert (fault.index, fault.lane) == ((), (1, 2))
    (fault,) = debug.nonfinite(jax.vmap(jax.vmap(log, 0), 1))(x)
    assert (fault.index, fault.lane) == ((), (2, 1))
    (fault,) = debug.nonfinite(lambda x: lax.map(jax.vmap(log), x))(x)
    assert (fault.index, fault.lane) == ((1,), (2,))
    (fault,) = debug.nonfinite(jax.vmap(lambda x: lax.map(log, x)))(x)
    assert (fault.index, fault.lane) == ((2,), (1,))


def test_a_value_that_no_batch_changes_has_no_example():
    f = jax.vmap(lambda x, w: x + sow(jnp.log(w), name="log"), in_axes=(0, None))
    (fault,) = debug.nonfinite(f)(X, -1.0)
    assert fault.lane == ()


def test_the_examples_of_a_loss_have_cotangents_of_their_own():
    def loss(xs):
        return jnp.sum(jax.vmap(lambda x: jnp.sqrt(perturb(x, name="x")) * 0)(xs))

    (fault,) = debug.nonfinite(jax.grad(loss))(X - 1)
    assert (fault.kind, fault.lane) == ("cotangent", (0,))


def test_a_cond_that_a_batch_made_a_select_warns():
    def f(x):
        log = lambda x: sow(jnp.log(x), name="log")
        return lax.cond(x > 0, log, lambda x: x, x)

    with pytest.warns(HarvestWarning, match="it looks as if each had run"):
        (fault,) = debug.nonfinite(jax.vmap(f))(X - 1)
    assert fault.lane == (0,)


# ----------------------------------------------------------------------------------- values

NAN, INF = np.nan, np.inf
VALUES = {  # a value, and the range that is reported of it
    "f32": (jnp.array([3, NAN, -1], jnp.float32), (-1, 3)),
    "bf16": (jnp.array([3, NAN, -1], jnp.bfloat16), (-1, 3)),
    "f16": (jnp.array([3, NAN, -1], jnp.float16), (-1, 3)),
    "f8": (jnp.array([3, NAN, -1], jnp.float8_e4m3fn), (-1, 3)),
    "scalar": (jnp.float32(NAN), (INF, -INF)),
    "complex": (jnp.array([3 + 4j, complex(0, NAN), 1j], jnp.complex64), (1, 5)),
    "pytree": ({"w": jnp.arange(3.0), "b": (jnp.float32(NAN), jnp.ones((2, 2)))}, (0, 2)),
    "with integers": ([jnp.array([1, NAN]), jnp.arange(9)], (1, 1)),
    "with an inf": (jnp.array([INF, NAN, 2]), (2, 2)),
    "static leaves": ((jnp.array([2, NAN]), 7, "seven", None, NAN), (2, 2)),
    "with an empty array": ([jnp.zeros((0, 3)), jnp.array([2, NAN])], (2, 2)),
    "with a key": ([jax.random.key(0), jnp.array([2, NAN])], (2, 2)),
    "with a float0": ([np.zeros(3, jax.dtypes.float0), jnp.array([2, NAN])], (2, 2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_with_a_nan(name):
    value, (low, high) = VALUES[name]
    for report in (
        debug.nonfinite(lambda value: sow(value, name="h"))(value),
        debug.nonfinite(lambda: sow(value, name="h"))(),
        debug.nonfinite(lambda x: lax.map(lambda x: (sow(value, name="h"), x)[1], x))(X),
    ):
        (fault,) = report
        assert (fault.value.low, fault.value.high, fault.value.nan) == (low, high, True)
        assert fault.value.inf == (name == "with an inf")


FINITE = {
    "integers": jnp.array([2**31 - 1, -(2**31)]),
    "booleans": jnp.array([True, False]),
    "bytes": jnp.arange(3, dtype=jnp.uint8),
    "nothing": jnp.zeros((0, 3)),
    "a key": jax.random.key(0),
    "no arrays": (None, "text", 3, NAN),
    "an infinity": jnp.array([-INF, 0, INF]),
    "a complex infinity": jnp.array([complex(0, INF)], jnp.complex64),
}


@pytest.mark.parametrize("name", FINITE)
def test_values_without_a_nan(name):
    value = FINITE[name]
    report = debug.nonfinite(lambda: sow(value, name="h"))()
    assert not report and report == () and report.watched == 1


@pytest.mark.parametrize("name", FINITE)
def test_infinities_on_request(name):
    value = FINITE[name]
    report = debug.nonfinite(lambda: sow(value, name="h"), infinities=True)()
    assert [(f.value.nan, f.value.inf) for f in report] == [(False, True)] * ("inf" in name)


def test_masked_scores_are_no_fault():
    def attention(q, k, mask):
        scores = sow(jnp.where(mask, q @ k.T, -jnp.inf), name="scores")
        return sow(jax.nn.softmax(scores), name="probs")

    q, mask = np.eye(3, dtype=np.float32), np.tri(3, dtype=bool)
    watch = debug.nonfinite(attention)
    assert not watch(q, q, mask)
    mask[1] = False  # a row without a score
    (fault,) = watch(q, q, mask)
    assert fault.key == "probs" and fault.inputs[0].inf
    (fault,) = debug.nonfinite(attention, infinities=True)(q, q, mask)
    assert fault.key == "scores"


def test_what_is_planted_and_what_is_left():
    def f(x):
        return sow(jnp.log(sow(x, name="x")), name="log")

    (fault,) = debug.nonfinite(plant(f, {"x": scale(-1)}))(X)
    assert fault.key == "log"
    assert debug.nonfinite(capture(f))(X - 1).watched == 0  # `capture` has consumed them
