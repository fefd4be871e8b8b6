"""Everything that depends on JAX's version or on a surface JAX does not document.

Each function says what it reads and why we care, so that a release of JAX that moves something
breaks one function here and nothing else. No other file of the package reads the parameters of
an equation, a name stack or the kind of a trace.
"""

import functools
import inspect
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax import lax
from jax.experimental import hijax, multihost_utils
from jax.experimental.layout import Format
from jax.extend import source_info_util
from jax.extend.core import (
    Jaxpr,
    JaxprEqn,
    Var,
    get_opaque_trace_state,
    primitives,
    take_current_trace,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Whose lines are never "the user's": this package, and the wrappers that jaxtyping and beartype
# put around functions.
NOT_THE_USER = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(jaxtyping.__file__) + os.sep,
    "<@beartype",
)
for _prefix in NOT_THE_USER:
    source_info_util.register_exclusion(_prefix)

# What may call a layer for the user: `jax.vmap(layer)`, `eqx.filter_jit(layer)`.
_MACHINERY = (
    *NOT_THE_USER,
    os.path.dirname(jax.__file__) + os.sep,
    os.path.join(os.path.dirname(eqx.__file__), "_"),  # and so not `equinox.nn`
)

with jax.ensure_compile_time_eval():
    # Taken inside the context, so that importing harvest while tracing is harmless.
    _EVAL_STATE = get_opaque_trace_state(convention="harvest")


HI_PRIM = "call_hi_primitive"  # the primitive that applies a `HiPrim`

# Whether a transform of harvest is tracing, that will see what is sown.
WATCHED = jax.make_user_context(False)

# Whether `plant` is tracing. A context of JAX's, so that what JAX caches while it is set is told
# apart from what it caches otherwise.
PLANTING = jax.make_user_context(False)


# Where a `sow` would not be noticed, or None.
UNSEEN = jax.make_user_context(None)


# What the services of JAX's runtime raise.
RUNTIME_ERROR = jax.errors.JaxRuntimeError


def coordination_service() -> Any:
    """The client of the service that `jax.distributed.initialize` starts: a store of keys.

    JAX has no name of its own for it; Orbax and JAX's own checkpoints use the same object.
    """
    return multihost_utils.distributed.global_state.client  # pyright: ignore


def tracing() -> bool:
    """Whether an ambient `jit`, `vmap`, `grad`, ... is tracing the caller.

    `jax.core.trace_state_clean` is private; comparing opaque trace states is its public form.
    """
    return get_opaque_trace_state(convention="harvest") != _EVAL_STATE


def batching_a_predicate() -> bool:
    """Whether `vmap` is turning a `cond` with a batched predicate into a `select`.

    Nothing in the program tells it afterwards, so this looks at JAX's frames. Were the names to
    change, a warning would be missing and nothing else; a test pins them.
    """
    frame, batched = sys._getframe(), 0
    while frame is not None and batched < 2:
        name = frame.f_code.co_name
        # JAX caches what it has batched: a function that is called in a branch is called elsewhere
        # as well, so that only what is in the branch itself can be told.
        batched += name in ("batch_jaxpr_axes", "_batch_jaxpr2")
        if name == "_cond_batching_rule" and frame.f_locals.get("index_dim") is not None:
            return True
        frame = frame.f_back
    return False


def spmd_axes(axis_data: Any) -> frozenset[str]:
    """The mesh axes that `spmd_axis_name` of a `vmap` names.

    Of what a batching rule is told of the mapped axis, this is not documented. A `shard_map` inside
    of the `vmap` splits the mapped axis over them, and its own specs do not say so.
    """
    names = getattr(axis_data, "spmd_name", None) or ()
    return frozenset(names if isinstance(names, tuple) else (names,))


def tracing_a_linear_call() -> bool:
    """Whether the function of a `linear_call`, or its transpose, is being traced.

    JAX cannot lower the call with a hi primitive inside, and says so without any line of the
    user's. Nothing else tells where a value is sown before the program is there, so this looks at
    JAX's frames. Were the names to change, our error would be JAX's; a test pins them.
    """
    names = ("linear_call", "_linear_call_transpose_rule")
    home, frame = os.path.dirname(jax.__file__) + os.sep, sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in names and code.co_filename.startswith(home):
            return True
        frame = frame.f_back
    return False


