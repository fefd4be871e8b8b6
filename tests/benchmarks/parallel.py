"""A transformer on a mesh, over data and tensors, with sows and by hand.

Under automatic axes its activations are constrained, under explicit ones they have types.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import harvest

LAYERS, BATCH, TOKENS, SIZE, HEADS, NEURONS = 3, 8, 16, 32, 4, 64
SHAPES = {
    "q": (SIZE, HEADS, SIZE // HEADS),
    "k": (SIZE, HEADS, SIZE // HEADS),
    "v": (SIZE, HEADS, SIZE // HEADS),
    "o": (HEADS, SIZE // HEADS, SIZE),
    "up": (SIZE, NEURONS),
    "down": (NEURONS, SIZE),
}
SPECS = {
    "q": (None, "model"),
    "k": (None, "model"),
    "v": (None, "model"),
    "o": ("model",),
    "up": (None, "model"),
    "down": ("model",),
}
See = Callable[[Any, str], Any]  # what happens to a value of a name


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def parameters(mesh: Any) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        name: jax.device_put(
            jax.random.normal(key, (LAYERS, *shape)) / math.sqrt(shape[0]),
            NamedSharding(mesh, PartitionSpec(None, *SPECS[name])),
        )
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def tokens(mesh: Any) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, SIZE))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))


def _summed(mesh: Any, spec: str, a: Any, b: Any) -> Any:
    """A product over axes that are sharded."""
    out = NamedSharding(mesh, PartitionSpec("data"))
    if AxisType.Explicit in mesh.axis_types:
        return jnp.einsum(spec, a, b, out_sharding=out)
    return lax.with_sharding_constraint(jnp.einsum(spec, a, b), out)


def _zeros(mesh: Any, shape: tuple[int, ...], spec: tuple[Any, ...]) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    explicit = AxisType.Explicit in mesh.axis_types
    place = jax.sharding.reshard if explicit else lax.with_sharding_constraint
    return place(jnp.zeros(shape), sharding)


def layer(mesh: Any, weights: dict[str, jax.Array], x: jax.Array, see: See) -> jax.Array:
    h = _norm(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, weights[name]) for name in "qkv")
    scores = jnp.einsum("bqhk,bmhk->bhqm", q, k) / math.sqrt(SIZE // HEADS)
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    pattern = see(jax.nn.softmax(jnp.where(causal, scores, -1e9)), "pattern")
    z = see(jnp.einsum("bhqm,bmhk->bqhk", pattern, v), "z")
    x = x + _summed(mesh, "bqhk,hkd->bqd", z, weights["o"])
    neurons = see(jax.nn.relu(jnp.einsum("btd,df->btf", _norm(x), weights["up"])), "neurons")
    return see(x + _summed(mesh, "btf,fd->btd", neurons, weights["down"]), "resid")


def _norm(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss(out: jax.Array) -> jax.Array:
    return jnp.sum(out**2)


@dataclasses.dataclass(frozen=True)
class Form:
    """The model with its layers unrolled or scanned."""

    mesh: Any
    scanned: bool

    @property
    def name(self) -> str:
        kind = "explicit" if AxisType.Explicit in self.mesh.axis_types else "auto"
        return f"{kind}, {'scanned' if self.scanned else 'unrolled'}"

    @property
    def weights(self) -> dict[str, jax.Array]:
        return parameters(self.mesh)

    @property
    def x(self) -> jax.Array:
        return tokens(self.mesh)

    def sown(self, weights: Any, x: jax.Array) -> jax.Array:
        sow = lambda value, name: harvest.sow(value, name=name)
        if self.scanned:
            step = lambda x, w: (layer(self.mesh, w, x, sow), None)
            return lax.scan(step, x, weights)[0]
        for i in range(LAYERS):
            with harvest.scope(f"layers/{i}"):
                x = layer(self.mesh, _item(weights, i), x, sow)
        return x

    # ----------------------------------------------------------------------- by hand

    def run(
        self, weights: Any, x: Any, change: Callable[..., Any], given: Any, kept: tuple[str, ...]
    ) -> tuple[Any, dict[str, Any]]:
        """The result, and the values of these names; `change(value, of_given)` is in the place of
        each value for which something is given."""

        def step(x: Any, weights: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            seen = {}

            def see(value: Any, name: str) -> Any:
                value = change(value, given[name]) if name in given else value
                if name in kept:
                    seen[name] = value
                return value

            return layer(self.mesh, weights, x, see), seen

        if self.scanned:
            return lax.scan(lambda x, row: step(x, *row), x, (weights, given))
        collected = {}
        for i in range(LAYERS):
            prefix = f"layers/{i}/"
            here = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
            x, seen = step(x, _item(weights, i), here)
            collected.update({prefix + name: value for name, value in seen.items()})
        return x, collected

    def values(self, weights: Any, x: Any) -> dict[str, Any]:
        with jax.set_mesh(self.mesh):
            return jax.jit(self.captured)(weights, x)[1]

    def captured(self, weights: Any, x: Any) -> tuple[Any, dict[str, Any]]:
        return self.run(weights, x, _none, {}, ("pattern", "z", "neurons", "resid"))

    def reaped(self, weights: Any, x: Any) -> dict[str, Any]:
        return self.run(weights, x, _none, {}, ("z", "neurons"))[1]

    def planted(self, plants: Any, weights: Any, x: Any) -> Any:
        return self.run(weights, x, lambda value, planted: planted, plants, ())[0]

    def edited(self, weights: Any, x: Any) -> Any:
        doubled = {key: jnp.full(LAYERS if self.scanned else (), 2.0) for key in self.keys("resid")}
        return self.run(weights, x, lambda value, two: two * value, doubled, ())[0]

    def grads(self, weights: Any, x: Any) -> dict[str, Any]:
        value = jax.eval_shape(lambda x: jnp.stack([x] * LAYERS) if self.scanned else x, x)
        spec = (*(None,) * self.scanned, "data")
        eps = {key: _zeros(self.mesh, value.shape, spec) for key in self.keys("resid")}
        out = lambda eps: self.run(weights, x, jnp.add, eps, ())[0]
        return jax.grad(lambda eps: loss(out(eps)))(eps)

    def tangents(self, tangents: Any, weights: Any, x: Any) -> Any:
        def run(eps: Any) -> Any:
            return self.run(weights, x, jnp.add, eps, ("neurons",))

        zeros = jax.tree.map(jnp.zeros_like, tangents)
        (out, _), (out_tangent, collected) = jax.jvp(run, (zeros,), (tangents,))
        return out, out_tangent, collected

    def folded(self, name: str, weights: Any, x: Any) -> dict[str, Any]:
        def step(carry: Any, weights: Any) -> Any:
            x, state = carry
            seen = {}
            x = layer(self.mesh, weights, x, lambda value, key: seen.setdefault(key, value))
            return (x, seen["pattern"] if name == "last" else state + seen["pattern"]), None

        zeros = _zeros(self.mesh, (BATCH, HEADS, TOKENS, TOKENS), ("data", "model"))
        (_, state), _ = lax.scan(step, (x, zeros), weights)
        return {"pattern": state if name == "last" else state / LAYERS}

    def keys(self, name: str) -> list[str]:
        return [name] if self.scanned else [f"layers/{i}/{name}" for i in range(LAYERS)]


def forms() -> Iterator[Form]:
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        for scanned in (False, True):
            yield Form(mesh, scanned)


def _item(weights: Any, i: int) -> Any:
    return jax.tree.map(lambda w: w[i], weights)


def _none(value: Any, given: Any) -> Any:
    return value
