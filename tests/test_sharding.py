"""Values on a mesh keep their shardings, under automatic and under explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import harvest
from harvest import CondSum, capture, folds, plant, reap, sites, sow
from harvest._errors import PlantError, SelectError

from .helpers import LENGTH, PROGRAMS

DEVICES = np.array(jax.devices())
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "explicit": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT)),
    "auto": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(AUTO, AUTO)),
    "mixed": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(EXPLICIT, AUTO)),
}
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)

on_meshes = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
on_two = pytest.mark.parametrize(
    "mesh", [MESHES["explicit"], MESHES["auto"]], ids=["explicit", "auto"]
)
on_explicit = pytest.mark.parametrize("mesh", [MESHES["explicit"]], ids=["explicit"])
of_programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@pytest.fixture(autouse=True)
def _set_mesh(request):
    if "mesh" not in request.fixturenames:
        yield
        return
    with jax.set_mesh(request.getfixturevalue("mesh")):
        yield


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def sown(program):
    return lambda x: program.fn(x, lambda h, step: sow(h, name="h"))


def check_same(got, wanted):
    """Of the same values, and of one type: under explicit axes it has the sharding."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert jax.typeof(a).sharding == jax.typeof(b).sharding
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


# ------------------------------------------------------------------------------- collected


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


# ---------------------------------------------------------------------------------- folds

FOLDS = {
    "last": (folds.last(), lambda hs: hs[-1]),
    "at": (folds.at(1), lambda hs: hs[1]),
    "at traced": (folds.at(jnp.asarray(-2)), lambda hs: hs[1]),
    "mean": (folds.mean(), lambda hs: hs.mean(axis=0)),
    "maximum": (folds.maximum(), lambda hs: hs.max(axis=0)),
    "variance": (folds.moments(), lambda hs: folds.Moments(hs.mean(axis=0), hs.var(axis=0))),
    "every": (folds.every(2), lambda hs: hs[::2]),
    "of": (folds.last().of(lambda h: h.sum(axis=-1)), lambda hs: hs[-1].sum(axis=-1)),
    "function": (lambda h: h.sum(axis=0), lambda hs: hs.sum(axis=1)),
}


@on_meshes
@pytest.mark.parametrize("fold, by_hand", FOLDS.values(), ids=FOLDS)
def test_folds_have_the_sharding_of_what_they_fold(fold, by_hand, mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    got = reap(sown(program), {"h": fold})(x)["h"]
    check_same(got, jax.jit(lambda x: by_hand(program.values(x)))(x))


@on_two
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("in_axis", [0, 1])
def test_folds_of_batches_over_a_sharded_axis(name, in_axis, mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    fold, by_hand = FOLDS[name]
    got = reap(jax.vmap(sown(program), in_axis), {"h": fold})(x)["h"]
    of_example = lambda x: by_hand(program.values(x))
    out_axis = 1 if name == "function" else 0  # it is stacked, and loop axes come first
    check_same(got, jax.jit(jax.vmap(of_example, in_axis, out_axis))(x))


@on_two
def test_counts_and_histograms(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    bins = [-1.0, 0.0, 0.5, 9.0]
    batched = jax.vmap(sown(program))
    select = {"h": (folds.count(), folds.histogram(bins), folds.top_k(2), folds.stack(4))}
    count, histogram, top, stack = reap(batched, select)(x)["h"]
    hs = np.asarray(program.values(X)).swapaxes(0, 1)
    assert count.tolist() == [LENGTH] * 8
    np.testing.assert_array_equal(histogram, [np.histogram(h, bins)[0] for h in hs])
    np.testing.assert_allclose(top.values, np.sort(hs, axis=1)[:, :0:-1], rtol=1e-6)
    np.testing.assert_allclose(stack.values[:, :LENGTH], hs, rtol=1e-6)
    one = reap(sown(program), {"h": folds.histogram(bins)})(x)["h"]
    np.testing.assert_array_equal(one, np.histogram(hs, bins)[0])


@on_two
def test_batches_of_a_loop_in_which_lanes_stop(mesh):
    def f(x):
        def body(state):
            n, v = state
            return n + 1, sow(v * 2, name="h")

        return lax.while_loop(lambda s: s[0] < s[1].sum(), body, (0.0, x))[1]

    x = put(np.abs(X), mesh, "d")
    select = {"h": (folds.last(), folds.count())}
    last, count = reap(jax.vmap(f), select)(x)["h"]
    for row, got, times in zip(np.abs(X), last, count, strict=True):
        n = 0
        while n < row.sum():
            n, row = n + 1, row * 2
        assert times == n
        np.testing.assert_allclose(got, row if n else 0 * row, rtol=1e-6)
    if mesh is MESHES["explicit"]:
        assert jax.typeof(last).sharding.spec == P("d", None)
        assert jax.typeof(count).sharding.spec == P("d")


class SumOfSquares(harvest.Fold):
    def init(self, aval):
        return jnp.zeros(aval.shape, aval.dtype)

    def update(self, state, value, index):
        return state + value**2


@on_two
def test_a_fold_of_ones_own_need_not_know_of_shardings(mesh):
    program, x = PROGRAMS["scan"], put(X, mesh, "d", "m")
    got = reap(sown(program), {"h": SumOfSquares()})(x)["h"]
    check_same(got, jax.jit(lambda x: (program.values(x) ** 2).sum(axis=0))(x))


# --------------------------------------------------------------------------------- planted


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


# ------------------------------------------------------------------------------ derivatives

DIFFERENTIABLE = ["plain", "jit", "cond", "remat_of_scan", "scan_of_cond", "scan_of_scan"]


def at(stack, step):
    for index in () if step is None else step if isinstance(step, tuple) else (step,):
        stack = lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return stack


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


# ------------------------------------------------------------------------------------ sites


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
    assert "sharding" not in str(table) and "per device" not in str(table)
