"""Predicates mean the same over leaves of pytrees and over sites."""

from typing import Any, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import (
    Array,
    BFloat16,
    Bool,
    Float,
    Inexact,
    Int,
    Integer,
    Num,
    PRNGKeyArray,
    PyTree,
    Shaped,
    jaxtyped,
)

from harvest import (
    SelectError,
    Sharded,
    ShardingError,
    SiteTypeError,
    UnknownSiteError,
    add,
    by_key,
    capture,
    check_types,
    grad,
    has_spec,
    has_type,
    is_replicated,
    is_varying,
    plant,
    reap,
    scope,
    sites,
    sow,
    sweep,
    zero,
)

from .meshes import MESHES, P, X, on_explicit, put
from .shards import AxisType, mesh_of

VALUES = {
    "vector": jnp.ones(3),
    "square": jnp.ones((3, 3)),
    "oblong": jnp.ones((3, 4)),
    "counts": jnp.arange(3),
    "flag": jnp.array(True),
    "half": jnp.ones(3, jnp.bfloat16),
    "complex": jnp.ones(3, jnp.complex64),
    "key": jax.random.key(0),
    "old key": jax.random.PRNGKey(0),
}
VALUES = dict(sorted(VALUES.items()))  # as dicts are traced
TYPES = {
    "named": (Float[Array, "n"], ["vector", "half"]),
    "fixed": (Float[Array, "3 4"], ["oblong"]),
    "one name twice": (Float[Array, "n n"], ["square"]),
    "symbolic": (Float[Array, "n n+1"], ["oblong"]),
    "variadic": (Float[Array, "*axes n"], ["vector", "square", "oblong", "half"]),
    "anything": (Shaped[Array, "..."], list(VALUES)),
    "broadcasting": (Num[Array, "#n n"], ["square"]),
    "one dtype": (BFloat16[Array, "..."], ["half"]),
    "family": (Inexact[Array, "n"], ["vector", "half", "complex"]),
    "integers": (Integer[Array, "..."], ["counts", "old key"]),
    "bool": (Bool[Array, ""], ["flag"]),
    "key": (PRNGKeyArray, ["key", "old key"]),
    "union": (Int[Array, "n"] | Bool[Array, ""], ["counts", "flag"]),
    "typing.Union": (Union[Int[Array, "n"], Bool[Array, ""]], ["counts", "flag"]),  # noqa: UP007
    "tree": (PyTree[Float[Array, "n n"]], ["square"]),
    "array": (jax.Array, list(VALUES)),
    "sharded": (Sharded[Float[Array, "n n"], P()], ["square"]),
}


def sown(values):
    for name, value in values.items():
        sow(value, name=name)


@pytest.mark.parametrize("name", TYPES)
def test_types_of_arrays_tracers_types_and_sites(name):
    annotation, chosen = TYPES[name][0], sorted(TYPES[name][1])
    predicate = has_type(annotation)
    wanted = {key: key in chosen for key in VALUES}
    assert jax.tree.map(predicate, VALUES) == wanted
    assert predicate.filter_spec(VALUES) == wanted
    assert jax.tree.map(predicate, jax.eval_shape(lambda: VALUES)) == wanted
    assert eqx.filter(VALUES, predicate).keys() == VALUES.keys()
    assert [k for k, v in eqx.filter(VALUES, predicate).items() if v is not None] == chosen
    traced = []
    jax.make_jaxpr(lambda values: traced.append(jax.tree.map(predicate, values)))(VALUES)
    assert traced == [wanted]
    for select in (predicate, annotation):
        assert list(reap(sown, select)(VALUES)) == chosen
        assert list(capture(sown, [select])(VALUES)[1]) == chosen
    assert [site.key for site in sites(sown)(VALUES) if predicate(site)] == chosen
    left, right = eqx.partition(VALUES, ~predicate)
    assert [k for k in VALUES if right[k] is not None] == chosen
    assert all(map(lambda a, b: a is b, eqx.combine(left, right).values(), VALUES.values()))


