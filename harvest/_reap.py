"""Collecting: `reap`, `capture` and `sites`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import _compat
from ._checks import check_mode
from ._errors import warn
from ._expansion import why_without_program
from ._fit import Mode
from ._interpreter import Replay
from ._plan import Plan, plan_reads, resolve, sites_of
from ._select import is_static, pairs_of
from ._sites import Sites
from ._stage import Program, Transformed, trace_afresh, trace_cached
from ._structure import is_typed


def reap(
    fn: Callable[..., Any], select: Any = None, *, mode: Mode = "strict"
) -> Callable[..., Any]:
    """As `fn`, but returns what it sows.

    Only what the asked-for values need is computed (side effects of `fn`, and what feeds them,
    are kept). As `reap` of Oryx, or `run_with_cache` of TransformerLens without the logits;
    `reap(fn, "resid_post")` is also its `stop_at_layer`: what comes later is not computed.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def model(x):
            layer = lambda x, w: (harvest.sow(jnp.tanh(w * x), name="h"), None)
            return jax.lax.scan(layer, x, jnp.arange(4.0))[0]

        acts = harvest.reap(model)(jnp.ones(3))
        assert acts["h"].shape == (4, 3)  # stacked over the layers
        ```

    **Arguments:**

    - `fn`: any callable: a function, a partial, a bound method, an Equinox module. As by `jax.jit`,
        it is told apart by identity (a module by its structure), and traced once for each structure
        and types of its arguments. Arrays and, among arguments, Python floats are traced;
        everything else is static, and must be hashable.
    - `select`: which sites: `None` (all), a key or a glob (`*` and `?` stop at `/`, `**` crosses
        it: `**/h` is every `h`), a predicate that takes a [`harvest.Site`][] (such as
        [`harvest.has_type`][]), a jaxtyping annotation, or a sequence of these. Or a mapping from
        these to reducers, of which the first that matches counts: `None` (the value as it is), a
        function of the value, a fold over loop iterations ([`harvest.Fold`][]), or a tuple of
        these, for a tuple of results. A reducer runs at the site, inside the loops, for one
        example of a batch and in one shard of a `shard_map`, so that the whole values are never
        kept.
    - `mode`: in `"strict"`, each key stands for one site. In `"append"`, values are tuples of all
        occurrences in call order.

    **Returns:**

    A function of the arguments of `fn` that returns a dict `{key: value}`, in call order. Arrays
    are of shape `(*loops, *batch, *shape)`: the axes of the loops around the site, outermost first,
    then those that `vmap` added, then their own. A
    `vmap` *around* `reap` adds its axis in front of all, as `vmap` always does; it also keeps apart
    the branches of a `cond` with a batched predicate, which a `vmap` inside turns into a `select`:
    both of its branches look as if they ran.

    **Raises:**

    - [`harvest.DuplicateSiteError`][]: in strict mode, a selected key is sown more than once.
    - [`harvest.UnknownSiteError`][]: a key or glob in `select` matches nothing.
    - [`harvest.UnsupportedError`][]: a selected site is in a structure that cannot be opened.
    - [`harvest.SelectError`][]: `select` or `mode` is of the wrong type.
    """
    return Reap(fn, select, mode)


def capture(
    fn: Callable[..., Any], select: Any = None, *, mode: Mode = "append"
) -> Callable[..., Any]:
    """As `fn`, but returns what it sows beside its result.

    As `call_and_reap` of Oryx, `capture_intermediates` of Flax, or `run_with_cache` of
    TransformerLens. Custom derivative rules still apply to the result.

    !!! Example

        ```python
        import harvest

        def f(x):
            x = harvest.sow(x + 1, name="h")
            return harvest.sow(2 * x, name="h")

        out, collected = harvest.capture(f)(1.0)
        assert out == 4 and collected["h"] == (2, 4)
        ```

    **Arguments:**

    - `fn`, `select`: as for [`harvest.reap`][].
    - `mode`: in `"append"` (the default here), values are tuples of all occurrences in call order;
        in `"strict"` each key stands for one site.

    **Returns:**

    A function of the arguments of `fn` that returns `(out, {key: (value, ...)})`.

    **Raises:**

    As [`harvest.reap`][].
    """
    return Capture(fn, select, mode)


def sites(fn: Callable[..., Any]) -> Callable[..., Sites]:
    """As `fn`, but returns a table of what it would sow, without running anything.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def model(x):
            layer = lambda x, _: (harvest.sow(jnp.tanh(x), name="h"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        print(harvest.sites(model)(jnp.ones(3)))
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].

    **Returns:**

    A function of the arguments of `fn` (arrays or their types: a `jax.ShapeDtypeStruct`, or what
    `jax.typeof` returns) that returns [`harvest.Sites`][]. Sites in structures that cannot be
    opened are in the table too.

    **Raises:**

    - [`harvest.UnsupportedError`][]: `fn` cannot be traced, such as a generator.

    A [`harvest.HarvestWarning`][] names each `HiPrim` that cannot be looked into.
    """
    return SitesOf(fn)


class _Read(NamedTuple):
    program: Program
    outs: list[Any]
    collected: list[tuple[str, Any]]
    warnings: tuple[str, ...]


class _Reading(Transformed):
    """What `reap` and `capture` have in common."""

    _dynamic = ("fn", "reducers")
    _static = ("select", "mode")
    _what: str

    def __init__(self, fn: Callable[..., Any], select: Any, mode: Mode):
        super().__init__(fn, self._what)
        check_mode(mode)
        self.select, self.reducers = pairs_of(select)
        self.mode: Mode = mode

    def _resolved(self, args, kwargs, trace):
        if is_static(self.select) or trace is trace_afresh:
            return self
        program = trace(self._what, self.fn, args, kwargs)
        entries = program.walk.entries(program.jaxpr)
        select = tuple(resolve(s, entries, True, self._what) for s in self.select)
        return self._with(select=select)

    def _read(self, args, kwargs, trace, live: bool) -> "_Read":
        program = trace(self._what, self.fn, args, kwargs)
        pairs = list(zip(self.select, self.reducers, strict=True))
        plan = plan_reads(program.walk.entries(program.jaxpr), pairs, self.mode, self._what)
        # What others may collect is kept for them.
        outs, reads = Replay(program.walk, marks=_compat.WATCHED.value).run(
            program.jaxpr,
            program.leaves,
            plan.actions,
            (),
            (live,) * len(program.jaxpr.outvars),
        )
        return _Read(program, outs, collected(plan, reads, self.mode), plan.warnings)


class Reap(_Reading):
    _what = "reap"

    def _finish(self, value):
        return dict(value)

    def _inline(self, args, kwargs, trace):
        read = self._read(args, kwargs, trace, live=False)
        return read.collected, read.warnings


class Capture(_Reading):
    _what = "capture"

    def _finish(self, value):
        out, collected = value
        return out, dict(collected)

    def _inline(self, args, kwargs, trace):
        read = self._read(args, kwargs, trace, live=True)
        return (read.program.result(read.outs), read.collected), read.warnings


class SitesOf(Transformed):
    def __init__(self, fn: Callable[..., Any]):
        super().__init__(fn, "sites")

    def __call__(self, *args, **kwargs):
        trace = trace_afresh if _compat.tracing() else trace_cached
        program = trace("sites", self.fn, args, kwargs, is_dynamic=is_typed)
        table = sites_of(program.walk.entries(program.jaxpr))
        for eqn, error in program.walk.unseen:
            reason = why_without_program(_compat.hi_prim(eqn), error)
            warn(f"the table does not have what is sown inside {reason}")
        return table


def collected(plan: Plan, reads: Sequence[Any], mode: Mode) -> list[tuple[str, Any]]:
    """Pairs of key and value, in call order."""
    collected: dict[str, list[Any]] = {}
    for (entry, reading), read in zip(plan.reads, reads, strict=True):
        collected.setdefault(entry.key, []).append(reading.result(entry, read))
    if mode == "strict":
        return [(key, value) for key, (value,) in collected.items()]
    return [(key, tuple(values)) for key, values in collected.items()]
