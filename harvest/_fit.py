"""Values and edits made fit for a site, or refused."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from . import _compat, _hi_types, _types
from ._edit_nodes import Branches, Chain, Each, Edit, Replace
from ._entry import CondSum, Entry
from ._errors import PlantError
from ._probe import Probe, Push, as_arrays, as_tangent
from ._structure import HOLE, Structure, is_array, same_static

Mode = Literal["strict", "append"]


def fit(
    value: Any, structure: Structure, avals: Sequence[Any], where: str, form: str = ""
) -> list[Any]:
    """The leaves of `value`, checked to be of these types, for a site of this structure.

    `form` says why they have these axes.
    """
    leaves, treedef = jax.tree.flatten(value)
    if treedef != structure.treedef:
        raise PlantError(
            f"got a value of structure {treedef}, wanted {structure.treedef}, for {where}{form}"
        )
    wanted = iter(avals)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    fitted = []
    for path, leaf, static in zip(paths, leaves, structure.statics, strict=True):
        at = f" at {jax.tree_util.keystr(path)}" if path else ""
        if static is HOLE:
            fitted.append(_fit_leaf(leaf, next(wanted), at, where, form))
        elif not same_static(leaf, static):
            raise PlantError(
                f"got {leaf!r}{at}, where {where} has the static leaf {static!r}; static leaves "
                "cannot be planted: leave it as it is"
            )
    return fitted


def _fit_leaf(leaf: Any, wanted: Any, at: str, where: str, form: str = "") -> Any:
    if _compat.is_hi(leaf) or _compat.is_hi_type(wanted):
        if not _compat.is_hi(leaf) or not _hi_types.alike(jax.typeof(leaf), wanted):
            got = _types.describe(leaf)
            raise PlantError(f"got {got}{at}, wanted {_types.short(wanted)}, for {where}")
        return leaf
    if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
        raise PlantError(
            f"got a `{type(leaf).__name__}`{at}, wanted {_types.short(wanted)}, for {where}"
        )
    got = jax.typeof(jnp.asarray(leaf))
    weak = got.weak_type
    fits = got.dtype == wanted.dtype or (weak and _types.number_fits(got.dtype, wanted.dtype))
    if got.shape != wanted.shape or not fits:
        extended = jnp.issubdtype(wanted.dtype, jax.dtypes.extended)
        can_cast = got.shape == wanted.shape and not extended
        hint = f"; cast it with `.astype({str(wanted.dtype)!r})`" if can_cast else ""
        hint = hint if got.shape == wanted.shape else form
        raise PlantError(
            f"got {_types.short(got)}{at}, wanted {_types.short(wanted)}, for {where}{hint}"
        )
    further = sorted(_compat.varying(got) - _compat.varying(wanted))
    if further and _compat.manual_axes() and not _compat.checks_varying():
        leaf = _compat.unvarying(jnp.asarray(leaf))
    elif further and _compat.manual_axes():
        raise PlantError(
            f"got a value{at} that varies along the mesh axes {further}, along which the one that "
            f"it replaces does not, for {where}; reduce it, as by `jax.lax.pmean`"
        )
    if weak:
        leaf = jnp.asarray(leaf, wanted.dtype)
    if not _compat.can_reshard(got, wanted):
        raise PlantError(
            f"got {_types.short(got)}{at} on a mesh of {got.sharding.mesh.size} devices, wanted "
            f"one of the {wanted.sharding.mesh.size} on which the program runs, for {where}; move "
            "it with `jax.device_put`"
        )
    return _compat.placed_like(_compat.like_weak(jnp.asarray(leaf), wanted), wanted)


def prepared(edit: Edit, entry: Entry, mode: Mode = "strict") -> Edit:
    """The edit as it is applied in every iteration, checked against the site."""
    if isinstance(edit, Replace):
        _check_not_occurrences(edit.value, entry, mode)
        return _branchwise(edit.value, entry, _replacing)
    if isinstance(edit, Push):
        _check_not_occurrences(edit.value, entry, mode)
        return _branchwise(edit.value, entry, _pushing)
    edit = _nested(edit, entry)
    for inner, loops in entry.innermost():
        try:
            edit.check(loops)
        except PlantError as error:
            raise PlantError(f"{error}, for {inner.describe()}") from None
    return edit


def _check_not_occurrences(value: Any, entry: Entry, mode: Mode) -> None:
    node = entry.marker.label.structure.treedef.node_data()
    is_tuple = node is not None and issubclass(node[0], tuple)
    if mode == "strict" and isinstance(value, tuple) and not is_tuple:
        raise PlantError(
            f"got a tuple for {entry.describe()}, as `capture` returns them: to plant the "
            'occurrences of a key in call order, pass mode="append"'
        )


def _replacing(value: Any, entry: Entry, avals: Sequence[Any], stacked: bool) -> Edit:
    fit(value, entry.marker.label.structure, avals, entry.describe(), _form_of(entry))
    return Each(Replace(value)) if stacked else Replace(value)


def _form_of(entry: Entry) -> str:
    """Why a value has other axes than one may expect."""
    if None in entry.loops:
        return ", which has one value for all iterations of its `while_loop`"
    if lengths := known(entry.loops):
        count = " x ".join(map(str, lengths))
        return (
            f", the values of {count} iterations in one array; for one of them use "
            "`harvest.at(i, harvest.replace(value))`"
        )
    stacked = any(layout.stacked for layout in jax.tree.leaves([x for _, x in entry.crossed]))
    return ", whose shards are stacked, as its `sow` has no `spec`" if stacked else ""


def _pushing(value: Any, entry: Entry, avals: Sequence[Any], stacked: bool) -> Edit:
    """An edit that lets a tangent in."""
    structure, where = entry.marker.label.structure, entry.describe()
    leaves, treedef = jax.tree.flatten(value)
    if treedef == structure.treedef:
        leaves = [x for x, static in zip(leaves, structure.statics, strict=True) if static is HOLE]
    elif treedef != jax.tree.structure(as_tangent(structure, avals)):
        raise PlantError(
            f"got a tangent of structure {treedef}, wanted {structure.treedef}, for {where}"
        )
    eps = [_fit_tangent(leaf, aval, where) for leaf, aval in zip(leaves, avals, strict=True)]
    return Probe(Each(eps) if stacked else eps)


def _fit_tangent(leaf: Any, wanted: Any, where: str) -> Any:
    tangent = _types.tangent_of(wanted)
    if tangent is not None:
        return as_arrays(_fit_leaf(leaf, tangent, "", where))
    if _compat.is_hi_type(wanted):
        return None
    if getattr(leaf, "shape", ()) != wanted.shape:
        raise PlantError(
            f"got {_types.describe(leaf)} for {_types.short(wanted)}, wanted zeros of dtype float0 "
            f"and of its shape, for {where}"
        )
    return None


def _branchwise(
    value: Any,
    entry: Entry,
    make: Callable[[Any, Entry, Sequence[Any], bool], Edit],
    outer: tuple[int | None, ...] = (),
) -> Edit:
    """An edit with a value of the form in which the site is read, branch by branch.

    A `while_loop` has no axis: there is one value for all its iterations.
    """
    if not entry.sums and not (isinstance(value, CondSum) and entry.branches is not None):
        avals = entry.type
        for length in reversed(known(outer)):
            avals = [_types.stacked(aval, length) for aval in avals]
        return make(value, entry, avals, bool(known((*outer, *entry.loops))))
    assert entry.branches is not None
    outer = (*outer, *entry.around)
    branchwise = isinstance(value, CondSum) and (entry.summed or not entry.sums)
    parts = value.branches if branchwise else None
    if parts is not None and len(parts) != len(entry.branches):
        raise PlantError(
            f"got a `CondSum` of {len(parts)} branches, wanted {len(entry.branches)}, for "
            f"{entry.describe()}"
        )
    edits = []
    for number, branch in enumerate(entry.branches):
        part = value if parts is None else parts[number]
        if branch is None or part is None:
            if branch is None and parts is not None and part is not None:
                raise PlantError(
                    f"got a value for branch {number} of {entry.describe()}, which has no such "
                    "site; wanted None there"
                )
            edits.append(Chain(()))
        else:
            edits.append(_branchwise(part, branch, make, outer))
    return Branches(tuple(edits))


def _nested(edit: Edit, entry: Entry) -> Edit:
    """Inside other edits a value may be that of one iteration, or stacked over all."""
    if isinstance(edit, Each):
        return edit
    if not isinstance(edit, Replace):
        fields = {f.name: getattr(edit, f.name) for f in dataclasses.fields(edit)}
        return type(edit)(**{name: _nested_field(v, entry) for name, v in fields.items()})
    in_loops = any(known(loops) for _, loops in entry.innermost())
    if not in_loops and not entry.shards:
        return edit
    for inner, loops in entry.innermost():
        once = [_types.dropped(aval, len(known(inner.loops))) for aval in inner.type]
        stacked = once
        for length in reversed(known(loops)):
            stacked = [_types.stacked(aval, length) for aval in stacked]
        structure, where = inner.marker.label.structure, inner.describe()
        try:
            fit(edit.value, structure, stacked, where)
        except PlantError:
            fit(edit.value, structure, once, where + ", in one iteration")
            return edit
    return Each(edit) if in_loops else edit


def _nested_field(value: Any, entry: Entry) -> Any:
    if isinstance(value, Edit):
        return _nested(value, entry)
    if isinstance(value, tuple) and value and all(isinstance(v, Edit) for v in value):
        return tuple(_nested(v, entry) for v in value)
    return value


def known(loops: Sequence[int | None]) -> tuple[int, ...]:
    """The lengths of the loops that stack."""
    return tuple(length for length in loops if length is not None)
