"""What jaxtyping's annotations say of values, types and sites, by `isinstance` and nothing else."""

import contextlib
import io
import re
import types
from typing import Any, TypeAliasType, Union, get_args, get_origin, no_type_check

import jax
from jax.sharding import PartitionSpec
from jaxtyping import AnnotationError, PyTree, jaxtyped, print_bindings

# Of what is called within the bindings of somebody else, and binds more: jaxtyping's import hook
# would give each function bindings of its own.
binds = no_type_check


class ShardedType(type):
    """The class of `Sharded[...]`, as far as others need to know it."""

    annotation: Any
    spec: PartitionSpec


def is_sharded(annotation: Any) -> bool:
    """Whether an annotation is a `Sharded[...]`."""
    return isinstance(annotation, ShardedType) and hasattr(annotation, "spec")


def is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def is_annotation(x: Any) -> bool:
    """Whether `x` is an annotation of jaxtyping's or `Sharded`, or a union with one."""
    if is_union(x):
        return any(map(is_annotation, get_args(x)))
    if isinstance(x, TypeAliasType):
        return is_annotation(x.__value__)
    if isinstance(x, ShardedType) and not is_sharded(x):
        return False  # `Sharded` alone
    # The method is what beartype asks why something is no instance.
    says_why = hasattr(type(x), "__instancecheck_str__")
    return x is jax.Array or isinstance(x, type) and (says_why or issubclass(x, PyTree))


def is_of_trees(annotation: Any) -> bool:
    """Whether an annotation is of a pytree, and not of each of its leaves."""
    if isinstance(annotation, TypeAliasType):
        return is_of_trees(annotation.__value__)
    inner = [*get_args(annotation), *([annotation.annotation] if is_sharded(annotation) else [])]
    is_tree = isinstance(annotation, type) and issubclass(annotation, PyTree)
    return is_tree or any(map(is_of_trees, inner))


@binds
def is_instance(x: Any, annotation: Any) -> bool:
    """As `isinstance`, which before Python 3.14 looks at the type only if that is a `Union`."""
    if isinstance(annotation, TypeAliasType):
        return is_instance(x, annotation.__value__)
    if is_union(annotation):
        return any(is_instance(x, arm) for arm in get_args(annotation))
    return isinstance(x, annotation)


@binds
def why_not(x: Any, annotation: Any) -> str:
    """Why `x` is no instance of an annotation; empty if it is one."""
    if is_instance(x, annotation):
        return ""
    if isinstance(annotation, TypeAliasType):
        return why_not(x, annotation.__value__)
    if is_union(annotation):
        reasons = (why_not(x, arm) for arm in get_args(annotation))
        return "; ".join(dict.fromkeys(reasons))
    why = getattr(annotation, "__instancecheck_str__", None)
    return f"this is no {name_of(annotation)}" if why is None else why(x).rstrip(".")


def afresh() -> contextlib.AbstractContextManager[None]:
    """In which no name of a dimension is bound yet, and from which none gets out."""
    return jaxtyped("context")


@binds
def bindings() -> list[str]:
    """The names that are bound, as `batch=8`. (jaxtyping has no public way but to print them.)"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_bindings()
    lines = printed.getvalue().splitlines()
    return [line for line in lines if line and not line.startswith("The current values")]


def name_of(annotation: Any) -> str:
    """An annotation as it is written: `Float[Array, 'n d']`."""
    if is_union(annotation):
        return " | ".join(map(name_of, get_args(annotation)))
    return getattr(annotation, "__name__", str(annotation)).replace("jaxtyping.", "")


def first_line(error: AnnotationError) -> str:
    """What an error says first: its first sentence, if that is shorter than its first line."""
    return re.split(r"(?<!e\.g)\. ", str(error).partition("\n")[0])[0]
