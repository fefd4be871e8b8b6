"""Law 3: loop axes first, outermost first, then batch axes, then the value's own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest

SIZES = (2, 3, 4)  # of the three levels
OWN = 5


def _cases():
    """Scans and vmaps nested three deep, in every order, with every `in_axes`."""
    for levels in itertools.product("sv", repeat=3):
        # The innermost level sees its own axis and that of the value, and so on outwards.
        choices = [range(4 - depth) if kind == "v" else [0] for depth, kind in enumerate(levels)]
        for positions in itertools.product(*choices):
            yield pytest.param(levels, positions, id="".join(levels) + "".join(map(str, positions)))


def _laid_out(canonical, positions):
    """The input with the axis of each level where that level looks for it."""
    order = [3]
    for level in (2, 1, 0):
        order.insert(positions[level], level)
    return jnp.transpose(canonical, order)


def _nested(levels, positions):
    def innermost(x):
        return 2 * harvest.sow(jnp.sin(x), name="h")

    fn = innermost
    for kind, position in reversed(list(zip(levels, positions, strict=True))):
        fn = (lambda f: lambda xs: lax.map(f, xs))(fn) if kind == "s" else jax.vmap(fn, position)
    return fn


@pytest.mark.parametrize("levels, positions", list(_cases()))
def test_axes_of_nested_loops_and_batches(levels, positions):
    canonical = jnp.arange(2 * 3 * 4 * OWN, dtype=jnp.float32).reshape(*SIZES, OWN) / 50
    x = _laid_out(canonical, positions)
    fn = _nested(levels, positions)
    order = [i for i, kind in enumerate(levels) if kind == "s"]
    order += [i for i, kind in enumerate(levels) if kind == "v"]

    out, collected = harvest.capture(fn)(x)
    np.testing.assert_allclose(out, 2 * jnp.sin(canonical), rtol=1e-6)
    wanted = jnp.transpose(jnp.sin(canonical), [*order, 3])
    np.testing.assert_allclose(collected["h"][0], wanted, rtol=1e-6)

    axes = harvest.sites(fn)(x)["h"].axes
    assert axes == tuple(
        harvest.Axis("loop" if levels[i] == "s" else "batch", SIZES[i]) for i in order
    )
    assert harvest.sites(fn)(x)["h"].aval.shape == (OWN,)

    other = jnp.transpose(canonical**2, [*order, 3])
    np.testing.assert_allclose(harvest.plant(fn, {"h": other})(x), 2 * canonical**2, rtol=1e-6)
    np.testing.assert_allclose(harvest.plant(fn, {"h": lambda h: h[::-1]})(x), out[..., ::-1])


def test_a_value_that_does_not_depend_on_the_mapped_axis_stays_unbatched():
    def f(x, y):
        h = harvest.sow({"x": jnp.sin(x), "y": jnp.cos(y)}, name="both")
        return harvest.sow(jnp.exp(y), name="alone") + h["x"] + h["y"]

    x, y = jnp.ones((2, 3)), jnp.ones(3)
    mapped = jax.vmap(f, in_axes=(0, None))
    acts = harvest.reap(mapped)(x, y)
    assert acts["both"]["x"].shape == (2, 3) and acts["both"]["y"].shape == (3,)
    assert acts["alone"].shape == (3,)
    np.testing.assert_allclose(harvest.plant(mapped, acts)(x, y), mapped(x, y), rtol=1e-6)


def test_a_leaf_that_only_one_of_two_vmaps_batches():
    def f(x, y):
        h = harvest.sow((x, y), name="h")
        return h[0] + h[1]

    x, y = jnp.arange(6.0).reshape(2, 3), jnp.arange(2.0)
    mapped = jax.vmap(jax.vmap(f, in_axes=(0, None)))
    got_x, got_y = harvest.reap(mapped)(x, y)["h"]
    assert got_x.shape == (2, 3) and got_y.shape == (2,)
    edited = harvest.plant(mapped, {"h": lambda h: (2 * h[0], h[1] - 1)})(x, y)
    np.testing.assert_allclose(edited, 2 * x + y[:, None] - 1)


def test_collectives_over_the_name_of_the_axis():
    def f(x):
        h = harvest.sow(jax.lax.psum(x, "batch"), name="sum")
        return harvest.sow(x - h, name="rest")

    x = jnp.arange(4.0)
    acts = harvest.reap(jax.vmap(f, axis_name="batch"))(x)
    assert acts["sum"].shape == () and acts["sum"] == 6
    np.testing.assert_array_equal(acts["rest"], x - 6)
    planted = harvest.plant(jax.vmap(f, axis_name="batch"), {"sum": jnp.float32(1)})
    np.testing.assert_array_equal(planted(x), x - 1)


def test_spmd_axis_name():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))

    def f(x):
        h = jax.lax.with_sharding_constraint(harvest.sow(jnp.sin(x), name="h"), spec)
        return 2 * h

    x = jnp.arange(8.0).reshape(4, 2)
    out, collected = harvest.capture(jax.vmap(f, spmd_axis_name="data"))(x)
    np.testing.assert_allclose(collected["h"][0], jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(out, 2 * jnp.sin(x), rtol=1e-6)
    assert out.sharding.spec[0] == "data"


def _one_sided(x):
    return lax.cond(x > 0, lambda x: harvest.sow(jnp.sin(x), name="h"), jnp.cos, x)


def test_a_batched_predicate_makes_all_branches_look_as_if_they_ran():
    x = jnp.array([-1.0, 1.0])
    with pytest.warns(harvest.HarvestWarning, match=r"'h' .*jax\.vmap\(reap\(f\)\)"):
        phantom = harvest.reap(jax.vmap(_one_sided))(x)["h"]
    assert phantom.shape == (2,)
    # Inside, they are kept apart.
    kept = jax.vmap(harvest.reap(_one_sided))(x)["h"]
    np.testing.assert_array_equal(kept.index, [0, 1])
    np.testing.assert_allclose(kept.branches[1], [0, np.sin(1)], rtol=1e-6)


def test_plants_where_a_predicate_is_batched():
    x, h = jnp.array([-1.0, 1.0, 2.0]), jnp.array([5.0, 6.0, 7.0])
    fn = jax.vmap(_one_sided)
    taken = np.asarray(x) > 0
    np.testing.assert_allclose(
        harvest.plant(fn, {"h": h})(x), np.where(taken, h, np.cos(x)), rtol=1e-6
    )
    edited = np.where(taken, np.sin(x) + 1, np.cos(x))
    for planted in (
        harvest.plant(fn, {"h": lambda h: h + 1}),
        jax.vmap(harvest.plant(_one_sided, {"h": harvest.add(1.0)})),
    ):
        np.testing.assert_allclose(planted(x), edited, rtol=1e-6)
        slopes = jax.grad(lambda x: jnp.sum(planted(x)))(x)  # noqa: B023
        np.testing.assert_allclose(slopes, np.where(taken, np.cos(x), -np.sin(x)), rtol=1e-6)
    with pytest.warns(harvest.HarvestWarning, match="'h'"):
        acts = harvest.reap(fn)(x)
    np.testing.assert_array_equal(harvest.plant(fn, acts)(x), fn(x))
    (site,) = harvest.sites(fn)(x)
    assert (site.axes, site.branch) == ((harvest.Axis("batch", 3),), None)


def test_a_predicate_that_is_not_batched_stays_a_cond():
    f = lambda flag, x: lax.cond(flag, lambda x: harvest.sow(jnp.sin(x), name="h"), jnp.cos, x)
    x = jnp.array([-1.0, 1.0])
    h = harvest.reap(jax.vmap(f, in_axes=(None, 0)))(jnp.asarray(False), x)["h"]
    assert h.index == 0 and h.branches[0] is None
    np.testing.assert_array_equal(h.branches[1], jnp.zeros(2))


def test_differentiation_moves_what_does_not_depend_on_a_loop_out_of_it():
    """As JAX does with any effect (jax#16637); the value is right, but has no loop axis."""

    def f(x, w):
        def step(x, _):
            return x * harvest.sow(jnp.sin(w), name="h"), None

        return lax.scan(step, x, length=3)[0]

    w = jnp.arange(2.0)
    total = lambda x, w: jnp.sum(f(x, w))
    hoisted = harvest.reap(jax.grad(total))(jnp.ones(2), w)["h"]
    np.testing.assert_allclose(hoisted, jnp.sin(w))
    outside = jax.grad(lambda x, w: (total(x, w), harvest.reap(f)(x, w)), has_aux=True)
    stacked = outside(jnp.ones(2), w)[1]["h"]
    np.testing.assert_allclose(stacked, jnp.stack([jnp.sin(w)] * 3))


def test_what_is_hoisted_and_evaluated_again_takes_no_value():
    """In a `checkpoint` the value is there once without, and once with the loop axis."""

    def f(x, w):
        block = jax.checkpoint(lambda x: x * harvest.sow(jnp.sin(w), name="h"))
        return lax.scan(lambda x, _: (block(x), None), x, length=3)[0]

    backward = jax.grad(f)
    for value in (jnp.ones(()), jnp.ones(3)):
        with pytest.raises(harvest.PlantError, match=r"evaluated 2 times .* f32\[\] and f32\[3\]"):
            harvest.plant(backward, {"h": value})(1.0, 2.0)
    doubled = harvest.plant(backward, {"h": lambda h: 2 * h})(1.0, 2.0)
    np.testing.assert_allclose(doubled, (2 * jnp.sin(2.0)) ** 3, rtol=1e-5)
    before = jax.grad(harvest.plant(f, {"h": jnp.ones(3)}))(1.0, 2.0)
    assert before == 1


def test_a_function_called_in_a_branch_and_elsewhere_is_not_warned_about():
    """JAX caches what it has batched, so that the warning must not be a part of it."""
    inner = jax.jit(lambda x: harvest.sow(jnp.sin(x), name="h"))
    in_branch = lambda x: lax.cond(x > 0, inner, jnp.cos, x)
    x = jnp.array([-1.0, 1.0])
    harvest.reap(jax.vmap(in_branch))(x)
    np.testing.assert_allclose(harvest.reap(jax.vmap(inner))(x)["h"], jnp.sin(x))
