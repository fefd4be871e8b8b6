"""Arguments to try, from the simplest on: the first with which a function works are its example.

Arrays are traced, everything else is a part of the function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

X = jnp.array([0.3, 0.5, 0.8])
Y = jnp.array([0.7, 0.2, 0.4])
Z = jnp.array([0.9, 0.6, 0.1])
ONE, TWO = jnp.float32(0.4), jnp.float32(0.7)
A = jnp.array([[2.0, 0.3, 0.1], [0.3, 1.5, 0.2], [0.1, 0.2, 1.1]])  # positive definite
B = jnp.array([[0.2, 0.5, 0.9], [0.4, 0.1, 0.3], [0.8, 0.6, 0.7]])
CUBE = jnp.linspace(0.1, 0.9, 24).reshape(2, 3, 4)
N, M = jnp.array([3, 1, 2]), jnp.array([1, 2, 2])
BITS = jnp.array([True, False, True])
C = jnp.array([0.3 + 0.5j, 0.8 - 0.1j, 0.2 + 0.2j])
KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 3)

CANDIDATES: dict[str, tuple[Any, ...]] = {
    "x": (X,),
    "x, y": (X, Y),
    "x, y, z": (X, Y, Z),
    "a": (A,),
    "a, b": (A, B),
    "a, x": (A, X),
    "x, a": (X, A),
    "a, x, y": (A, X, Y),
    "a, b, x": (A, B, X),
    "scalar": (ONE,),
    "n": (N,),
    "n, m": (N, M),
    "n, x": (N, X),
    "x, n": (X, N),
    "n, x, y": (N, X, Y),
    "x, y, z, x": (X, Y, Z, X),
    "a, b, a": (A, B, A),
    "key": (KEY,),
    "key, x": (KEY, X),
    "key, x, y": (KEY, X, Y),
    "key, shape": (KEY, (3,)),
    "key, x, shape": (KEY, X, (3,)),
    "key, x, y, shape": (KEY, X, Y, (3,)),
    "key, int": (KEY, 3),
    "key, n": (KEY, N),
    "bits": (BITS,),
    "bits, bits": (BITS, BITS),
    "bits, x, y": (BITS, X, Y),
    "x, int": (X, 2),
    "x, 1": (X, 1),
    "x, 0": (X, 0),
    "a, 1, 0": (A, 1, 0),
    "a, 0, 1": (A, 0, 1),
    "x, dtype": (X, jnp.float16),
    "a, shape": (A, (9,)),
    "x, shape": (X, (2, 3)),
    "x, float": (X, 0.5),
    "x, float, float": (X, 0.2, 0.6),
    "cube": (CUBE,),
    "cube, cube": (CUBE, CUBE),
    "[x, y]": ([X, Y],),
    "[a, b]": ([A, B],),
    "[x, y], int": ([X, Y], 0),
    "complex": (C,),
    "complex, complex": (C, C),
    "x, int, x": (X, 1, X),
    "int, x": (2, X),
    "int": (3,),
    "shape": ((2, 3),),
    "x, y, int": (X, Y, 2),
    "bits, x": (BITS, X),
    "x, bits": (X, BITS),
    "bits, 2": (BITS, 2),
    "x, [n]": (X, [2, 1]),
    "n, 4": (N, 4),
    "dtype, shape": (jnp.float32, (2, 3)),
}

Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function of arrays, and these


def bound(fn: Callable[..., Any], args: Any, kwargs: Any = None) -> Call:
    """A function of the arrays among some arguments only."""
    leaves, treedef = jax.tree.flatten((args, kwargs or {}))
    arrays = tuple(leaf for leaf in leaves if isinstance(leaf, jax.Array))

    def call(*arrays: Any) -> Any:
        given = iter(arrays)
        filled = [next(given) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        return fn(*args, **kwargs)

    return call, arrays
