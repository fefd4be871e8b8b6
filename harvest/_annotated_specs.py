"""The specs that `Sharded` annotations of functions and of the fields of modules say."""

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ._annotations import is_sharded, is_union
from ._structure import Bound


class Unread(NamedTuple):
    """An annotation whose text could not be evaluated: it may only be known to type checkers."""

    text: str
    error: str


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function, with annotations, not their text; empty if there is none."""
    fn = _as_partial(fn)
    try:
        signature = _signature(fn)
    except (TypeError, ValueError):
        return inspect.Signature()
    names = _namespace(fn)
    parameters = [
        parameter.replace(annotation=_evaluated(parameter.annotation, names))
        for parameter in signature.parameters.values()
    ]
    returned = _evaluated(signature.return_annotation, names)
    return inspect.Signature(parameters, return_annotation=returned)


def _as_partial(fn: Any) -> Any:
    if not isinstance(fn, Bound):
        return fn
    return functools.partial(_as_partial(fn.func), *fn.args, **fn.keywords)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`, but also of a module whose `__call__` is wrapped by a module."""
    plain = inspect.unwrap(fn)
    call = inspect.unwrap(type(plain).__call__) if isinstance(plain, eqx.Module) else None
    is_static = isinstance(inspect.getattr_static(type(plain), "__call__", None), staticmethod)
    if not inspect.isfunction(call):
        return inspect.signature(fn)
    if is_static:
        return inspect.signature(call)  # Python 3.12 leaves out its first argument otherwise
    _, *parameters = inspect.signature(call).parameters.values()  # without `self`
    return inspect.signature(call).replace(parameters=parameters)


def _namespace(fn: Any) -> dict[str, Any]:
    """In which the annotations of a function are evaluated."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    plain = fn if hasattr(fn, "__globals__") else inspect.unwrap(type(fn).__call__)
    return getattr(plain, "__globals__", {})


def _evaluated(annotation: Any, names: Mapping[str, Any]) -> Any:
    """What the text of an annotation means."""
    text = annotation
    while isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except Exception as error:  # of whatever kind: it is somebody else's text
            return Unread(text, f"{type(error).__name__}: {error}")
    return annotation


def annotations_of(
    signature: inspect.Signature, count: int, names: Sequence[str]
) -> tuple[list[Any], list[Any]]:
    """Those of so many positional arguments, and of keyword arguments; None where there is none."""
    parameters = list(signature.parameters.values())
    of_kind = {parameter.kind: parameter.annotation for parameter in parameters}
    positional = [p.annotation for p in parameters if p.kind in _POSITIONAL]
    positional += [of_kind.get(inspect.Parameter.VAR_POSITIONAL)] * count
    others = of_kind.get(inspect.Parameter.VAR_KEYWORD)
    by_name = {p.name: p.annotation for p in parameters}
    return positional[:count], [by_name.get(name, others) for name in names]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def annotated(annotation: Any, node: Any, path: Sequence[Any]) -> PartitionSpec | Unread | None:
    """The spec of a `Sharded` in an annotation, for the array at a path of the value `node`.

    Fields of modules on the way have annotations of their own.
    """
    if isinstance(annotation, Unread):
        return annotation
    if is_sharded(annotation):
        return annotation.spec
    if is_union(annotation):
        arms = (annotated(arm, node, path) for arm in typing.get_args(annotation))
        return next((spec for spec in arms if spec is not None), None)
    if not path:
        return None
    (key, *rest), parts = path, typing.get_args(annotation)
    if isinstance(node, Bound):
        return annotated(*_bound(node, key.name, rest))
    if isinstance(key, GetAttrKey):
        return annotated(_fields(type(node)).get(key.name), getattr(node, key.name), rest)
    if isinstance(key, SequenceKey):
        is_alike = len(parts) == 1 or parts[-1:] == (...,)
        index = 0 if is_alike else key.idx
        return annotated(dict(enumerate(parts)).get(index), node[key.idx], rest)
    if isinstance(key, DictKey):
        return annotated(parts[1] if len(parts) == 2 else None, node[key.key], rest)
    return None


def _bound(fn: Bound, part: str, path: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
    """Annotation, value and path, for what is at a path in one part of a partial."""
    if part == "func":
        return None, fn.func, path
    key, *rest = path
    names = list(fn.keywords)
    of_args, of_keywords = annotations_of(signature_of(fn.func), len(fn.args), names)
    if part == "args":
        return of_args[key.idx], fn.args[key.idx], rest
    return of_keywords[names.index(key.key)], fn.keywords[key.key], rest


def specs_in(annotation: Any, seen: frozenset[int] = frozenset()) -> Iterator[PartitionSpec]:
    """The specs of all `Sharded`s in an annotation."""
    if is_sharded(annotation):
        yield annotation.spec
        return
    is_list = isinstance(annotation, list)  # of what a `Callable` takes
    fields = () if id(annotation) in seen else _fields(annotation).values()
    for part in (*(annotation if is_list else typing.get_args(annotation)), *fields):
        yield from specs_in(part, seen | {id(annotation)})


def _fields(cls: Any) -> dict[str, Any]:
    """The annotations of the fields of a dataclass, such as an Equinox module."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return {}
    fields: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        own = inspect.get_annotations(base)
        fields |= {name: _evaluated(own[name], names) for name in own}
    return fields
