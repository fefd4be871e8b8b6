"""Every structure under every transform of JAX: what is planted, around it and inside of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import capture, plant, reap, sow
from tests.helpers import PROGRAMS
from tests.transforms import TRANSFORMS, XS, cases, forbidden


def every_case(*transforms):
    """Those that `test_matrix` has besides would take minutes, and are combinations of these."""
    chosen = [case for case in cases(transforms) if not forbidden(*case.values[:2])]
    return pytest.mark.parametrize("program, transform, remat3", chosen, indirect=["remat3"])


def edit(h):
    return jnp.cos(h) - h / 2


def sown(program):
    return lambda x: PROGRAMS[program].fn(x, lambda h, step: sow(h, name="h"))


def by_hand(program, site):
    return lambda x: PROGRAMS[program].fn(x, lambda h, step: site(h))


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def _evaluates_twice(program, transform):
    """What is linear in the tangents has the site of the forward pass again, collected once."""
    linear = TRANSFORMS[transform].reverse or transform == "linearize"
    return "remat" in program + transform and linear


@every_case("none", "grad", "jvp", "linearize", "grad_of_remat", "vmap_axis_1")
def test_plants_around_a_transform(program, transform, remat3):
    """To derivatives that are already there, a planted value is only another value."""
    apply, arg, *_ = TRANSFORMS[transform]
    f = apply(sown(program))
    through = apply(by_hand(program, lambda h: h + lax.stop_gradient(edit(h) - h)))
    close(plant(f, {"h": edit}, mode="append")(arg), through(arg))
    wanted = apply(by_hand(program, lambda h: h))(arg)
    acts = capture(f)(arg)[1]["h"]
    if len(acts) == 1:
        values = PROGRAMS[program].values
        if arg.ndim > 1:
            values = jax.vmap(values, out_axes=len(PROGRAMS[program].loops))
        close(plant(f, {"h": values(arg if arg.ndim == 1 else XS)})(arg), wanted)
    if not _evaluates_twice(program, transform):  # an item of the tuple for each evaluation
        close(plant(f, {"h": acts}, mode="append")(arg), wanted)


@every_case("grad", "jvp", "vmap_of_grad", "grad_of_grad")
def test_a_transform_around_plants_and_what_is_collected(program, transform, remat3):
    apply, arg, *_ = TRANSFORMS[transform]
    f, loops = sown(program), range(len(PROGRAMS[program].loops))
    edited = apply(by_hand(program, edit))
    close(apply(plant(f, {"h": edit}))(arg), edited(arg))

    def both(out, h):  # linear: JAX has no `grad` of a `checkpoint` of sin(xla_metadata_call(...))
        return out + 3 * jnp.sum(h, axis=tuple(loops))

    collected = apply(lambda x: both(capture(f)(x)[0], reap(f)(x)["h"]))
    plain = by_hand(program, lambda h: h)
    wanted = apply(lambda x: both(plain(x), PROGRAMS[program].values(x)))
    close(collected(arg), wanted(arg))
