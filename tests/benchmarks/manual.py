"""Layers in a `shard_map`, over data and tensors, with sows and by hand."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import harvest

from .parallel import mesh_of

P = PartitionSpec
LAYERS, BATCH, SIZE, NEURONS = 3, 8, 32, 64
IN_SPECS = {"up": P(None, None, "model"), "down": P(None, "model")}, P("data")
# How the shards of what is sown make up the global values; those of the norm are stacked.
SPECS = {"neurons": P("data", "model"), "resid": P("data"), "norm": None}
STACKED = {"neurons": P(None, "data", "model"), "resid": P(None, "data"), "norm": P(None, "data")}


def layer(x: jax.Array, weights: Any, see: Callable[[Any, str], Any]) -> jax.Array:
    norm = see(jnp.sqrt(jnp.mean(x**2)), "norm")
    neurons = see(jax.nn.relu(x / norm @ weights["up"]), "neurons")
    return see(x + lax.psum(neurons @ weights["down"], "model"), "resid")


def tagged(value: Any, name: str) -> Any:
    return harvest.sow(value, name=name, spec=SPECS[name])


@dataclasses.dataclass(frozen=True)
class Form:
    mesh: Any

    @property
    def name(self) -> str:
        return f"shard_map, {'explicit' if AxisType.Explicit in self.mesh.axis_types else 'auto'}"

    @property
    def args(self) -> tuple[Any, Any]:
        up, down, x = jax.random.split(jax.random.key(0), 3)
        weights = {
            "up": jax.random.normal(up, (LAYERS, SIZE, NEURONS)) / 8,
            "down": jax.random.normal(down, (LAYERS, NEURONS, SIZE)) / 8,
        }
        put = lambda value, spec: jax.device_put(value, NamedSharding(self.mesh, spec))
        return jax.tree.map(put, (weights, jax.random.normal(x, (BATCH, SIZE))), IN_SPECS)

    def mapped(self, body: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def sown(self, weights: Any, x: jax.Array) -> jax.Array:
        step = lambda x, w: (layer(x, w, tagged), None)
        body = lambda weights, x: lax.scan(step, x, weights)[0]
        return self.mapped(body, IN_SPECS, P("data"))(weights, x)

    def captured(self, weights: Any, x: jax.Array) -> Any:
        """The result, and all values, by hand."""

        def step(x, w):
            values = {}
            out = layer(x, w, lambda value, name: values.setdefault(name, value))
            return out, values | {"norm": values["norm"][None]}

        body = lambda weights, x: lax.scan(step, x, weights)
        return self.mapped(body, IN_SPECS, (P("data"), STACKED))(weights, x)

    def last(self, weights: Any, x: jax.Array) -> Any:
        """The neurons of the last layer, by hand."""

        def step(carry, w):
            values = {}
            out = layer(carry[0], w, lambda value, name: values.setdefault(name, value))
            return (out, values["neurons"]), None

        def body(weights, x):
            zeros = lax.pcast(
                jnp.zeros((BATCH // 4, NEURONS // 2)), ("data", "model"), to="varying"
            )
            return lax.scan(step, (x, zeros), weights)[0][1]

        return {"neurons": self.mapped(body, IN_SPECS, SPECS["neurons"])(weights, x)}

    def planted(self, neurons: jax.Array, weights: Any, x: jax.Array) -> jax.Array:
        """With these neurons in place of those computed, by hand."""

        def step(x, row):
            w, neurons = row
            return layer(x, w, lambda value, name: neurons if name == "neurons" else value), None

        def body(neurons, weights, x):
            return lax.scan(step, x, (weights, neurons))[0]

        specs = (STACKED["neurons"], *IN_SPECS)
        return self.mapped(body, specs, P("data"))(neurons, weights, x)

    def grads(self, weights: Any, x: jax.Array) -> Any:
        """The gradient by the neurons, by hand."""

        def step(x, row):
            w, eps = row
            return layer(x, w, lambda v, name: v + eps if name == "neurons" else v), None

        def loss(eps):
            body = lambda eps, weights, x: lax.scan(step, x, (weights, eps))[0]
            specs = (STACKED["neurons"], *IN_SPECS)
            return jnp.sum(self.mapped(body, specs, P("data"))(eps, weights, x) ** 2)

        shape = (LAYERS, BATCH, NEURONS)
        sharding = NamedSharding(self.mesh, STACKED["neurons"])
        explicit = AxisType.Explicit in self.mesh.axis_types
        zeros = jnp.zeros(shape, out_sharding=sharding if explicit else None)
        return {"neurons": jax.grad(loss)(zeros)}


def forms() -> Iterator[Form]:
    for kind in (AxisType.Auto, AxisType.Explicit):
        yield Form(mesh_of(kind))
