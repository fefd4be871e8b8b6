"""Edits in `shard_map`: operands are global, functions see one shard, in one iteration."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import harvest
from harvest import (
    PlantError,
    UnsupportedError,
    add,
    at,
    attribute,
    capture,
    chain,
    each,
    indexed,
    plant,
    reap,
    replace,
    scale,
    sow,
    sweep,
    zero,
)
from tests.shards import BOTH, P, Sharded, X, cut, joined, mesh_of, two_sites

LENGTH = 3
RANDOM = np.random.RandomState(5)
D = RANDOM.randn(8, 4).astype(np.float32)
DS = RANDOM.randn(LENGTH, 8, 4).astype(np.float32)


def placed(sharded, x=X, spec=BOTH):
    return jax.device_put(x, NamedSharding(sharded.mesh, spec))


def layers(sharded):
    def body(x):
        def step(x, k):
            x = sow(jnp.sin(x) * k, name="h", spec=BOTH)
            return sow(x + 1, name="u"), None

        return lax.scan(step, x, jnp.arange(1.0, 1 + LENGTH))[0]

    return sharded.map(body)


def unchanged(value, step):
    return value


def layers_by_hand(h=unchanged, u=unchanged):
    x = X
    for step in range(LENGTH):
        x = u(h(np.sin(x) * np.float32(1 + step), step) + 1, step)
    return x


def assert_close(got, wanted, tolerance=1e-4):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


class Linear(eqx.Module):
    weight: jax.Array

    def __call__(self, value):
        return value @ self.weight


W = RANDOM.randn(2, 2).astype(np.float32)


def per_shard(fn, value):
    return joined(np.stack([fn(shard) for shard in cut(value)]))


def test_operands_are_of_the_global_value(sharded):
    f, x = sharded.map(lambda x: 2 * two_sites(x)), placed(sharded)
    h = np.sin(X)
    with jax.numpy_rank_promotion("allow"):
        operands = [D, D[:1], D[:, :1], D[0], np.float32(3)]
        for operand in operands:
            assert_close(plant(f, {"h": add(operand)})(x), 2 * (h + operand + 1))
            assert_close(plant(f, {"h": scale(operand)})(x), 2 * (h * operand + 1))
        # Of what is stacked, they have the axis of the mesh in front, or none of it.
        assert_close(plant(f, {"u": add(cut(D))})(x), 2 * (h + 1 + D))
        assert_close(plant(f, {"u": add(W)})(x), 2 * (per_shard(lambda s: s + W, h) + 1))
        one = np.arange(8, dtype=np.float32).reshape(8, 1, 1)
        assert_close(plant(f, {"u": scale(one)})(x), 2 * joined(cut(h + 1) * one))


def test_functions_see_one_shard(sharded):
    f, x = sharded.map(lambda x: 2 * two_sites(x)), placed(sharded)
    centred = per_shard(lambda s: s - s.mean(), np.sin(X))
    assert_close(plant(f, {"h": lambda h: h - h.mean()})(x), 2 * (centred + 1))
    mapped = per_shard(lambda s: s @ W, np.sin(X))
    assert_close(plant(f, {"h": Linear(jnp.asarray(W))})(x), 2 * (mapped + 1))
    both = chain(Linear(jnp.asarray(W)), add(D))
    assert_close(plant(f, {"h": both})(x), 2 * (mapped + D + 1))


def test_functions_may_communicate(sharded):
    f, x = sharded.map(lambda x: 2 * two_sites(x)), placed(sharded)
    centred = lambda h: h - lax.pmean(h.mean(), ("data", "model"))
    wanted = np.sin(X) - np.sin(X).mean()
    assert_close(plant(f, {"h": centred})(x), 2 * (wanted + 1))


EDITS = {
    "at": (at(1, add(D)), lambda h, i: h + D * (i == 1)),
    "at_value": (at(jnp.array([0, -1]), D), lambda h, i: h if i == 1 else D),
    "at_slice": (at(slice(1, None), zero()), lambda h, i: h * (i < 1)),
    "at_function": (at(2, lambda h: -h), lambda h, i: -h if i == 2 else h),
    "each": (each(add(DS)), lambda h, i: h + DS[i]),
    "each_number": (each(scale(jnp.array([1.0, 0.0, 2.0]))), lambda h, i: h * (1, 0, 2)[i]),
    "each_module": (
        each(Linear(jnp.stack([W, 2 * W, -W]))),
        lambda h, i: per_shard(lambda s: s @ (W, 2 * W, -W)[i], h),
    ),
    "each_chain": (each(chain(add(DS), scale(DS))), lambda h, i: (h + DS[i]) * DS[i]),
    "chain": (
        chain(each(add(DS)), at(0, scale(3))),
        lambda h, i: (h + DS[i]) * (1 if i else 3),
    ),
    "indexed": (indexed(lambda h, i: h + i[0].astype(h.dtype)), lambda h, i: h + i),
    "value": (DS, lambda h, i: DS[i]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_in_a_loop(edit, sharded):
    f, x = layers(sharded), placed(sharded)
    given, by_hand = EDITS[edit]
    assert_close(plant(f, {"h": given})(x), layers_by_hand(h=by_hand))
    assert "shard_map" in str(jax.make_jaxpr(plant(f, {"h": given}))(x))


def test_edits_of_stacked_values_in_a_loop(sharded):
    f, x = layers(sharded), placed(sharded)
    shards = np.stack(list(map(cut, DS)))
    assert_close(plant(f, {"u": shards})(x), layers_by_hand(u=lambda u, i: DS[i]))
    assert_close(plant(f, {"u": each(add(shards))})(x), layers_by_hand(u=lambda u, i: u + DS[i]))
    last = at(2, cut(D))
    assert_close(plant(f, {"u": last})(x), layers_by_hand(u=lambda u, i: D if i == 2 else u))


def test_occurrences(sharded):
    def body(x):
        for step in range(3):
            x = sow(jnp.sin(x) + step, name="h", spec=None if step == 1 else BOTH)
        return x

    f, x = sharded.map(body), placed(sharded)
    first = np.sin(X)
    second = np.sin(first) + 1
    third = np.sin(second) + 2
    out, values = capture(f)(x)
    for got, wanted in zip((out, *values["h"]), (third, first, cut(second), third), strict=True):
        assert_close(got, wanted)
    assert_close(plant(f, values, mode="append")(x), third)
    assert_close(plant(f, {"h": (None, cut(D), None)}, mode="append")(x), np.sin(D) + 2)
    assert_close(plant(f, {"h": (None, None, add(D))}, mode="append")(x), third + D)


def test_edits_are_differentiated(sharded):
    f, x = sharded.map(lambda x: 2 * two_sites(x)), placed(sharded)
    weight = jnp.asarray(W)
    total = lambda weight: plant(f, {"h": Linear(weight)})(x).sum()
    wanted = sum(2 * shard.T @ np.ones((2, 2), np.float32) for shard in cut(np.sin(X)))
    assert_close(jax.grad(total)(weight), wanted)
    value = jax.device_put(D, NamedSharding(sharded.mesh, BOTH))
    squares = lambda value: (plant(f, {"h": value})(x) ** 2).sum()
    assert_close(jax.jit(jax.grad(squares))(value), 8 * (D + 1))


def test_arrays_of_numpy_and_arrays_placed_elsewhere(sharded):
    f, x = sharded.map(lambda x: 2 * two_sites(x)), placed(sharded)
    elsewhere = jax.device_put(D, NamedSharding(mesh_of(AxisType.Auto), P("model", "data")))
    for value in (D, elsewhere):
        assert_close(plant(f, {"h": value})(x), 2 * (D + 1))
        assert_close(plant(f, {"h": add(value)})(x), 2 * (np.sin(X) + D + 1))


def test_sweep(sharded):
    f, x = layers(sharded), placed(sharded)
    factors = (0.0, 2.0)
    swept = sweep(f, None, lambda h, factor: h * factor, jnp.array(factors))(x)
    for step in range(LENGTH):
        for k, factor in enumerate(factors):
            edit = lambda v, i, step=step, factor=factor: v * factor if i == step else v
            assert_close(swept["h"][step, k], layers_by_hand(h=edit))
            assert_close(swept["u"][step, k], layers_by_hand(u=edit))


def test_a_sweep_takes_values_of_another_run(sharded):
    f, x = layers(sharded), placed(sharded)
    source = {"h": DS, "u": np.stack(list(map(cut, DS)))}
    swept = sweep(f, source, lambda value, source: source)(x)
    for step in range(LENGTH):
        edit = lambda v, i, step=step: DS[step] if i == step else v
        assert_close(swept["h"][step], layers_by_hand(h=edit))
        assert_close(swept["u"][step], layers_by_hand(u=edit))


def test_attribute(sharded):
    f = layers(sharded)
    loss = lambda x: f(x).sum()
    rows = attribute(loss, None, lambda h, by: h * (1 + by), jnp.array([0.0, 1.0]))(placed(sharded))
    for step in range(LENGTH):
        edits = [lambda v, i, by=by, step=step: v * (1 + by * (i == step)) for by in (-1e-2, 1e-2)]
        low, high = (layers_by_hand(h=edit).sum() for edit in edits)
        base = layers_by_hand().sum()
        wanted = [base, base + (high - low) / 2e-2]
        np.testing.assert_allclose(rows["h"][step], wanted, rtol=1e-3)


def test_jvp(sharded):
    f, x = layers(sharded), placed(sharded)
    _, tangent, _ = harvest.jvp(f, {"h": DS})(x)
    ends = [layers_by_hand(h=lambda h, i, s=sign: h + s * 1e-2 * DS[i]) for sign in (1, -1)]
    np.testing.assert_allclose(tangent, (ends[0] - ends[1]) / 2e-2, rtol=2e-2, atol=2e-2)


def test_the_first_site_that_is_not_finite(sharded):
    def body(x):
        x = sow(x, name="a", spec=BOTH)
        return sow(jnp.log(x), name="b")

    f, x = sharded.map(body), np.ones_like(X)
    assert not harvest.debug.nonfinite(f)(placed(sharded, x))
    x[5, 3] = -1
    (fault,) = harvest.debug.nonfinite(f)(placed(sharded, x))
    assert (fault.key, fault.lane, fault.shard) == ("b", (), {"data": 2, "model": 1})
    assert "'b', shard data=2, shard model=1, sown at" in str(fault)
    batch = placed(sharded, np.stack([abs(x), x]), P(None, *BOTH))
    (fault,) = harvest.debug.nonfinite(jax.vmap(f))(batch)
    assert (fault.lane, fault.shard) == ((1,), {"data": 2, "model": 1})


NO_VALUES = {
    r"got f32\[2,2\], wanted f32\[8,4\], for the site 'h'": np.ones((2, 2), np.float32),
    r"type f32\[3,4\] .*which does not broadcast to the global value, of type f32\[8,4\]": add(
        np.ones((3, 4), np.float32)
    ),
    r"type f32\[2,2\] .*which does not broadcast to the global value, of type f32\[8,4\]": scale(
        np.ones((2, 2), np.float32)
    ),
    r"got f32\[2\], wanted f32\[2,2\], for the site 'h'": lambda h: h[0],
}


@pytest.mark.parametrize("message", NO_VALUES)
def test_what_does_not_fit(message, sharded):
    f = sharded.map(lambda x: 2 * two_sites(x))
    with pytest.raises(PlantError, match=message):
        plant(f, {"h": NO_VALUES[message]})(placed(sharded))


def test_a_value_that_is_alike_in_all_shards_stays_so():
    sharded = Sharded(mesh_of(AxisType.Auto), True)
    f = sharded.map(lambda x: x + sow(lax.psum(x, ("data", "model")), name="total"))
    differs = lambda total: total + lax.axis_index("data").astype(total.dtype)
    with pytest.raises(PlantError, match=r"varies along the mesh axes \['data'\].*'total'"):
        plant(f, {"total": differs})(X)


def test_two_meshes_in_one_program():
    two, one = mesh_of(AxisType.Auto), jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))

    def in_one(x):
        x = sow(2 * x, name="c", spec=P("z"))
        return sow(x - 1, name="d")

    def f(x):
        x = Sharded(two, True).map(two_sites)(x)
        return jax.shard_map(in_one, mesh=one, in_specs=P("z"), out_specs=P("z"))(x)

    h = np.sin(X)
    out = 2 * (h + 1) - 1
    values = {"h": h, "u": cut(h + 1), "c": 2 * (h + 1), "d": out[:, None]}
    for got in (capture(f, mode="strict")(X), jax.jit(capture(f, mode="strict"))(X)):
        jax.tree.map(assert_close, got, (out, values))
    assert_close(plant(f, values)(X), out)
    assert_close(plant(f, {"u": add(cut(D))})(X), 2 * (h + 1 + D) - 1)


@pytest.mark.parametrize("shape", [(8, 1), (1, 1)])
def test_mesh_axes_of_size_one(shape, sharded):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        f = Sharded(mesh, sharded.check_vma).map(two_sites)
        h = np.sin(X)
        values = {"h": h, "u": (h + 1).reshape(shape[0], -1, 4)}
        jax.tree.map(assert_close, capture(f, mode="strict")(X), (h + 1, values))
        assert_close(plant(f, values)(X), h + 1)


def test_a_loop_around_the_inner_of_two_shard_maps():
    mesh = mesh_of(AxisType.Auto)

    def f(x):
        def body(x):
            def step(x, k):
                inner = jax.shard_map(
                    two_sites, in_specs=P(None, "model"), out_specs=P(None, "model")
                )
                return sow(inner(x) + k, name="o", spec=P("data")), None

            return lax.scan(step, x, jnp.arange(3.0))[0]

        return Sharded(mesh, True).map(body, P("data"), P("data"), axis_names={"data"})(x)

    f, x = jax.jit(f), X
    wanted = {"h": [], "u": [], "o": []}
    for step in range(3):
        wanted["h"].append(np.sin(x))
        wanted["u"].append(cut(np.sin(x) + 1).reshape(4, 2, 2, 2))
        x = np.sin(x) + 1 + np.float32(step)
        wanted["o"].append(x)
    wanted = {key: np.stack(values) for key, values in wanted.items()}
    jax.tree.map(assert_close, capture(f, mode="strict")(X), (x, wanted))
    assert_close(plant(f, wanted)(X), x)
    x = X
    for step in range(3):
        x = np.sin(x) + DS[step] + 1 + np.float32(step)
    assert_close(plant(f, {"h": each(add(DS))})(X), x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_smap(check_vma):
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        body = lambda x: sow(sow(jnp.sin(x), name="h", spec=P("data")) + 1, name="u")
        f = jax.jit(jax.smap(body, in_axes=0, out_axes=0, axis_name="data"))
        values = {"h": np.sin(X), "u": (np.sin(X) + 1).reshape(4, 2, 4)}
        jax.tree.map(assert_close, capture(f, mode="strict")(X), (np.sin(X) + 1, values))
        assert_close(plant(f, {"h": D})(X), D + 1)


# ------------------------------------------------------------ what has no global form


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_vmap_that_splits_its_axis_over_the_mesh(check_vma):
    def body(x):
        return sow(jnp.sin(x), name="h", spec=P("model"))

    f = Sharded(mesh_of(AxisType.Auto), check_vma).map(body, P("model"), P("model"))
    split = jax.jit(jax.vmap(f, spmd_axis_name="data"))
    assert_close(split(X), np.sin(X))
    for transformed in (
        capture(split),
        plant(split, {"h": X}),
        harvest.grad(lambda x: split(x).sum()),
    ):
        with pytest.raises(UnsupportedError, match=r"'h' .*`spmd_axis_name` \['data'\]"):
            transformed(X)
    assert_close(capture(split, select=[])(X)[0], np.sin(X))
    if check_vma:  # otherwise `u` and the like would be stacked over that axis too
        inside = jax.jit(jax.vmap(reap(f), spmd_axis_name="data"))
        assert_close(inside(X)["h"], np.sin(X))


def test_a_cotangent_under_a_vmap_that_splits_its_axis():
    body = lambda x: harvest.perturb(jnp.sin(x), name="g", spec=P("model"))
    f = Sharded(mesh_of(AxisType.Auto), True).map(body, P("model"), P("model"))
    gradient = jax.grad(lambda x: jax.jit(jax.vmap(f, spmd_axis_name="data"))(x).sum())
    with pytest.raises(UnsupportedError, match=r"'g' .*`spmd_axis_name` \['data'\]"):
        capture(gradient)(X)


@pytest.mark.parametrize("to", ["unreduced", "reduced"])
def test_values_that_are_still_to_be_summed(to):
    mesh = mesh_of(AxisType.Explicit)

    def body(x, w):
        if to == "reduced":
            return x * sow(lax.pcast(w, ("data", "model"), to="reduced"), name="h").sum()
        return x * lax.psum(sow(lax.pcast(x, "data", to="unreduced"), name="h"), "data")

    with jax.set_mesh(mesh):
        f = Sharded(mesh, True).map(body, (BOTH, P()))
        x = jax.device_put(X, NamedSharding(mesh, BOTH))
        with pytest.raises(UnsupportedError, match=r"'h' .*unreduced or reduced over the mesh"):
            reap(f)(x, jnp.ones(3))


def test_a_mapped_axis_that_is_sharded_explicitly():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        body = lambda x: sow(jnp.sin(x), name="h", spec=P("model"))
        f = jax.vmap(Sharded(mesh, True).map(body, P("model"), P("model"), axis_names={"model"}))
        f, x = jax.jit(f), jax.device_put(X, NamedSharding(mesh, BOTH))
        reducers = (None, jnp.sum, harvest.folds.last(), harvest.folds.count())
        whole, sums, last, count = reap(f, {"h": reducers})(x)["h"]
        assert_close(whole, np.sin(X))
        assert_close(last, np.sin(X))
        assert_close(sums, np.sin(X).reshape(8, 2, 2).sum(2))
        np.testing.assert_array_equal(count, np.ones(np.shape(count)))
        assert_close(plant(f, {"h": D})(x), D)


def test_a_value_in_an_edit_that_is_not_the_global_one():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    spec = P("i")
    f = jax.shard_map(
        lambda x: sow({"a": x, "static": 3}, name="h", spec=spec)["a"],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    x = jnp.arange(4.0)
    wanted = {"a": 10 + x, "static": 3}
    np.testing.assert_array_equal(plant(f, {"h": chain(replace(wanted), add(1.0))})(x), 11 + x)
    shard = {"a": 10 + x[:2], "static": 3}
    with pytest.raises(PlantError, match=r"got f32\[2\] at .*wanted f32\[4\].*'h'"):
        plant(f, {"h": chain(replace(shard), add(1.0))})(x)
    with pytest.raises(PlantError, match=r"structure.*'h'"):
        plant(f, {"h": chain(replace(x), add(1.0))})(x)
    with pytest.raises(PlantError, match=r"'h'"):
        plant(f, {"h": add((x, x, x))})(x)
