"""Meshes of eight devices, with automatic and with explicit axes, and values on them."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from harvest import sow

from .helpers import PROGRAMS

P = PartitionSpec
DEVICES = np.array(jax.devices())
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "explicit": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(EXPLICIT, EXPLICIT)),
    "auto": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(AUTO, AUTO)),
    "mixed": Mesh(DEVICES.reshape(4, 2), ("d", "m"), axis_types=(EXPLICIT, AUTO)),
}
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def _on(*names):
    return pytest.mark.parametrize("mesh", [MESHES[n] for n in names], ids=names, indirect=True)


on_meshes = _on("explicit", "auto", "mixed")
on_two = _on("explicit", "auto")
on_explicit = _on("explicit")
# But for the one that has a mesh of its own.
ON_ANY_MESH = {name: program for name, program in PROGRAMS.items() if name != "shard_map"}
of_programs = pytest.mark.parametrize("program", ON_ANY_MESH.values(), ids=ON_ANY_MESH)


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def sown(program):
    return lambda x: program.fn(x, lambda h, step: sow(h, name="h"))


def check_same(got, wanted):
    """Of the same values, and of one type: under explicit axes it has the sharding."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert jax.typeof(a).sharding == jax.typeof(b).sharding
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def at(stack, step):
    for index in () if step is None else step if isinstance(step, tuple) else (step,):
        stack = lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return stack
