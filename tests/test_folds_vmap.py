"""Folds of a batched program are those of each example, whether `reap` is in or around `vmap`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harvest import HarvestWarning, UnsupportedError, reap
from tests.folds_by_hand import FOLDS, same
from tests.loops import PROGRAMS

XS = jnp.array([[0.7, -1.2], [0.3, 1.9], [-2.0, 0.4]])
TRIPS = jnp.array([3, 5, 4])
GRID = jnp.stack([XS, 0.8 - XS])
TRIPS_OF_GRID = jnp.array([[3, 4, 5], [5, 3, 4]])
CHOSEN = ["mean", "count", "stack", "top_k", "weighted"]
REDUCERS = {"h": tuple(FOLDS[name][0] for name in CHOSEN)}


class Batched(NamedTuple):
    vmap: Callable[..., Any]  # of a function of `x` and `trips`
    args: tuple[Any, Any]
    xs: Any  # the arguments of each example
    trips: Any


def _nested(inner, outer):
    return lambda f: jax.vmap(jax.vmap(f, in_axes=inner), in_axes=outer)


OF_X = {
    "x": Batched(lambda f: jax.vmap(f, (0, None)), (XS, 3), XS, np.full(3, 3)),
    "axis 1": Batched(lambda f: jax.vmap(f, (1, None)), (XS.T, 3), XS, np.full(3, 3)),
    "x twice": Batched(
        _nested((0, None), (1, None)), (GRID.swapaxes(0, 1), 3), GRID, np.full((2, 3), 3)
    ),
}
OF_TRIPS = {
    "trips": Batched(
        lambda f: jax.vmap(f, (None, 0)), (XS[0], TRIPS), np.stack([XS[0]] * 3), TRIPS
    ),
    "both": Batched(jax.vmap, (XS, TRIPS), XS, TRIPS),
    "both twice": Batched(_nested((0, 0), (0, 0)), (GRID, TRIPS_OF_GRID), GRID, TRIPS_OF_GRID),
}
ACROSS = {
    "x in trips": Batched(
        _nested((0, None), (None, 0)),
        (XS, TRIPS),
        np.broadcast_to(XS, (3, 3, 2)),
        np.broadcast_to(TRIPS[:, None], (3, 3)),
    ),
    "trips in x": Batched(
        _nested((None, 0), (0, None)),
        (XS, TRIPS),
        np.broadcast_to(XS[:, None], (3, 3, 2)),
        np.broadcast_to(TRIPS, (3, 3)),
    ),
}
STATIC = ["scan_of_scan", "scan_of_jit", "scan_of_custom_vjp", "scan_of_cond", "cond_of_scan"]
DYNAMIC = [name for name, program in PROGRAMS.items() if None in program.loops]


def check(got, program, batched):
    """`got` has the axes of the examples in front, and is theirs."""
    for lane in np.ndindex(np.shape(batched.trips)):
        _, records = program.by_hand(jnp.asarray(batched.xs[lane]), batched.trips[lane])
        mine = [leaf[lane] for leaf in jax.tree.leaves(got)]
        same(mine, tuple(FOLDS[name][1](records) for name in CHOSEN))


@pytest.mark.parametrize("batch", OF_X)
@pytest.mark.parametrize("name", STATIC)
def test_scans(name, batch):
    program, batched = PROGRAMS[name], OF_X[batch]
    check(batched.vmap(reap(program, REDUCERS))(*batched.args)["h"], program, batched)
    check(reap(batched.vmap(program), REDUCERS)(*batched.args)["h"], program, batched)


@pytest.mark.parametrize("batch", OF_X | OF_TRIPS | ACROSS)
@pytest.mark.parametrize("name", DYNAMIC)
def test_while_loops_inside_of_vmap(name, batch):
    program, batched = PROGRAMS[name], (OF_X | OF_TRIPS | ACROSS)[batch]
    check(batched.vmap(reap(program, REDUCERS))(*batched.args)["h"], program, batched)


# A counter that lanes do not share makes a batched predicate of the `cond`.
PHANTOMS = [("while_of_cond", batch) for batch in OF_TRIPS]


@pytest.mark.parametrize("batch", OF_X | OF_TRIPS)
@pytest.mark.parametrize("name", DYNAMIC)
def test_while_loops_around_of_vmap(name, batch):
    program, batched = PROGRAMS[name], (OF_X | OF_TRIPS)[batch]
    transformed = reap(batched.vmap(program), REDUCERS)
    if (name, batch) in PHANTOMS:
        with pytest.warns(HarvestWarning, match="in a branch of a `cond` whose predicate `vmap`"):
            transformed(*batched.args)
    else:
        check(transformed(*batched.args)["h"], program, batched)


@pytest.mark.parametrize("batch", ACROSS)
@pytest.mark.parametrize("name", [name for name in DYNAMIC if name != "while_of_cond"])
def test_lanes_across_other_axes_are_an_error(name, batch):
    batched = ACROSS[batch]
    match = (
        r"'h' \(sown at .*\) is inside a `while_loop` whose predicate `vmap` batched, .*vmap\(reap"
    )
    with pytest.raises(UnsupportedError, match=match):
        reap(batched.vmap(PROGRAMS[name]), REDUCERS)(*batched.args)
