"""What is not a part of the traced program is told of where it can be, and documented otherwise."""

import equinox.internal as eqxi
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback, jet

from harvest import HarvestWarning, UnsupportedError, capture, perturb, plant, reap, sites, sow

X = jnp.array([1.0, 2.0, 3.0])


def inside(x):
    return sow(2 * x, name="inside")


def fresh():
    """`inside`, in a function that JAX has not compiled before."""
    return jax.jit(lambda x: inside(x))


LINE = f"test_unseen.py:{inside.__code__.co_firstlineno + 1}"


def whole(f):
    """A program with `f` between two sites that can be reached."""
    return lambda x: sow(f(sow(x, name="before")), name="after")


def in_jet(x):
    return jet.jet(inside, (x,), ((x,),))[0]


def in_a_compilation(x):
    fresh().lower(x).compile()
    return 2 * x


def in_an_export(x):
    return jax.export.export(fresh())(x).call(x)


def under_compile_time_eval(x):
    with jax.ensure_compile_time_eval():
        two = fresh()(jnp.ones(()))
    return two * x


@pytest.mark.parametrize(
    "f", [in_jet, in_a_compilation, in_an_export, under_compile_time_eval], ids=lambda f: f.__name__
)
def test_a_sow_that_is_lost_on_the_way_is_a_warning(f):
    with pytest.warns(HarvestWarning, match=rf"'inside' \(sown at .*{LINE}\) cannot be seen"):
        out, acts = capture(whole(f))(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert list(acts) == ["before", "after"]
    np.testing.assert_array_equal(acts["after"][0], 2 * X)
    # Without any transform of harvest there is nothing to warn of.
    np.testing.assert_array_equal(jax.jit(whole(f))(X), 2 * X)


def in_a_callback(x):
    return jax.pure_callback(lambda x: np.asarray(inside(x)), jax.typeof(x), x)


def in_a_noinline_with_an_abstraction_of_its_own(x):
    return eqxi.noinline(inside, lambda _, x: x)(x)


exported = jax.export.export(jax.jit(inside))(X)
compiled_before = exported.call


@pytest.mark.parametrize(
    "f", [in_a_callback, in_a_noinline_with_an_abstraction_of_its_own, compiled_before]
)
def test_what_jax_does_not_trace_is_untouched(f):
    """The exceptions that the documentation of `sow` lists."""
    program = whole(f)
    out, acts = capture(program)(X)
    np.testing.assert_array_equal(out, 2 * X)
    assert list(acts) == ["before", "after"]
    assert [site.key for site in sites(program)(X)] == ["before", "after"]
    np.testing.assert_array_equal(plant(program, {"before": X + 1})(X), 2 * (X + 1))
    np.testing.assert_array_equal(reap(jax.jit(program), "after")(X)["after"], 2 * X)
    assert str(jax.make_jaxpr(capture(program))(X)).count("after") == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_around_sites_run_once(ordered):
    seen = []

    def f(x):
        x = sow(2 * x, name="h")
        io_callback(lambda x: seen.append(np.asarray(x)), None, x, ordered=ordered)
        return sow(jax.pure_callback(lambda x: np.asarray(x) + 1, jax.typeof(x), x), name="g")

    for run, wanted in (
        (capture(f), (2 * X + 1, {"h": (2 * X,), "g": (2 * X + 1,)})),
        (jax.jit(capture(f)), (2 * X + 1, {"h": (2 * X,), "g": (2 * X + 1,)})),
        (reap(f, "h"), {"h": 2 * X}),
        (plant(f, {"h": 2 * X}), 2 * X + 1),
    ):
        seen.clear()
        jax.tree.map(np.testing.assert_array_equal, run(X), wanted)
        jax.effects_barrier()
        np.testing.assert_array_equal(seen, [2 * X])


def forward(tag, x):
    return linear_call(lambda r, x: tag(r * x), lambda r, ct: r * ct, 2.0, x)


def backward(tag, x):
    call = lambda x: linear_call(lambda r, x: r * x, lambda r, ct: tag(r * ct), 2.0, x)
    return jax.grad(lambda x: jnp.sum(call(x)))(x)


@pytest.mark.parametrize("tag", [sow, perturb])
@pytest.mark.parametrize("program", [forward, backward])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, capture, jax.checkpoint])
def test_a_sow_in_a_linear_call_is_an_error_at_once(tag, program, transform):
    marked = lambda x: tag(x, name="h")
    line = f"test_unseen.py:{marked.__code__.co_firstlineno}"
    message = rf"`{tag.__name__}\(.*'h'\)` at .*{line} is inside a `linear_call`"
    with pytest.raises(UnsupportedError, match=message):
        transform(lambda x: program(marked, x))(X)


def test_sites_around_a_linear_call_are_reached():
    f = whole(lambda x: forward(lambda x: x, x))
    assert "linear_call" in str(jax.make_jaxpr(capture(f))(X))
    grad, acts = capture(jax.grad(lambda x: jnp.sum(f(x))))(X)
    np.testing.assert_array_equal(grad, np.full(3, 2.0))
    np.testing.assert_array_equal(acts["before"][0], X)
    np.testing.assert_array_equal(acts["after"][0], 2 * X)
    np.testing.assert_array_equal(plant(f, {"before": X + 1})(X), 2 * (X + 1))
