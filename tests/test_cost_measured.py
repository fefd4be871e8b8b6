"""What `Sites.cost` says beside what is measured: compiled programs, arrays on devices, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from harvest import capture, folds, reap, scope, sites, sow

from . import hi_programs, shards
from .helpers import PROGRAMS
from .hi_programs import KINDS, STRUCTURES
from .hi_types import QPspec, quantize
from .meshes import DEVICES, MESHES, ON_ANY_MESH, X, put, sown

AUTO = MESHES["auto"]
LAYERS, BATCH, LENGTH, WIDTH = 4, 8, 16, 32


def model(params, x):
    def layer(x, w):
        with scope("layers"):
            hidden = sow(jax.nn.relu(x @ w["up"]), name="hidden")
            x = sow(x + hidden @ w["down"], name="resid")
            sow({"norm": jnp.linalg.norm(x, axis=-1), "top": x.argmax(-1)}, name="stats")
            return x, None

    return lax.scan(layer, sow(x, name="embed"), params)[0]


RNG = np.random.default_rng(0)
NORMAL = lambda *shape: RNG.normal(size=shape).astype(np.float32) / 8
PARAMS = {"up": NORMAL(LAYERS, WIDTH, 4 * WIDTH), "down": NORMAL(LAYERS, 4 * WIDTH, WIDTH)}
INPUT = NORMAL(BATCH, LENGTH, WIDTH)
ARGS = PARAMS, INPUT
SPECS = {
    "embed": P("d"),
    "layers/hidden": P(None, "d", None, "m"),
    "layers/resid": P(None, ("d", "m")),
    "layers/stats": {"norm": P(None, "d", "m"), "top": P()},
}


def arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def on_each(tree):
    """How many bytes of the arrays are on each device, all of which have as many."""
    sizes = dict.fromkeys(DEVICES, 0)
    for array in arrays_of(tree):
        for shard in array.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    (size,) = {*sizes.values()}
    return size


def nbytes(tree):
    return sum(array.nbytes for array in arrays_of(tree))


def placed(specs):
    is_spec = lambda node: isinstance(node, P)
    return jax.tree.map(lambda spec: NamedSharding(AUTO, spec), specs, is_leaf=is_spec)


FOLDED = {  # the specs without the axis of the loop
    "embed": P("d"),
    "layers/hidden": P("d", None, "m"),
    "layers/resid": P(("d", "m")),
    "layers/stats": {"norm": P("d", "m"), "top": P()},
}
FOLDS = {"last": folds.last(), "mean": folds.mean(), "maximum": folds.maximum()}


@pytest.mark.parametrize("fold", [None, *FOLDS])
def test_compiled_and_run(fold):
    select = None if fold is None else {"**": FOLDS[fold]}
    shardings = placed(SPECS if fold is None else FOLDED)
    jitted = jax.jit(reap(model, select), out_shardings=shardings)
    cost = sites(model)(*ARGS).cost(AUTO, SPECS)
    whole, on_device = (
        (cost.nbytes, cost.nbytes_per_device)
        if fold is None
        else (cost.nbytes_folded, cost.nbytes_folded_per_device)
    )
    compiled = jitted.lower(*ARGS).compile()
    measured = compiled.memory_analysis().output_size_in_bytes
    assert measured == pytest.approx(on_device, rel=0.1)
    values = compiled(*ARGS)
    assert (whole, on_device) == (nbytes(values), on_each(values))


@pytest.mark.parametrize("fold", [None, *FOLDS])
def test_what_the_compiler_chose(fold):
    params = {"up": put(PARAMS["up"], AUTO, None, None, "m"), "down": PARAMS["down"]}
    args = params, put(INPUT, AUTO, "d")
    whole = jax.jit(reap(model)).lower(*args).compile()
    cost = sites(model)(*args).cost(AUTO, whole.output_shardings)
    hidden = cost["layers/hidden"]
    assert hidden.nbytes_per_device == hidden.nbytes // 8  # by both axes
    assert cost.nbytes_per_device == on_each(whole(*args))
    if fold is not None:
        folded = jax.jit(reap(model, {"**": FOLDS[fold]})).lower(*args).compile()
        assert cost.nbytes_folded_per_device == on_each(folded(*args))
        measured = folded.memory_analysis().output_size_in_bytes
        assert measured == pytest.approx(cost.nbytes_folded_per_device, rel=0.1)


def test_what_the_compiler_chose_of_occurrences():
    def f(x):
        x = sow((x, 2 * x), name="h")[1]
        x, y = sow((x.T, x @ x.T), name="h")
        return sow(y, name="once")

    x = put(NORMAL(8, 16), AUTO, "d")
    compiled = jax.jit(capture(f)).lower(x).compile()
    cost = sites(f)(x).cost(None, compiled.output_shardings[1])
    values = compiled(x)[1]
    each = [*values["h"], *values["once"]]
    assert [row.nbytes_per_device for row in cost] == list(map(on_each, each))
    assert [row.nbytes for row in cost] == list(map(nbytes, each))


def test_what_the_compiler_chose_on_one_device():
    compiled = jax.jit(reap(model)).lower(*ARGS).compile()
    cost = sites(model)(*ARGS).cost(AUTO, compiled.output_shardings)
    assert cost.nbytes == cost.nbytes_per_device == nbytes(compiled(*ARGS))


def test_of_other_devices():
    """What was compiled on a mesh says how values are split on a larger one."""
    small = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    args = PARAMS, jax.device_put(INPUT, NamedSharding(small, P("d", None, "m")))
    found = jax.jit(reap(model, "embed")).lower(*args).compile().output_shardings
    cost = sites(model)(*args).cost(AUTO, found)
    assert cost["embed"].nbytes_per_device == INPUT.nbytes // 8
    assert sites(model)(*args).cost(None, found)["embed"].nbytes_per_device == INPUT.nbytes // 4


# ----------------------------------------------------------- what types say, and structures


@pytest.mark.parametrize("name", PROGRAMS)
def test_structures(name):
    f = sown(PROGRAMS[name])
    x = jnp.linspace(0, 1, 4)
    cost = sites(f)(x).cost()
    assert cost.nbytes == nbytes(reap(f)(x))
    assert cost.nbytes_folded == nbytes(reap(f, {"h": folds.last()})(x))


@pytest.mark.parametrize("name", ON_ANY_MESH)
def test_explicit_axes(name):
    mesh = MESHES["explicit"]
    with jax.set_mesh(mesh):
        f = sown(ON_ANY_MESH[name])
        x = put(X, mesh, "d", "m")
        cost = sites(f)(x).cost(mesh)
        values, last = reap(f)(x), reap(f, {"h": folds.last()})(x)
        assert (cost.nbytes, cost.nbytes_per_device) == (nbytes(values), on_each(values))
        assert (cost.nbytes_folded, cost.nbytes_folded_per_device) == (nbytes(last), on_each(last))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", shards.PROGRAMS)
def test_shard_map(name, check_vma):
    program = shards.PROGRAMS[name]
    mesh = shards.mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        f = program.make(shards.Sharded(mesh, check_vma))
        x = shards.place(program, mesh)
        cost = sites(f)(x).cost()
        values = reap(f)(x)
        for row in cost:
            value = values[row.key]
            assert (row.nbytes, row.nbytes_per_device) == (nbytes(value), on_each(value))
        assert sites(f)(x).cost(mesh).nbytes_per_device == cost.nbytes_per_device
        last = reap(f, {"**": folds.last()})(x)
        if name != "with_pytrees":  # of which also what is alike is stacked by a fold
            assert [row.nbytes_folded for row in cost] == [nbytes(last[row.key]) for row in cost]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_hi_types(kind, structure):
    f = hi_programs.program(KINDS[kind], STRUCTURES[structure])
    x = hi_programs.X
    cost = sites(f)(x).cost(dtype=jnp.bfloat16)  # of arrays only
    by_hand = lambda value: sum(lo.nbytes for lo in jax.typeof(value).lower_val(value))
    assert cost.nbytes == by_hand(reap(f)(x)["h"])
    assert cost.nbytes_folded == by_hand(reap(f, {"h": folds.last()})(x)["h"])
    compiled = jax.jit(reap(f)).lower(x).compile()
    assert sites(f)(x).cost(None, compiled.output_shardings).nbytes == cost.nbytes


def test_a_split_value_of_a_hi_type():
    f = lambda x: sow(quantize(x), name="h")
    x = jnp.linspace(0, 1, 64).reshape(16, 4)
    spec = P("d", None)
    values, scale = jax.typeof(quantize(x)).lower_val(jax.jit(f)(x))
    wanted = on_each([put(values, AUTO, *spec), put(scale, AUTO, *spec)])
    for told in (spec, QPspec(spec), {"h": [NamedSharding(AUTO, spec)] * 2}):
        assert sites(f)(x).cost(AUTO, told).nbytes_per_device == wanted == (64 + 16 * 4) // 4


def test_a_fold_gives_all_arrays_the_axes_of_the_batch():
    """As it may combine those that `vmap` batched with those that it did not."""

    def f(x, y):
        step = lambda c, _: (sow({"x": c, "y": y, "n": 3}, name="h")["x"], None)
        return lax.scan(step, x, length=3)[0]

    args = jnp.ones((8, 2)), jnp.ones(5)
    mapped = jax.vmap(f, (0, None))
    cost = sites(mapped)(*args).cost(AUTO, {"h": {"x": P(None, "d"), "y": P(), "n": None}})
    assert cost.nbytes == nbytes(reap(mapped)(*args)) == 3 * 8 * 2 * 4 + 3 * 5 * 4
    last = reap(mapped, {"h": folds.last()})(*args)
    assert cost.nbytes_folded == nbytes(last) == 8 * 2 * 4 + 8 * 5 * 4
    assert cost.nbytes_folded_per_device == 2 * 2 * 4 + 8 * 5 * 4


# --------------------------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fold", [None, folds.last()])
def test_files(tmp_path, dtype, fold):
    values = reap(model, {"layers/hidden": fold, "layers/resid": fold})(*ARGS)
    cost = sites(model)(*ARGS)[1:3].cost(dtype=dtype)
    predicted = {row.key: row.nbytes if fold is None else row.nbytes_folded for row in cost}
    assert set(predicted) == set(values)
    for number, (key, value) in enumerate(values.items()):
        stored = np.asarray(value.astype(dtype))
        np.save(tmp_path / f"{number}.npy", stored)
        size = (tmp_path / f"{number}.npy").stat().st_size
        assert size == pytest.approx(predicted[key], rel=0.1)
        assert zarr_size(tmp_path / f"{number}.zarr", stored) == pytest.approx(
            predicted[key], rel=0.1
        )


def zarr_size(path, array):
    metadata = {"shape": array.shape, "data_type": str(array.dtype)}
    store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    tensorstore.open({**store, "metadata": metadata}, create=True).result().write(array).result()
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_one_file_for_each_site(tmp_path):
    cost = sites(model)(*ARGS).cost()
    np.savez(tmp_path / "all.npz", **flat(reap(model)(*ARGS)))
    assert (tmp_path / "all.npz").stat().st_size == pytest.approx(cost.nbytes, rel=0.1)


def flat(values):
    pairs = jax.tree_util.tree_leaves_with_path(values)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in pairs}
