"""Training of the small models: steps of an optax optimiser, in one `jax.lax.scan`."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import optax
from jaxtyping import Array, Float, PyTree


@eqx.filter_jit
def steps(
    model: Any,
    state: PyTree,
    xs: PyTree[Array],
    loss: Callable[..., Float[Array, ""]],
    optimiser: optax.GradientTransformation,
) -> tuple[Any, PyTree, Float[Array, " steps"]]:
    """One step of training for each row of `xs`.

    **Arguments:**

    - `model`: any Equinox module; its arrays of floating point are trained.
    - `state`: that of the optimiser, as [`init`][] made it.
    - `xs`: what each step is given (a key, or a batch), with a leading axis of steps.
    - `loss`: called as `loss(model, x)`.
    - `optimiser`: any of optax.

    **Returns:**

    The model, the state, and the loss before each step.
    """
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(carry: tuple[Any, PyTree], x: PyTree[Array]) -> tuple[tuple[Any, PyTree], Array]:
        arrays, state = carry
        value, grads = jax.value_and_grad(lambda a: loss(eqx.combine(a, rest), x))(arrays)
        updates, state = optimiser.update(grads, state, arrays)
        return (optax.apply_updates(arrays, updates), state), value

    (arrays, state), losses = jax.lax.scan(step, (arrays, state), xs)
    return eqx.combine(arrays, rest), state, losses


def init(model: Any, optimiser: optax.GradientTransformation) -> PyTree:
    """The state of the optimiser before the first step."""
    return optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def fit(
    model: Any,
    chunks: Iterable[PyTree[Array]],
    loss: Callable[..., Float[Array, ""]],
    optimiser: optax.GradientTransformation,
) -> Any:
    """The model after [`steps`][] for each of the chunks, such as `report.track` hands out."""
    state = init(model, optimiser)
    for xs in chunks:
        model, state, _ = steps(model, state, xs, loss, optimiser)
    return model
