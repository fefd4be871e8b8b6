import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    DuplicateSiteError,
    UnknownSiteError,
    UnsupportedError,
    add,
    at,
    attribute,
    plant,
    reap,
    sow,
    sweep,
    zero,
)
from tests.experiments import MANY, X, by_hand, same, sown
from tests.helpers import PROGRAMS, SIZE

AXES = {"pos": [0, SIZE - 1], "by": [-1.0, 0.5, 2.0]}
GRID = harvest.grid(**{name: jnp.asarray(items) for name, items in AXES.items()})


def patch(h, source, row):
    return h.at[row["pos"]].set(row["by"] * source[row["pos"]])


def scaled(h, row):
    return h.at[row["pos"]].multiply(row["by"])


# ------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("name", MANY)
def test_a_grid_is_a_loop_over_edited_programs(name):
    program, loops = MANY[name]
    source = jnp.cos(jnp.arange(math.prod(loops) * SIZE)).reshape(*loops, SIZE)
    got = sweep(sown(program), {"h": source}, patch, GRID, batch_size=4)(X)
    same(got, {"h": by_hand(program, loops, X, patch, source, axes=AXES)})


@pytest.mark.parametrize("name", ["jit", "scan_of_remat", "scan_of_scan"])
def test_what_reap_returned_is_a_source(name):
    program, loops, values = PROGRAMS[name]
    got = sweep(sown(program), reap(sown(program))(2 * X), patch, GRID)(X)
    same(got, {"h": by_hand(program, loops, X, patch, values(2 * X), axes=AXES)})


def several(x, site):
    x = site(jnp.sin(x), None, "before")

    def step(x, i):
        first = site(jnp.cos(x), i, "first")
        return site(first * x, i, "second"), jnp.mean(first)

    x, ys = lax.scan(step, x, jnp.arange(3))
    x = site(x * jnp.sum(ys), None, "between")
    later = lambda x, i: (site(jnp.sin(x) * x, i, "later") + x / 2, None)
    x = jax.jit(lambda x: lax.scan(later, x, jnp.arange(3))[0])(x)
    return {"x": site(x, None, "after"), "ys": ys}


LOOPS = {"before": (), "first": (3,), "second": (3,), "between": (), "later": (3,), "after": ()}


def test_sites_are_edited_one_at_a_time_in_call_order():
    got = sweep(sown(several), None, scaled, GRID)(X)
    assert list(got) == list(LOOPS)
    for key, loops in LOOPS.items():
        same(got[key], by_hand(several, loops, X, scaled, axes=AXES, key=key))
    some = sweep(sown(several), ("later", "fir*"), scaled, GRID)(X)
    assert list(some) == ["first", "later"]
    same(some, {key: got[key] for key in some})


@jax.jit
def layer(x):
    return jnp.cos(sow(jnp.sin(x) * x, name="h")) + x / 2


def layers(x):
    for i in range(4):
        with harvest.scope(f"layers/{i}"):
            x = layer(x)
    return x


def test_unrolled_layers_are_those_of_a_scan():
    got = harvest.stacked(sweep(layers, None, scaled, GRID)(X), "layers/*/h")
    program, loops = MANY["scan_of_four_unrolled"]
    same(got, by_hand(program, loops, X, scaled, axes=AXES))


def test_a_loop_without_iterations():
    f = lambda x: lax.scan(lambda x, i: (sow(x, name="h"), i), x, jnp.arange(0))
    source, edit = reap(f)(X), lambda h, source, row: h + source
    out, ys = sweep(f, source, edit, GRID)(X)["h"]
    assert out.shape == (0, 2, 3, SIZE) and ys.shape == (0, 2, 3, 0)
    assert attribute(lambda x: jnp.sum(f(x)[0]), source, edit, GRID)(X)["h"].shape == (0, 2, 3)
    nested = lambda x: lax.scan(lambda x, _: (f(x)[0], None), x, length=3)[0]
    assert sweep(nested, reap(nested)(X), edit, GRID)(X)["h"].shape == (3, 0, 2, 3, SIZE)


