"""Structures that nest in any order around one site, written out so that plain JAX is the oracle.

`nested("scan/cond")` is called as `fn(x, site)`, as the programs in `tests.helpers` are; but `step`
is always a tuple, of an index for each loop.
"""

import jax
import jax.numpy as jnp
from jax import lax

SIZE = 4


def _innermost(x, site, step):
    return x * site(jnp.sin(x) * x, step) / 2


def _jit(fn):
    return lambda x, site, step: jax.jit(lambda x: fn(x, site, step))(x)


def _remat(fn):
    return lambda x, site, step: jax.checkpoint(lambda x: fn(x, site, step))(x)


def _cond(fn):
    def branches(x, site, step):
        return lax.cond(
            jnp.sum(x**2) >= 0,
            lambda x: fn(x, site, step),
            lambda x: 2 * fn(x, site, step),
            x,
        )

    return branches


def _one_sided(fn):
    return lambda x, site, step: lax.cond(
        jnp.sum(x**2) >= 0, lambda x: fn(x, site, step), lambda x: 2 * x, x
    )


def _custom_jvp(fn):
    def custom(x, site, step):
        body = lambda x: fn(x, site, step)
        rule = jax.custom_jvp(body)
        rule.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
        return rule(x)

    return custom


def _custom_vjp(fn):
    def custom(x, site, step):
        body = lambda x: fn(x, site, step)
        rule = jax.custom_vjp(body)
        rule.defvjp(lambda x: jax.vjp(body, x), lambda pullback, ct: pullback(ct))
        return rule(x)

    return custom


def _scan(fn, length=3, **options):
    def scan(x, site, step):
        body = lambda x, i: (fn(x + jnp.asarray(i, x.dtype) / 3, site, (*step, i)), None)
        return lax.scan(body, x, jnp.arange(length), **options)[0]

    return scan


def _map(fn):
    def mapped(x, site, step):
        row = lambda row: fn(row[0], site, (*step, row[1]))
        return lax.map(row, (jnp.stack([x, x + 1]), jnp.arange(2))).sum(axis=0)

    return mapped


STRUCTURES = {
    "jit": _jit,
    "remat": _remat,
    "cond": _cond,
    "one_sided": _one_sided,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "scan": _scan,
    "reverse": lambda fn: _scan(fn, 2, reverse=True),
    "map": _map,
}
LENGTHS = {"scan": 3, "reverse": 2, "map": 2}


def loops(names):
    return tuple(LENGTHS[name] for name in names.split("/") if name in LENGTHS)


def nested(names):
    fn = _innermost
    for name in reversed(names.split("/")):
        fn = STRUCTURES[name](fn)
    return lambda x, site: fn(x, site, ())


def without_rules(names):
    """The same function: JAX differentiates no rule by what its function closes over."""
    kept = [name for name in names.split("/") if not name.startswith("custom")]
    return nested("/".join(kept) or "jit")
