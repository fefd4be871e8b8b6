"""Whatever JAX computes with can be sown, collected and planted, and stays what it is."""

import functools
import pathlib
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import capture, perturb, plant, reap, sites, sow

X = np.array([0.5, 1.0, 2.0], np.float32)
KEYS = jax.random.split(jax.random.key(0), 3)
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
DTYPES = ["float32", "float16", "bfloat16", *FLOAT8, "int4", "int8", "int32", "uint8", "uint32"]
VALUES = {
    **{dtype: jnp.arange(3).astype(dtype) for dtype in DTYPES},
    "bool": jnp.array([True, False]),
    "complex64": jnp.array([1 + 2j, 3.0]),
    "key": KEYS[0],
    "keys": KEYS,
    "rbg keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    "raw key": jax.random.key_data(KEYS[0]),
    "float": 2.5,
    "complex": 2.5j,
    "numpy": X,
    "numpy scalar": np.float32(3),
    "weak": jnp.asarray(2.5),
    "empty": jnp.zeros((0, 3)),
    "keys, empty": KEYS[:0],
    "infinite": jnp.array([jnp.inf, -jnp.inf, jnp.nan, -0.0]),
    "dict": {"a": jnp.ones(2), "b": (KEYS, jnp.arange(3))},
    "None": None,
    "no leaves": {"a": (), "b": [None]},
}
STRUCTURES = {  # around `fn`, of two copies of a value
    "call": lambda fn, two: fn(first(two)),
    "jit": lambda fn, two: jax.jit(fn)(first(two)),
    "map": lambda fn, two: lax.scan(lambda c, v: (c, fn(v)), 0, two, length=2)[1],
    "vmap": lambda fn, two: jax.vmap(fn, axis_size=2)(two),
    "cond": lambda fn, two: lax.cond(True, fn, fn, first(two)),
}


def h(value):
    return sow(value, name="h")


def first(two):
    return jax.tree.map(lambda v: v[0], two)


