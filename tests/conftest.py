import sys

import hypothesis
import jax
import jaxtyping
import pytest

assert "harvest" not in sys.modules, "the import hook must come before the first import of harvest"

# Before JAX starts its backend, which it does at the first computation.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

jaxtyping.install_import_hook("harvest", "beartype.beartype")

# `ci` runs the same programs every time; `--hypothesis-profile=long` looks for new ones.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def mesh(request):
    """That of `meshes.on_meshes` and its like, which is set while a test runs."""
    with jax.set_mesh(request.param):
        yield request.param


@pytest.fixture
def remat3(request):
    """Which implementation of `jax.checkpoint` there is, as the test's parameter says."""
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)
