"""`filter_shard_map`: Equinox modules on a mesh are the same as on one device."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int, jaxtyped

from harvest import (
    Sharded,
    ShardingError,
    UnknownSiteError,
    add,
    by_key,
    capture,
    filter_shard_map,
    grad,
    has_spec,
    has_type,
    is_replicated,
    plant,
    reap,
    sites,
    sow,
)

from .meshes import P, put
from .shards import mesh_of

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CHECKED = pytest.mark.parametrize("check_vma", [True, False])
X = np.random.RandomState(0).randn(8, 4).astype(np.float32)


class Model(eqx.Module):
    """Two layers: of the first each shard has columns, of the second rows, as Megatron has it."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    scale: jax.Array
    name: str = "model"
    axis: str | None = None

    def __call__(self, x, power=1):
        h = jnp.tanh(jax.vmap(self.up)(x))
        h = sow(h, name="h", spec=P("data", "model"))
        out = h @ self.down.weight.T
        out = out if self.axis is None else lax.psum(out, self.axis)
        out = (out + self.down.bias[None]) * self.scale**power
        return {"out": sow(out, name="out", spec=P("data")), "name": self.name, "power": power}


def model(axis=None):
    up, down = jax.random.split(jax.random.key(0))
    up, down = eqx.nn.Linear(4, 6, key=up), eqx.nn.Linear(6, 3, key=down)
    return Model(up, down, jnp.float32(2), axis=axis)


BY_KEY = {
    by_key("up/weight"): P("model", None),
    by_key("up/bias"): P("model"),
    by_key("down/weight"): P(None, "model"),
    ...: P(),
}


def by_type(rest):
    """Of arrays with names of dimensions only: what has three or six rows is a weight."""
    return {
        Float[Array, "6 4"]: P("model", None),
        Float[Array, "6"]: P("model"),
        Float[Array, "3 6"]: P(None, "model"),
        Float[Array, "batch d"]: P("data"),
        ...: rest,
    }


def check(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, str | int):
            assert type(a) is type(b) and a == b
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def loss(out):
    return (out["out"] ** 2).sum()


@CHECKED
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f])
def test_specs_by_annotation_against_the_unsharded_module(check_vma, jit):
    wanted = model()(X)
    f = filter_shard_map(
        model("model"), mesh_of(AUTO), by_type(P()), {...: P("data")}, check_vma=check_vma
    )
    out = jit(f)(X)
    check(out, wanted)
    assert has_spec(P("data"))(out["out"])
    check(jit(f)(X, power=2), model()(X, 2))  # a static argument, by keyword
    check(jit(f)(X, 3), model()(X, 3))


@CHECKED
def test_collected_and_planted_are_those_of_the_unsharded_module(check_vma):
    f = filter_shard_map(
        model("model"), mesh_of(AUTO), by_type(P()), P("data"), check_vma=check_vma
    )
    collected = reap(model())(X)
    assert {site.key: site.spec for site in sites(f)(X)} == {"h": "f32[8,6]", "out": "f32[8,3]"}
    check(reap(f)(X), collected)
    check(capture(f, "h")(X), (model()(X), {"h": (collected["h"],)}))
    check(reap(f, Float[Array, "n 3"])(X), {key: collected[key] for key in ("h", "out")})
    check(plant(f, reap(f)(X))(X), model()(X))
    check(plant(f, {"h": add(1.0)})(X), plant(model(), {"h": add(1.0)})(X))
    h = np.random.RandomState(2).randn(8, 6).astype(np.float32)
    check(plant(f, {"h": h})(X), plant(model(), {"h": h})(X))


@CHECKED
def test_gradients_are_those_of_the_unsharded_module(check_vma):
    f = filter_shard_map(
        model("model"), mesh_of(AUTO), by_type(P()), P("data"), check_vma=check_vma
    )
    wanted = eqx.filter_grad(lambda m: loss(m(X)))(model())
    got = eqx.filter_grad(lambda f: loss(f(X)))(f).fn
    check(jax.tree.leaves(got), jax.tree.leaves(wanted))
    check(jax.grad(lambda x: loss(f(x)))(X), jax.grad(lambda x: loss(model()(x)))(X))
    check(grad(lambda x: loss(f(x)))(X), grad(lambda x: loss(model()(x)))(X))
    batched = lambda f: reap(jax.vmap(lambda x: f(x)["out"]))
    check(batched(f)(X[None]), batched(model())(X[None]))