def test_arrays_of_numpy_are_arrays():
    assert has_type(Float[Array, "a b"])(np.ones((2, 3), np.float32))
    assert has_type(Float[np.ndarray, "a b"])(np.ones((2, 3)))
    assert not has_type(Float[np.ndarray, "a b"])(jnp.ones((2, 3)))
    assert has_type(Int[Array, ""])(np.int32(1))
    assert not has_type(Float[Array, "..."])(np.array(["text"]))


def test_leaves_that_are_no_arrays():
    leaves = [1, 1.0, "text", jax.nn.relu, object()]
    predicates = (has_type(Shaped[Array, "..."]), has_spec(P()), is_varying(), is_replicated())
    assert not any(predicate(leaf) for predicate in predicates for leaf in leaves)
    assert all((~predicate)(leaf) for predicate in predicates for leaf in leaves)
    assert list(map(has_type(int), leaves)) == [True, False, False, False, False]
    assert list(map(has_type(str | float), leaves)) == [False, True, True, False, False]


def test_of_a_site_with_several_leaves_all_have_to_match():
    def f(x):
        sow({"a": x, "b": (x[0], 3)}, name="mixed")
        sow((x, 2 * x), name="pair")
        sow(None, name="empty")

    x = jnp.ones(3)
    assert list(reap(f, Float[Array, "n"])(x)) == ["pair"]
    assert list(reap(f, has_type(Float[Array, "..."]) | has_type(int))(x)) == ["mixed", "pair"]
    # Those of which no leaf is a vector: not those of which some are none.
    assert list(reap(f, ~has_type(Float[Array, "n"]))(x)) == ["empty"]
    assert list(reap(f, PyTree[Float[Array, "n"]])(x)) == ["pair", "empty"]
    assert list(reap(f, PyTree[Float[Array, "..."] | int])(x)) == ["mixed", "pair", "empty"]


def test_names_of_dimensions_stay_within_a_leaf():
    @jaxtyped(typechecker=None)
    def bound(x):
        assert isinstance(x, Float[Array, "n"])
        return has_type(Float[Array, "n m"])(jnp.ones((4, 5))), isinstance(x, Float[Array, "m"])

    assert bound(jnp.ones(3)) == (True, True)
    two = [jnp.ones(3), jnp.ones(4)]
    assert list(map(has_type(Float[Array, "n"]), two)) == [True, True]


def fn(x):
    with scope("layers/0"):
        x = sow(x + 1, name="resid")
        sow(x.sum(), name="norm")
    with scope("layers/1"):
        x = sow(2 * x, name="resid")
    return sow(x.sum(), name="out")


