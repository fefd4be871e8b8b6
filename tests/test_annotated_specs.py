"""Specs that `Sharded` annotations say: of partials, of fields, and written as text."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, jaxtyped

import harvest
from harvest import Sharded, ShardingError, by_key, filter_shard_map, reap, tap

if TYPE_CHECKING:
    from decimal import Config  # pyright: ignore

P = PartitionSpec
Rows = Sharded[Float[Array, "b d"], P("data", None)]
Vector = Sharded[Float[Array, "d"], P()]
Result = Sharded[Float[Array, "b"], P("data")]
W = np.arange(32, dtype=np.float32).reshape(8, 4)
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = np.linspace(-1, 1, 4, dtype=np.float32)


def mapped(fn, *specs):
    return filter_shard_map(fn, MESH, *specs)


def check(got, expected):
    """All shards are put together, and each has its part."""
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got.sharding.spec[0] == "data"


def apply(w: Rows, x: Vector) -> Result:
    return w @ x


@pytest.mark.parametrize("partial", [functools.partial, eqx.Partial, jax.tree_util.Partial])
def test_what_a_partial_binds(partial):
    check(mapped(partial(apply, W))(X), W @ X)
    check(mapped(partial(apply, w=W))(x=X), W @ X)
    if partial is not jax.tree_util.Partial:  # which hides the arrays of the one inside
        check(mapped(partial(partial(apply, W)))(X), W @ X)

    def scaled(factor, x: "Rows") -> "Rows":
        return factor * x

    check(mapped(partial(scaled, np.float32(2)))(W), 2 * W)


class Layer(eqx.Module):
    weight: "Rows"
    config: "Config"

    def __call__(self, x: "Vector") -> "Result":
        return self.weight @ x


class Jitted(Layer):
    @eqx.filter_jit
    def __call__(self, x: "Vector") -> "Result":
        return self.weight @ x


class Checked(Layer):
    @jaxtyped(typechecker=None)
    def __call__(self, x: "Vector") -> "Result":
        return self.weight @ x


class Static(Layer):
    @staticmethod
    def __call__(x: "Rows") -> "Rows":
        return 2 * x


@pytest.mark.parametrize("kind", [Layer, Jitted, Checked])
def test_fields_beside_one_that_only_type_checkers_know(kind):
    check(mapped(kind(W, None))(X), W @ X)
    call = lambda layer, x: layer(x)
    check(mapped(call, (None, P()), P("data"))(kind(W, None), X), W @ X)


def test_a_static_call():
    check(mapped(Static(W, None))(W), 2 * W)


def test_a_tapped_module_is_seen_as_the_module():
    tapped = tap(Layer(W, None), Layer)
    check(mapped(tapped)(X), W @ X)
    check(mapped(tapped, {by_key("weight"): P("data"), ...: P()}, P("data"))(X), W @ X)
    collected = reap(mapped(tapped))(X)["out"]  # by shards
    np.testing.assert_allclose(collected.ravel(), W @ X, rtol=1e-5)


def test_annotations_with_a_callable():
    class Made(eqx.Module):
        w: Rows
        act: Callable[[Array], Array]

    def pair(w: Rows) -> tuple[Rows, Callable[[Array], Array]]:
        return w, jnp.tanh

    def made(w: Rows) -> Made:
        return Made(w, jnp.tanh)

    w, act = mapped(pair)(W)
    check(w, W)
    assert act is jnp.tanh
    check(mapped(made)(W).w, W)
    check(mapped(made, P("data"), P("data"))(W).w, W)


def test_text_that_cannot_be_evaluated():
    here = Rows

    def unknown(x: "here") -> Rows:  # of this function, and so not in its module
        return x

    def broken(x: Rows, k: "jax.Nope" = None) -> Rows:
        return x

    check(mapped(broken)(W), W)
    check(mapped(unknown, P("data"))(W), W)
    why = r"`args\[0\]`, .* annotation 'here' cannot be evaluated \(NameError: .*'here'"
    with pytest.raises(ShardingError, match=why):
        mapped(unknown)(W)
    del here


def test_a_jitted_module():
    with pytest.raises(ShardingError, match=r"`eqx.filter_jit` of a module.* put it around"):
        mapped(eqx.filter_jit(Layer(W, None)))
    check(mapped(eqx.filter_jit(apply))(W, X), W @ X)
    around = eqx.filter_jit(mapped(Layer(W, None)))
    check(around(X), W @ X)


def test_sharded_alone_is_no_annotation():
    with pytest.raises(harvest.SelectError, match=r"`check_types` got <class .*Sharded'>; wanted"):
        harvest.check_types(apply, {"h": Sharded})
