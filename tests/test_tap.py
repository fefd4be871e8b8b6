"""Models of Equinox's that nobody edited, against the same models split by hand."""

import collections
import dataclasses
import io
import threading
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import harvest
from harvest import capture, plant, reap, scope, sites, sow, tap

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4,))


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), a, b)


def mlp(seed=0, **kwargs):
    return eqx.nn.MLP(4, 3, 8, depth=2, key=jax.random.key(seed), **kwargs)


def linears(n, seed=0, size=4):
    keys = jax.random.split(jax.random.key(seed), n)
    return [eqx.nn.Linear(size, size, key=key) for key in keys]


# ------------------------------------------------------------------- layers of equinox.nn


def mlp_by_hand(model, x, replaced=None):
    """The outputs of the layers, and of the whole."""
    outs = []
    for i, layer in enumerate(model.layers):
        x = layer.weight @ x + layer.bias
        outs.append(x)
        if i == replaced:
            x = 2 * x
        x = jnp.maximum(x, 0) if i < 2 else x
    return outs, x


def test_mlp():
    model = mlp()
    tapped = tap(model, eqx.nn.Linear)
    outs, y = mlp_by_hand(model, X)
    got, acts = capture(tapped)(X)
    assert list(acts) == ["layers/0/out", "layers/1/out", "layers/2/out"]
    close([value for (value,) in acts.values()], outs)
    close(got, y)
    close(tapped(X), y)
    for i in range(3):
        edited = plant(tapped, {f"layers/{i}/out": lambda h: 2 * h})(X)
        close(edited, mlp_by_hand(model, X, replaced=i)[1])
    close(plant(tapped, reap(tapped)(X))(X), y)


def test_gradients_at_layers():
    model = mlp()
    (h0, h1, _), _ = mlp_by_hand(model, X)
    got = harvest.grad(lambda x: jnp.sum(tap(model, "layers/*")(x) ** 2))(X)
    rest = lambda h: jnp.sum(model.layers[2](jax.nn.relu(h)) ** 2)
    close(got["layers/1/out"], jax.grad(rest)(h1))
    close(got["layers/0/out"], jax.grad(lambda h: rest(model.layers[1](jax.nn.relu(h))))(h0))


def test_attention():
    model = eqx.nn.MultiheadAttention(2, 4, key=KEY)
    x = jax.random.normal(KEY, (5, 4))
    tapped = tap(model, eqx.nn.Linear, inputs=True)

    def by_hand(query):
        q = query.reshape(5, 2, 2)
        k, v = ((x @ proj.weight.T).reshape(5, 2, 2) for proj in (model.key_proj, model.value_proj))
        weights = jax.nn.softmax(jnp.einsum("shd,Shd->hsS", q, k) / jnp.sqrt(2), axis=-1)
        mixed = jnp.einsum("hsS,Shd->shd", weights, v).reshape(5, 4)
        return mixed, mixed @ model.output_proj.weight.T

    query = x @ model.query_proj.weight.T
    mixed, y = by_hand(query)
    acts = reap(tapped)(x, x, x)
    assert {key.rpartition("/")[0] for key in acts} == {
        f"{name}_proj" for name in ("query", "key", "value", "output")
    }
    close(acts["query_proj/out"], query)
    close(acts["key_proj/in"], x)
    close(acts["output_proj/in"], mixed)
    close(acts["output_proj/out"], y)
    close(tapped(x, x, x), y)
    close(plant(tapped, {"query_proj/out": 3 * query})(x, x, x), by_hand(3 * query)[1])
    close(plant(tapped, {"output_proj/in": x})(x, x, x), x @ model.output_proj.weight.T)


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self):
        self.cell = eqx.nn.GRUCell(4, 4, key=KEY)
        self.head = eqx.nn.Linear(4, 2, key=KEY)

    def __call__(self, xs):
        step = lambda h, x: (self.cell(x, h), None)
        return self.head(jax.lax.scan(step, jnp.zeros(4), xs)[0])


