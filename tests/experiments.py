"""More programs with a site in each, and the oracle of `sweep`: programs that are edited by hand.

Programs are written as in `tests.helpers`; those with several sites name them, as in
`site(h, step, name="a")`.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import harvest
from tests.helpers import PROGRAMS, SIZE, scan

X = jnp.linspace(0.4, 1.3, SIZE)


def sown(program):
    return lambda x: program(x, lambda h, step, name="h": harvest.sow(h, name=name))


def by_hand(program, loops, x, edit, *source, axes=None, key="h"):
    """`program`, edited in one iteration for one row in each run, one run after the other.

    `source` has one item or none, `axes` a list of items for each named axis.
    """

    @jax.jit
    def run(index, row, here):
        def site(h, step, name="h"):
            if name != key:
                return h
            steps = () if step is None else step if isinstance(step, tuple) else (step,)
            chosen = [s == i for s, i in zip(steps, index, strict=True)]
            chosen = jnp.all(jnp.asarray(chosen, bool))
            return jax.tree.map(
                lambda new, old: jnp.where(chosen, new, old), edit(h, *here, *row), h
            )

        return program(x, site)

    names, items = list(axes or {}), list((axes or {}).values())
    results = []
    for index in itertools.product(*map(range, loops)):
        here = jax.tree.map(lambda s, index=index: s[index], source)
        for row in itertools.product(*items):
            row = () if axes is None else (dict(zip(names, row, strict=True)),)
            results.append(run(index, row, here))
    shape = (*loops, *map(len, items))
    assert len(results) == math.prod(shape)
    return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*shape, *xs[0].shape), *results)


def same(got, wanted, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)

    def check(a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=rtol, atol=1e-6)

    jax.tree.map(check, got, wanted)


# ------------------------------------------------------------------------------------- programs


def _body(x, step, site):
    return jnp.cos(site(jnp.sin(x) * x, step)) + x / 2


def _scan(x, site, length=3, **options):
    step = lambda x, i: (_body(x, i, site), None)
    return lax.scan(step, x, jnp.arange(length), **options)[0]


def between_loops(x, site):
    x = lax.while_loop(lambda x: x[0] < 1, lambda x: x + 0.5, jnp.sin(x))
    x = scan(_scan(jnp.cos(x), lambda h, step: h), site)
    x = scan(_scan(x, lambda h, step: h), lambda h, step: h)
    return lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1, lambda x: x / 2, x)


def ys_used(x, site):
    def step(x, w):
        h = site(jnp.sin(x * w["scale"]), w["i"])
        return x + h, {"h": h, "sum": jnp.sum(h * x), "i": w["i"]}

    xs = {"i": jnp.arange(3), "scale": jnp.linspace(0.5, 2, 3)}
    x, ys = lax.scan(step, x, xs)
    return {"out": x * jnp.sum(ys["sum"] * ys["i"].astype(x.dtype)), "ys": ys}


def closed_over(x, site):
    matrix, numbers = jnp.outer(jnp.sin(x), x), np.linspace(0, 1, SIZE).astype(x.dtype)
    return _scan(x, lambda h, step: matrix @ site(h * numbers, step))


def counted(x, site):
    def step(carry, _):
        x, i, total = carry
        x = _body(x, i, site)
        return (x, i + 1, total + jnp.sum(x)), None

    return lax.scan(step, (x, 0, 0.0), length=3)[0]


def mapped(x, site):
    return lax.map(lambda i: site(x + i.astype(x.dtype), i), jnp.arange(3))


def keyed(x, site):
    def step(carry, i):
        key, x = carry
        key, now = jax.random.split(key)
        return (key, _body(x, i, site) + jax.random.uniform(now)), None

    return lax.scan(step, (jax.random.key(0), x), jnp.arange(3))[0][1]


def scan_in_jits(x, site):
    inner = jax.jit(lambda x: {"x": _scan(x, site)})
    return jax.jit(lambda x: inner(jnp.sin(x))["x"] + x)(2 * x)


def reverse(x, site):
    return _scan(x, site, reverse=True)


def scan_of_one(x, site):
    return _scan(x, site, length=1)


def scan_of_four_unrolled(x, site):
    return _scan(x, site, length=4, unroll=2)


def custom_jvp_of_scan(x, site):
    fn = jax.custom_jvp(lambda x: _scan(x, site))
    fn.defjvp(lambda primals, tangents: jax.jvp(lambda x: _scan(x, site), primals, tangents))
    return fn(x)


def custom_vjp_of_scan(x, site):
    fn = jax.custom_vjp(lambda x: _scan(x, site))
    fn.defvjp(lambda x: jax.vjp(lambda x: _scan(x, site), x), lambda vjp, ct: vjp(ct))
    return fn(x)


def scan_of_custom_jvp(x, site):
    def step(x, i):
        fn = jax.custom_jvp(lambda x: _body(x, i, site))
        fn.defjvp(lambda primals, tangents: jax.jvp(lambda x: _body(x, i, site), primals, tangents))
        return fn(x), None

    return lax.scan(step, x, jnp.arange(3))[0]


def decided_by_the_site(x, site):
    x = site(x, None)
    x = lax.cond(x[0] > 0.5, jnp.sin, jnp.cos, x)
    return lax.switch((10 * x[1]).astype(int) % 3, [jnp.sin, jnp.cos, jnp.negative], x)


def thrice_nested(x, site):
    def loop(x, *outer):
        if len(outer) == 3:
            return _body(x, outer, site)
        return lax.scan(lambda x, i: (loop(x, *outer, i), None), x, jnp.arange(2))[0]

    return loop(x)


def scan_of_jit_of_scan(x, site):
    def outer(x, i):
        inner = jax.jit(lambda x, j: (_body(x, (i, j), site), jnp.sum(x)))
        return lax.scan(inner, x, jnp.arange(2))

    return lax.scan(outer, x, jnp.arange(3))


def with_effects(x, site):
    def step(x, i):
        jax.debug.callback(lambda x: None, x)
        return _body(x, i, site), None

    return lax.scan(step, x, jnp.arange(3))[0]


def derivative(x, site):
    # What is planted in a derivative is a constant, however it was computed.
    constant = lambda h, step: h + lax.stop_gradient(site(h, step) - h)
    return jax.grad(lambda x: jnp.sum(_scan(x, constant)))(x)


def sharded(x, site):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(lambda x: _scan(x, site), in_shardings=rows, out_shardings=rows)(x)


_LOOPS = {
    decided_by_the_site: (),
    scan_of_one: (1,),
    scan_of_four_unrolled: (4,),
    thrice_nested: (2, 2, 2),
    scan_of_jit_of_scan: (3, 2),
}
_IN_A_LOOP = [
    between_loops,
    ys_used,
    closed_over,
    counted,
    mapped,
    keyed,
    scan_in_jits,
    reverse,
    custom_jvp_of_scan,
    custom_vjp_of_scan,
    scan_of_custom_jvp,
    with_effects,
    derivative,
    sharded,
]
MANY = {  # a program, and the lengths of the loops around its site
    **{name: (program.fn, program.loops) for name, program in PROGRAMS.items()},
    **{fn.__name__: (fn, (3,)) for fn in _IN_A_LOOP},
    **{fn.__name__: (fn, loops) for fn, loops in _LOOPS.items()},
}