# ------------------------------------------------------------------------------- types


def is_hi(value: Any) -> bool:
    """Whether `value` is of a user-defined `HiType`."""
    if isinstance(value, bool | int | float | complex | str | None | np.ndarray | jax.Array):
        return isinstance(value, jax.core.Tracer) and isinstance(jax.typeof(value), hijax.HiType)
    try:
        return isinstance(jax.typeof(value), hijax.HiType)
    except TypeError:
        return False


def is_hi_type(aval: Any) -> bool:
    return isinstance(aval, hijax.HiType)


def is_array_type(aval: Any) -> bool:
    """Whether an aval is that of an array; a `HiType` may have a `shape` and a `dtype` as well."""
    return hasattr(aval, "dtype") and not is_hi_type(aval)


def holds_tracer(obj: Any) -> bool:
    """Whether an object that is no pytree holds a tracer of the trace that is under way.

    In its attributes, if it is a function in its closure, if it is a generator in its frame.
    """
    with take_current_trace() as trace:
        return _holds_tracer_of(trace, obj, frozenset())


def _holds_tracer_of(trace: Any, obj: Any, seen: frozenset[int]) -> bool:
    if isinstance(obj, jax.core.Tracer):
        return getattr(obj, "_trace", trace) is trace
    if id(obj) in seen or isinstance(obj, type | types.ModuleType):
        return False
    if isinstance(obj, functools.partial):
        held = [obj.func, *obj.args, *obj.keywords.values()]
    elif isinstance(obj, types.MethodType):
        held = [obj.__self__, obj.__func__]
    elif isinstance(obj, types.FunctionType):
        cells = obj.__closure__ or ()
        held = [cell.cell_contents for cell in cells if cell != types.CellType()]
    elif isinstance(obj, types.GeneratorType):
        held = list(obj.gi_frame.f_locals.values()) if obj.gi_frame else []
    else:
        slots = [getattr(obj, name, None) for name in getattr(type(obj), "__slots__", ())]
        held = [*getattr(obj, "__dict__", {}).values(), *slots]
    return any(_holds_tracer_of(trace, x, seen | {id(obj)}) for x in jax.tree.leaves(held))


def as_array(value: Any, aval: Any) -> Any:
    """A constant of a jaxpr as an array: JAX keeps some as objects of a private type."""
    if isinstance(value, jax.Array) or not is_array_type(aval) or is_ref(value):
        return value
    return like_weak(jnp.asarray(value, aval.dtype), aval)


def is_ref(value: Any) -> bool:
    """Whether `value` is a mutable `jax.Ref`."""
    if isinstance(value, np.ndarray | np.generic | bool | int | float | complex | str):
        return False
    try:
        return isinstance(jax.typeof(value), hijax.AbstractRef)
    except TypeError:
        return False


def varying(aval: Any) -> frozenset[str]:
    """The manual mesh axes along which a value may differ; none under `check_vma=False`.

    The attribute was called `vma` before 0.12.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def partly_reduced(aval: Any) -> frozenset[str]:
    """The manual mesh axes along which a value is still to be summed, or its cotangent is."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.unreduced | manual.reduced


