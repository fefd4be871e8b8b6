"""An equation that is opened, with what is collected inside of it among its results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.experimental.hijax import HiPrim, Zero, vmap_rule
from jax.extend.core import Jaxpr

from . import _compat
from ._derived import (
    Collected,
    Constant,
    Derived,
    Original,
    check_no_references,
    no_tangents,
    without,
)
from ._errors import UnsupportedError
from ._interpreter import Replay
from ._walk import Walk


class Opened(HiPrim):
    """A jaxpr whose results come in groups, each with the derivatives of a function of its own."""

    skip_linearization_on_zero_tangents = True
    name: str  # of the primitive that was opened
    jaxpr: Jaxpr
    sizes: tuple[int, ...]  # how many results each group has
    derived: tuple[Derived, ...]  # one for each group
    batches: bool  # whether `vmap` maps the jaxpr, or else each of those functions

    def __init__(
        self,
        name: str,
        jaxpr: Jaxpr,
        sizes: tuple[int, ...],
        derived: tuple[Derived, ...],
        batches: bool,
    ):
        self.in_avals = tuple(jaxpr.in_avals)
        self.out_aval = _grouped(jaxpr.out_avals, sizes)
        self.effects = _compat.positional_effects(jaxpr)
        self.params = {
            "name": name,
            "jaxpr": jaxpr,
            "sizes": sizes,
            "derived": derived,
            "batches": batches,
        }
        super().__init__()

    def pp_params(self):
        return {"name": self.name, "jaxpr": self.jaxpr}

    def expand(self, *args):
        return _grouped(_evaluated(self.jaxpr, *args), self.sizes)

    def jvp(self, primals, tangents):
        outs, tangents = zip(*(d.jvp(primals, tangents) for d in self.derived), strict=True)
        return outs, tangents

    def lin(self, nzs_in, *primals):
        pairs = [d.linearize(primals, nzs_in) for d in self.derived]
        outs, linear = zip(*pairs, strict=True)
        return outs, (linear, Constant(nzs_in))

    def linearized(self, residuals, *tangents):
        linear, nzs_in = residuals
        live = [t for t, nonzero in zip(tangents, nzs_in.value, strict=True) if nonzero]
        return tuple(
            no_tangents(group, live[0], fn.value) if isinstance(fn, Constant) else fn(*live)
            for fn, group in zip(linear, self.out_aval, strict=True)
        )

    def vjp_fwd(self, nzs_in, *primals):
        pairs = [d.vjp(primals, nzs_in) for d in self.derived]
        outs, pullbacks = zip(*pairs, strict=True)
        nzs_out = tuple(
            [True] * len(group) if isinstance(pullback, Constant) else pullback.out_nzs
            for group, pullback in zip(outs, pullbacks, strict=True)
        )
        # Structured residuals are those of the primitive that was opened, if one was.
        first, residual = pullbacks[0], None
        if isinstance(self.derived[0], Original):
            first, residual = _compat.without_structured_residual(first)
        residuals = (first, *pullbacks[1:]), Constant(nzs_in)
        return (outs, residuals, nzs_out, *([] if residual is None else [residual]))

    def vjp_bwd(self, residuals, *rest):
        (pullbacks, nzs_in), count = residuals, len(self.in_avals)
        *structured, cts = rest[: len(rest) - count]
        accums = [a for a, nz in zip(rest[-count:], nzs_in.value, strict=True) if nz]
        if structured:
            first = _compat.with_structured_residual(pullbacks[0], *structured)
            pullbacks = (first, *pullbacks[1:])
        logs = {}
        # None is asked where nothing is differentiated: a rule may make NaNs of zeros.
        for pullback, group in zip(pullbacks, cts, strict=True):
            if not all(isinstance(ct, Zero) for ct in group):
                if isinstance(pullback, Constant):
                    raise UnsupportedError(pullback.value)
                _, new = pullback.with_logs.with_refs(*accums)(group)
                logs = _merged(logs, new)
        return logs or None

    def transpose(self, out_ct, *maybe_accums):
        logs = {}
        for derived, group in zip(self.derived, out_ct, strict=True):
            if not all(isinstance(ct, Zero) for ct in group):
                logs = _merged(logs, derived.transpose(group, maybe_accums))
        return logs or None

    def batch(self, axis_data, args, dims):
        if self.batches:
            flat = lambda *args: jax.tree.leaves(self.expand(*args))
            jaxpr, axes = mapped(flat, axis_data, args, dims)
            axes = _grouped(axes, self.sizes)
            derived = [
                d.batched(axis_data, dims, group)
                for d, group in zip(self.derived, axes, strict=True)
            ]
            return self._replace(jaxpr, tuple(derived))(*args), axes
        # The rule of the primitive is for its results only.
        outs, axes = [], []
        for derived in self.derived:
            jaxpr, group = mapped(derived.fn, axis_data, args, dims)
            outs.append(derived.evaluate(functools.partial(_evaluated, jaxpr), *args))
            axes.append(group)
        return tuple(outs), tuple(axes)

    def remat(self, trace, *args):
        # The recomputation must not sow again.
        quiet = jax.make_jaxpr(lambda *args: without(None, self.jaxpr, args))(*self.in_avals)
        return self(*args), (), lambda _, *args: self._replace(quiet, self.derived)(*args)

    def _replace(self, jaxpr: Jaxpr, derived: tuple[Derived, ...]) -> "Opened":
        return Opened(self.name, jaxpr, self.sizes, derived, self.batches)


def opened(
    name: str,
    body: Callable[..., Sequence[Any]],
    derived: Sequence[Derived | None],
    args: Sequence[Any],
    batches: bool,
) -> Sequence[Any]:
    """`body(*args)`, whose results, pytrees, have the derivatives of `derived`.

    Where that is None those of the body, which is evaluated again for them.
    """
    jaxpr, out = jax.make_jaxpr(body, return_shape=True)(*args)
    count, consts = len(args), jaxpr.consts
    if consts:  # what the user's functions close over, which derivative rules must not
        args = [*args, *consts]
        jaxpr = jax.make_jaxpr(functools.partial(_evaluated_with, jaxpr, count))(*args)
    sizes = [len(jax.tree.leaves(result)) for result in out]
    groups = [
        Collected(functools.partial(_group, jaxpr, sizes, number)) if d is None else d.of(count)
        for number, d in enumerate(derived)
    ]
    outs = Opened(name, jaxpr, tuple(sizes), tuple(groups), batches)(*args)
    structures = [jax.tree.structure(result) for result in out]
    return list(map(jax.tree.unflatten, structures, outs))


def _evaluated(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    return jax.core.eval_jaxpr(jaxpr, jaxpr.consts, *args)


def _evaluated_with(jaxpr: Jaxpr, count: int, *args: Any) -> list[Any]:
    """With the constants of the jaxpr as its last arguments."""
    return jax.core.eval_jaxpr(jaxpr, args[count:], *args[:count])


def _group(jaxpr: Jaxpr, sizes: Sequence[int], number: int, *args: Any) -> list[Any]:
    """One group of the results, evaluated beside the original, which has the side effects."""
    check_no_references(args)
    live = [i == number for i, size in enumerate(sizes) for _ in range(size)]
    walk = Walk()
    actions = (None,) * len(walk.entries(jaxpr))
    outs = Replay(walk, effects=False).run(jaxpr, args, actions, (), live).outs
    return _grouped(outs, sizes)[number]


def _grouped(flat: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], ...]:
    rest = iter(flat)
    return tuple([next(rest) for _ in range(size)] for size in sizes)


def _merged(logs: dict[str, Any], new: dict[str, Any] | None) -> dict[str, Any]:
    if twice := sorted(set(logs) & set(new or ())):
        raise UnsupportedError(
            f"the backward-pass log {twice[0]!r} is made twice: by the derivative rule of a "
            "function, and by what was collected inside of it, which is differentiated as it is "
            "computed; use `jax.lax.stop_gradient` on what is collected, or another log key"
        )
    return {**logs, **(new or {})}


# -------------------------------------------------------------------------------- batches


def mapped(
    fn: Callable[..., list[Any]], axis_data: Any, args: Sequence[Any], dims: Sequence[Any]
) -> tuple[Jaxpr, list[Any]]:
    """`fn` over one axis of its arguments, and the axis that each of its results has (or None)."""
    axes: list[Any] = []

    def batched(*args: Any) -> list[Any]:
        left: list[Any] = []

        def note(values: Sequence[Any], dims: Sequence[Any]) -> None:
            left[:], axes[:] = values, dims

        def example(*args: Any) -> tuple[()]:
            outs = fn(*args)
            note(outs, [None] * len(outs))  # unless `vmap` tells otherwise
            _Leave(map(jax.typeof, outs), note)(*outs)
            return ()

        vmap_rule(axis_data, example, tuple(dims), ())(*args)
        return left

    return jax.make_jaxpr(batched)(*map(jax.typeof, args)), axes


class _Leave(HiPrim):
    """Takes values out of a `vmap` as they are, with the axes that it has given them."""

    note: Callable[[Sequence[Any], Sequence[Any]], None]

    def __init__(self, avals, note):
        self.in_avals, self.out_aval = tuple(avals), ()
        self.params = {"note": note}
        super().__init__()

    def expand(self, *values):
        return ()

    def batch(self, axis_data, args, dims):
        self.note(args, dims)
        return (), ()