def test_by_key_and_prefix():
    mesh = mesh_of(AUTO)
    apply = lambda model, x, extra: (model(x)["out"] + extra["a"], extra["b"])
    extra = {"a": jnp.ones((8, 1)), "b": "text"}
    for specs in (
        (BY_KEY, P("data"), {"a": P("data"), "b": None}),
        (BY_KEY, P("data"), P("data")),
        (BY_KEY, P("data"), {"a": {is_replicated(): P("data")}, "b": P()}),
        (BY_KEY, *[{eqx.is_array: P("data")}] * 2),
    ):
        f = filter_shard_map(apply, mesh, specs, (P("data"), None))
        check(f(model("model"), X, extra), (model()(X)["out"] + 1, "text"))


def test_one_spec_for_everything():
    f = filter_shard_map(lambda x, y: (x * y, {"n": 3}), mesh_of(AUTO), P("data"), P("data"))
    check(f(X, X), (X * X, {"n": 3}))
    check(f(X, y=X), (X * X, {"n": 3}))


class Annotated(eqx.Module):
    weight: Sharded[Float[Array, "out in"], P("model", None)]
    layers: list[Sharded[Float[Array, "out"], P("model")]]

    @jaxtyped(typechecker=beartype)
    def __call__(
        self,
        x: Sharded[Float[Array, "batch d"], P("data", None)],
        *rest: Sharded[Float[Array, ""], P()],
        **options: Sharded[Float[Array, "batch"], P("data")],
    ) -> tuple[Sharded[Float[Array, "batch out"], P("data", "model")], dict[str, int]]:
        first, second = self.layers
        out = x @ self.weight.T + (first + second)[None]
        return out * (rest[0] + rest[1]) + options["shift"][:, None], {"n": 1}


def test_sharded_annotations_say_what_specs_do_not():
    m = Annotated(jnp.ones((6, 4)), [jnp.arange(6.0), jnp.ones(6)])
    shift = jnp.arange(8.0)
    wanted = ((X @ np.ones((4, 6)) + np.arange(6) + 1) * 5 + np.arange(8)[:, None], {"n": 1})
    f = filter_shard_map(m, mesh_of(AUTO))
    check(f(X, jnp.float32(2), jnp.float32(3), shift=shift), wanted)
    # What is given counts; here it is another sharding that does as well.
    by_rows = filter_shard_map(
        lambda x, m: m.weight.sum() * x, mesh_of(AUTO), (P("data"), {...: P()}), P("data")
    )
    check(by_rows(X, m), 24 * X)
    mixed = filter_shard_map(
        lambda m, x: m.layers[0] * x[0, 0], mesh_of(AUTO), (None, P()), P("model")
    )
    check(mixed(m, X), np.arange(6) * X[0, 0])


def test_annotations_of_a_function():
    Rows = Sharded[Float[Array, "n d"], P("data")]

    def f(x: Rows, pair: tuple[Rows, int], tree: dict[str, Rows | None]) -> list[Rows]:
        return [x * pair[1], pair[0] + tree["a"]]

    got = filter_shard_map(f, mesh_of(AUTO))(X, (X, 3), {"a": X, "b": None})
    check(got, [X * 3, X + X])
    check(filter_shard_map(f, mesh_of(AUTO), out_specs=P("data"))(X, (X, 3), {"a": X}), got)


