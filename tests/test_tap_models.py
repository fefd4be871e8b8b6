"""What models do with their layers goes on working when these are tapped."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import harvest
from harvest import capture, plant, reap, tap
from tests.layers import (
    KEY,
    Block,
    X,
    blocks_by_hand,
    close,
    linears,
    make_blocks,
    mlp,
    mlp_by_hand,
    square,
)

# ------------------------------------------------------------------- what models do with layers


class Scanned(eqx.Module):
    """Its layers are new objects in the body of the loop."""

    blocks: Block
    how: str = eqx.field(static=True)

    def __call__(self, x):
        dynamic, static = eqx.partition(self.blocks, eqx.is_array)

        def step(x, dynamic):
            return eqx.combine(dynamic, static)(x), None

        if self.how == "combine":
            return jax.lax.scan(step, x, dynamic)[0]
        if self.how == "xs":
            return jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)[0]
        if self.how == "checkpoint":
            return jax.lax.scan(jax.checkpoint(step), x, dynamic)[0]
        at = lambda i: jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, self.blocks)
        return jax.lax.fori_loop(0, 3, lambda i, x: at(i)(x), x)


@pytest.mark.parametrize("how", ["combine", "xs", "checkpoint", "index"])
def test_stacked_layers_in_a_scan(how):
    blocks = make_blocks()
    model = Scanned(eqx.filter_vmap(Block)(jax.random.split(KEY, 3)), how)
    tapped = tap(model, ["blocks", "blocks/linear"])
    acts = reap(tapped)(X)
    assert set(acts) == {"blocks/out", "blocks/resid", "blocks/linear/out"}
    outs = blocks_by_hand(blocks, X)
    before = jnp.concatenate([X[None], outs[:-1]])
    close(acts["blocks/out"], outs)
    close(acts["blocks/linear/out"], outs - before)
    close(plant(tapped, {"blocks/linear/out": jnp.zeros((3, 4))})(X), X)
    close(plant(tapped, acts)(X), outs[-1])

    grads = eqx.filter_grad(lambda tapped: jnp.sum(tapped(X)))(tapped).module
    by_hand = lambda blocks: jnp.sum(blocks_by_hand(blocks, X)[-1])
    expected = jax.tree.map(lambda *a: jnp.stack(a), *eqx.filter_grad(by_hand)(blocks))
    close(jax.tree.leaves(grads), jax.tree.leaves(expected))


def test_an_ensemble_of_layers():
    class Ensemble(eqx.Module):
        heads: eqx.nn.Linear

        def __call__(self, x):
            return eqx.filter_vmap(lambda head, x: head(x), in_axes=(eqx.if_array(0), None))(
                self.heads, x
            )

    heads = linears(3)
    model = Ensemble(jax.tree.map(lambda *leaves: jnp.stack(leaves), *heads))
    acts = reap(tap(model, "heads"))(X)
    close(acts["heads/out"], jnp.stack([head(X) for head in heads]))


def test_a_layer_that_is_called_twice_has_occurrences():
    class Twice(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return self.linear(self.linear(x))

    model = Twice(*linears(1))
    tapped = tap(model, "linear")
    once = model.linear(X)
    y, acts = capture(tapped)(X)
    close(acts["linear/out"], (once, model.linear(once)))
    with pytest.raises(harvest.DuplicateSiteError, match=r"'linear/out' is sown 2 times"):
        reap(tapped)(X)
    close(plant(tapped, {"linear/out": (2 * once, None)}, mode="append")(X), model.linear(2 * once))


def test_one_object_in_two_places_is_two_layers():
    class Pair(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear

        def __call__(self, x):
            return self.b(self.a(x))

    (linear,) = linears(1)
    acts = reap(tap(Pair(linear, linear), eqx.nn.Linear))(X)
    close(acts, {"a/out": linear(X), "b/out": linear(linear(X))})


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        embedding = eqx.nn.Embedding(6, 4, key=KEY)
        linear = eqx.nn.Linear(4, 6, use_bias=False, key=KEY)
        where, get = lambda pair: pair[1].weight, lambda pair: pair[0].weight
        self.shared = eqx.nn.Shared((embedding, linear), where, get)

    def __call__(self, tokens):
        embedding, linear = self.shared()
        assert isinstance(linear, eqx.nn.Linear) and embedding.weight is linear.weight
        return jax.vmap(linear)(jax.vmap(embedding)(tokens))


@pytest.mark.parametrize("where", ["shared/pytree/*", [eqx.nn.Embedding, eqx.nn.Linear]])
def test_shared_weights(where):
    model, tokens = Tied(), jnp.array([1, 3, 5])
    weight = model.shared.pytree[0].weight
    acts = reap(tap(model, where))(tokens)
    assert list(acts) == ["shared/pytree/0/out", "shared/pytree/1/out"]
    close(acts["shared/pytree/0/out"], weight[tokens])
    close(acts["shared/pytree/1/out"], weight[tokens] @ weight.T)


def test_what_is_collected_are_layers_as_they_were():
    model, tokens = Tied(), jnp.array([1, 3, 5])
    embedding, linear = reap(tap(model, eqx.Module), "shared/out")(tokens)["shared/out"]
    assert type(embedding) is eqx.nn.Embedding and type(linear) is eqx.nn.Linear
    close(linear.weight, model.shared.pytree[0].weight)


class Containers(eqx.Module):
    named: dict[str, eqx.nn.Linear]
    listed: list[Any]
    record: Any

    def __call__(self, x):
        for name, layer in self.named.items():
            assert name in self.named and layer.in_features == 4
            x = layer(x)
        for layer in self.listed[0]:
            x = layer(x)
        return self.record.last(x) + len(self.listed)


Record = collections.namedtuple("Record", ["last"])


@pytest.mark.parametrize("dicts", [dict, collections.OrderedDict])
def test_layers_in_containers(dicts):
    second, first, third, fourth = linears(4)
    named = dicts([("z", first), ("a", second)])  # JAX would sort them
    model = Containers(named, [(third,)], Record(fourth))
    jitted = jax.jit(lambda x: tap(model, eqx.nn.Linear)(x))
    y, acts = capture(jitted, mode="strict")(X)
    outs = [first(X)]
    for layer in (second, third, fourth):
        outs.append(layer(outs[-1]))
    keys = ["named/z/out", "named/a/out", "listed/0/0/out", "record/last/out"]
    close(acts, dict(zip(keys, outs, strict=True)))
    close(y, outs[-1] + 1)
    close(jitted(X), y)
    assert list(model.named) == ["z", "a"]


class Activations(eqx.Module):
    linear: eqx.nn.Linear
    activation: Callable
    static: Callable = eqx.field(static=True)
    several: list[Callable]
    partial: Callable

    def __call__(self, x):
        assert self.activation.__name__ == "square"
        x = self.static(self.activation(self.linear(x)))
        for fn in self.several:
            x = fn(x)
        return self.partial(x)


def activations():
    partial = jax.tree_util.Partial(jnp.multiply, jnp.float32(3))
    (linear,) = linears(1)
    return Activations(linear, square, jax.nn.silu, [jnp.sin, lambda x: x + 1], partial)


ALL = {
    "linear/out": lambda m: m.linear(X),
    "activation/out": lambda m: m.linear(X) ** 2,
    "static/out": lambda m: jax.nn.silu(m.linear(X) ** 2),
    "several/0/out": lambda m: jnp.sin(jax.nn.silu(m.linear(X) ** 2)),
    "several/1/out": lambda m: jnp.sin(jax.nn.silu(m.linear(X) ** 2)) + 1,
    "partial/out": lambda m: 3 * (jnp.sin(jax.nn.silu(m.linear(X) ** 2)) + 1),
}


@pytest.mark.parametrize(
    "where, keys",
    [
        ("activation", ["activation"]),
        ("**/static", ["static"]),
        ("several/*", ["several/0", "several/1"]),  # nothing but functions
        ("several/1", ["several/1"]),
        ("partial", ["partial"]),
        ("act*", ["activation"]),
        ("*", ["linear", "partial"]),  # functions not, unless named
        (["*", "static", "several/?"], ["linear", "static", "several/0", "several/1", "partial"]),
        (jax.tree_util.Partial, ["partial"]),
    ],
)
def test_functions_that_are_held(where, keys):
    model = activations()
    tapped = tap(model, where)
    acts = reap(tapped)(X)
    close(acts, {f"{key}/out": ALL[f"{key}/out"](model) for key in keys})
    close(tapped(X), model(X))
    close(jax.jit(lambda x: tapped(x))(X), model(X))
    assert model.static is jax.nn.silu and tapped.activation is square


def test_activations_of_an_mlp():
    model = mlp()
    tapped = tap(model, ["layers/*", "activation"])
    _, acts = capture(tapped)(X)
    (h0, h1, _), _ = mlp_by_hand(model, X)
    close(acts["activation/out"], (jnp.maximum(h0, 0), jnp.maximum(h1, 0)))


# ------------------------------------------------------------------- what authors rely on


def test_types_attributes_and_operators():
    seen = []

    class Base(eqx.Module):
        linear: eqx.nn.Linear

        def __init_subclass__(cls, **kwargs):
            seen.append(cls)
            super().__init_subclass__(**kwargs)

        def __call__(self, x):
            return self.linear(x)

        def half(self, x):
            return self(x) / 2

        @property
        def width(self):
            return self.linear.out_features

    class Layer(Base):
        scale: jax.Array
        tag: str = eqx.field(static=True, default="layer")

        def __call__(self, x):
            return super().__call__(x) * self.scale

        def __len__(self):
            return 7

        def __matmul__(self, x):
            return self.linear.weight @ x

        def __getitem__(self, i):
            return self.linear.bias[i]

        @classmethod
        def made(cls, *args):
            return cls(*args)

    class Model(eqx.Module):
        layer: Layer

        def __call__(self, x):
            layer = self.layer
            assert isinstance(layer, Layer) and isinstance(layer, Base)
            assert len(layer) == 7 and layer.tag == "layer" and layer.width == 4
            assert layer.__class__.__name__ == type(layer).__name__ == "Layer"
            assert jax.tree.structure(layer).num_leaves == 3
            assert hash(jax.tree.structure(layer)) is not None
            x = (layer @ x) + layer[0]
            x = layer.half(x)
            # Copies with other weights are layers, too.
            x = eqx.tree_at(lambda layer: layer.linear.weight, layer, jnp.eye(4))(x)
            x = eqx.tree_at(lambda self: self.layer.scale, self, layer.scale * 2).layer(x)
            x = dataclasses.replace(layer, scale=layer.scale * 3)(x)
            # One that is made anew is none of the model's.
            x = type(layer)(layer.linear, layer.scale)(x)
            return layer.made(layer.linear, layer.scale)(x)

    model = Model(Layer(*linears(1), jnp.float32(0.5)))
    tapped = tap(model, Base)
    y, acts = capture(tapped)(X)
    layer = model.layer
    x = layer.linear.weight @ X + layer.linear.bias[0]
    outs = [(layer.linear.weight @ x + layer.linear.bias) / 2]
    x = outs[-1] / 2
    outs.append((x + layer.linear.bias) / 2)
    outs.append(layer.linear(outs[-1]))
    outs.append(layer.linear(outs[-1]) * 1.5)
    close(acts, {"layer/out": tuple(outs)})
    close(y, model(X))
    assert seen == [Layer]


def test_signatures_are_those_of_the_author():
    import inspect

    class Model(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            for layer in self.layers:
                takes_key = "key" in inspect.signature(layer).parameters
                x = layer(x, key=None) if takes_key else layer(x)
                assert takes_key
            return x

    model = Model(linears(2))
    close(tap(model, "layers/*")(X), model(X))
    assert len(reap(tap(model, "layers/*"))(X)) == 2


class Methods(eqx.Module):
    encoder: eqx.nn.Linear
    decoder: eqx.nn.Linear
    size: int = eqx.field(static=True)

    def __init__(self):
        self.encoder, self.decoder = linears(2)
        self.size = 4

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.encoder(x)

    @eqx.filter_jit
    def decode(self, x):
        return self.decoder(x)

    @property
    def alias(self):
        return self.encode

    @property
    def last(self):
        return self.decoder

    @staticmethod
    def double(x):
        return 2 * x


def test_other_methods_and_attributes_of_the_model():
    model = Methods()
    tapped = tap(model, eqx.nn.Linear)
    sequential = tap(eqx.nn.Sequential([model.encoder, model.decoder]), "layers/0")
    assert len(sequential) == 2 and sequential[1] is list(sequential)[1] is model.decoder
    assert bool(tapped) and bool(sequential)
    assert tapped.size == 4 and tapped.last is model.decoder is tapped.decoder
    assert tapped.encoder.weight is model.encoder.weight
    close(tapped.double(X), 2 * X)
    for method, layer in [("encode", "encoder"), ("decode", "decoder"), ("alias", "encoder")]:
        bound = getattr(tapped, method)
        expected = getattr(model, layer)(X)
        close(bound(X), expected)
        close(reap(bound)(X), {f"{layer}/out": expected})
        close(eqx.filter_jit(bound)(X), expected)
    with pytest.raises(AttributeError, match="'Methods' object has no attribute 'nothing'"):
        _ = tapped.nothing
    with pytest.raises(dataclasses.FrozenInstanceError, match="size"):
        tapped.size = 3


def test_methods_of_a_layer_sow_what_is_called_inside():
    class Layer(eqx.Module):
        norm: eqx.nn.LayerNorm

        def apply(self, x):
            return self.norm(x)

    class Model(eqx.Module):
        layer: Layer

        def __call__(self, x):
            return self.layer.apply(x)

    model = Model(Layer(eqx.nn.LayerNorm(4)))
    assert list(reap(tap(model, eqx.Module))(X)) == ["layer/norm/out", "out"]
    with pytest.raises(harvest.UnknownSiteError, match="can be called is a `Layer`; there are"):
        tap(model, Layer)


def test_a_model_that_returns_itself():
    class Counter(eqx.Module):
        linear: eqx.nn.Linear
        count: jax.Array
        function: Callable = eqx.field(static=True)

        def __call__(self, x):
            after = eqx.tree_at(lambda self: self.count, self, self.count + 1)
            return after, {"linear": [self.linear], "y": self.function(self.linear(x))}

    model = Counter(*linears(1), jnp.float32(0), square)
    (after, aux), acts = capture(tap(model, ["linear", "", "function"]), mode="strict")(X)
    assert type(after) is Counter and type(after.linear) is type(aux["linear"][0]) is eqx.nn.Linear
    assert after.function is square
    assert jax.tree.structure(after) == jax.tree.structure(model)
    close(after.count, 1.0)
    close(acts["function/out"], model.linear(X) ** 2)
    assert jax.tree.structure(acts["out"]) == jax.tree.structure(model(X))


def test_transforms_around_and_inside():
    class Model(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            x = eqx.filter_jit(self.layers[0])(x)
            x = eqx.filter_checkpoint(self.layers[1])(x)
            return eqx.filter_value_and_grad(lambda x: jnp.sum(self.layers[2](x) ** 2))(x)[1]

    model = Model(linears(3))
    tapped = tap(model, "layers/*")
    xs = jax.random.normal(KEY, (5, 4))
    expected, x = {}, xs
    for i, layer in enumerate(model.layers):
        x = x @ layer.weight.T + layer.bias[None]
        expected[f"layers/{i}/out"] = x
    close(reap(eqx.filter_vmap(tapped))(xs), expected)
    close(reap(lambda xs: jax.lax.map(tapped, xs))(xs), expected)
    close(eqx.filter_vmap(reap(tapped))(xs), expected)
    close(eqx.filter_jit(reap(eqx.filter_vmap(eqx.filter_jit(tapped))))(xs), expected)
    close(jax.vmap(tapped)(xs), 2 * x @ model.layers[2].weight)


def test_layers_in_branches():
    class Model(eqx.Module):
        yes: eqx.nn.Linear
        no: eqx.nn.Linear

        def __call__(self, x):
            return jax.lax.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), x)

    model = Model(*linears(2))
    for x, layer in [(jnp.ones(4), "yes"), (-jnp.ones(4), "no")]:
        acts = reap(tap(model, eqx.nn.Linear))(x)
        index = int(layer == "yes")
        for name in ("yes", "no"):
            value = acts[f"{name}/out"].branches[int(name == "yes")]
            close(value, getattr(model, name)(x) if name == layer else jnp.zeros(4))
            assert acts[f"{name}/out"].index == index


def test_custom_derivatives():
    class Model(eqx.Module):
        inner: eqx.nn.Linear
        outer: eqx.nn.Linear

        def __call__(self, x):
            @eqx.filter_custom_vjp
            def f(inner_and_x):
                inner, x = inner_and_x
                return inner(x)

            f.def_fwd(lambda perturbed, v: (v[0](v[1]), None))
            f.def_bwd(lambda res, g, perturbed, v: (jax.tree.map(jnp.zeros_like, v[0]), 5 * g))
            return self.outer(f((self.inner, x)))

    model = Model(*linears(2))
    tapped = tap(model, ["", "inner", "outer"])
    f = lambda x: jnp.sum(tapped(x))
    close(reap(tapped, "inner/out")(X)["inner/out"], model.inner(X))
    expected = 5 * (model.outer.weight.T @ jnp.ones(4))
    close(jax.grad(f)(X), expected)
    g, acts = capture(jax.grad(f))(X)
    close(g, expected)
    assert set(acts) == {"inner/out", "outer/out", "out"}
