"""`sites`: the table says what would be collected, and nothing runs."""

import inspect
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from harvest import Axis, capture, perturb, plant, reap, scope, sites, sow

TOKENS = jax.ShapeDtypeStruct((5,), jnp.int32)
WEIGHTS = jax.ShapeDtypeStruct((10, 3), jnp.float32)


def model(tokens, w):
    x = sow(w[tokens], name="embed")

    def layer(x, i):
        with scope("layers"):
            x = sow({"q": x, "text": "a"}, name="pair")["q"]
            x = jax.vmap(lambda r: sow(r, name="column"), 1, 1)(x)
            odd = lambda x: sow(sow(x, name="odd"), name="both")
            x = lax.cond(i % 2 == 0, lambda x: sow(2 * x, name="both"), odd, x)
        return x, None

    x, _ = lax.scan(layer, x, jnp.arange(4))
    return jnp.sum(perturb(x, name="g"))


def line(offset):
    return f"{__file__}:{inspect.getsourcelines(model)[1] + offset}"


F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
LOOP, BATCH = Axis("loop", 4), Axis("batch", 3)
ROWS = [  # key, name, scope, aval, axes, branch, line, nbytes
    ("embed", "embed", "", F32(5, 3), (), None, 1, 60),
    ("layers/pair", "pair", "layers", {"q": F32(5, 3), "text": "a"}, (LOOP,), None, 5, 240),
    ("layers/column", "column", "layers", F32(5), (LOOP, BATCH), None, 6, 240),
    # What is collected is a `CondSum`, with an index for each iteration.
    ("layers/odd", "odd", "layers", F32(5, 3), (LOOP,), (0,), 7, 240 + 16),
    ("layers/both", "both", "layers", F32(5, 3), (LOOP,), (0, 1), 7, 240),
]
FIELDS = ("key", "name", "scope", "aval", "axes", "branch", "source", "nbytes")


def test_rows():
    table = sites(model)(TOKENS, WEIGHTS)
    for site, (*row, offset, nbytes) in zip(table, ROWS, strict=True):
        wanted = dict(zip(FIELDS, (*row, line(offset), nbytes), strict=True))
        assert {name: getattr(site, name) for name in FIELDS} == wanted
        assert (site.kind, site.occurrence) == ("sow", 0)
    assert table.nbytes == 60 + 240 * 4 + 16


def test_cotangents_are_rows_of_the_gradient():
    table = sites(jax.grad(model, argnums=1))(TOKENS, WEIGHTS)
    assert [site.key for site in table] == [row[0] for row in ROWS] + ["g"]
    assert (table[-1].kind, table[-1].aval, table[-1].source) == ("cotangent", F32(5, 3), line(12))


def test_the_table_is_what_is_collected():
    args = jnp.arange(5), jnp.ones((10, 3))
    collected = capture(model)(*args)[1]
    table = sites(model)(*args)
    assert [site.key for site in table] == list(collected)
    for site in table:
        size = sum(x.nbytes for x in jax.tree.leaves(collected[site.key]) if hasattr(x, "nbytes"))
        assert site.nbytes == size


def test_sequence():
    table = sites(model)(TOKENS, WEIGHTS)
    assert len(table) == 5
    assert table["embed"] is table[0] is next(iter(table))
    assert table[-1].key == "layers/both"
    assert [site.key for site in table[:2]] == ["embed", "layers/pair"]
    assert type(table[:2]) is type(table)
    assert table[:2].nbytes == 300
    assert table[1] in table
    with pytest.raises(KeyError, match="typo"):
        table["typo"]
    with pytest.raises(IndexError, match="out of range"):
        table[5]


def test_occurrences_are_counted():
    def fn(x):
        x = sow(sow(x, name="h"), name="other")
        return lax.scan(lambda c, _: (sow(c, name="h"), None), x, length=2)[0]

    table = sites(fn)(1.0)
    assert [(site.key, site.occurrence) for site in table] == [("h", 0), ("other", 0), ("h", 1)]
    assert table["h"].axes == ()


def test_printed():
    lines = str(sites(model)(TOKENS, WEIGHTS)).splitlines()
    assert lines[0].split() == ["key", "kind", "type", "axes", "size", "source"]
    assert set(lines[1]) == {"-"}
    *cells, source = lines[2].split()
    assert cells == ["embed", "sow", "f32[5,3]", "60", "B"]
    assert source.endswith("test_site.py:21") and line(1).endswith(source)
    assert re.fullmatch(r"layers/pair +sow +.*f32\[4,5,3\].* +loop:4 +240 B +.*", lines[3])
    assert re.fullmatch(r"layers/column +sow +f32\[4,3,5\] +loop:4 batch:3 +240 B +.*", lines[4])
    assert re.fullmatch(r"layers/odd +sow +f32\[4,5,3\] +loop:4 branch:0 +256 B +.*", lines[5])
    assert re.fullmatch(r"layers/both +sow +f32\[4,5,3\] +loop:4 branch:0,1 +240 B +.*", lines[6])
    assert lines[7:] == ["5 sites, 1.0 kB"]
    assert len({text.index("sow") for text in lines[2:7]}) == 1
    assert repr(sites(model)(TOKENS, WEIGHTS)) == "\n".join(lines)


