"""The parts of a model that can be called, each with its path, and which of them are chosen."""

import collections
import copy
import dataclasses
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._cache import name_of
from ._errors import SelectError, UnknownSiteError, nearest
from ._globs import glob

Path = tuple[str, ...]


class Part(NamedTuple):
    """Something that can be called: a layer, or a function that a layer holds."""

    path: Path
    node: Any
    is_function: bool

    @property
    def name(self) -> str:
        return "/".join(self.path)


def children(node: Any) -> list[tuple[str, Any]]:
    """What is directly inside of a node of a pytree, and of a module its static fields too."""
    if isinstance(node, eqx.Module):
        return [(name, vars(node)[name]) for name in _fields(node)]
    if type(node) in _DICTS:
        return [(str(key), child) for key, child in node.items()]
    pairs, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda n: n is not node)
    label = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return [(label(path), child) for path, child in pairs if path]


def rebuilt(node: Any, inside: Sequence[Any]) -> Any:
    """A copy of a node with other children. The order of a dict is kept, which JAX would sort."""
    if isinstance(node, eqx.Module):
        return made(type(node), vars(node) | dict(zip(_fields(node), inside, strict=True)))
    if type(node) in _DICTS:
        fresh = copy.copy(node)
        fresh.update(zip(node, inside, strict=True))
        return fresh
    return jax.tree.structure(node, is_leaf=lambda n: n is not node).unflatten(inside)


def made(cls: type, attributes: dict[str, Any]) -> Any:
    """A module with these attributes, as JAX makes it: not by its `__init__`."""
    fresh = object.__new__(cls)
    vars(fresh).update(attributes)
    return fresh


_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


def _fields(module: eqx.Module) -> list[str]:
    return [field.name for field in dataclasses.fields(module) if field.name in vars(module)]


def parts(node: Any, path: Path = ()) -> Iterator[Part]:
    """All that can be called in a model, outside in, and the model itself first."""
    inside = children(node)
    is_node = isinstance(node, eqx.Module) or bool(inside)
    if callable(node):
        yield Part(path, node, not is_node)
    static = static_fields(node)
    for name, child in inside:
        if name not in static:
            yield from parts(child, (*path, name))
        elif callable(child):
            yield Part((*path, name), child, True)


def static_fields(node: Any) -> frozenset[str]:
    """The fields of a module that are no part of it as a pytree."""
    fields = dataclasses.fields(node) if isinstance(node, eqx.Module) else ()
    return frozenset(field.name for field in fields if field.metadata.get("static", False))


def chosen(model: Any, where: Any) -> tuple[Path, ...]:
    """The paths of the parts that `where` means, outside in."""
    found = list(parts(model))
    paths = {part.path for item in _items(where) for part in _matching(item, found, model)}
    return tuple(dict.fromkeys(part.path for part in found if part.path in paths))


def _items(where: Any) -> list[Any]:
    if isinstance(where, str | type | types.UnionType):
        return [where]
    if isinstance(where, Sequence | set | frozenset) and where:
        return [item for each in where for item in _items(each)]
    if not callable(where) or isinstance(where, eqx.Module):
        raise SelectError(
            f"`tap` got {where!r} of type `{type(where).__name__}`; wanted a type of layers, a "
            "glob on their paths, a predicate that takes a path and a layer, or a sequence of these"
        )
    try:
        inspect.signature(where).bind("path", "layer")
    except TypeError:
        raise SelectError(
            f"`tap` got the predicate `{name_of(where)}{inspect.signature(where)}`; wanted one "
            "that takes two arguments, a path such as 'layers/3/attn' and the layer there"
        ) from None
    except ValueError:
        pass  # a built-in function may have no signature
    return [where]


def _matching(item: Any, found: list[Part], model: Any) -> list[Part]:
    layers = [part for part in found if not part.is_function]
    if isinstance(item, str):
        matching = _named(item, found)
    elif isinstance(item, type | types.UnionType):
        matching = [part for part in layers if isinstance(part.node, item)]
    else:
        matching = [part for part in layers if item(part.name, part.node)]
    if not matching:
        raise UnknownSiteError(_nothing(item, found, layers, type(model).__name__))
    return matching


def _named(pattern: str, found: list[Part]) -> list[Part]:
    """What a glob means: of functions those that it names, unless it matches nothing else.

    For a model may hold functions that are no layers of it: schedules, initialisers.
    """
    if itself := [part for part in found if part.name == pattern]:
        return itself
    matches, last = glob(pattern), pattern.rpartition("/")[2]
    matching = [part for part in found if part.path and matches(part.name)]
    named = [part for part in matching if not part.is_function or part.path[-1] == last]
    return named or matching


def _nothing(item: Any, found: list[Part], layers: list[Part], model: str) -> str:
    names = {part.name: None for part in found if part.path}
    there = nearest(item if isinstance(item, str) else "", names, "parts")
    if isinstance(item, str):
        there = there if names else "there are none but itself, which '' stands for"
        return f"`tap`: {item!r} matches no part of the `{model}` that can be called; {there}"
    what = f"satisfies the predicate `{name_of(item)}`"
    if isinstance(item, type | types.UnionType):
        what = f"is a `{getattr(item, '__name__', item)}`"
        kinds = dict.fromkeys(type(part.node).__name__ for part in layers) or ["none"]
        there = f"there are {', '.join(kinds)}"
    return f"`tap`: no part of the `{model}` that can be called {what}; {there}"
