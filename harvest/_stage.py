"""Tracing, compiling and caching of any callable.

A transformed function is a pytree (`Transformed`): its function, the values it plants and its
options. A call is flattened into arrays and a hashable rest. Outside of any JAX transform the rest
is the key of a compiled program; inside, everything is inlined into the ambient trace and nothing
is kept.

Two things are cached under such keys. `_traces` has, for a function and the structure of its
arguments, a `jax.jit` whose `trace` gives its jaxpr: whichever transform asks, the user's function
is traced once for each set of types. `_programs` has, for a transformed function, the `jax.jit`
that evaluates it.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from . import _compat
from ._cache import Cache, count_identities, name_of
from ._errors import HarvestError, UnsupportedError, warn
from ._placement import brought, is_committed, is_spread
from ._rule import ON_NEW_RULE
from ._structure import Bound, Packed, Structure, is_held, is_traced
from ._walk import Walk

_traces = Cache()  # jitted functions, for their traces
_programs = Cache()  # jitted evaluations of transformed functions
ON_NEW_RULE.extend((_traces.clear, _programs.clear))


class Place(NamedTuple):
    """Where a leaf is among the arguments of a program."""

    position: int


class Program(NamedTuple):
    """A traced call of a user's function."""

    jaxpr: Jaxpr
    leaves: list[Any]  # its arguments
    out: Any  # tree of its results
    walk: Walk
    structure: Structure  # of `(fn, args, kwargs)`

    def result(self, outs: list[Any]) -> Any:
        """The function's result, from the outputs of the jaxpr."""
        outs = list(map(_compat.as_array, outs, self.jaxpr.out_avals))
        return jax.tree.unflatten(self.out, outs).unflatten()

    def names(self) -> list[str]:
        """Where each leaf is among the arguments: `args[0]['w']`."""
        fn, args, kwargs = self.structure.unflatten(map(Place, range(len(self.leaves))))
        names = {}
        for name, tree in (("fn", fn), ("args", args), ("kwargs", kwargs)):
            is_place = lambda node: isinstance(node, Place)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_place):
                if is_place(leaf):
                    names[leaf.position] = name + jax.tree_util.keystr(path)
        return [names[position] for position in range(len(self.leaves))]

    def places(self, argument: int) -> Any:
        """A tree like an argument, with a `Place` for each of its dynamic leaves."""
        _, args, _ = self.structure.unflatten(map(Place, range(len(self.leaves))))
        return args[argument]


def pack(value: Any) -> Packed:
    """What leaves a traced function."""
    packed = Packed.pack(value, is_held)
    for static in packed.structure.statics:
        if _compat.holds_tracer(static):
            raise UnsupportedError(
                f"a result or a sown value has a leaf `{name_of(static)}` that holds what is "
                "being traced, and that JAX cannot look into; return the values themselves, or "
                "in a pytree such as a `jax.tree_util.Partial` or an Equinox module"
            )
    return packed


