"""SmolLM2 on a mesh: its batches are split over `data`, its weights over `model`.

A layer is split as Megatron-LM does it (Shoeybi et al., 2019, arXiv:1909.08053): each device has
some of the heads and of the neurons, and what they add to the residual stream is summed over the
devices. The model itself is not changed. It is given weights that are sharded, and the compiler
splits the program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

import harvest

from ..models.smollm2 import SmolLM2
from .settings import SettingError

WEIGHTS = {  # by their names; those of the layers have an axis of layers in front
    "embedding": P("model"),
    "query": P(None, "model"),
    "key": P(None, "model"),
    "value": P(None, "model"),
    "output": P(None, "model"),
    "gate": P(None, "model"),
    "up": P(None, "model"),
    "down": P(None, None, "model"),
}
# What is collected is split further than the batch it is of, so that each device has its own part.
ROWS = P(("data", "model"))


def make_mesh(model: int) -> Mesh:
    """All devices of all processes, so many of them to a model.

    **Raises:**

    `SettingError` if the devices cannot be divided like that.
    """
    devices = jax.device_count()
    if devices % model:
        raise SettingError(f"{devices} devices cannot be divided into groups of {model}")
    return jax.make_mesh(
        (devices // model, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )


def place(model: SmolLM2, mesh: Mesh) -> SmolLM2:
    """The model with its weights on the devices of a mesh.

    **Raises:**

    `SettingError` if weights cannot be divided over the axis `model`.
    """

    def put(path: Sequence[Any], w: Array) -> Array:
        name = path[-1].name
        spec = WEIGHTS.get(name, P())
        for size, axis in zip(w.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                parts = mesh.shape[axis]
                raise SettingError(f"{size} of {name!r} cannot be divided over {parts} devices")
        return jax.device_put(w, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, model)


def place_batch(tokens: Int[np.ndarray, "batch T"], mesh: Mesh) -> Int[Array, "batch T"]:
    """A batch, of which each device is given its part; every process is to have all of it."""
    return jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("data")), tokens, tokens.shape
    )


def collector(
    sites: Sequence[str], layer: int, dtype: Any, mesh: Mesh
) -> Callable[..., dict[str, Array]]:
    """A compiled function of model and batch that collects sites in one layer.

    The layers behind it are not run. Each site is `(batch, T, ...)`, in `dtype` if it is of
    floating point; `tokens` are beside them. All are split over all devices, by sequences.
    """

    def stored(value: Array) -> Array:
        return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value

    one = harvest.folds.at(layer).of(stored)

    def collect(model: SmolLM2, tokens: Int[Array, "batch T"]) -> dict[str, Array]:
        acts = harvest.reap(jax.vmap(model), dict.fromkeys(sites, one))(tokens)
        return {"tokens": tokens, **acts}

    return jax.jit(collect, out_shardings=NamedSharding(mesh, ROWS))


def check_batch(batch: tuple[int, int], mesh: Mesh) -> None:
    """**Raises:** `SettingError` if its sequences cannot be divided over all devices."""
    if batch[0] % mesh.size:
        raise SettingError(f"{batch[0]} sequences cannot be divided over {mesh.size} devices")


def check_sites(model: SmolLM2, sites: Sequence[str], layer: int, batch: tuple[int, int]) -> None:
    """**Raises:** `SettingError` if a site is in no layer, or there is no such layer."""
    found = harvest.sites(jax.vmap(model))(jax.ShapeDtypeStruct(batch, jnp.int32))
    loops = {
        site.key: axis.size or 0 for site in found for axis in site.axes if axis.kind == "loop"
    }
    for site in sites:
        if site not in loops:
            raise SettingError(f"{site!r} is no site of a layer; these are: {', '.join(loops)}")
        if not 0 <= layer < loops[site]:
            raise SettingError(f"there is no layer {layer}; the model has 0 to {loops[site] - 1}")


def types(
    collect: Callable[..., dict[str, Array]], model: SmolLM2, batch: tuple[int, int], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """What a [`collector`][] gives of a batch of so many sequences and tokens."""
    found = jax.eval_shape(collect, model, jax.ShapeDtypeStruct(batch, jnp.int32))
    rows = NamedSharding(mesh, ROWS)
    with_rows = lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=rows)
    return {name: with_rows(type) for name, type in found.items()}


def cost(model: SmolLM2, batch: tuple[int, int], dtype: Any, mesh: Mesh) -> harvest.Cost:
    """What each site takes of a batch of so many sequences and tokens; folded, in one layer."""
    sites = harvest.sites(jax.vmap(model))(jax.ShapeDtypeStruct(batch, jnp.int32))
    loops = {site.key: [axis for axis in site.axes if axis.kind == "loop"] for site in sites}
    rows = {key: P(*(None for _ in around), *ROWS) for key, around in loops.items()}
    return sites.cost(mesh, rows, tokens=batch[0] * batch[1], dtype=dtype)
