"""A twelve-layer transformer, with and without sows, and by hand."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import harvest

LAYERS, HEADS, TOKENS, SIZE = 12, 4, 32, 64


def parameters(seed: int = 0, size: int = SIZE) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = {
        "q": (size, size),
        "k": (size, size),
        "v": (size, size),
        "o": (size, size),
        "up": (size, 4 * size),
        "down": (4 * size, size),
    }
    return {
        name: jax.random.normal(key, (LAYERS, *shape)) / math.sqrt(shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def tokens(seed: int = 1, size: int = SIZE) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (TOKENS, size))


def layer(weights: dict[str, jax.Array], x: jax.Array, see: Callable[[Any, str], Any]):
    """One layer; `see(value, name)` is what happens to its intermediate values."""
    size = x.shape[-1]
    split = lambda y: y.reshape(TOKENS, HEADS, -1).swapaxes(0, 1)
    h = _norm(x)
    q, k, v = (split(h @ weights[name]) for name in ("q", "k", "v"))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(size // HEADS)
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    pattern = see(jax.nn.softmax(jnp.where(causal, scores, -1e9)), "pattern")
    z = see((pattern @ v).swapaxes(0, 1).reshape(TOKENS, size), "z")
    x = x + z @ weights["o"]
    neurons = see(jax.nn.relu(_norm(x) @ weights["up"]), "neurons")
    return see(x + neurons @ weights["down"], "resid")


def _norm(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def sow(value: Any, name: str) -> Any:
    return harvest.sow(value, name=name)


def ignore(value: Any, name: str) -> Any:
    return value


def _collecting():
    """A `see` that keeps what it saw, and what it kept."""
    seen: dict[str, Any] = {}

    def see(value, name):
        seen[name] = value
        return value

    return see, seen


def unrolled(weights, x, see=sow, scope=harvest.scope, wrap=lambda f: f):
    step = wrap(lambda weights, x: layer(weights, x, see))
    for i in range(LAYERS):
        with scope(f"layers/{i}"):
            x = step(jax.tree.map(lambda w: w[i], weights), x)  # noqa: B023
    return x


def unrolled_by_hand(weights, x, wrap=lambda f: f):
    def step(weights, x):
        see, seen = _collecting()
        return layer(weights, x, see), seen

    step = wrap(step)
    collected = {}
    for i in range(LAYERS):
        x, seen = step(jax.tree.map(lambda w: w[i], weights), x)  # noqa: B023
        collected.update({f"layers/{i}/{name}": (value,) for name, value in seen.items()})
    return x, collected


def scanned(weights, x, see=sow, wrap=lambda f: f):
    step = wrap(lambda x, weights: (layer(weights, x, see), None))
    return lax.scan(step, x, weights)[0]


def scanned_by_hand(weights, x):
    def step(x, weights):
        see, seen = _collecting()
        return layer(weights, x, see), seen

    x, collected = lax.scan(step, x, weights)
    return x, {name: (value,) for name, value in collected.items()}


def no_scope(name: str):
    return contextlib.nullcontext()
