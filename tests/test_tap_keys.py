"""The keys of tapped layers are their paths."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from harvest import capture, reap, scope, sites, sow, tap
from tests.layers import Block, X, blocks_by_hand, close, linears, make_blocks, mlp

# ------------------------------------------------------------------- keys


class Encoder(eqx.Module):
    attn: eqx.nn.Linear
    blocks: list[Block]

    def __call__(self, x, embed):
        x = self.attn(x)
        with scope("inner"):
            x = self.blocks[0](sow(x, name="resid"))
        # Without a call of the block, and with a layer from elsewhere.
        return embed(x + self.blocks[1].linear(x))


class Outer(eqx.Module):
    embed: eqx.nn.Linear
    encoder: Encoder

    def __call__(self, x):
        return self.encoder(self.embed(x), self.embed)


def outer():
    embed, attn = linears(2)
    return Outer(embed, Encoder(attn, make_blocks(2)))


def test_keys_are_paths_wherever_a_layer_is_called():
    model = outer()
    _, acts = capture(tap(model, eqx.Module))(X)
    assert {key: len(values) for key, values in acts.items()} == {
        "out": 1,
        "embed/out": 2,
        "encoder/out": 1,
        "encoder/attn/out": 1,
        "encoder/inner/resid": 1,
        "encoder/inner/blocks/0/out": 1,
        "encoder/inner/blocks/0/norm/out": 1,
        "encoder/inner/blocks/0/resid": 1,
        "encoder/inner/blocks/0/linear/out": 1,
        "encoder/blocks/1/linear/out": 1,
    }
    embedded = model.embed(X)
    h = model.encoder.attn(embedded)
    h = blocks_by_hand(model.encoder.blocks[:1], h)[0]
    y = h + model.encoder.blocks[1].linear(h)
    close(acts["encoder/blocks/1/linear/out"][0], y - h)
    close(acts["embed/out"], (embedded, model.embed(y)))
    close(acts["out"][0], model(X))
    # Layers that are not chosen add nothing to keys.
    _, acts = capture(tap(model, "encoder/blocks/1/linear"))(X)
    assert list(acts) == ["inner/resid", "encoder/blocks/1/linear/out"]


def test_scopes_of_the_user_stay_in_front():
    model = tap(mlp(), "layers/0")

    def f(x):
        with scope("policy"):
            return model(x)

    assert list(reap(f)(X)) == ["policy/layers/0/out"]


@pytest.mark.parametrize("transform", [jax.vmap, eqx.filter_vmap, eqx.filter_jit, jax.lax.map])
def test_the_source_is_the_line_that_calls_the_layer(transform):
    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            if transform is jax.lax.map:
                return jax.lax.map(self.linear, x[None])
            x = x if transform is eqx.filter_jit else x[None]
            return transform(self.linear)(x)

    (site,) = sites(tap(Model(*linears(1)), "linear"))(X)
    line = Model.__call__.__code__.co_firstlineno + (2 if transform is jax.lax.map else 4)
    assert site.source == f"{__file__}:{line}"


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, eqx.filter_jit])
def test_keys_do_not_depend_on_where_jax_traced_a_layer_first(transform):
    @transform
    def double(x):
        return 2 * x

    class Layer(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return transform(lambda x: self.linear(x))(double(x))

    class Model(eqx.Module):
        layers: list[Layer]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return transform(lambda x: self.layers[1].linear(x))(x)

    model = Model([Layer(linear) for linear in linears(3)])
    acts = capture(tap(model, [Layer, eqx.nn.Linear]))(X)[1]
    expected = {}
    x = X
    for i, layer in enumerate(model.layers):
        x = layer.linear(2 * x)
        expected[f"layers/{i}/linear/out"] = (x,)
        expected[f"layers/{i}/out"] = (x,)
    expected["layers/1/linear/out"] += (model.layers[1].linear(x),)
    close(acts, expected)


def test_recursion():
    class Countdown(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x, n=2):
            return self.linear(x) if n == 0 else self(self.linear(x), n - 1)

    class Model(eqx.Module):
        inner: Countdown

        def __call__(self, x):
            return self.inner(x)

    model = Model(Countdown(*linears(1)))
    acts = capture(tap(model, "**"))(X)[1]
    linear = model.inner.linear
    outs = (linear(X), linear(linear(X)), linear(linear(linear(X))))
    close(acts, {"inner/linear/out": outs, "inner/out": (outs[-1],) * 3})


def test_a_tapped_model_inside_of_another():
    inner = mlp()
    close(
        reap(tap(tap(inner, "layers/0"), "layers/2"))(X),
        reap(tap(inner, ["layers/0", "layers/2"]))(X),
    )
    assert tap(tap(inner, "layers/0"), "layers/2").module is inner

    class Wrapped(eqx.Module):
        first: eqx.nn.Linear
        net: Any

        def __call__(self, x):
            return self.net(self.first(x))

    model = Wrapped(*linears(1), tap(inner, "layers/0"))
    first = model.first(X)
    h = inner.layers[0](first)
    close(reap(model)(X), {"layers/0/out": h})
    expected = {"first/out": first, "net/layers/0/out": h, "net/out": inner(first)}
    close(reap(tap(model, ["first", "net"]))(X), expected)
    # Chosen twice, it sows twice.
    twice = reap(tap(model, eqx.nn.Linear))(X)
    assert (
        len(twice) == 5
        and sum(bool(jnp.allclose(h, v)) for v in twice.values() if v.shape == (8,)) == 2
    )
