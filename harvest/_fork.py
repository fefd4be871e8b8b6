"""Running a program on from its sites, again and again: what comes before is evaluated once."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from . import _compat
from ._edit_nodes import At, Chain, Edit, Loop
from ._entry import Entry
from ._errors import UnsupportedError
from ._interpreter import Actions, Env, Inside, Replay, Step
from ._lowered import on_arrays
from ._markers import is_side_effect

Index = tuple[Any, ...]  # an iteration of the loops around a site, outermost first
Cell = Callable[[Index, Any], Any]  # the result for an iteration and an experiment's number
Rest = Callable[[Sequence[Any]], Any]  # what follows the outputs of an equation


class Target(NamedTuple):
    """A site to edit in each of its iterations, in each of some experiments."""

    key: str
    edit: Callable[[Index, Any], Edit]  # for an iteration and an experiment's number


Targets = dict[int, Target]  # by the position of their entries


class Forks(NamedTuple):
    """The evaluation of a program and, for each target, of what comes after it.

    `over_cells(lengths, cell)` has the results of all iterations of loops of these lengths and all
    experiments, stacked.
    """

    replay: Replay
    over_cells: Callable[[Sequence[int], Cell], Any]
    within: tuple[JaxprEqn, ...] = ()  # the equations around the jaxpr, outermost first

    def run(
        self, jaxpr: Jaxpr, args: Sequence[Any], targets: Targets, live: Sequence[bool], rest: Rest
    ) -> tuple[list[Any], dict[str, Any]]:
        """The outputs of `jaxpr`, and for each target all results of `rest` of them."""
        env = Env(jaxpr, args)
        count = len(self.replay.walk.entries(jaxpr))
        kept = [_KEPT if position in targets else None for position in range(count)]
        steps = self.replay.steps(jaxpr, kept, live)
        results: dict[str, Any] = {}
        for number, step in enumerate(steps):
            here = {
                position - step.first: target
                for position, target in targets.items()
                if 0 <= position - step.first < len(step.entries)
            }
            if not here:
                with self.context():
                    self.replay.advance(step, env, ())
                continue
            _check_references(steps[number:], next(iter(here.values())).key)
            following = _Following(self, env.copy(), steps[number:], live, rest)
            outs, new = self._open(step, env.invals(step.eqn), here, following)
            env.write(step.eqn, outs)
            results.update(new)
        return env.outs(live), results

    def _open(self, step: Step, invals: list[Any], targets: Targets, rest: Rest):
        if _is_plain_jit(step):
            jaxpr = _compat.jit_params(step.eqn).jaxpr
            inside = self._replace(within=(*self.within, step.eqn))
            return inside.run(jaxpr, invals, targets, step.live, rest)
        fork = self._scan if _is_forward_scan(step) else self._masked
        outs, cell_of = fork(step, invals, rest)
        results = {}
        for position, target in targets.items():
            lengths = _lengths(step.entries[position])
            # Without an iteration there is nothing to edit, but results have a type.
            cell = cell_of(position, target) if all(lengths) else lambda index, number: rest(outs)
            results[target.key] = self.over_cells(lengths, cell)
        return outs, results

    def _masked(self, step: Step, invals: list[Any], rest: Rest):
        """Each experiment evaluates the whole equation, and edits one iteration."""

        def cell_of(position: int, target: Target) -> Cell:
            def cell(index: Index, number: Any) -> Any:
                edit = target.edit(index, number)
                edit = At((None,) * len(index), index, edit) if index else edit
                return rest(self._evaluate(step, invals, _only(step, position, edit)))

            return cell

        return self._evaluate(step, invals, (None,) * len(step.entries)), cell_of

    def _evaluate(self, step: Step, invals: list[Any], actions: Actions) -> list[Any]:
        inside = Inside(self.replay, step.entries, actions, (), step.live)
        with self.context():
            return self.replay.evaluate(step.eqn, invals, inside).outs

    def context(self, *eqns: JaxprEqn) -> contextlib.ExitStack:
        """The scopes of the equations around what is evaluated; `rest` is outside of them."""
        context = contextlib.ExitStack()
        for eqn in (*self.within, *eqns):
            context.enter_context(_compat.equation_context(eqn))
        return context

    def _scan(self, step: Step, invals: list[Any], rest: Rest):
        """Each experiment starts in the iteration that it edits, from the plain run's carry."""
        params = _compat.scan_params(step.eqn)
        first, last = params.num_consts, params.num_consts + params.num_carry
        consts, carry, xs = invals[:first], invals[first:last], invals[last:]
        live = (*(True,) * params.num_carry, *step.live[params.num_carry :])
        nothing = (None,) * len(step.entries)

        def iterate(carry, x, i, actions):
            loops = (Loop(i, params.length),)
            args = [*consts, *carry, *x]
            outs = self.replay.run(params.jaxpr, args, actions, loops, live).outs
            return outs[: params.num_carry], outs[params.num_carry :]

        def plain(carry, x):
            after, ys = iterate(carry, x, 0, nothing)
            return after, (carry, ys)

        with self.context(step.eqn), _compat.locating_nans(step.eqn):
            final, (carries, ys) = lax.scan(
                plain, carry, xs, length=params.length, **params.options
            )

        def cell_of(position: int, target: Target) -> Cell:
            def cell(index: Index, number: Any) -> Any:
                start, *inner = index
                edit = target.edit(index, number)
                if inner:
                    edit = At((..., *(None,) * len(inner)), (None, *inner), edit)
                actions = _only(step, position, edit)

                def following(i, state):
                    carry, ys = state
                    carry, new = iterate(carry, _at(xs, i), i, nothing)
                    return carry, _set(ys, i, new)

                with self.context(step.eqn), _compat.locating_nans(step.eqn):
                    start = _compat.in_this_mesh(index[0])
                    carry, new = iterate(_at(carries, start), _at(xs, start), start, actions)
                    state = (carry, _set(ys, start, new))
                    carry, edited = lax.fori_loop(start + 1, params.length, following, state)
                return rest([*carry, *edited])

            return cell

        return [*final, *ys], cell_of