class Transformed:
    """A transformed function: what `reap`, `plant`, ... return.

    A pytree, so that its arrays (those of a model, those that are planted) are arguments of the
    compiled program. Subclasses name the attributes that hold arrays in `_dynamic`, those that do
    not in `_static`, and evaluate a call in `_inline`.
    """

    fn: Callable[..., Any]
    _dynamic: tuple[str, ...] = ("fn",)
    _static: tuple[str, ...] = ()
    _planted: tuple[tuple[str, str], ...] = ()  # attributes with keys, and with what is for them

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(
            cls,
            lambda self: ([getattr(self, n) for n in cls._dynamic], self._options()),
            functools.partial(_rebuilt, cls),
        )

    def __init__(self, fn: Callable[..., Any], name: str):
        self.fn = _checked(fn, name)
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        # As a decorator of a method, it is one: `jax.jit` binds too.
        return self if obj is None else types.MethodType(self, obj)

    def __repr__(self) -> str:
        return f"<harvest.{type(self).__name__.lower()} of {name_of(self.fn)}>"

    def _with(self, **attributes: Any) -> "Transformed":
        changed = copy.copy(self)
        for name, value in attributes.items():
            setattr(changed, name, value)
        return changed

    def _options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._static)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest and IPython end a traceback in the user's frame
        try:
            if _compat.tracing():
                resolved = self._all_resolved(args, kwargs, trace_afresh)
                result = resolved._inline(args, kwargs, trace_afresh)
            else:
                resolved = self._all_resolved(args, kwargs, trace_cached)
                result = _run_staged(resolved, args, kwargs)
        except HarvestError as error:
            # The frames between are ours and JAX's, as is the note that JAX adds about them; the
            # message has the user's line.
            notes = getattr(error, "__notes__", ())
            error.__notes__ = [note for note in notes if "internal frames" not in note]
            raise error.with_traceback(None) from None
        value, notes = result
        for note in notes:
            warn(note)
        return self._finish(value)

    def _finish(self, value: Any) -> Any:
        """What the user gets: for what must not pass through `jit`, which sorts dicts."""
        return value

    def _all_resolved(self, args: Any, kwargs: Any, trace: Callable) -> "Transformed":
        """`_resolved`, for the transforms that this one transforms as well."""
        resolved = self
        if isinstance(self.fn, Transformed):
            resolved = self._with(fn=self.fn._all_resolved(args, kwargs, trace))
        if trace is trace_cached:
            resolved = resolved._brought(args, kwargs)
        return resolved._resolved(args, kwargs, trace)

    def _brought(self, args: Any, kwargs: Any) -> "Transformed":
        """This, with what is planted on the devices that the program runs on."""
        resolved = self
        for keys, name in self._planted:
            values = getattr(self, name)
            if any(map(is_committed, jax.tree.leaves(values))):
                leaves = jax.tree.leaves((self.fn, args, kwargs))
                pairs = zip(getattr(self, keys), values, strict=True)
                moved = tuple(brought(value, leaves, key) for key, value in pairs)
                resolved = resolved._with(**{name: moved})
        return resolved

    def _resolved(self, args: Any, kwargs: Any, trace: Callable) -> "Transformed":
        """This, with what depends on the program decided before it is flattened.

        In a key of a cache, choices that a user's function makes must have been made.
        """
        return self

    def _inline(self, args: Any, kwargs: Any, trace: Callable) -> tuple[Any, tuple[str, ...]]:
        """The result, and what to warn about; traces `fn` by `trace(name, fn, args, kwargs)`."""
        raise NotImplementedError


def _rebuilt(cls: type[Any], options: Any, children: Any) -> Any:
    self = object.__new__(cls)
    for name, value in zip(cls._dynamic, children, strict=True):
        setattr(self, name, value)
    for name, value in zip(cls._static, options, strict=True):
        setattr(self, name, value)
    return self


def _checked(fn: Any, name: str) -> Callable[..., Any]:
    """`fn`, with `functools.partial` as a pytree; an error for what tracing would break."""
    if not callable(fn):
        raise UnsupportedError(
            f"`{name}` got a `{type(fn).__name__}`; wanted a callable: write "
            f"`{name}(fn, ...)(*args)`, not `{name}(fn(*args))`"
        )
    for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction):
        if kind(fn):
            raise UnsupportedError(
                f"`{name}` got `{name_of(fn)}`, a generator or coroutine function, whose body does "
                "not run when it is called; wanted a function that returns its result"
            )
    held = [fn, getattr(fn, "__self__", None), getattr(fn, "module", None)]  # of a tapped model
    if isinstance(fn, functools.partial):
        held += [fn.func, getattr(fn.func, "__self__", None), *fn.args, *fn.keywords.values()]
    for part in held:
        if any("flax.nnx" in cls.__module__ for cls in type(part).__mro__):
            raise UnsupportedError(
                f"`{name}` got a `flax.nnx` module (`{type(part).__name__}`), whose mutable state "
                "tracing would lose; split it and merge it inside: `graphdef, state = "
                f"nnx.split(module)`, then `{name}(lambda state, *args: nnx.merge(graphdef, state)"
                "(*args))(state, ...)`"
            )
    if isinstance(fn, functools.partial):
        _checked(fn.func, name)
        return Bound.of(fn)
    return fn


