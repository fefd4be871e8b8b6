"""Run by itself: import all that is public in JAX, and print what primitives there are, as JSON.

In a process of its own, so that neither what else is imported nor primitives made by tests count.
"""

import contextlib
import gc
import importlib
import io
import json
import pkgutil
import sys
import warnings

import equinox.internal  # noqa: F401
import jax
from jax.experimental.hijax import HiPrim
from jax.extend.core import Primitive


def import_public(package):
    """Import the public modules below a package, but those that need what is not installed."""
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name.rpartition(".")[2].startswith("_"):
            continue
        try:
            module = importlib.import_module(info.name)
        except (Exception, SystemExit):
            continue
        if info.ispkg:
            import_public(module)


def subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        import_public(jax)
    names = {p.name for p in gc.get_objects() if isinstance(p, Primitive)}
    names |= {cls.__name__ for cls in subclasses(HiPrim)}
    json.dump(sorted(names), sys.stdout)
