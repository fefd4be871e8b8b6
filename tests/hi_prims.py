"""`HiPrim`s that sow, as a user may write them."""

import jax
import jax.numpy as jnp
from jax.experimental.hijax import (
    HiPrim,
    instantiate_zeros,
    linearize_from_jvp,
    vjp_from_jvp,
    vjp_from_lin,
)

from harvest import sow


class Op(HiPrim):
    """A primitive of arrays of one type; its parameters are keywords."""

    def __init__(self, *avals, out=None, **params):
        self.in_avals, self.out_aval = avals, avals[0] if out is None else out
        self.params = params
        super().__init__()

    @classmethod
    def apply(cls, *args, **params):
        return cls(*map(jax.typeof, args), **params)(*args)

    def batch(self, axis_data, args, dims):
        return self.apply(*args, **self.params), dims[0]


class Product(Op):
    """`sin(x) * x`, of which the sine is sown. Each rule is wrong by a factor of its own.

    So that a result tells by which rule it was found.
    """

    def expand(self, x):
        return sow(jnp.sin(x), name="h") * x

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd(self, res, ct, accum):
        accum.accum(100 * ct)
        return {"product": ct}

    def jvp(self, primals, tangents):
        return self(*primals), 50 * instantiate_zeros(*tangents)

    def lin(self, nzs_in, x):
        return self(x), ()

    def linearized(self, res, tangent):
        return 70 * instantiate_zeros(tangent)

    def transpose(self, ct, accum):
        accum.accum(30 * ct)
        return {"transposed": ct}

    def batch(self, axis_data, args, dims):
        return 1000 * self.apply(*args), dims[0]


class Exp(Op):
    """`exp(2 * x)`, of which the exponent is sown, with rules that need its result."""

    def expand(self, x):
        return jnp.exp(sow(2 * x, name="h"))

    def jvp(self, primals, tangents):
        out = self(*primals)
        return out, 2 * out * instantiate_zeros(*tangents)

    lin, linearized = linearize_from_jvp

    def vjp_fwd(self, nzs_in, x):
        out = self(x)
        return out, out

    def vjp_bwd_retval(self, out, ct):
        return (2 * out * ct,)


class ExpByLin(Exp):
    vjp_fwd, vjp_bwd_retval = vjp_from_lin


class ExpByJvp(Exp):
    """Its rule for `jvp` runs in the backward pass, and evaluates it a second time."""

    vjp_fwd, vjp_bwd_retval = vjp_from_jvp


class SownRules(Op):
    """`sin(x)`, each of whose rules sows."""

    def expand(self, x):
        return jnp.sin(x)

    def vjp_fwd(self, nzs_in, x):
        return sow(self(x), name="fwd"), sow(jnp.cos(x), name="residual")

    def vjp_bwd(self, res, ct, accum):
        accum.accum(sow(ct * res, name="bwd"))

    def jvp(self, primals, tangents):
        (x,), (tangent,) = primals, tangents
        return self(x), sow(jnp.cos(x), name="slope") * instantiate_zeros(tangent)

    def lin(self, nzs_in, x):
        return self(x), sow(jnp.cos(x), name="lin")

    def linearized(self, res, tangent):
        return sow(res * instantiate_zeros(tangent), name="linearized")

    def transpose(self, ct, accum):
        accum.accum(sow(3 * ct, name="transposed"))

    def batch(self, axis_data, args, dims):
        return self.apply(sow(args[0], name="batch")), dims[0]