def test_explicit_axes_say_how_arguments_are_split():
    mesh, m = mesh_of(EXPLICIT), model("model")
    specs = [(("model", None), m.up.weight), (("model",), m.up.bias)]
    specs += [((None, "model"), m.down.weight), ((), m.down.bias), ((), m.scale)]
    placed = [put(value, mesh, *spec) for spec, value in specs]
    where = lambda m: [m.up.weight, m.up.bias, m.down.weight, m.down.bias, m.scale]
    m = eqx.tree_at(where, m, placed)
    f, x = filter_shard_map(m, mesh, None, P("data")), put(X, mesh, "data")
    check(f(x), model()(X))
    check(reap(f)(x), reap(model())(X))
    with jax.set_mesh(mesh):
        unset = filter_shard_map(m, out_specs=P("data"))
        check(unset(x), model()(X))
        got = eqx.filter_grad(lambda m: loss(filter_shard_map(m, None, None, P("data"))(x)))(m)
    assert jax.typeof(got.up.weight).sharding.spec == P("model", None)
    wanted = eqx.filter_grad(lambda m: loss(m(X)))(model())
    check(jax.tree.leaves(got), jax.tree.leaves(wanted))


def test_some_axes_only():
    """`model` stays automatic, and the model is not split by hand."""
    f = filter_shard_map(model(), mesh_of(AUTO), P("data"), P("data"), axis_names={"data"})
    check(jax.jit(lambda x: f(x)["out"])(X), model()(X)["out"])
    with pytest.raises(ShardingError, match=r"no axis 'model', but \['data'\]"):
        filter_shard_map(model(), mesh_of(AUTO), P("model"), P(), axis_names={"data"})(X)


def test_a_body_is_traced_once_and_new_parameters_do_not_trace_again():
    traces = []

    def f(m, x):
        traces.append(1)
        return m(x)["out"]

    mapped = filter_shard_map(f, mesh_of(AUTO), (BY_KEY, P("data")), P("data"))
    for scale in (2, 3):
        m = eqx.tree_at(lambda m: m.scale, model("model"), jnp.float32(scale))
        check(reap(mapped)(m, X)["out"], reap(model())(X)["out"] * (scale / 2))
    assert len(traces) == 1


def test_it_reads_like_its_function():
    def f(x, *, y=1):
        """What f does."""

    mapped = filter_shard_map(f, mesh_of(AUTO), P(), P())
    assert mapped.__name__ == "f" and mapped.__doc__ == "What f does."
    of_module = filter_shard_map(model(), mesh_of(AUTO), P(), P())
    check(jax.tree.leaves(of_module), jax.tree.leaves(model()))  # its arrays are those of the model


ROWS = P("data")


def mapped(fn, in_specs=ROWS, out_specs=ROWS, **options):
    return filter_shard_map(fn, mesh_of(AUTO), in_specs, out_specs, **options)


