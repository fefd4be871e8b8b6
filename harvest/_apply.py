"""Applying an edit to the leaves of a tagged value, and checking what comes out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import _compat, _types
from ._batching import Positions, over_examples
from ._edit_nodes import Context, Edit, Loop
from ._errors import PlantError
from ._fit import fit
from ._markers import Marker
from ._structure import Structure, is_array


def apply_edit(
    edit: Edit, marker: Marker, leaves: Sequence[Any], loops: tuple[Loop, ...], where: str
) -> list[Any]:
    """The leaves of the edited value, of the types of `leaves`."""
    structure = marker.label.structure
    fronted = _types.axes_to_front(leaves, marker.positions)
    avals = [jax.typeof(x) for x in fronted]

    def fitted(value: Any) -> list[Any]:
        return fit(value, structure, avals, where)

    context = Context(
        loops,
        marker.positions,
        mapped=lambda fn, also=(): _mapped(fn, marker, where, also),
        fitted=lambda value: structure.unflatten(fitted(value)),
    )
    try:
        with _compat.mesh_of(marker.in_avals):
            new = fitted(edit.apply(structure.unflatten(fronted), context))
    except PlantError as error:
        raise _located(error, where) from None
    except Exception as error:
        error.add_note(f"harvest: raised by the edit of {where}")
        raise
    return _types.axes_from_front(new, marker.positions, [jax.typeof(x) for x in leaves])


def _mapped(
    fn: Callable[..., Any], marker: Marker, where: str, also: Sequence[Positions]
) -> Callable[..., Any]:
    """`fn` on a value as it was sown, mapped over the axes that `vmap` added in front.

    So that `plant(vmap(f), edits)` is `vmap(plant(f, edits))`.
    """
    structure = marker.label.structure

    def flat(leaves: list[Any], *others: Any) -> list[Any]:
        edited = fn(structure.unflatten(leaves), *others)
        one = f"{where}, in one shard" if _compat.manual_axes() else where
        return fit(edited, structure, [jax.typeof(x) for x in leaves], one)

    flat = over_examples(flat, marker.positions, also=also, keeps_axes=True)

    def mapped(value: Any, *others: Any) -> Any:
        leaves, _ = Structure.flatten(value, is_array)
        try:
            return structure.unflatten(flat(leaves, *others))
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise PlantError(
                f"an edit under `vmap` made a leaf depend on the example that is the same for all "
                f"examples in {where}; plant inside the `vmap`: `jax.vmap(plant(f, ...))`"
            ) from error

    return mapped


def _located(error: PlantError, where: str) -> PlantError:
    return error if where in str(error) else type(error)(f"{error}, for {where}")
