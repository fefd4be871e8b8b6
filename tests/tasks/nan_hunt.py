"""A training step has a finite loss, and a gradient that is NaN for one example: where is it made?

The operation, the layer and the example. Answered by docs/how-to/find-a-nan.md.
"""

import jax
import jax.numpy as jnp
import numpy as np

import harvest


def layer(x, weight):
    """Divides by the root mean square; the small number makes it safe, but not its derivative."""
    size = jnp.sqrt(jnp.mean(x**2))
    return jnp.maximum(x / (size + 1e-6) @ weight + 0.01, 0)


def loss(weights, x, y):
    for i, weight in enumerate(weights):
        with harvest.scope(f"layers/{i}"):
            x = harvest.perturb(harvest.sow(layer(x, weight), name="out"), name="d_out")
    return (x.mean() - y) ** 2


def step(weights, xs, ys):
    mean = lambda weights: jax.vmap(loss, (None, 0, 0))(weights, xs, ys).mean()
    value, grads = jax.value_and_grad(mean)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def main() -> None:
    weights = list(jax.random.normal(jax.random.key(0), (4, 8, 8)))
    xs, ys = jax.random.normal(jax.random.key(1), (6, 8)), jnp.ones(6)
    # The first layer maps example 4 to negative numbers only, so that the next one gets zeros.
    xs = xs.at[4].set(jnp.linalg.solve(weights[0].T, -jnp.ones(8)))

    # By hand: the loss is finite, the gradients of example 4 are not, and layer 1 has zeros there.
    assert jnp.isfinite(step(weights, xs, ys)[1])
    grads = jax.vmap(jax.grad(loss), (None, 0, 0))(weights, xs, ys)
    bad = [np.isnan(g).any(axis=(1, 2)).nonzero()[0].tolist() for g in grads]
    assert bad == [[4], [], [], []] and not layer(xs[4], weights[0]).any()

    # All values are finite, and the first cotangent that is not is that of the input of layer 1.
    (fault,) = harvest.debug.nonfinite(step)(weights, xs, ys)
    assert (fault.kind, fault.key, fault.lane) == ("cotangent", "layers/0/d_out", (4,))
    print(fault)

    # The equation: zero times infinity, which the derivative of the square root is at zero.
    (fault,) = harvest.debug.nonfinite(step, eqns=True)(weights, xs, ys)
    assert fault.primitive == "mul" and fault.element == (4,)
    assert fault.key.startswith("layers/1/") and any(x.inf for x in fault.inputs)
    print(fault)


if __name__ == "__main__":
    main()