WRONG = {
    "callable": (lambda: mapped(3), "got a `int`; wanted a callable"),
    "spec": (lambda: mapped(jnp.sin, "data"), "got 'data' of type `str` as a spec; wanted"),
    "item of a mapping": (lambda: mapped(jnp.sin, {...: "data"}), "got 'data' of type `str`"),
    "missing": (
        lambda: mapped(lambda x, n: x, {Int[Array, "..."]: P()})(X, jnp.arange(8)),
        r"`in_specs` says no spec for `args\[0\]`, f32\[8,4\]: .*`\.\.\.: P\(\)`",
    ),
    "a rule for nothing": (
        lambda: mapped(lambda x: x, {Int[Array, "..."]: P(), ...: P()})(X),
        r"spec for `has_type\(Int\[Array, '\.\.\.'\]\)`, which holds for no array; .*`args\[0\]`",
    ),
    "a module that is closed over": (
        lambda: mapped(lambda x: model()(x), {Float[Array, "6 3"]: P("data"), ...: P()})(X[0]),
        r"which holds for no array; .*`jax\.vmap\(module\)`",
    ),
    "a number": (lambda: mapped(lambda x: x, {3: P(), ...: P()})(X), "got 3 of type `int` as what"),
    "missing in a module": (
        lambda: mapped(lambda m: m, {by_key("up/*"): P()})(model()),
        r"no spec for `args\[0\].down.weight`, f32\[3,6\]",
    ),
    "missing for a keyword": (lambda: mapped(lambda x: x, ())(x=X), r"no spec for `kwargs\['x'\]`"),
    "missing result": (
        lambda: mapped(lambda x: {"a": x}, out_specs=None)(X),
        r"`out_specs` says no spec for `result\['a'\]`, f32\[2,4\]",
    ),
    "axis": (lambda: mapped(jnp.sin, P("rows"))(X), r"no axis 'rows', but \['data', 'model'\]"),
    "axis of a result": (
        lambda: mapped(jnp.sin, P(), P("rows"))(X),
        "`out_specs` .* no axis 'rows'",
    ),
    "rank": (lambda: mapped(jnp.sin, P(None, None, "data"))(X), "at most one item for each"),
    "size": (lambda: mapped(jnp.sin)(X[:6]), r"f32\[6,4\]; 6 cannot be divided into 4 shards"),
    "prefix": (lambda: mapped(jnp.sin, (P(), P()))(X), "`in_specs` is no prefix of what it is for"),
    "prefix of a result": (lambda: mapped(jnp.sin, P(), [P()])(X), "`out_specs` is no prefix"),
    "not combined": (
        lambda: mapped(lambda x: x.sum(), out_specs=P())(X),
        "`result`, f32.., which varies over the mesh axis 'data'",
    ),
    "no mesh": (lambda: filter_shard_map(jnp.sin, None, P(), P())(X), "has no mesh: give it one"),
    "mesh": (lambda: filter_shard_map(jnp.sin, "data", P(), P()), "got 'data' as the mesh; wanted"),
    "one axis name": (
        lambda: mapped(jnp.sin, axis_names="data"),
        "got `axis_names='data'`; wanted",
    ),
    "axis names": (
        lambda: mapped(jnp.sin, axis_names={"rows"})(X),
        r"`axis_names` has 'rows'; the axes of the mesh are \('data', 'model'\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_specs(name, monkeypatch):
    call, match = WRONG[name]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as without the import hook
    with pytest.raises(ShardingError, match=match):
        call()


def test_arrays_of_a_partial_are_seen_and_globs_are_rules():
    w = np.arange(16, dtype=np.float32).reshape(4, 4)
    apply = lambda w, x, scale: scale * (x @ w)
    fn = functools.partial(apply, w, scale=np.float32(2))
    by_type = {Float[Array, "4 4"]: P(None, "model"), "keywords/*": P(), ...: P()}
    got = filter_shard_map(fn, mesh_of(AUTO), by_type, P(None, "model"))(X)
    np.testing.assert_allclose(got, 2 * X @ w, rtol=1e-5)


def test_a_glob_that_matches_nothing():
    with pytest.raises(UnknownSiteError, match="'up/wieght' matches no array; did you mean 'up/w"):
        mapped(lambda m: m, {by_key("up/wieght"): P(), ...: P()})(model())
    with pytest.raises(UnknownSiteError, match="`out_specs`: the key 'b' matches no array"):
        mapped(lambda x: {"a": x}, out_specs={by_key("b"): P(), ...: P()})(X)
    f = mapped(lambda x: {"a": x, "b": x}, out_specs={by_key("a"): P("data"), ...: P("data")})
    check(f(X), {"a": X, "b": X})


def test_a_key_where_the_argument_is_the_array():
    with pytest.raises(
        UnknownSiteError, match=r"'bias' matches no array; there are '' \(the whole"
    ):
        mapped(jnp.sin, {by_key("bias"): P(), ...: P()})(X)


def test_annotations_that_are_text():
    def f(x: "Sharded[Float[Array, 'n d'], P('data')]", scale: "only.for_type_checkers"):
        return x * scale

    got = filter_shard_map(f, mesh_of(AUTO), (None, P()), P("data"))(X, jnp.float32(2))
    check(got, 2 * X)
    assert got.sharding.spec == P("data")


def test_rules_are_tried_in_order():
    seen = []

    def f(x, n):
        seen.append((x.shape, n.shape))
        return x

    specs = {has_type(Float[Array, "a b"]) & Float[Array, "8 _"]: P("data"), ...: P()}
    filter_shard_map(f, mesh_of(AUTO), {**specs, Float[Array, "..."]: P("model")}, P("data"))(
        X, jnp.ones((6, 1))
    )
    assert seen == [((2, 4), (3, 1))]  # `...` is for what is left, wherever it stands
