"""The runs of a sweep share what comes before the edited site."""

import collections
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import harvest
from harvest import UnsupportedError, add, reap, sites, sow, sweep
from tests.experiments import MANY, X, same, sown


class Counter(collections.Counter):
    """Counts for how many rows a value is computed, by layer."""

    def __call__(self, x, layer):
        def count(x, layer):
            with LOCK:  # XLA runs what is independent at the same time
                self[int(np.ravel(layer)[0])] += math.prod(x.shape[:-1])
            return np.asarray(x)

        return jax.pure_callback(count, x, x, layer, vmap_method="expand_dims")


LOCK = threading.Lock()
DEPTH, ROWS = 4, 5


def test_unrolled_layers_before_the_edited_one_run_once():
    runs = Counter()

    def f(x):
        for i in range(DEPTH):
            with harvest.scope(str(i)):
                x = sow(jnp.sin(runs(x, i)), name="h")
        return x

    jax.block_until_ready(sweep(f, None, lambda h, row: h * row, jnp.arange(1.0, 1 + ROWS))(X))
    assert runs == {i: 1 + ROWS * i for i in range(DEPTH)}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: jax.jit(f)(x))])
def test_iterations_before_the_edited_one_run_once(wrap):
    before, after, edits = Counter(), Counter(), Counter()

    def step(x, i):
        return after(sow(jnp.sin(before(x, i)), name="h"), i), None

    f = wrap(lambda x: lax.scan(step, x, jnp.arange(DEPTH))[0])
    edit = lambda h, row: edits(h * row, jnp.asarray(0))
    jax.block_until_ready(sweep(f, "h", edit, jnp.arange(1.0, 1 + ROWS))(X))
    assert before == {i: 2 + ROWS * i for i in range(DEPTH)}  # up to the site once more
    assert after == {i: 1 + ROWS * (i + 1) for i in range(DEPTH)}
    assert edits == {0: ROWS * DEPTH}


@pytest.mark.parametrize("name", ["reverse", "remat_of_scan", "custom_vjp_of_scan"])
def test_edits_run_only_in_the_iterations_that_they_edit(name):
    edits = Counter()
    edit = lambda h, row: edits(h * row, jnp.asarray(0))
    f = sown(MANY[name][0])
    jax.block_until_ready(sweep(f, "h", edit, jnp.arange(1.0, 1 + ROWS))(X))
    assert edits == {0: 3 * ROWS}


def test_half_of_the_work_of_a_vmap():
    w = jnp.ones((8, 64, 64))

    def f(x):
        for i in range(8):
            with harvest.scope(str(i)):
                x = sow(jnp.tanh(w[i] @ x), name="h")
        return x

    def flops(f, x):
        return jax.jit(f).lower(x).compile().cost_analysis()["flops"]

    rows = jnp.arange(16.0)
    swept = flops(sweep(f, None, lambda h, row: h + row, rows), jnp.ones(64))
    assert swept < 0.5 * flops(jax.vmap(f), jnp.ones((8 * len(rows), 64)))


def test_one_row_at_a_time_is_not_mapped():
    branches, calls = Counter(), []

    def f(x):
        x = sow(x, name="h")
        x = lax.cond(x[0] > 0, lambda x: branches(x, 0), lambda x: branches(x, 1), x)
        return io_callback(lambda x: calls.append(1) or np.asarray(x), x, x, ordered=True)

    rows = jnp.asarray([1.0, 2.0])
    got = sweep(f, "h", lambda h, row: h * row, rows, batch_size=1)(X)["h"]
    same(got, jnp.stack([X, 2 * X]))
    jax.effects_barrier()
    assert branches == {0: 1 + 2} and len(calls) == 1 + 2


def test_sites_keep_their_scopes():
    @jax.jit
    def inner(x):
        with harvest.scope("inner"):
            x = sow(x, name="a")
            step = jax.jit(lambda x, _: (sow(sow(x, name="b") + x, name="c"), None))
            return sow(lax.scan(step, x, length=2)[0], name="d")

    def f(x):
        with harvest.scope("outer"):
            x = inner(x)
        return sow(x, name="e")

    keys = ["outer/inner/a", "outer/inner/b", "outer/inner/c", "outer/inner/d", "e"]
    assert [site.key for site in sites(f)(X)] == keys
    for key in keys:
        assert {site.key for site in sites(sweep(f, key, add(1.0)))(X)} == set(keys)
    same(reap(sweep(f, "outer/inner/b", add(1.0)), "outer/inner/a")(X), {"outer/inner/a": X})


LOGARITHMS = {
    "flat": lambda x: jnp.log(sow(x, name="h")),
    "scan": lambda x: lax.scan(lambda x, _: (jnp.log(sow(x, name="h")), None), x, length=1)[0],
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_a_nan_is_located(name):
    f = sweep(LOGARITHMS[name], "h", lambda h, row: h - row, jnp.asarray([0.0, 0.1, 5.0]))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="nan") as caught:
            f(X)
    line = LOGARITHMS[name].__code__.co_firstlineno
    assert any(f"test_fork.py:{line}" in note for note in caught.value.__notes__)


def test_experiments_share_no_reference():
    def f(x):
        total = jax.new_ref(jnp.float32(0))
        total[...] += 1.0
        h = sow(x, name="h")
        total[...] += 1.0
        return h * total[...]

    with pytest.raises(UnsupportedError, match=r"behind the site 'h' .*reference.*test_fork.py:"):
        sweep(f, "h", add(1.0))(X)