def test_recurrent_cell_under_scan():
    model, xs = RNN(), jax.random.normal(KEY, (6, 4))
    hidden = [jnp.zeros(4)]
    for x in xs:
        hidden.append(model.cell(x, hidden[-1]))
    tapped = tap(model, ["cell", "head"], inputs=True)
    acts = reap(tapped)(xs)
    assert acts["cell/out"].shape == (6, 4)
    close(acts["cell/out"], jnp.stack(hidden[1:]))
    close(acts["cell/in"], (xs, jnp.stack(hidden[:-1])))
    close(acts["head/out"], model.head(hidden[-1]))

    close(plant(tapped, {"cell/in": acts["cell/in"]})(xs), model(xs))
    reset = {"cell/in": lambda given: (given[0], jnp.zeros(4))}
    close(plant(tapped, reset)(xs), model.head(model.cell(xs[-1], jnp.zeros(4))))

    edited = hidden[0]
    for i, x in enumerate(xs):
        edited = model.cell(x, edited) * (0 if i == 3 else 1)
    cut = plant(tapped, {"cell/out": harvest.at(3, harvest.zero())})
    close(cut(xs), model.head(edited))


def layers():
    image, sequence = jnp.ones((2, 6, 6)), jnp.ones((2, 6))
    linear, key = eqx.nn.Linear(4, 4, key=KEY), KEY
    yield eqx.nn.Linear(4, "scalar", key=key), (X,)
    yield eqx.nn.Identity(), (X,)
    yield eqx.nn.Embedding(5, 4, key=key), (jnp.array(3),)
    yield eqx.nn.Conv2d(2, 3, 3, key=key), (image,)
    yield eqx.nn.ConvTranspose1d(2, 3, 3, key=key), (sequence,)
    yield eqx.nn.MaxPool2d(2), (image,)
    yield eqx.nn.AdaptiveAvgPool2d(2), (image,)
    yield eqx.nn.GRUCell(4, 4, key=key), (X, X)
    yield eqx.nn.LSTMCell(4, 4, key=key), (X, (X, X))
    yield eqx.nn.LayerNorm(4), (X,)
    yield eqx.nn.RMSNorm(4), (X,)
    yield eqx.nn.GroupNorm(2, 2), (sequence,)
    yield eqx.nn.PReLU(0.1), (X,)
    yield eqx.nn.Lambda(jnp.sin), (X,)
    yield eqx.nn.WeightNorm(linear), (X,)
    yield eqx.nn.RotaryPositionalEmbedding(4), (jnp.ones((3, 4)),)
    yield eqx.nn.MultiheadAttention(2, 4, key=key), (jnp.ones((3, 4)),) * 3
    yield eqx.nn.MLP(4, 2, 3, 1, key=key), (X,)
    yield eqx.nn.Sequential([linear, eqx.nn.Sequential([linear])]), (X,)
    yield eqx.filter_vmap(linear), (X[None],)
    yield jax.tree_util.Partial(jnp.multiply, X), (X,)
    yield linear.__call__, (X,)


@pytest.mark.parametrize("layer, args", list(layers()), ids=lambda part: type(part).__name__)
def test_layers_of_equinox(layer, args):
    class Around(eqx.Module):
        layer: Any

        def __call__(self, *args):
            return jax.tree.map(lambda x: 2 * x, self.layer(*args))

    expected = layer(*args)
    y, acts = capture(tap(Around(layer), "layer", inputs=True), mode="strict")(*args)
    close(acts["layer/out"], expected)
    close(acts["layer/in"], args if len(args) > 1 else args[0])
    close(y, jax.tree.map(lambda x: 2 * x, expected))


def test_a_spectral_norm_with_state():
    make = lambda: eqx.nn.SpectralNorm(eqx.nn.Linear(4, 4, key=KEY), "weight", key=KEY)
    model, state = eqx.nn.make_with_state(make)()
    expected, after = jax.jit(lambda x, state: model(x, state))(X, state)
    acts = reap(tap(model, ["", "layer"]))(X, state)
    close(acts["out"][0], expected)
    close(acts["layer/out"], expected)
    close(jax.tree.leaves(acts["out"][1]), jax.tree.leaves(after))


def normalised():
    first, last = linears(2)
    norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
    return eqx.nn.Sequential([first, norm, eqx.nn.Lambda(jax.nn.relu), last])


def batched(model, xs, state):
    run = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return run(xs, state)


@eqx.filter_jit
def normalised_by_hand(model, xs, state, edit=lambda h: h):
    first, norm, _, last = model.layers
    linear = jax.vmap(first)(xs)
    normed, state = batched(norm, linear, state)
    return linear, normed, jax.vmap(last)(jax.nn.relu(edit(normed))), state