DTYPES = [jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int8, jnp.uint32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype):
    program = lambda x, site: lax.scan(lambda x, i: (site(x + x, i), None), x, jnp.arange(3))[0]
    edit = lambda h, row: h.at[row["pos"]].set(h[1])
    x = jnp.arange(SIZE).astype(dtype)
    got = sweep(sown(program), "h", edit, {"pos": jnp.arange(SIZE)})(x)["h"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(
        got, by_hand(program, (3,), x, edit, axes={"pos": list(range(SIZE))})
    )


def test_pytrees():
    def f(x):
        h = sow({"x": x, "n": jnp.int32(3), "static": ("s", 2, None)}, name="h")
        out = h["x"] * h["n"].astype(x.dtype)
        return {"out": [out], "n": h["n"], "static": h["static"], "fn": jnp.tanh, "pi": 3.14}

    edit = lambda h, row: {**h, "x": h["x"] + row, "n": h["n"] + 1}
    got = sweep(f, "h", edit, jnp.arange(2.0))(X)["h"]
    same(got.pop("out"), [jnp.stack([4 * X, 4 * (X + 1)])])
    assert got.pop("n").tolist() == [4, 4]
    assert got == {"static": ("s", 2, None), "fn": jnp.tanh, "pi": 3.14}


# ------------------------------------------------------------------------------------ transforms

TRANSFORMS = {
    "jit": lambda f, xs: jnp.stack([jax.jit(f)(x) for x in xs]),
    "vmap": lambda f, xs: jax.vmap(f)(xs),
    "jit of vmap": lambda f, xs: jax.jit(jax.vmap(f))(xs),
    "vmap of jit": lambda f, xs: jax.vmap(jax.jit(f))(xs),
    "vmap, axis 1": lambda f, xs: jax.vmap(f, in_axes=1)(xs.T),
    "map": lax.map,
    "jvp": lambda f, xs: jax.jvp(jax.vmap(f), (xs,), (xs,))[0],
}


@pytest.mark.parametrize("name", ["scan", "remat_of_scan"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_a_sweep(transform, name):
    f = sweep(sown(PROGRAMS[name].fn), "h", scaled, GRID)
    xs = jnp.stack([X, 2 * X])
    got = TRANSFORMS[transform](lambda x: f(x)["h"], xs)
    same(got, jnp.stack([f(x)["h"] for x in xs]))


@pytest.mark.parametrize("program", [PROGRAMS["custom_jvp"].fn, PROGRAMS["scan"].fn, several])
def test_forward_mode(program):
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(X, np.float64))
        axes = {"pos": jnp.arange(2), "by": jnp.asarray([0.5, 2.0])}
        f = sweep(sown(program), None, scaled, harvest.grid(**axes))
        tangent, eps = jnp.linspace(-1, 2, SIZE), 1e-5
        got = jax.jvp(f, (x,), (tangent,))[1]
        above, below = f(x + eps * tangent), f(x - eps * tangent)
        same(got, jax.tree.map(lambda a, b: (a - b) / (2 * eps), above, below), rtol=1e-6)


REVERSE = {
    "grad": jax.grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x[None]))),
    "grad of map": lambda f: jax.grad(lambda x: jnp.sum(lax.map(f, x[None]))),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1)),
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("name", ["plain", "scan"])
@pytest.mark.parametrize("reverse", REVERSE)
def test_there_is_no_reverse_mode(reverse, name):
    f = sweep(sown(PROGRAMS[name].fn), "h", scaled, GRID)
    with pytest.raises(UnsupportedError, match=r"no reverse-mode.*`harvest.attribute`.*`jax.vmap`"):
        REVERSE[reverse](lambda x: jnp.sum(f(x)["h"]))(X)


def test_results_may_be_constants_to_a_derivative():
    f = sweep(sown(PROGRAMS["scan"].fn), "h", scaled, GRID)
    loss = lambda x: jnp.sum(x) * lax.stop_gradient(jnp.sum(f(x)["h"]))
    same(jax.grad(loss)(X), jnp.full(SIZE, jnp.sum(f(X)["h"])))


def test_other_transforms_inside():
    f = sown(several)
    frozen = plant(f, {"between": add(1.0)})
    by = jnp.asarray([0.5, 2.0])
    edit = lambda h, row: h * row
    for inner in (frozen, reap(f, ["between", "later"]), jax.grad(lambda x: jnp.sum(f(x)["x"]))):
        got = sweep(inner, "first", edit, by)(X)["first"]
        for i, k in [(0, 0), (2, 1)]:
            wanted = plant(inner, {"first": at(i, lambda h, k=k: edit(h, by[k]))})(X)
            same(jax.tree.map(lambda x, i=i, k=k: x[i, k], got), wanted)


