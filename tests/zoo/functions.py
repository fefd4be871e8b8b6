"""Which functions there are."""

import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

MODULES = (
    "jax.nn",
    "jax.numpy",
    "jax.numpy.linalg",
    "jax.numpy.fft",
    "jax.scipy.special",
    "jax.scipy.linalg",
    "jax.scipy.signal",
    "jax.scipy.optimize",
    "jax.scipy.stats",
    "jax.lax",
    "jax.lax.linalg",
    "jax.random",
    "optax.losses",
)


def functions() -> dict[str, Callable[..., Any]]:
    """By name; one that is in several modules only by its first name."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for module in MODULES:
        for name, fn in _of(importlib.import_module(module), module):
            if id(fn) not in seen:
                seen.add(id(fn))
                found[name] = fn
    return found


def _of(module: types.ModuleType, path: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(vars(module)):
        value = getattr(module, name)
        if name.startswith("_"):
            continue
        if isinstance(value, types.ModuleType):
            if path == "jax.scipy.stats":  # one module for each distribution
                yield from _of(value, f"{path}.{name}")
        elif callable(value) and not inspect.isclass(value) and not isinstance(value, type):
            yield f"{path}.{name}", value
