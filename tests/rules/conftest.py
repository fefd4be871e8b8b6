"""The meshes on which `shard_map` is tested, and whether it checks what varies."""

import contextlib

import jax
import pytest
from jax.sharding import AxisType

from tests.shards import Sharded, mesh_of


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    mesh = mesh_of(request.param)
    explicit = request.param == AxisType.Explicit
    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        yield mesh


@pytest.fixture(params=[True, False], ids=["check_vma", "unchecked"])
def sharded(request, mesh):
    return Sharded(mesh, request.param)
