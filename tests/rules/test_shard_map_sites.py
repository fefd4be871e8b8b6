"""What `sites` says of values in `shard_map`: their axes, shardings and bytes on each device."""

import jax
import numpy as np
import pytest

from harvest import Axis, perturb, reap, sites
from tests.shards import BOTH, PROGRAMS, P, Sharded, X, place

LOOP, BATCH = Axis("loop", 3), Axis("batch", 4)
ALL, DATA = Axis("mesh", 8, ("data", "model")), Axis("mesh", 4, ("data",))
TWO_SITES = {"h": [], "u": [ALL]}
IN_A_LOOP = {"h": [LOOP], "u": [LOOP, ALL]}
IN_TWO = {"h": [LOOP, Axis("loop", 2)], "u": [LOOP, Axis("loop", 2), ALL]}
# With `check_vma`; without it, what is stacked is stacked over all axes that are manual.
AXES = {
    **dict.fromkeys(["at_top", "in_jit", "in_remat", "in_custom_vjp", "in_custom_jvp"], TWO_SITES),
    **dict.fromkeys(["around_scan", "inside_scan"], IN_A_LOOP),
    "between_scans": IN_TWO,
    **dict.fromkeys(["around_cond", "inside_cond", "around_uneven_cond"], {"h": []}),
    **dict.fromkeys(["around_vmap", "inside_vmap"], {"h": [BATCH], "u": [BATCH, DATA]}),
    "over_one_axis": {"h": [], "u": [DATA]},
    "with_collectives": {"total": [], "rows": [ALL], "number": [DATA], "sum": []},
    "with_pytrees": {"v": [ALL]},
}
UNCHECKED = {
    **dict.fromkeys(["around_vmap", "inside_vmap"], {"h": [BATCH], "u": [BATCH, ALL]}),
    "with_collectives": dict.fromkeys(["total", "rows", "number", "sum"], [ALL]),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_axes_and_bytes(name, check_vma, mesh):
    program, sharded = PROGRAMS[name], Sharded(mesh, check_vma)
    table = sites(program.make(sharded))(place(program, mesh))
    axes = AXES[name] if check_vma else {**AXES, **UNCHECKED}[name]
    assert {site.key: list(site.axes) for site in table} == axes
    values = program.reference(sharded, X)[1]
    for site in table:
        assert site.branch == ((0, 1) if "cond" in name else None)
        arrays = [x for x in jax.tree.leaves(values[site.key]) if np.ndim(x)]
        scalars = len(jax.tree.leaves(values[site.key])) - len(arrays)
        scalars -= name == "with_pytrees"  # one leaf is a static number
        assert site.nbytes == 4 * (sum(x.size for x in arrays) + scalars)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_on_each_device(name, check_vma, mesh):
    program, x = PROGRAMS[name], place(PROGRAMS[name], mesh)
    f = program.make(Sharded(mesh, check_vma))
    collected = jax.jit(reap(f))(x)
    for site in sites(f)(x):
        is_array = lambda x: isinstance(x, jax.Array) and not x.weak_type  # not a static number
        arrays = list(filter(is_array, jax.tree.leaves(collected[site.key])))
        here = sum(x.addressable_shards[0].data.nbytes for x in arrays)
        assert site.nbytes_per_device == here
        split = [x for x in arrays if not x.sharding.is_fully_replicated]
        said = [s for s in jax.tree.leaves(site.sharding) if not s.is_fully_replicated]
        for sharding, array in zip(said, split, strict=True):
            assert sharding.is_equivalent_to(array.sharding, array.ndim)


def test_by_hand(mesh):
    program = PROGRAMS["around_scan"]
    table = sites(program.make(Sharded(mesh, True)))(place(program, mesh))
    assert table["h"].sharding.spec == P(None, "data", "model")
    assert table["u"].sharding.spec == P(None, ("data", "model"), None, None)
    assert table["h"].aval.shape == table["u"].aval.shape == (2, 2)
    assert [site.nbytes for site in table] == [3 * 32 * 4] * 2
    assert [site.nbytes_per_device for site in table] == [3 * 4 * 4] * 2
    assert table.nbytes_per_device == 96


def test_cotangents(mesh):
    def body(x):
        x = perturb(x, name="by_spec", spec=BOTH)
        return perturb(2 * x, name="stacked") * x

    f = lambda x: Sharded(mesh, True).map(body)(x).sum()
    by_stack, by_spec = sites(jax.grad(f))(place(PROGRAMS["at_top"], mesh))
    assert (by_spec.kind, by_spec.axes, by_spec.nbytes_per_device) == ("cotangent", (), 16)
    assert (by_stack.kind, by_stack.axes, by_stack.nbytes_per_device) == ("cotangent", (ALL,), 16)
    assert by_spec.sharding.spec == P("data", "model")
