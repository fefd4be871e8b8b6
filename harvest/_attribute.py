"""A grid of interventions to first order, from one backward pass: `attribute`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat, _types
from ._apply import apply_edit
from ._differentiate import DifferentiatedSite, backward_pass, value_and_aux
from ._edit_nodes import Edit, Loop
from ._entry import Entry
from ._errors import GradError, UnsupportedError
from ._experiments import Cells, Experiment, Experiments
from ._fit import known
from ._fork import Cell
from ._interpreter import Replay
from ._markers import Tag, mark
from ._plan_probes import plan_probes, with_reads
from ._probe import has_derivative
from ._walk import Walk


def attribute(
    fn: Callable[..., Any], source: Any, edit: Any, grid: Any = None, *, batch_size: int = 32
) -> Callable[..., Any]:
    """As [`harvest.sweep`][], but to first order, from one forward and one backward pass.

    Attribution patching (Nanda, 2023, "Attribution patching: activation patching at industrial
    scale"): what `fn` returns, plus the gradient at a site times what an edit changes there. Good
    where `fn` is nearly linear in a site, such as the output of one head; poor for a whole residual
    stream. Where a custom derivative rule is not the derivative, the estimate follows the rule.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):
            return harvest.sow(2 * x, name="h").sum() ** 2

        add = lambda h, row: h.at[row["pos"]].add(0.01)
        args = ("h", add, harvest.grid(pos=jnp.arange(3)))
        exact = harvest.sweep(f, *args)(jnp.ones(3))["h"]
        estimate = harvest.attribute(f, *args)(jnp.ones(3))["h"]
        assert exact.shape == estimate.shape == (3,)
        assert jnp.allclose(estimate, 36 + 2 * 6 * 0.01) and jnp.allclose(exact, 6.01**2)
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][]; it returns a real scalar.
    - `source`, `edit`, `grid`, `batch_size`: as for [`harvest.sweep`][]. Edits need not be
        differentiable. What they change in integers next to other arrays counts for nothing.

    **Returns:**

    A function of the arguments of `fn` that returns what `sweep` returns, estimated.

    **Raises:**

    - [`harvest.GradError`][]: the result of `fn` is no real scalar, or a site has no derivative.
    - As [`harvest.sweep`][].
    """
    return Attribute(fn, source, edit, grid, batch_size)


class Attribute(Experiments):
    _what = "attribute"

    def _inline(self, args, kwargs, trace):
        program = trace("attribute", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        experiments = self._experiments(entries)
        _check_readable(experiments, entries)
        plan = with_reads(
            plan_probes(entries, [(self.select, None)], "strict", "attribute"), entries
        )
        sites = [DifferentiatedSite.of(e.entry, None) for e in experiments]
        split = functools.partial(value_and_aux, what="attribute")
        done = backward_pass(program, plan, sites, {}, split)
        cells = Cells(self.grid.shape, self.batch_size, lambda count: None)
        zero, reads, results = jnp.zeros_like(done.value), iter(done.reads), []
        for experiment, grads in zip(experiments, done.cts, strict=True):
            # A value without arrays has neither a tangent nor anything to read.
            values = next(reads) if experiment.entry.marker.in_avals else []
            lengths = known(experiment.entry.loops)
            cell = _estimate(experiment, values, grads, zero) if all(lengths) else lambda *_: zero
            results.append((experiment.entry.key, done.value + cells(lengths, cell)))
        return results, plan.warnings


def _check_readable(experiments: Sequence[Experiment], entries: Sequence[Entry]) -> None:
    """Raise if of any site there is no value or no derivative."""
    for entry in (e.entry for e in experiments):
        avals = entry.marker.in_avals
        if avals and not any(map(has_derivative, avals)):
            raise GradError(
                f"`attribute`: {entry.describe()} has no real or complex numbers, and so no "
                "derivative; use `harvest.sweep`"
            )
    readable = {entry.key for entry in entries if entry.readable}
    for entry in (e.entry for e in experiments):
        if entry.key not in readable:
            raise UnsupportedError(
                f"`attribute`: {entry.describe()} is collected inside of the function, by `reap` "
                "or `capture`, which leaves no value to read; select there what the result needs"
            )


def _estimate(experiment: Experiment, values: list[Any], grads: list[Any], zero: Any) -> Cell:
    """What an edit changes, times the gradient, as a sum that starts with `zero`."""
    entry = experiment.entry
    marker, lengths = entry.marker, known(entry.loops)

    def cell(index: Any, number: Any) -> Any:
        edit = experiment.edit(index, number)
        if entry.crossed:
            return change(index, edit, values, grads, zero)
        with _compat.mesh_of(marker.in_avals):
            estimate = change(*_compat.in_this_mesh((index, edit, values, grads, zero)))
        return _compat.in_this_mesh(estimate)

    def change(index: Any, edit: Edit, values: Any, grads: Any, zero: Any) -> Any:
        here = [value[index] for value in values]
        edited = _edited(entry, edit, here, tuple(map(Loop, index, lengths)))
        changes = (
            # What is left alone may be infinite, as a masked score is.
            jnp.sum(jnp.where(new == old, 0, (new - old) * grad[index])).real.astype(zero.dtype)
            for new, old, grad in zip(edited, here, grads, strict=True)
            if grad is not None
        )
        return sum(changes, zero)

    return cell


def _edited(entry: Entry, edit: Edit, values: list[Any], loops: tuple[Loop, ...]) -> list[Any]:
    """What an edit makes of a value of one iteration, which has the axes of batches in front."""
    marker = entry.marker
    if not entry.crossed:
        before = _types.axes_from_front(values, marker.positions, marker.in_avals)
        after = apply_edit(edit, marker, before, loops, entry.describe())
        return _types.axes_to_front(after, marker.positions)

    # A site of the same kind in the same `shard_map`s, where the edit sees what it is made for.
    def sown(values: Sequence[Any], /) -> list[Any]:
        before = _types.axes_from_front(values, marker.positions, marker.in_avals)
        return _types.axes_to_front(mark(before, marker.label, marker.positions), marker.positions)

    for shards, layouts in reversed(entry.crossed):
        sown = shards.around(sown, layouts)
    with _compat.PLANTING(True):
        jaxpr = jax.make_jaxpr(sown)(list(map(jax.typeof, values)))
    walk = Walk()
    actions = [edit if isinstance(e.marker, Tag) else None for e in walk.entries(jaxpr)]
    replay = Replay(walk, marks=False)
    return replay.run(jaxpr, values, actions, loops, (True,) * len(values)).outs
