"""What `sow` is told of how the shards of a value make up the global one."""

from typing import Any

import jax
from jax.experimental.hijax import HiPspec
from jax.sharding import PartitionSpec

from . import _compat, _types
from ._errors import SowError
from ._structure import is_array


def specs_of(value: Any, spec: Any, name: str, caller: str = "sow") -> tuple[Any, ...] | None:
    """For each array of a sown value its spec, checked; None if there is none.

    Outside of any `shard_map` a value is global already, and its spec is not looked at.
    """
    if spec is None or not _compat.manual_axes():
        return None
    try:
        specs = jax.tree.broadcast(spec, value, is_leaf=_is_spec)
    except ValueError as error:
        raise SowError(
            f"`{caller}(..., name={name!r})` got a `spec` that is no prefix of the value: {error}"
        ) from None
    pairs = jax.tree_util.tree_leaves_with_path(value)
    leaves = zip(pairs, jax.tree.structure(value).flatten_up_to(specs), strict=True)
    what = f"`{caller}(..., name={name!r})`"
    return tuple(_checked(leaf, s, what, path) for (path, leaf), s in leaves if is_array(leaf))


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | HiPspec)


def _checked(leaf: Any, spec: Any, what: str, path: Any) -> Any:
    keys = jax.tree_util.keystr(path)
    where = f"{what} got the spec {spec} for {_types.describe(leaf)}{keys}"
    aval = jax.typeof(leaf)
    if spec is None:
        return None
    if isinstance(spec, HiPspec) != _compat.is_hi_type(aval) or not _is_spec(spec):
        wanted = "a `HiPspec`" if _compat.is_hi_type(aval) else "a `jax.sharding.PartitionSpec`"
        raise SowError(f"{where}; wanted {wanted}")
    if isinstance(spec, HiPspec):
        return spec
    if len(spec) > len(aval.shape):
        raise SowError(f"{where}; wanted at most one item for each of its axes")
    mesh = jax.sharding.get_abstract_mesh()
    named = [axis for entry in spec for axis in _names(entry)]
    unknown = [axis for axis in named if axis not in mesh.axis_names]
    if unknown:
        raise SowError(f"{where}; the mesh has no axis {unknown[0]!r}, but {mesh.axis_names}")
    if len(set(named)) < len(named):
        raise SowError(f"{where}, which names an axis of the mesh twice")
    if _compat.checks_varying():
        _check_varying(aval, set(named) & _compat.manual_axes(), where)
    return spec


def _check_varying(aval: Any, named: set[str], where: str) -> None:
    varying = _compat.varying(aval)
    for axis in sorted(varying - named):
        raise SowError(
            f"{where}, which varies along the mesh axis {axis!r}; wanted a spec that names it"
        )
    for axis in sorted(named - varying):
        raise SowError(
            f"{where}, which does not vary along the mesh axis {axis!r}; wanted a spec without it "
            f"(or `jax.lax.pcast(..., {axis!r}, to='varying')`)"
        )


def _names(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
