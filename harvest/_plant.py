"""Replacing and editing: `plant`."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ._checks import check_mode
from ._edit_nodes import Edit
from ._entry import Entry
from ._errors import PlantError
from ._fit import Mode
from ._interpreter import Replay
from ._plan import resolve_keys
from ._plan_plants import plan_plants
from ._select import check_select, is_static
from ._stage import Transformed, trace_afresh
from ._structure import Number


def plant(
    fn: Callable[..., Any], plants: Mapping[Any, Any], *, mode: Mode = "strict"
) -> Callable[..., Any]:
    """As `fn`, but with sown values replaced or edited.

    As `plant` of Oryx, or `run_with_hooks` of TransformerLens. New values do not retrace.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            h = harvest.sow(jnp.sin(x), name="h")
            return 2 * h

        assert harvest.plant(f, {"h": jnp.float32(3)})(0.5) == 6
        assert harvest.plant(f, {"h": lambda h: h + 1})(0.0) == 2
        assert harvest.plant(f, harvest.reap(f)(0.5))(0.5) == f(0.5)
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `plants`: a mapping from keys to values or edits; for edits the key may be anything that
        `select` of [`harvest.reap`][] may be. A value has the form in which `reap` returns it,
        `(*loops, *batch, *shape)` (in a `cond`, a `CondSum` or a value for all branches). An edit
        is a callable `value -> value`, such as an Equinox module, or one of [`harvest.replace`][],
        [`harvest.add`][], [`harvest.scale`][], [`harvest.zero`][], [`harvest.at`][],
        [`harvest.indexed`][], [`harvest.each`][], [`harvest.chain`][]; it sees the value of one
        iteration, for one example of a batch and, in a `shard_map`, in one shard (where indices
        are local: mind `jax.lax.axis_index`), and must keep its type.
    - `mode`: in `"strict"`, each key stands for one site. In `"append"`, values are tuples with one
        item for each occurrence, in call order, where `None` leaves an occurrence alone, and an
        edit applies to all occurrences.

    **Returns:**

    A function of the arguments of `fn` that returns its result. What it sows can still be
    collected: `reap(plant(f, {"h": v}))(x)["h"]` is `v`. Nested plants compose, inner first. A
    planted value is a constant to autodiff; an edit differentiates as written.

    **Raises:**

    - [`harvest.UnknownSiteError`][]: a key matches no site.
    - [`harvest.PlantError`][]: a value or an edit is of another tree, shape or dtype than the site.
    - [`harvest.DuplicateSiteError`][]: in strict mode, a key is sown more than once.
    - [`harvest.UnsupportedError`][]: a site is in a structure that cannot be opened.

    To differentiate a planted function, plant first: `jax.grad(plant(f, ...))`. Around a gradient,
    `plant(jax.grad(f), ...)` replaces the values that the backward pass uses, and edits the
    cotangents that [`harvest.perturb`][] makes visible, but derivatives stay those of `f`.

    A [`harvest.HarvestWarning`][] says so if a site feeds nothing (`sow(h, ...)` whose result is
    not used).
    """
    return Plant(fn, plants, mode)


_NUMBERS = (int, float, complex)


def _with_numbers(plant: Any) -> Any:
    if isinstance(plant, Edit) or callable(plant):
        return plant
    return jax.tree.map(lambda leaf: Number(leaf) if type(leaf) in _NUMBERS else leaf, plant)


def _without_numbers(plant: Any) -> Any:
    return jax.tree.map(
        lambda node: node.value if _is_number(node) else node, plant, is_leaf=_is_number
    )


def _is_number(node: Any) -> bool:
    return isinstance(node, Number)


def _nodes(values: Any) -> list[Any]:
    return jax.tree.leaves(values, is_leaf=_is_number)


def _has_numbers(entry: Entry) -> bool:
    structures = [inner.marker.label.structure for inner, _ in entry.innermost()]
    return any(type(leaf) in _NUMBERS for s in structures for leaf in s.statics)


class Plant(Transformed):
    _dynamic = ("fn", "values")
    _static = ("keys", "mode")
    _planted = (("keys", "values"),)

    def __init__(self, fn: Callable[..., Any], plants: Mapping[Any, Any], mode: Mode):
        super().__init__(fn, "plant")
        check_mode(mode)
        if not isinstance(plants, Mapping):
            raise PlantError(
                f"`plants` got {plants!r} of type `{type(plants).__name__}`; wanted a mapping from "
                "keys to values or edits, as `reap` returns it"
            )
        self.keys = tuple(check_select(key, "plants") for key in plants)
        self.values = tuple(map(_with_numbers, plants.values()))
        self.mode: Mode = mode

    def _resolved(self, args, kwargs, trace):
        numbers = any(map(_is_number, _nodes(self.values)))
        if not numbers and (all(map(is_static, self.keys)) or trace is trace_afresh):
            return self
        program = trace("plant", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        # Where Python numbers are sown as they are, those that are planted are not traced.
        static = {entry.key for entry in entries if _has_numbers(entry)}
        resolved = copy.copy(self)
        resolved.keys = tuple(resolve_keys(entries, self.keys))
        resolved.values = tuple(
            _without_numbers(value) if key in static else value
            for key, value in zip(self.keys, self.values, strict=True)
        )
        return resolved

    def _inline(self, args, kwargs, trace):
        program = trace("plant", self.fn, args, kwargs, planting=True)
        pairs = list(zip(self.keys, map(_without_numbers, self.values), strict=True))
        plan = plan_plants(program.walk.entries(program.jaxpr), pairs, self.mode)
        outs, _ = Replay(program.walk).run(
            program.jaxpr,
            program.leaves,
            plan.actions,
            (),
            (True,) * len(program.jaxpr.outvars),
        )
        return program.result(outs), plan.warnings