def test_batch_norm_with_state():
    model, state = eqx.nn.make_with_state(normalised)()
    xs = jax.random.normal(KEY, (5, 4))
    tapped = tap(model, "layers/*")
    (y, after), acts = capture(lambda xs, state: batched(tapped, xs, state), mode="strict")(
        xs, state
    )
    linear, normed, expected, expected_after = normalised_by_hand(model, xs, state)
    assert list(acts) == [f"layers/{i}/out" for i in range(4)]
    close(acts["layers/0/out"], linear)
    out, inner = acts["layers/1/out"]
    close(out, normed)
    close((y, jax.tree.leaves(after)), (expected, jax.tree.leaves(expected_after)))
    close(jax.tree.leaves(inner), jax.tree.leaves(expected_after))
    assert type(after) is eqx.nn.State

    edits = {"layers/1/out": lambda out: (out[0] * 2, out[1])}
    planted = plant(lambda xs, state: batched(tapped, xs, state), edits)(xs, state)
    close(planted[0], normalised_by_hand(model, xs, state, lambda h: 2 * h)[2])
    # The state can go on with the model that is not tapped.
    close(batched(model, xs, after)[0], batched(tapped, xs, expected_after)[0])


def test_a_tapped_model_makes_its_own_state():
    model, state = eqx.nn.make_with_state(normalised)()
    tapped, own = eqx.nn.make_with_state(lambda: tap(normalised(), "layers/1"))()
    xs = jax.random.normal(KEY, (5, 4))
    y, after = batched(tapped, xs, own)
    expected, expected_after = batched(model, xs, state)
    close((y, jax.tree.leaves(after)), (expected, jax.tree.leaves(expected_after)))


def test_dropout_with_keys():
    model = eqx.nn.Sequential([*linears(1), eqx.nn.Dropout(0.5), *linears(1, seed=1)])
    first, dropout, last = model.layers
    h = first(X)
    dropped = dropout(h, key=jax.random.split(KEY, 3)[1])
    tapped = tap(model, eqx.nn.Dropout, inputs=True)
    y, acts = capture(tapped, mode="strict")(X, key=KEY)
    assert list(acts) == ["layers/1/in", "layers/1/out"]
    close(acts["layers/1/out"], dropped)
    close(y, last(dropped))
    (value, kwargs) = acts["layers/1/in"]
    close(value, h)
    assert jnp.array_equal(
        jax.random.key_data(kwargs["key"]), jax.random.key_data(jax.random.split(KEY, 3)[1])
    )
    close(plant(tapped, {"layers/1/out": h})(X, key=KEY), last(h))
    # `eqx.nn.inference_mode` finds the layer in the tapped model.
    quiet = eqx.nn.inference_mode(tapped)
    close(quiet(X), last(h))
    assert "layers/1/out" in reap(quiet)(X)


# ------------------------------------------------------------------- parameters stay where they are


def test_the_module_is_the_only_child():
    model = mlp()
    tapped = tap(model, "layers/*", inputs=True)
    assert tapped.module is model
    assert all(a is b for a, b in zip(jax.tree.leaves(tapped), jax.tree.leaves(model), strict=True))
    assert jax.tree.structure(tapped).children() == [jax.tree.structure(model)]
    saved, again = io.BytesIO(), io.BytesIO()
    eqx.tree_serialise_leaves(saved, model)
    reap(tapped)(X)
    eqx.tree_serialise_leaves(again, tapped.module)
    assert saved.getvalue() == again.getvalue()


def loss(model, xs, ys):
    return jnp.mean((jax.vmap(model)(xs) - ys) ** 2)


