"""What a user's `HiPrim` may be made of: its rules may sow, and its parameters too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.hijax import HiPrim, instantiate_zeros, vjp_from_lin
from jax.extend.core import jaxpr_as_fun

import harvest
from harvest import UnsupportedError, capture, plant, reap, scope, sow
from tests.hi_prims import Exp, Op, SownRules

X = jnp.float32(0.6)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


# ---------------------------------------------------------------------------- rules that sow

SIN, COS = np.sin(0.6), np.cos(0.6)
TWO = jnp.float32(2)
f = SownRules.apply
# transform, its result, what it sows, and a plant with what becomes of the result
IN_RULES = {
    "vjp_fwd and vjp_bwd": (
        jax.grad(lambda x: f(x) ** 2),
        2 * SIN * COS,
        {"fwd": SIN, "residual": COS, "bwd": 2 * SIN * COS},
        ("residual", 3.0, 6 * SIN),
    ),
    "vjp_bwd": (jax.grad(f), COS, {"fwd": SIN, "residual": COS, "bwd": COS}, ("bwd", 5.0, 5.0)),
    "jvp": (lambda x: jax.jvp(f, (x,), (TWO,))[1], 2 * COS, {"slope": COS}, ("slope", 5.0, 10.0)),
    "lin": (
        lambda x: jax.linearize(f, x)[1](TWO),
        2 * COS,
        {"lin": COS, "linearized": 2 * COS},
        ("lin", 5.0, 10.0),
    ),
    "transpose": (
        lambda x: jax.linear_transpose(f, x)(x)[0],
        1.8,
        {"transposed": 1.8},
        ("transposed", 5.0, 5.0),
    ),
    "batch": (lambda x: jnp.sum(jax.vmap(f)(x[None])), SIN, {"batch": [0.6]}, ("batch", [0.0], 0)),
}


@pytest.mark.parametrize("rule", IN_RULES)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_sows_in_a_rule_are_in_what_the_rule_is_for(rule, around):
    transformed, result, values, (key, value, planted) = IN_RULES[rule]
    got, collected = capture(around(transformed), mode="strict")(X)
    close((got, collected), (result, values))
    close(plant(around(transformed), {key: jnp.float32(value)})(X), planted)
    assert list(capture(f)(X)[1]) == []


def test_a_capture_that_is_differentiated_sows_what_the_rules_sow():
    class Sown(Op):
        def expand(self, x):
            return sow(jnp.sin(x), name="h")

        def vjp_fwd(self, nzs_in, x):
            return self(x), sow(jnp.cos(x), name="residual")

        def vjp_bwd(self, res, ct, accum):
            accum.accum(sow(7 * ct * res, name="bwd"))

    inner = lambda x: capture(Sown.apply)(x)[0]
    got, collected = capture(jax.grad(inner))(X)
    close((got, collected), (7 * COS, {"residual": (COS,), "bwd": (7 * COS,)}))
    # What an inner transform leaves alone is there for the outer one.
    inner = lambda x: capture(Sown.apply, [])(x)[0]
    assert list(capture(jax.grad(inner))(X)[1]) == ["h", "residual", "bwd"]


# ------------------------------------------------------------------------------- transforms


class Two(Op):
    def expand(self, x):
        with scope("layer"):
            a = sow(jnp.sin(x), name="a")
            return a * sow(jnp.cos(a), name="b")

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd(self, res, ct, accum):
        accum.accum(100 * ct)


def test_what_is_left_is_collected_by_an_outer_transform():
    both = capture(lambda x: capture(Two.apply, "layer/a")(x))
    (out, inner), outer = both(X)
    close((out, inner, outer), (SIN * np.cos(SIN), {"layer/a": (SIN,)},
                                {"layer/b": (np.cos(SIN),)}))  # fmt: skip
    # Of an inner reap nothing needs the other site, which is collected nevertheless.
    inner, outer = capture(lambda x: reap(Two.apply, "layer/a")(x))(X)
    close((inner, outer), ({"layer/a": SIN}, {"layer/b": (np.cos(SIN),)}))
    close(jax.grad(lambda x: both(x)[0][0])(X), 100)
    close(jax.grad(lambda x: both(x)[1]["layer/b"][0])(X), -np.sin(SIN) * COS)
    close(plant(lambda x: capture(Two.apply)(x)[0], {"layer/a": TWO})(X), 2 * np.cos(2))


def test_scopes_around_and_inside():
    def f(x):
        with scope("outer"):
            return Two.apply(x)

    assert list(reap(f)(X)) == ["outer/layer/a", "outer/layer/b"]
    twice = lambda x: (jax.jit(f)(x), f(2 * x))
    out, collected = capture(twice)(X)
    close(collected["outer/layer/a"], (SIN, np.sin(1.2)))
    close(plant(twice, collected, mode="append")(X), out)


DEBUG = frozenset(jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(X).effects)


@pytest.mark.parametrize("use", ["value", "grad", "grad of collected", "captured grad", "vmap"])
@pytest.mark.parametrize("declared", [False, True])
def test_side_effects_happen_as_often_as_without(use, declared):
    def noted(calls):
        class Noisy(Exp):
            effects = DEBUG if declared else frozenset()

            def expand(self, x):
                jax.debug.callback(lambda x: calls.append(x), x)
                return super().expand(x)

        return Noisy.apply

    transforms = {
        "value": (lambda f: f, capture),
        "grad": (jax.grad, lambda f: jax.grad(lambda x: capture(f)(x)[0])),
        "grad of collected": (jax.grad, lambda f: jax.grad(lambda x: reap(f)(x)["h"])),
        "captured grad": (jax.grad, lambda f: capture(jax.grad(f))),
        "vmap": (jax.vmap, lambda f: jax.vmap(capture(f))),
    }
    counts = []
    for transform in transforms[use]:
        calls = []
        jax.jit(transform(noted(calls)))(X[None] if use == "vmap" else X)
        jax.effects_barrier()
        counts.append(len(calls))
    assert counts == [1, 1]


# -------------------------------------------------------------------------------- parameters


class Applied(Op):
    """Applies a function that is a parameter, to a tree of arguments."""

    def __init__(self, fn, *avals):
        self.in_avals = avals
        self.out_aval = jax.tree.map(
            lambda s: jax.core.ShapedArray(s.shape, s.dtype), jax.eval_shape(fn, *avals)
        )
        self.params = {"fn": fn}
        HiPrim.__init__(self)

    def expand(self, *args):
        return self.fn(*args)

    def jvp(self, primals, tangents):
        return jax.jvp(self.fn, primals, tangents)

    def vjp_fwd(self, nzs_in, *args):
        return jax.vjp(self.fn, *args)

    def vjp_bwd_retval(self, pullback, cts):
        return pullback(cts)

    def batch(self, axis_data, args, dims):
        raise NotImplementedError


def applied(fn, *args):
    return Applied(fn, *jax.tree.map(jax.typeof, args))(*args)


def tree(pair, rest):
    x, y = pair
    h = sow({"sum": x + y, "n": rest["n"] + 1, "static": "s"}, name="h")
    return [h["sum"] * x, {"n": h["n"]}], y


TREE = ((X, jnp.float32(2)), {"n": jnp.int32(3)})


def test_trees_of_arguments_and_results():
    f = lambda *args: applied(tree, *args)
    out, collected = capture(f)(*TREE)
    close(out, tree(*TREE))
    (h,) = collected["h"]
    assert h["static"] == "s" and h["n"] == 4
    close(h["sum"], 2.6)
    close(plant(f, reap(f)(*TREE))(*TREE), tree(*TREE))
    loss = lambda x: capture(f)((x, TWO), TREE[1])[0][0][0]
    close(jax.grad(loss)(X), 2 * 0.6 + 2)
    close(harvest.grad(lambda x: f((x, TWO), TREE[1])[0][0])(X)["h"]["sum"], 0.6)


def body(x):
    return jnp.exp(sow(2 * x, name="h"))


PARAMETERS = {
    "function": body,
    "jaxpr": lambda x: jaxpr_as_fun(jax.make_jaxpr(body)(X))(x)[0],
    "traced": lambda x: jax.jit(body).trace(X)(x),
    "jit": jax.jit(body),
    "scan": lambda x: lax.scan(lambda x, _: (body(x), None), x, length=1)[0],
    "another": lambda x: Exp.apply(x),
    "another twice": lambda x: applied(Exp.apply, x),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_sow(name):
    fn = PARAMETERS[name]
    f = lambda x: applied(fn, x)
    h = np.float32([1.2]) if name == "scan" else 1.2
    out, collected = capture(f)(X)
    close((out, collected), (np.exp(1.2), {"h": (h,)}))
    close(jax.grad(lambda x: capture(f)(x)[0])(X), 2 * np.exp(1.2))
    close(jax.grad(lambda x: jnp.sum(reap(f)(x)["h"]))(X), 2)
    close(plant(f, {"h": lambda h: h + 1})(X), np.exp(2.2))
    close(plant(f, reap(f)(X))(X), f(X))


class Holding(HiPrim):
    """Holds a jaxpr with its effects, by which JAX knows that it sows."""

    def __init__(self, jaxpr):
        self.in_avals, self.out_aval = tuple(jaxpr.in_avals), tuple(jaxpr.out_avals)
        self.params = {"jaxpr": jaxpr}
        self.effects = frozenset(jaxpr.effects)
        super().__init__()

    def expand(self, *args):
        return tuple(jaxpr_as_fun(self.jaxpr)(*args))


def test_a_jaxpr_that_was_traced_under_the_transform():
    def f(x):
        return Holding(jax.make_jaxpr(body)(x))(x)[0]

    close(capture(f)(X), (np.exp(1.2), {"h": (1.2,)}))
    close(plant(f, {"h": jnp.negative})(X), np.exp(-1.2))
    # Before `plant` sees it, there is nothing in a jaxpr that could be replaced.
    jaxpr = jax.make_jaxpr(body)(X)
    close(reap(lambda x: Holding(jaxpr)(x))(X), {"h": 1.2})
    with pytest.raises(UnsupportedError, match=r"'h' .* can be collected but not changed"):
        plant(lambda x: Holding(jaxpr)(x)[0], {"h": jnp.negative})(X)


def test_weakly_typed_inputs():
    """Strict promotion would refuse a `float32` here, and no site be found."""

    class Half(Op):
        def expand(self, x):
            return sow(x * jnp.float16(2), name="h").astype(jnp.float32)

    f = lambda x: Half(jax.typeof(x), out=jax.typeof(X))(x)
    assert jax.typeof(jnp.asarray(0.5)).weak_type
    got = reap(lambda: f(jnp.asarray(0.5)))()["h"]
    assert got == 1 and got.dtype == jnp.float16


def test_a_reference_is_written_once():
    class Increment(Op):
        def expand(self, ref):
            ref[...] += 1
            return sow(ref[...], name="h") * 2

    def f(x):
        ref = jax.new_ref(x)
        out = Increment(jax.typeof(ref), out=jax.typeof(x))(ref)
        return out, ref[...]

    close(jax.jit(f)(X), (3.2, 1.6))
    close(capture(f)(X), ((3.2, 1.6), {"h": (1.6,)}))
    close(plant(f, {"h": TWO})(X), (4, 1.6))


# ------------------------------------------------------- what only the rule can differentiate


class Opaque(Op):
    """`sin(x)`, without derivatives."""

    skip_linearization_on_zero_tangents = True

    def expand(self, x):
        return jnp.sin(x)


class Known(Op):
    """`2 * sin(x)`, with the derivative 5; what it sows has none."""

    def expand(self, x):
        y = Opaque.apply(x)
        return 2 * sow((y, jnp.where(y > 0, 4, 3)), name="h")[0]

    def jvp(self, primals, tangents):
        return self(*primals), 5 * instantiate_zeros(*tangents)

    def lin(self, nzs_in, x):
        return self(x), ()

    def linearized(self, res, tangent):
        return 5 * instantiate_zeros(tangent)

    vjp_fwd, vjp_bwd_retval = vjp_from_lin


def both(x):
    """Of `Known`, the result and what is collected."""
    out, collected = capture(Known.apply, mode="strict")(x)
    return out, collected["h"][0]


result, site = (lambda x: both(x)[0]), (lambda x: both(x)[1])
pushed = lambda fn: lambda t: jax.jvp(fn, (X,), (t,))[1]


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_tangent_that_does_not_exist_is_nan(around):
    none = np.float32(np.nan)
    close(around(pushed(both))(TWO), (10.0, none))
    close(around(lambda x: jax.linearize(both, x)[1](TWO))(X), (10.0, none))
    close(around(jax.vmap(pushed(both)))(TWO[None]), ([10.0], [none]))
    second = around(lambda t: jax.jvp(pushed(both), (t,), (t,)))
    close(second(TWO), ((10.0, none), (10.0, none)))
    close(around(lambda t: jax.linearize(pushed(both), t)[1](t))(TWO), (10.0, none))
    integers = lambda x: capture(Known.apply)(x)[1]["h"][0][1]
    got, tangent = jax.jvp(around(integers), (X,), (TWO,))
    assert got == 4 and tangent.dtype == jax.dtypes.float0
    assert jax.linearize(around(integers), X)[1](TWO).dtype == jax.dtypes.float0


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_what_has_no_derivative_is_in_nobodys_way(around):
    close(around(jax.grad(result))(X), 5.0)
    close(around(jax.grad(pushed(result)))(TWO), 5.0)
    close(around(lambda t: jax.linear_transpose(pushed(result), t)(t)[0])(TWO), 10.0)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda: jax.grad(site)(X),
        lambda: jax.grad(pushed(site))(TWO),
        lambda: jax.linear_transpose(pushed(site), TWO)(TWO),
    ],
    ids=["grad", "grad of jvp", "transpose of jvp"],
)
def test_a_cotangent_that_does_not_exist_is_an_error(derivative):
    message = r"collected inside a function with a custom derivative rule.*Opaque'> must implement"
    with pytest.raises(UnsupportedError, match=message):
        derivative()


class Linear(Op):
    """`6 * x`, of which half is sown; its rule says 60."""

    def expand(self, x):
        return 2 * sow(3 * x, name="h")

    def transpose(self, ct, accum):
        accum.accum(60 * ct)


def test_what_is_collected_in_a_linear_primitive_is_transposed_as_it_is_computed():
    out = lambda x: capture(Linear.apply)(x)[0]
    value = lambda x: capture(Linear.apply)(x)[1]["h"][0]
    for fn, wanted in ((out, 60), (value, 3), (lambda x: out(x) + value(x), 63)):
        close(jax.linear_transpose(fn, X)(TWO)[0], 2 * wanted)
    xs = jnp.stack([X, 2 * X])
    close(jax.linear_transpose(jax.vmap(value), xs)(xs)[0], 3 * xs)
