"""Transforms of JAX, to be applied to the programs of `tests.helpers`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import PROGRAMS, SIZE

X = jnp.linspace(0.4, 1.3, SIZE)
XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)


def total(f):
    return lambda x: jnp.sum(f(x))


class Transform(NamedTuple):
    apply: Callable  # to a function from vectors to vectors
    arg: jax.Array
    reverse: int = 0  # how many cotangents of the site there are
    forward: bool = False  # uses forward mode, which a `custom_vjp` forbids


TRANSFORMS = {
    "none": Transform(lambda f: f, X),
    "jit": Transform(jax.jit, X),
    "grad": Transform(lambda f: jax.grad(total(f)), X, 1),
    "value_and_grad": Transform(lambda f: jax.value_and_grad(total(f)), X, 1),
    "jit_of_grad": Transform(lambda f: jax.jit(jax.grad(total(f))), X, 1),
    "grad_of_jit": Transform(lambda f: jax.grad(jax.jit(total(f))), X, 1),
    "jvp": Transform(lambda f: lambda x: jax.jvp(f, (x,), (x,)), X, forward=True),
    "linearize": Transform(lambda f: lambda x: jax.linearize(f, x)[1](x), X, forward=True),
    "vjp": Transform(lambda f: lambda x: jax.vjp(f, x)[1](x), X, 1),
    "vjp_primal": Transform(lambda f: lambda x: jax.vjp(f, x)[0], X),
    "grad_of_remat": Transform(lambda f: jax.grad(total(jax.checkpoint(f))), X, 1),
    "vmap": Transform(jax.vmap, XS),
    "vmap_axis_1": Transform(lambda f: jax.vmap(f, in_axes=1), XS.T),
    "vmap_of_grad": Transform(lambda f: jax.vmap(jax.grad(total(f))), XS, 1),
    "grad_of_vmap": Transform(lambda f: jax.grad(total(jax.vmap(f))), XS, 1),
    "grad_of_grad": Transform(lambda f: jax.grad(total(jax.grad(total(f)))), X, 2),
    "hessian": Transform(lambda f: jax.hessian(total(f)), X, 1),
}


def cases(transforms) -> list:
    """Every program under every transform; under both implementations of remat if it has one."""
    return [
        pytest.param(program, transform, remat3, id=f"{program}-{transform}-{remat3}")
        for program in PROGRAMS
        for transform in transforms
        for remat3 in ([False, True] if "remat" in program + transform else [False])
    ]


def forbidden(program, transform):
    return program == "custom_vjp" and TRANSFORMS[transform].forward
