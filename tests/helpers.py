"""Programs with one site each, written out so that plain JAX can be their oracle.

Each program is called as `program(x, site)`, where `site(h, step)` stands for what happens to the
value `h`: sow it, perturb it, add something to it, or record it. `step` is the index of the
iteration (an int or a tuple), or None outside of any loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.experimental.hijax import HiPrim, bdims_at_front, instantiate_zeros, linearize_from_jvp
from jax.experimental.xla_metadata import xla_metadata_call
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

LENGTH = 3
SIZE = 4


class Program(NamedTuple):
    fn: Callable[..., Any]  # (x, site) -> a vector
    loops: tuple[int, ...]  # around the site
    values: Callable[[Any], Any]  # x -> what the site holds, with loop axes in front


def _h(x):
    return jnp.sin(x) * x


def _once(x):
    return _h(x)


def _steps(x):
    """The values in a loop of `x -> x * h(x) / 2 + step`, as `_body` computes them."""
    values = []
    for step in range(LENGTH):
        h = _h(x)
        values.append(h)
        x = x * h / 2 + step
    return jnp.stack(values)


def _body(x, step, site):
    return x * site(_h(x), step) / 2 + jnp.asarray(step, x.dtype)


def plain(x, site):
    return x * site(_h(x), None)


def jit(x, site):
    return jax.jit(lambda x: plain(x, site))(x)


def jit_in_jit(x, site):
    return jax.jit(lambda x: jax.jit(lambda x: plain(x, site))(x) + 1)(x)


def traced(x, site):
    # The call of what `trace` returns is an `eval_jaxpr`.
    run, args = _converted(lambda x: plain(x, site), x)
    return jax.jit(run).trace(*args)(*args)


def remat(x, site):
    return jax.checkpoint(lambda x: plain(x, site))(x)


def remat_of_jit(x, site):
    return jax.checkpoint(jax.jit(lambda x: plain(x, site)))(x)


def shard_map(x, site):
    # The same in all shards, and so collected once; `tests/shards.py` has those that differ.
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(lambda x: plain(x, site), mesh=mesh, in_specs=P(), out_specs=P())(x)


def cond(x, site):
    return lax.cond(jnp.asarray(True), lambda x: plain(x, site), lambda x: plain(x, site), x)


def switch(x, site):
    branches = [lambda x: plain(x, site)] * 3
    return lax.switch(jnp.asarray(1), branches, x)


def platform(x, site):
    return lax.platform_dependent(x, cpu=lambda x: plain(x, site), default=lambda x: plain(x, site))


def custom_jvp(x, site):
    fn = jax.custom_jvp(lambda x: plain(x, site))
    fn.defjvp(lambda primals, tangents: jax.jvp(lambda x: plain(x, site), primals, tangents))
    return fn(x)


def custom_vjp(x, site):
    fn = jax.custom_vjp(lambda x: plain(x, site))
    fn.defvjp(lambda x: jax.vjp(lambda x: plain(x, site), x), lambda vjp, ct: vjp(ct))
    return fn(x)


def metadata(x, site):
    return xla_metadata_call(lambda x: plain(x, site), kind="marked")(x)


def on_host(x, site):
    options = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
    return compute_on(lambda x: plain(x, site), **options)(x)


class _Call(HiPrim):
    """A user's primitive, with the rules that its function has without it."""

    def __init__(self, fn, *avals):
        self.in_avals, self.out_aval = avals, avals[0]
        self.params = {"fn": fn}
        super().__init__()

    def expand(self, *args):
        return self.fn(*args)

    def jvp(self, primals, tangents):
        return jax.jvp(self.fn, primals, tuple(map(instantiate_zeros, tangents)))

    lin, linearized = linearize_from_jvp

    def vjp_fwd(self, nzs_in, *args):
        return jax.vjp(self.fn, *args)

    def vjp_bwd_retval(self, pullback, ct):
        return pullback(ct)

    def batch(self, axis_data, args, dims):
        x = bdims_at_front(axis_data, args[0], dims[0])
        fn = jax.vmap(self.fn, in_axes=(0, *dims[1:]))
        return _Call(fn, jax.typeof(x), *map(jax.typeof, args[1:]))(x, *args[1:]), 0


