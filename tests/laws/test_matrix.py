"""Every structure under every transform of JAX: one record each, of the right value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from tests.helpers import PROGRAMS, SIZE
from tests.transforms import TRANSFORMS, XS, X, cases, forbidden, total


def _bare(h, step):
    harvest.sow(h, name="h")
    return h


def _used(h, step):
    return harvest.sow(h, name="h")


def _perturbed(h, step):
    return harvest.perturb(h, name="h")


def _plain(h, step):
    return h


def _runs_twice(program, transform, remat3):
    """Under jax_remat3 these calls are a part of the recomputation as they are."""
    again = ("custom_jvp", "custom_vjp", "metadata", "on_host", "hi_prim", "scan_of_hi_prim")
    return remat3 and program in again and transform == "grad_of_remat"


def _values(program, transform):
    values = PROGRAMS[program].values
    if TRANSFORMS[transform].arg.ndim == 1:
        return values(X)
    return jnp.stack([values(x) for x in XS], axis=len(PROGRAMS[program].loops))


@pytest.mark.parametrize("site", [_bare, _used])
@pytest.mark.parametrize("program, transform, remat3", cases(TRANSFORMS), indirect=["remat3"])
def test_a_sow_is_collected_once(program, transform, site, remat3):
    fn = PROGRAMS[program].fn
    apply, arg, *_ = TRANSFORMS[transform]
    sown = apply(lambda x: fn(x, site))
    if forbidden(program, transform):
        with pytest.raises(TypeError, match="custom_vjp"):
            harvest.capture(sown)(arg)
        return
    out, collected = harvest.capture(sown)(arg)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6),
        out,
        apply(lambda x: fn(x, _plain))(arg),
    )
    assert list(collected) == ["h"]
    records = 2 if _runs_twice(program, transform, remat3) else 1
    assert len(collected["h"]) == records
    for value in collected["h"]:
        np.testing.assert_allclose(value, _values(program, transform), rtol=1e-5)


def _with_added(fn, eps):
    """The program with `eps` added at the site, in plain JAX."""
    return lambda x: fn(x, lambda h, step: h + (eps if step is None else eps[step]))


@pytest.mark.parametrize(
    "program, transform, remat3",
    cases([t for t in TRANSFORMS if TRANSFORMS[t].reverse < 2]),
    indirect=["remat3"],
)
def test_a_cotangent_is_collected_once(program, transform, remat3):
    fn, loops, _ = PROGRAMS[program]
    apply, arg, reverse, _ = TRANSFORMS[transform]
    perturbed = apply(lambda x: fn(x, _perturbed))
    if forbidden(program, transform):
        with pytest.raises(TypeError, match="custom_vjp"):
            harvest.capture(perturbed)(arg)
        return
    _, collected = harvest.capture(perturbed)(arg)
    if not reverse:
        assert collected == {}
        return
    seed = X if transform == "vjp" else jnp.ones(SIZE)

    # JAX differentiates no custom rule with respect to what its function closes over.
    added = PROGRAMS["plain"].fn if program.startswith("custom") else fn

    def cotangent(x):
        eps = jnp.zeros((*loops, SIZE))
        return jax.vjp(lambda eps: _with_added(added, eps)(x), eps)[1](seed)[0]

    if transform == "hessian":  # `jacrev` maps the backward pass over its one output
        want = jnp.stack([cotangent(X)], axis=len(loops))
    elif arg.ndim == 1:
        want = cotangent(arg)
    else:
        want = jnp.stack([cotangent(x) for x in arg], axis=len(loops))
    assert list(collected) == ["h"] and len(collected["h"]) == 1
    np.testing.assert_allclose(collected["h"][0], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("remat3", [False, True], indirect=True)
@pytest.mark.parametrize("program", [p for p in PROGRAMS if not p.startswith("custom")])
def test_cotangents_of_second_order_are_records_of_their_own(program, remat3):
    fn, loops, _ = PROGRAMS[program]
    eps = jnp.zeros((*loops, SIZE))
    first = jax.grad(lambda eps: jnp.sum(_with_added(fn, eps)(X)))(eps)
    second = jax.grad(lambda eps: jnp.sum(jax.grad(total(_with_added(fn, eps)))(X)))(eps)

    inner = total(jax.grad(total(lambda x: fn(x, _perturbed))))
    _, collected = harvest.capture(jax.grad(inner))(X)
    # The cotangent of the inner backward pass; and that of the outer one, in two records where
    # `checkpoint` evaluates the site twice.
    records = collected["h"]
    (k,) = (k for k, ct in enumerate(records) if np.allclose(ct, first, rtol=1e-4, atol=1e-6))
    others = [ct for other, ct in enumerate(records) if other != k]
    assert len(others) in (1, 2)
    np.testing.assert_allclose(sum(others), second, rtol=1e-4, atol=1e-6)
