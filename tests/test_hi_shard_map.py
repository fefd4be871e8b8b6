"""Values of hi types in `shard_map`, by their `HiPspec`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .hi_programs import KINDS, by_hand, close
from .hi_types import ProductPspec, QPspec

SPECS = {
    "quantized": QPspec(P("data", None)),
    "rank one": ProductPspec((P("data"), P())),
    "tuple": ProductPspec((QPspec(P("data", None)), ProductPspec((P(), ProductPspec((P(), P())))))),
}
VALUE = jnp.sin(jnp.arange(1.0, 25.0)).reshape(4, 6)


@pytest.fixture
def mesh():
    # With explicit axes, JAX reshards arrays that come in, and not values of hi types.
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", KINDS)
def test_the_types_of_these_tests_go_through_shard_map(mesh, name):
    """In plain JAX: what comes in and goes out by its `HiPspec` is the same value."""
    value, spec = KINDS[name].make(VALUE), SPECS[name]
    same = jax.jit(jax.shard_map(lambda v: v, mesh=mesh, in_specs=(spec,), out_specs=spec))
    close(by_hand(same(value)), by_hand(value))


# ---------------------------------------------------------- sites in `shard_map`: with its rule
