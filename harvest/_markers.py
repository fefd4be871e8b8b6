"""The hi primitives that `sow` and `perturb` bind.

`sow` binds a `Mark`, which is effectful and has no result: it is what `reap` reads. While `plant`
is tracing, it first binds a `Tag`, which is pure and carries the data dependency: it is what
`plant` replaces. One primitive cannot do both: with an effect and a result it would be saved as a
residual by `jax.checkpoint`, and without an effect it would be lost wherever its result is not
used. Nor can a `Tag` always be there: to JAX its result is another value than its input, and where
both are used, both are saved for a backward pass. Hi primitives vanish when a program is lowered,
so that a `Mark` leaves no trace in a compiled program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.experimental.hijax import GradAccum, HiPrim, Zero, instantiate_zeros

from . import _compat, _types
from ._batching import Axis
from ._errors import warn
from ._hi_axes import tangent_from_front, tangent_to_front
from ._hi_types import HiAxis
from ._numbers import Number
from ._structure import Structure


class SowEffect(jax.debug.DebugEffect):
    """The effect that keeps a `Mark` alive.

    JAX's allow-lists of effects (lowering, control flow, remat, custom derivatives, partial
    evaluation) test with `isinstance`, so a subclass of the public `DebugEffect` is on all of
    them. A plain `Effect` is refused by scan and dropped when a scan is linearized.
    """

    def __str__(self) -> str:
        return "Sow"


SOW = SowEffect()


def is_side_effect(effect: Any) -> bool:
    """Whether something has to happen, and once: neither a sow, nor a collective."""
    return not isinstance(effect, SowEffect) and _compat.collective_over(effect) is None


@dataclasses.dataclass(frozen=True)
class Label:
    """What a marker says about the value it marks."""

    name: str
    kind: Literal["sow", "cotangent", "equation"]  # the last for `debug.nonfinite` only
    structure: Structure
    source: str  # the user's file and line
    spec: Any = None
    log: bool = False
    number: Number | None = None  # of an equation, among those of its name
    primitive: str | None = None  # of an equation

    @property
    def sow(self) -> tuple[Any, ...]:
        """What tells a `sow` apart from others."""
        return self.name, self.source, self.number


# For each leaf, the axis that each `vmap` added (None if that one left it unbatched).
Positions = tuple[tuple[Axis, ...], ...]


class Marker(HiPrim):
    """An identity over the dynamic leaves of one sown value.

    `positions` has the axes that `vmap` added, outermost first. They are moved to the front when
    the value is collected, never in the program: a transpose for every marker would change what
    is compiled.
    """

    label: Label
    positions: Positions
    selected: bool  # in a branch of a `cond` that `vmap` turned into a `select`
    split: frozenset[str]  # the mesh axes over which `vmap(..., spmd_axis_name=)` split an axis

    def __init__(
        self,
        avals: Sequence[Any],
        label: Label,
        positions: Positions,
        selected: bool = False,
        split: frozenset[str] = frozenset(),
    ):
        self.in_avals = tuple(avals)
        self.out_aval = self.outs(self.in_avals)
        self.params = {
            "label": label,
            "positions": positions,
            "selected": selected,
            "split": split,
        }
        super().__init__()

    @staticmethod
    def outs(values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of one item for each input, those that are outputs too."""
        raise NotImplementedError

    def pp_params(self) -> dict[str, Any]:
        return {"name": self.label.name}

    def expand(self, *leaves):
        return self.outs(leaves)

    def jvp(self, primals, tangents):
        return self(*primals), self.outs(tuple(tangents))

    def lin(self, nzs_in, *primals):
        return self(*primals), (), self.outs(tuple(nzs_in))

    def linearized(self, residuals, *tangents):
        return self.outs(tangents)

    def vjp_fwd(self, nzs_in, *primals):
        return self(*primals), None, self.outs(tuple(nzs_in))

    def batch(self, axis_data, args, dims):
        def shifted(axes: tuple[Any, ...], new: Any, aval: Any) -> tuple[Axis, ...]:
            if new is None:
                return (None, *axes)
            if _compat.is_hi_type(aval):
                return (HiAxis(new, axis_data.size), *axes)
            return (new, *(a if a is None or a < new else a + 1 for a in axes))

        avals = [jax.typeof(x) for x in args]
        batched = type(self)(
            avals,
            self.label,
            tuple(map(shifted, self.positions, dims, avals)),
            self.selected or _compat.batching_a_predicate(),
            self.split | _compat.spmd_axes(axis_data),
        )
        return batched(*args), self.outs(tuple(dims))


