"""A function with derivatives with respect to some of its arguments only.

These depend on the other arguments: to hold those fixed by `lax.stop_gradient` would make higher
derivatives zero. By `jax.custom_jvp` it cannot be done either: JAX compiles none that has
references inside.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ._derived import Derived
from ._opened import opened


def of_first(fn: Callable[..., list[Any]], first: Any, *rest: Any) -> list[Any]:
    """`fn(first, *rest)`, differentiated with respect to `first` only. All are pytrees."""
    leaves, treedef = jax.tree.flatten((first, *rest))
    flat = lambda *leaves: fn(*jax.tree.unflatten(treedef, leaves))
    return _held(_OfFirst(flat, len(jax.tree.leaves(first))), *leaves)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfFirst(Derived):
    count: int  # how many arguments it is differentiated by

    def jvp(self, primals, tangents):
        return _held(self, *primals), super().jvp(primals, tangents)[1]

    def linearize(self, args, live):
        return _held(self, *args), super().linearize(args, live)[1]

    def vjp(self, args, live):
        return _held(self, *args), super().vjp(args, live)[1]

    def _inputs(self, args, live):
        inputs, _ = super()._inputs(args, live)

        def at(*inputs):
            rest = iter(inputs)
            given = [next(rest) if on else arg for arg, on in zip(args, live, strict=True)]
            return self.fn(*given[: self.count], *args[self.count :])

        return inputs, at


def _held(derived: _OfFirst, *args: Any) -> list[Any]:
    body = lambda *args: (derived.fn(*args),)
    return list(opened("held", body, (derived,), args, batches=True)[0])
