"""The table of sites says what is collected, for every structure and under every transform."""

import jax.numpy as jnp
import pytest

from harvest import Axis, perturb, sites, sow
from tests.helpers import PROGRAMS, SIZE
from tests.transforms import TRANSFORMS, forbidden

# How many branches the innermost `cond` around the site has, all of which have it.
BRANCHES = {"cond": 2, "switch": 3, "platform": 2, "scan_of_cond": 2, "cond_of_scan": 2}
# By a `vmap`; the one of `jax.hessian` is over tangents, on which no sown value depends.
BATCHED = {"vmap": 2, "vmap_axis_1": 2, "vmap_of_grad": 2, "grad_of_vmap": 2}
CASES = [
    (program, transform)
    for program in PROGRAMS
    for transform in TRANSFORMS
    if not forbidden(program, transform)
]


def check(site, program, batch, kind):
    loops = PROGRAMS[program].loops
    axes = (*(Axis("loop", n) for n in loops), *(Axis("batch", n) for n in batch))
    branches = BRANCHES.get(program)
    assert (site.key, site.kind, site.occurrence) == ("h", kind, 0)
    assert (site.aval.shape, site.aval.dtype, site.axes) == ((SIZE,), jnp.float32, axes)
    assert site.branch == (None if branches is None else tuple(range(branches)))
    size = 4 * SIZE
    for axis in axes:
        size *= axis.size
    # On every device there is all of it; a program without explicit axes says no sharding.
    assert (site.nbytes, site.nbytes_per_device, site.sharding) == (size, size, None)


@pytest.mark.parametrize("program, transform", CASES)
def test_sows(program, transform):
    apply, arg, *_ = TRANSFORMS[transform]
    f = apply(lambda x: PROGRAMS[program].fn(x, lambda h, step: sow(h, name="h")))
    (site,) = sites(f)(arg)
    check(site, program, [BATCHED[transform]] if transform in BATCHED else [], "sow")


@pytest.mark.parametrize(
    "program, transform", [case for case in CASES if TRANSFORMS[case[1]].reverse == 1]
)
def test_cotangents(program, transform):
    apply, arg, *_ = TRANSFORMS[transform]
    f = apply(lambda x: PROGRAMS[program].fn(x, lambda h, step: perturb(h, name="h")))
    (site,) = sites(f)(arg)
    batch = [BATCHED[transform]] if transform in BATCHED else []
    check(site, program, [1] if transform == "hessian" else batch, "cotangent")