def test_a_model_being_trained():
    model, optimiser = mlp(), optax.adam(1e-2)
    xs = jax.random.normal(KEY, (16, 4))
    ys = jnp.sin(xs[:, :3])
    state = optimiser.init(eqx.filter(model, eqx.is_array))  # before it is tapped

    @eqx.filter_jit
    def plain_step(model, state):
        value, grads = eqx.filter_value_and_grad(loss)(model, xs, ys)
        updates, state = optimiser.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    @eqx.filter_jit
    def tapped_step(tapped, state):
        def loss_and_acts(tapped):
            value, acts = capture(lambda tapped: loss(tapped, xs, ys))(tapped)
            return value, acts

        (value, acts), grads = eqx.filter_value_and_grad(loss_and_acts, has_aux=True)(tapped)
        updates, state = optimiser.update(grads.module, state)
        updated = eqx.tree_at(lambda t: t.module, tapped, eqx.apply_updates(tapped.module, updates))
        return updated, state, value, acts

    tapped, tapped_state = tap(model, eqx.nn.Linear), state
    for _ in range(5):
        before = model
        with jax.numpy_dtype_promotion("standard"):  # as optax needs it
            model, state, value = plain_step(model, state)
            tapped, tapped_state, tapped_value, acts = tapped_step(tapped, tapped_state)
        close(tapped_value, value)
        close(acts["layers/0/out"][0], jax.vmap(before.layers[0])(xs))
    assert jax.tree.structure(tapped.module) == jax.tree.structure(model)
    close(eqx.filter(tapped.module, eqx.is_array), eqx.filter(model, eqx.is_array))


def test_gradients_of_a_tapped_model_are_those_of_the_model():
    model = mlp()
    xs, ys = jnp.ones((2, 4)), jnp.ones((2, 3))
    of_tapped = eqx.filter_grad(loss)(tap(model, "**"), xs, ys)
    of_module = eqx.filter_grad(lambda module: loss(tap(module, "**"), xs, ys))(model)
    value, again = eqx.filter_value_and_grad(lambda module: loss(tap(module, "**"), xs, ys))(model)
    expected = eqx.filter_grad(loss)(model, xs, ys)
    assert jax.tree.structure(of_module) == jax.tree.structure(expected)
    close(of_module, expected)
    close(again, expected)
    close(of_tapped.module, expected)
    close(value, loss(model, xs, ys))
    collected = reap(eqx.filter_grad(loss))(tap(model, "layers/2"), xs, ys)
    close(collected["layers/2/out"], jax.vmap(model)(xs))