def _converted(fn, x):
    """A function and its arguments: what `fn` closes over is one, for those that must not."""
    jaxpr = jax.make_jaxpr(fn)(x)
    return lambda x, *consts: jax.core.eval_jaxpr(jaxpr, consts, x)[0], [x, *jaxpr.consts]


def called(fn, x):
    """`fn(x)` by a primitive. What `fn` closes over is passed to it: rules must not."""
    run, args = _converted(fn, x)
    return _Call(run, *map(jax.typeof, args))(*args)


def hi_prim(x, site):
    return called(lambda x: plain(x, site), x)


def scan(x, site, body=_body, wrap=lambda f: f, **options):
    step = wrap(lambda x, i: (body(x, i, site), None))
    return lax.scan(step, x, jnp.arange(LENGTH), **options)[0]


def scan_unrolled(x, site):
    return scan(x, site, unroll=2)


def scan_of_remat(x, site):
    return scan(x, site, wrap=jax.checkpoint)


def scan_of_jit(x, site):
    return scan(x, site, wrap=jax.jit)


def remat_of_scan(x, site):
    return jax.checkpoint(lambda x: scan(x, site))(x)


def scan_of_hi_prim(x, site):
    def body(x, i, site):
        return called(lambda x: x * site(_h(x), i) / 2, x) + jnp.asarray(i, x.dtype)

    return scan(x, site, body)


def scan_of_cond(x, site):
    def body(x, i, site):
        return lax.cond(i >= 0, lambda x: _body(x, i, site), lambda x: _body(x, i, site), x)

    return scan(x, site, body)


def cond_of_scan(x, site):
    return lax.cond(jnp.asarray(True), lambda x: scan(x, site), lambda x: scan(x, site), x)


def fori(x, site):
    return lax.fori_loop(0, LENGTH, lambda i, x: _body(x, i, site), x)


def scan_of_scan(x, site):
    def outer(x, i):
        def inner(x, j):
            return x * site(_h(x), (i, j)) / 2, None

        return lax.scan(inner, x + jnp.asarray(i, x.dtype), jnp.arange(2))

    return lax.scan(outer, x, jnp.arange(LENGTH))[0]


def _nested_steps(x):
    values = []
    for i in range(LENGTH):
        x = x + i
        row = []
        for _ in range(2):
            h = _h(x)
            row.append(h)
            x = x * h / 2
        values.append(jnp.stack(row))
    return jnp.stack(values)


_IN_NO_LOOP = [
    plain,
    jit,
    jit_in_jit,
    traced,
    remat,
    remat_of_jit,
    shard_map,
    cond,
    switch,
    platform,
    custom_jvp,
    custom_vjp,
    metadata,
    on_host,
    hi_prim,
]
_IN_A_LOOP = [
    scan,
    scan_unrolled,
    scan_of_remat,
    scan_of_jit,
    scan_of_hi_prim,
    remat_of_scan,
    scan_of_cond,
    cond_of_scan,
    fori,
]
PROGRAMS = {
    **{fn.__name__: Program(fn, (), _once) for fn in _IN_NO_LOOP},
    **{fn.__name__: Program(fn, (LENGTH,), _steps) for fn in _IN_A_LOOP},
    "scan_of_scan": Program(scan_of_scan, (LENGTH, 2), _nested_steps),
}


def _equinox_differentiates() -> bool:
    try:
        jax.eval_shape(lambda x: jax.jvp(eqxi.noinline(jnp.sin), (x,), (x,)), jnp.ones(2))
    except AttributeError:  # of `jax.core`
        return False
    return True


# The oldest Equinox that we support cannot differentiate its own primitives on JAX 0.12.
equinox_differentiates = pytest.mark.skipif(
    not _equinox_differentiates(), reason="this Equinox is older than what this JAX removed"
)
