"""A small vision transformer of the package `equimo`, taught to tell four shapes.

    pip install --no-deps equimo==2.7.0 banax==0.1.5

Of its dependencies, its vision models need `einops` beside these two.
"""

import importlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

INSTALL = "pip install --no-deps equimo==2.7.0 banax==0.1.5 && pip install einops"
SIZE, PATCH, SHAPE = 24, 4, 8  # pixels
GRID = SIZE // PATCH
STEPS = 200


def make(key: PRNGKeyArray, depth: int = 4) -> Any:
    """An untrained `equimo.vision.models.vit.VisionTransformer`, with three heads in each block.

    **Raises:**

    `ModuleNotFoundError` if a package is missing, with the command that installs it.
    """
    try:
        vit: Any = importlib.import_module("equimo.vision.models.vit")
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            f"The vision transformer is missing. Install it with\n\n    {INSTALL}"
        ) from e
    sizes = {"img_size": SIZE, "patch_size": PATCH, "in_channels": 1, "num_classes": 4}
    sizes |= {"dim": 48, "depths": [depth], "num_heads": [3], "reg_tokens": 0, "key": key}
    return vit.VisionTransformer(**sizes)


def shapes() -> Float[np.ndarray, "4 size size"]:
    """A bar, an upright bar, a cross and a frame."""
    out = np.zeros((4, SHAPE, SHAPE), np.float32)
    out[0, 3:5] = 1
    out[1] = out[0].T
    out[2] = np.maximum(out[0], out[1])
    out[3] = 1
    out[3, 2:-2, 2:-2] = 0
    return out


def images(
    key: PRNGKeyArray, n: int
) -> tuple[Float[Array, "n 1 H W"], Int[Array, " n"], Int[Array, "n 2"]]:
    """Shapes in noise.

    **Returns:**

    The images, which shape is in each, and the patch where it begins: a row and a column.
    """
    kind_key, place_key, noise_key = jax.random.split(key, 3)
    kind = jax.random.randint(kind_key, (n,), 0, 4)
    patch = jax.random.randint(place_key, (n, 2), 0, (SIZE - SHAPE) // PATCH + 1)
    noise = 0.3 * jax.random.normal(noise_key, (n, SIZE, SIZE))

    def one(noise: Float[Array, "H W"], shape: Float[Array, "size size"], at: Int[Array, " 2"]):
        alone = jax.lax.dynamic_update_slice(jnp.zeros((SIZE, SIZE)), shape, (at[0], at[1]))
        return (noise + alone)[None]

    return jax.vmap(one)(noise, jnp.asarray(shapes())[kind], patch * PATCH), kind, patch


@eqx.filter_jit
def train(model: Any, key: PRNGKeyArray) -> Any:
    """The model after some steps on new images, 64 at a time."""
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays: Any, x: Float[Array, "n 1 H W"], kind: Int[Array, " n"]) -> Float[Array, ""]:
        logits = jax.vmap(lambda x: eqx.combine(arrays, rest)(x, inference=True))(x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, kind))

    def step(carry: Any, key: PRNGKeyArray) -> tuple[Any, None]:
        arrays, state = carry
        x, kind, _ = images(key, 64)
        updates, state = optimiser.update(jax.grad(loss)(arrays, x, kind), state)
        return (optax.apply_updates(arrays, updates), state), None

    keys = jax.random.split(key, STEPS)
    (arrays, _), _ = jax.lax.scan(step, (arrays, optimiser.init(arrays)), keys)
    return eqx.combine(arrays, rest)
