"""Parts of a model that sow what they return, while a call of the model lasts.

A call of a tapped model runs a copy of it, in which each chosen part is of a subclass of its own
class. So `isinstance`, attributes, other methods and `super()` are what they were; and since it is
a pytree that carries its path, it goes through `jit`, `scan` and whatever else the model does with
its layers.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._errors import UnknownSiteError
from ._parts import Path, children, made, rebuilt, static_fields
from ._scopes import PartScope
from ._sow import sow
from ._structure import is_array


class Tap(NamedTuple):
    """Where in its model a part is, and whether it sows its arguments as well."""

    path: Path
    inputs: bool

    def __repr__(self) -> str:
        return f"harvest.tap({'/'.join(self.path)!r})"


def tapped(node: Any, taps: Sequence[Tap], depth: int = 0) -> Any:
    """A copy of a part of a model, `depth` components deep, with the chosen parts of it tapped."""
    here = tuple(tap for tap in taps if len(tap.path) == depth)
    below: dict[str, list[Tap]] = {}
    for tap in taps:
        if len(tap.path) > depth:
            below.setdefault(tap.path[depth], []).append(tap)
    if below:
        inside = children(node)
        if missing := below.keys() - {name for name, _ in inside}:
            path = "/".join(below[min(missing)][0].path)
            raise UnknownSiteError(f"`tap`: the model has changed, and there is no {path!r} in it")
        changed = [
            tapped(child, below[name], depth + 1) if name in below else child
            for name, child in inside
        ]
        node = rebuilt(node, changed)
    if here and not callable(node):
        raise UnknownSiteError(f"`tap`: the model has changed, and {here[0]} cannot be called")
    return _part(node, here) if here else node


def untapped(tree: Any) -> Any:
    """A value of the model's as it would be without `tap`: it may hold parts of the model."""
    return jax.tree.map(_untapped, tree, is_leaf=lambda node: isinstance(node, eqx.Module))


def _untapped(node: Any) -> Any:
    if isinstance(node, _Function):
        return untapped(node.fn)
    if not isinstance(node, eqx.Module):
        return node
    cls = type(node).__bases__[1] if isinstance(node, _Part) else type(node)
    static = static_fields(node)
    plain = {
        name: _untapped(child) if name in static else untapped(child)
        for name, child in children(node)
    }
    attributes = vars(node) | plain
    attributes.pop(_TAPS, None)
    return made(cls, attributes)


# ------------------------------------------------------------------------------ tapped parts

_TAPS = "_harvest_taps"


class _Part:
    """What the subclasses have in common."""

    _harvest_taps: tuple[Tap, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not that of the author, who may keep a list of subclasses."""


class _Function(eqx.Module):
    """A tapped function that a layer holds, or another callable that is no Equinox module."""

    fn: Any
    _harvest_taps: tuple[Tap, ...] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self._harvest_taps, self.fn, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("fn", _TAPS):  # while JAX makes it
            raise AttributeError(name)
        return getattr(self.fn, name)


def _part(node: Any, taps: tuple[Tap, ...]) -> Any:
    if isinstance(node, _Part | _Function):  # by an outer tapped model
        return made(type(node), vars(node) | {_TAPS: (*node._harvest_taps, *taps)})
    if isinstance(node, eqx.Module):
        return made(_subclass(type(node)), vars(node) | {_TAPS: taps})
    return made(_Function, {"fn": node, _TAPS: taps})


_subclasses: dict[type, type] = {}  # JAX keeps all classes of pytrees as well
_lock = threading.Lock()


def _subclass(cls: type) -> type:
    """The class of the tapped parts that are of a class otherwise."""
    with _lock:
        if cls not in _subclasses:
            _subclasses[cls] = _new_subclass(cls)
        return _subclasses[cls]


def _new_subclass(cls: Any) -> type:
    @functools.wraps(cls.__call__, updated=())
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(getattr(self, _TAPS), super(part, self).__call__, args, kwargs)

    # Without a value it is as good as of `cls`: made by the author's `type(self)(...)`.
    taps = eqx.field(static=True, default=(), repr=False)
    namespace = {_TAPS: taps, "__annotations__": {_TAPS: tuple[Tap, ...]}, "__call__": __call__}
    namespace |= {"__module__": __name__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    # No `class` statement: import hooks that check types would check the author's.
    part = type(cls)(cls.__name__, (_Part, cls), namespace)
    return part


def _run(taps: tuple[Tap, ...], call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a part in the scope of its path, and sow what it returns there."""
    if not taps:
        return call(*args, **kwargs)
    (path, inputs), *others = taps
    with jax.named_scope(PartScope(".".join(path) or "model", path)):
        if inputs:
            args, kwargs = _sown_inputs(args, kwargs)
        return _sown(_run(tuple(others), call, args, kwargs), "out")


def _sown_inputs(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, sown as `in`: the only one as it is, several as a tuple.

    Keywords count if there is an array in them, and come last, as a dict: most layers of Equinox
    are called with `key=None`.
    """
    by_keyword = any(map(is_array, jax.tree.leaves(kwargs)))
    given = (*args, kwargs) if by_keyword else args
    if not given:
        return args, kwargs
    given = (_sown(given[0], "in"),) if len(given) == 1 else _sown(given, "in")
    return (given[:-1], given[-1]) if by_keyword else (given, kwargs)


def _sown(value: Any, name: str) -> Any:
    """`value`, sown. If the model passes parts of itself around, they are collected untapped."""
    leaves = jax.tree.leaves(sow(untapped(value), name=name))
    return jax.tree.unflatten(jax.tree.structure(value), leaves)
