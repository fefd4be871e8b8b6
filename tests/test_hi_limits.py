"""Hi types that can do less: without tangents, without a stack, or with tangents of integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.hijax import (
    HiPrim,
    HiType,
    ShapedArray,
    Zero,
    instantiate_zeros,
    linearize_from_jvp,
    register_hitype,
    vjp_from_lin,
)

import harvest
from harvest import (
    UnsupportedError,
    capture,
    grad,
    plant,
    reap,
    sow,
)

from .hi_programs import (
    OTHER,
    X,
    by_hand,
    close,
)
from .hi_types import Op, Product, ProductType

WEIGHTS = jnp.array([[1.0, -2.0, 0.5], [0.3, 1.5, -0.7]])


class Tokens(Product):
    """Without tangents, and without a stack."""


class TokensType(ProductType):
    value = Tokens

    def to_tangent_aval(self):
        return ShapedArray(self.parts[0].shape, jax.dtypes.float0)

    leading_axis_spec = HiType.leading_axis_spec


register_hitype(Tokens, lambda t: TokensType(tuple(map(jax.typeof, t.parts))))


class Tokenize(HiPrim):
    def __init__(self, aval):
        integers = aval.update(dtype=jnp.dtype("int32"))
        self.in_avals, self.out_aval, self.params = (aval,), TokensType((integers,)), {}
        super().__init__()

    def expand(self, x):
        return Tokens(jnp.round(10 * x).astype("int32"))

    def jvp(self, primals, tangents):
        return self(*primals), Zero(self.out_aval.to_tangent_aval())

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_lin


class Total(HiPrim):
    def __init__(self, aval):
        out = ShapedArray((), jnp.dtype("float32"))
        self.in_avals, self.out_aval, self.params = (aval,), out, {}
        super().__init__()

    def expand(self, tokens):
        return jnp.sum(tokens.parts[0]).astype("float32")

    def jvp(self, primals, tangents):
        return self(*primals), Zero(self.out_aval)

    lin, linearized = linearize_from_jvp
    vjp_fwd, vjp_bwd_retval = vjp_from_lin


def counted(x):
    tokens = sow(Tokenize(jax.typeof(x))(x), name="tokens")
    return sow(x, name="x") * Total(jax.typeof(tokens))(tokens)


def test_a_type_without_tangents():
    f = lambda x: jnp.sum(counted(x))
    total = np.round(10 * np.asarray(X)).sum()
    h = reap(f)(X)
    assert h["tokens"].parts[0].tolist() == np.round(10 * np.asarray(X)).tolist()
    close(plant(f, h)(X), np.asarray(X).sum() * total)
    gradients = harvest.grad(f)(X)
    close(gradients["x"], np.full((2, 3), total))
    assert gradients["tokens"].dtype == jax.dtypes.float0
    branches = lambda x: jnp.sum(lax.cond(jnp.asarray(True), counted, counted, x))
    close(jax.grad(lambda x: capture(branches)(x)[0])(X), np.full((2, 3), total))
    assert by_hand(reap(branches)(X)["tokens"])[0].shape == (2, 3)
    out, tangent, tangents = harvest.jvp(f, {"x": X})(X)
    close(tangent, np.asarray(X).sum() * total)
    assert tangents["tokens"].dtype == jax.dtypes.float0


def test_a_type_without_a_stack():
    f = lambda x: lax.scan(lambda x, _: (counted(x), None), x, length=2)[0]
    total = np.round(10 * np.asarray(X)).sum()
    close(reap(f, "x")(X)["x"], np.stack([X, X * total]))
    message = "`reap`: the site 'tokens' .*a loop that cannot stack its hi type, which lacks"
    with pytest.raises(harvest.UnsupportedError, match=message):
        reap(f)(X)


class Coarse(Product):
    """Integers and a scale; its tangents are of its own type."""


class CoarseType(ProductType):
    value = Coarse

    def to_tangent_aval(self):
        return self

    def vspace_zero(self):
        return coarse(jnp.zeros(self.parts[0].shape))

    def vspace_add(self, x, y):
        return coarse(fine(x) + fine(y))


register_hitype(Coarse, lambda c: CoarseType(tuple(map(jax.typeof, c.parts))))


class ToCoarse(Op):
    def __init__(self, aval):
        parts = (aval.update(dtype=jnp.dtype("int8")), aval.update(shape=()))
        super().__init__([aval], CoarseType(parts))

    def expand(self, x):
        scale = jnp.maximum(jnp.max(jnp.abs(x)), 1e-9) / 127
        return Coarse(jnp.round(x / scale).astype(jnp.int8), scale)

    def jvp(self, primals, tangents):
        return self(*primals), self(*map(instantiate_zeros, tangents))

    def transpose(self, out_ct, accum):
        accum.accum(fine(instantiate_zeros(out_ct)))


class ToFine(Op):
    def __init__(self, type):
        super().__init__([type], type.parts[0].update(dtype=jnp.dtype("float32")))

    def expand(self, value):
        values, scale = value.parts
        return values.astype(jnp.float32) * scale

    def jvp(self, primals, tangents):
        return self(*primals), self(*map(instantiate_zeros, tangents))

    def transpose(self, out_ct, accum):
        accum.accum(coarse(instantiate_zeros(out_ct)))


def coarse(x):
    return ToCoarse(jax.typeof(x))(x)


def fine(value):
    return ToFine(jax.typeof(value))(value)


def in_steps(x):
    return jnp.sum(WEIGHTS * fine(sow(coarse(x), name="h")))


def test_tangents_that_are_no_arrays():
    close(grad(in_steps)(X)["h"].parts[1] * 127, jnp.float32(2), atol=1e-4)
    close(fine(grad(in_steps)(X)["h"]), WEIGHTS, atol=0.02)
    gradient = jax.grad(lambda h: plant(in_steps, {"h": h})(X))(coarse(OTHER))
    close(fine(gradient), WEIGHTS, atol=0.02)
    branches = lambda x: lax.cond(jnp.asarray(True), in_steps, in_steps, x)
    close(fine(reap(branches)(X)["h"]), X, atol=0.02)
    message = "a value of the hi type Coarse.*differentiated.*no vector space of floating-point"
    with pytest.raises(UnsupportedError, match=message):
        grad(branches)(X)
