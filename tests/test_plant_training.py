"""What is planted is trained: steering vectors, and modules in the place of activations.

The optima are known, since the models are made around them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from harvest import add, at, chain, each, plant, reap, scale, sow

SIZE, LAYERS, BATCH = 4, 3, 32
KEYS = jax.random.split(jax.random.key(0), 4)
INPUTS = jax.random.normal(KEYS[0], (BATCH, SIZE))
# Rotations: what is wrong at one layer is as wrong at the end.
WEIGHTS = jnp.linalg.qr(jax.random.normal(KEYS[1], (LAYERS, SIZE, SIZE)))[0]
STEERING = jnp.array([1.0, -2.0, 0.5, 3.0])


def model(x):
    return lax.scan(lambda x, w: (sow(w @ x, name="resid"), None), x, WEIGHTS)[0]


def deep(x):
    return lax.scan(lambda x, w: (sow(jnp.tanh(w @ x), name="resid"), None), x, WEIGHTS)[0]


def distance(outputs, targets):
    return jnp.mean(jnp.sum((outputs - targets) ** 2, axis=-1))


def trained(loss, params, optimizer, steps):
    """The parameters after some steps, and the losses."""

    @eqx.filter_jit
    def step(params, state):
        value, grads = eqx.filter_value_and_grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # Adam counts in integers
            updates, state = optimizer.update(grads, state, params)
        return eqx.apply_updates(params, updates), state, value

    state = optimizer.init(eqx.filter(params, eqx.is_inexact_array))
    losses = []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


# ------------------------------------------------------------------------------ steering vectors

VECTORS = {  # the edit that a vector makes
    "last layer": lambda v: at(LAYERS - 1, add(v)),
    "traced layer": lambda v: at(jnp.array(1), add(v)),
    "of a chain": lambda v: at(0, chain(scale(1.0), add(v))),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_steering_vector(name):
    """Gradient descent on |R (v - v*)|^2 with rate 1/4 halves the error at each step."""
    edit, steps = VECTORS[name], 30
    run = jax.vmap(lambda x, v: plant(model, {"resid": edit(v)})(x), in_axes=(0, None))
    targets = run(INPUTS, STEERING)
    loss = lambda v: distance(run(INPUTS, v), targets)
    found, losses = trained(loss, jnp.zeros(SIZE), optax.sgd(0.25), steps)
    np.testing.assert_allclose(losses[0], jnp.sum(STEERING**2), rtol=1e-5)
    np.testing.assert_allclose(losses[:6], losses[0] / 4.0 ** np.arange(6), rtol=1e-3)
    assert losses[-1] < 1e-6
    np.testing.assert_allclose(found, STEERING, atol=1e-4)


def test_a_steering_vector_for_each_layer():
    vectors = 0.3 * jax.random.normal(KEYS[2], (LAYERS, SIZE))
    run = lambda v: jax.vmap(plant(deep, {"resid": each(add(v))}))(INPUTS)
    targets = run(vectors)
    loss = lambda v: distance(run(v), targets)
    _, losses = trained(loss, jnp.zeros_like(vectors), optax.adam(0.05), 400)
    assert losses[-1] < losses[0] / 1000


def test_the_gradient_of_a_steering_vector_is_that_at_the_site():
    total = lambda v: jnp.sum(plant(deep, {"resid": at(1, add(v))})(INPUTS[0]) ** 3)
    step = 1e-2
    slopes = [(total(step * e) - total(-step * e)) / (2 * step) for e in jnp.eye(SIZE)]
    np.testing.assert_allclose(jax.grad(total)(jnp.zeros(SIZE)), slopes, rtol=1e-2, atol=1e-4)


# ----------------------------------------------------------------------------------- modules


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    name: str = "affine"

    def __call__(self, h):
        return self.weight @ h + self.bias


class Autoencoder(eqx.Module):
    encode: eqx.nn.Linear
    decode: eqx.nn.Linear

    def __init__(self, hidden, key):
        one, two = jax.random.split(key)
        self.encode = eqx.nn.Linear(SIZE, hidden, key=one)
        self.decode = eqx.nn.Linear(hidden, SIZE, key=two)

    def __call__(self, h):
        return self.decode(jax.nn.relu(self.encode(h)))


def test_an_affine_module_learns_another_one():
    """Linear least squares, with more examples than unknowns."""
    wanted = Affine(jax.random.normal(KEYS[2], (SIZE, SIZE)), STEERING)
    run = lambda module: jax.vmap(plant(model, {"resid": at(1, module)}))(INPUTS)
    targets = run(wanted)
    loss = lambda module: distance(run(module), targets)
    start = Affine(jnp.zeros((SIZE, SIZE)), jnp.zeros(SIZE))
    found, losses = trained(loss, start, optax.adam(0.1), 300)
    assert losses[-1] < 1e-4 * losses[0]
    np.testing.assert_allclose(found.weight, wanted.weight, atol=0.05)
    np.testing.assert_allclose(found.bias, wanted.bias, atol=0.05)
    assert found.name == "affine"


def test_an_autoencoder_in_the_place_of_an_activation():
    """Wide enough to be the identity, so that the model can be as it was without it."""
    run = lambda module: jax.vmap(plant(deep, {"resid": at(0, module)}))(INPUTS)
    targets = jax.vmap(deep)(INPUTS)
    loss = lambda module: distance(run(module), targets)
    start = Autoencoder(8 * SIZE, KEYS[3])
    found, losses = trained(loss, start, optax.adam(0.01), 500)
    assert losses[-1] < losses[0] / 100
    # It has learnt the activations it has seen, which no loss asked for.
    acts = jax.vmap(reap(deep))(INPUTS)["resid"][:, 0]
    error = distance(jax.vmap(found)(acts), acts)
    assert error < distance(jax.vmap(start)(acts), acts) / 10


def test_one_module_for_each_layer():
    """Each sees the slice of its arrays; only one is right at its layer."""
    stack = eqx.filter_vmap(lambda key: Affine(jax.random.normal(key, (SIZE, SIZE)), STEERING))
    modules = stack(jax.random.split(KEYS[2], LAYERS))
    run = lambda modules: plant(model, {"resid": each(modules)})(INPUTS[0])

    def by_hand(modules):
        x = INPUTS[0]
        for i in range(LAYERS):
            x = modules.weight[i] @ (WEIGHTS[i] @ x) + modules.bias[i]
        return x

    got = eqx.filter_grad(lambda m: jnp.sum(run(m) ** 2))(modules)
    wanted = eqx.filter_grad(lambda m: jnp.sum(by_hand(m) ** 2))(modules)
    np.testing.assert_allclose(got.weight, wanted.weight, rtol=1e-4)
    np.testing.assert_allclose(got.bias, wanted.bias, rtol=1e-4)


def test_training_traces_the_model_once():
    traces = []

    def counted(x):
        traces.append(1)
        return model(x)

    run = jax.vmap(lambda x, v: plant(counted, {"resid": at(1, add(v))})(x), in_axes=(0, None))
    loss = lambda v: distance(run(INPUTS, v), INPUTS)
    trained(loss, jnp.zeros(SIZE), optax.sgd(0.1), 5)
    assert len(traces) == 1
