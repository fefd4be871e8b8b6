"""Layers of Equinox's that nobody edited, against the same models split by hand."""

import io
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import harvest
from harvest import capture, plant, reap, sites, tap
from tests.layers import KEY, X, close, linears, mlp, mlp_by_hand

# ------------------------------------------------------------------- layers of equinox.nn


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


def test_a_model_with_state_in_another():
    norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
    linear = eqx.nn.Linear(4, 4, key=KEY)
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)([linear, norm])
    outer = lambda model: eqx.nn.Sequential([model, linear])
    xs = jnp.stack([X, 2 * X, -X])
    run = lambda model: jax.vmap(
        lambda x: outer(model)(x, jax.tree.map(jnp.asarray, state)),
        axis_name="batch",
        out_axes=(0, None),
    )(xs)[0]
    tapped = tap(model, eqx.nn.Linear)
    acts = reap(run)(tapped)
    close(acts, {"layers/0/out": jax.vmap(linear)(xs)})
    close(run(tapped), run(model))


@pytest.mark.parametrize("make", [list, tuple, lambda layers: {"a": layers[0]}])
def test_a_container_is_no_model(make):
    with pytest.raises(harvest.SelectError, match=r"`tap` got a `.*`, which nobody calls"):
        tap(make(mlp().layers), eqx.nn.Linear)


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


# ------------------------------------------------------------------- no trace is left


def test_exceptions_leave_no_trace():
    class Fails(eqx.Module):
        layers: list[eqx.nn.Linear]

        def __call__(self, x):
            self.layers[0](x)
            raise RuntimeError("boom")

    model = Fails(linears(1))
    before = model.layers[0]
    attributes = dict(vars(eqx.nn.Linear))
    with pytest.raises(RuntimeError, match="boom"):
        reap(tap(model, "layers/0"))(X)
    assert dict(vars(eqx.nn.Linear)) == attributes
    assert model.layers[0] is before and type(before) is eqx.nn.Linear
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


def test_a_model_without_layers():
    class Bare(eqx.Module):
        size: int = 3

    with pytest.raises(
        harvest.UnknownSiteError, match=r"`Bare` that .* is a `Linear`; there are none$"
    ):
        tap(Bare(), eqx.nn.Linear)


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
