"""Applying an edit to the leaves of a tagged value, and checking what comes out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat
from ._edits import Context, Edit, Loop
from ._errors import PlantError
from ._markers import Tag
from ._structure import HOLE, Structure, is_array, number_fits, same_static


def apply_edit(
    edit: Edit, tag: Tag, leaves: Sequence[Any], loops: tuple[Loop, ...], where: str
) -> list[Any]:
    """The leaves of the edited value, of the types of `leaves`."""
    structure = tag.label.structure
    fronted = _compat.axes_to_front(leaves, tag.positions)
    avals = [jax.typeof(x) for x in fronted]

    def fitted(value: Any) -> list[Any]:
        return fit(value, structure, avals, where)

    context = Context(
        loops,
        mapped=lambda fn: _mapped(fn, tag, where),
        fitted=lambda value: structure.unflatten(fitted(value)),
    )
    try:
        new = fitted(edit.apply(structure.unflatten(fronted), context))
    except PlantError as error:
        raise _located(error, where) from None
    except Exception as error:
        error.add_note(f"harvest: raised by the edit of {where}")
        raise
    return _compat.axes_from_front(new, tag.positions)


def _mapped(fn: Callable[[Any], Any], tag: Tag, where: str) -> Callable[[Any], Any]:
    """`fn` on a value as it was sown, mapped over the axes that `vmap` added in front.

    So that `plant(vmap(f), edits)` is `vmap(plant(f, edits))`.
    """
    structure = tag.label.structure

    def flat(*leaves: Any) -> tuple[Any, ...]:
        edited = fn(structure.unflatten(leaves))
        return tuple(fit(edited, structure, [jax.typeof(x) for x in leaves], where))

    for level in reversed(list(zip(*tag.positions, strict=True))):
        axes = tuple(None if axis is None else 0 for axis in level)
        flat = jax.vmap(flat, in_axes=axes, out_axes=axes)

    def mapped(value: Any) -> Any:
        leaves, _ = Structure.flatten(value, is_array)
        try:
            return structure.unflatten(flat(*leaves))
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise PlantError(
                f"an edit under `vmap` made a leaf depend on the example that is the same for all "
                f"examples in {where}; plant inside the `vmap`: `jax.vmap(plant(f, ...))`"
            ) from error

    return mapped


def fit(value: Any, structure: Structure, avals: Sequence[Any], where: str) -> list[Any]:
    """The leaves of `value`, checked to be of these types, for a site of this structure."""
    leaves, treedef = jax.tree.flatten(value)
    if treedef != structure.treedef:
        raise PlantError(
            f"got a value of structure {treedef}, wanted {structure.treedef}, for {where}"
        )
    wanted = iter(avals)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    fitted = []
    for path, leaf, static in zip(paths, leaves, structure.statics, strict=True):
        at = f" at {jax.tree_util.keystr(path)}" if path else ""
        if static is HOLE:
            fitted.append(_fit_leaf(leaf, next(wanted), at, where))
        elif not same_static(leaf, static):
            raise PlantError(
                f"got {leaf!r}{at}, where {where} has the static leaf {static!r}; static leaves "
                "cannot be planted: leave it as it is"
            )
    return fitted


def _fit_leaf(leaf: Any, wanted: Any, at: str, where: str) -> Any:
    if _compat.is_hi(leaf) or not hasattr(wanted, "shape"):
        if not _compat.is_hi(leaf) or jax.typeof(leaf) != wanted:
            raise PlantError(f"got {_compat.describe(leaf)}{at}, wanted {wanted}, for {where}")
        return leaf
    if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
        raise PlantError(
            f"got a `{type(leaf).__name__}`{at}, wanted {_compat.short(wanted)}, for {where}"
        )
    got = jax.typeof(jnp.asarray(leaf))
    weak = got.weak_type
    fits = got.dtype == wanted.dtype or (weak and number_fits(got.dtype, wanted.dtype))
    if got.shape != wanted.shape or not fits:
        extended = jnp.issubdtype(wanted.dtype, jax.dtypes.extended)
        can_cast = got.shape == wanted.shape and not extended
        hint = f"; cast it with `.astype({str(wanted.dtype)!r})`" if can_cast else ""
        raise PlantError(
            f"got {_compat.short(got)}{at}, wanted {_compat.short(wanted)}, for {where}{hint}"
        )
    if weak:
        leaf = jnp.asarray(leaf, wanted.dtype)
    return _compat.vary_like(_compat.like_weak(jnp.asarray(leaf), wanted), wanted)


def _located(error: PlantError, where: str) -> PlantError:
    return error if where in str(error) else type(error)(f"{error}, for {where}")
