"""Custom rules that are wrong on purpose tell which derivative was used.

Gradients of arguments are those of `jax.grad`. That at a site takes the rules of the functions
after it; the function that sows it is differentiated as it is written from the site on.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import capture, folds, grad, jvp, reap, sow
from tests.helpers import called

X = jnp.float32(0.6)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def custom_jvp(body, slope):
    fn = jax.custom_jvp(body)
    fn.defjvp(lambda primals, tangents: (fn(*primals), slope(*primals) * tangents[0]))
    return fn


def custom_vjp(body, slope):
    fn = jax.custom_vjp(body)
    fn.defvjp(lambda x: (fn(x), x), lambda x, ct: (slope(x) * ct,))
    return fn


def with_honest_rule(body):
    fn = jax.custom_vjp(body)
    fn.defvjp(lambda x: jax.vjp(body, x), lambda pullback, ct: pullback(ct))
    return fn


kinds_with_references = pytest.mark.parametrize(
    "custom", [with_honest_rule, lambda body: lambda x: called(body, x)]
)
kinds = pytest.mark.parametrize("custom", [custom_jvp, custom_vjp])


def chain(custom):
    """Three functions with rules, and sites between them and inside of the second."""
    first = custom(jnp.sin, lambda x: 10 * x)
    second = custom(lambda a: sow(jnp.cos(a), name="inside") * a, lambda a: 100 * a)
    third = custom(lambda b: b**2, lambda b: 1000 * b)
    return lambda x: third(sow(second(sow(first(x), name="before")), name="after"))


A = jnp.sin(X)
B = jnp.cos(A) * A
AT_SITES = {"before": 100 * A * 1000 * B, "inside": A * 1000 * B, "after": 1000 * B}
AT_X = 10 * X * 100 * A * 1000 * B


@kinds
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_rules_after_the_site_apply(custom, transform):
    f = transform(chain(custom))
    at_sites, at_x = grad(f, argnums=0)(X)
    close((at_sites, at_x), (AT_SITES, AT_X))
    close(at_x, jax.grad(f)(X))
    for key, wanted in AT_SITES.items():
        close(grad(f, key, argnums=0)(X), ({key: wanted}, AT_X))


@kinds
def test_under_vmap(custom):
    xs = jnp.array([0.6, 0.6, 0.6])
    close(jax.vmap(grad(chain(custom)))(xs)["inside"], jnp.full(3, AT_SITES["inside"]))
    total = lambda xs: jnp.sum(jax.vmap(chain(custom))(xs))
    close(grad(total)(xs)["inside"], jnp.full(3, AT_SITES["inside"]))


@kinds
def test_values_are_collected_once(custom):
    grads, values = capture(grad(chain(custom)))(X)
    close(grads, AT_SITES)
    close(values, {"before": (A,), "inside": (jnp.cos(A),), "after": (B,)})


@kinds
def test_in_a_loop(custom):
    """Iterations after that of the site count by their rule."""
    step = custom(lambda x: sow(jnp.sin(x), name="h") * x, lambda x: 100 * x)
    f = lambda x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0]
    xs = [X]
    for _ in range(2):
        xs.append(jnp.sin(xs[-1]) * xs[-1])
    wanted = [xs[0] * 100 * xs[1] * 100 * xs[2], xs[1] * 100 * xs[2], xs[2]]
    close(grad(f, argnums=0)(X), ({"h": jnp.stack(wanted)}, jax.grad(f)(X)))
    close(grad(f, {"h": folds.last()})(X), {"h": wanted[2]})


@kinds
def test_several_sites_in_one_body(custom):
    f = custom(lambda x: sow(sow(jnp.sin(x), name="a") * x, name="b") ** 2, lambda x: 100 * x)
    b = jnp.sin(X) * X
    close(grad(f, argnums=0)(X), ({"a": 2 * b * X, "b": 2 * b}, 100 * X))
    close(grad(f, {"b": jnp.exp})(X), {"b": jnp.exp(2 * b)})


@kinds
def test_rules_inside_of_rules(custom):
    inner = custom(lambda x: sow(3 * x, name="inner"), lambda x: 7.0)
    f = custom(lambda x: inner(sow(inner(x), name="outer") ** 2), lambda x: 100.0)
    grads = grad(f, mode="append")(X)
    outer = 7 * 2 * 3 * X
    close(grads, {"inner": (outer, 1.0), "outer": (outer,)})


@kinds
def test_several_results_of_which_one_is_of_integers(custom):
    body = lambda x, n: (2 * sow(jnp.sin(x), name="h"), n + 1, x)
    if custom is custom_vjp:
        f = jax.custom_vjp(body)
        f.defvjp(lambda x, n: (f(x, n), None), lambda _, cts: (100 * cts[0] + cts[2], None))
    else:
        f = jax.custom_jvp(body)
        f.defjvp(lambda p, t: (f(*p), (100 * t[0], np.zeros((), jax.dtypes.float0), t[0])))
    result = lambda i: lambda x: f(x, jnp.int32(2))[i].astype(x.dtype) + 0 * x
    for i, wanted in enumerate([({"h": 2.0}, 100.0), ({"h": 0.0}, 0.0), ({"h": 0.0}, 1.0)]):
        close(grad(result(i), argnums=0)(X), wanted)
    constant = lambda x: f(jnp.float32(0.5), jnp.int32(2))[0] * x
    close(grad(constant)(X), {"h": 2 * X})


# ----------------------------------------------------------- bodies that JAX cannot differentiate


def looped(x):
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    return lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


def called_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x)


@kinds
@pytest.mark.parametrize("hidden", [looped, called_back])
def test_what_is_before_the_site_is_not_differentiated(custom, hidden):
    f = custom(lambda x: sow(hidden(x), name="h") * x, lambda x: 100 * x)
    close(grad(f, argnums=0)(X), ({"h": X}, 100 * X))
    close(capture(grad(f))(X)[1], {"h": (hidden(X),)})
    if custom is custom_jvp:
        close(jvp(f, {"h": 2.0})(X), (hidden(X) * X, 2 * X, {"h": 2.0}))


@kinds
def test_a_body_without_a_wanted_site_stays_closed(custom):
    inner = lambda x: looped(sow(called_back(x), name="inner"))
    f = custom(inner, lambda x: 100 * x)
    close(grad(lambda x: f(sow(2 * x, name="h")), "h", argnums=0)(X), ({"h": 200 * X}, 400 * X))


@kinds
def test_what_comes_after_the_site_has_to_be_differentiable(custom):
    f = custom(lambda x: looped(sow(2 * x, name="h")), lambda x: 100 * x)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        grad(f)(X)
    inside = lambda carry: (carry[0] + 1, sow(carry[1] / 2, name="h"))
    loop = lambda x: lax.while_loop(lambda carry: carry[0] < 3, inside, (0, x))[1]
    with pytest.raises(harvest.UnsupportedError, match=r"'h' .*is inside a `while_loop`"):
        grad(custom(loop, lambda x: 100 * x))(X)


# --------------------------------------------------------------------------------- second order


@kinds
def test_gradients_of_gradients(custom):
    f = custom(lambda x: jnp.exp(sow(jnp.sin(x), name="h")) * x**2, lambda x: 100 * x)
    # At the site: exp(sin(x)) * x ** 2, which is differentiated as written.
    wanted = jnp.exp(jnp.sin(X)) * (jnp.cos(X) * X**2 + 2 * X)
    at_site = lambda x: grad(f)(x)["h"]
    reduced = lambda x: grad(f, {"h": lambda g: 3 * g})(x)["h"]
    for derivative in (jax.grad, jax.jacrev, lambda fn: jax.jit(jax.grad(fn))):
        close(derivative(at_site)(X), wanted)
        close(derivative(reduced)(X), 3 * wanted)
    close(jax.grad(lambda x: grad(f, argnums=0)(x)[1])(X), 100.0)
    if custom is custom_jvp:
        close(jax.jacfwd(at_site)(X), wanted)


@kinds
def test_gradients_of_gradients_in_a_loop(custom):
    """The rule is right here, so that JAX can tell."""
    body = lambda x: jnp.sin(x) * x
    slope = lambda x: jnp.cos(x) * x + jnp.sin(x)
    step = custom(lambda x: sow(jnp.sin(x), name="h") * x, slope)
    f = lambda x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0]

    def by_hand(x, eps):
        return lax.scan(lambda x, e: (body(x) + e * x, None), x, eps)[0]

    wanted = jax.jacrev(jax.grad(by_hand, 1))(X, jnp.zeros(3))
    close(jax.jacrev(lambda x: grad(f)(x)["h"])(X), wanted)


# ------------------------------------------------------------------------ reading beside


@kinds
def test_a_fold_that_counts_iterations_is_differentiated(custom):
    """Its index is that of a loop around the rule."""
    step = custom(lambda x: sow(jnp.sin(x), name="h") * x, lambda x: 100 * x)
    f = lambda x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0]
    second = {"h": folds.at(jnp.array(1))}
    close(jax.grad(lambda x: capture(f, second)(x)[0])(X), jax.grad(f)(X))
    at_second = lambda x: reap(f, second)(x)["h"]
    # sin(x1), where x1 has the slope of the rule
    close(jax.grad(at_second)(X), jnp.cos(jnp.sin(X) * X) * 100 * X)


@kinds
def test_the_rule_of_a_function_that_takes_numbers(custom):
    body = lambda x, n: sow(x * n.astype(x.dtype), name="h") ** 2
    if custom is custom_vjp:
        scaled = jax.custom_vjp(body)
        scaled.defvjp(lambda x, n: (scaled(x, n), x), lambda x, ct: (100 * x * ct, None))
    else:
        scaled = jax.custom_jvp(body)
        scaled.defjvp(lambda p, t: (scaled(*p), 100 * p[0] * t[0]))
    close(grad(scaled, argnums=0)(X, jnp.int32(3)), ({"h": 6 * X}, 100 * X))


@kinds_with_references
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_reference_inside_of_the_body(custom, transform):
    def body(a):
        ref = jax.new_ref(a)
        ref[...] = ref[...] * sow(jnp.cos(a), name="inside") ** 2
        return ref[...]

    f = lambda x: custom(body)(jnp.sin(x)) ** 3
    out = A * jnp.cos(A) ** 2
    wanted = {"inside": 3 * out**2 * A * 2 * jnp.cos(A)}
    close(transform(grad(f))(X), wanted)
    close(transform(grad(f, argnums=0))(X)[0], wanted)
    value, tangent, _ = jvp(f, {"inside": jnp.float32(2)})(X)
    close((value, tangent), (out**3, 2 * wanted["inside"]))
    # The gradient is a function of what is before the site as well.
    by_hand = lambda x: 6 * jnp.sin(x) ** 3 * jnp.cos(jnp.sin(x)) ** 5
    close(jax.grad(lambda x: grad(f)(x)["inside"])(X), jax.grad(by_hand)(X))


def test_a_site_in_a_cond_in_a_function_with_a_rule():
    """Its rule is for the input: at the site it differentiates as it is computed."""

    @jax.custom_jvp
    def f(x):
        positive, negative = (lambda x, k=k: k * sow(2 * x, name="h") for k in (3, 5))
        return lax.cond(x > 0, positive, negative, x)

    f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0]))
    for x, at_site in ((1.0, 3.0), (-1.0, 5.0)):
        values, (out,) = grad(f, argnums=(0,))(jnp.float32(x))
        assert values == {"h": at_site} and out == 100


def test_derivatives_in_forward_mode_of_tangents_that_enter_at_a_site():
    """By hand: `h = x ** 2`, the tangent of `h ** 3` for one `t` of `h` is `3 * h ** 2 * t`."""

    @jax.custom_jvp
    def f(x):
        return sow(x**2, name="h") ** 3

    f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0]))
    x, t = jnp.float32(2.0), jnp.float32(0.5)
    tangent = lambda t: jvp(f, {"h": t})(x)[1]
    assert jax.linearize(tangent, t)[1](jnp.float32(1.0)) == 3 * 16
    assert jax.grad(tangent)(t) == 3 * 16