def explicit_sharding(aval: Any) -> NamedSharding | None:
    """The sharding that is a part of a type: None if no axis of its mesh is explicit.

    In JAX the type of every array has a sharding, of an empty mesh if there is none.
    """
    sharding = getattr(aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def mesh_of(avals: Sequence[Any]) -> AbstractContextManager[Any]:
    """The mesh of types, where it is not the one that is set.

    None may be: then what is made of no sharded value (by `jnp.full`, say) is not sharded, and much
    of JAX drops the sharding of a value when it makes another one. And under `auto_axes` or
    `explicit_axes` another one is, of which values outside are not.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty:
        avals = [aval for aval in avals if explicit_sharding(aval) is not None]
    meshes = [aval.sharding.mesh for aval in avals if getattr(aval, "sharding", None) is not None]
    there = next((mesh.abstract_mesh for mesh in meshes if not mesh.empty), here)
    if _axes_of(there) == _axes_of(here) or here.manual_axes or there.manual_axes:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(there)


def in_this_mesh(tree: Any) -> Any:
    """Arrays of the mesh of another context as such of this one: they stay where they are."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty or here.manual_axes:
        return tree

    def entered(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_hi(leaf) or is_ref(leaf):
            return leaf
        sharding = jax.typeof(leaf).sharding
        if sharding.mesh.empty or set(sharding.mesh.axis_names) != set(here.axis_names):
            return leaf
        return placed(leaf, NamedSharding(here, sharding.spec))

    return jax.tree.map(entered, tree)


def zeros(aval: Any) -> jax.Array:
    """Zeros of the type `aval`: of its sharding and varying mesh axes too, and of key types."""
    return placed_like(jnp.zeros(aval.shape, aval.dtype), aval)


def manual_axes() -> frozenset[str]:
    """The mesh axes that the `shard_map`s around have made manual."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def checks_varying() -> bool:
    """Whether the innermost `shard_map` around, with manual axes, has `check_vma`.

    Only what its index is typed as tells; `eval_shape` leaves no equation behind.
    """
    index = lambda: lax.axis_index(next(iter(manual_axes())))
    return bool(varying(jax.eval_shape(index)))


# --------------------------------------------------------------------------- equations


class UserScope(str):
    """A component of a name stack that `harvest.scope` made.

    A `str`, so that JAX and profilers print it as any other scope; a type of its own, so that
    scopes made by anybody else stay out of keys.
    """

    __slots__ = ()


def scope_of(eqn: JaxprEqn) -> tuple[UserScope, ...]:
    """The user scopes around an equation, relative to the jaxpr that holds it.

    Read from the entries of the stack, never from its text: a user may call a scope `jvp(z)`.
    """
    stack = eqn.source_info.name_stack.stack
    return joined_scopes((), tuple(e.name for e in stack if isinstance(e.name, UserScope)))


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether `jax.checkpoint` evaluates an equation again in a backward pass.

    JAX says so in the name stack, in both implementations of `checkpoint`.
    """
    return any(e.name == "rematted_computation" for e in eqn.source_info.name_stack.stack)


def joined_scopes(
    outer: tuple[UserScope, ...], inner: tuple[UserScope, ...]
) -> tuple[UserScope, ...]:
    """One scope inside another, each entered once.

    When JAX traces a body again for its derivative (`checkpoint`, custom rules), it pushes the
    scopes of the forward pass a second time: the very same objects.
    """
    scopes = list(outer)
    for scope in inner:
        if not any(scope is other for other in scopes):
            scopes.append(scope)
    return tuple(scopes)


class Frame(NamedTuple):
    """A component of a name stack: that of a scope, or of a transform such as `jvp`."""

    name: str
    is_scope: bool
    entry: Any  # itself: one `with` makes one of them


def frames_of(eqn: JaxprEqn) -> list[Frame]:
    """The name stack of an equation, relative to the jaxpr that holds it.

    Its components are of two private types, hence the test by name.
    """
    stack = eqn.source_info.name_stack.stack
    return [Frame(e.name, type(e).__name__ == "Scope", e) for e in stack]


def in_scope(eqn: JaxprEqn, scope: UserScope) -> JaxprEqn:
    """An equation with one more scope around it, the innermost."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))


def caller() -> str:
    """Where the user's code is that calls us, as `file:line`.

    JAX's own source information is lost in some derivative rules.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_MACHINERY):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def defined_at(fn: Any) -> str:
    """The line of a function, or that of the user's call if it is none of the user's.

    The equation of an outermost `jit` has no line: nothing of the user's is around it.
    """
    plain = inspect.unwrap(fn)
    while isinstance(plain, functools.partial):
        plain = inspect.unwrap(plain.func)
    if not hasattr(plain, "__code__"):
        plain = inspect.unwrap(type(plain).__call__)
    code = getattr(plain, "__code__", None)
    if code is None or code.co_filename.startswith(_MACHINERY):
        return caller()
    return f"{code.co_filename}:{code.co_firstlineno}"


def source_of(source_info: Any) -> str:
    """Where the user's code made an equation, as `file:line`; empty if none of it is around."""
    # `file:line:column (function)`, innermost last.
    frames = source_info_util.summarize(source_info, num_frames=8).splitlines()
    places = [re.sub(r"^(.*?:\d+)(:\d+)? \(.*\)$", r"\1", frame) for frame in frames]
    return next((p for p in reversed(places) if not p.startswith(_MACHINERY)), "")


def equation_context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Evaluate in the name stack, mesh, metadata and configuration the equation was traced in.

    What is raised inside gets the user's own traceback as its cause.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    context = ExitStack()
    context.enter_context(
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
    )
    context.enter_context(settings_of(eqn))
    return context


def settings_of(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """The mesh, metadata and configuration an equation was traced in; not documented by JAX."""
    return eqn.ctx.manager


def bind(eqn: JaxprEqn, invals: Sequence[Any]) -> list[Any]:
    """Evaluate one equation as it stands, as `jax.core.eval_jaxpr` does."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with equation_context(eqn):
        out = eqn.primitive.bind(*invals, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def uses_refs(eqn: JaxprEqn) -> bool:
    """Whether an equation makes, reads or writes a mutable reference."""
    return any(isinstance(v.aval, hijax.AbstractRef) for v in (*eqn.invars, *eqn.outvars))


def collective_over(effect: Any) -> Any:
    """The name of a mapped axis, if the effect says that something is computed over one.

    Its type is private, hence the test by name.
    """
    return effect.name if type(effect).__name__ == "NamedAxisEffect" else None


@contextmanager
def locating_nans(eqn: JaxprEqn) -> Iterator[None]:
    """Add the user's line to what `jax_debug_nans` and `jax_debug_infs` raise."""
    try:
        yield
    except FloatingPointError as error:
        if not any(note.startswith("harvest:") for note in getattr(error, "__notes__", ())):
            error.add_note(f"harvest: in `{primitive_name(eqn)}`, at {source_of(eqn.source_info)}")
        raise


def checks_operations() -> bool:
    """Whether JAX is to look for NaNs operation by operation.

    It then runs a jitted function again without `jit`, and we evaluate each equation. An inner
    `jit` must be opened as well: bound as it stands it would raise an error that is private to
    JAX.
    """
    wanted = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # pyright: ignore
    return wanted and not tracing()


def hi_prim(eqn: JaxprEqn) -> Any:
    """The `HiPrim` that an equation applies, or None.

    JAX has another primitive with that parameter, which applies the transpose of one.
    """
    return eqn.params["_prim"] if eqn.primitive.name == HI_PRIM else None


def primitive_name(eqn: JaxprEqn) -> str:
    """The name of the primitive; for a `HiPrim`, of its class."""
    prim = hi_prim(eqn)
    return eqn.primitive.name if prim is None else type(prim).__name__


def jaxprs_in(params: Any) -> Iterator[Jaxpr]:
    """Every jaxpr among parameters, in tuples, mappings and `Traced` objects too.

    Not those of a `HiPrim` (see `Walk.expansion`): the equation may only apply its transpose.
    """
    if isinstance(params, Jaxpr):
        yield params
    elif isinstance(params, dict):
        for value in params.values():
            yield from jaxprs_in(value)
    elif isinstance(params, list | tuple):
        for value in params:
            yield from jaxprs_in(value)
    elif isinstance(getattr(params, "jaxpr", None), Jaxpr):
        yield params.jaxpr


def opened_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation that has a rule, in order.

    But for the predicate of a `while_loop`, in which nothing can be collected. Of `HiPrim`s only
    `jax.checkpoint`'s evaluates its jaxpr whatever becomes of it.
    """
    prim = hi_prim(eqn)
    if prim is not None:
        return [prim.jaxpr] if type(prim).__name__ == "RematTraced" else []
    found: list[Jaxpr] = []
    _with_each_jaxpr(_opened_params(eqn), lambda jaxpr: found.append(jaxpr) or jaxpr)
    return found


def with_jaxprs(eqn: JaxprEqn, jaxprs: Sequence[Jaxpr], effect: Any) -> JaxprEqn:
    """An equation with these for its `opened_jaxprs`, all of which have that effect.

    JAX wants the branches of a `cond` to have the same effects.
    """
    prim = hi_prim(eqn)
    if prim is not None:
        remat = type(prim)(*jaxprs, prim.policy, prim.prevent_cse)
        return eqn.replace(params={"_prim": remat}, effects=eqn.effects | {effect})
    given = iter(jaxprs)
    opened = _with_each_jaxpr(_opened_params(eqn), lambda _: next(given))
    return eqn.replace(params={**eqn.params, **opened}, effects=eqn.effects | {effect})


def _opened_params(eqn: JaxprEqn) -> dict[str, Any]:
    return {name: value for name, value in eqn.params.items() if name != "cond_jaxpr"}


def _with_each_jaxpr(params: Any, fn: Callable[[Jaxpr], Jaxpr]) -> Any:
    if isinstance(params, Jaxpr):
        return fn(params)
    if isinstance(params, dict):
        return {name: _with_each_jaxpr(value, fn) for name, value in params.items()}
    if type(params) in (list, tuple):
        return type(params)(_with_each_jaxpr(value, fn) for value in params)
    return params


def has_value(var: Any) -> bool:
    """Whether a variable of a jaxpr is an array or of a hi type: neither a `Ref` nor a token."""
    if isinstance(var.aval, hijax.AbstractRef):
        return False
    return is_hi_type(var.aval) or isinstance(var.aval, jax.core.ShapedArray)


def used_outvars(eqn: JaxprEqn) -> list[Var]:
    """The outputs of an equation as variables that can be read.

    JAX has those that nothing uses as variables of a private class.
    """
    return [v if type(v) is Var else Var(v.aval) for v in eqn.outvars]


@functools.cache
def _hi_prim_primitive() -> Any:
    """The primitive that applies a `HiPrim`."""
    (eqn,) = jax.make_jaxpr(_Nothing())(0.0).eqns
    return eqn.primitive


class _Nothing(hijax.HiPrim):
    def __init__(self):
        self.in_avals, self.out_aval, self.params = (jax.typeof(0.0),), (), {}
        super().__init__()

    def expand(self, *_):
        return ()


def applying(prim: hijax.HiPrim, invars: Any, outvars: Any, beside: JaxprEqn) -> JaxprEqn:
    """The equation that applies a `HiPrim` to variables, made where another one was."""
    return beside.replace(
        invars=list(invars),
        outvars=list(outvars),
        primitive=_hi_prim_primitive(),
        params={"_prim": prim},
        effects=frozenset(prim.effects),
    )


def with_eqns(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any], effect: Any) -> Jaxpr:
    """A jaxpr with other equations, that apply `HiPrim`s and have one more effect."""
    return jaxpr.replace(
        eqns=list(eqns),
        outvars=list(outvars),
        effects=jaxpr.effects | {effect},
        debug_info=jaxpr.debug_info,
        is_high=True,
    )


def names_in(eqn: JaxprEqn) -> tuple[str | None, str | None]:
    """The name of the function of a `jit`, and that which a `checkpoint_name` gives."""
    name = eqn.params.get("name")
    kind = eqn.primitive.name
    return (name if kind == "jit" else None), (name if kind == "name" else None)


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Every jaxpr that an equation evaluates, also if it holds a Python function instead."""
    yield from jaxprs_in(eqn.params)
    if primitive_name(eqn) == "noinline":
        yield from _not_inlined(eqn)


def _not_inlined(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """What an `equinox.internal.noinline` calls; nothing if that cannot be traced here.

    Its parameters are a flattened `(index, abstract_fn, transforms, (fn, args, kwargs))` with bare
    objects in the places of arrays. The function itself is known by its index to Equinox alone;
    `abstract_fn` calls it, unless the user has given one that does not.
    """
    avals = iter([_shaped(v.aval) for v in eqn.invars])
    flat = [next(avals) if type(x) is object else x for x in eqn.params["static"]]
    try:
        _, abstract_fn, transforms, args = jax.tree.unflatten(eqn.params["treedef"], flat)
        called = lambda call: abstract_fn(call[0], *call[1], **call[2])
        for transform in transforms[1:]:  # of derivatives and `vmap`
            called = transform(called)
        with PLANTING(True):  # for both kinds of markers
            jaxpr = eqx.filter_make_jaxpr(called)(args)[0]
    except Exception:
        return
    yield jaxpr


def _shaped(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype) if is_array_type(aval) else aval


def is_harmless(prim: hijax.HiPrim) -> bool:
    """Whether a `HiPrim` is one of JAX's or ours that runs nobody else's function."""
    owner = type(prim).__module__.partition(".")[0]
    runs = any(map(callable, jax.tree.leaves(prim.params))) or any(jaxprs_in(prim.params))
    return owner in ("jax", "harvest") and not runs


def positional_effects(jaxpr: Jaxpr) -> frozenset[Any]:
    """The effects of a jaxpr as those of a `HiPrim`: on inputs by position, not by variable."""
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    effects: set[Any] = set(jaxpr.effects)
    on_inputs = {e for e in effects if hasattr(e, "input")}
    moved = {e.replace(position[e.input]) for e in on_inputs if e.input in position}
    return frozenset(effects - on_inputs | moved)


def without_structured_residual(pullback: Any) -> tuple[Any, Any]:
    """What `jax.vjp` returns for one equation, and the structured residual of its rule (or None).

    Each rule that has any adds an item to a list, which users may look into.
    """
    if not pullback.structured_residuals:
        return pullback, None
    (residual,) = pullback.structured_residuals
    return pullback.replace(structured_residuals=[]), residual


def with_structured_residual(pullback: Any, residual: Any) -> Any:
    return pullback.replace(structured_residuals=[residual])


# -------------------------------------------------------------- parameters of primitives


class ScanParams(NamedTuple):
    jaxpr: Jaxpr  # [*consts, *carry, *xs] -> [*carry, *ys]
    num_consts: int
    num_carry: int
    length: int
    options: dict[str, Any]  # for `lax.scan`


def scan_params(eqn: JaxprEqn) -> ScanParams:
    """Since 0.12 a scan counts its arguments in `ft_in`, not in `num_consts` and `num_carry`."""
    params = eqn.params
    consts, carry, _ = params["ft_in"].unpack()
    options = {"reverse": params["reverse"], "unroll": params["unroll"]}
    return ScanParams(params["jaxpr"], len(consts), len(carry), params["length"], options)


class JitParams(NamedTuple):
    jaxpr: Jaxpr
    name: str
    options: dict[str, Any]  # for `jax.jit`, but for shardings
    in_shardings: tuple[Any, ...]  # or `Format`s, one for each input, None if not given
    out_shardings: tuple[Any, ...]


def jit_params(eqn: JaxprEqn) -> JitParams:
    """Shardings that were not given are of a private type, hence the test by name.

    The parts of a `Format` are apart: its layout is None where none was given.
    """
    params = eqn.params

    def given(where: str) -> tuple[Any, ...]:
        pairs = zip(params[f"{where}_layouts"], params[f"{where}_shardings"], strict=True)
        return tuple(
            None
            if type(sharding).__name__ == "UnspecifiedValue"
            else sharding
            if layout is None
            else Format(layout, sharding)
            for layout, sharding in pairs
        )

    options = {"keep_unused": params["keep_unused"], "inline": params["inline"]}
    return JitParams(
        params["jaxpr"],
        params["name"],
        options,
        given("in"),
        given("out"),
    )


class RematParams(NamedTuple):
    jaxpr: Jaxpr
    policy: Any
    prevent_cse: bool | tuple[bool, ...]
    differentiated: bool


def remat_params(eqn: JaxprEqn) -> RematParams:
    """`jax.checkpoint` is a primitive (`remat2`) or, under `jax_remat3`, a `HiPrim`."""
    prim = hi_prim(eqn)
    if prim is None:
        p = eqn.params
        return RematParams(p["jaxpr"], p["policy"], p["prevent_cse"], p["differentiated"])
    return RematParams(prim.jaxpr, prim.policy, prim.prevent_cse, False)


class CondParams(NamedTuple):
    branches: tuple[Jaxpr, ...]  # [*operands] -> [*outs]
    platforms: tuple[tuple[str, ...] | None, ...] | None  # None is the default branch


def cond_params(eqn: JaxprEqn) -> CondParams:
    """A `platform_dependent` is a `cond` whose branches carry the names of their platforms."""
    return CondParams(eqn.params["branches"], eqn.params.get("branches_platforms"))


class WhileParams(NamedTuple):
    cond_jaxpr: Jaxpr  # [*cond_consts, *carry] -> [predicate]
    body_jaxpr: Jaxpr  # [*body_consts, *carry] -> [*carry]
    cond_consts: int
    body_consts: int
    lanes: tuple[int, ...]  # the shape of the predicate, if `vmap` has batched it


def while_params(eqn: JaxprEqn) -> WhileParams:
    """The inputs of the equation are `[*cond_consts, *body_consts, *carry]`."""
    p = eqn.params
    lanes = p["cond_jaxpr"].out_avals[0].shape
    return WhileParams(
        p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"], p["body_nconsts"], lanes
    )


class ShardMapParams(NamedTuple):
    jaxpr: Jaxpr  # [*args] -> [*outs], of shards
    mesh: Any  # a `Mesh`, or an `AbstractMesh`
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    manual: tuple[str, ...]  # the axes that become manual, in the order of the mesh
    check_vma: bool


def shard_map_params(eqn: JaxprEqn) -> ShardMapParams:
    p = eqn.params
    manual = tuple(axis for axis in p["mesh"].axis_names if axis in p["newly_manual_axes"])
    return ShardMapParams(
        p["jaxpr"], p["mesh"], p["in_specs"], p["out_specs"], manual, p["check_vma"]
    )


def batches_as_written(eqn: JaxprEqn) -> bool:
    """Whether `vmap` maps the body of an equation, and not a rule that the user has written.

    JAX makes `HiPrim`s of custom derivatives as well, with `jax_custom_jvp3`, `jax_custom_vjp3` or
    `generic_batching=True`.
    """
    prim = hi_prim(eqn)
    if prim is None:
        return primitive_name(eqn) != "custom_vmap_call"
    return getattr(prim, "batches", type(prim).__module__.startswith("jax."))


def called_jaxpr(eqn: JaxprEqn) -> Jaxpr:
    """The body of a custom rule's call, of `eval_jaxpr`, of `composite` or of `remat_opt`.

    The last is the forward rule of a `custom_vjp` with `optimize_remat=True`.
    """
    names = {"custom_vmap_call": "call", "remat_opt": "fwd_jaxpr"}
    return eqn.params[names.get(eqn.primitive.name, "call_jaxpr")]


class MetadataParams(NamedTuple):
    jaxpr: Jaxpr
    metadata: dict[str, str]
    of_derivatives: Any  # "same", or the metadata of what autodiff derives from the call


def metadata_params(eqn: JaxprEqn) -> MetadataParams:
    """An `xla_metadata_call` keeps metadata as sorted pairs; those dropped are an empty tuple."""
    p, of_derivatives = eqn.params, eqn.params["ad_metadata"]
    if of_derivatives != "same":
        of_derivatives = dict(of_derivatives)
    return MetadataParams(p["jaxpr"], dict(p["xla_metadata"]), of_derivatives)


class ComputeOnParams(NamedTuple):
    jaxpr: Jaxpr
    out_spaces: tuple[Any, ...]  # one for each output
    options: dict[str, Any]  # for `compute_on`


def compute_on_params(eqn: JaxprEqn) -> ComputeOnParams:
    """A `compute_on` keeps the options of the compiler as a text in JSON, or None."""
    p, options = eqn.params, eqn.params["compiler_options_json"]
    return ComputeOnParams(
        p["jaxpr"],
        p["out_memory_spaces"],
        {
            "compute_type": p["compute_type"],
            "compiler_options": None if options is None else json.loads(options),
        },
    )


def memory_space(aval: Any) -> Any:
    """The memory that a value is in; that of the device for a hi type, which has none."""
    return getattr(aval, "memory_space", jax.memory.Space.Device)


def in_memory_of(value: jax.Array, aval: Any) -> jax.Array:
    """`value` in the memory of `aval`: JAX combines no values of different memories."""
    space = memory_space(aval)
    return value if memory_space(jax.typeof(value)) == space else jax.device_put(value, space)


def is_symbolic_zero(value: Any) -> bool:
    """`SymbolicZero` is public only as a word of the custom-derivative docs."""
    return type(value).__name__ in ("SymbolicZero", "Zero")


def placed_like(value: Any, aval: Any) -> Any:
    """`value` with the explicit sharding, varying mesh axes and memory that `aval` has."""
    value = placed(value, getattr(aval, "sharding", None))
    return in_memory_of(varying_along(value, varying(aval)), aval)


def varying_along(value: Any, axes: frozenset[str]) -> Any:
    """`value` typed as one that may differ along these mesh axes as well."""
    missing = tuple(sorted(axes - varying(jax.typeof(value))))
    return lax.pcast(value, missing, to="varying") if missing else value


def unvarying(value: jax.Array) -> jax.Array:
    """`value` as the types inside of a `shard_map` with `check_vma=False` say: alike everywhere.

    JAX leaves the types of its arguments as they are outside, where another one may check; those
    of what is computed of them say nothing.
    """
    return jnp.squeeze(jnp.expand_dims(value, 0), 0)


def placed(value: Any, sharding: Any) -> Any:
    """`value` with a sharding, as far as mesh axes of that are explicit.

    Then it is a part of its type. So is the mesh itself, also where all its axes are automatic.
    """
    if sharding is None or sharding.mesh.empty:
        return value
    mesh, aval = sharding.mesh.abstract_mesh, jax.typeof(value)
    # As a type has it: what it says of axes that are not explicit is left out.
    like = NamedSharding(mesh, sharding.spec)
    wanted = jax.core.ShapedArray(aval.shape, aval.dtype, sharding=like).sharding
    same_mesh = _axes_of(aval.sharding.mesh) == _axes_of(mesh)
    if explicit_sharding(aval.update(sharding=wanted)) is None:
        resharded = not same_mesh and not aval.sharding.mesh.empty
    else:
        resharded = not same_mesh or aval.sharding.spec != wanted.spec
    return jax.sharding.reshard(value, wanted) if resharded else value


def on_mesh_of(value: Any, aval: Any) -> Any:
    """`value` on the mesh of `aval`, if it is on another one: JAX computes nothing of both."""
    theirs, mine = (getattr(x, "sharding", None) for x in (aval, jax.typeof(value)))
    if not theirs or not mine or theirs.mesh.empty or mine.mesh.empty or theirs.mesh == mine.mesh:
        return value
    spec = theirs.spec if value.shape == aval.shape else PartitionSpec()
    return placed(value, NamedSharding(theirs.mesh, spec))


def can_reshard(got: Any, wanted: Any) -> bool:
    """Whether values of one type can be resharded to another: their meshes are of one size."""
    shardings = [getattr(aval, "sharding", None) for aval in (got, wanted)]
    sizes = {s.mesh.size for s in shardings if s is not None and not s.mesh.empty}
    return len(sizes) < 2


def _axes_of(mesh: Any) -> tuple[Any, ...]:
    return mesh.axis_names, mesh.axis_sizes, mesh.axis_types


def like_weak(value: jax.Array, aval: Any) -> jax.Array:
    """`value` with a weak type if `aval` has one, and else without.

    `lax.convert_element_type` only makes types strong, hence the primitive.
    """
    if jax.typeof(value).weak_type == aval.weak_type:
        return value
    return primitives.convert_element_type_p.bind(
        value, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None
    )
