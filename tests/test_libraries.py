"""Whatever can be called, and whatever library it comes from."""

import functools
import inspect
import operator

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import harvest
from harvest import capture, plant, reap, sites, sow
from harvest._stage import _checked

X = np.array([0.5, 1.0, 2.0], np.float32)
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def as_it_comes():
    """Haiku and optax need JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def affine(x, by=2.0):
    """Doubles and adds one."""
    return sow(by * x, name="h") + 1.0


class Plain:
    by = 2.0

    def method(self, x):
        return affine(x, self.by)

    __call__ = method

    @classmethod
    def of_class(cls, x):
        return affine(x, cls.by)

    @staticmethod
    def static(x):
        return affine(x)


class Module(eqx.Module):
    by: jax.Array

    def __call__(self, x):
        return affine(x, self.by)

    def method(self, x):
        return affine(x, self.by)


TWO = jnp.float32(2)
PLAIN = Plain()
CALLABLES = {
    "function": affine,
    "lambda": lambda x: affine(x),
    "functools.partial": functools.partial(affine, by=2.0),
    "nested partial": functools.partial(functools.partial(affine), by=TWO),
    "partial of a method": functools.partial(PLAIN.method),
    "Partial": jax.tree_util.Partial(affine, by=TWO),
    "callable object": PLAIN,
    "bound method": PLAIN.method,
    "class method": Plain.of_class,
    "static method": Plain.static,
    "module": Module(TWO),
    "method of a module": Module(TWO).method,
    "partial of a module": functools.partial(Module(TWO)),
    "jit": jax.jit(affine),
    "jit of a method": jax.jit(PLAIN.method),
    "vmap": jax.vmap(affine),
    "checkpoint": jax.checkpoint(affine),
    "filter_jit": eqx.filter_jit(affine),
    "filter_jit of a module": eqx.filter_jit(Module(TWO)),
    "filter_vmap": eqx.filter_vmap(affine),
    "sequential": eqx.nn.Sequential([eqx.nn.Lambda(affine)]),
}


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CALLABLES)
def test_anything_callable(name, around):
    fn = CALLABLES[name]
    out, collected = around(capture(fn))(X)
    np.testing.assert_allclose(out, 2 * X + 1)
    np.testing.assert_allclose(collected["h"][0], 2 * X)
    np.testing.assert_allclose(around(plant(fn, {"h": X}))(X), X + 1)
    assert [site.key for site in sites(fn)(X)] == ["h"]


class Decorated(eqx.Module):
    by: jax.Array

    @capture
    def method(self, x):
        return affine(x, self.by)


def test_a_decorated_method():
    out, collected = Decorated(TWO).method(X)
    np.testing.assert_allclose(out, 2 * X + 1)
    np.testing.assert_allclose(collected["h"][0], 2 * X)


@pytest.mark.parametrize("name", CALLABLES)
def test_transformed_functions_are_arguments_in_equinox(name):
    call = eqx.filter_jit(lambda fn, x: fn(x))
    np.testing.assert_allclose(call(plant(CALLABLES[name], {"h": X}), X), X + 1)
    np.testing.assert_allclose(call(reap(CALLABLES[name]), X)["h"], 2 * X)


def test_functions_of_jax_are_callables():
    assert reap(jnp.sin)(X) == {}
    np.testing.assert_allclose(capture(jnp.add)(X, X)[0], 2 * X)
    np.testing.assert_allclose(capture(operator.neg)(X)[0], -X)


@pytest.mark.parametrize("transform", [reap, capture, sites, lambda fn: plant(fn, {})])
@pytest.mark.parametrize("fn", [affine, PLAIN.method, jax.jit(affine)])
def test_name_doc_and_signature_are_kept(transform, fn):
    transformed = transform(fn)
    assert transformed.__name__ == fn.__name__
    assert transformed.__qualname__ == fn.__qualname__
    assert transformed.__doc__ == fn.__doc__
    assert inspect.signature(transformed) == inspect.signature(fn)


def test_the_signature_of_a_module_is_kept():
    assert inspect.signature(reap(Module(TWO))) == inspect.signature(Module(TWO))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(harvest.UnsupportedError, match="got a `int`; wanted a callable"):
        _checked(3, "reap")  # what the type checker of the tests keeps from happening further out


# ------------------------------------------------------------------------------- flax, nnx

ROWS = np.stack([X, 2 * X])


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.encode(x))

    def encode(self, x):
        return sow(self.linear(x), name="h")


NET = Net()
MUTABLE = {
    "module": NET,
    "layer": NET.linear,
    "call": NET.__call__,
    "method": NET.encode,
    "partial of the module": functools.partial(NET),
    "partial of a method": functools.partial(NET.encode),
    "partial with an argument": functools.partial(Net.encode, NET),
    "partial with a keyword": functools.partial(lambda x, net: net(x), net=NET),
    "tapped": harvest.tap(NET, "linear"),
    "Partial of the module": jax.tree_util.Partial(NET),
    "Partial of a method": jax.tree_util.Partial(NET.encode),
    "Partial with an argument": jax.tree_util.Partial(Net.encode, NET),
    "Partial with a keyword": jax.tree_util.Partial(lambda x, net: net(x), net=NET),
}
TRANSFORMS = {
    "reap": reap,
    "capture": capture,
    "sites": sites,
    "plant": lambda fn: plant(fn, {"h": harvest.zero()}),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MUTABLE)
def test_mutable_modules_are_refused(name, transform):
    match = rf"`{transform}` got a `flax.nnx` module.*nnx\.split\(module\).*nnx\.merge\("
    with pytest.raises(harvest.UnsupportedError, match=match):
        TRANSFORMS[transform](MUTABLE[name])(ROWS)
    assert NET.calls[...] == 0


def test_functional_nnx():
    graph, state = nnx.split(Net())

    def fn(state, x):
        net = nnx.merge(graph, state)
        return net(x), nnx.state(net)

    h = ROWS @ state["linear"]["kernel"][...]
    for _ in range(2):
        (out, state), collected = capture(fn)(state, ROWS)
    assert state["calls"][...] == 2
    np.testing.assert_allclose(collected["h"][0], h, rtol=1e-5)
    np.testing.assert_allclose(out, np.sin(h), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(plant(fn, {"h": harvest.zero()})(state, ROWS)[0], 0 * ROWS)
    grads = jax.grad(lambda state: capture(fn)(state, ROWS)[0][0].sum(), allow_int=True)(state)
    wanted = np.cos(h).sum(0)
    np.testing.assert_allclose(grads["linear"]["bias"][...], wanted, rtol=1e-5)


def test_sow_changes_nothing_in_nnx():
    net = Net()
    out = nnx.jit(lambda net, x: net(x))(net, ROWS)
    assert net.calls[...] == 1
    np.testing.assert_allclose(out, np.sin(net.linear(ROWS)), rtol=1e-5)


# ----------------------------------------------------------------------------------- linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = sow(nn.Dense(3, name="dense")(x), name="h")
        self.sow("intermediates", "theirs", h)
        return jnp.sin(h), None


# The check refuses every effect with data in the body, `jax.debug.callback` too.
over = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True}}
scanned = functools.partial(nn.scan, **over, length=4, check_constancy_invariants=False)
LIFTED = {  # and what comes in front of the shape of a value
    "plain": (Block, ()),
    "jit": (nn.jit(Block), ()),
    "remat": (nn.remat(Block), ()),
    "scan": (scanned(Block), (4,)),
    "scan of remat": (scanned(nn.remat(Block)), (4,)),
    "vmap": (nn.vmap(Block, **over, in_axes=0), ()),
}


@pytest.mark.parametrize("name", LIFTED)
def test_linen(name):
    lifted, axes = LIFTED[name]
    module = lifted()
    params = {"params": module.init(jax.random.key(0), ROWS, None)["params"]}
    apply = functools.partial(module.apply, mutable=["intermediates"])
    wanted, variables = apply(params, ROWS, None)
    ((out, _), got), collected = capture(apply)(params, ROWS, None)
    (theirs,) = jax.tree.leaves(variables)
    np.testing.assert_allclose(out, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(got)[0], theirs, rtol=1e-6)
    assert collected["h"][0].shape == (*axes, 2, 3)
    np.testing.assert_allclose(collected["h"][0], theirs, rtol=1e-6)
    zeroed = plant(module.apply, {"h": harvest.zero()})(params, ROWS, None)[0]
    np.testing.assert_array_equal(zeroed, 0 * ROWS)
    loss = lambda apply: lambda params: apply(params, ROWS, None)[0][0].sum()
    grads = jax.grad(loss(lambda *args: capture(module.apply)(*args)[0]))(params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        grads,
        jax.grad(loss(module.apply))(params),
    )


# ----------------------------------------------------------------------------------- haiku


def haiku_layer(x):
    return sow(jnp.tanh(hk.Linear(3)(x)), name="h")


def haiku_norm(x):
    x = hk.BatchNorm(True, True, 0.9)(haiku_layer(x), is_training=True)
    return x * jax.random.bernoulli(hk.next_rng_key(), 0.5, x.shape).astype(x.dtype)


HAIKU = {
    "layer": (haiku_layer, ()),
    "state and keys": (haiku_norm, ()),
    "remat": (lambda x: hk.remat(haiku_layer)(x), ()),
    "layer_stack": (lambda x: hk.layer_stack(4)(haiku_layer)(x), (4,)),
}


@pytest.mark.parametrize("name", HAIKU)
def test_haiku(name):
    fn, axes = HAIKU[name]
    transformed = hk.transform_with_state(fn)
    params, state = transformed.init(jax.random.key(0), ROWS)
    args = params, state, jax.random.key(1), ROWS
    wanted = transformed.apply(*args)
    got, collected = capture(transformed.apply)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), got, wanted)
    assert collected["h"][0].shape == (*axes, 2, 3)
    first = np.tanh(ROWS @ jax.tree.leaves(params)[-1].reshape(-1, 3, 3)[0])
    np.testing.assert_allclose(collected["h"][0].reshape(-1, 2, 3)[0], first, rtol=1e-5)
    assert np.all(plant(transformed.apply, {"h": harvest.zero()})(*args)[0] == 0)


# ------------------------------------------------------------------------- optax, equinox


def test_a_training_step():
    model = eqx.nn.MLP(3, 1, 8, 1, activation=lambda h: jax.nn.relu(sow(h, name="h")), key=KEY)
    plain = eqx.tree_at(lambda m: m.activation, model, jax.nn.relu)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(model, state, around):
        def loss(model):
            out, aux = around(lambda x: jnp.sum((jax.vmap(model)(x) - 1.0) ** 2))(ROWS)
            return out, aux

        grads, aux = eqx.filter_grad(loss, has_aux=True)(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, aux

    no_aux = lambda fn: lambda x: (fn(x), None)
    states = [optimizer.init(eqx.filter(m, eqx.is_array)) for m in (model, plain)]
    for _ in range(3):
        h = jax.vmap(model.layers[0])(ROWS)
        model, states[0], aux = step(model, states[0], capture)
        plain, states[1], _ = step(plain, states[1], no_aux)
        np.testing.assert_allclose(aux["h"][0], h, rtol=1e-5, atol=1e-6)
    trained, wanted = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (model, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), trained, wanted)


def test_equinox_state():
    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
    layers = [eqx.nn.Lambda(affine), norm]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)(layers)
    fn = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    (out, new), collected = capture(fn)(ROWS, state)
    np.testing.assert_allclose(out, fn(ROWS, state)[0], rtol=1e-5)
    np.testing.assert_allclose(collected["h"][0], 2 * ROWS)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_an_sae_is_an_edit():
    sae = eqx.nn.MLP(3, 3, 8, 1, key=KEY)
    np.testing.assert_allclose(plant(affine, {"h": sae})(X), sae(2 * X) + 1, rtol=1e-5)
    batched = plant(jax.vmap(affine), {"h": sae})(ROWS)
    np.testing.assert_allclose(batched, jax.vmap(sae)(2 * ROWS) + 1, rtol=1e-5)


def test_equinox_errors_still_raise():
    def fn(x):
        return sow(eqx.error_if(x, x > 1.0, "too large"), name="h")

    assert reap(fn)(1.0) == {"h": 1.0}
    with pytest.raises(ValueError, match="too large"):  # as under `jax.jit`
        jax.block_until_ready(reap(fn)(2.0))
