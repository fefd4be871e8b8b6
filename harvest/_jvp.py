"""Pushing tangents in at sites: `jvp`."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from . import _compat
from ._checks import check_mode
from ._edit_nodes import split_arrays
from ._entry import CondSum
from ._errors import PlantError
from ._fit import Mode
from ._interpreter import Replay
from ._lowered import zeros_like
from ._plan import plan_reads, resolve
from ._plan_plants import plan_plants
from ._probe import Push, as_tangent
from ._reap import collected
from ._select import check_select, is_static, pairs_of
from ._stage import Transformed, pack, trace_afresh
from ._structure import Packed


def jvp(
    fn: Callable[..., Any],
    tangents: Mapping[str, Any],
    select: Any = None,
    *,
    mode: Mode = "strict",
) -> Callable[..., Any]:
    """As `jax.jvp`, but pushes tangents in at sown values, and returns those of others.

    The Jacobian-vector product between two points inside a function.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            h = harvest.sow(x**2, name="h")
            y = harvest.sow(jnp.sin(h), name="y")
            return 3 * y

        out, out_tangent, tangents = harvest.jvp(f, {"h": 1.0})(0.0)
        assert out == 0 and out_tangent == 3 and tangents["y"] == 1
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `tangents`: a mapping from keys to tangents, each of the form in which `reap` returns the
        value (for leaves without derivative anything of their shape, such as zeros of dtype
        `float0`; for static leaves themselves or None), or in which `grad` returns the gradient.
        In a `while_loop` one tangent for all iterations. What `fn` computes is left as it is.
    - `select`: which tangents to return, as for [`harvest.reap`][]; of a reducer, that of its
        result.
    - `mode`: as for [`harvest.plant`][].

    **Returns:**

    A function of the arguments of `fn` that returns `(out, out_tangent, {key: tangent})`: zeros for
    what does not depend on the sites of `tangents`, `float0` for integers, as in JAX, and None for
    static leaves. At a site of `tangents`, it is the sum of what comes in there and what arrives.

    **Raises:**

    - [`harvest.PlantError`][]: a tangent is of another tree, shape or dtype than the site.
    - [`harvest.UnknownSiteError`][]: a key matches no site.
    - As [`harvest.reap`][]. JAX raises a `TypeError` for a function with a `custom_vjp` rule, which
        has no forward mode.
    """
    return Jvp(fn, tangents, select, mode)


class Jvp(Transformed):
    _dynamic = ("fn", "tangents", "reducers")
    _static = ("keys", "select", "mode")
    _planted = (("keys", "tangents"),)

    def __init__(self, fn: Callable[..., Any], tangents: Any, select: Any, mode: Mode):
        super().__init__(fn, "jvp")
        check_mode(mode)
        if not isinstance(tangents, Mapping):
            raise PlantError(
                f"`tangents` got {tangents!r} of type `{type(tangents).__name__}`; wanted a "
                "mapping from keys to tangents"
            )
        self.keys = tuple(check_select(key, "tangents") for key in tangents)
        self.tangents = tuple(_pushes(tangent, mode) for tangent in tangents.values())
        self.select, self.reducers = pairs_of(select)
        self.mode: Mode = mode

    def _resolved(self, args, kwargs, trace):
        if is_static((self.keys, self.select)) or trace is trace_afresh:
            return self
        program = trace("jvp", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        return self._with(
            keys=tuple(resolve(key, entries, False, "jvp", needed=True) for key in self.keys),
            select=tuple(resolve(s, entries, True, "jvp") for s in self.select),
        )

    def _finish(self, value):
        out, out_tangent, tangents = value
        return out, out_tangent, dict(tangents)

    def _inline(self, args, kwargs, trace):
        program = trace("jvp", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        pairs = list(zip(self.keys, self.tangents, strict=True))
        pushes = plan_plants(entries, pairs, self.mode, "jvp", "tangents")
        reducers = list(zip(self.select, self.reducers, strict=True))
        reads = plan_reads(entries, reducers, self.mode, "jvp")
        arrays, fixed = split_arrays(pushes.actions)

        def pushed(arrays):
            edits = eqx.combine(arrays, fixed)
            actions = [edit or read for edit, read in zip(edits, reads.actions, strict=True)]
            live = (True,) * len(program.jaxpr.outvars)
            outs, values = Replay(program.walk).run(
                program.jaxpr, program.leaves, actions, (), live
            )
            pairs = collected(reads, values, self.mode)
            keys.extend(key for key, _ in pairs)
            return pack(program.result(outs)), [pack(value) for _, value in pairs]

        keys: list[str] = []
        at = jax.tree.map(_zeros_like, arrays)
        (out, values), (out_tangent, tangents) = jax.jvp(pushed, (at,), (arrays,))
        by_key = [
            (key, _with_index(value.unflatten(), _tangent(tangent)))
            for key, value, tangent in zip(keys, values, tangents, strict=True)
        ]
        warnings = (*pushes.warnings, *reads.warnings)
        return (out.unflatten(), _tangent(out_tangent), by_key), warnings


def _zeros_like(array: Any) -> Any:
    with _compat.mesh_of([jax.typeof(array)]):
        return zeros_like(array)


def _pushes(tangent: Any, mode: Mode) -> Any:
    if mode == "append" and isinstance(tangent, tuple | list):
        return tuple(None if item is None else Push(item) for item in tangent)
    return Push(tangent)


def _tangent(packed: Packed) -> Any:
    return as_tangent(packed.structure, packed.leaves)


def _with_index(value: Any, tangent: Any) -> Any:
    """The tangent, of which each `CondSum` says which branch ran."""

    def indexed(v: Any, t: Any) -> Any:
        if not isinstance(v, CondSum):
            return t
        return CondSum(v.index, tuple(map(_with_index, v.branches, t.branches)))

    def is_leaf(v: Any) -> bool:
        return not isinstance(v, tuple) or isinstance(v, CondSum)

    return jax.tree.map(indexed, value, tangent, is_leaf=is_leaf)
