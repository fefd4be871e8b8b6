"""The matrix for structures that JAX itself refuses under some transforms.

There the error is JAX's, with the site and without; elsewhere they are as any other structure.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import harvest
from harvest import capture, plant, reap, sites, sow
from tests.helpers import PROGRAMS
from tests.transforms import TRANSFORMS, XS, X

PLAIN = PROGRAMS["plain"]


def mapped(x, site):
    body = lambda x: PLAIN.fn(x, site)
    fn = custom_vmap(body)
    fn.def_vmap(lambda size, batched, x: (jax.vmap(body)(x), True))
    return fn(x)


def composite(x, site):
    return lax.composite(lambda x: PLAIN.fn(x, site), name="test.body")(x)


def through_a_call(structure):
    return lambda x, site: jax.jit(lambda x: structure(x, site))(x)


STRUCTURES = {
    "custom_vmap": mapped,
    "composite": composite,
    "jit of custom_vmap": through_a_call(mapped),
    "jit of composite": through_a_call(composite),
}
# Of a `custom_vmap` JAX has no backward pass but through its rule, of a `composite` nothing.
KNOWN = {
    "custom_vmap": {"none", "jit", "jvp", "vmap", "vmap_axis_1", "grad_of_vmap"},
    "composite": {"none", "jit"},
}
MESSAGES = "does not support reverse-mode|rule for '?composite'? not implemented"


def site(h, step):
    return sow(h, name="h")


def known(name):
    return KNOWN[name.removeprefix("jit of ")]


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def of_plain(transform, site=lambda h, step: h):
    apply, arg, *_ = TRANSFORMS[transform]
    return apply(lambda x: PLAIN.fn(x, site))(arg)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_around_a_transform(name, transform):
    apply, arg, *_ = TRANSFORMS[transform]
    sown, plain = (
        apply(lambda x, tag=tag: STRUCTURES[name](x, tag)) for tag in (site, lambda h, step: h)
    )
    if transform not in known(name):
        for f in (plain, sown, capture(sown), plant(sown, {"h": jnp.sin})):
            with pytest.raises((ValueError, NotImplementedError), match=MESSAGES):
                f(arg)
        return
    out, collected = capture(sown, mode="append")(arg)
    close(out, of_plain(transform))
    values = PLAIN.values(arg if arg.ndim == 1 else XS)
    close(collected, {"h": (values,)})
    assert [found.axes for found in sites(sown)(arg)] == [
        () if arg.ndim == 1 else (harvest.Axis("batch", 2),)
    ]
    through = lambda h, step: h + lax.stop_gradient(jnp.sin(h) - h)
    close(plant(sown, {"h": jnp.sin})(arg), of_plain(transform, through))
    close(plant(sown, reap(sown)(arg))(arg), of_plain(transform))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_transform_around_plants_and_what_is_collected(name, transform):
    apply, arg, *_ = TRANSFORMS[transform]
    f = lambda x: STRUCTURES[name](x, site)
    # A planted body is inlined, and so is that of a `composite` with a site.
    planted = apply(plant(f, {"h": jnp.cos}))
    close(planted(arg), of_plain(transform, lambda h, step: jnp.cos(h)))

    def both(x):
        out, collected = capture(f)(x)
        return out + 3 * collected["h"][0]

    if "composite" in name or transform in known(name):
        wanted = apply(lambda x: PLAIN.fn(x, lambda h, step: h) + 3 * PLAIN.values(x))
        close(apply(both)(arg), wanted(arg))
    else:
        with pytest.raises((ValueError, NotImplementedError), match=MESSAGES):
            apply(both)(arg)


@pytest.mark.parametrize("name", STRUCTURES)
def test_gradients_at_the_site(name):
    f = lambda x: jnp.sum(jnp.sin(STRUCTURES[name](x, site)))
    wanted = jax.grad(lambda eps: jnp.sum(jnp.sin(PLAIN.fn(X, lambda h, step: h + eps))))(0 * X)
    close(harvest.grad(f)(X), {"h": wanted})
    close(jax.vmap(harvest.grad(f))(jnp.stack([X, X]))["h"], jnp.stack([wanted, wanted]))
