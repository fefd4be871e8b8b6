import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.models import training


class Line(eqx.Module):
    slope: jax.Array
    calls: jax.Array  # an integer, which is not trained
    offset: float = eqx.field(static=True)

    def __call__(self, x):
        return self.slope * x + self.offset


def loss(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


def test_steps_of_gradient_descent():
    x = np.asarray(np.random.default_rng(0).normal(size=(5, 8)), np.float32)
    y = 3 * x + 1
    optimiser = optax.sgd(0.1)
    model = Line(jnp.float32(0), jnp.array(7), 1.0)
    state = training.init(model, optimiser)
    model, _, losses = training.steps(model, state, (x, y), loss, optimiser)

    slope, expected = np.float32(0), []
    for batch in x:
        expected.append(np.mean(((slope - 3) * batch) ** 2))
        slope = slope - 0.1 * np.mean(2 * (slope - 3) * batch**2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(model.slope, slope, rtol=1e-5)
    assert model.calls == 7 and model.offset == 1


def test_chunks_are_one_run():
    x = jnp.ones((6, 2))
    optimiser = optax.sgd(0.1, momentum=0.9)
    model = Line(jnp.float32(0), jnp.array(7), 1.0)
    whole, _, _ = training.steps(model, training.init(model, optimiser), (x, x), loss, optimiser)
    fitted = training.fit(model, ((part, part) for part in (x[:2], x[2:])), loss, optimiser)
    np.testing.assert_allclose(fitted.slope, whole.slope, rtol=1e-6)
