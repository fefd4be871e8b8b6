"""Which `PartitionSpec` each array gets: by prefixes, predicates, and `Sharded` annotations."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.hijax import HiPspec
from jax.sharding import PartitionSpec

from . import _types
from ._annotated_specs import annotated
from ._annotations import is_annotation
from ._cache import name_of
from ._errors import ShardingError
from ._filters import by_key, has_type
from ._globs import check_glob
from ._observed import observe
from ._predicate import Predicate, Subject, path_key
from ._structure import is_held


class Leaf(NamedTuple):
    """An array among arguments or results."""

    root: Any  # the argument or result
    annotation: Any  # of that
    path: Any  # in there
    value: Any
    name: str  # as `args[0].weight`

    def describe(self) -> str:
        return f"`{self.name}`, {_types.describe(self.value)}"


def arrays_in(root: Any, name: str, annotation: Any) -> list[Leaf]:
    """The arrays of an argument or result, in order."""
    return [
        Leaf(root, annotation, path, leaf, name + jax.tree_util.keystr(path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(root)
        if is_held(leaf)
    ]


@dataclasses.dataclass(frozen=True)
class Rules:
    """A mapping from predicates to specs, of which the first that holds counts."""

    pairs: tuple[tuple[Callable[[Any], bool], Any], ...]
    default: Any = None  # the item for `...`

    @staticmethod
    def of(rules: Mapping[Any, Any]) -> "Rules":
        pairs = tuple((_key(k), _checked(v)) for k, v in rules.items() if k is not ...)
        return Rules(pairs, _checked(rules.get(...)))

    def spec(self, array: Leaf) -> Any:
        return next((spec for key, spec in self.pairs if _holds(key, array)), self.default)


def _key(key: Any) -> Any:
    if isinstance(key, str):
        return by_key(key)
    if is_annotation(key) or isinstance(key, type):
        return has_type(key)
    if callable(key):
        return key
    raise ShardingError(
        f"got {key!r} of type `{type(key).__name__}` as what a spec is for; wanted a predicate, a "
        "jaxtyping annotation, a glob on paths, or `...` for the rest"
    )


def _holds(key: Any, array: Leaf) -> bool:
    leaf = array.value
    if not isinstance(key, Predicate):
        return bool(key(leaf))
    return key.holds(Subject(leaf, observe(leaf), leaf, path_key(array.path)))


@dataclasses.dataclass(frozen=True)
class Specs:
    """What a user gives as specs: a prefix of a pytree, whose leaves are specs, `Rules` or None."""

    leaves: tuple[Any, ...]
    treedef: Any

    @staticmethod
    def of(given: Any) -> "Specs":
        prefix = jax.tree.map(_leaf, given, is_leaf=_is_leaf)
        leaves, treedef = jax.tree.flatten(prefix, is_leaf=_is_leaf)
        return Specs(tuple(leaves), treedef)

    @property
    def whole(self) -> Any:
        """What is given for everything, if it is one thing."""
        return self.leaves[0] if self.treedef == jax.tree.structure(0) else None

    def all(self) -> Iterator[Any]:
        """Every spec in it."""
        for leaf in self.leaves:
            if isinstance(leaf, Rules):
                yield from [spec for _, spec in leaf.pairs]
                yield leaf.default
            else:
                yield leaf

    def over(self, tree: Any, what: str) -> list[Any]:
        """What is given for each leaf of a tree of which it is a prefix."""
        prefix = jax.tree.unflatten(self.treedef, self.leaves)
        try:
            full = jax.tree.broadcast(prefix, tree, is_leaf=_is_leaf)
        except ValueError:
            of = "positional arguments" if what == "in_specs" else "items"
            like = (
                f"one for each of the {len(tree)} {of}" if type(tree) is tuple else "a tree like it"
            )
            raise ShardingError(
                f"`{what}` is no prefix of what it is for, {_outline(tree)}: got "
                f"{_outline(prefix)}; wanted one spec for everything, or {like}"
            ) from None
        given = jax.tree.structure(tree).flatten_up_to(full)
        pairs = zip(given, jax.tree.leaves(tree), strict=True)
        return [spec for spec, leaf in pairs if is_held(leaf)]


def check_used(specs: Specs, given: Sequence[Any], arrays: Sequence[Leaf], what: str) -> None:
    """Raise for what a mapping has a spec for, if it is none of the arrays that it is given for."""
    for rules in [leaf for leaf in specs.leaves if isinstance(leaf, Rules)]:
        mine = [array for one, array in zip(given, arrays, strict=True) if one is rules]
        keys = {path_key(array.path): None for array in mine}
        for key, _ in rules.pairs:
            for pattern in key.globs if isinstance(key, Predicate) else ():
                check_glob(pattern, keys, what, "array")
            if not any(_holds(key, array) for array in mine):
                named = repr(key) if isinstance(key, Predicate) else name_of(key)
                there = ", ".join(array.describe() for array in mine) or "none"
                raise ShardingError(
                    f"`{what}` has a spec for `{named}`, which holds for no array; there are "
                    f"{there}. (Those that a function closes over cannot be seen, as in "
                    "`jax.vmap(module)` and in a lambda: give it the module, "
                    "`equinox.filter_vmap(module)`, or a `functools.partial`)"
                )


def spec_of(given: Any, array: Leaf) -> Any:
    """The spec for an array, by what is given for it, or by annotations; None if none says it."""
    spec = given.spec(array) if isinstance(given, Rules) else given
    return annotated(array.annotation, array.root, array.path) if spec is None else spec


def _outline(tree: Any) -> str:
    """The structure of a pytree, in short."""
    text = str(jax.tree.structure(tree, is_leaf=_is_leaf)).removeprefix("PyTreeDef(")[:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def _is_leaf(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(k is ... or callable(k) or is_annotation(k) for k in node)
    return node is None or isinstance(node, PartitionSpec | HiPspec | Rules)


def _leaf(node: Any) -> Any:
    return Rules.of(node) if isinstance(node, Mapping) else _checked(node)


def _checked(spec: Any) -> Any:
    if spec is None or isinstance(spec, PartitionSpec | HiPspec):
        return spec
    raise ShardingError(
        f"got {spec!r} of type `{type(spec).__name__}` as a spec; wanted a "
        "`jax.sharding.PartitionSpec`, a pytree of them, or a mapping from predicates or "
        "annotations (and `...` for the rest) to them"
    )
