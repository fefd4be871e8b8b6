"""What is planted on a mesh is resharded, and gradients at sites are sharded as the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

import harvest
from harvest import PlantError, capture, folds, plant, reap, sow

from .helpers import LENGTH, PROGRAMS
from .meshes import (
    DEVICES,
    EXPLICIT,
    MESHES,
    P,
    X,
    at,
    check_same,
    on_explicit,
    on_meshes,
    on_two,
    put,
    sown,
)


def forms_of(value, mesh):
    other = Mesh(DEVICES, ("q",), axis_types=(EXPLICIT,))
    front = (None,) * (value.ndim - 2)
    return {
        "numpy": value,
        "uncommitted": jnp.asarray(value),
        "one device": jax.device_put(value, DEVICES[3]),
        "replicated": put(value, mesh),
        "other axes": put(value, mesh, *front, None, "d"),
        "other mesh": put(value, other, *front, "q"),
    }


@on_meshes
@pytest.mark.parametrize("name", ["plain", "scan_of_scan", "scan_of_cond", "custom_vjp"])
def test_planted_values_are_resharded(name, mesh):
    program, x = PROGRAMS[name], put(X, mesh, "d", "m")
    value = np.random.default_rng(0).normal(size=(*program.loops, *X.shape)).astype(np.float32)
    f = lambda x: program.fn(x, lambda h, step: 3 * sow(h, name="h"))
    by_hand = program.fn(X, lambda h, step: 3 * at(jnp.asarray(value), step))
    for form in forms_of(value, mesh).values():
        out = plant(f, {"h": form})(x)
        np.testing.assert_allclose(out, by_hand, rtol=1e-5, atol=1e-6)
        if mesh is not MESHES["auto"]:
            assert jax.typeof(out).sharding == jax.typeof(f(x)).sharding
        planted = reap(plant(f, {"h": form}))(x)["h"]
        np.testing.assert_allclose(planted, value)
        if mesh is not MESHES["auto"]:
            assert jax.typeof(planted).sharding == jax.typeof(reap(f)(x)["h"]).sharding


@on_two
@pytest.mark.parametrize("name", ["plain", "scan"])
def test_edits_are_resharded(name, mesh):
    program, x = PROGRAMS[name], put(X, mesh, "d", "m")
    f = sown(program)
    doubled = program.fn(X, lambda h, step: 2 * h)
    added = program.fn(X, lambda h, step: h + X)
    replicated = NamedSharding(mesh, P())
    reshard = jax.sharding.reshard if mesh is MESHES["explicit"] else lax.with_sharding_constraint
    np.testing.assert_allclose(
        plant(f, {"h": lambda h: reshard(2 * h, replicated)})(x), doubled, rtol=1e-5, atol=1e-6
    )
    for operand in forms_of(X, mesh).values():
        np.testing.assert_allclose(
            plant(f, {"h": harvest.add(operand)})(x), added, rtol=1e-5, atol=1e-6
        )


@on_explicit
@pytest.mark.parametrize("other", ["explicit", "auto"])
def test_operands_of_another_shape_are_resharded(other, mesh):
    x, row = put(X, mesh, "d", "m"), np.arange(4, dtype=np.float32)
    f = sown(PROGRAMS["plain"])
    wanted = PROGRAMS["plain"].fn(X, lambda h, step: h * row[None])
    got = plant(f, {"h": harvest.scale(put(row, MESHES[other], "m"))})(x)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(PlantError, match=r"f32\[3\].* does not broadcast to f32\[8.*4"):
        plant(f, {"h": harvest.add(row[:3])})(x)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_arguments_that_are_not_needed_say_on_which_devices(kind):
    mesh = MESHES[kind]
    x, f = put(X, mesh, "d", "m"), lambda x: 2 * sow(x + 1, name="h")
    planted = plant(f, {"h": X})(x)
    np.testing.assert_array_equal(planted, 2 * X)
    assert planted.sharding.device_set == f(x).sharding.device_set
    if kind == "explicit":
        assert jax.typeof(planted).sharding == jax.typeof(f(x)).sharding


@on_two
def test_values_on_the_devices_of_another_mesh(mesh):
    x, f = put(X, mesh, "d"), sown(PROGRAMS["plain"])
    half = Mesh(DEVICES[:4], ("d",), axis_types=(mesh.axis_types[0],))
    elsewhere = put(X, half, "d")
    for transform in (plant, harvest.jvp):
        with pytest.raises(PlantError, match=r"for 'h' on the devices 0, 1, 2, 3 of another mesh"):
            transform(f, {"h": elsewhere})(x)
    with pytest.raises(PlantError, match=r"on a mesh of 4 devices, wanted one of the 8"):
        jax.jit(lambda x: plant(f, {"h": elsewhere})(x))(x)
    with pytest.raises(PlantError, match=r"at \['a'\] for 'h' on the devices 7, 6, 5"):
        backwards = put(X, Mesh(DEVICES[::-1], ("q",), axis_types=(EXPLICIT,)), "q")
        plant(lambda x: sow({"a": x}, name="h")["a"], {"h": {"a": backwards}})(x)


@on_explicit
def test_keys_on_one_device(mesh):
    key = jax.device_put(jax.random.key(0), DEVICES[3])
    f = lambda key, x: jax.random.normal(sow(key, name="key"), x.shape) + 0 * x
    x = put(X, mesh, "d")
    got = plant(f, {"key": key})(jax.random.key(7), x)
    np.testing.assert_allclose(got, jax.random.normal(jax.random.key(0), X.shape), rtol=1e-5)


DIFFERENTIABLE = ["plain", "jit", "cond", "remat_of_scan", "scan_of_cond", "scan_of_scan"]


@on_two
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_sharded_as_the_values(name, mesh):
    program, x = PROGRAMS[name], put(X, mesh, "d", "m")
    loops = program.loops
    zeros = put(np.zeros((*loops, *X.shape), np.float32), mesh, *(None,) * len(loops), "d", "m")
    loss = lambda out: (out**2).sum()
    by_hand = lambda eps: loss(program.fn(x, lambda h, step: h + at(eps, step)))
    wanted = jax.jit(jax.grad(by_hand))(zeros)
    f = lambda x: loss(sown(program)(x))
    check_same(harvest.grad(f)(x)["h"], wanted)
    value, (grads, at_x) = harvest.value_and_grad(f, argnums=0)(x)
    check_same(grads["h"], wanted)
    check_same(at_x, jax.jit(jax.grad(f))(x))
    np.testing.assert_allclose(value, f(X), rtol=1e-5)
    check_same(harvest.grad(f, {"h": lambda ct: 2 * ct})(x)["h"], 2 * wanted)
    _, tangent, tangents = harvest.jvp(f, {"h": wanted})(x)
    np.testing.assert_allclose(tangent, (np.asarray(wanted) ** 2).sum(), rtol=1e-4)
    assert jax.typeof(tangents["h"]).sharding == jax.typeof(wanted).sharding


@on_two
@pytest.mark.parametrize("name", ["scan", "plain"])
def test_folds_of_gradients(name, mesh):
    program, x = PROGRAMS[name], put(X, mesh, "d", "m")
    f = lambda x: (sown(program)(x) ** 2).sum()
    grads = harvest.grad(f)(x)["h"]
    last = harvest.grad(f, {"h": folds.last()})(x)["h"]
    check_same(last, jax.jit(lambda g: g[-1] if program.loops else g * 1)(grads))
    collected = capture(jax.grad(f))(x)[1]["h"]
    check_same(collected, capture(f)(x)[1]["h"])


@on_two
def test_sweeps_and_their_estimates(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    f = lambda x: sown(program)(x).sum()
    source = reap(f)(put(X + 1, mesh, "d", "m"))
    edit = lambda h, source, row: h + row * source
    rows = jnp.array([0.0, 1e-3])
    exact = harvest.sweep(f, source, edit, rows)(x)["h"]
    wanted = [
        [
            program.fn(
                X, lambda h, i, n=n, r=r: h + jnp.where(i == n, r, 0) * at(source["h"], i)
            ).sum()
            for r in rows
        ]
        for n in range(LENGTH)
    ]
    np.testing.assert_allclose(exact, wanted, rtol=1e-4)
    estimate = harvest.attribute(f, source, edit, rows)(x)["h"]
    np.testing.assert_allclose(estimate, exact, rtol=1e-4)
