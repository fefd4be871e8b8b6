"""Writes `tests/data/zoo.json`: for each function the first arguments with which it works.

Run as `python -m tests.zoo.generate` when a new JAX has new functions. What works with none of them
has a call of its own in `calls.py`, or is excluded there.
"""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from .arguments import CANDIDATES, Call, bound
from .functions import functions

TABLE = Path(__file__).parent.parent / "data" / "zoo.json"


def works(call: Call) -> bool:
    """Whether it returns arrays, all finite and some of them made of its own arrays."""
    fn, arrays = call
    if not arrays:
        return False
    try:
        jax.jit(fn)(*arrays)
        outs = jax.tree.leaves(fn(*arrays))
        closed = jax.make_jaxpr(fn)(*arrays)
    except Exception:  # whatever it says to wrong arguments
        return False
    finite = all(isinstance(out, jax.Array) and _is_finite(out) for out in outs)
    return finite and _depends(closed)


def _depends(closed: ClosedJaxpr) -> bool:
    """Whether a result is made of an argument."""
    made = set(closed.jaxpr.invars)
    for eqn in closed.jaxpr.eqns:
        if any(isinstance(x, Var) and x in made for x in eqn.invars):
            made.update(eqn.outvars)
    return any(isinstance(x, Var) and x in made for x in closed.jaxpr.outvars)


def _is_finite(out: jax.Array) -> bool:
    return not jnp.issubdtype(out.dtype, jnp.inexact) or bool(np.isfinite(np.asarray(out)).all())


def main() -> None:
    warnings.simplefilter("ignore")
    table = {}
    for name, fn in functions().items():
        fitting = (c for c, args in CANDIDATES.items() if works(bound(fn, args)))
        if chosen := next(fitting, None):
            table[name] = chosen
    TABLE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    print(f"{len(table)} of {len(functions())} functions")


if __name__ == "__main__":
    main()