class Tag(Marker):
    """Pure, with a result: what `plant` replaces."""

    @staticmethod
    def outs(values):
        return values

    def vjp_bwd_retval(self, res, outgrad):
        return tuple(outgrad)

    def transpose(self, out_ct, *maybe_accums):
        _accumulate(out_ct, maybe_accums)


class Mark(Marker):
    """Effectful, without a result: what `reap` reads."""

    effects = frozenset({SOW})

    @staticmethod
    def outs(values):
        return ()

    def expand(self, *leaves):
        if _compat.WATCHED.value:
            # A compiled program is lowered when nobody is tracing any more.
            warn(
                f"{self.label.name!r} (sown at {self.label.source}) cannot be seen: what traces it "
                "there, such as `jax.experimental.jet` or a compilation inside of the function, "
                "leaves nothing of it in the program; sow outside of that"
            )
        return ()

    def vjp_bwd_retval(self, res, outgrad):
        return tuple(Zero(aval.to_ct_aval()) for aval in self.in_avals)

    def transpose(self, out_ct, *maybe_accums):
        return None

    def remat(self, trace, *leaves):
        # The recomputation must not sow again.
        return self(*leaves), (), lambda _, *leaves: ()


class Perturb(Marker):
    """The identity, with a `PerturbTangent` on its tangents."""

    @staticmethod
    def outs(values):
        return values

    def jvp(self, primals, tangents):
        return self(*primals), self.linearized((), *tangents)

    def linearized(self, residuals, *tangents):
        nonzero = [not isinstance(t, Zero) for t in tangents]
        fronted, positions = self._fronted(tangents)
        avals = [jax.typeof(t) for t in fronted]
        prim = PerturbTangent(avals, self.label, positions, split=self.split)
        outs = self._from_front(prim(*fronted))
        return tuple(o if nz else t for o, nz, t in zip(outs, nonzero, tangents, strict=True))

    def vjp_bwd(self, res, outgrad, *arg_accums):
        return self.sow_cotangent(outgrad, arg_accums)

    def _fronted(self, tangents: Sequence[Any]) -> tuple[list[Any], Positions]:
        """Tangents, and their positions: those of hi types have them in front."""
        rows = zip(map(instantiate_zeros, tangents), self.in_avals, self.positions, strict=True)
        pairs = [
            tangent_to_front(tangent, aval, axes) if _compat.is_hi_type(aval) else (tangent, axes)
            for tangent, aval, axes in rows
        ]
        return [tangent for tangent, _ in pairs], tuple(axes for _, axes in pairs)

    def _from_front(self, tangents: Sequence[Any]) -> list[Any]:
        rows = zip(tangents, self.in_avals, self.positions, strict=True)
        return [
            tangent_from_front(tangent, aval, axes) if _compat.is_hi_type(aval) else tangent
            for tangent, aval, axes in rows
        ]

    def sow_cotangent(self, cts: Sequence[Any], accums: Sequence[Any]) -> dict[str, Any] | None:
        """Sow the cotangents, and give the sown ones to the inputs."""
        fronted, positions = self._fronted(cts)
        sown = mark(fronted, self.label, positions, self.split)
        _accumulate(self._from_front(sown), accums)
        if not self.label.log:
            return None
        # As JAX's rules log under `vmap`, and as it is collected.
        logged = _types.axes_to_front(sown, positions)
        return {self.label.name: self.label.structure.unflatten(logged)}


class PerturbTangent(Perturb):
    """The linear identity whose transpose sows the cotangent.

    Its tangents pass through another one, so that cotangents of second order are sown too.
    """

    def transpose(self, out_ct, *maybe_accums):
        return self.sow_cotangent(out_ct, maybe_accums)


def mark(
    leaves: Sequence[Any],
    label: Label,
    positions: Positions,
    split: frozenset[str] = frozenset(),
) -> Sequence[Any]:
    """Bind the markers of the leaves of one value."""
    avals = [jax.typeof(x) for x in leaves]
    if _compat.PLANTING.value and leaves:
        leaves = Tag(avals, label, positions, split=split)(*leaves)
    Mark(avals, label, positions, split=split)(*leaves)
    return leaves


def _accumulate(cts: Sequence[Any], accums: Sequence[Any]) -> None:
    for ct, accum in zip(cts, accums, strict=True):
        if isinstance(accum, GradAccum):
            accum.accum(ct)
