"""Which sites a transform is about: globs, predicates, and sequences of these."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, GenericAlias
from typing import Any

from ._annotations import is_annotation
from ._cache import name_of
from ._errors import SelectError, UnknownSiteError, nearest
from ._filters import has_type
from ._globs import check_glob, glob
from ._predicate import Predicate
from ._reducers import check_reducer
from ._site import Site

Select = None | str | Callable[[Site], bool] | Sequence["Select"]


class Chosen(frozenset):
    """A resolved choice of sites: pairs of key and occurrence. A predicate."""

    def __call__(self, site) -> bool:
        return (site.key, site.occurrence) in self


def check_select(select: Any, what: str = "select") -> Any:
    """`select` itself, with sequences as tuples; a `SelectError` if it is something else."""
    if is_annotation(select):
        return has_type(select)
    is_predicate = callable(select) and not isinstance(select, type | GenericAlias)
    if select is None or isinstance(select, str) or is_predicate:
        return select
    if isinstance(select, set | frozenset):
        select = sorted(select, key=repr)  # which is the same in every process
    if isinstance(select, Sequence):
        return tuple(check_select(s, what) for s in select)
    raise SelectError(
        f"`{what}` got {select!r} of type `{type(select).__name__}`; wanted None (all sites), a "
        "key or a glob, a predicate that takes a `Site`, a jaxtyping annotation (as "
        "`Float[Array, '...']`), a sequence of these, or a mapping from these to reducers"
    )


def pairs_of(select: Any, what: str = "select") -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What is selected, and the reducer for each: from a mapping, or for a single select."""
    if isinstance(select, Mapping):
        keys = tuple(check_select(key, what) for key in select)
        return keys, tuple(map(check_reducer, select.values()))
    return (check_select(select, what),), (None,)


def is_static(select: Any) -> bool:
    """Whether which sites are meant depends on the keys only, not on a user's function."""
    if isinstance(select, tuple):
        return all(map(is_static, select))
    return not callable(select)


def matches(select: Any, site: Site, keys: Mapping[str, str]) -> bool:
    """Whether `site` is meant, in a program with these keys."""
    if select is None:
        return True
    if isinstance(select, str):
        # A key is a key even if it contains the characters of a glob.
        return site.key == select if select in keys else glob(select)(site.key)
    if isinstance(select, tuple):
        return any(matches(s, site, keys) for s in select)
    return bool(select(site))


def check_found(select: Any, keys: Mapping[str, str], what: str) -> None:
    """Raise an `UnknownSiteError` for a glob in `select` that matches nothing."""
    if isinstance(select, tuple):
        for s in select:
            check_found(s, keys, what)
    globs = select.globs if isinstance(select, Predicate) else ()
    for pattern in (select,) if isinstance(select, str) else globs:
        check_glob(pattern, keys, what)


def check_chosen(select: Any, chosen: Collection[Any], keys: Mapping[str, str], what: str) -> None:
    """Raise an `UnknownSiteError` for a predicate that chose nothing, where it is to do something.

    To collect nothing is no mistake.
    """
    if not chosen and not is_static(select):
        named = name_of(select) if isinstance(select, FunctionType) else repr(select)
        raise UnknownSiteError(f"`{what}`: `{named}` holds for no site; {nearest('', keys)}")
