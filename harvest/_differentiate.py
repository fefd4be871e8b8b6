"""One backward pass for all sites: what is differentiated, and what comes of the cotangents."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from . import _compat, _types
from ._edit_nodes import Edit
from ._entry import CondSum, Entry
from ._errors import GradError
from ._fit import known
from ._fold import Fold
from ._interpreter import Replay
from ._lowered import raised
from ._markers import Mark
from ._plan_probes import ProbePlan, is_sum
from ._probe import (
    ReducedProbe,
    as_tangent,
    has_derivative,
    over_cotangents,
    probing,
    reducing,
    zero_tangent,
    zeros_at,
)
from ._reap import reap
from ._shards import Layout, Shards
from ._stage import Program
from ._structure import Packed, Structure, is_array, is_held


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
            f"`{what}(..., has_aux=True)` got {_types.describe(result)} as a result; wanted a "
            "pair of a scalar and anything else"
        )
    value, aux = result if has_aux else (result, None)
    if isinstance(value, float) or (is_array(value) and not _compat.is_hi(value)):
        array = jnp.asarray(value)
        if not array.shape and jnp.issubdtype(array.dtype, jnp.floating):
            return array, aux
    pair = what == "grad" and isinstance(value, tuple) and len(value) == 2
    hint = ", or pass `has_aux=True` for a pair of a scalar and anything else" if pair else ""
    raise GradError(
        f"`{what}` got {_types.describe(value)} as a result; wanted a real scalar: reduce it "
        f"inside of the function, as by `jnp.sum`{hint}"
    )


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
        with _compat.mesh_of(self.entry.marker.in_avals):
            return self._result(*_compat.in_this_mesh((raised(ct), branch)))

    def _result(self, ct: Any, branch: Any) -> Any:
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
    if entry.shards:
        return None  # what a function makes of a shard has another place in the mesh
    marker = entry.marker
    tangents = list(map(_types.tangent_of, marker.in_avals))
    hi = [t for a, t in zip(marker.in_avals, tangents, strict=True) if _compat.is_hi_type(a)]
    if not all(t is not None and _compat.is_array_type(t) for t in hi):
        return None  # `jax.custom_vjp` takes no cotangents of hi types
    avals = [
        _types.tangent_of(_types.moved(aval, axes))
        for aval, axes in zip(marker.in_avals, marker.positions, strict=True)
    ]
    fn = reducing(reducer, marker.label.structure, marker.positions)
    try:
        with _compat.mesh_of(marker.in_avals):
            packed = _types.result_types(fn, avals)
    except Exception as error:
        error.add_note(f"harvest: raised by the reducer of {entry.describe()}")
        raise
    are_arrays = all(map(_compat.is_array_type, packed.leaves))
    if len(packed.leaves) == 1 or not are_arrays or not all(map(has_derivative, packed.leaves)):
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
            zero_tangent(_types.unbatched(aval, axes))
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

    def filled(aval: Any, leaf: Any) -> Any:
        return _types.no_tangent(aval) if leaf is None else leaf

    return as_tangent(entry.marker.label.structure, map(filled, type, ct))


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
        first = next(filter(None, entry.branches))
        step = _sowing(dataclasses.replace(first, crossed=entry.crossed))
    else:
        label = entry.marker.label

        def example(cts: list[Any]) -> None:
            leaves, structure = Structure.flatten(as_tangent(label.structure, cts), is_array)
            specs = label.spec and [
                s for s, ct in zip(label.spec, cts, strict=True) if ct is not None
            ]
            here = dataclasses.replace(
                label, structure=structure, spec=specs and tuple(specs), number=None
            )
            # No `Tag`: an outer `plant` is not to reach this.
            Mark(list(map(jax.typeof, leaves)), here, ((),) * len(leaves))(*leaves)

        shard = over_cotangents(example, entry.marker.positions)
        for shards, layouts in reversed(entry.crossed):
            shard = _in_shards(shard, shards, layouts)
        step = lambda ct, branch: shard(ct)
    for length in reversed(known(entry.around)):
        step = functools.partial(_looped, step, length)
    return step


def _in_shards(
    step: Callable[[Any], Any], shards: Shards, layouts: Sequence[Layout]
) -> Callable[[Any], Any]:
    def sharded(cts: Sequence[Any]) -> None:
        pairs = zip(layouts, cts, strict=True)
        mine = [None if ct is None else layout.aligned(ct.ndim) for layout, ct in pairs]

        def body(cts: Sequence[Any]) -> tuple[()]:
            step([layout and layout.enter(ct) for layout, ct in zip(mine, cts, strict=True)])
            return ()

        specs = [layout and layout.spec for layout in mine]
        jax.shard_map(body, in_specs=(specs,), out_specs=(), **shards.options)(cts)

    return sharded


def _looped(step: Callable[[Any, Any], Any], length: int, ct: Any, branch: Any) -> None:
    lax.scan(lambda _, x: (None, step(*x)), None, (ct, branch), length=length)
