"""Programs that sow one value of a hi type, and the same programs on plain arrays.

A program is `structure(body, x)`, where `body(x)` sows a value that it makes of `x`, and returns an
array like `x`. By hand, it is a Python loop over bodies that compute with the parts of that value.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import xla_metadata_call

from harvest import sow

from .hi_types import QArray, dense, dequantize, quantize, rank_one, tup, unpack

X = jnp.array([[0.3, -1.2, 0.8], [0.5, 0.9, -0.4]])
OTHER = jnp.array([[-0.7, 0.2, 1.1], [0.6, -0.5, 0.9]])


class Kind(NamedTuple):
    make: Callable[[Any], Any]  # of an array of shape (2, 3), a value of a hi type
    use: Callable[[Any], Any]  # an array of shape (2, 3)
    parts: Callable[[Any], list[Any]]  # by hand: of the array, the parts of the value
    of_parts: Callable[[list[Any]], Any]  # what `use` makes of the value
    twice: Callable[[Any], Any]  # a value with each part or, of a product, the first part doubled
    doubled: tuple[int, ...]  # those parts


def rounded(x):
    """To 127 steps, with the derivative of the identity."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return x + lax.stop_gradient(jnp.round(x / scale) * scale - x)


def by_hand(value):
    """The parts of a value, or of a tangent, as arrays."""
    if isinstance(value, QArray):
        return [np.asarray(value.values, np.float32) * np.asarray(value.scale)]
    if hasattr(value, "parts"):
        return [array for part in value.parts for array in by_hand(part)]
    return [np.asarray(value)]


KINDS = {
    "quantized": Kind(
        quantize,
        dequantize,
        lambda x: [rounded(x)],
        lambda parts: parts[0],
        lambda q: quantize(2 * dequantize(q)),
        (0,),
    ),
    "rank one": Kind(
        lambda x: rank_one(x[0], x[1]),
        lambda matrix: dense(matrix)[:2],
        lambda x: [x[0], x[1]],
        lambda parts: jnp.outer(*parts)[:2],
        lambda matrix: rank_one(2 * unpack(matrix)[0], unpack(matrix)[1]),
        (0,),
    ),
    "tuple": Kind(
        lambda x: tup(quantize(x), tup(jnp.sin(x), rank_one(x[0], x[1]))),
        lambda t: dequantize(unpack(t)[0]) * _both(unpack(unpack(t)[1])),
        lambda x: [rounded(x), jnp.sin(x), x[0], x[1]],
        lambda parts: parts[0] * (parts[1] + jnp.outer(parts[2], parts[3])[:2]),
        lambda t: tup(quantize(2 * dequantize(unpack(t)[0])), unpack(t)[1]),
        (0,),
    ),
}


def _both(pair):
    return pair[0] + dense(pair[1])[:2]


ON_HOST = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}


class Structure(NamedTuple):
    run: Callable[..., Any]  # of (body, x)
    loops: tuple[int, ...]  # around the site
    primitive: str | None  # that is to be there still


def loop(body, x, length=3, wrap=lambda f: f, **options):
    return lax.scan(wrap(lambda x, _: (body(x), None)), x, length=length, **options)[0]


def custom_jvp(body, x):
    fn = jax.custom_jvp(body)
    fn.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return fn(x)


def custom_vjp(body, x):
    fn = jax.custom_vjp(body)
    fn.defvjp(lambda x: jax.vjp(body, x), lambda vjp, ct: vjp(ct))
    return fn(x)


def batching(body, x):
    fn = custom_vmap(body)
    fn.def_vmap(lambda size, batched, x: (jax.vmap(body)(x), True))
    return fn(x)


def cond(body, x):
    return lax.cond(jnp.asarray(True), body, body, x)


STRUCTURES = {
    "plain": Structure(lambda body, x: body(x), (), None),
    "jit": Structure(lambda body, x: jax.jit(body)(x), (), "jit["),
    "remat": Structure(lambda body, x: jax.checkpoint(body)(x), (), "remat2["),
    "cond": Structure(cond, (), "cond["),
    "switch": Structure(lambda body, x: lax.switch(2, [body] * 3, x), (), "cond["),
    "custom_jvp": Structure(custom_jvp, (), "name=custom_jvp_call"),
    "custom_vjp": Structure(custom_vjp, (), "name=custom_vjp_call"),
    "custom_vmap": Structure(batching, (), "name=custom_vmap_call"),
    "xla_metadata": Structure(
        lambda body, x: xla_metadata_call(body, kind="marked")(x), (), "xla_metadata_call["
    ),
    "compute_on": Structure(lambda body, x: compute_on(body, **ON_HOST)(x), (), "compute_on["),
    "scan": Structure(loop, (3,), "scan["),
    "reverse": Structure(lambda body, x: loop(body, x, reverse=True), (3,), "reverse=True"),
    "unrolled": Structure(lambda body, x: loop(body, x, unroll=3), (3,), "unroll=3"),
    "scan of remat": Structure(lambda body, x: loop(body, x, wrap=jax.checkpoint), (3,), "remat2["),
    "remat of scan": Structure(
        lambda body, x: jax.checkpoint(lambda x: loop(body, x))(x), (3,), "remat2["
    ),
    "scan of jit": Structure(lambda body, x: loop(jax.jit(body), x), (3,), "jit["),
    "scan of cond": Structure(lambda body, x: loop(lambda x: cond(body, x), x), (3,), "cond["),
    "cond of scan": Structure(lambda body, x: cond(lambda x: loop(body, x), x), (3,), "cond["),
    "scan of scan": Structure(lambda body, x: loop(lambda x: loop(body, x, 2), x), (3, 2), "scan["),
}


def program(kind, structure, site=lambda h: sow(h, name="h")):
    """A function of an array that sows `h`."""

    def body(x):
        return jnp.tanh(x + kind.use(site(kind.make(x))))

    return lambda x: structure.run(body, x)


def plainly(kind, structure, edit=lambda parts, step: parts):
    """The same on plain arrays: a function that returns its result, and the parts of `h`.

    With a leading axis of the iterations of all loops; in reverse, the last one comes first.
    """
    count = math.prod(structure.loops)
    backward = structure is STRUCTURES["reverse"]

    def fn(x):
        steps = []
        for number in range(count):
            parts = edit(kind.parts(x), count - 1 - number if backward else number)
            steps.append(parts)
            x = jnp.tanh(x + kind.of_parts(parts))
        steps = steps[::-1] if backward else steps
        return x, [jnp.stack(arrays) for arrays in zip(*steps, strict=True)]

    return fn


def stacked(arrays, structure):
    """By hand, the parts as they are collected."""
    return [np.asarray(a).reshape(*structure.loops, *a.shape[1:]) for a in arrays]


def close(got, wanted, rtol=1e-5, atol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), got, wanted)
