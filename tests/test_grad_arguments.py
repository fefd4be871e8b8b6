"""What `grad` is called with and returns beside the gradients at sites, and what it refuses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    DuplicateSiteError,
    GradError,
    SelectError,
    UnknownSiteError,
    UnsupportedError,
    grad,
    scope,
    sow,
    value_and_grad,
)

X = jnp.array([0.5, 1.0, -2.0])
Y = jnp.array([3.0, -1.0, 2.0])
AT_H = 3 * (X * Y) ** 2


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def f(x, y):
    return jnp.sum(sow(x * y, name="h") ** 3)


# --------------------------------------------------------------------------------- argnums

ARGNUMS = {
    0: AT_H * Y,
    1: AT_H * X,
    -1: AT_H * X,
    (0,): (AT_H * Y,),
    (1, 0): (AT_H * X, AT_H * Y),
    (-2, -1): (AT_H * Y, AT_H * X),
}


@pytest.mark.parametrize("argnums", ARGNUMS)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_argnums(argnums, transform):
    close(transform(grad(f, argnums=argnums))(X, Y), ({"h": AT_H}, ARGNUMS[argnums]))
    at_sites, at_args = grad(f, [], argnums=argnums)(X, Y)
    assert at_sites == {}
    close(at_args, ARGNUMS[argnums])


def test_no_argnums_is_an_empty_sequence():
    close(grad(f, argnums=[])(X, Y), {"h": AT_H})


def test_a_sequence_of_argnums_gives_a_tuple():
    close(grad(f, argnums=[1])(X, Y)[1], (AT_H * X,))


def test_numbers_are_differentiated():
    g = lambda x, y: sow(x * y, name="h") ** 2
    close(grad(g, argnums=(0, 1))(2.0, np.float32(3)), ({"h": 12}, (36, 24)))


def test_arguments_by_keyword_are_not_counted():
    close(grad(f, argnums=0)(X, y=Y)[1], AT_H * Y)


class Layer(eqx.Module):
    weight: jax.Array
    heads: jax.Array
    count: int
    activation: str = eqx.field(static=True)

    def __call__(self, x):
        h = sow(self.weight * x, name="h")
        return jnp.sum(getattr(jnp, self.activation)(h)) * self.count


LAYER = Layer(Y, jnp.arange(2), 3, "sin")
AT_LAYER = 3 * jnp.cos(X * Y)


def test_a_module_as_argument():
    loss = lambda layer, x: layer(x)
    at_sites, at_layer = grad(loss, argnums=0)(LAYER, X)
    close(at_sites, {"h": AT_LAYER})
    close(at_layer.weight, AT_LAYER * X)
    assert at_layer.heads is None and at_layer.count is None and at_layer.activation == "sin"
    wanted = eqx.filter_grad(loss)(LAYER, X)
    assert jax.tree.structure(at_layer) == jax.tree.structure(wanted)
    updated = eqx.apply_updates(LAYER, at_layer)
    close(updated.weight, Y + AT_LAYER * X)


def test_a_module_as_function():
    close(grad(LAYER, argnums=0)(X), ({"h": AT_LAYER}, AT_LAYER * Y))
    close(grad(LAYER.__call__, argnums=0)(X), ({"h": AT_LAYER}, AT_LAYER * Y))


# ----------------------------------------------------------------------------- forms of results

AUX = {"text": "s", "count": 3, "fn": jnp.sin}


def with_aux(x, y):
    h = sow(x * y, name="h")
    return jnp.sum(h**3), {**AUX, "h": h}


def test_forms():
    value, grads, at_y = jnp.sum((X * Y) ** 3), {"h": AT_H}, AT_H * X
    close(grad(f)(X, Y), grads)
    close(value_and_grad(f)(X, Y), (value, grads))
    close(value_and_grad(f, argnums=1)(X, Y), (value, (grads, at_y)))
    got, aux = grad(with_aux, has_aux=True)(X, Y)
    close((got, aux.pop("h")), (grads, X * Y))
    assert aux == AUX
    got, aux = grad(with_aux, argnums=1, has_aux=True)(X, Y)
    close((got, aux.pop("h")), ((grads, at_y), X * Y))
    (got, aux), at_sites = value_and_grad(with_aux, has_aux=True)(X, Y)
    close((got, at_sites, aux.pop("h")), (value, grads, X * Y))
    assert aux == AUX
    (got, _), (at_sites, at_args) = value_and_grad(with_aux, argnums=(1,), has_aux=True)(X, Y)
    close((got, at_sites, at_args), (value, grads, (at_y,)))


def test_sites_of_what_is_passed_on_only():
    g = lambda x: (jnp.sum(x), sow(2 * x, name="h"))
    close(grad(g, has_aux=True)(X), ({"h": 0 * X}, 2 * X))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_result_may_be_of_low_precision(dtype):
    g = lambda x: sow(2 * jnp.sum(x), name="h").astype(dtype)
    value, grads = value_and_grad(g)(X)
    assert value.dtype == dtype and grads["h"].dtype == jnp.float32
    close((value.astype(jnp.float32), grads), (-1, {"h": 1}))


def test_results_without_sites():
    for result in (2.0, np.float32(2), jnp.float32(2)):
        value, grads = value_and_grad(lambda: result)()  # noqa: B023
        assert value == 2 and grads == {}


# ------------------------------------------------------------------------------- what is refused

RESULTS = [
    (lambda h: h, r"got f32\[3\] as a result; wanted a real scalar.*as by `jnp.sum`"),
    (lambda h: jnp.sum(lax.complex(h, h)), r"got c64\[\] as a result; wanted a real scalar"),
    (lambda h: jnp.sum(h > 0), r"got i32\[\] as a result; wanted a real scalar"),
    (lambda h: jnp.any(h > 0), r"got bool\[\] as a result; wanted a real scalar"),
    (lambda h: 3, "got .* as a result; wanted a real scalar"),
    (lambda h: None, "got a `NoneType` as a result; wanted a real scalar"),
    (lambda h: (jnp.sum(h), h), "got a `tuple` as a result; wanted a real scalar"),
]


@pytest.mark.parametrize("result, message", RESULTS)
def test_results_that_are_no_real_scalar(result, message):
    fn = lambda x: result(sow(x, name="h"))
    for transform in (grad, value_and_grad):
        with pytest.raises(GradError, match=message):
            transform(fn)(X)
    with pytest.raises(GradError, match=message):
        grad(lambda x: (fn(x), None), has_aux=True)(X)


PAIRLESS = [
    (jnp.sum, r"f32\[\]"),
    (lambda x: (jnp.sum(x),), "a `tuple`"),
    (lambda x: (jnp.sum(x), x, x), "a `tuple`"),
    (lambda x: {"a": jnp.sum(x), "b": x}, "a `dict`"),
]


@pytest.mark.parametrize("fn, got", PAIRLESS)
def test_results_that_are_no_pair(fn, got):
    with pytest.raises(GradError, match=f"has_aux=True.* got .*{got}.*; wanted a pair"):
        grad(lambda x: fn(sow(x, name="h")), has_aux=True)(X)


BAD_ARGNUMS = [
    (2, (X, Y), r"got `argnums=2` in a call with 2 positional arguments"),
    (-3, (X, Y), r"got `argnums=-3` in a call with 2 positional arguments"),
    ((0, 5), (X, Y), r"got `argnums=\(0, 5\)` in a call with 2 positional arguments"),
    (0, (jnp.arange(3), Y), "argument 0 has no floating-point array"),
    (0, (3, Y), "argument 0 has no floating-point array"),
    ((1, 0), (np.ones(3, bool), Y), "argument 0 has no floating-point array"),
]


@pytest.mark.parametrize("argnums, args, message", BAD_ARGNUMS)
def test_arguments_that_cannot_be_differentiated(argnums, args, message):
    g = lambda x, y: jnp.sum(sow(jnp.where(x, y, 2 * y), name="h"))
    with pytest.raises(GradError, match=message):
        grad(g, argnums=argnums)(*args)


def test_arguments_by_keyword_cannot_be_differentiated():
    with pytest.raises(GradError, match="`argnums=1` in a call with 1 positional argument"):
        grad(f, argnums=1)(X, y=Y)


def scoped(x):
    with scope("block"):
        return jnp.sum(sow(x, name="resid"))


UNKNOWN = [
    ("resid", "`grad`: the key 'resid' matches no site; did you mean 'block/resid'"),
    ("block/*/resid", "the glob .* matches no site"),
    (["**", "typo"], "the key 'typo' matches no site"),
    ({"block/resdi": jnp.sum}, "did you mean 'block/resid'"),
]


@pytest.mark.parametrize("select, message", UNKNOWN)
def test_unknown_sites(select, message):
    with pytest.raises(UnknownSiteError, match=message):
        grad(scoped, select)(X)


def test_selections_and_modes_of_a_wrong_type():
    with pytest.raises(SelectError, match="`select` got 3 of type `int`"):
        grad(f, 3)
    with pytest.raises(SelectError, match="got the reducer 'mean' of type `str`"):
        grad(f, {"h": "mean"})


def test_a_key_that_is_sown_twice():
    g = lambda x: jnp.sum(sow(sow(x, name="h") + 1, name="h"))
    with pytest.raises(DuplicateSiteError, match=r'`grad`: \'h\' is sown 2 times(.|\n)*"append"'):
        grad(g)(X)


def looped(x):
    step = lambda carry: (carry[0] + 1, sow(jnp.sin(carry[1]), name="inside"))
    total = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]
    return jnp.sum(sow(x, name="outside") * lax.stop_gradient(total))


def test_a_site_in_a_while_loop():
    for select in (None, "inside", {"inside": jnp.sum}):
        with pytest.raises(UnsupportedError, match=r"'inside' .*is inside a `while_loop`"):
            grad(looped, select)(X)
    close(grad(looped, "outside")(X)["outside"], jnp.sin(jnp.sin(jnp.sin(X))))


def test_a_site_in_a_predicate():
    predicate = lambda carry: sow(carry[0], name="h") < 3
    g = lambda x: lax.while_loop(predicate, lambda carry: (carry[0] + 1, carry[1]), (0, x))[1][0]
    with pytest.raises(UnsupportedError, match="the predicate of a `while_loop`, sow it in the"):
        grad(g)(X)


def test_a_backward_pass_that_jax_refuses():
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    g = lambda x: lax.while_loop(lambda carry: carry[0] < 3, step, (0, sow(x, name="h")))[1]
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        grad(g)(X[0])


def test_what_was_traced_before_cannot_be_differentiated():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(sow(x, name="h")))(X)
    with pytest.raises(UnsupportedError, match=r"'h' .*traced before `grad` saw it"):
        grad(jax.extend.core.jaxpr_as_fun(jaxpr))(X)