class _Following(NamedTuple):
    """The evaluation of what follows an equation."""

    forks: Forks
    env: Env  # before the equation
    steps: Sequence[Step]  # from the equation on
    live: Sequence[bool]
    rest: Rest

    def __call__(self, outs: Sequence[Any]) -> Any:
        env = self.env.copy()
        step, *later = self.steps
        env.write(step.eqn, outs)
        with self.forks.context():
            for step in later:
                self.forks.replay.advance(step, env, ())
        return self.rest(env.outs(self.live))


_KEPT = Chain(())  # stands for an edit


def _check_references(steps: Sequence[Step], key: str) -> None:
    """Raise if the experiments would write to one reference."""
    for eqn in (step.eqn for step in steps):
        if _compat.uses_refs(eqn):
            raise UnsupportedError(
                f"`sweep`: behind the site {key!r} a mutable reference is used, which all "
                f"experiments would share (`{_compat.primitive_name(eqn)}`, at "
                f"{_compat.source_of(eqn.source_info)}); return the values, or use `jax.lax.map` "
                "over `harvest.plant`"
            )


def _only(step: Step, position: int, edit: Edit) -> Actions:
    return [edit if i == position else None for i in range(len(step.entries))]


def _lengths(entry: Entry) -> tuple[int, ...]:
    return tuple(length for length in entry.loops if length is not None)


def _is_plain_jit(step: Step) -> bool:
    if step.eqn.primitive.name != "jit":
        return False
    params = _compat.jit_params(step.eqn)
    return not any(s is not None for s in (*params.in_shardings, *params.out_shardings))


def _is_forward_scan(step: Step) -> bool:
    if step.eqn.primitive.name != "scan":
        return False
    params = _compat.scan_params(step.eqn)
    effects = any(map(is_side_effect, step.eqn.effects))
    return not effects and not params.options["reverse"]


def _at(stacked: Any, i: Any) -> Any:
    item = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
    return jax.tree.map(functools.partial(on_arrays, item), stacked)


def _set(stacked: Any, i: Any, new: Any) -> Any:
    put = lambda x, n: lax.dynamic_update_index_in_dim(x, n, i, 0)
    return jax.tree.map(functools.partial(on_arrays, put), stacked, new)
