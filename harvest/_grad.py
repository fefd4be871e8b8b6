"""Differentiating with respect to sown values: `grad` and `value_and_grad`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _compat, _types
from ._checks import check_mode
from ._edit_nodes import Edit
from ._entry import CondSum, Entry
from ._errors import GradError
from ._fit import Mode, known
from ._fold import Fold
from ._interpreter import Replay
from ._markers import mark
from ._plan import resolve
from ._plan_probes import ProbePlan, is_sum, plan_probes
from ._probe import (
    BRANCH,
    ReducedProbe,
    as_tangent,
    has_derivative,
    over_cotangents,
    probing,
    reducing,
    zeros_at,
)
from ._reap import reap
from ._select import is_static, pairs_of
from ._stage import Place, Program, Transformed, trace_afresh
from ._structure import Packed, Structure, is_array, is_held


def grad(
    fn: Callable[..., Any],
    select: Any = None,
    *,
    argnums: int | Sequence[int] = (),
    mode: Mode = "strict",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `jax.grad`, but with respect to sown values.

    One backward pass gives the gradients at all sites, through the structures that `reap` goes
    through. Custom derivative rules still apply, as they do in `jax.grad`.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def loss(x):
            layer = lambda x, w: (harvest.sow(w * x, name="h"), None)
            return jax.lax.scan(layer, x, jnp.array([2.0, 3.0, 4.0]))[0]

        assert harvest.grad(loss)(1.0)["h"].tolist() == [12, 4, 1]  # what comes behind each layer
        at_sites, at_x = harvest.grad(loss, argnums=0)(1.0)
        assert at_x == 24
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][]; it returns a real scalar, or with `has_aux` a pair of a
        scalar and anything else.
    - `select`: as for [`harvest.reap`][]; a reducer applies to the gradient. A function runs in
        the backward pass, inside the loops, so that whole gradients are never kept; a fold combines
        the stacked gradient. Leaves without derivative are None to them.
    - `argnums`: arguments of `fn` to differentiate with respect to as well, in the same backward
        pass: an int or a sequence of ints. Their leaves that are no floating-point arrays get None,
        as from `equinox.filter_grad`.
    - `mode`: as for [`harvest.reap`][]: tuples of all occurrences in `"append"`.
    - `has_aux`: whether `fn` returns a pair, the second item of which is passed on.

    **Returns:**

    A function of the arguments of `fn` that returns a dict `{key: gradient}`, in call order. A
    gradient has the form in which `reap` returns the value: zeros where the result does not depend
    on the site, or where it did not run (a branch of a `cond` that is not taken); `float0` for
    integers, as in JAX, and None for static leaves. With `argnums`, a pair of that and the
    gradients of the arguments; with `has_aux`, a pair of all that and the second item.

    What `fn` sows can still be collected: `capture(grad(fn))` returns gradients and values.

    **Raises:**

    - [`harvest.GradError`][]: the result of `fn` is no real scalar, or `argnums` no arguments that
        can be differentiated.
    - [`harvest.UnsupportedError`][]: a selected site is in a `while_loop`.
    - As [`harvest.reap`][].
    """
    return Grad(fn, select, argnums, mode, has_aux, with_value=False)


