"""Reducers of gradients: functions run in the backward pass, folds read the stacked gradient."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import CondSum, Fold, SelectError, capture, folds, grad, reap, scope, sow
from tests.helpers import PROGRAMS, SIZE

X = jnp.linspace(0.4, 1.3, SIZE)
XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)
WEIGHTS = jnp.array([1.0, -2.0, 3.0, 0.5])


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def loss(program):
    return lambda x: jnp.sum(PROGRAMS[program].fn(x, lambda h, _: sow(h, name="h")) * WEIGHTS)


def summary(g):
    """Nonlinear, not zero at zero, and a tree."""
    return {"norm": jnp.linalg.norm(g), "exp": (jnp.exp(g / 100), "static", 3)}


def mapped(fn, loops):
    """`fn` of each item of a stack."""
    return functools.reduce(lambda f, _: jax.vmap(f), range(loops), fn)


numbers = lambda g: (jnp.linalg.norm(g), jnp.exp(g / 100))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_function_of_each_gradient(program):
    loops = len(PROGRAMS[program].loops)
    f = loss(program)
    whole, reduced = grad(f)(X)["h"], grad(f, {"h": summary})(X)["h"]
    norm, exp = mapped(numbers, loops)(whole)
    assert reduced["exp"][1:] == ("static", 3)
    close((reduced["norm"], reduced["exp"][0]), (norm, exp))
    total = lambda xs: jnp.sum(jax.vmap(f)(xs))
    each = mapped(jnp.linalg.norm, loops + 1)(grad(total)(XS)["h"])
    close(grad(total, {"h": jnp.linalg.norm})(XS)["h"], each)
    close(jax.vmap(grad(f, {"h": jnp.linalg.norm}))(XS)["h"], jnp.moveaxis(each, loops, 0))


class SumOfSquares(Fold):
    def init(self, aval):
        return jnp.zeros(aval.shape, aval.dtype)

    def update(self, state, value, index):
        return state + value**2


FOLDS = {
    "last": (folds.last(), lambda g: g[-1]),
    "mean": (folds.mean(), lambda g: g.mean(axis=0)),
    "maximum": (folds.maximum(), lambda g: g.max(axis=0)),
    "count": (folds.count(), len),
    "of": (folds.mean().of(jnp.sum), lambda g: g.sum(axis=1).mean()),
    "own": (SumOfSquares(), lambda g: jnp.sum(g**2, axis=0)),
}


@pytest.mark.parametrize("program", ["scan", "scan_of_remat", "cond_of_scan", "scan_of_scan"])
def test_a_fold_of_the_stacked_gradient(program):
    f = loss(program)
    whole = grad(f)(X)["h"].reshape(-1, SIZE)
    reducers = tuple(fold for fold, _ in FOLDS.values())
    close(grad(f, {"h": reducers})(X)["h"], tuple(fn(whole) for _, fn in FOLDS.values()))
    close(grad(f, {"h": folds.mean()})(X)["h"], whole.mean(axis=0))


def test_a_fold_over_some_loops():
    f = loss("scan_of_scan")
    whole = grad(f)(X)["h"]
    close(grad(f, {"h": folds.mean().over(0)})(X)["h"], whole.mean(axis=0))
    close(grad(f, {"h": folds.at((..., 1))})(X)["h"], whole[:, 1])


def test_tuples_and_none():
    f = loss("scan")
    whole = grad(f)(X)["h"]
    norms = jax.vmap(jnp.linalg.norm)(whole)
    close(grad(f, {"h": None})(X)["h"], whole)
    close(grad(f, {"h": (jnp.linalg.norm, jnp.sum)})(X)["h"], (norms, whole.sum(axis=1)))
    reducers = (jnp.linalg.norm, folds.last(), None, jnp.argmax)
    wanted = (norms, whole[-1], whole, whole.argmax(axis=1))
    close(grad(f, {"h": reducers})(X)["h"], wanted)
    close(grad(f, {"h": jnp.argmax})(X)["h"], whole.argmax(axis=1))


def test_the_first_selection_that_matches():
    def f(x):
        for name in ("a", "b", "c"):
            with scope(name):
                x = sow(2 * x, name="h")
        return jnp.sum(x)

    reducers = {"a/h": jnp.sum, lambda site: site.scope == "b": None, "*/h": jnp.max}
    close(grad(f, reducers)(X), {"a/h": 4 * SIZE, "b/h": jnp.full(SIZE, 2.0), "c/h": 1})


def test_leaves_without_derivative_are_none_to_a_reducer():
    def f(x):
        h = sow({"x": x, "n": 3, "ints": jnp.arange(2), "s": "s"}, name="h")
        return jnp.sum(h["x"] ** 2) * h["n"]

    def check(g):
        assert (g["n"], g["ints"], g["s"]) == (None, None, None)
        return jnp.sum(g["x"])

    close(grad(f, {"h": (check, None, folds.count())})(X)["h"][0], jnp.sum(6 * X))
    close(grad(f, {"h": check})(X)["h"], jnp.sum(6 * X))
    assert grad(f, {"h": lambda g: g["ints"]})(X)["h"] is None
    numbers = lambda x, i: (x * sow(i, name="i").astype(x.dtype), None)
    loop = lambda x: jnp.sum(lax.scan(numbers, x, jnp.arange(3))[0])
    assert grad(loop, {"i": folds.count()})(X)["i"] == 3


def test_a_leaf_that_vmap_batches_although_it_has_no_gradient():
    f = lambda n, x: jnp.sum(sow((x, n), name="h")[0] ** 2)
    total = lambda ns, x: jnp.sum(jax.vmap(f, in_axes=(0, None))(ns, x))
    close(grad(total, {"h": lambda g: jnp.sum(g[0])})(jnp.arange(3), X)["h"], 6 * jnp.sum(X))


# ----------------------------------------------------------------------- where there is no gradient


def test_a_reducer_of_the_zeros_where_nothing_depends_on_the_site():
    def f(x):
        step = lambda x, i: (lax.cond(i < 1, dependent, independent, x), None)
        dependent = lambda x: sow(x, name="h") ** 2
        independent = lambda x: lax.stop_gradient(sow(x + 1, name="h")) + x
        g = sow((x, 2 * x), name="g")
        return jnp.sum(lax.scan(step, x, jnp.arange(2))[0] + lax.stop_gradient(g[0]))

    grads = grad(f, {"h": jnp.exp, "g": lambda g: jnp.exp(g[1])})(X)
    close(grads, {"h": jnp.stack([jnp.exp(2 * X), jnp.ones(SIZE)]), "g": jnp.ones(SIZE)})


def one_sided(xs):
    """A loop that sows in its even iterations only."""

    def step(total, row):
        i, x = row
        sown = lambda x: jnp.sum(sow(x, name="h") ** 3)
        return total + lax.cond(i % 2 == 0, sown, jnp.sum, x), None

    return lax.scan(step, 0.0, (jnp.arange(4), xs))[0]


def test_reducers_where_only_one_branch_has_the_site():
    xs = jnp.arange(1.0, 9.0).reshape(4, 2)
    taken = 3 * xs[::2] ** 2
    reducers = (folds.mean(), folds.count(), folds.last(), lambda g: 1 + jnp.sum(g))
    mean, count, last, sums = grad(one_sided, {"h": reducers})(xs)["h"]
    close((mean, count, last), (taken.mean(axis=0), 2, taken[-1]))
    even = jnp.array([1, 0, 1, 0])
    wanted = jnp.array([1.0, 0.0, 1.0, 0.0]) * (1 + 3 * jnp.sum(xs**2, axis=1))
    close(sums, CondSum(even, (None, wanted)))
    close(grad(one_sided, {"h": reducers[-1]})(xs)["h"], sums)
    form = jax.tree.structure(reap(one_sided, {"h": reducers})(xs)["h"])
    assert jax.tree.structure((mean, count, last, sums)) == form


# ------------------------------------------------------------------------------------ what it costs

LAYERS, WIDTH = 50, 200


def deep(x, site=lambda h: sow(h, name="h")):
    step = lambda x, _: (jnp.sin(site(2 * x)), None)
    return jnp.sum(lax.scan(step, x, length=LAYERS)[0] ** 2)


def temp_bytes(fn):
    compiled = jax.jit(fn).lower(jnp.ones(WIDTH)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_the_gradients_of_all_iterations_are_never_kept():
    stack = 4 * LAYERS * WIDTH
    plain = temp_bytes(jax.grad(functools.partial(deep, site=lambda h: h)))
    reduced = temp_bytes(grad(deep, {"h": jnp.linalg.norm}))
    assert reduced < plain + stack / 4
    assert temp_bytes(grad(deep, {"h": (jnp.linalg.norm, jnp.max)})) < plain + stack / 4
    assert temp_bytes(grad(deep, {"h": jnp.argmax})) >= plain + stack  # no cotangent


class Probe(eqx.Module):
    weight: jax.Array

    def __call__(self, g):
        TRACES.append(1)
        return jnp.tanh(jnp.sum(self.weight * g))


TRACES: list[int] = []


def test_arrays_of_a_reducer_are_traced():
    f = loss("scan")
    whole = grad(f)(X)["h"]
    reduced = lambda weight: grad(f, {"h": Probe(weight)})(X)["h"]
    wanted = lambda weight: jnp.tanh(whole @ weight)
    close(reduced(WEIGHTS), wanted(WEIGHTS))
    traces = len(TRACES)
    close(reduced(2 * WEIGHTS), wanted(2 * WEIGHTS))
    assert len(TRACES) == traces
    close(jax.jacrev(reduced)(WEIGHTS / 9), jax.jacrev(wanted)(WEIGHTS / 9))
    scaled = grad(f, {"h": jax.tree_util.Partial(jnp.multiply, WEIGHTS)})(X)["h"]
    close(scaled, whole * WEIGHTS[None])


def test_values_are_collected_beside_reduced_gradients():
    f = loss("scan")
    reduced, values = capture(grad(f, {"h": jnp.sum}))(X)
    close(reduced, {"h": grad(f)(X)["h"].sum(axis=1)})
    close(values, capture(f)(X)[1])


# ------------------------------------------------------------------------------- what is refused


def test_a_reducer_that_fails_says_where():
    def f(x):
        step = lambda x, _: (2 * sow(x, name="h"), None)  # the line that messages name
        return jnp.sum(lax.scan(step, x, length=3)[0])

    line = f.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match="dot_general") as error:
        grad(f, {"h": lambda g: g @ jnp.ones(7)})(X)
    assert f"raised by the reducer of the site 'h' (sown at {__file__}:{line})" in "".join(
        error.value.__notes__
    )
    with pytest.raises(SelectError, match=rf"`folds.at\(7\)` .*'h' \(sown at .*reducers.py:{line}"):
        grad(f, {"h": folds.at(7)})(X)
