"""A wanted site in a primitive that cannot be opened is an error; any other leaves it alone."""

import functools
import re

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata

from harvest import UnsupportedError, add, capture, plant, reap, sites, sow
from tests.helpers import equinox_differentiates


def inside(x):
    return sow(x, name="inside")


LINE = f"test_unsupported.py:{inside.__code__.co_firstlineno + 1}"


def in_while_condition(x):
    return lax.while_loop(lambda x: jnp.sum(inside(x)) < 100, lambda x: 2 * x, x)


def in_pallas_call(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = inside(2 * x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(x)


def in_custom_linear_solve(x):
    return lax.custom_linear_solve(
        lambda v: inside(2 * v), x, lambda matvec, b: b / 2, symmetric=True
    )


def in_the_solver_of_custom_linear_solve(x):
    solve = lambda matvec, b: inside(b / 2)
    return lax.custom_linear_solve(lambda v: 2 * v, x, solve, symmetric=True)


def in_run_state(x):
    def body(ref):
        ref[...] = inside(2 * ref[...])

    return pl.run_state(body)(x)


def in_reduce(x):
    return lax.reduce(x, jnp.float32(0), lambda a, b: inside(a + b), (0,))


def in_reduce_window(x):
    add = lambda a, b: inside(a + 1 * b)  # otherwise JAX knows it as a sum
    return lax.reduce_window(x, jnp.float32(0), add, (2,), (1,), "SAME")


def in_scatter(x):
    return x.at[0].apply(lambda v: inside(2 * v))


def in_custom_partitioning(x):
    f = custom_partitioning(lambda x: inside(2 * x))
    f.def_partition(lambda *_: None, lambda *_: None, sharding_rule="i -> i")
    return f(x)


def in_noinline(x):
    return eqxi.noinline(lambda x: inside(2 * x))(x)


PROGRAMS = {
    in_while_condition: "while",
    in_pallas_call: "pallas_call",
    in_custom_linear_solve: "custom_linear_solve",
    in_the_solver_of_custom_linear_solve: "custom_linear_solve",
    in_run_state: "run_state",
    in_reduce: "reduce",
    in_reduce_window: "reduce_window",
    in_scatter: "scatter",
    in_custom_partitioning: "custom_partitioning",
    in_noinline: "noinline",
}
AROUND = {
    "itself": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.map(f, x[None])[0],
    "cond": lambda f: lambda x: lax.cond(x[0] > 0, f, f, x),
    "checkpoint": jax.checkpoint,
}
X = jnp.array([1.0, 2.0, 3.0, 4.0])


def whole(f, x):
    """A program with `f` between two sites that can be reached."""
    x = sow(x + 1, name="before")
    return sow(jnp.sum(f(x)), name="after")


TRANSFORMS = {
    "reap": lambda f: reap(f),
    "reap key": lambda f: reap(f, ["before", "inside"]),
    "capture": lambda f: capture(f),
    "plant": lambda f: plant(f, {"inside": jnp.negative}),
    "plant glob": lambda f: plant(f, {"*": jnp.negative}),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("f", PROGRAMS)
def test_a_wanted_site_is_an_error_that_names_it(f, transform):
    message = rf"'inside' \(sown at .*{re.escape(LINE)}\) is inside .*`{PROGRAMS[f]}"
    with pytest.raises(UnsupportedError, match=message):
        TRANSFORMS[transform](functools.partial(whole, f))(X)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("f", [in_while_condition, in_pallas_call, in_reduce])
def test_it_is_found_in_other_structures(f, around):
    message = rf"'inside' \(sown at .*{re.escape(LINE)}\) is inside .*`{PROGRAMS[f]}"
    with pytest.raises(UnsupportedError, match=message):
        reap(functools.partial(whole, AROUND[around](f)))(X)


@pytest.mark.parametrize("f", PROGRAMS)
def test_the_program_runs_untouched_where_the_site_is_not_wanted(f):
    program = functools.partial(whole, f)
    out = program(X)
    assert np.isfinite(out)
    acts = reap(program, ["before", "after"])(X)
    np.testing.assert_array_equal(acts["before"], X + 1)
    np.testing.assert_array_equal(acts["after"], out)
    np.testing.assert_array_equal(capture(program, "after")(X)[0], out)
    np.testing.assert_array_equal(plant(program, {"after": jnp.float32(3)})(X), 3)
    np.testing.assert_array_equal(plant(program, {"before": add(1.0)})(X), program(X + 1))


@pytest.mark.parametrize("f", PROGRAMS)
def test_the_primitive_stays_in_the_program(f):
    program = functools.partial(whole, f)
    captured = capture(program, ["before", "after"])
    for transformed in (program, captured, plant(program, {"after": jnp.float32(3)})):
        text = str(jax.make_jaxpr(transformed)(X))
        assert len(re.findall(rf"= {PROGRAMS[f]}\b", text)) == 1


@pytest.mark.parametrize("f", PROGRAMS)
def test_the_table_lists_it(f):
    table = sites(functools.partial(whole, f))(X)
    assert {site.key for site in table} == {"before", "inside", "after"}
    assert table["inside"].source.endswith(LINE)


def test_the_message_says_what_to_do():
    with pytest.raises(UnsupportedError, match="sow it in the body of the loop"):
        reap(in_while_condition)(X)
    with pytest.raises(UnsupportedError, match="sow its inputs or outputs instead"):
        reap(in_pallas_call)(X)


@equinox_differentiates
@pytest.mark.parametrize("transform", [jax.vmap, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_a_noinline_is_looked_into_under_transforms(transform):
    message = rf"'inside' \(sown at .*{re.escape(LINE)}\) is inside `noinline`"
    with pytest.raises(UnsupportedError, match=message):
        capture(transform(in_noinline))(X)
    model = eqx.nn.Lambda(lambda x: inside(2 * x))
    with pytest.raises(UnsupportedError, match=message):
        capture(lambda x: eqxi.noinline(model)(x, key=None))(X)


def test_metadata_contexts_keep_sites_reachable():
    def f(x):
        with set_xla_metadata(kind="marked"):
            x = inside(2 * x)
        return x + 1

    np.testing.assert_array_equal(reap(f)(X)["inside"], 2 * X)
    assert 'kind = "marked"' in jax.jit(capture(f)).lower(X).as_text()
