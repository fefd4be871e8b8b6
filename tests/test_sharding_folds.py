"""Folds of values on a mesh have the sharding of what they fold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import folds, reap, sow

from .helpers import LENGTH, PROGRAMS
from .meshes import MESHES, P, X, check_same, on_meshes, on_two, put, sown

FOLDS = {
    "last": (folds.last(), lambda hs: hs[-1]),
    "at": (folds.at(1), lambda hs: hs[1]),
    "at traced": (folds.at(jnp.asarray(-2)), lambda hs: hs[1]),
    "mean": (folds.mean(), lambda hs: hs.mean(axis=0)),
    "maximum": (folds.maximum(), lambda hs: hs.max(axis=0)),
    "variance": (folds.moments(), lambda hs: folds.Moments(hs.mean(axis=0), hs.var(axis=0))),
    "every": (folds.every(2), lambda hs: hs[::2]),
    "of": (folds.last().of(lambda h: h.sum(axis=-1)), lambda hs: hs[-1].sum(axis=-1)),
    "function": (lambda h: h.sum(axis=0), lambda hs: hs.sum(axis=1)),
}


@on_meshes
@pytest.mark.parametrize("fold, by_hand", FOLDS.values(), ids=FOLDS)
def test_folds_have_the_sharding_of_what_they_fold(fold, by_hand, mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    got = reap(sown(program), {"h": fold})(x)["h"]
    check_same(got, jax.jit(lambda x: by_hand(program.values(x)))(x))


@on_two
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("in_axis", [0, 1])
def test_folds_of_batches_over_a_sharded_axis(name, in_axis, mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    fold, by_hand = FOLDS[name]
    got = reap(jax.vmap(sown(program), in_axis), {"h": fold})(x)["h"]
    of_example = lambda x: by_hand(program.values(x))
    out_axis = 1 if name == "function" else 0  # it is stacked, and loop axes come first
    check_same(got, jax.jit(jax.vmap(of_example, in_axis, out_axis))(x))


@on_two
def test_counts_and_histograms(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    bins = [-1.0, 0.0, 0.5, 9.0]
    batched = jax.vmap(sown(program))
    select = {"h": (folds.count(), folds.histogram(bins), folds.top_k(2), folds.stack(4))}
    count, histogram, top, stack = reap(batched, select)(x)["h"]
    hs = np.asarray(program.values(X)).swapaxes(0, 1)
    assert count.tolist() == [LENGTH] * 8
    np.testing.assert_array_equal(histogram, [np.histogram(h, bins)[0] for h in hs])
    np.testing.assert_allclose(top.values, np.sort(hs, axis=1)[:, :0:-1], rtol=1e-6)
    np.testing.assert_allclose(stack.values[:, :LENGTH], hs, rtol=1e-6)
    one = reap(sown(program), {"h": folds.histogram(bins)})(x)["h"]
    np.testing.assert_array_equal(one, np.histogram(hs, bins)[0])


@on_two
def test_batches_of_a_loop_in_which_lanes_stop(mesh):
    def f(x):
        def body(state):
            n, v = state
            return n + 1, sow(v / 2, name="h")

        return lax.while_loop(lambda s: s[0] < s[1].sum(), body, (0 * x.sum(), x))[1]

    x = put(4 * X, mesh, "d")
    select = {"h": (folds.last(), folds.count())}
    last, count = reap(jax.vmap(f), select)(x)["h"]
    for row, got, times in zip(4 * X, last, count, strict=True):
        n = 0
        while n < row.sum():
            n, row = n + 1, row / 2
        assert times == n
        np.testing.assert_allclose(got, row if n else 0 * row, rtol=1e-6)
    if mesh is MESHES["explicit"]:
        assert jax.typeof(last).sharding.spec == P("d", None)
        assert jax.typeof(count).sharding.spec == P("d")


class SumOfSquares(harvest.Fold):
    def init(self, aval):
        return jnp.zeros(aval.shape, aval.dtype)

    def update(self, state, value, index):
        return state + value**2


@on_two
def test_a_fold_of_ones_own_need_not_know_of_shardings(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    got = reap(sown(program), {"h": SumOfSquares()})(x)["h"]
    check_same(got, jax.jit(lambda x: (program.values(x) ** 2).sum(axis=0))(x))
