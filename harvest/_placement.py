"""Where values are: planted ones on the devices that a program runs on, and results on the host.

Of planted values only what `jit` would refuse is moved, and only outside of any trace: an array
that is committed to one other device. It becomes as an array of numpy, which `jit` shards as the
site needs it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils

from . import _types
from ._errors import PlantError
from ._structure import Number


def brought(value: Any, leaves: Sequence[Any], key: Any) -> Any:
    """A planted value or edit, where a program runs that has these arguments."""
    devices = _devices_of_program(leaves)
    if devices is None:
        return value

    def bring(path: Any, leaf: Any) -> Any:
        if not is_committed(leaf) or _devices(leaf) == devices:
            return leaf
        if len(leaf.sharding.device_set) == 1:
            return _uncommitted(leaf)
        at = f" at {jax.tree_util.keystr(path)}" if path else ""
        raise PlantError(
            f"got {_types.describe(leaf)}{at} for {key!r} on the devices {_ids(_devices(leaf))} of "
            f"another mesh, and the program runs on {_ids(devices)}; move it there with "
            "`jax.device_put`"
        )

    is_number = lambda node: isinstance(node, Number)
    return jax.tree_util.tree_map_with_path(bring, value, is_leaf=is_number)


def fetched(tree: Any) -> Any:
    """Small results as arrays of numpy, on every process, of which each may have a part."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(fetch, tree)


def is_committed(leaf: Any) -> bool:
    """Whether `jit` would run on the devices of an array."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed


def is_spread(leaf: Any) -> bool:
    """Whether it is an array on several devices."""
    return is_committed(leaf) and len(leaf.sharding.device_set) > 1


def _devices_of_program(leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """As `jit` finds them: those of the mesh that is set, or of an argument."""
    mesh = jax.sharding.get_mesh()
    if not mesh.empty:
        return _in_order(mesh)
    return next((_devices(leaf) for leaf in leaves if is_committed(leaf)), None)


def _devices(array: jax.Array) -> tuple[Any, ...]:
    """The devices of an array; in order, where its sharding says one."""
    sharding = array.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _in_order(sharding.mesh)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _in_order(mesh: Any) -> tuple[Any, ...]:
    return tuple(mesh.devices.flat)


def _uncommitted(array: jax.Array) -> Any:
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return np.asarray(array)


def _ids(devices: Sequence[Any]) -> str:
    return ", ".join(str(device.id) for device in devices)
