"""`Sharded`: one annotation for a global array and for its shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintParamViolation
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, TypeCheckError, jaxtyped

from harvest import Sharded, ShardingError, reap, sow

from .meshes import MESHES, P, put
from .shards import AxisType, mesh_of

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
CHECKED = pytest.mark.parametrize("check_vma", [True, False])
Batch = Sharded[Float[Array, "batch d"], P("data", None)]
Weights = Sharded[Float[Array, "d out"], P(None, "model")]
Out = Sharded[Float[Array, "batch out"], P("data", "model")]

X = np.random.RandomState(0).randn(8, 4).astype(np.float32)
W = np.random.RandomState(1).randn(4, 6).astype(np.float32)


@jaxtyped(typechecker=beartype)
def apply(x: Batch, w: Weights) -> Out:
    return jnp.tanh(sow(x @ w, name="h"))


def why(annotation, value):
    """Why a value is no instance, as beartype asks; agrees with `isinstance`."""
    reason = type(annotation).__instancecheck_str__(annotation, value)
    assert isinstance(value, annotation) == (reason == "")
    return reason


def mapped(fn, kind, in_specs, out_specs, **options):
    mesh = options.pop("mesh", None) or mesh_of(kind)
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


IN_SPECS, OUT_SPECS = (P("data", None), P(None, "model")), P("data", "model")


@KINDS
@CHECKED
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_one_function_outside_and_inside(kind, check_vma, jit):
    mesh = mesh_of(kind)
    x, w = put(X, mesh, "data", None), put(W, mesh, None, "model")
    wanted = np.tanh(X @ W)
    inside = mapped(apply, kind, IN_SPECS, OUT_SPECS, check_vma=check_vma)
    for fn in (apply, inside):
        np.testing.assert_allclose(jit(fn)(x, w), wanted, rtol=1e-5)
        assert reap(fn)(x, w)["h"].size == wanted.size
        jax.vmap(fn)(x[None], w[None])
        with jax.set_mesh(mesh):
            gradient = jax.grad(lambda x, w, fn=fn: fn(x, w).sum())(x, w)
        by_hand = (1 - wanted**2) @ W.T
        np.testing.assert_allclose(gradient, by_hand, rtol=1e-4, atol=1e-6)


def outside(x, w, x_spec=("data", None), w_spec=(None, "model")):
    mesh = mesh_of(AxisType.Explicit)
    return apply(put(x, mesh, *x_spec), put(w, mesh, *w_spec))


def inside(x, w, in_specs=IN_SPECS, fn=apply):
    return mapped(fn, AxisType.Auto, in_specs, OUT_SPECS)(x, w)


def summed(x, w):
    return apply(lax.psum(x, "data") / 4, w)


def spread(x, w):
    return apply(lax.pcast(x, "model", to="varying"), w)


# Ten wrong calls, each with what it is told.
WRONG = {
    "dtype": (lambda: outside(X.astype(int), W), "this array has dtype int"),
    "rank": (lambda: outside(X[0], W, ("data",)[:0]), "this array has 1 dimensions, not the 2"),
    "a dimension of another argument": (
        lambda: outside(X, W[:2]),
        "the size of dimension d is 2 which does not equal the existing value of 4",
    ),
    "spec": (
        lambda: outside(X, W, ("model", None)),
        r"sharded as P\('model', None\), not as P\('data', None\)",
    ),
    "not sharded": (lambda: outside(X, W, ()), r"sharded as P\(\), not as P\('data', None\)"),
    "on one device": (
        lambda: apply(jnp.asarray(X), jnp.asarray(W)),
        r"this array is on one device, not as P\('data', None\)",
    ),
    "dtype of a shard": (lambda: inside(X.astype(np.float32) > 0, W), "this array has dtype bool"),
    "a dimension of another shard": (
        lambda: inside(X, W[:2]),
        r"dimension d is 2 .* value of 4 \(as a shard of an array of shape \(2, 6\)\)",
    ),
    "varies too little": (
        lambda: inside(X, W, fn=summed),
        r"varies over no mesh axis, and P\('data', None\) wants .* the mesh axes \['data'\]",
    ),
    "varies too much": (
        lambda: inside(X, W, fn=spread),
        r"varies over the mesh axes \['data', 'model'\], and P\('data', None\) wants",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, match = WRONG[name]
    with pytest.raises(TypeCheckError, match="Expected type: Sharded") as caught:
        call()
    reason: BaseException | None = caught.value
    while reason.__cause__ is not None:  # jaxtyping's, and then that of beartype
        reason = reason.__cause__
    assert isinstance(reason, BeartypeCallHintParamViolation)
    assert re.search(match, str(reason))


def test_beartype_says_why():
    @beartype
    def f(x: Batch):
        return x

    match = r"violates type hint .*as this array is on one device, not as P\('data', None\)"
    with pytest.raises(BeartypeCallHintParamViolation, match=match):
        f(jnp.asarray(X))


def test_a_mismatch_binds_nothing():
    mesh = mesh_of(AxisType.Auto)
    with jaxtyped("context"):
        assert not isinstance(put(X, mesh, "model"), Batch)
        assert not isinstance(put(X.astype(int), mesh, "data"), Batch)
        assert isinstance(put(W, mesh, "data"), Batch)  # batch=4, d=6
        assert not isinstance(put(X, mesh, "data"), Batch)
        assert isinstance(jnp.ones((6, 4)), Float[Array, "d batch"])


@KINDS
def test_dimensions_are_global(kind):
    mesh = mesh_of(kind)
    of_rows = Sharded[Float[Array, "8 4"], P("data", "model")]
    local = Sharded[Float[Array, "2 2"], P("data", "model")]
    seen = []

    def body(x):
        seen.append((why(of_rows, x), why(local, x)))
        return x

    x = put(X, mesh, "data", "model")
    assert why(of_rows, x) == ""
    assert "size 8 does not equal 2" in why(local, x)
    mapped(body, kind, P("data", "model"), P("data", "model"))(x)
    ((right, wrong),) = seen
    assert right == "" and "size 8 does not equal 2" in wrong and "(8, 4)" in wrong


def test_an_axis_split_over_two_mesh_axes():
    both, seen = Sharded[Float[Array, "8 4"], P(("data", "model"))], []
    body = lambda x: seen.append(why(both, x)) or x
    mapped(body, AxisType.Auto, P(("data", "model")), P(("data", "model")))(X)
    mapped(body, AxisType.Auto, P("data"), P("data"))(X)
    assert seen[0] == "" and "varies over the mesh axes ['data'], and" in seen[1]
    mesh = mesh_of(AxisType.Auto)
    assert why(both, put(X, mesh, ("data", "model"))) == ""
    assert "sharded as P(('model', 'data'),)" in why(both, put(X, mesh, ("model", "data")))


def test_without_check_vma_only_dtype_and_shape_are_checked():
    seen = []

    def body(x):
        whole = Sharded[Float[Array, "2 4"], P()]
        seen.extend([why(Batch, x), why(Sharded[Float[Array, "8 4"], P("data")], x)])
        seen.extend([why(whole, x), why(Sharded[Int[Array, "..."], P("data")], x)])
        return x

    mapped(body, AxisType.Auto, P("data"), P("data"), check_vma=False)(X)
    assert seen[:3] == ["", "", ""] and "has dtype float32" in seen[3]


@pytest.mark.parametrize("mesh", ["auto", "none"])
def test_of_a_tracer_under_automatic_axes_only_dtype_and_shape_are_checked(mesh):
    x = jnp.asarray(X) if mesh == "none" else put(X, MESHES["auto"], "d")
    seen = []

    @jax.jit
    def f(x):
        seen.extend([why(Sharded[Float[Array, "a b"], P(None, "d")], x)])
        seen.extend([why(Sharded[Int[Array, "a b"], P("d")], x)])
        seen.extend([why(Sharded[Float[Array, "a a"], P("d")], x)])

    f(x)
    assert seen[0] == "" and "dtype float32" in seen[1] and "does not equal" in seen[2]


def test_of_a_tracer_explicit_axes_are_checked():
    seen = []
    for kind in ("explicit", "mixed"):
        with jax.set_mesh(MESHES[kind]):
            f = jax.jit(
                lambda x: seen.append([why(Sharded[Float[Array, "..."], s], x) for s in ALL])
            )
            f(put(X, MESHES[kind], "d"))
    explicit, mixed = [[reason == "" for reason in reasons] for reasons in seen]
    assert explicit == [True, True, False, False, False]
    assert mixed == [True, True, True, False, False]  # "m" is automatic


ALL = [P("d"), P("d", None), P("d", "m"), P(None, "d"), P()]


def test_of_some_manual_axes_the_others_are_as_outside():
    """`data` is manual, and `model` stays explicit."""
    mesh, seen = mesh_of(AxisType.Explicit), []

    def body(x):
        specs = [P("data", "model"), P("data"), P(None, "model")]
        seen.append([why(Sharded[Float[Array, "8 4"], spec], x) for spec in specs])
        return x

    spec = P("data", None)
    f = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"data"})
    with jax.set_mesh(mesh):
        jax.jit(f)(put(X, mesh, "data", "model"))
    ((right, whole, rows),) = seen
    assert right == ""
    assert "sharded as P(None, 'model')" in whole
    assert "varies over the mesh axes ['data']" in rows


def test_what_comes_from_outside_is_whole_in_every_shard():
    table, seen = jnp.ones((3, 4)), []

    def body(x):
        for value in (table, np.ones((3, 4), np.float32)[0] * jnp.ones(4), x):
            seen.append(why(Sharded[Float[Array, "..."], P()], value))
        seen.append(why(Sharded[Float[Array, "12 4"], P("data")], table))
        return x

    mapped(body, AxisType.Auto, P("data"), P("data"))(X)
    assert seen[:2] == ["", ""] and "varies over" in seen[2] and "varies over no" in seen[3]


@KINDS
def test_trees_and_unions(kind):
    mesh = mesh_of(kind)
    rows, columns = put(X, mesh, "data"), put(X, mesh, None, "data")
    tree = Sharded[PyTree[Float[Array, "n 4"]], P("data")]
    assert why(tree, {"a": rows, "b": [rows, rows]}) == ""
    assert "sharded as P(None, 'data')" in why(tree, [rows, columns])
    assert (
        why(PyTree[Sharded[Float[Array, "n 4"], P("data")]], (rows, rows)) == "" if False else True
    )
    each = PyTree[Sharded[Float[Array, "n 4"], P("data")]]
    assert isinstance((rows, rows), each) and not isinstance((rows, columns), each)
    union = Sharded[Float[Array, "n 4"] | Int[Array, "n"], P("data")]
    assert why(union, rows) == ""
    assert "has dtype float32" in why(union, rows[:, 0]) and "1 dimensions" in why(
        union, rows.sum(1)
    )
    assert isinstance(columns, union | Sharded[Float[Array, "n 4"], P(None, "data")])


def test_names_of_structures_bind():
    @jaxtyped(typechecker=beartype)
    def add(
        x: Sharded[PyTree[Float[Array, "?n"], "T"], P()],
        y: Sharded[PyTree[Float[Array, "?n"], "T"], P()],
    ):
        return jax.tree.map(jnp.add, x, y)

    add([jnp.ones(2), jnp.ones(3)], [jnp.ones(2), jnp.ones(3)])
    for wrong in ((jnp.ones(2), jnp.ones(3)), [jnp.ones(2), jnp.ones(2)]):
        with pytest.raises(TypeCheckError, match="parameter 'y'"):
            add([jnp.ones(2), jnp.ones(3)], wrong)


@pytest.mark.parametrize("value", [3, "text", None, object(), (1, 2), np.ones((8, 4), np.float32)])
def test_what_is_no_array(value):
    assert not isinstance(value, Batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sharded[Float[Array, "n"]],
        lambda: Sharded[Float[Array, "n"], "data"],
        lambda: Sharded[P("data"), Float[Array, "n"]],
        lambda: Sharded[3, P()],
    ],
)
def test_written_wrongly(make):
    with pytest.raises(ShardingError, match=r"`Sharded` got .*; wanted a jaxtyping annotation"):
        make()
    with pytest.raises(ShardingError, match=r"write `Sharded\[\.\.\., P\(\)\]`"):
        isinstance(3, Sharded)


def test_too_many_items_and_unknown_axes():
    x = put(X, mesh_of(AxisType.Auto), "data")
    long = Sharded[Float[Array, "..."], P("data", None, "model")]
    assert why(long, x) == "this array has 2 dimensions, and P('data', None, 'model') has 3"
    unknown = Sharded[Float[Array, "..."], PartitionSpec("rows")]
    assert why(unknown, x) == "the mesh has no axis 'rows', but ('data', 'model')"
    assert repr(Batch) == "Sharded[Float[Array, 'batch d'], P('data', None)]"
