"""Looking at a program line by line: `show`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import _compat
from ._entry import CondSum
from ._errors import UnsupportedError
from ._interpreter import Replay
from ._lister import Lister
from ._listing import Line as Line
from ._listing import Listing as Listing
from ._placement import fetched
from ._plan import plan_reads
from ._rewrite import as_noted, rewritten
from ._site import Site
from ._stage import Program, Transformed, trace_afresh, trace_cached
from ._structure import is_traced, is_typed
from ._walk import Walk
from .folds import last


def show(fn: Callable[..., Any], *, values: bool = False) -> Callable[..., Listing]:
    """As `jax.make_jaxpr`, but returns a table: a line for each equation, with its key and source.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def loss(w, x):
            h = harvest.sow(jnp.tanh(w @ x), name="h")
            return jnp.sum(h**2)

        args = jnp.eye(3), jnp.arange(3.0)
        print(harvest.show(loss)(*args))
        print(harvest.show(jax.grad(loss), values=True)(*args))  # a backward pass, with values
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][]. `show(jax.grad(f))`, `show(jax.vmap(f))` and so on show what
        a transform makes of `f`, and `show(harvest.sow_eqns(f))` the keys of all equations.
    - `values`: whether to run it, and show what each equation computed. All of that is in memory at
        once.

    **Returns:**

    A function of the arguments of `fn` (arrays or, without `values`, their types: a
    `jax.ShapeDtypeStruct`, or what `jax.typeof` returns) that returns a [`harvest.Listing`][],
    a sequence of [`harvest.Line`][]s.

    **Raises:**

    - [`harvest.UnsupportedError`][]: with `values`, it is called under `jit` or another transform,
        where there are no values yet, or with a type in the place of an array.
    """
    return Show(fn, values)


class Show(Transformed):
    _static = ("values",)

    def __init__(self, fn: Callable[..., Any], values: bool):
        super().__init__(fn, "show")
        self.values = values

    def __call__(self, *args, **kwargs):
        trace = trace_afresh if _compat.tracing() else trace_cached
        program = trace("show", self.fn, args, kwargs, is_dynamic=is_typed)
        lister = Lister(program, _compat.defined_at(self.fn))
        if not self.values:
            return Listing(lister.lines)
        if _compat.tracing() or not all(map(is_traced, program.leaves)):
            raise UnsupportedError(
                "`show` has no values to show, since it was called under `jit` or another "
                "transform, or with a type in the place of an array; call it outside with arrays, "
                "or without `values=True`"
            )
        return Listing(lister.with_values(_values(program, lister)))


def _values(program: Program, lister: Lister) -> dict[int, Any]:
    """What was computed in each line that is an equation, by the number of the line."""
    if lister.choices is None:
        return {}
    jaxpr = rewritten(program.jaxpr, lister.choices, as_noted)
    walk = Walk()
    entries = walk.entries(jaxpr)
    mine = [e for e in entries if e.marker.label.kind == "equation" and not e.blocked]
    endless = {
        e.marker.label.name for e in mine if any(None in loops for _, loops in e.innermost())
    }
    others = {e.marker.label.name for e in mine} - endless
    pairs = [(_Among(endless), last()), (_Among(others), None)]
    plan = plan_reads(entries, pairs, "append", "show")
    dead = (False,) * len(jaxpr.outvars)
    run = lambda leaves: Replay(walk).run(jaxpr, leaves, plan.actions, (), dead)[1]
    reads = jax.jit(run)(program.leaves)
    return {
        int(entry.marker.label.name): _where_it_ran(reading.result(entry, read))
        for (entry, reading), read in zip(plan.reads, reads, strict=True)
    }


class _Among(frozenset[str]):
    """A choice of noted equations, by the numbers of their lines."""

    def __call__(self, site: Site) -> bool:
        return site.kind == "equation" and site.name in self


def _where_it_ran(value: Any) -> Any:
    """The value of an equation in a branch, without the iterations in which others ran."""
    ran = np.ones((), bool)
    while isinstance(value, CondSum):
        ((branch, inner),) = [(i, v) for i, v in enumerate(value.branches) if v is not None]
        here = fetched(value.index) == branch
        ran = ran.reshape(ran.shape + (1,) * (here.ndim - ran.ndim)) & here
        value = inner
    if not ran.any():
        return None
    return value if ran.ndim == 0 else jax.tree.map(lambda leaf: leaf[ran], value)
