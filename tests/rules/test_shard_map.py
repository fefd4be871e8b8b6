"""Sites in `shard_map`: global arrays, equal to those of the program without any."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import harvest
from harvest import Axis, SowError, UnsupportedError, add, capture, each, plant, reap, sites, sow
from tests.shards import (
    BOTH,
    PROGRAMS,
    P,
    Sharded,
    X,
    cut,
    mesh_of,
    nested,
    nested_reference,
    place,
)


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


def assert_close(got, wanted, tolerance=2e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance), got, wanted
    )


def test_values(program, sharded):
    f, x = program.make(sharded), place(program, sharded.mesh)
    wanted = program.reference(sharded, X)
    assert_close(f(x), wanted[0])
    assert_close(capture(f, mode="strict")(x), wanted)
    assert_close(reap(f)(x), wanted[1])
    assert_close(jax.jit(capture(f, mode="strict"))(x), wanted)
    assert_close(capture(jax.jit(f), mode="strict")(x), wanted)


def test_round_trip(program, sharded):
    f, x = program.make(sharded), place(program, sharded.mesh)
    out, values = program.reference(sharded, X)
    assert_close(plant(f, reap(f)(x))(x), out)
    given = jax.tree.map(lambda v: np.asarray(v) if np.ndim(v) else v, values)
    assert_close(plant(f, given)(x), out)
    assert_close(plant(f, capture(f)(x)[1], mode="append")(x), out)


def test_planted_values_are_used(program, sharded):
    # Another argument's values make another argument's result, from the last sites on.
    f, x = program.make(sharded), place(program, sharded.mesh)
    other = X[::-1] * 0.7
    values = program.reference(sharded, other)[1]
    planted, collected = capture(plant(f, values), mode="strict")(x)
    assert_close(collected, values)
    if {"u", "total"} & values.keys():
        assert not np.allclose(planted, program.reference(sharded, X)[0])


def test_a_custom_rule_still_applies(mesh, sharded):
    for name in ("in_custom_vjp", "in_custom_jvp"):
        f, x = PROGRAMS[name].make(sharded), place(PROGRAMS[name], mesh)
        grads = jax.grad(lambda x, f=f: capture(f)(x)[0].sum())(x)
        assert_close(grads, 3 * np.cos(X))  # the rule is thrice the derivative


def test_gradients_of_outputs(program, sharded):
    f, x = program.make(sharded), place(program, sharded.mesh)
    assert_close(
        jax.grad(lambda x: capture(f)(x)[0].sum())(x), jax.grad(lambda x: f(x).sum())(x), 1e-4
    )


DIFFERENTIATED = ["at_top", "in_jit", "in_remat", "around_scan", "inside_scan", "over_one_axis"]
DIFFERENTIATED += ["around_cond", "inside_cond", "around_uneven_cond", "around_vmap", "inside_vmap"]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_at_sites(name, sharded):
    program = PROGRAMS[name]
    f, x = program.make(sharded), place(program, sharded.mesh)
    loss = lambda x: (f(x) ** 2).sum()
    for key, value in program.reference(sharded, X)[1].items():
        direction = np.random.RandomState(1).randn(*value.shape).astype(np.float32)
        if "vmap" in name and key == "u" and not sharded.check_vma:
            # Of two shards that are to be alike, and are not, the result is that of either.
            direction = np.repeat(direction[:, ::2], 2, axis=1)

        def along(eps, key=key, direction=direction):
            edit = add(jnp.float32(eps) * direction)
            return plant(loss, {key: each(edit) if "scan" in name else edit})(x)

        wanted = (along(1e-2) - along(-1e-2)) / 2e-2
        got = np.vdot(harvest.grad(loss, key)(x)[key], direction)
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=5e-2)


def test_gradients_at_sites_between_loops(sharded):
    program = PROGRAMS["between_scans"]
    f, x = program.make(sharded), place(program, sharded.mesh)

    def by_hand(eps):  # too steep for finite differences
        y = jnp.asarray(X)
        for i, w in enumerate((1.0, 2.0, 3.0)):
            for j, v in enumerate((1.0, 2.0)):
                y = (jnp.sin(y) + eps[i, j] + 1) * w * v
        return jnp.sum(y**2)

    wanted = jax.grad(by_hand)(jnp.zeros((3, 2, 8, 4)))
    got = harvest.grad(lambda x: (f(x) ** 2).sum())(x)
    assert_close(got["h"], wanted, 1e-3)
    rows = np.stack([cut(row) for row in np.reshape(wanted, (6, 8, 4))])
    assert_close(got["u"], rows.reshape(3, 2, 8, 2, 2), 1e-3)


def test_under_vmap(program):
    for check_vma in (True, False):
        sharded = Sharded(mesh_of(AxisType.Auto), check_vma)
        f = program.make(sharded)
        both = [program.reference(sharded, x) for x in (X, X + 1)]
        wanted = jax.tree.map(lambda *rows: np.stack(rows), *both)
        assert_close(jax.vmap(capture(f, mode="strict"))(jnp.stack([X, X + 1])), wanted)


def test_forward_values_in_a_gradient(program, sharded):
    f, x = program.make(sharded), place(program, sharded.mesh)
    if "custom" in f.__qualname__:  # there the rule is evaluated, and not the body
        assert not capture(jax.grad(lambda x: f(x).sum()))(x)[1]
        return
    values = capture(jax.grad(lambda x: f(x).sum()), mode="strict")(x)[1]
    assert_close(values, program.reference(sharded, X)[1])


@pytest.mark.parametrize("outer, inner", [(True, True), (True, False), (False, False)])
def test_nested(outer, inner):
    # Types inside of an inner one that does not check say nothing of the axis of the outer one.
    mesh = mesh_of(AxisType.Auto)
    f = nested(Sharded(mesh, outer), Sharded(mesh, inner))
    out, values = nested_reference(X)
    assert_close(capture(f, mode="strict")(X), (out, values))
    assert_close(plant(f, values)(X), out)
    assert_close(plant(f, {"u": add(1.0)})(X), out + 1)
    sums, last = reap(f, {"u": (jnp.sum, harvest.folds.last())})(X)["u"]
    assert_close((sums, last), (values["u"].sum((2, 3)), values["u"]))
    assert sites(f)(X)["u"].axes == (Axis("mesh", 4, ("data",)), Axis("mesh", 2, ("model",)))


def test_a_planted_value_that_leaves_an_inner_one_that_does_not_check():
    mesh = mesh_of(AxisType.Auto)
    sine = lambda x: sow(jnp.sin(x), name="h", spec=BOTH)
    f = nested(Sharded(mesh, True), Sharded(mesh, False), sine)
    assert_close(plant(f, {"h": X})(X), X)
    wanted = np.sin(X) + X
    assert_close(capture(plant(f, {"h": add(X)}), mode="strict")(X), (wanted, {"h": wanted}))


def test_nested_as_jax_differentiates_it():
    # JAX cannot lower this program; with `check_vma=False` it can.
    f = nested(Sharded(mesh_of(AxisType.Auto), check_vma=True))
    gradient = jax.grad(lambda x: f(x).sum())
    with pytest.raises(ValueError, match="already bound by a parent"):
        gradient(X)
    with pytest.raises(UnsupportedError, match=r"'h' \(sown at .*\) is inside a `shard_map` ins"):
        reap(gradient)(X)


def test_cotangents(sharded):
    def body(x):
        x = harvest.perturb(x, name="gx", spec=BOTH)
        y = harvest.perturb(jnp.sum(x**2), name="gy")
        return jnp.broadcast_to(y, x.shape) * x

    f = lambda x: sharded.map(body)(x).sum()
    x = jax.device_put(X, NamedSharding(sharded.mesh, BOTH))
    cts = capture(jax.grad(f), mode="strict")(x)[1]
    shards = np.stack([s for row in np.split(X, 4) for s in np.split(row, 2, axis=1)])
    sums = shards.sum((1, 2))
    assert_close(cts["gy"], sums)
    wanted = 2 * shards * sums[:, None, None] + (shards**2).sum((1, 2))[:, None, None]
    rows = [np.concatenate([wanted[2 * i], wanted[2 * i + 1]], axis=1) for i in range(4)]
    assert_close(cts["gx"], np.concatenate(rows), 1e-4)
    assert_close(plant(jax.grad(f), {"gx": lambda ct: 0 * ct})(x), np.zeros_like(X))


def test_sites(sharded):
    f, x = PROGRAMS["around_scan"].make(sharded), place(PROGRAMS["around_scan"], sharded.mesh)
    table = sites(f)(x)
    assert table["h"].aval.shape == table["u"].aval.shape == (2, 2)
    assert table["h"].axes == (Axis("loop", 3),)
    assert table["u"].axes == (Axis("loop", 3), Axis("mesh", 8, ("data", "model")))
    assert table["h"].nbytes == table["u"].nbytes == 3 * 8 * 4 * 4


def test_collected_values_are_sharded(sharded):
    f, x = PROGRAMS["around_scan"].make(sharded), place(PROGRAMS["around_scan"], sharded.mesh)
    values = jax.jit(reap(f))(x)
    wanted = {"h": P(None, "data", "model"), "u": P(None, ("data", "model"))}
    for key, spec in wanted.items():
        sharding = NamedSharding(sharded.mesh, spec)
        assert values[key].sharding.is_equivalent_to(sharding, values[key].ndim)


def test_the_program_is_the_same_without_sows(program, sharded, monkeypatch):
    x = place(program, sharded.mesh)
    text = jax.jit(program.make(sharded)).lower(x).as_text()
    jax.clear_caches()
    monkeypatch.setattr("tests.shards.sow", lambda value, **_: value)
    without = jax.jit(program.make(sharded)).lower(x).as_text()
    named = re.compile(r"loc\(.*\)|@\w+")
    assert named.sub("", text) == named.sub("", without)


COLLECTIVES = re.compile(
    r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
)


@pytest.mark.parametrize("name", ["at_top", "around_scan", "with_collectives"])
def test_no_collective_is_added(name, sharded):
    program = PROGRAMS[name]
    f, x = program.make(sharded), place(program, sharded.mesh)
    plain = jax.jit(f).lower(x).compile().as_text()
    collecting = jax.jit(capture(f)).lower(x).compile().as_text()
    assert sorted(COLLECTIVES.findall(collecting)) == sorted(COLLECTIVES.findall(plain))


BAD_SPECS = {
    "varies along the mesh axis 'model'": P("data"),
    "the mesh has no axis 'batch'": P("batch", "model"),
    "at most one item for each of its axes": P("data", "model", None),
    "names an axis of the mesh twice": P("data", ("data", "model")),
    "wanted a `jax.sharding.PartitionSpec`": "data",
}


@pytest.mark.parametrize("message", BAD_SPECS)
def test_specs_that_do_not_fit(message, mesh):
    body = lambda x: sow(x, name="h", spec=BAD_SPECS[message])
    with pytest.raises(SowError, match=message):
        jax.eval_shape(Sharded(mesh, True).map(body), place(PROGRAMS["at_top"], mesh))


def test_a_spec_of_what_does_not_vary(mesh):
    body = lambda x: x + sow(jax.lax.psum(x, "data"), name="h", spec=BOTH)
    with pytest.raises(SowError, match="does not vary along the mesh axis 'data'"):
        jax.eval_shape(Sharded(mesh, True).map(body), place(PROGRAMS["at_top"], mesh))


def test_a_spec_outside_is_not_looked_at():
    f = lambda x: sow(x, name="h", spec=BOTH)
    assert_close(reap(f)(X)["h"], X)
