"""`Sites.cost`: numbers by hand, the table, and what users get wrong."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from harvest import (
    Cost,
    ShardingError,
    SiteCost,
    UnknownSiteError,
    scope,
    sites,
    sow,
)

LAYERS, BATCH, LENGTH, WIDTH, HEADS = 6, 8, 32, 64, 4
TOKENS = BATCH * LENGTH
CLUSTER = AbstractMesh((4, 2), ("data", "model"))


def transformer(params, tokens):
    def layer(x, w):
        with scope("layers"):
            q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
            split = lambda y: y.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS).swapaxes(1, 2)
            pattern = jax.nn.softmax(split(q) @ split(k).swapaxes(2, 3))
            pattern = sow(pattern, name="pattern")
            mixed = (pattern @ split(v)).swapaxes(1, 2).reshape(x.shape)
            hidden = sow(jax.nn.relu((x + mixed) @ w["up"]), name="hidden")
            return sow(x + mixed + hidden @ w["down"], name="resid"), None

    x = sow(params["embedding"][tokens], name="embed")
    return lax.scan(layer, x, params["layers"])[0]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {
    "embedding": array(100, WIDTH),
    "layers": {
        "qkv": array(LAYERS, WIDTH, 3 * WIDTH),
        "up": array(LAYERS, WIDTH, 4 * WIDTH),
        "down": array(LAYERS, 4 * WIDTH, WIDTH),
    },
}
SPECS = {
    "embed": P("data"),
    "layers/pattern": P(None, "data", "model"),
    "layers/hidden": P(None, ("data", "model"), None, None),
}
PATTERN = HEADS * LENGTH  # numbers for each token
WANTED = {  # numbers for each token in one layer, layers, parts
    "embed": (WIDTH, 1, 4),
    "layers/pattern": (PATTERN, LAYERS, 8),
    "layers/hidden": (4 * WIDTH, LAYERS, 8),
    "layers/resid": (WIDTH, LAYERS, 1),
}


def table():
    return sites(transformer)(PARAMS, array(BATCH, LENGTH, dtype=jnp.int32))


@pytest.mark.parametrize("dtype, size", [(None, 4), (jnp.bfloat16, 2), ("float8_e5m2", 1)])
def test_by_hand(dtype, size):
    cost = table().cost(CLUSTER, SPECS, tokens=TOKENS, dtype=dtype)
    assert [row.key for row in cost] == list(WANTED)
    for row, (numbers, layers, parts) in zip(cost, WANTED.values(), strict=True):
        one = numbers * TOKENS * size
        assert (row.nbytes, row.nbytes_folded) == (layers * one, one)
        assert (row.nbytes_per_device, row.nbytes_folded_per_device) == (
            layers * one // parts,
            one // parts,
        )
        assert row.nbytes_per_token == layers * numbers * size
        assert row.nbytes_folded_per_token == numbers * size
        assert row.spec == SPECS.get(row.key, P())
        assert row.loops == (() if layers == 1 else (LAYERS,))
    rows = list(WANTED.values())
    assert cost.nbytes == sum(n * layers for n, layers, _ in rows) * TOKENS * size
    assert cost.nbytes_folded == sum(n for n, _, _ in rows) * TOKENS * size
    assert cost.nbytes_per_device == sum(n * m // p for n, m, p in rows) * TOKENS * size
    assert cost.nbytes_folded_per_device == sum(n * TOKENS * size // p for n, _, p in rows)
    assert cost.nbytes_per_token == sum(n * layers for n, layers, _ in rows) * size
    assert cost.nbytes_folded_per_token == sum(n for n, _, _ in rows) * size


def test_of_one_device():
    cost = table().cost()
    assert cost.nbytes == cost.nbytes_per_device == table().nbytes
    for each in (cost, cost["embed"]):
        assert each.nbytes_per_token is None and each.nbytes_folded_per_token is None


def test_a_dtype_is_what_jax_makes_of_it():
    for given in (float, np.float64, jnp.float32):
        assert table().cost(dtype=given)["embed"].type == "f32[8,32,64]"
        assert table().cost(dtype=given).nbytes == table().nbytes


@pytest.mark.parametrize("tokens", [64, 64.0, np.int64(64), np.float32(64), jnp.int32(64)])
def test_tokens(tokens):
    f = lambda x: sow(x, name="h")
    cost = sites(f)(array(3, 5)).cost(tokens=tokens)
    assert cost.nbytes_per_token == cost["h"].nbytes_per_token == 60 / 64


def test_an_axis_of_a_loop_that_is_split_is_gone_when_folded():
    row = table().cost(CLUSTER, {"layers/resid": P("model", "data")})["layers/resid"]
    assert row.nbytes_per_device == row.nbytes // 8
    assert row.nbytes_folded_per_device == row.nbytes_folded // 4


def test_sequence():
    cost = table().cost(CLUSTER, SPECS, tokens=TOKENS)
    assert isinstance(cost, Cost) and isinstance(cost[0], SiteCost) and len(cost) == 4
    assert cost["layers/hidden"] is cost[2] and cost[-1].key == "layers/resid"
    assert cost[1:3].nbytes_per_token == cost[1].nbytes_per_token + cost[2].nbytes_per_token
    assert table()[2:].cost().nbytes == cost[2:].nbytes
    assert cost[:0].nbytes == 0 and cost[:0].nbytes_per_token == 0
    with pytest.raises(UnknownSiteError, match="did you mean 'layers/resid'"):
        cost["layers/resids"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="nbytes"):
        cost[0].nbytes = 3


def test_printed():
    cost = table().cost(CLUSTER, SPECS, tokens=TOKENS, dtype=jnp.bfloat16)
    head, rule, *rows, end, total = str(cost).splitlines()
    assert len(rows) == 4
    columns = ["key", "type", "split", "size", "folded", "per device"]
    assert re.split("  +", head) == [
        *columns,
        "folded per device",
        "per token",
        "folded per token",
    ]
    assert set(rule) == set(end) == {"-"}
    assert re.split("  +", rows[1].strip()) == [
        "layers/pattern",
        "bf16[6,8,4,32,32]",
        "P(None, 'data', 'model')",
        "393.2 kB",
        "65.5 kB",
        "49.2 kB",
        "8.2 kB",
        "1.5 kB",
        "256 B",
    ]
    assert re.split("  +", rows[3])[1:3] == ["bf16[6,8,32,64]", "not split"]
    assert re.match(r"4 sites +8 devices +1\.4 MB", total)
    assert rows[1].index("393.2 kB") == total.index("1.4 MB") == head.index("size")
    assert repr(cost) == str(cost)
    plain = str(sites(lambda x: sow(x, name="h"))(array(3)).cost()).splitlines()
    assert plain[0].split() == ["key", "type", "size"] and plain[-1].split() == [
        "1",
        "site",
        "12",
        "B",
    ]
    assert str(sites(jnp.sin)(1.0).cost()).splitlines()[-1].split() == ["0", "sites", "0", "B"]


# -------------------------------------------------------------------------------- errors

ERRORS = [
    ({"specs": {"layers/hiden": P()}}, "did you mean 'layers/hidden'", UnknownSiteError),
    ({"specs": {"layers/*/resid": P()}}, "the glob .* matches no site", UnknownSiteError),
    (
        {"specs": {"embed": P("tensor")}},
        "no axis 'tensor'; its axes: 'data' .of size 4.",
        ShardingError,
    ),
    (
        {"specs": {"embed": P(None, None, None, "data")}},
        "at most one item .* 3 axes",
        ShardingError,
    ),
    ({"specs": {"embed": P("data", "data")}}, "names the mesh axis 'data' twice", ShardingError),
    ({"specs": {"embed": P(("data", "data"))}}, "names the mesh axis 'data' twice", ShardingError),
    ({"specs": {"embed": P(P.UNCONSTRAINED)}}, "nothing that is unconstrained", ShardingError),
    ({"specs": {"layers/resid": P("data")}}, "axis 0 of size 6 .* split into 4", ShardingError),
    ({"specs": {"embed": {"a": P()}}}, "no prefix of its value", ShardingError),
    ({"specs": {"embed": "data"}}, "no prefix of its value", ShardingError),
    ({"mesh": None, "specs": {"embed": P("data")}}, "pass one, `cost.mesh, ", ShardingError),
    ({"specs": [P()]}, "of type `list`; wanted a `jax.sharding.PartitionSpec`", ShardingError),
    ({"tokens": 0}, "tokens=0; wanted how many tokens", ValueError),
    ({"tokens": np.ones(2)}, "wanted how many tokens", ValueError),
    ({"tokens": float("nan")}, "tokens=nan; wanted how many tokens", ValueError),
    ({"tokens": True}, "tokens=True; wanted how many tokens", ValueError),
    ({"tokens": float("inf")}, "tokens=inf; wanted how many tokens", ValueError),
    ({"tokens": "many"}, "tokens='many'; wanted how many tokens", ValueError),
    ({"dtype": jnp.int8}, "int8.*; wanted the floating-point dtype", ValueError),
    ({"dtype": "brain"}, "dtype='brain'; wanted the floating-point dtype", ValueError),
]


def line_of(key):
    lines, first = inspect.getsourcelines(transformer)
    name = key.rpartition("/")[2]
    (offset,) = (i for i, line in enumerate(lines) if f'name="{name}"' in line)
    return f"{__file__}:{first + offset}"


@pytest.mark.parametrize("options, match, kind", ERRORS)
def test_errors(options, match, kind):
    options = {"mesh": CLUSTER, **options}
    with pytest.raises(kind, match=match) as caught:
        table().cost(**options)
    if kind is ShardingError and isinstance(options["specs"], dict):
        ((key, _),) = options["specs"].items()
        assert f"{key!r} (sown at {line_of(key)})" in str(caught.value)
    assert isinstance(caught.value, ValueError | KeyError)


def test_no_mesh(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ShardingError, match=r"the mesh 64 of type `int`; wanted .*AbstractMesh"):
        table().cost(64)


def test_a_type_of_another_mesh():
    explicit = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(explicit, P("data")))
    made = sites(lambda x: sow(x, name="h"))(x)
    assert made.cost().nbytes_per_device == made.cost(explicit).nbytes_per_device == 32
    assert made["h"].nbytes_per_device == 32
    wide = AbstractMesh((8,), ("data",))
    with pytest.raises(ShardingError, match="'data' of size 4, and `mesh` has one of size 8"):
        made.cost(wide)
    with pytest.raises(ShardingError, match="'data' of size 4, and `mesh` has no such axis"):
        made.cost(AbstractMesh((8,), ("batch",)))
    assert made.cost(wide, P("data")).nbytes_per_device == 16
