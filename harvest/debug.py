"""Finding faults: where the first NaN is."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from . import _compat
from ._checks import numbered
from ._entry import Entry
from ._errors import UnsupportedError
from ._faults import Watched, range_of, report
from ._interpreter import Replay
from ._placement import fetched
from ._plan import plan_reads, resolve
from ._reading import Reading
from ._report import Fault as Fault
from ._report import Range as Range
from ._report import Report as Report
from ._rewrite import as_watched, rewritten
from ._same_program import assert_same_program as assert_same_program
from ._select import Chosen, check_select, is_static
from ._stage import Program, Transformed, trace_afresh, trace_cached
from ._upstream import Upstream, variants
from ._walk import Walk
from ._watch import Noted, Watch, WatchEquation, stats_of
from ._where import choose

__all__ = ["Fault", "Range", "Report", "assert_same_program", "nonfinite"]


def nonfinite(
    fn: Callable[..., Any], select: Any = None, *, infinities: bool = False, eqns: bool = False
) -> Callable[..., Report]:
    """As `fn`, but returns which of the values it sows is the first to hold a NaN.

    Or, with `eqns=True`, which of all its equations is the first that makes one.

    Unlike `jax.debug_nans`, it runs `fn` compiled, and once: each site is reduced to flags inside
    the program, so that it can be a whole training step. In a `value_and_grad` it also sees the
    cotangents that [`harvest.perturb`][] makes visible.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def loss(x):
            x = harvest.perturb(x, name="x")
            return harvest.sow(jnp.sqrt(x), name="root").sum()

        x = jnp.array([0.0, 1.0])
        assert not harvest.debug.nonfinite(loss)(x)
        assert not harvest.debug.nonfinite(jax.value_and_grad(loss))(x)  # it is infinite at 0
        print(harvest.debug.nonfinite(jax.value_and_grad(loss), infinities=True)(x))

        unmarked = lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))
        (fault,) = harvest.debug.nonfinite(jax.grad(unmarked), eqns=True)(x - 1)
        assert fault.primitive == "sqrt" and fault.element == (0,)
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `select`: the sites to watch, as for [`harvest.reap`][], without reducers.
    - `infinities`: whether infinities are faults as well. A masked attention score is none.
    - `eqns`: whether to watch all equations of the program (with `select`, those of its keys as
        [`harvest.sow_eqns`][] sows them) instead of what it sows. Nothing in `fn` need be sown, and
        it compiles more slowly. The fault is the first equation whose output holds a NaN and whose
        inputs do not: so an argument or a constant array that holds one is none. An equation with
        others inside is those; what is compiled as a whole, such as a `pallas_call`, is one, and so
        is a `while_loop` in another one that `vmap` batched (there is a warning).

    **Returns:**

    A function of the arguments of `fn` that returns a [`harvest.debug.Report`][] of the first site,
    in the order in which they run, that holds a NaN: with the iteration, the example of a batch,
    the user's line, and the ranges of the values it comes from. And of the first such cotangent.
    With `eqns`, of the first such equation.

    **Raises:**

    - [`harvest.UnsupportedError`][]: it is called under `jit` or another transform, where there are
        no values yet: put it outside, around the transformed function.
    - As [`harvest.reap`][].
    """
    return Nonfinite(fn, select, infinities, eqns)


class Nonfinite(Transformed):
    _static = ("select", "infinities", "eqns")

    def __init__(self, fn: Callable[..., Any], select: Any, infinities: bool, eqns: bool):
        super().__init__(fn, "debug.nonfinite")
        self.select, self.infinities, self.eqns = check_select(select), infinities, eqns

    def __call__(self, *args, **kwargs):
        if _compat.tracing():
            raise UnsupportedError(
                "`debug.nonfinite` was called under `jit` or another transform, and has no values "
                "to report on; put it outside: `debug.nonfinite(jax.jit(fn))(...)`"
            )
        with jax.debug_nans(False), jax.debug_infs(False):  # empty ranges are infinite
            watched, found = super().__call__(*args, **kwargs)
            ranges = functools.partial(self._ranges, args, kwargs)
            return report(watched, fetched(found), ranges, "equation" if self.eqns else "site")

    def _ranges(self, args: Any, kwargs: Any, positions: Sequence[int]) -> list[Range]:
        """Those of some arguments, by their positions among the leaves."""
        program = trace_cached("debug.nonfinite", self.fn, args, kwargs)
        stats = fetched([jax.jit(stats_of)(program.leaves[i]) for i in positions])
        names = program.names()
        return [range_of(names[i], "argument", s) for i, s in zip(positions, stats, strict=True)]

    def _resolved(self, args, kwargs, trace):
        if is_static(self.select) or trace is trace_afresh:
            return self
        program = self._program(args, kwargs, trace)
        entries = program.walk.entries(program.jaxpr)
        return self._with(select=self._chosen(entries))

    def _program(self, args: Any, kwargs: Any, trace: Callable) -> Program:
        program = trace("debug.nonfinite", self.fn, args, kwargs)
        if not self.eqns:
            return program
        jaxpr = program.jaxpr
        choices = choose(jaxpr, None, None) if jaxpr.eqns else None
        return program._replace(jaxpr=rewritten(jaxpr, choices, as_watched), walk=Walk())

    def _chosen(self, entries: Sequence[Entry]) -> Chosen:
        mine = [e for e in entries if (e.marker.label.kind == "equation") == self.eqns]
        mine = [e for e in mine if not (self.eqns and e.blocked)]
        return resolve(self.select, mine, True, "debug.nonfinite")

    def _inline(self, args, kwargs, trace):
        program = self._program(args, kwargs, trace)
        entries = program.walk.entries(program.jaxpr)
        plan = plan_reads(entries, self._watches(entries), "append", "debug.nonfinite")
        actions = [
            Noted.of(action, entry) if isinstance(action, Reading) else None
            for action, entry in zip(plan.actions, entries, strict=True)
        ]
        dead = (False,) * len(program.jaxpr.outvars)
        replay = Replay(program.walk, marks=False)
        _, reads = replay.run(program.jaxpr, program.leaves, actions, (), dead)
        found = [
            reading.result(entry, read)
            for (entry, reading), read in zip(plan.reads, reads, strict=True)
        ]
        warnings = (*plan.warnings, *(_blocked(entries) if self.eqns else ()))
        return (_watched(program, entries, plan.actions), found), warnings

    def _watches(self, entries: Sequence[Entry]) -> list[tuple[Chosen, Watch]]:
        """What is watched, and how."""
        chosen = self._chosen(entries)
        watch = WatchEquation if self.eqns else Watch
        # Where the branches of a `cond` have loops of their own, they are folded.
        uneven = {
            (site.key, site.occurrence): max(map(len, loops))
            for _, entry, site in numbered(entries, readable=True)
            if len(loops := {loops for _, loops in entry.innermost()}) > 1
        }
        return [
            (Chosen(chosen & {site}), watch(self.infinities, depth))
            for site, depth in uneven.items()
        ] + [(chosen, watch(self.infinities))]


def _watched(program: Program, entries: Sequence[Entry], actions: Any) -> tuple[Watched, ...]:
    upstream = Upstream(program.walk, program.jaxpr, [action is not None for action in actions])
    return tuple(
        Watched(
            (position, number),
            entry.key,
            inner.marker.label.kind,
            inner.source or entry.source,
            _known(action, loops),
            _mesh(action, entry),
            upstream.paths[position, number],
            upstream.sources[position, number],
            _shapes(inner),
            inner.marker.label.primitive,
        )
        for position, (entry, action) in enumerate(zip(entries, actions, strict=True))
        if action is not None
        for number, ((_, loops), inner) in enumerate(variants(entry).items())
    )


def _blocked(entries: Sequence[Entry]) -> Iterator[str]:
    """Warnings about equations that are not watched."""
    for place in dict.fromkeys(e.blocked for e in entries if e.blocked and e.readable):
        inside = [e for e in entries if e.blocked == place and e.marker.label.kind == "equation"]
        if inside:
            first = f"{inside[0].key!r}, at {inside[0].source}"
            yield (
                f"`debug.nonfinite`: {len(inside)} equations inside of {place} (as {first}) are "
                "not watched, only that as a whole"
            )


def _shapes(entry: Entry) -> tuple[tuple[int, ...], ...]:
    """Those of the outputs of an equation."""
    label = entry.marker.label
    if label.kind != "equation":
        return ()
    outs, _ = label.structure.unflatten(entry.marker.in_avals)
    return tuple(aval.shape for aval in outs)


def _known(action: Any, loops: Sequence[int | None]) -> tuple[bool, ...]:
    """For each loop around a site, whether the results have an axis for it."""
    (part,) = action.parts
    return tuple(not part.level(depth).folded for depth in range(len(loops)))


def _mesh(action: Any, entry: Entry) -> tuple[dict[str, int], ...]:
    """For each axis on which the shards of a result are stacked, the mesh axes and their sizes."""
    (part,) = action.parts
    varying = frozenset().union(*part.varying)
    stacked = [(shards.mesh.shape, shards.differing(varying)) for shards in entry.shards]
    return tuple({name: shape[name] for name in names} for shape, names in stacked if names)
