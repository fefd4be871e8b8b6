"""Folds differentiate: against finite differences, and against the same of the stacked values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from harvest import capture, folds, perturb, reap, sow
from tests.folds_by_hand import Weighted
from tests.loops import PROGRAMS

X = jnp.array([0.7, -1.2])
STATIC = [name for name, p in PROGRAMS.items() if p.loops and None not in p.loops]
DYNAMIC = [name for name, p in PROGRAMS.items() if None in p.loops]


def _first(values, room):
    return jnp.zeros((room, *values.shape[1:])).at[: len(values)].set(values[:room])


FOLDS = {  # and what they are of the values of all iterations, in the order of evaluation
    "last": (folds.last(), lambda v: v[-1]),
    "at": (folds.at(1), lambda v: v[1]),
    "at array": (folds.at(jnp.array(-2)), lambda v: v[-2]),
    "mean": (folds.mean(), lambda v: v.mean(axis=0)),
    "maximum": (folds.maximum(), lambda v: v.max(axis=0)),
    "moments": (folds.moments(), lambda v: (v.mean(axis=0), v.var(axis=0))),
    "top_k": (folds.top_k(2), lambda v: -jnp.sort(-v, axis=0)[:2]),
    "every": (folds.every(2), lambda v: v[::2]),
    "stack": (folds.stack(6), lambda v: _first(v, 6)),
    "of": (folds.mean().of(jnp.sin), lambda v: jnp.sin(v).mean(axis=0)),
    "weighted": (Weighted(jnp.float32(2)), lambda v: (2 + jnp.arange(4.0)) @ v),
}


def total(tree):
    """A number that depends on all floats in it, on each in its own way."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    weights = [
        jnp.cos(1.0 + n + jnp.arange(float(x.size))).reshape(x.shape) for n, x in enumerate(leaves)
    ]
    return sum(jnp.sum(w * x) for w, x in zip(weights, leaves, strict=True))


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("fold", FOLDS)
def test_each_fold_as_the_stacked_values(fold):
    reducer, of_stacked = FOLDS[fold]
    f = lambda x: total(reap(PROGRAMS["scan"], {"h": reducer})(x)["h"])
    g = lambda x: total(of_stacked(reap(PROGRAMS["scan"])(x)["h"]))
    close(jax.jit(jax.value_and_grad(f))(X), jax.jit(jax.value_and_grad(g))(X))


def test_gradients_under_checkpoint_and_of_second_order():
    names = ("last", "moments", "weighted")
    f = lambda x: total(reap(PROGRAMS["scan"], {"h": tuple(FOLDS[n][0] for n in names)})(x)["h"])
    g = lambda x: total([FOLDS[n][1](reap(PROGRAMS["scan"])(x)["h"]) for n in names])
    close(jax.jit(jax.grad(jax.checkpoint(f)))(X), jax.jit(jax.grad(g))(X))
    close(jax.jit(jax.hessian(f))(X), jax.jit(jax.hessian(g))(X))


def all_folds(depth):
    last, array = folds.at((1,) * depth), folds.at((jnp.array(-1),) * depth)
    others = [FOLDS[name][0] for name in ("last", "mean", "moments", "top_k", "stack", "weighted")]
    return {"h": (last, array, *others)}


@pytest.mark.parametrize("name", STATIC)
def test_all_folds_against_finite_differences(name):
    program = PROGRAMS[name]
    f = lambda x: total(capture(program, all_folds(len(program.loops)))(x))
    check_grads(jax.jit(f), (X,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", DYNAMIC)
def test_forward_mode_in_while_loops(name):
    program = PROGRAMS[name]
    reducers = {"h": tuple(r for r in all_folds(1)["h"][2:])}
    f = lambda x: total(capture(program, reducers)(x))
    check_grads(jax.jit(f), (X,), order=1, modes=["fwd"], atol=2e-2, rtol=2e-2)


def test_reverse_mode_in_while_loops_is_an_error_of_jax():
    f = lambda x: reap(PROGRAMS["while_loop"], {"h": folds.last()})(x)["h"].sum()
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(f)(X)


@pytest.mark.parametrize(
    "name", ["scan", "scan_of_checkpoint", "scan_of_cond", "scan_of_custom_vjp"]
)
def test_gradients_reach_the_arrays_of_a_fold(name):
    _, records = PROGRAMS[name].by_hand(X)
    values = sum(record.value for record in records)

    def f(weight):
        return reap(PROGRAMS[name], {"h": Weighted(weight)})(X)["h"][0].sum()

    close(jax.grad(f)(jnp.float32(2)), values.sum())


def test_cotangents_are_folded_in_the_order_of_the_forward_pass():
    def f(x):
        body = lambda x, c: (perturb(sow(jnp.sin(x), name="h"), name="ct") * c, None)
        return lax.scan(body, x, jnp.arange(1.0, 5.0))[0]

    x, cts = jnp.float32(0.4), []
    xs = [x]
    for c in (1, 2, 3, 4):
        xs.append(jnp.sin(xs[-1]) * c)
    for n, c in reversed(list(enumerate((1, 2, 3, 4)))):
        cts.insert(0, c * (jnp.cos(xs[n + 1]) * cts[0] if cts else 1))
    every = folds.every(2)
    for at in ((folds.at(1), folds.at(-1)), (folds.at(1), folds.at(-1), every)):
        select = {"h": (folds.at(0), folds.count()), "ct": at}
        got = reap(jax.grad(f), select)(x)
        close(got["h"], (jnp.sin(x), jnp.asarray(4)))
        close(got["ct"][:2], (cts[1], cts[3]))
    close(got["ct"][2], jnp.stack(cts[::2]))


def test_the_gradient_of_a_step_is_that_of_the_program_before_it():
    f = lambda x: reap(PROGRAMS["scan"], {"h": folds.at(0)})(x)["h"].sum()
    close(jax.grad(f)(X), jnp.cos(X))