def value_and_grad(
    fn: Callable[..., Any],
    select: Any = None,
    *,
    argnums: int | Sequence[int] = (),
    mode: Mode = "strict",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, but with respect to sown values: see [`harvest.grad`][].

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def loss(x):
            return jnp.sum(harvest.sow(2 * x, name="h") ** 2)

        value, grads = harvest.value_and_grad(loss)(jnp.array([1.0, 2.0]))
        assert value == 20 and grads["h"].tolist() == [4, 8]
        ```

    **Arguments:**

    As [`harvest.grad`][].

    **Returns:**

    A function of the arguments of `fn` that returns a pair of its result (with `has_aux`, both
    items of it) and the gradients.

    **Raises:**

    As [`harvest.grad`][].
    """
    return Grad(fn, select, argnums, mode, has_aux, with_value=True)


class Grad(Transformed):
    _dynamic = ("fn", "reducers")
    _static = ("select", "mode", "argnums", "has_aux", "with_value")

    def __init__(self, fn, select, argnums, mode: Mode, has_aux: bool, with_value: bool):
        super().__init__(fn, "grad")
        check_mode(mode)
        self.select, self.reducers = pairs_of(select)
        self.argnums = argnums if isinstance(argnums, int) else tuple(argnums)
        self.mode: Mode = mode
        self.has_aux, self.with_value = has_aux, with_value

    def _resolved(self, args, kwargs, trace):
        if is_static(self.select) or trace is trace_afresh:
            return self
        program = trace("grad", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        return self._with(select=tuple(resolve(s, entries, False, "grad") for s in self.select))

    def _finish(self, value):
        (result, aux), (at_sites, at_args) = value
        grads = dict(at_sites)
        if self.argnums != ():
            grads = (grads, at_args[0] if isinstance(self.argnums, int) else at_args)
        if not self.with_value:
            return (grads, aux) if self.has_aux else grads
        return ((result, aux) if self.has_aux else result), grads

    def _inline(self, args, kwargs, trace):
        program = trace("grad", self.fn, args, kwargs, planting=True)
        pairs = list(zip(self.select, self.reducers, strict=True))
        plan = plan_probes(program.walk.entries(program.jaxpr), pairs, self.mode, "grad")
        plan = plan._replace(actions=[action and BRANCH for action in plan.actions])
        sites = [DifferentiatedSite.of(probed.entry, probed.reducer) for probed in plan.probed]
        places = _places(program, self.argnums, len(args))
        inputs = {p: jnp.asarray(program.leaves[p]) for tree in places for p in _positions(tree)}
        split = functools.partial(value_and_aux, has_aux=self.has_aux)
        done = backward_pass(program, plan, sites, inputs, split)
        branches = iter(done.reads)
        at_sites: dict[str, list[Any]] = {}
        for site, ct in zip(sites, done.cts, strict=True):
            branch = next(branches) if is_sum(site.entry) else None
            at_sites.setdefault(site.entry.key, []).append(site.result(ct, branch))
        at_args = tuple(_filled(tree, done.at_inputs) for tree in places)
        result = (done.value, done.aux), (self._by_key(at_sites), at_args)
        return result, plan.warnings

    def _by_key(self, values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
        if self.mode == "strict":
            return [(key, value) for key, (value,) in values.items()]
        return [(key, tuple(items)) for key, items in values.items()]


class BackwardPass(NamedTuple):
    value: Any
    aux: Any
    reads: list[Any]  # what the plan reads
    cts: list[Any]  # for each site
    at_inputs: dict[int, Any]  # gradients, for each chosen argument of the program


def backward_pass(
    program: Program,
    plan: ProbePlan,
    sites: "Sequence[DifferentiatedSite]",
    inputs: dict[int, Any],
    split: Callable[[Any], tuple[Any, Any]],
) -> BackwardPass:
    """Differentiate the first item of `split(result)` by the sites, and by some arguments."""

    def scalar(eps: Any, inputs: Any) -> Any:
        actions = list(plan.actions)
        for probed, site, e in zip(plan.probed, sites, eps, strict=True):
            actions[probed.position] = site.edit(e)
        leaves = [inputs.get(i, leaf) for i, leaf in enumerate(program.leaves)]
        live = (True,) * len(program.jaxpr.outvars)
        outs, reads = Replay(program.walk).run(program.jaxpr, leaves, actions, (), live)
        value, aux = split(program.result(outs))
        return value, (Packed.pack(aux, is_held), [read for (read,) in reads])

    differentiate = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)
    (value, (aux, reads)), (cts, grads) = differentiate([site.eps for site in sites], inputs)
    return BackwardPass(value, aux.unflatten(), reads, cts, grads)


def value_and_aux(result: Any, has_aux: bool = False, what: str = "grad") -> tuple[Any, Any]:
    """The scalar that a function returns, and what it returns beside."""
    if has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
        raise GradError(
            f"`{what}(..., has_aux=True)` got a result of type {_types.describe(result)}; wanted a "
            "pair of a scalar and anything else"
        )
    value, aux = result if has_aux else (result, None)
    if isinstance(value, float) or is_array(value):
        array = jnp.asarray(value)
        if not array.shape and jnp.issubdtype(array.dtype, jnp.floating):
            return array, aux
    raise GradError(
        f"`{what}` got a result of type {_types.describe(value)}; wanted a real scalar: reduce it "
        "inside of the function, as by `jnp.sum`"
    )


# ----------------------------------------------------------------------------- arguments


def _places(program: Program, argnums: int | tuple[int, ...], count: int) -> list[Any]:
    """For each argument to differentiate, a tree of the places of its floating-point arrays."""
    trees = []
    for argnum in (argnums,) if isinstance(argnums, int) else argnums:
        if not isinstance(argnum, int) or not -count <= argnum < count:
            raise GradError(
                f"`grad` got `argnums={argnums}` in a call with {count} positional arguments"
            )

        def place(leaf: Any) -> Any:
            is_place = isinstance(leaf, Place)
            return leaf if is_place and _is_inexact(program.leaves[leaf.position]) else None

        tree = jax.tree.map(place, program.places(argnum), is_leaf=lambda x: isinstance(x, Place))
        if not _positions(tree):
            raise GradError(
                f"`grad` got `argnums={argnums}`, but argument {argnum} has no floating-point "
                "array with respect to which to differentiate"
            )
        trees.append(tree)
    return trees


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _positions(tree: Any) -> list[int]:
    places = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Place))
    return [place.position for place in places]


def _filled(tree: Any, grads: dict[int, Any]) -> Any:
    is_place = lambda x: isinstance(x, Place)
    return jax.tree.map(lambda place: grads[place.position], tree, is_leaf=is_place)


# --------------------------------------------------------------------------------- sites


class DifferentiatedSite(NamedTuple):
    """How one site is differentiated."""

    entry: Entry
    reducer: Any  # of the gradient
    eps: Any  # what is differentiated
    edit: Callable[[Any], Edit]  # of an `eps`

    @staticmethod
    def of(entry: Entry, reducer: Any) -> "DifferentiatedSite":
        fn = Together(reducer) if isinstance(reducer, tuple) else reducer
        reduced = _reduced_zeros(entry, fn)
        if reduced is None:
            return DifferentiatedSite(
                entry, reducer, zeros_at(entry), lambda eps: probing(entry, eps)
            )
        make = lambda eps: ReducedProbe(fn, eps)
        return DifferentiatedSite(entry, fn, reduced, lambda eps: probing(entry, eps, make))

    def result(self, ct: Any, branch: Any) -> Any:
        """The gradient, from the cotangent of `eps`."""
        if isinstance(ct, Packed):
            reduced, there_is = ct.unflatten()
            return _where_there_is(reduced, there_is, self.entry, self.reducer)
        if self.reducer is None:
            return _gradient(self.entry, self.entry.type, ct, branch)
        name = self.entry.marker.label.name
        return reap(_sowing(self.entry), {name: self.reducer})(ct, branch)[name]


class Together(eqx.Module):
    """Reducers as one."""

    fns: tuple[Any, ...]

    def __call__(self, value):
        return tuple(fn(value) for fn in self.fns)


def _reduced_zeros(entry: Entry, reducer: Any) -> Packed | None:
    """Zeros of what a reducer makes of a cotangent, if that can be done in the backward pass."""
    fns = reducer.fns if isinstance(reducer, Together) else (reducer,)
    if is_sum(entry) or not all(callable(fn) and not isinstance(fn, Fold) for fn in fns):
        return None
    marker = entry.marker
    avals = [
        _types.moved(aval, axes) if has_derivative(aval) else None
        for aval, axes in zip(marker.in_avals, marker.positions, strict=True)
    ]
    fn = reducing(reducer, marker.label.structure, marker.positions)
    try:
        packed = jax.eval_shape(fn, avals)
    except Exception as error:
        error.add_note(f"harvest: raised by the reducer of {entry.describe()}")
        raise
    if len(packed.leaves) == 1 or not all(map(has_derivative, packed.leaves)):
        return None  # a cotangent is a floating-point array
    for length in reversed(known(entry.loops)):
        packed = jax.tree.map(functools.partial(_types.stacked, length=length), packed)
    return jax.tree.map(_compat.zeros, packed)


def _where_there_is(reduced: Any, there_is: Any, entry: Entry, reducer: Any) -> Any:
    """What a reducer made of cotangents, and what it makes of zeros where there was none."""
    marker = entry.marker
    packed = Packed.pack(reduced)

    def filled() -> list[Any]:
        zeros = [
            _compat.zeros(_types.unbatched(aval, axes)) if has_derivative(aval) else None
            for aval, axes in zip(marker.in_avals, marker.positions, strict=True)
        ]
        of_zeros = Packed.pack(reducer(as_tangent(marker.label.structure, zeros)))
        return list(map(where, packed.leaves, of_zeros.leaves))

    def where(leaf: Any, of_zeros: Any) -> Any:
        mask = jnp.expand_dims(there_is > 0, tuple(range(there_is.ndim, leaf.ndim)))
        return jnp.where(mask, leaf, jnp.asarray(of_zeros, leaf.dtype))

    leaves = lax.cond(jnp.all(there_is > 0), lambda: packed.leaves, filled)
    return Packed(leaves, packed.structure).unflatten()


def _gradient(entry: Entry, type: Any, ct: Any, branch: Any) -> Any:
    """The gradient at an entry, in the form in which its value is read."""
    if entry.summed:
        rows = zip(entry.branches or (), type.branches, ct.branches, branch.branches, strict=True)
        return CondSum(branch.index, tuple(b and _gradient(b, t, c, r) for b, t, c, r in rows))
    if entry.branches is not None:
        return _gradient(next(filter(None, entry.branches)), type, ct, branch)
    leaves = [
        np.zeros(aval.shape, jax.dtypes.float0) if leaf is None else leaf
        for aval, leaf in zip(type, ct, strict=True)
    ]
    return as_tangent(entry.marker.label.structure, leaves)


def _sowing(entry: Entry) -> Callable[[Any, Any], Any]:
    """A function that sows a gradient as the program sows the value: in loops and branches."""
    step: Callable[[Any, Any], Any]
    if entry.summed:
        inside = [b and _sowing(b) for b in entry.branches or ()]

        def switched(ct: Any, branch: Any) -> None:
            rows = zip(inside, ct.branches, branch.branches, strict=True)
            sows = [functools.partial(s, c, b) if s else lambda: None for s, c, b in rows]
            lax.switch(branch.index, sows)

        step = switched
    elif entry.branches is not None:
        step = _sowing(next(filter(None, entry.branches)))
    else:
        label = entry.marker.label

        def example(cts: list[Any]) -> None:
            leaves, structure = Structure.flatten(as_tangent(label.structure, cts), is_array)
            mark(leaves, dataclasses.replace(label, structure=structure), ((),) * len(leaves))

        step = lambda ct, branch: over_cotangents(example, entry.marker.positions)(ct)
    for length in reversed(known(entry.around)):
        step = functools.partial(_looped, step, length)
    return step


def _looped(step: Callable[[Any, Any], Any], length: int, ct: Any, branch: Any) -> None:
    lax.scan(lambda _, x: (None, step(*x)), None, (ct, branch), length=length)
