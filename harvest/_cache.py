"""Compiled programs by the structure of the call, for as long as its functions live."""

import atexit
import collections
import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ._errors import UnsupportedError, warn
from ._structure import HOLE, Structure
from ._walk import Walk

_MAX_ENTRIES = 1024  # of each cache
_MANY_TRACES = 8  # of one piece of code, under new identities, until we warn


class Staged:
    """A jitted function that does not keep the user's functions alive.

    It finds them, when JAX traces it, in the call that is under way.
    """

    def __init__(self, make: Callable[[Callable[[], Structure]], Callable], keep_unused: bool):
        self._calls = calls = threading.local()
        self.jitted = jax.jit(make(lambda: calls.structure), keep_unused=keep_unused)
        self.walks: dict[Any, Walk] = {}  # over its jaxprs, which JAX keeps as long

    @contextlib.contextmanager
    def pending(self, structure: Structure) -> Iterator[None]:
        """Run a call of this structure, in this thread."""
        outer = getattr(self._calls, "structure", None)
        self._calls.structure = structure
        try:
            yield
        finally:
            self._calls.structure = outer


class Cache:
    """Entries by structure: bounded, and dropped when a function in the structure dies."""

    def __init__(self) -> None:
        self._entries: collections.OrderedDict[Any, tuple[Staged, list[Any]]]
        self._entries = collections.OrderedDict()
        self._lock = threading.RLock()
        # At exit, functions die after what `_drop` needs.
        atexit.register(self.clear)

    def get(
        self,
        structure: Structure,
        make: Callable,
        on_new: Callable[[list[Any]], None] = lambda objects: None,
        keep_unused: bool = False,
    ) -> Staged:
        form, objects = _key(structure)
        key = (form, keep_unused)
        if form.unhashable:
            part = form.unhashable[0]
            raise UnsupportedError(
                f"got {part!r} of type `{type(part).__name__}` as a static argument or in a model: "
                "it cannot be hashed, and a change in it would go unnoticed; pass arrays, or "
                "something hashable such as a tuple or a frozen dataclass"
            )
        with self._lock:
            if (found := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
                return found[0]
            entry = Staged(make, keep_unused)
            held = [_held(obj, functools.partial(self._drop, key)) for obj in objects]
            self._entries[key] = (entry, held)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        on_new(objects)
        return entry

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def _drop(self, key: Any, _: Any) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)


class _Identity:
    """Stands for an object that counts by identity, without keeping it alive."""

    __slots__ = ("_id",)

    def __init__(self, obj: Any):
        self._id = id(obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._id == other._id

    def __hash__(self) -> int:
        return self._id


def _key(structure: Structure) -> tuple[Structure, list[Any]]:
    """A key that keeps no callable leaf alive, and those callables."""
    objects: list[Any] = []

    def static(leaf: Any) -> Any:
        if leaf is HOLE or not callable(leaf):
            return leaf
        if isinstance(leaf, types.MethodType):  # a new object at each access
            objects.extend((leaf.__self__, leaf.__func__))
            return (_Identity(leaf.__self__), _Identity(leaf.__func__))
        objects.append(leaf)
        return _Identity(leaf)

    return Structure(structure.treedef, list(map(static, structure.statics))), objects


def _held(obj: Any, callback: Callable[[Any], None]) -> Any:
    try:
        return weakref.ref(obj, callback)
    except TypeError:
        return obj  # kept alive, as an identity must be


# For each piece of code, how many functions of it have been traced, and those still alive.
_identities: weakref.WeakKeyDictionary[types.CodeType, tuple[int, weakref.WeakSet[Any]]]
_identities = weakref.WeakKeyDictionary()


def count_identities(objects: list[Any]) -> None:
    """Warn about functions that are made anew for each call, since each is traced anew."""
    for obj in objects:
        fn = inspect.unwrap(obj)
        if not isinstance(fn, types.FunctionType):
            continue
        code = fn.__code__
        count, alive = _identities.get(code, (0, weakref.WeakSet()))
        if fn in alive:
            continue
        count += 1
        alive.add(fn)
        _identities[code] = (count, alive)
        if count == _MANY_TRACES:
            warn(
                f"`{name_of(obj)}` ({code.co_filename}:{code.co_firstlineno}) was traced {count} "
                "times, each time as a new function object, since functions are told apart by "
                "identity; define it once, or pass what changes as an array in a "
                "`jax.tree_util.Partial` or an Equinox module"
            )


def name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__