def data(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def assert_same(got, wanted):
    """Equal values, of one tree and of the same types."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert jax.typeof(a) == jax.typeof(b)
        assert data(a).tobytes() == data(b).tobytes()


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_value(value):
    out, collected = capture(h)(value)
    assert_same(out, value)
    assert_same(collected, {"h": (value,)})
    assert_same(plant(h, {"h": lambda v: v})(value), value)
    assert_same(plant(h, {"h": harvest.replace(value)})(value), value)
    assert_same(plant(h, reap(h)(value))(value), value)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_value_in_a_structure(value, structure):
    two = jax.tree.map(lambda v: jnp.stack([jnp.asarray(v)] * 2), value)
    fn = lambda two: STRUCTURES[structure](h, two)
    wanted = jax.jit(lambda two: STRUCTURES[structure](lambda v: v, two))(two)
    out, collected = capture(fn)(two)
    assert_same(out, wanted)
    assert_same(collected["h"][0], wanted)
    assert_same(plant(fn, {"h": collected["h"][0]})(two), wanted)


@pytest.mark.parametrize("name", ["float", "weak", "complex"])
def test_weak_types_stay(name):
    assert reap(h)(VALUES[name])["h"].weak_type
    assert plant(h, {"h": lambda v: v})(VALUES[name]).weak_type
    assert plant(h, reap(h)(VALUES[name]))(VALUES[name]).weak_type


def test_keys_of_another_kind_are_refused():
    with pytest.raises(harvest.PlantError, match=r"got key<rbg>\[\], wanted key<fry>\[\]"):
        plant(h, {"h": jax.random.key(0, impl="rbg")})(KEYS[0])
    with pytest.raises(harvest.PlantError, match=r"got u32\[2\], wanted key<fry>\[\]"):
        plant(h, {"h": jax.random.key_data(KEYS[0])})(KEYS[0])


def test_planted_keys_are_used():
    draw = lambda key: jax.random.normal(h(key), (4,))
    other = jax.random.split(jax.random.key(7), 3)
    np.testing.assert_array_equal(plant(draw, {"h": other[0]})(KEYS[0]), draw(other[0]))
    mapped = plant(lambda keys: lax.map(draw, keys), {"h": other})(KEYS)
    np.testing.assert_allclose(mapped, jax.vmap(draw)(other), rtol=1e-6)
    folded = plant(jax.vmap(draw), {"h": lambda key: jax.random.fold_in(key, 1)})(KEYS)
    wanted = [draw(jax.random.fold_in(key, 1)) for key in KEYS]
    np.testing.assert_allclose(folded, wanted, rtol=1e-6)


STATIC = {"a": "text", "b": 3, "c": True, "d": 2.5, "e": jnp.sin, "f": None}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_static_leaves_are_collected_as_they_are(structure):
    def fn(two):
        return STRUCTURES[structure](lambda x: h({**STATIC, "x": x})["x"], two)

    value = reap(fn)(np.stack([X, X]))["h"]
    assert {name: value[name] for name in STATIC} == STATIC
    np.testing.assert_array_equal(value["x"], [X, X] if structure in ("map", "vmap") else X)


def test_static_leaves_are_returned():
    out, collected = capture(lambda x: (h({**STATIC, "x": x}), STATIC))(X)
    assert out[1] == STATIC
    assert {name: out[0][name] for name in STATIC} == STATIC
    assert [type(v) for v in collected["h"][0].values()][:4] == [str, int, bool, float]


OTHER = {"a": "other", "b": 4, "c": False, "d": 3.5, "e": jnp.cos, "f": 0.0}


@pytest.mark.parametrize("name", STATIC)
def test_static_leaves_cannot_be_planted(name):
    fn = lambda x: h({**STATIC, "x": x})["x"]
    np.testing.assert_array_equal(plant(fn, {"h": {**STATIC, "x": 2 * X}})(X), 2 * X)
    with pytest.raises(harvest.PlantError, match=r"wanted.*'h'|static leaf.*cannot be planted"):
        plant(fn, {"h": {**STATIC, "x": X, name: OTHER[name]}})(X)


def test_integer_sites_under_grad():
    def fn(x, n):
        n = perturb(h(n), name="no cotangent")
        return jnp.sum(x * n.astype(x.dtype))

    n = np.arange(3)
    (dx, dn), collected = capture(jax.grad(fn, (0, 1), allow_int=True))(X, n)
    np.testing.assert_array_equal(dx, [0.0, 1.0, 2.0])
    assert dn.dtype == jax.dtypes.float0
    assert list(collected) == ["h"]
    np.testing.assert_array_equal(collected["h"][0], n)
    tangents = (X, np.zeros(3, jax.dtypes.float0))
    pushed = plant(lambda t: jax.jvp(fn, (X, n), t)[1], {"h": n + 1})(tangents)
    np.testing.assert_allclose(pushed, np.sum(X * (n + 1)))


def test_float0_can_be_sown():
    zero = np.zeros(3, jax.dtypes.float0)
    assert reap(h)(zero)["h"].dtype == jax.dtypes.float0
    assert reap(lambda n: h(jax.grad(lambda n: 1.0, allow_int=True)(n)))(1)["h"].dtype == zero.dtype


@pytest.mark.parametrize("value", [np.array("text"), np.array([None])], ids=["text", "object"])
def test_arrays_that_jax_does_not_know_are_static(value):
    assert reap(lambda: h(value))()["h"] is value
    with pytest.raises(harvest.UnsupportedError, match="cannot be hashed"):
        reap(h)(value)


# --------------------------------------------------------------------------- configuration


def test_x64():
    wide = np.array([1 / 3])
    for enabled, dtype in [(False, "float32"), (True, "float64"), (False, "float32")]:
        with jax.enable_x64(enabled):
            out, collected = capture(h)(wide)
            assert out.dtype == collected["h"][0].dtype == plant(h, {"h": out})(wide).dtype == dtype
            assert sites(h)(wide)[0].aval.dtype == dtype
            assert reap(h)(1.0)["h"].dtype == dtype


def layers(x):
    x = jax.jit(lambda x: sow(jnp.sin(x), name="a"))(x)
    return lax.scan(lambda c, _: (sow(2 * c, name="b"), None), x, length=2)[0]


CONTEXTS = {
    "disable_jit": lambda: jax.disable_jit(),
    "enable_checks": lambda: jax.enable_checks(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "standard": lambda: jax.numpy_dtype_promotion("standard"),
    "debug_nans": lambda: jax.debug_nans(True),
    "checking_leaks": lambda: jax.checking_leaks(),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_context(context):
    with CONTEXTS[context]():
        out, collected = capture(layers)(X)
        planted = plant(layers, {"a": X, "b": harvest.add(1.0)})(X)
    np.testing.assert_allclose(out, 4 * np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(collected["b"][0], [2 * np.sin(X), 4 * np.sin(X)], rtol=1e-6)
    np.testing.assert_allclose(planted, 4 * X + 3, rtol=1e-6)


def test_promotion_is_that_of_the_caller():
    fn = lambda x, n: h(x + n)
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):
            assert reap(fn)(X, np.arange(3))["h"].dtype == np.float32
        with pytest.raises(
            ValueError, match="promotion path when jax_numpy_dtype_promotion=strict"
        ):
            reap(fn)(X, np.arange(3))


# ------------------------------------------------------------------------------------- NaNs


def nan(x):
    return jnp.log(h(x) - 9.0)  # the NaN


def nan_in_scan(x):
    return lax.scan(lambda c, _: (nan(c), None), x, length=2)[0]  # scan


NANS = {  # and the line to name: JAX checks the outputs of a loop as a whole
    "straight": (nan, "the NaN"),
    "jit": (lambda x: jax.jit(nan)(x), "the NaN"),
    "checkpoint": (jax.checkpoint(nan), "the NaN"),
    "scan": (nan_in_scan, "scan"),
}
TRANSFORMS = {
    "capture": capture,
    "reap": lambda fn: reap(lambda x: sow(fn(x), name="out"), "out"),
    "plant": lambda fn: plant(fn, {"h": harvest.scale(0.5)}),
    "grad": lambda fn: jax.grad(lambda x: jnp.sum(plant(fn, {"h": harvest.zero()})(x))),
    "jit": lambda fn: jax.jit(capture(fn)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("structure", NANS)
def test_a_nan_raises_with_the_line(structure, transform):
    fn, comment = NANS[structure]
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# {comment}"))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as caught:
        TRANSFORMS[transform](fn)(X)
    text = "".join(traceback.format_exception(caught.value))
    assert f'test_values.py", line {number}' in text or f"test_values.py:{number}" in text


# ------------------------------------------------------------------------------------- refs


def doubled(ref):
    ref[...] = h(2 * ref[...])
    return ref[...] + 1


def test_a_ref_cannot_be_sown():
    message = r"mutable `Ref` of type Ref\{float32\[3\]\}.*sow what it holds, `ref\[\.\.\.\]`"
    with pytest.raises(harvest.SowError, match=message):
        h(jax.new_ref(jnp.ones(3)))
    with pytest.raises(harvest.SowError, match=r"at \['a'\]\[1\]"):
        reap(lambda x: h({"a": (x, jax.new_ref(x))}))(X)


REFS = {  # calls of `doubled`, and what the ref holds at the end
    "local": (lambda ref: doubled(jax.new_ref(X)), X),
    "argument": (doubled, 2 * X),
    "in jit": (lambda ref: jax.jit(doubled)(ref), 2 * X),
    "in scan": (lambda ref: lax.scan(lambda c, _: (doubled(ref), c), X, length=3)[0], 8 * X),
    "in cond": (lambda ref: lax.cond(True, lambda: doubled(ref), lambda: X), 2 * X),
}


@pytest.mark.parametrize("closed", [False, True], ids=["given", "closed over"])
@pytest.mark.parametrize("name", REFS)
def test_refs(name, closed):
    fn, held = REFS[name]
    last = 2 * X if name == "local" else held
    for transform, wanted in [
        (lambda f: lambda *a: capture(f)(*a)[0], last + 1),
        (lambda f: plant(f, {"h": lambda v: v}), last + 1),
        (lambda f: lambda *a: jax.tree.leaves(reap(f)(*a)["h"])[-1][..., -3:].ravel()[-3:], last),
    ]:
        ref = jax.new_ref(jnp.asarray(X))
        value = transform(functools.partial(fn, ref))() if closed else transform(fn)(ref)
        np.testing.assert_array_equal(value, wanted)
        np.testing.assert_array_equal(ref[...], held)


def test_constants_of_a_program_are_arrays_to_those_who_see_them():
    table = np.arange(3, dtype=np.float32)  # which JAX keeps as an object of its own
    f = lambda x: x + sow(jnp.asarray(table), name="table")
    np.testing.assert_array_equal(plant(f, {"table": lambda t: t.at[0].set(5)})(X), X + [5, 1, 2])
    inlined = jax.jit(lambda x: reap(f)(x)["table"].at[0].set(1))
    np.testing.assert_array_equal(inlined(X), [1, 1, 2])
    result = jax.jit(lambda x: capture(lambda x: (x, jnp.asarray(table)))(x)[0][1].at[0].set(7))
    np.testing.assert_array_equal(result(X), [7, 1, 2])
