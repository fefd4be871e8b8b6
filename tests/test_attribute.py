import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import GradError, UnsupportedError, attribute, per_example, reap, sow, sweep, zero
from tests.experiments import MANY, X, by_hand, same, sown
from tests.helpers import PROGRAMS, SIZE, scan


def total(program, of=lambda x: x):
    """A scalar of the results of a program."""

    def fn(*args):
        leaves = jax.tree.leaves(program(*args))
        return sum(jnp.sum(of(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    return fn


# ------------------------------------------------------------------------------------- estimates


def linear(x, site):
    """Linear in each of its sites."""
    step = lambda x, i: (x / 2 - site(x * (i + 1).astype(x.dtype), i)[::-1], None)
    return jnp.flip(lax.scan(step, x, jnp.arange(3))[0])


AXES = {"pos": [0, SIZE - 1], "by": [-1.0, 0.5, 2.0]}
GRID = harvest.grid(**{name: jnp.asarray(items) for name, items in AXES.items()})
LINEAR = {
    **{k: (p.fn, p.loops) for k, p in PROGRAMS.items() if not p.loops},
    "scan": (linear, (3,)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_it_is_exact_where_the_program_is_linear(name):
    program, loops = LINEAR[name]
    source = jnp.cos(jnp.arange(SIZE * max(1, *loops, 1))).reshape(*loops, SIZE)
    edit = lambda h, source, row: h.at[row["pos"]].set(jnp.sin(row["by"] * source[row["pos"]]))
    got = attribute(total(sown(program)), {"h": source}, edit, GRID, batch_size=4)(X)
    same(got, {"h": by_hand(total(program), loops, X, edit, source, axes=AXES)})


# Without a derivative: a `while_loop`, and a `stop_gradient` around the site.
SMOOTH = [name for name in MANY if name not in ("between_loops", "derivative")]


@pytest.mark.parametrize("name", SMOOTH)
def test_errors_are_of_second_order(name):
    program, loops = MANY[name]
    edit = lambda h, row: h.at[row["pos"]].add(row["by"] * (1 + h[0]))
    axes = {"by": [1e-3, 5e-4], "pos": [0, SIZE - 1]}
    with jax.enable_x64(True):
        x = jnp.linspace(0.4, 1.3, SIZE)
        grid = harvest.grid(**{name: jnp.asarray(items) for name, items in axes.items()})
        got = attribute(total(sown(program), jnp.tanh), "h", edit, grid)(x)["h"]
        exact = by_hand(total(program, jnp.tanh), loops, x, edit, axes=axes)
    assert got.shape == exact.shape
    far, near = np.linalg.norm(np.moveaxis(got - exact, len(loops), 0).reshape(2, -1), axis=1)
    assert far > 1e-8
    assert 3.8 < far / near < 4.2


def test_a_derivative_may_be_what_is_estimated():
    loss = lambda x: jnp.sum(jnp.sin(sow(jnp.sin(x), name="h")))  # its derivative: cos(h) cos(x)
    got = attribute(total(jax.grad(loss)), "h", lambda h, row: h + row, jnp.asarray([0.1, 2.0]))(X)
    slope = -jnp.sin(jnp.sin(X)) * jnp.cos(X)
    wanted = total(jax.grad(loss))(X) + jnp.sum(slope) * jnp.asarray([0.1, 2.0])
    same(got["h"], wanted)


def test_an_estimate_has_derivatives():
    estimate = attribute(lambda x: jnp.sum(sow(x, name="h") ** 3), "h", lambda h, row: row * h, X)
    same(estimate(X), {"h": jnp.sum(X**3) + 3 * (X - 1) * jnp.sum(X**3)})
    same(jax.grad(lambda x: jnp.sum(estimate(x)["h"]))(X), 3 * X**2 * jnp.sum(1 + 3 * (X - 1)))


def test_edits_need_no_derivative():
    rounded = lambda h: jax.pure_callback(np.round, h, h)
    got = attribute(total(sown(PROGRAMS["plain"].fn)), "h", rounded)(X)
    same(got, {"h": jnp.sum(X * np.round(jnp.sin(X) * X))})


def test_one_forward_and_one_backward_pass():
    runs = []

    @jax.custom_jvp
    def counted(x):
        return jax.pure_callback(lambda x: runs.append(1) or np.asarray(x), x, x)

    counted.defjvp(lambda primals, tangents: (counted(*primals), *tangents))
    step = lambda x, _: (counted(jnp.sin(sow(x, name="h"))), None)
    f = total(lambda x: lax.scan(step, x, length=3)[0])
    jax.block_until_ready(attribute(f, "h", lambda h, row: h * row, jnp.arange(5.0))(X))
    assert len(runs) == 3


# ---------------------------------------------------------------------------------------- types


def test_it_has_the_shapes_of_a_sweep():
    f = total(sown(scan))
    edit = lambda h, *row: h * sum([jnp.sum(x).astype(h.dtype) for x in jax.tree.leaves(row)])
    for grid in (
        None,
        X,
        {"a": X, "b": [jnp.ones((4, 2))]},
        GRID,
        harvest.grid(a=jnp.ones((1, 3))),
    ):
        got, swept = (t(f, "h", edit, grid)(X)["h"] for t in (attribute, sweep))
        assert got.shape == swept.shape and got.dtype == swept.dtype


TYPES = [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.float16, jnp.float16)]


@pytest.mark.parametrize("of_site, of_result", TYPES)
def test_sites_of_another_type_than_the_result(of_site, of_result):
    f = lambda x: jnp.sum(2 * sow(x.astype(of_site), name="h").astype(of_result))
    x = jnp.arange(4.0)
    got = attribute(f, "h", lambda h, row: h + row.astype(of_site), jnp.asarray([0.0, 8.0]))(x)["h"]
    assert got.dtype == of_result and got.tolist() == [12, 12 + 2 * 4 * 8]


def test_complex_sites():
    c = lax.complex(X, -2 * X)
    f = lambda z: jnp.sum(jnp.real(c * sow(z * 1j, name="h")) + jnp.imag(z))
    edit = lambda h, row: h.at[row].set(lax.complex(1.0, 2.0))
    args = (f, "h", edit, jnp.arange(SIZE))
    same(attribute(*args)(c), sweep(*args)(c))


def test_leaves_without_a_derivative_count_nothing():
    def f(x):
        h = sow({"x": x, "n": jnp.int32(3), "key": jax.random.key(0), "static": "s"}, name="h")
        return jnp.sum(h["x"]) * h["n"].astype(x.dtype)

    edit = lambda h, row: {**h, "x": h["x"] + row, "n": h["n"] + 1}
    got = attribute(f, "h", edit, jnp.arange(2.0))(jnp.ones(4))["h"]
    assert got.tolist() == [12, 12 + 3 * 4]
    only = lambda x: jnp.sum(x) * sow(jnp.int32(3), name="h").astype(x.dtype)
    with pytest.raises(GradError, match=r"'h' .* has no real or complex numbers.*`harvest\.sweep`"):
        attribute(only, "h", zero())(jnp.ones(4))


def test_what_is_left_alone_may_be_infinite():
    def f(scores):
        masked = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), scores, -jnp.inf)
        return jnp.sum(jax.nn.softmax(sow(masked, name="scores")) * jnp.arange(3.0)[None])

    scores = jax.random.normal(jax.random.key(0), (3, 3))
    shift = 1e-3 * jnp.eye(3)
    got = attribute(f, "scores", lambda s, row: s.at[2].add(row), shift)(scores)["scores"]
    exact = [f(scores.at[2].add(row)) for row in shift]
    np.testing.assert_allclose(got, jnp.stack(exact), rtol=1e-5)


def test_values_without_arrays():
    f = lambda x: jnp.sum(sow(x, name="g")) * sow({"n": 3}, name="h")["n"]
    got = attribute(f, None, lambda h, row: {**h} if isinstance(h, dict) else h + row, X)(X)
    same(got, {"g": 3 * (jnp.sum(X) + SIZE * X), "h": jnp.full(SIZE, 3 * jnp.sum(X))})


def test_values_that_the_function_collects_itself():
    f = lambda x: jnp.sum(sow(2 * sow(x, name="a"), name="b"))
    some = lambda x: jnp.sum(reap(f, "b")(x)["b"])
    same(attribute(some, "a", zero())(X), {"a": jnp.float32(0)})
    every = lambda x: jnp.sum(reap(f)(x)["b"])
    same(sweep(every, "a", zero())(X), {"a": jnp.float32(0)})
    with pytest.raises(UnsupportedError, match=r"'a' \(sown at .* collected inside .* by `reap`"):
        attribute(every, "a", zero())(X)


RESULTS = [
    (lambda x: x, r"f32\[4\]"),
    (lambda x: lax.complex(x[0], x[1]), r"c64\[\]"),
    (lambda x: jnp.sum(x).astype(int), r"i32\[\]"),
    (lambda x: (jnp.sum(x), 1), "a `tuple`"),
    (lambda x: None, "a `NoneType`"),
]


@pytest.mark.parametrize("of, got", RESULTS)
def test_results_that_are_no_real_scalar(of, got):
    with pytest.raises(GradError, match=f"`attribute` got {got} as a result; wanted a real sc"):
        attribute(lambda x: of(sow(x, name="h")), "h", zero())(X)


# -------------------------------------------------------------------------------------- batches

XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)
BATCHES = {
    "0": lambda f: jax.vmap(f),
    "1": lambda f: lambda xs: jax.vmap(f, in_axes=1)(xs.T),
    "jit": lambda f: jax.jit(jax.vmap(jax.jit(f))),
    "remat": lambda f: jax.checkpoint(jax.vmap(f)),
}


@pytest.mark.parametrize("batched", BATCHES)
def test_batches_are_edited_together(batched):
    one, f = total(sown(scan)), total(BATCHES[batched](sown(scan)))
    at = jnp.asarray([[0, 1], [2, 2], [3, 0]])
    by = jnp.asarray([0.5, 2.0])
    edit = lambda h, source, row: h.at[row["at"]].set(row["by"] * source[row["at"]])
    grid = harvest.grid(at=per_example(at), by=by)
    got = attribute(f, reap(f)(2 * XS), edit, grid, batch_size=4)(XS)["h"]
    mine = lambda b: harvest.grid(at=at[:, b], by=by)
    alone = (attribute(one, reap(one)(2 * XS[b]), edit, mine(b))(XS[b])["h"] for b in range(2))
    same(got, sum(alone))


@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])["h"][0]])
def test_transforms_of_an_estimate(transform):
    f = attribute(total(sown(scan)), "h", lambda h, row: h * row, np.asarray(X))
    got = transform(f)(X)
    same(got["h"] if isinstance(got, dict) else got, f(X)["h"])
