"""What `spec` may be: checked where the value is sown, before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

from harvest import PlantError, SowError, capture, perturb, plant, reap, sow
from tests.shards import BOTH, P, Sharded, X, cut, joined, mesh_of

MESH = mesh_of(AxisType.Auto)
CHECKED, UNCHECKED = Sharded(MESH, True), Sharded(MESH, False)


def sown(spec, sharded=CHECKED, make=lambda x: x):
    def body(x):
        sow(make(x), name="h", spec=spec)
        return x

    return sharded.map(body)


NO_SPECS = {
    "has no axis 'batch', but": P("batch", "model"),
    "at most one item for each of its axes": P("data", "model", None),
    "names an axis of the mesh twice": P(("data", "data"), "model"),
    r"wanted a `jax\.sharding\.PartitionSpec`": 3,
    "no prefix of the value": {"a": BOTH},
}


@pytest.mark.parametrize("sharded", [CHECKED, UNCHECKED], ids=["check_vma", "unchecked"])
@pytest.mark.parametrize("message", NO_SPECS)
def test_what_is_no_spec_of_the_value(message, sharded):
    with pytest.raises(SowError, match=rf"`sow\(\.\.\., name='h'\)`.*{message}"):
        jax.eval_shape(sown(NO_SPECS[message], sharded), X)


MISFITS = {
    "varies along the mesh axis 'model'; wanted a spec that names it": (P("data"), lambda x: x),
    "varies along the mesh axis 'data'; wanted a spec that names it": (P(), lambda x: x[0, 0]),
    r"not vary along the mesh axis 'data'; wanted a spec without it \(or `jax\.lax\.pcast": (
        BOTH,
        lambda x: lax.psum(x, "data"),
    ),
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_spec_that_is_not_that_of_the_varying_axes(message):
    spec, make = MISFITS[message]
    with pytest.raises(SowError, match=message):
        jax.eval_shape(sown(spec, make=make), X)


def test_the_leaf_that_a_spec_does_not_fit_is_named():
    pair = lambda x: {"a": x, "b": (x, x[0])}
    specs = {"a": BOTH, "b": (BOTH, P("data"))}
    with pytest.raises(SowError, match=r"f32\[2\]\['b'\]\[1\], which varies along .* 'model'"):
        jax.eval_shape(sown(specs, make=pair), X)


def test_the_spec_of_a_cotangent():
    f = lambda x: CHECKED.map(lambda x: perturb(x, name="g", spec=P("data")))(x).sum()
    with pytest.raises(SowError, match=r"`perturb\(\.\.\., name='g'\)`.* axis 'model'"):
        jax.eval_shape(jax.grad(f), X)


def rows_and_columns(shards):
    """Shards of a mesh (4, 2), as the blocks of a matrix with two rows and four columns."""
    return np.block([[shards[2 * i + j] for i in range(4)] for j in range(2)])


SHARDS = cut(X)
ORDERS = {
    "swapped": (P("model", "data"), rows_and_columns(SHARDS)),
    "joined": (P(("data", "model")), np.concatenate(SHARDS)),
    "joined_backwards": (P(("model", "data")), np.concatenate([*SHARDS[::2], *SHARDS[1::2]])),
    "behind": (P(None, ("data", "model")), np.concatenate(SHARDS, axis=1)),
}


@pytest.mark.parametrize("sharded", [CHECKED, UNCHECKED], ids=["check_vma", "unchecked"])
@pytest.mark.parametrize("order", ORDERS)
def test_specs_in_any_order(order, sharded):
    spec, value = ORDERS[order]
    f = sharded.map(lambda x: 2 * sow(x, name="h", spec=spec))
    np.testing.assert_array_equal(reap(f)(X)["h"], value)
    np.testing.assert_array_equal(plant(f, {"h": value})(X), 2 * X)


def test_one_spec_for_a_tree_and_one_for_each_leaf():
    def body(x):
        sow({"a": x, "b": (2 * x, "static")}, name="one", spec=BOTH)
        sow({"a": x, "b": (x.sum(), 7)}, name="each", spec={"a": BOTH, "b": None})
        return x

    values = capture(CHECKED.map(body), mode="strict")(X)[1]
    np.testing.assert_array_equal(values["one"]["a"], X)
    np.testing.assert_array_equal(values["one"]["b"][0], 2 * X)
    assert values["one"]["b"][1] == "static" and values["each"]["b"][1] == 7
    np.testing.assert_array_equal(values["each"]["a"], X)
    np.testing.assert_allclose(values["each"]["b"][0], SHARDS.sum((1, 2)), rtol=1e-6)


def test_of_a_mesh_that_is_manual_in_part_the_rest_may_be_named():
    body = lambda x: sow(jnp.sin(x), name="h", spec=BOTH)
    f = jax.jit(CHECKED.map(body, P("data"), P("data"), axis_names={"data"}))
    np.testing.assert_allclose(reap(f)(X)["h"], np.sin(X), rtol=1e-6)


def test_every_type_of_leaf():
    def body(x):
        place = lax.axis_index("data") * 2 + lax.axis_index("model")
        key = jax.random.fold_in(jax.random.key(0), place)
        tree = {
            "int": (10 * x).astype(jnp.int32),
            "bool": x > 0,
            "half": x.astype(jnp.bfloat16),
            "key": key,
        }
        specs = {"int": BOTH, "bool": BOTH, "half": BOTH, "key": None}
        tree = sow(tree, name="h", spec=specs)
        noise = jax.random.uniform(tree["key"], x.shape)
        return noise + jnp.where(tree["bool"], tree["half"].astype(x.dtype), 0)

    f = CHECKED.map(body)
    h = reap(f)(X)["h"]
    np.testing.assert_array_equal(h["int"], (10 * X).astype(np.int32))
    np.testing.assert_array_equal(h["bool"], X > 0)
    assert h["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(h["half"], jnp.asarray(X, jnp.bfloat16))
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(8)]
    np.testing.assert_array_equal(
        jax.random.key_data(h["key"]), np.stack(list(map(jax.random.key_data, keys)))
    )
    np.testing.assert_array_equal(plant(f, {"h": h})(X), f(X))
    swapped = plant(f, {"h": {**h, "key": h["key"][::-1]}})(X)
    noise = [jax.random.uniform(key, (2, 2)) for key in keys[::-1]]
    half = np.asarray(jnp.asarray(X, jnp.bfloat16), np.float32)
    wanted = joined(np.stack(noise)) + np.where(X > 0, half, 0)
    np.testing.assert_allclose(swapped, wanted, rtol=1e-6)


def test_why_a_value_has_other_axes_than_expected():
    f = CHECKED.map(lambda x: sow(x, name="h"))
    stacked = r"got f32\[8,4\], wanted f32\[8,2,2\], for the site 'h' .*, whose shards are stacked"
    with pytest.raises(PlantError, match=stacked):
        plant(f, {"h": X})(X)
    with pytest.raises(PlantError, match=r"got f32\[2\], wanted f32\[2,2\],.* in one shard"):
        plant(f, {"h": lambda h: h[0]})(X)
