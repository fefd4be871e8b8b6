"""Reducers in `shard_map`: functions and folds see one shard; loops and branches that differ."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import harvest
from harvest import (
    CondSum,
    PlantError,
    UnsupportedError,
    add,
    at,
    capture,
    folds,
    plant,
    reap,
    scale,
    sow,
)
from tests.shards import BOTH, P, Sharded, X, cut, joined, mesh_of, nested

LENGTH = 3
COUNT = 8  # shards
D = np.random.RandomState(5).randn(8, 4).astype(np.float32)
PLACES = np.arange(COUNT)


def placed(sharded):
    return jax.device_put(X, NamedSharding(sharded.mesh, BOTH))


def assert_close(got, wanted, tolerance=1e-4):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def layers(sharded, length=LENGTH):
    def body(x):
        def step(x, k):
            x = sow(jnp.sin(x) * k, name="h", spec=BOTH)
            return sow(x + 1, name="u"), None

        return lax.scan(step, x, jnp.arange(1.0, 1 + length))[0]

    return sharded.map(body)


def layers_by_hand(length=LENGTH):
    x, hs = X, []
    for step in range(length):
        hs.append(np.sin(x) * np.float32(1 + step))
        x = hs[-1] + 1
    return np.stack(hs)


HS = layers_by_hand()
SHARDS = np.stack(list(map(cut, HS)))  # (LENGTH, COUNT, 2, 2)


# ---------------------------------------------------------------------------- in a loop


LIKE_VALUES = {
    "last": (folds.last(), lambda h: h[-1]),
    "mean": (folds.mean(), lambda h: h.mean(0)),
    "maximum": (folds.maximum(), lambda h: h.max(0)),
    "at": (folds.at(1), lambda h: h[1]),
    "at_an_array": (folds.at(jnp.asarray(1)), lambda h: h[1]),
}


@pytest.mark.parametrize("name", LIKE_VALUES)
def test_folds_like_the_value_are_global(name, sharded):
    fold, by_hand = LIKE_VALUES[name]
    f, x = layers(sharded), placed(sharded)
    collected = reap(f, {"h": fold, "u": fold})(x)
    assert_close(collected["h"], by_hand(HS))
    assert_close(collected["u"], by_hand(SHARDS + 1))
    spec = jax.jit(reap(f, {"h": fold}))(x)["h"].sharding
    assert spec.is_equivalent_to(NamedSharding(sharded.mesh, BOTH), 2)


def test_other_folds_are_stacked_shard_by_shard(sharded):
    f, x = layers(sharded), placed(sharded)
    edges = jnp.linspace(-3, 3, 7)
    reducers = folds.moments(), folds.top_k(2), folds.stack(5), folds.histogram(edges)
    moments, top, stack, histogram = reap(f, {"h": reducers})(x)["h"]
    assert_close(moments.mean, SHARDS.mean(0))
    assert_close(moments.variance, SHARDS.var(0))
    assert_close(top.values, np.swapaxes(np.sort(SHARDS, axis=0)[:0:-1], 0, 1))
    order = np.swapaxes(np.argsort(SHARDS, axis=0)[:0:-1], 0, 1)
    np.testing.assert_array_equal(top.indices[0], order)
    assert_close(stack.values[:, :LENGTH], np.swapaxes(SHARDS, 0, 1))
    assert not stack.overflow.any() and (stack.values[:, LENGTH:] == 0).all()
    counts = [np.histogram(SHARDS[:, k], edges)[0] for k in range(COUNT)]
    np.testing.assert_array_equal(histogram, counts)


class Total(harvest.Fold):
    """Over all shards as well."""

    weight: jax.Array

    def init(self, aval):
        return jnp.zeros((), aval.dtype)

    def update(self, state, value, index):
        return state + self.weight * lax.psum(value.sum(), ("data", "model"))

    def finish(self, state, count):
        return state


def test_a_fold_that_reduces_over_the_mesh(sharded):
    collected = reap(layers(sharded), {"h": Total(jnp.float32(2))})(placed(sharded))
    assert_close(collected["h"], sharded.alike(2 * HS.sum()), 1e-3)


class Linear(eqx.Module):
    weight: jax.Array

    def __call__(self, value):
        return value @ self.weight


def test_functions_of_one_shard(sharded):
    weight = D[:2, :2]
    total = lambda u: {"sum": lax.psum(u.sum(), ("data", "model")), "static": 3}
    reducers = {"h": (Linear(jnp.asarray(weight)), jnp.sum), "u": total}
    f, x = layers(sharded), placed(sharded)
    collected = reap(f, reducers)(x)
    assert_close(collected["h"][0], SHARDS @ weight)
    assert_close(collected["h"][1], SHARDS.sum((2, 3)))
    totals = [sharded.alike(u.sum()) for u in HS + 1]
    assert_close(collected["u"]["sum"], np.stack(totals), 1e-3)
    assert collected["u"]["static"] == 3
    bound = lambda k: jax.tree_util.Partial(lambda k, h: k * h, k)
    scaled = jax.jit(lambda k: reap(f, {"h": bound(k)})(x))(jnp.float32(3))["h"]
    assert_close(scaled, 3 * SHARDS)


def test_early_exit(sharded):
    length = 6
    f, x, hs = layers(sharded, length), placed(sharded), layers_by_hand(length)
    early = reap(f, {"h": folds.at(1)})
    assert_close(early(x)["h"], hs[1])
    text = str(jax.make_jaxpr(early)(x))
    assert "shard_map" in text and "length=2" in text and f"length={length}" not in text
    assert_close(reap(f, {"u": folds.at(jnp.asarray(3))})(x)["u"], cut(hs[3] + 1))
    assert_close(reap(f, {"u": folds.at(-1)})(x)["u"], cut(hs[-1] + 1))


def test_loops_inside_and_around():
    def f(x):
        def outer(x, k):
            def body(x, k):
                step = lambda x, j: (sow(jnp.sin(x) + k + j, name="h", spec=P("data")), None)
                return lax.scan(step, x, jnp.arange(2.0))[0]

            specs = (P("data"), P()), P("data")
            mapped = Sharded(mesh_of(AxisType.Auto), True).map(body, *specs, axis_names={"data"})
            return mapped(x, k), None

        return lax.scan(outer, x, jnp.arange(3.0))[0]

    f, x, hs = jax.jit(f), X, []
    for k in range(3):
        for j in range(2):
            x = np.sin(x) + np.float32(k + j)
            hs.append(x)
    hs = np.stack(hs).reshape(3, 2, 8, 4)
    mean = folds.mean()
    whole, both, inner, outer = reap(f, {"h": (None, mean, mean.over(1), mean.over(0))})(X)["h"]
    for got, wanted in [
        (whole, hs),
        (both, hs.mean((0, 1))),
        (inner, hs.mean(1)),
        (outer, hs.mean(0)),
    ]:
        assert_close(got, wanted)
    assert_close(plant(f, {"h": hs})(X), x)


def test_under_vmap():
    sharded = Sharded(mesh_of(AxisType.Auto), True)
    f, xs = layers(sharded), jnp.stack([X, X + 1])
    reducers = {"h": (folds.last(), folds.mean(), folds.count()), "u": (folds.last(), jnp.sum)}
    around = jax.vmap(reap(f, reducers))(xs)
    within = reap(jax.vmap(f), reducers)(xs)
    for got in (around, within):
        assert_close(got["h"][0][0], HS[-1])
        assert_close(got["h"][1][0], HS.mean(0))
        assert_close(got["u"][0][0], SHARDS[-1] + 1)
    sums = (SHARDS + 1).sum((2, 3))
    assert_close(around["u"][1][0], sums)
    assert_close(within["u"][1][:, 0], sums)


# ------------------------------------------------------------------------- `while_loop`s


def turning(trips):
    """`trips(place)` times `x -> sin(x) + 1`, where `place` is the number of the shard."""

    def body(x):
        place = lax.axis_index("data") * 2 + lax.axis_index("model")

        def step(carry):
            i, x = carry
            return i + 1, sow(jnp.sin(x) + 1, name="h", spec=BOTH)

        last = trips(place)
        return lax.while_loop(lambda carry: carry[0] < last, step, (last * 0, x))[1]

    return body


def turning_by_hand(trips, edit=lambda h, place, step: h):
    """For each shard its result, and its values."""
    ends, values = [], []
    for place, x in enumerate(cut(X)):
        values.append([])
        for step in range(trips(place)):
            x = edit(np.sin(x) + 1, place, step)
            values[-1].append(x)
        ends.append(x)
    return joined(np.stack(ends)), values


TRIPS = {
    "alike": lambda place: 3,
    "by_shard": lambda place: place,
    "by_row": lambda place: place // 2,
}


@pytest.mark.parametrize("trips", TRIPS)
def test_while_loops(trips, sharded):
    trips = TRIPS[trips]
    f, x = sharded.map(turning(lambda place: jnp.asarray(trips(place)))), placed(sharded)
    out, values = turning_by_hand(trips)
    zeros = np.zeros((2, 2), np.float32)
    last = joined(np.stack([v[-1] if v else zeros for v in values]))
    largest = joined(np.stack([np.max(v, axis=0) if v else zeros for v in values]))
    counts = np.array(list(map(len, values)))

    got, collected = capture(f, {"h": (folds.last(), folds.maximum(), folds.count())})(x)
    ((got_last, got_largest, got_counts),) = collected["h"]
    assert_close(got, out)
    assert_close(got_last, last)
    ran = joined(np.broadcast_to((counts > 0)[:, None, None], (COUNT, 2, 2)))
    assert_close(np.where(ran, got_largest, 0), largest)
    np.testing.assert_array_equal(np.broadcast_to(per_shard(got_counts), COUNT), counts)

    ds = cut(D)
    added, _ = turning_by_hand(trips, lambda h, place, step: h + ds[place])
    assert_close(plant(f, {"h": add(D)})(x), added)
    replaced, _ = turning_by_hand(trips, lambda h, place, step: ds[place])
    assert_close(plant(f, {"h": D})(x), replaced)
    second, _ = turning_by_hand(trips, lambda h, place, step: ds[place] if step == 1 else h)
    assert_close(plant(f, {"h": at(1, D)})(x), second)


def per_shard(counts):
    """One count for each shard, from one for all of them, or one for each row of the mesh."""
    counts = np.asarray(counts)
    return np.repeat(counts, 2) if counts.shape == (COUNT // 2,) else counts


# ------------------------------------------------------------------------------- `cond`s


def twice_or_sum(flag, x):
    return lax.cond(
        flag,
        lambda x: sow(2 * x, name="h", spec=BOTH),
        lambda x: sow(x.sum(), name="h") * x,
        x,
    )


SUMS = cut(X).sum((1, 2))


@pytest.mark.parametrize("flag", [False, True])
def test_a_sum_of_branches(flag, sharded):
    f, x = sharded.map(twice_or_sum, (P(), BOTH)), placed(sharded)
    h = reap(f)(jnp.asarray(flag), x)["h"]
    np.testing.assert_array_equal(h.index, sharded.alike(int(flag)))
    assert_close(h.branches[0], 0 * SUMS if flag else SUMS)
    assert_close(h.branches[1], 2 * X * flag)
    assert_close(plant(f, {"h": h})(jnp.asarray(flag), x), 2 * X if flag else joined_sums(SUMS))
    given = CondSum(0, (SUMS + 1, D))
    planted = plant(f, {"h": given})(jnp.asarray(flag), x)
    assert_close(planted, D if flag else joined_sums(SUMS + 1))
    scaled = plant(f, {"h": scale(3)})(jnp.asarray(flag), x)
    assert_close(scaled, 6 * X if flag else joined_sums(3 * SUMS))


def joined_sums(sums):
    return joined(cut(X) * sums[:, None, None])


POSITIVE = cut(X)[:, 0, 0] > 0
WHERE = joined(np.broadcast_to(POSITIVE[:, None, None], (COUNT, 2, 2)))


def test_a_sum_of_branches_that_only_some_shards_run(sharded):
    f, x = sharded.map(lambda x: twice_or_sum(x[0, 0] > 0, x)), placed(sharded)
    h = reap(f)(x)["h"]
    np.testing.assert_array_equal(h.index, POSITIVE)
    assert_close(h.branches[0], SUMS * ~POSITIVE)
    assert_close(h.branches[1], 2 * X * WHERE)
    wanted = np.where(WHERE, 2 * X, joined_sums(SUMS))
    assert_close(plant(f, {"h": h})(x), wanted)
    reduced = reap(f, {"h": lambda h: h.sum()})(x)["h"]
    assert_close(reduced.branches[0], SUMS * ~POSITIVE)
    assert_close(reduced.branches[1], 2 * SUMS * POSITIVE)


def test_a_branch_without_the_site(sharded):
    def body(x):
        return lax.cond(x[0, 0] > 0, lambda x: sow(2 * x, name="h", spec=BOTH), lambda x: -x, x)

    f, x = sharded.map(body), placed(sharded)
    h = reap(f)(x)["h"]
    assert h.branches[0] is None
    assert_close(h.branches[1], 2 * X * WHERE)
    assert_close(plant(f, {"h": h})(x), np.where(WHERE, 2 * X, -X))
    assert_close(plant(f, {"h": add(D)})(x), np.where(WHERE, 2 * X + D, -X))
    sums, last, count = reap(f, {"h": (jnp.sum, folds.last(), folds.count())})(x)["h"]
    assert_close(sums.branches[1], 2 * SUMS * POSITIVE)
    assert_close(last, 2 * X * WHERE)
    np.testing.assert_array_equal(count, POSITIVE)
    grads = harvest.grad(lambda x: (D * f(x)).sum())(placed(sharded))["h"]
    assert_close(grads.branches[1], D * WHERE)


def test_branches_in_a_loop(sharded):
    def body(x):
        def step(x, k):
            low = lambda x: sow(jnp.sin(x) - 1, name="h", spec=BOTH)
            high = lambda x: sow(jnp.cos(x) + k, name="h", spec=BOTH)
            return lax.cond(x[0, 0] > 0, low, high, x), None

        return lax.scan(step, x, jnp.arange(3.0))[0]

    f, x, shards, hs = sharded.map(body), placed(sharded), cut(X), []
    for k in range(3):
        pick = lambda s, k=k: np.sin(s) - 1 if s[0, 0] > 0 else np.cos(s) + np.float32(k)
        shards = np.stack(list(map(pick, shards)))
        hs.append(joined(shards))
    out, collected = capture(f, mode="strict")(x)
    assert_close(out, hs[-1])
    assert_close(collected["h"], np.stack(hs))
    assert_close(plant(f, collected)(x), hs[-1])
    assert_close(reap(f, {"h": folds.mean()})(x)["h"], np.mean(hs, axis=0))
    assert_close(plant(f, {"h": at(2, D)})(x), D)


def test_what_is_alike_in_the_shards_that_run_a_branch(sharded):
    # JAX takes it to be alike in all shards, whose branches may differ: nothing that differs can
    # stand for it.
    def body(x):
        total = lax.psum(x.sum(), ("data", "model"))
        first = lax.axis_index("data") == 0
        double, triple = (lambda t, k=k: sow(k * t, name="h") for k in (2, 3))
        return x * lax.cond(first, double, triple, total)

    f, x = sharded.map(body), placed(sharded)
    factors = np.array([2, 3, 3, 3], np.float32)
    wanted = X.sum() * (factors if sharded.check_vma else np.repeat(factors, 2))
    h = reap(f)(x)["h"]
    assert_close(h, wanted, 1e-3)
    if sharded.check_vma:
        with pytest.raises(PlantError, match=r"varies along the mesh axes \['data'\].*site 'h'"):
            plant(f, {"h": h})(x)
    else:
        assert_close(plant(f, {"h": h})(x), f(x))
    halved = np.repeat(factors, 2)[:, None] * X / 2 * X.sum()
    assert_close(plant(f, {"h": scale(0.5)})(x), halved, 1e-3)


def test_indices_of_64_bits(sharded):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        body = lambda x: lax.scan(lambda x, _: (sow(2 * x, name="h", spec=BOTH), None), x, length=3)
        f, x = lambda x: sharded.map(lambda x: body(x)[0])(x), placed(sharded)
        for index in (1, jnp.asarray(1)):
            assert_close(reap(f, {"h": folds.at(index)})(x)["h"], 4 * X)


def test_a_fold_in_nested_ones_where_only_a_gradient_traces():
    f = nested(Sharded(mesh_of(AxisType.Auto), check_vma=False))
    total = lambda x: reap(f, {"h": folds.mean(), "u": folds.last()})(x)
    grads = jax.grad(lambda x: sum(map(jnp.sum, total(x).values())))(X)
    assert_close(grads, 3 * np.cos(X))


def test_a_loop_between_nested_ones():
    # The inner one does not check, so that JAX would let nothing of it into a carry.
    outer, inner = (Sharded(mesh_of(AxisType.Auto), check) for check in (True, False))
    spec = P(None, "model")
    sine = lambda x: sow(jnp.sin(x), name="h")
    body = inner.map(sine, spec, spec, axis_names={"model"}, mesh=None)
    rows = lambda x: lax.map(body, jnp.stack([x, 2 * x])).sum(axis=0)
    f = jax.jit(outer.map(rows, P("data"), P("data"), axis_names={"data"}))
    stacks = lambda x: cut(x).reshape(4, 2, 2, 2)
    last, mean, sums = reap(f, {"h": (folds.last(), folds.mean(), jnp.sum)})(X)["h"]
    h = np.stack([stacks(np.sin(X)), stacks(np.sin(2 * X))])
    assert_close(last, h[1])
    assert_close(mean, h.mean(axis=0))
    assert_close(sums, h.sum(axis=(3, 4)))
    assert_close(reap(f)(X)["h"], h)
    assert_close(plant(f, {"h": h})(X), f(X))


def one_sided(fn):
    return lambda x, k: lax.cond(k > 0, fn, lambda x, k: 2 * x, x, k)


def two_sided(fn):
    return lambda x, k: lax.cond(k > 1, fn, lambda x, k: 3 * fn(x, k), x, k)


@pytest.mark.parametrize("order", ["sharded two one", "two sharded one", "two one sharded"])
def test_branches_that_all_hold_the_same_sum(sharded, order):
    put = lambda fn: sharded.map(fn, (BOTH, P()))
    around = {"sharded": put, "two": two_sided, "one": one_sided}
    f = lambda x, k: 2 * x * sow(jnp.sin(x), name="h")
    for name in reversed(order.split()):
        f = around[name](f)
    x = placed(sharded)
    for k in range(3):
        factor, there = 1 if k == 2 else 3, k > 0
        out = factor * 2 * X * (np.sin(X) if there else 1)
        value, collected = capture(f, mode="strict")(x, k)
        h = collected["h"]
        assert_close(value, out)
        assert h.branches[0] is None
        assert_close(h.branches[1], there * cut(np.sin(X)))
        assert_close(plant(f, collected)(x, k), out)
        assert_close(plant(f, {"h": scale(2.0)})(x, k), out * (1 + there))
        sums, count = reap(f, {"h": (jnp.sum, folds.count())})(x, k)["h"]
        assert_close(sums.branches[1], there * np.sin(cut(X)).sum((1, 2)))
        assert np.unique(count) == there
        gradient = harvest.grad(lambda x, k: f(x, k).sum())(x, k)["h"]
        assert_close(gradient.branches[1], there * factor * cut(2 * X))
    assert harvest.sites(f)(x, 1)["h"].spec == "f32[8,2,2]"


def test_a_loop_of_a_batch_that_counts_in_each_shard():
    # To JAX the count is alike in all shards, though lanes that are done no longer count.
    def looped(start):
        def body(x):
            more = lambda state: state[0][0, 0] < 3
            step = lambda state: (sow(state[0] + 1, name="h"), state[1] + 1)
            x, count = lax.while_loop(more, step, (x, start()))
            return x + count

        return Sharded(mesh_of(AxisType.Auto), check_vma=True).map(body)

    alike = lambda: jnp.float32(0)
    differing = lambda: lax.pcast(alike(), ("data", "model"), to="varying")
    xs, select = np.stack([X, X + 0.5]), {"h": folds.last()}
    counts = np.clip(np.ceil(3 - np.stack(list(map(cut, xs)))[:, :, :1, :1]), 0, None)
    wanted = (counts > 0) * (np.stack(list(map(cut, xs))) + counts)
    assert_close(reap(jax.vmap(looped(differing)), select)(xs)["h"], wanted)
    assert_close(jax.vmap(reap(looped(alike), select))(xs)["h"], wanted)
    message = r"'h' \(sown at .*\) is inside a `while_loop` that `vmap` batched, and .* unevenly"
    for transform in (lambda f: reap(f, select), lambda f: plant(f, {"h": scale(2.0)})):
        with pytest.raises(UnsupportedError, match=message):
            transform(jax.vmap(looped(alike)))(xs)
