"""Tasks of the documentation, done on models of their own: each checks its result by itself."""

import importlib
import pkgutil

import jax
import pytest

from . import tasks

NAMES = [module.name for module in pkgutil.iter_modules(tasks.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_task(name, capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        importlib.import_module(f"tests.tasks.{name}").main()
    assert capsys.readouterr().out


def test_there_are_some():
    assert {"patch_positions", "splice_sae", "nan_hunt"} <= set(NAMES)
