"""`debug.nonfinite(eqns=True)` names the equation that makes the first NaN: planted by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import harvest
from harvest import HarvestWarning, debug, sow

from .meshes import MESHES

X = np.array([0.5, 1.0, 1.5, 2.0], np.float32)
LAYERS, EXAMPLES, WIDTH = 12, 5, 3
INPUTS = np.linspace(-1, 1, EXAMPLES * WIDTH, dtype=np.float32).reshape(EXAMPLES, WIDTH)
WEIGHTS = np.full((LAYERS, WIDTH, WIDTH), 0.1, np.float32)
FINE = np.ones((EXAMPLES, LAYERS, WIDTH), np.float32)


def watch(fn, **options):
    return debug.nonfinite(fn, eqns=True, **options)


def line(fn, text):
    """The file and line of some source: the first that has the text."""
    lines, start = inspect.getsourcelines(fn)
    number = next(i for i, each in enumerate(lines) if text in each)
    return f"{__file__}:{start + number}"


# --------------------------------------------- a scanned, vmapped and differentiated model


def layer(x, row):
    w, z = row
    h = jnp.tanh(w @ x)
    return h + jnp.log(h * 0 + z), None


def loss(w, x, z):
    model = lambda x, z: lax.scan(layer, x, (w, z))[0].sum()
    return jnp.mean(jax.vmap(model)(x, z))


STEPS = {
    "forward": loss,
    "grad": jax.grad(loss),
    "jit of grad": jax.jit(jax.value_and_grad(loss)),
    "grad of jit": jax.grad(jax.jit(loss)),
    "checkpoint": jax.grad(jax.checkpoint(loss)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_nan_in_a_layer(name):
    fn = watch(STEPS[name])
    assert not fn(WEIGHTS, INPUTS, FINE)
    for example, number, unit in [(3, 7, 2), (0, 0, 0), (4, 11, 1)]:
        bad = FINE.copy()
        bad[example, number, unit] = -1
        (fault,) = fn(WEIGHTS, INPUTS, bad)
        assert (fault.primitive, fault.kind, fault.index) == ("log", "equation", (number,))
        assert fault.source == line(layer, "jnp.log")
        assert (fault.lane, fault.shard, fault.element) == ((), {}, (example, unit))
        assert fault.value.nan and fault.value.low == fault.value.high == 0  # log of 1
        assert any((value.low, value.high, value.nan) == (-1, 1, False) for value in fault.inputs)


def test_the_first_of_several_layers():
    bad = FINE.copy()
    bad[1, 9, 0] = bad[4, 7, 1] = bad[2, 10, 2] = -1
    (fault,) = watch(jax.grad(loss))(WEIGHTS, INPUTS, bad)
    assert (fault.index, fault.element) == ((7,), (4, 1))


def test_a_nan_that_only_the_backward_pass_makes():
    def f(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), 0.0))

    x = np.array([4.0, 0.0, 1.0], np.float32)
    assert not watch(f)(x)
    (fault,) = watch(jax.grad(f))(x)  # the derivative of the root is infinite there, times 0
    assert fault.primitive == "mul" and fault.element == (1,)
    (fault,) = watch(jax.grad(f), infinities=True)(x)
    assert fault.primitive == "div" and fault.value.inf and fault.element == (1,)


def test_the_backward_scan_runs_in_reverse():
    def f(w):
        step = lambda x, w: (jnp.sqrt(x) * 0 + w, None)
        return lax.scan(step, 1.0, w)[0]

    # The root of zero has an infinite derivative, and 0 times it is a NaN.
    (fault,) = watch(jax.grad(f))(np.array([1, 0, 2, 0, 3], np.float32))
    assert fault.index == (4,) and fault.primitive == "mul"


# --------------------------------------------------------------------------------- structures


def test_in_nested_loops():
    def f(z):
        inner = lambda c, z: (c + jnp.log(z), None)
        outer = lambda c, z: (lax.scan(inner, c, z)[0], None)
        return lax.scan(outer, 0.0, z)[0]

    z = np.ones((3, 4), np.float32)
    assert not watch(f)(z)
    z[2, 1] = -1
    (fault,) = watch(f)(z)
    assert (fault.primitive, fault.index) == ("log", (2, 1))


def test_in_a_while_loop():
    f = lambda x: lax.while_loop(lambda x: x > -1, jnp.log, x)
    (fault,) = watch(f)(5.0)  # the logarithms of 5 are 1.6, 0.48, -0.74 and NaN
    assert (fault.primitive, fault.index, fault.value.nan) == ("log", (3,), True)
    assert not watch(lambda x: lax.while_loop(lambda x: x > 1, jnp.log, x))(5.0)
    (fault,) = watch(jax.vmap(f))(np.array([5, 3000], np.float32))
    assert (fault.primitive, fault.index, fault.lane, fault.element) == ("log", (3,), (), (0,))


def test_in_nested_while_loops_of_a_batch():
    def inner(x):
        return lax.while_loop(lambda x: x < 50, lambda x: jnp.log(x) * 0 + 2 * x, x)

    outer = jax.vmap(lambda x: lax.while_loop(lambda x: x < 60, lambda x: inner(x) + 1, x))
    fn = watch(outer)
    with pytest.warns(HarvestWarning, match="are not watched, only that as a whole"):
        assert not fn(X)
    with pytest.warns(HarvestWarning, match="are not watched, only that as a whole"):
        (fault,) = fn(np.array([1, -1], np.float32))
    assert (fault.primitive, fault.element) == ("while", (1,))


def test_in_a_branch():
    f = lambda i, x: lax.switch(i, [jnp.sin, jnp.log, jnp.sqrt], x)
    for i, name in enumerate([None, "log", "sqrt"]):
        report = watch(f)(jnp.int32(i), np.float32(-1))
        assert [fault.primitive for fault in report] == ([] if name is None else [name])


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.jit(f)), lambda f: f]
)
def test_in_a_call(wrap):
    fn = watch(lambda x: wrap(lambda x: jnp.log(x))(x - 1) * 2)
    assert not fn(np.float32(3))
    (fault,) = fn(np.float32(0.5))
    assert (fault.primitive, fault.index, fault.element) == ("log", (), ())


def test_in_a_function_of_jax_it_has_the_line_of_the_call():
    fn = lambda x: jnp.var(x * 1e30)  # whose square is infinite, and no NaN
    (fault,) = watch(fn, infinities=True)(X)
    assert fault.primitive == "square" and fault.source == line(fn, "jnp.var")
    relu = lambda x: jax.nn.relu(x) - jax.nn.silu(x)
    table = harvest.sites(harvest.sow_eqns(relu))(X)
    assert {site.source for site in table} == {line(relu, "relu")}
    seen = []
    harvest.reap(harvest.sow_eqns(relu, lambda eqn: seen.append(eqn.source) or True))(X)
    assert {*seen} == {line(relu, "relu")}


def test_in_a_function_with_a_custom_rule():
    f = jax.custom_vjp(lambda x: jnp.sin(x))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * jnp.log(x),))
    assert not watch(f)(np.float32(-1))
    (fault,) = watch(jax.grad(f))(np.float32(-1))
    assert fault.primitive == "log"
    assert [fault.primitive for fault in watch(jax.nn.silu)(np.float32(np.nan))] == []


def test_in_a_shard_map():
    mesh = MESHES["auto"]
    spec = P(("d", "m"))
    fn = jax.shard_map(lambda x: jnp.log(x) + 1, mesh=mesh, in_specs=spec, out_specs=spec)
    x = np.ones(16, np.float32)
    assert not watch(fn)(x)
    x[11] = -1  # in the shard of number 5, on a mesh of 4 by 2
    (fault,) = watch(fn)(x)
    assert (fault.primitive, fault.shard, fault.element) == ("log", {"d": 2, "m": 1}, (1,))


def test_what_is_compiled_as_a_whole_is_one_equation():
    def log(x):
        with np.errstate(all="ignore"):
            return np.log(x)

    f = lambda x: jax.pure_callback(log, jax.typeof(x), x) + 1
    (fault,) = watch(f)(X - 1)
    assert fault.primitive == "pure_callback" and fault.element == (0,)


# ------------------------------------------------------------------------- what is no fault


def test_an_argument_is_none():
    x = X.copy()
    x[1] = np.nan
    assert not watch(lambda x: jnp.sin(x) * 2)(x)
    # But what comes of others is.
    (fault,) = watch(lambda x, y: (jnp.sin(x), jnp.log(y)))(x, -X)
    assert fault.primitive == "log" and fault.inputs[-1].name == "args[1]"


def test_a_constant_is_made_where_it_is_used():
    fn = watch(lambda x: jnp.where(x > 1, x, jnp.nan) + 1)
    (fault,) = fn(X)
    assert (fault.key, fault.primitive, fault.element) == ("_where/0", "jit", (0,))
    assert fault.source == line(test_a_constant_is_made_where_it_is_used, "jnp.where")
    assert not fn(X + 1)  # where it is not used
    (fault,) = watch(lambda x: lax.scan(lambda c, x: (c + x, None), jnp.nan, x)[0])(X)
    assert fault.primitive == "scan"
    (fault,) = watch(lambda x: x * jnp.nan)(X)
    assert fault.primitive == "mul"


def test_infinities_on_request():
    f = lambda x: jnp.where(x > 1, x, -jnp.inf) - 1
    assert not watch(f)(X)
    (fault,) = watch(f, infinities=True)(X)
    assert (fault.key, fault.element) == ("_where/0", (0,))
    assert not watch(f, infinities=True)(X + 1)


def test_programs_without_numbers():
    for fn, x in [(lambda x: x, X), (lambda x: x + 1, jnp.arange(3)), (lambda x: 3, X)]:
        report = watch(fn)(x)
        assert not report and report.watched == 0


# ------------------------------------------------------------------------------------ report


def test_what_is_reported():
    report = watch(lambda x: jnp.log(jnp.sin(x) - 1) + 2)(X)
    text = str(report)
    assert text.startswith("of 4 equations, the first that is not finite:")
    assert "'log/0', element 0, at " in text and "from sub/0: " in text
    assert str(watch(jnp.sin)(X)) == "nothing is wrong at 1 equation"
    # The key is that by which it can be collected.
    fn = lambda x: jnp.log(jnp.sin(x) - 1) + 2
    acts = harvest.reap(harvest.sow_eqns(fn), report[0].key)(X)
    assert np.isnan(acts["log/0"]).all()


def test_the_output_that_is_bad():
    def f(x):
        solve = lambda f, y: jnp.log(x)
        return lax.custom_root(lambda y: y - x, x, solve, lambda g, y: y / g(1.0))

    (fault,) = watch(f)(np.float32(-1))
    assert fault.primitive == "CustomRoot"  # a `HiPrim`
    svd = lambda x: jnp.linalg.svd(x / x[0, 0])[1]
    (fault,) = watch(svd)(np.zeros((2, 2), np.float32))
    assert (fault.primitive, fault.element) == ("div", (0, 0))


def test_beside_what_is_sown():
    fn = lambda x: jnp.log(sow(x - 1, name="h"))
    (fault,) = watch(fn)(X)
    assert fault.key == "log/0" and [value.name for value in fault.inputs] == ["sub/0"]
    (fault,) = watch(fn, select="log/*")(X)
    assert [value.name for value in fault.inputs] == ["args[0]"]
    with pytest.raises(harvest.UnknownSiteError, match="'tan/0' matches no site"):
        watch(fn, select="tan/0")(X)
    assert [f.key for f in debug.nonfinite(fn, "h")(X)] == []


def test_under_a_transform_it_is_an_error():
    with pytest.raises(harvest.UnsupportedError, match="put it outside"):
        jax.jit(watch(jnp.log))(X)


def test_the_element_is_one_of_the_output_that_is_not_finite():
    """The second output is a product, that of the second row is too large."""

    def f(x):
        combine = lambda a, b: (a[0] + b[0], a[1] * b[1])
        zero, one = jnp.float32(0), jnp.float32(1)
        return lax.reduce((x, x), (zero, one), combine, (1,))

    (fault,) = debug.nonfinite(f, eqns=True, infinities=True)(
        jnp.array([[1.0, 2.0], [1e30, 1e30], [3.0, 4.0]])
    )
    assert fault.primitive == "reduce" and fault.element == (1,)