# --------------------------------------------------------------------------------------- staging

COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


def test_new_values_neither_retrace_nor_recompile():
    traces = []

    def f(x):
        traces.append(1)
        return jnp.sum(sown(several)(x)["x"])

    def interpolate(by, h, source, row):
        return h + by * row["k"] * (source - h)

    for i in range(3):
        full = lambda *shape, i=i: np.full(shape, i, np.float32)
        source = {"before": full(SIZE), "first": full(3, SIZE)}
        edit = {"first": jax.tree_util.Partial(interpolate, full(SIZE)), "*": add(float(i))}
        grid = harvest.grid(k=full(4))
        sweep(f, source, edit, grid)(full(SIZE))
        attribute(f, source, edit, grid)(full(SIZE))
        sweep(f, IS_AFTER, zero())(full(SIZE))
        if i == 0:
            compiled = len(COMPILED)
    assert len(traces) == 1
    assert len(COMPILED) == compiled


IS_AFTER = lambda site: site.key == "after"


# -------------------------------------------------------------------------------- what is refused


def twice(x):
    return sow(sow(x, name="h") + 1, name="h")


def in_a_while(x):
    return lax.while_loop(lambda x: x[0] < 5, lambda x: sow(x + 1, name="h"), x)


def in_a_predicate(x):
    return lax.while_loop(lambda x: sow(x, name="h")[0] < 5, lambda x: x + 1, x)


def in_branches(x):
    """A vector in one of them, a number in the other."""
    other = lambda x: x * sow(x[0], name="h")
    return lax.cond(x[0] > 0, lambda x: lax.map(lambda x: sow(x, name="h"), x), other, x)


def in_a_solve(x):
    solve = lambda matvec, b: matvec(b)
    return lax.custom_linear_solve(lambda x: sow(x, name="h"), x, solve)


REFUSED = [
    (lambda x: sow(x, name="g"), UnknownSiteError, r"the key 'h' matches no site; .*'g' \(sown at"),
    (twice, DuplicateSiteError, r"'h' is sown 2 times:\n.*test_sweep.py:\d+ \(2 times\)\n"),
    (in_a_while, UnsupportedError, r"'h' \(sown at .*test_sweep.py.* is inside a `while_loop`"),
    (in_a_predicate, UnsupportedError, "is inside the predicate of a `while_loop`"),
    (in_branches, UnsupportedError, "in some branches of a `cond` only.*sow it in every branch"),
    (in_a_solve, UnsupportedError, "inside `custom_linear_solve`, which cannot be opened"),
]


@pytest.mark.parametrize("fn, kind, message", REFUSED)
@pytest.mark.parametrize("transform", [sweep, attribute])
def test_programs_that_are_refused(transform, fn, kind, message):
    with pytest.raises(kind, match=f"`{transform.__name__}`: .*{message}"):
        transform(fn, "h", zero())(X)
    with pytest.raises(kind, match=message):
        jax.jit(transform(fn, "h", zero()))(X)


def test_a_site_of_one_branch_is_edited_where_it_runs():
    def f(x):
        return lax.cond(x[0] > 0, lambda x: jnp.cos(sow(x, name="h")), jnp.sin, x)

    swept = sweep(f, "h", lambda h, row: h + row, jnp.arange(2.0))
    x = jnp.ones(SIZE)
    same(swept(x), {"h": jnp.stack([jnp.cos(x), jnp.cos(x + 1)])})
    same(swept(-x), {"h": jnp.stack([jnp.sin(-x)] * 2)})


def test_in_forward_mode():
    """By hand: one site, `h = 3 * x`, and the result is `(h + k) ** 2`."""
    f = lambda x: sow(3 * x, name="h") ** 2
    swept = lambda x: sweep(f, "h", lambda h, k: h + k, jnp.array([1.0, 2.0]))(x)["h"]
    x, t = jnp.float32(1.0), jnp.float32(1.0)
    np.testing.assert_allclose(jax.linearize(swept, x)[1](t), [24.0, 30.0])
    np.testing.assert_allclose(jax.jvp(swept, (x,), (t,))[1], [24.0, 30.0])