@pytest.mark.parametrize(
    "shape, size",
    [((), "4 B"), ((250,), "1.0 kB"), ((3000, 1000), "12.0 MB"), ((1 << 20, 1 << 12), "17.2 GB")],
)
def test_sizes(shape, size):
    table = sites(lambda x: sow(x, name="h"))(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert str(table).splitlines()[-1] == f"1 site, {size}"


def test_an_empty_table():
    table = sites(jnp.sin)(1.0)
    assert (len(table), list(table), table.nbytes) == (0, [], 0)
    assert str(table).splitlines()[-1] == "0 sites, 0 B"


DTYPES = {"bfloat16": 2, "float8_e5m2": 1, "bool": 1, "complex64": 8, "int8": 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_nbytes(dtype):
    (site,) = sites(lambda x: sow((x, x), name="h"))(jax.ShapeDtypeStruct((3,), dtype))
    assert site.nbytes == 2 * 3 * DTYPES[dtype]


def test_keys_are_as_large_as_their_data():
    key = jax.random.key(0, impl="rbg")
    (site,) = sites(lambda key: sow(key, name="h"))(key)
    assert site.nbytes == jax.random.key_data(key).nbytes


AXES = {
    "nested scan": (
        lambda x: lax.scan(lambda c, _: (lax.map(one, c), None), x, length=2)[0],
        [Axis("loop", 2), Axis("loop", 3)],
    ),
    "vmap in scan": (
        lambda x: lax.scan(lambda c, _: (jax.vmap(one)(c), None), x, length=2)[0],
        [Axis("loop", 2), Axis("batch", 3)],
    ),
    "scan in vmap": (
        lambda x: jax.vmap(lambda r: lax.scan(lambda c, _: (one(c), None), r, length=2)[0])(x),
        [Axis("loop", 2), Axis("batch", 3)],
    ),
    "vmap of vmap": (
        lambda x: jax.vmap(jax.vmap(one, axis_size=1), 1)(x[None]),
        [Axis("batch", 3), Axis("batch", 1)],
    ),
    "independent of the batch": (lambda x: jax.vmap(lambda _: one(jnp.float32(1)))(x), []),
}


def one(x):
    return sow(x, name="h")


@pytest.mark.parametrize("name", AXES)
def test_axes(name):
    fn, axes = AXES[name]
    x = jnp.ones(3)
    (site,) = sites(fn)(x)
    assert list(site.axes) == axes
    assert site.aval.shape == ()
    assert reap(fn)(x)["h"].shape == tuple(axis.size for axis in axes)


# ------------------------------------------------------------------------------ arguments


def test_nothing_runs():
    ran = []

    def fn(x):
        jax.debug.callback(lambda: ran.append("debug"))
        io_callback(lambda x: ran.append("io"), None, x)
        return sow(x, name="h")

    assert len(sites(fn)(1.0)) == 1
    assert len(sites(fn)(jnp.ones(3))) == 1
    jax.effects_barrier()
    assert ran == []
    reap(fn)(1.0)
    jax.effects_barrier()
    assert sorted(ran) == ["debug", "io"]


def test_a_module_of_types():
    linear = eqx.filter_eval_shape(eqx.nn.Linear, 2, 3, key=jax.random.key(0))
    fn = lambda linear, x: sow(linear(x), name="y")
    assert sites(fn)(linear, F32(2))["y"].aval == F32(3)
    assert sites(eqx.nn.Sequential([linear, eqx.nn.Lambda(one)]))(F32(2))["h"].aval == F32(3)


def test_types_of_keys():
    (site,) = sites(one)(jax.eval_shape(jax.random.key, 0))
    assert jnp.issubdtype(site.aval.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, jax.grad, jax.checkpoint])
def test_in_an_ambient_trace(around):
    tables = []

    def fn(x):
        tables.append(sites(lambda y: sow(x * y, name="h"))(jnp.ones(3)))
        return x

    with jax.checking_leaks():
        around(fn)(jnp.ones(3) if around is jax.vmap else 1.0)
    assert [(site.key, site.aval) for site in tables[0]] == [("h", F32(3))]


def test_of_transformed_functions():
    two = lambda x: sow(sow(x, name="a"), name="b")
    x = np.float32(1)
    assert [site.key for site in sites(plant(two, {"a": x}))(x)] == ["a", "b"]
    assert [site.key for site in sites(reap(two, "a"))(x)] == ["b"]
    assert [site.key for site in sites(jax.jit(jax.jit(two)))(x)] == ["a", "b"]


def test_sizes_of_a_program_of_any_size():
    tables = []

    def f(x):
        tables.append(str(sites(lambda x: sow(x, name="h"))(x)))
        return x

    (n,) = jax.export.symbolic_shape("n")
    jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((n, 2), jnp.float32))
    assert "8*n B" in tables[0]
