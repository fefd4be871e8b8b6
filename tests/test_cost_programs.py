"""`Sites.cost` of programs with loops, branches, pytrees and sizes that are not known."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.hijax import HiType
from jax.sharding import AbstractMesh, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from harvest import ShardingError, folds, has_type, reap, scope, sites, sow

from .hi_types import QPspec, QType, dequantize, quantize

CLUSTER = AbstractMesh((4, 2), ("data", "model"))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def looped(n, x):
    def body(i, x):
        return lax.scan(lambda c, _: (sow(c * 2, name="h"), None), x, length=3)[0]

    return lax.fori_loop(0, n, body, x)


def test_a_while_loop_counts_one_iteration():
    cost = sites(looped)(array(dtype=jnp.int32), array(5)).cost(tokens=5)
    assert (cost[0].loops, cost[0].type) == ((None, 3), "f32[?,3,5]")
    assert (cost.nbytes, cost.nbytes_folded, cost.nbytes_per_token) == (60, 20, 12)
    lines = str(cost).splitlines()
    assert "? x 60 B  20 B" in lines[2] and lines[-1].startswith("? is the length")
    stack = reap(looped, {"h": folds.stack(7).over(0)})(2, jnp.ones(5))["h"].values
    assert stack.nbytes == 7 * cost.nbytes


def test_lanes_of_a_batched_while_loop():
    def f(n, x):
        return lax.fori_loop(0, n, lambda i, x: x + sow(jnp.ones(2), name="h").sum(), x)

    args = jnp.arange(5), jnp.ones(5)
    table = sites(jax.vmap(f))(*args)
    last = reap(jax.vmap(f), {"h": folds.last()})(*args)["h"]
    assert table.nbytes == table.cost().nbytes == table.cost().nbytes_folded == last.nbytes == 40


def test_branches():
    def f(x):
        def one(x):
            return sow(
                lax.scan(lambda c, _: (sow(c + 1, name="in"), None), x, length=3)[0], name="h"
            )

        def other(x):
            return sow(x, name="h")[:, :1] * x

        step = lambda x, i: (lax.cond(i > 1, one, other, x), None)
        return lax.scan(step, x, jnp.arange(4))[0]

    cost = sites(f)(array(8, 2)).cost(
        CLUSTER, {"h": P(None, "data"), "in": P("model", None, "data")}
    )
    # As everywhere, an index for each iteration, unless all branches have the site.
    inner, h = cost["in"], cost["h"]
    assert (h.nbytes, h.nbytes_folded, h.nbytes_per_device) == (4 * 64, 64, 64)
    assert (inner.nbytes, inner.nbytes_folded) == (4 * 3 * 64 + 4 * 4, 64)
    assert inner.spec.index == P("model") and inner.spec.branches[0] is None
    assert inner.nbytes_per_device == 4 * 3 * 64 // 8 + 4 * 4 // 2
    assert inner.nbytes_folded_per_device == 64 // 4


def test_branches_of_different_types():
    """No fold takes these; each is counted, and so is the index."""

    def f(x):
        large = lambda x: sow((x, x), name="h")[0]
        return lax.scan(lambda x, i: (lax.cond(i > 1, large, one, x), None), x, jnp.arange(4))[0]

    one = lambda x: sow(x, name="h")
    cost = sites(f)(array(8))["h"].nbytes, sites(f)(array(8)).cost().nbytes_folded
    assert cost == (4 * (3 * 32 + 4), 3 * 32)


def tree(x, key):
    value = {"x": x, "key": key, "n": jnp.arange(4), "name": "a", "z": x.sum().astype(complex)}
    return sow({**value, "float": 2.0}, name="v")["x"]


def test_pytrees():
    table = sites(tree)(array(8, 4), jax.random.split(jax.random.key(0), 8))
    key = jax.random.key_data(jax.random.key(0)).nbytes
    specs = {"v": {"x": P("data", "model"), "key": P("data"), "n": None, **dict.fromkeys("z")}}
    specs["v"] |= {"name": None, "float": None}
    (row,) = table.cost(CLUSTER, specs, dtype=jnp.bfloat16)
    # Integers, complex numbers and keys are not cast; text and numbers of Python have no bytes.
    assert row.nbytes == 32 * 2 + 8 * key + 16 + 8
    assert row.nbytes_per_device == 32 * 2 // 8 + 2 * key + 16 + 8
    assert row.spec == {k: None for k in ("name", "float")} | {
        "x": P("data", "model"),
        "key": P("data"),
        "n": P(),
        "z": P(),
    }


def test_weak_types_and_scalars():
    cost = sites(lambda x: sow((x, x * 2), name="h")[0])(3.0).cost(CLUSTER, P(), dtype="float16")
    assert (cost.nbytes, cost.nbytes_per_device, cost[0].spec) == (4, 4, (P(), P()))


def test_a_program_of_any_size():
    tables = []

    def stacked(x):
        return lax.scan(lambda c, _: (sow(c, name="h"), None), x, length=3)[0]

    def f(x):
        made = sites(stacked)(x)
        specs = P(None, "model", "data")
        tables.extend([made.cost(CLUSTER, specs, tokens=x.shape[0]), made.cost(tokens=7)])
        return x

    n, m = jax.export.symbolic_shape("n, 4*m")
    jax.export.export(jax.jit(f))(array(n, m))
    told, rounded = tables
    assert told.nbytes_folded == 4 * n * m and told.nbytes == 12 * n * m
    assert told.nbytes_folded_per_device == 4 * (n // 2) * (m // 4)
    assert told.nbytes_per_token == 12 * m
    assert rounded.nbytes_per_token == 12 * n * m // 7
    assert f"{12 * n * m} B" in str(told)


def test_several_sites_at_once():
    def f(x):
        for i in range(3):
            with scope(f"layers/{i}"):
                x = sow(sow(x, name="resid") @ jnp.ones((4, 4)), name="out")
        return sow(x[0], name="row")

    table = sites(f)(array(8, 4))
    cost = table.cost(CLUSTER, {"layers/1/*": P(None, "model"), "**/resid": P("data")})
    spec = lambda *keys: [cost[key].spec for key in keys]
    assert spec("layers/0/resid", "layers/1/resid") == [P("data"), P(None, "model")]  # the first
    assert spec("layers/0/out", "layers/1/out", "row") == [P(), P(None, "model"), P()]
    matrices = has_type(Float[Array, "a b"])
    assert table.cost(CLUSTER, {matrices: P("data")}).nbytes_per_device == 6 * 32 + 16


def test_a_hi_type_that_cannot_be_stacked(monkeypatch):
    f = lambda x: lax.scan(
        lambda x, _: (dequantize(sow(quantize(x), name="h")), None), x, length=3
    )[0]
    monkeypatch.setattr(QType, "leading_axis_spec", HiType.leading_axis_spec)
    cost = sites(f)(array(2, 5)).cost()
    assert cost.nbytes == cost.nbytes_folded == 2 * 5 + 2 * 4  # nothing but a fold can be collected


class Halves(Sharding):
    """A sharding that is not named, as of other libraries: the first axis in two."""

    def shard_shape(self, global_shape):
        if global_shape[0] % 2:
            raise ValueError(f"{global_shape[0]} is odd")
        return (global_shape[0] // 2, *global_shape[1:])


def test_a_sharding_without_a_mesh():
    table = sites(lambda x, y: sow({"x": x, "y": y}, name="h")["x"])(array(4, 3), array(2))
    cost = table.cost(None, {"h": Halves()})
    assert cost.nbytes_per_device == 24 + 4 and isinstance(cost[0].spec["x"], Halves)
    table = sites(lambda x: sow(x, name="h"))(array(5))
    with pytest.raises(ShardingError, match=r"Halves.* for 'h' .sown at .*, f32.5.: 5 is odd"):
        table.cost(None, Halves())
    with pytest.raises(ShardingError, match=r"QPspec.* for 'h' .*; wanted a .*PartitionSpec"):
        table.cost(CLUSTER, {"h": QPspec(P())})