# --------------------------------------------------------------------------------- tracing


def trace_afresh(
    name: str,
    fn: Callable,
    args: Any,
    kwargs: Any,
    *,
    planting: bool = False,
    is_dynamic: Callable = is_traced,
) -> Program:
    """Trace without a cache: closures may hold tracers of the ambient transform."""
    planting = planting or _compat.PLANTING.value  # an outer `plant` is tracing as well
    leaves, structure = _flattened(fn, args, kwargs, is_dynamic)
    with _compat.WATCHED(True), _compat.PLANTING(planting), jax.disable_jit(False):
        jaxpr, out = jax.make_jaxpr(_flat(name, structure), return_shape=True)(*leaves)
    return Program(jaxpr, leaves, jax.tree.structure(out), Walk(), structure)


def trace_cached(
    name: str,
    fn: Callable,
    args: Any,
    kwargs: Any,
    *,
    planting: bool = False,
    is_dynamic: Callable = is_traced,
) -> Program:
    """Trace at most once for each structure and types of the arguments."""
    leaves, structure = _flattened(fn, args, kwargs, is_dynamic)
    entry = _traces.get(structure, lambda pending: _flat(name, pending))
    watched, plants = _compat.WATCHED(True), _compat.PLANTING(planting)
    with entry.pending(structure), watched, plants, jax.disable_jit(False):
        traced = entry.jitted.trace(*leaves)
    walk = entry.walks.setdefault(traced.jaxpr, Walk())
    return Program(traced.jaxpr, leaves, jax.tree.structure(traced.out_info), walk, structure)


def _flattened(
    fn: Callable, args: Any, kwargs: Any, is_dynamic: Callable
) -> tuple[list[Any], Structure]:
    leaves, treedef = jax.tree.flatten((fn, args, kwargs))
    held = treedef.children()[0].num_leaves
    typed = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves[:held]]  # for `sites`
    in_fn = [t or is_held(leaf) for t, leaf in zip(typed, leaves[:held], strict=True)]
    dynamic = [*in_fn, *map(is_dynamic, leaves[held:])]
    return Structure.split(leaves, treedef, dynamic)


def _flat(name: str, structure: "Structure | Callable[[], Structure]") -> Callable[..., Packed]:
    """A function of the dynamic leaves of `(fn, args, kwargs)`."""

    def flat(*leaves: Any) -> Packed:
        now = structure() if callable(structure) else structure
        fn, args, kwargs = now.unflatten(leaves)
        try:
            return pack(fn(*args, **kwargs))
        except Exception as error:
            if not isinstance(error, HarvestError):
                error.add_note(f"harvest: raised while `{name}` traced `{name_of(fn)}`")
            if "static argument" in str(error):
                error.add_note(
                    "harvest: floats and numpy numbers that a transformed function is called with "
                    "are traced; one that is to be static can be bound by `functools.partial`"
                )
            raise

    return flat


def _run_staged(transformed: Transformed, args: Any, kwargs: Any) -> tuple[Any, tuple[str, ...]]:
    leaves, structure = _flattened(transformed, args, kwargs, is_traced)
    # A program runs on the devices of its arguments, also of those that it comes not to need.
    kept = any(map(is_spread, leaves))
    entry = _programs.get(structure, _program, on_new=count_identities, keep_unused=kept)
    with entry.pending(structure):
        packed = entry.jitted(*leaves)
    return packed.unflatten()


def _program(pending: Callable[[], Structure]) -> Callable[..., Packed]:
    def run(*leaves: Any) -> Packed:
        transformed, args, kwargs = pending().unflatten(leaves)
        return pack(transformed._inline(args, kwargs, trace_cached))

    return run