COMPOSED = {
    "and": (has_type(Float[Array, "n"]) & by_key("layers/1/*"), ["layers/1/resid"]),
    "or": (by_key("out") | by_key("layers/0/resid"), ["layers/0/resid", "out"]),
    "not": (~has_type(Float[Array, "n"]), ["layers/0/norm", "out"]),
    "annotation on the right": (by_key("layers/**") & Float[Array, ""], ["layers/0/norm"]),
    "annotation on the left": (Float[Array, ""] & by_key("layers/**"), ["layers/0/norm"]),
    "or with an annotation": (Float[Array, "n"] | by_key("out"), None),
    "neither": (~(by_key("**/resid") | by_key("out")), ["layers/0/norm"]),
    "key": (by_key("layers/0/resid"), ["layers/0/resid"]),
    "glob": (by_key("**/resid"), ["layers/0/resid", "layers/1/resid"]),
    "glob stops at a slash": (by_key("*"), ["out"]),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_predicates_choose_sites_and_leaves(name):
    predicate, keys = COMPOSED[name]
    keys = ["layers/0/resid", "layers/1/resid", "out"] if keys is None else keys
    collected = reap(fn)(X[0])
    assert list(reap(fn, predicate)(X[0])) == keys
    # A tree that has the keys of the sites as paths.
    tree = {"layers": {"0": {}, "1": {}}, "out": collected["out"]}
    for key in ("layers/0/resid", "layers/0/norm", "layers/1/resid"):
        _, layer, leaf = key.split("/")
        tree["layers"][layer][leaf] = collected[key]
    kept = eqx.filter(tree, predicate.filter_spec(tree))
    paths = jax.tree_util.tree_leaves_with_path(kept)
    joined = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    assert sorted(joined) == sorted(keys)


def test_wherever_a_selection_is_taken():
    x, vectors = X[0], Float[Array, "n"]
    edited = plant(fn, {vectors: add(1.0)})(x)
    assert edited == (2 * (x + 1 + 1) + 1).sum()
    assert plant(fn, {has_type(vectors) & by_key("layers/0/*"): zero()})(x) == 0
    by_hand = {"layers/0/resid": np.full(4, 2.0), "layers/1/resid": np.ones(4)}
    jax.tree.map(np.testing.assert_array_equal, grad(fn, vectors)(x), by_hand)
    swept = sweep(fn, vectors, zero())(x)
    assert {key: float(value) for key, value in swept.items()} == dict.fromkeys(by_hand, 0.0)
    reduced = reap(fn, {vectors: jnp.max})(x)
    assert reduced["layers/1/resid"] == 2 * (x + 1).max()
    assert list(jax.jit(reap(fn, vectors))(x)) == list(by_hand)
    assert list(reap(jax.vmap(fn), vectors)(X)) == list(by_hand)  # of one example


def test_a_predicate_is_equal_to_one_made_again():
    again = has_spec(P("d")) & ~by_key("a/*") | is_varying("d")
    assert again == has_spec(P("d")) & ~by_key("a/*") | is_varying("d")
    assert hash(again) == hash(has_spec(P("d")) & ~by_key("a/*") | is_varying("d"))
    assert repr(again) == "((has_spec(P('d',)) & ~by_key('a/*')) | is_varying('d'))"
    assert repr(has_type(Float[Array, "n d"])) == "has_type(Float[Array, 'n d'])"
    assert repr(is_replicated()) == "is_replicated()"


class Layer(eqx.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"]
    activation: object = jax.nn.relu


def test_a_module_by_path_and_type():
    model = {
        "layers": [Layer(jnp.ones((3, 2)), jnp.ones(3)) for _ in range(2)],
        "head": jnp.ones(3),
    }
    chosen = (by_key("layers/1/*") & has_type(Float[Array, "..."])).filter_spec(model)
    trained, frozen = eqx.partition(model, chosen)
    assert len(jax.tree.leaves(trained)) == 2 and trained["layers"][1].bias is not None

    def loss(trained):
        layers = eqx.combine(trained, frozen)["layers"]
        return sum((layer.weight.sum() + layer.bias.sum()) for layer in layers)

    gradients = eqx.filter_grad(loss)(trained)
    assert gradients["layers"][0].weight is None
    np.testing.assert_array_equal(gradients["layers"][1].weight, np.ones((3, 2)))


MISUSED = {
    "leaf alone": (lambda: by_key("a")(jnp.ones(3)), r"by_key\('a'\) got f32\[3\] alone"),
    "filter": (lambda: eqx.filter([1], ~by_key("a")), r"got .* alone.*`predicate.filter_spec"),
    "no annotation": (lambda: has_type(3), "`has_type` got 3; wanted a jaxtyping annotation"),
    "family": (lambda: has_type(Float), r"write `Float\[Array, '\.\.\.'\]`"),
    "anything": (lambda: has_type(Any), r"`has_type` got typing\.Any; wanted"),
    "sharded alone": (lambda: has_type(Sharded), r"`has_type` got <class .*Sharded'>; wanted"),
    "list": (lambda: has_type(list[int]), r"`has_type` got list\[int\]; wanted"),
    "no spec": (lambda: has_spec("data"), "`has_spec` got 'data'; wanted a `jax.sharding.Part"),
    "no pattern": (lambda: by_key(3), "`by_key` got 3; wanted a key or a glob"),
    "string": (lambda: is_varying() & "a", "not with 'a' .* for keys there is `harvest.by_key`"),
    "function": (lambda: eqx.is_array | is_varying(), "combined with .* not with <function"),
    "unbound": (
        lambda: has_type(Float[Array, "n+1"])(jnp.ones(3)),
        r"has_type\(Float\[Array, 'n\+1'\]\) cannot be checked: .*bound within one leaf",
    ),
    "select": (lambda: reap(fn, Float), r"`select` got .*; wanted None .*a jaxtyping annotation"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misused(name, monkeypatch):
    call, match = MISUSED[name]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as without the import hook
    with pytest.raises(SelectError, match=match):
        call()


def test_a_glob_that_matches_nothing():
    for predicate in (by_key("layers/0/resd"), ~by_key("layers/0/resd") & Float[Array, "n"]):
        with pytest.raises(UnknownSiteError, match="'layers/0/resd' matches no site; did you mean"):
            reap(fn, predicate)(X[0])
        with pytest.raises(UnknownSiteError, match="'layers/0/resd' matches no site"):
            jax.jit(plant(fn, {predicate: zero()}))(X[0])
    with pytest.raises(UnknownSiteError, match="'w' matches no leaf; there are 'a', 'b'"):
        by_key("w").filter_spec({"a": 1, "b": 2})


# ------------------------------------------------------------------------------- on a mesh

PREDICATES = {
    "rows": has_spec(P("d")),
    "rows, all": has_spec(P("d", None)),
    "columns": has_spec(P(None, "d")),
    "whole": has_spec(P()),
    "varying": is_varying(),
    "varying over d": is_varying("d"),
    "varying over both": is_varying("d", "m"),
    "replicated": is_replicated(),
}
# What each array is: how it is put on the mesh, and the predicates that hold for it.
PUT = {
    "rows": (("d",), {"rows", "rows, all", "varying", "varying over d"}),
    "columns": ((None, "d"), {"columns", "varying", "varying over d"}),
    "both": (("d", "m"), {"varying", "varying over d", "varying over both"}),
    "together": ((("d", "m"),), {"varying", "varying over d", "varying over both"}),
    "whole": ((), {"whole", "replicated"}),
}


def held(x):
    return {name for name, predicate in PREDICATES.items() if predicate(x)}


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", PUT)
def test_arrays_on_a_mesh(name, kind):
    spec, wanted = PUT[name]
    x = put(np.ones((8, 8), np.float32), MESHES[kind], *spec)
    assert held(x) == wanted
    assert held(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)) == wanted


def test_arrays_on_no_mesh_are_whole():
    assert held(jnp.ones((8, 8))) == held(np.ones((8, 8))) == {"whole", "replicated"}


@on_explicit
@pytest.mark.parametrize("name", PUT)
def test_tracers_and_sites_of_explicit_axes(name, mesh):
    spec, wanted = PUT[name]
    x, seen = put(np.ones((8, 8), np.float32), mesh, *spec), []

    def f(x):
        seen.append(held(x))
        return sow(x, name="h")

    jax.make_jaxpr(f)(x)
    assert seen == [wanted]
    assert held(sites(f)(x)["h"]) == wanted
    for predicate, choose in [(p, n in wanted) for n, p in PREDICATES.items()]:
        assert list(reap(f, predicate)(x)) == ["h"] * choose
    # A batch over rows is not how one example is split.
    example = put(np.ones(8, np.float32), mesh, *spec[1:])
    assert held(sites(jax.vmap(f))(x)["h"]) == held(example)


def test_where_nothing_is_known_nothing_holds():
    x, seen = put(X, MESHES["auto"], "d"), []
    f = lambda x: seen.append(held(x)) or sow(x, name="h")
    jax.make_jaxpr(f)(x)
    assert seen == [set()] and held(sites(f)(x)["h"]) == set()
    assert held(jax.ShapeDtypeStruct((8, 8), jnp.float32)) == set()


def test_of_a_mixed_mesh_explicit_axes_are_known():
    x, seen = put(np.ones((8, 8), np.float32), MESHES["mixed"], "d"), []
    with jax.set_mesh(MESHES["mixed"]):
        jax.make_jaxpr(lambda x: seen.append(held(x)))(x)
    assert seen == [{"varying", "varying over d"}]  # it may be split over "m" as well


IN_SHARDS = {
    "rows": (P("data"), True, {"rows", "varying", "varying over data"}),
    "both": (P("data", "model"), True, {"varying", "varying over data"}),
    "whole": (P(), True, {"whole", "replicated"}),
    "unchecked rows": (P("data"), False, set()),
    "unchecked whole": (P(), False, set()),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", IN_SHARDS)
def test_shards(name, kind):
    spec, check_vma, wanted = IN_SHARDS[name]
    predicates = {
        "rows": has_spec(P("data")),
        "whole": has_spec(P()),
        "varying": is_varying(),
        "varying over data": is_varying("data"),
        "replicated": is_replicated(),
    }
    mesh, seen = mesh_of(kind), []

    def body(x):
        seen.append({n for n, predicate in predicates.items() if predicate(x)})
        sow(x, name="h")
        return x

    options = {"mesh": mesh, "check_vma": check_vma}
    f = jax.shard_map(body, in_specs=spec, out_specs=spec, **options)
    x = put(np.ones((8, 8), np.float32), mesh, *spec)
    f(x)
    assert seen == [wanted]
    (site,) = sites(f)(x)
    assert {n for n, predicate in predicates.items() if predicate(site)} == wanted


def test_shards_that_are_sown_with_a_spec():
    def body(x):
        sow(x, name="rows", spec=P("data", "model"))
        return sow(x.T, name="columns", spec=P("model", "data"))

    for check_vma in (True, False):
        f = jax.shard_map(
            body,
            mesh=mesh_of(AxisType.Auto),
            in_specs=P("data", "model"),
            out_specs=P("model", "data"),
            check_vma=check_vma,
        )
        assert list(reap(f, has_spec(P("data", "model")))(X)) == ["rows"]
        assert list(reap(f, has_spec(P("model", "data")))(X)) == ["columns"]
        assert list(reap(f, is_varying("model", "data"))(X)) == ["rows", "columns"]


def test_an_axis_of_size_one_does_not_matter():
    mesh = jax.make_mesh((1,), ("d",))
    for spec in (P(), P("d"), P(None, "d")):
        x = jax.device_put(jnp.ones((2, 2)), jax.sharding.NamedSharding(mesh, spec))
        assert has_spec(P("d"))(x) and has_spec(PartitionSpec())(x)


def test_a_predicate_that_is_not_called():
    with pytest.raises(SelectError, match=r"`is_varying` got Site.*it returns a predicate"):
        reap(lambda x: sow(x, name="h"), is_varying)(1.0)
    with pytest.raises(SelectError, match=r"`is_varying` got P\('d',\)"):
        is_varying(PartitionSpec("d"))
    with pytest.raises(SelectError, match="of type `GenericAlias`; wanted"):
        reap(lambda x: sow(x, name="h"), list[Float[Array, "n"]])


@pytest.mark.parametrize(
    "spec", [PartitionSpec(PartitionSpec.UNCONSTRAINED, "d"), PartitionSpec("d", unreduced={"m"})]
)
def test_specs_that_leave_something_open(spec):
    with pytest.raises(SelectError, match=r"`has_spec` got P.*unconstrained or unreduced"):
        has_spec(spec)
    with pytest.raises(ShardingError, match=r"`Sharded` got .*unconstrained or unreduced"):
        Sharded[Float[Array, "n d"], spec]


type Vector = Float[Array, "d"]
type Vectors = PyTree[Vector]
type Either = Vector | Int[Array, ""]


def test_an_alias_is_what_it_stands_for():
    f = lambda x: (
        sow(x, name="vector"),
        sow(x[:, None], name="matrix"),
        sow(jnp.int32(3), name="n"),
    )
    assert list(reap(f, Vector)(jnp.ones(3))) == ["vector"]
    assert list(reap(f, Either)(jnp.ones(3))) == ["vector", "n"]
    check_types(f, {"vector": Vectors, "n": Either})(jnp.ones(3))
    with pytest.raises(SiteTypeError, match="matrix"):
        check_types(f, {"matrix": Vector})(jnp.ones(3))