def test_new_parameters_do_not_retrace():
    traces = []

    class Counted(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            traces.append(None)
            return self.linear(x)

    for seed in range(4):
        model = Counted(*linears(1, seed))
        for where in (lambda path, layer: path == "linear", "linear", eqx.nn.Linear):
            acts = reap(tap(model, where))(X)
            close(acts["linear/out"], model.linear(X))
    assert len(traces) == 1
    jitted = eqx.filter_jit(lambda tapped, x: tapped(x))
    for seed in range(4):
        jitted(tap(Counted(*linears(1, seed)), "linear"), X)
    assert len(traces) == 2


def test_free_when_off():
    for model in (mlp(), mlp(activation=jax.nn.silu)):
        plain = jax.jit(lambda x, model=model: model(x)).lower(X).as_text()
        tapped = tap(model, ["**", "activation", "final_activation"], inputs=True)
        assert jax.jit(lambda x, tapped=tapped: tapped(x)).lower(X).as_text() == plain


# ------------------------------------------------------------------- what models do with layers


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(4)
        self.linear = eqx.nn.Linear(4, 4, key=key)

    def __call__(self, x):
        h = sow(self.norm(x), name="resid")
        return x + self.linear(h)


def blocks_by_hand(blocks, x):
    outs = []
    for block in blocks:
        x = x + block.linear.weight @ block.norm(x) + block.linear.bias
        outs.append(x)
    return jnp.stack(outs)


def make_blocks(n=3):
    return [Block(key) for key in jax.random.split(KEY, n)]


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


def square(x):
    return x**2


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
    # Of those that are not chosen, nothing is seen.
    _, acts = capture(tap(model, "encoder/blocks/1/linear"))(X)
    assert list(acts) == ["inner/resid", "inner/resid", "encoder/blocks/1/linear/out"][1:]


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


# ------------------------------------------------------------------- no trace is left


def test_exceptions_leave_no_trace():
    class Fails(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            self.layers[0](x)
            raise RuntimeError("boom")

    model = Fails(linears(1))
    types = [type(node) for node in jax.tree.leaves(model, is_leaf=lambda n: n is not model)]
    attributes = dict(vars(eqx.nn.Linear))
    with pytest.raises(RuntimeError, match="boom"):
        reap(tap(model, "layers/0"))(X)
    assert dict(vars(eqx.nn.Linear)) == attributes
    assert types == [type(n) for n in jax.tree.leaves(model, is_leaf=lambda n: n is not model)]
    assert len(sites(model.layers[0])(X)) == 0


def test_threads_do_not_see_each_other():
    model, others = mlp(), {}
    barrier = threading.Barrier(4)

    def run(i):
        barrier.wait()
        where = ["layers/0", "layers/1", "layers/2", "**"][i]
        others[i] = [sorted(reap(tap(model, where))(X + n)) for n in range(10)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [f"layers/{i}/out" for i in range(3)]
    assert others == {i: [[f"layers/{i}/out"]] * 10 for i in range(3)} | {3: [everything] * 10}


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "where, match",
    [
        ("layers/*/attn", r"'layers/\*/attn' matches no part of the `MLP` that can be called; "),
        ("layer/0", r"did you mean 'layers/0'"),
        ("layers", r"'layers' matches no part .* that can be called"),
        (eqx.nn.Conv2d, r"can be called is a `Conv2d`; there are MLP, Linear$"),
        (eqx.nn.Conv2d | eqx.nn.BatchNorm, r"is a `equinox.*Conv2d \| .*BatchNorm`; there are MLP"),
        (lambda path, layer: False, r"satisfies the predicate `<lambda>`; there are 'activation'"),
        ([eqx.nn.Linear, "nothing"], r"'nothing' matches no part"),
    ],
)
def test_nothing_is_chosen(where, match):
    with pytest.raises(harvest.UnknownSiteError, match=match):
        tap(mlp(), where)


@pytest.mark.parametrize(
    "where, match",
    [
        (None, r"`tap` got None of type `NoneType`; wanted a type of layers, a glob"),
        (3, r"`tap` got 3 of type `int`"),
        ([], r"`tap` got \[\] of type `list`"),
        (["*", None], r"`tap` got None"),
        (
            lambda model: model.layers[0],
            r"predicate `.*<lambda>\(model\)`; wanted .* two arguments",
        ),
        (eqx.nn.Identity(), r"of type `Identity`; wanted a type of layers"),
    ],
)
def test_where_of_a_wrong_kind(where, match):
    with pytest.raises(harvest.SelectError, match=match):
        tap(mlp(), where)


def test_a_predicate_sees_paths_and_layers():
    model = mlp()
    seen = {}
    tap(model, lambda path, layer: bool(seen.setdefault(path, layer) is not None))
    assert seen == {"": model} | {f"layers/{i}": model.layers[i] for i in range(3)}
    wide = lambda path, layer: getattr(layer, "out_features", 0) == 3
    assert list(reap(tap(model, wide))(X)) == ["layers/2/out"]


def test_the_model_has_changed():
    tapped = tap(mlp(), "layers/2")
    changed = eqx.tree_at(lambda t: t.module.layers, tapped, tapped.module.layers[:1])
    with pytest.raises(harvest.UnknownSiteError, match="no 'layers/2' in it"):
        reap(changed)(X)
    changed = eqx.tree_at(lambda t: t.module.layers[2], tapped, None)
    with pytest.raises(
        harvest.UnknownSiteError, match=r"harvest.tap\('layers/2'\) cannot be called"
    ):
        reap(changed)(X)


def test_a_model_that_combines_its_layers_says_why_it_fails():
    class Stacks(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.layers)
            return jax.lax.scan(lambda x, layer: (layer(x), None), x, stacked)[0]

    model = Stacks(linears(3))
    with pytest.raises(ValueError, match=r"harvest\.tap\(.layers/0") as error:
        reap(tap(model, "layers/*"))(X)
    assert any("cannot be combined" in note for note in error.value.__notes__)
    close(reap(tap(model, ""))(X)["out"], model(X))


def test_a_model_that_combines_its_layers_with_others_says_why_it_fails():
    class Averaged(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x, other):
            return jax.tree.map(lambda a, b: (a + b) / 2, self.layer, other)(x)

    layer, other = linears(2)
    with pytest.raises(ValueError, match=r"harvest\._tapped\.Linear") as error:
        reap(tap(Averaged(layer), "layer"))(X, other)
    assert any("cannot be combined" in note for note in error.value.__notes__)


def test_called_without_a_transform_it_is_the_module():
    calls = []

    class Model(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            calls.append(self)
            return self.linear(x)

    model = Model(*linears(1))
    tap(model, "linear")(X)
    assert calls[0] is model
