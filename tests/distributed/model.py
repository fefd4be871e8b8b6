"""A small transformer, written once for numpy and for three ways of spreading it over a mesh.

Batches are split over the mesh axis `data`, heads and neurons over `model`.
"""

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from harvest import perturb, sow

P = PartitionSpec
DATA, MODEL = 4, 2  # the sizes of the axes of the mesh
LAYERS, BATCH, TOKENS, SIZE, HEADS, NEURONS = 2, 8, 3, 4, 2, 6

SHAPES = {
    "q": (LAYERS, SIZE, HEADS, SIZE // HEADS),
    "k": (LAYERS, SIZE, HEADS, SIZE // HEADS),
    "v": (LAYERS, SIZE, HEADS, SIZE // HEADS),
    "o": (LAYERS, HEADS, SIZE // HEADS, SIZE),
    "up": (LAYERS, SIZE, NEURONS),
    "down": (LAYERS, NEURONS, SIZE),
}
SPECS = {
    "q": P(None, None, "model"),
    "k": P(None, None, "model"),
    "v": P(None, None, "model"),
    "o": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
SITES = {"pattern": P("data", "model"), "neurons": P("data", None, "model"), "resid": P("data")}


def inputs(seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parameters, which are the same for every seed, and tokens."""
    random = np.random.RandomState(0)
    scaled = lambda shape: random.randn(*shape) / math.sqrt(SIZE)
    weights = {name: scaled(shape) for name, shape in SHAPES.items()}
    return weights, np.random.RandomState(1 + seed).randn(BATCH, TOKENS, SIZE)


class Way:
    """One way of evaluating the program: how arrays are multiplied, seen, and looped over."""

    np: Any = jnp

    def product(self, subscripts: str, a: Any, b: Any) -> Any:
        return self.np.einsum(subscripts, a, b)

    def summed(self, subscripts: str, a: Any, b: Any) -> Any:
        """A product that sums over an axis which is split over `model`."""
        return self.product(subscripts, a, b)

    def see(self, value: Any, name: str) -> Any:
        return sow(value, name=name)

    def see_cotangent(self, value: Any, name: str) -> Any:
        return perturb(value, name=name)

    def loop(self, layer: Any, x: Any, weights: Any) -> Any:
        return lax.scan(lambda x, w: (layer(self, w, x), None), x, weights)[0]

    def total(self, x: Any) -> Any:
        """The sum over the batch, and all else."""
        return self.np.sum(x)


def layer(way: Way, w: Any, x: Any) -> Any:
    q, k, v = (way.product("btd,dhk->bthk", x, w[name]) for name in "qkv")
    scores = way.np.exp(way.product("bshk,bthk->bhst", q, k))
    pattern = way.see(scores / way.np.sum(scores, axis=-1, keepdims=True), "pattern")
    z = way.product("bhst,bthk->bshk", pattern, v)
    x = x + way.summed("bshk,hkd->bsd", z, w["o"])
    neurons = way.see(way.np.tanh(way.product("btd,df->btf", x, w["up"])), "neurons")
    x = x + way.summed("btf,fd->btd", neurons, w["down"])
    return way.see(way.see_cotangent(x, "gresid"), "resid")


def evaluate(way: Way, weights: Any, x: Any) -> dict[str, Any]:
    y = way.loop(layer, x, weights)
    return {"y": y, "loss": way.total(way.np.sin(y) * y)}


# ------------------------------------------------------------------------ over a mesh


def mesh_of(kind: AxisType) -> Mesh:
    """Neighbours along both axes are devices of different processes."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    halves = np.array(devices).reshape(2, DATA)
    rows = [[halves[(i + j) % 2, i] for j in range(MODEL)] for i in range(DATA)]
    return Mesh(np.array(rows), ("data", "model"), axis_types=(kind,) * 2)


class Jit(Way):
    """Under `jit`, which makes of the shardings of arguments what it finds best."""

    name, kind = "jit", AxisType.Auto

    def __init__(self):
        self.mesh = mesh_of(self.kind)

    def __call__(self, weights, x):
        return jax.jit(evaluate, static_argnums=0)(self, weights, x)

    def context(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def place(self, value: np.ndarray, spec: P) -> jax.Array:
        """A global array, of which this process makes its own shards."""
        value = value.astype(np.float32)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def arguments(self, seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array]:
        weights, x = inputs(seed)
        placed = {name: self.place(w, SPECS[name]) for name, w in weights.items()}
        return placed, self.place(x, P("data"))

    def collected(self, values: np.ndarray, name: str) -> np.ndarray:
        """What is collected at a site, from its values in all layers."""
        return values

    def spec(self, name: str) -> P:
        """How that is spread over the mesh."""
        return P(None, *SITES[name])


class Explicit(Jit):
    """Under `jit`, where the sharding of a value is a part of its type."""

    name, kind = "explicit", AxisType.Explicit

    def context(self):
        return jax.set_mesh(self.mesh)

    def summed(self, subscripts, a, b):
        return jnp.einsum(subscripts, a, b, out_sharding=P("data"))


class ShardMap(Jit):
    """In `shard_map`, where sums over the mesh are explicit."""

    name = "shard_map"
    stacked = ("neurons",)  # what has no spec

    def __call__(self, weights, x):
        body = jax.shard_map(
            lambda weights, x: evaluate(self, weights, x),
            mesh=self.mesh,
            in_specs=(SPECS, P("data")),
            out_specs={"y": P("data"), "loss": P()},
        )
        return jax.jit(body)(weights, x)

    def see(self, value, name):
        return sow(value, name=name, spec=None if name in self.stacked else SITES[name])

    def see_cotangent(self, value, name):
        return perturb(value, name=name, spec=P("data"))

    def summed(self, subscripts, a, b):
        return lax.psum(self.product(subscripts, a, b), "model")

    def total(self, x):
        return lax.psum(jnp.sum(x), "data")

    def collected(self, values, name):
        if name not in self.stacked:
            return values
        halves = [np.split(rows, MODEL, axis=-1) for rows in np.split(values, DATA, axis=1)]
        return np.stack([shard for row in halves for shard in row], axis=1)

    def spec(self, name):
        return P(None, ("data", "model")) if name in self.stacked else super().spec(name)


WAYS = (Jit, Explicit, ShardMap)
