"""Values on a mesh are collected with the shardings that they have, and sites say which."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from harvest import CondSum, SelectError, capture, folds, plant, reap, sites, sow

from .helpers import PROGRAMS
from .meshes import (
    AUTO,
    MESHES,
    P,
    X,
    check_same,
    of_programs,
    on_explicit,
    on_meshes,
    on_two,
    put,
    sown,
)


@on_two
@of_programs
def test_collected_values_are_sharded_as_those_returned_by_hand(program, mesh):
    x, f = put(X, mesh, "d", "m"), sown(program)
    check_same(reap(f)(x)["h"], jax.jit(program.values)(x))
    out, collected = jax.jit(capture(f))(x)
    check_same(collected["h"], (jax.jit(program.values)(x),))
    np.testing.assert_allclose(out, f(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plant(f, reap(f)(x))(x), f(X), rtol=1e-5, atol=1e-6)


@on_two
@pytest.mark.parametrize("spec, in_axis", [(("d", "m"), 0), (("d", "m"), 1), ((None, "d"), 0)])
@pytest.mark.parametrize("name", ["plain", "scan", "cond", "scan_of_remat", "custom_jvp"])
def test_batches_over_sharded_and_other_axes(name, spec, in_axis, mesh):
    program, x = PROGRAMS[name], put(X, mesh, *spec)
    f, depth = jax.vmap(sown(program), in_axis), len(program.loops)
    by_hand = jax.vmap(program.values, in_axis, out_axes=depth)
    check_same(reap(f)(x)["h"], jax.jit(by_hand)(x))
    check_same(reap(f, {"h": lambda h: 2 * h})(x)["h"], 2 * jax.jit(by_hand)(x))
    np.testing.assert_allclose(plant(f, reap(f)(x))(x), f(X), rtol=1e-5, atol=1e-6)
    edited = jax.vmap(lambda x: program.fn(x, lambda h, step: h + 1), in_axis)
    check_same(plant(f, {"h": lambda h: h + 1})(x), jax.jit(edited)(x))


@on_meshes
def test_branches_that_sow_different_things(mesh):
    def f(x):
        return lax.cond(x.sum() > 0, lambda x: sow(jnp.sin(x), name="h"), lambda x: 2 * x, x)

    for x in (X + 1, X - 1):
        x = put(x, mesh, "d", "m")
        wanted = jax.jit(lambda x: jnp.where(x.sum() > 0, jnp.sin(x), 0))(x)
        h = reap(f)(x)["h"]
        assert isinstance(h, CondSum) and h.branches[0] is None
        check_same(h.branches[1], wanted)
        np.testing.assert_allclose(plant(f, {"h": h})(x), f(x), rtol=1e-6)


@on_explicit
def test_branches_with_one_value_in_two_shardings(mesh):
    def f(x):
        by_columns = lambda x: sow(jax.sharding.reshard(x + 1, P(None, "d")), name="h").sum()
        return lax.cond(x[0, 0] > 0, by_columns, lambda x: sow(x - 1, name="h").sum(), x)

    x = put(X, mesh, "d")
    h = reap(f)(x)["h"]
    assert [jax.typeof(b).sharding.spec for b in h.branches] == [P("d", None), P(None, "d")]
    np.testing.assert_allclose(h.branches[0], X - 1)
    np.testing.assert_array_equal(h.branches[1], 0 * X)
    with pytest.raises(SelectError, match="a fold needs values of one type"):
        reap(f, {"h": folds.last()})(x)


@pytest.mark.parametrize("name", ["plain", "scan", "scan_of_cond", "remat_of_scan"])
def test_without_a_mesh_that_is_set(name):
    program, x = PROGRAMS[name], put(X, MESHES["explicit"], "d", "m")
    f = sown(program)
    check_same(reap(f)(x)["h"], jax.jit(program.values)(x))
    select = {"h": (folds.last(), folds.mean(), folds.top_k(2), folds.histogram([0, 1]))}
    last = reap(f, select)(x)["h"][0]
    check_same(
        last,
        jax.jit(lambda x: program.values(x) if not program.loops else program.values(x)[-1])(x),
    )


@on_explicit
def test_values_that_are_not_yet_reduced(mesh):
    x, w = put(X, mesh, "d", "m"), put(np.eye(4, dtype=np.float32), mesh, "m")

    def f(x, w):
        out = P("d", None, unreduced={"m"})
        partial = sow(jnp.einsum("ab,bc->ac", x, w, out_sharding=out), name="partial")
        return jax.sharding.reshard(partial, P("d", None))

    partial = reap(f)(x, w)["partial"]
    assert jax.typeof(partial).sharding.spec.unreduced == {"m"}
    np.testing.assert_allclose(jax.sharding.reshard(partial, P("d", None)), X)
    np.testing.assert_allclose(plant(f, {"partial": partial})(x, w), X)


@on_explicit
def test_sites_say_what_is_on_each_device(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    (site,) = table = sites(sown(program))(x)
    assert site.aval.sharding.spec == P("d", "m") and site.aval.shape == (8, 4)
    assert site.sharding.spec == P(None, "d", "m")
    assert site.nbytes == 3 * 8 * 4 * 4 and site.nbytes_per_device == site.nbytes // 8
    h = reap(sown(program))(x)["h"]
    assert site.nbytes_per_device == h.addressable_shards[0].data.nbytes
    assert h.sharding.is_equivalent_to(NamedSharding(mesh, site.sharding.spec), h.ndim)
    assert table.nbytes_per_device == 48
    assert "P(None, 'd', 'm')  48 B" in str(table) and "384 B, 48 B on each device" in str(table)
    (batched,) = sites(jax.vmap(sown(program), 1))(x)
    assert batched.sharding.spec == P(None, "m", "d") and batched.aval.sharding.spec == P("d")


@on_explicit
def test_shardings_of_trees_and_branches(mesh):
    def f(x):
        x = sow({"x": x, "n": 3, "y": x.sum()}, name="tree")["x"]
        return lax.cond(x[0, 0] > 0, lambda x: sow(x, name="h"), lambda x: x, x)

    tree, h = sites(f)(put(X, mesh, "d"))
    assert tree.sharding["x"].spec == P("d", None) and tree.sharding["y"].spec == P()
    assert tree.sharding["n"] is None and tree.nbytes_per_device == 8 * 4 * 4 // 4 + 4
    assert h.sharding.branches[0] is None and h.sharding.branches[1].spec == P("d", None)


@pytest.mark.parametrize("kind", [AUTO, None])
def test_types_that_say_nothing_of_a_sharding(kind):
    x = X if kind is None else put(X, MESHES["auto"], "d")
    (site,) = table = sites(sown(PROGRAMS["scan"]))(x)
    assert site.sharding is None and site.nbytes_per_device == site.nbytes
    header, *_, total = str(table).splitlines()
    assert "sharding" not in header and "device" not in total
