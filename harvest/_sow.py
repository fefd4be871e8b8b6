"""What a program says about itself: `sow`, `perturb` and `scope`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from . import _compat, _types
from ._compat import UserScope
from ._errors import SowError, UnsupportedError
from ._markers import Label, Perturb, mark
from ._spec import specs_of
from ._structure import Structure, is_array


def sow(value: Any, *, name: str, spec: Any = None) -> Any:
    """Make `value` visible and replaceable under `name`.

    The identity, unless a transform asks for the value: [`harvest.reap`][] and
    [`harvest.capture`][] collect it, [`harvest.plant`][] replaces it. It costs nothing in a
    compiled program. As `sow` of Oryx without the tag and the mode, or `self.sow` of Flax
    without the module: how repeated names are treated is for the caller of the transform to say.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            h = harvest.sow(jnp.sin(x), name="h")
            return 2 * h

        assert f(0.5) == 2 * jnp.sin(0.5)
        assert harvest.reap(f)(0.5)["h"] == jnp.sin(0.5)
        assert harvest.plant(f, {"h": jnp.float32(3.0)})(0.5) == 6.0
        ```

    **Arguments:**

    - `value`: any pytree. Arrays and values of a `HiType` can be collected and replaced; static
        leaves (ints, bools, strings, `None`, Python floats, functions) come back unchanged, are
        collected as they are, and cannot be planted.
    - `name`: a non-empty string without `/`. Use [`harvest.scope`][] to nest names.
    - `spec`: inside `jax.shard_map`, how the shards make up the global value that is collected
        and planted: a `PartitionSpec` (of a hi type, its `HiPspec`), or a pytree of them that is a
        prefix of `value`, as `out_specs`. It is about the axes of `value`, not about those that
        loops and `vmap` add in front. Without, shards that differ are stacked on a new axis in
        front of those of `value`, in the order of the mesh (its first axis is the slowest), and
        what is the same in all of them is collected once (under `check_vma=False`, which does not
        tell, all are stacked). Outside of a `shard_map` it has no effect, so that one model serves
        both.

    **Returns:**

    `value`. Use the result (`h = sow(h, name="h")`), or a planted value feeds nothing.

    What JAX does not trace as a part of the program cannot be seen. Under
    `jax.ensure_compile_time_eval`, `jax.experimental.jet` or a compilation inside of the function
    there is a [`harvest.HarvestWarning`][]. Nothing can be told of a `sow` in a host callback, in
    what has been compiled or exported before, in the body of a `custom_vmap` where JAX evaluates
    its rule instead, and in an `equinox.internal.noinline` that has an `abstract_fn` of its own.

    **Raises:**

    - [`harvest.SowError`][]: the name is empty, not a string or contains `/`; a leaf is a
        mutable `Ref`, which has no value of its own to collect; or `spec` does not fit the mesh
        axes along which the value varies.
    - [`harvest.UnsupportedError`][]: inside a `jax.custom_derivatives.linear_call`, which JAX could
        not compile.
    """
    _check_name(name, "sow")
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if _compat.is_ref(leaf):
            raise SowError(
                f"`sow(..., name={name!r})` got a mutable `Ref` of type {jax.typeof(leaf)}"
                f"{_at(path)}; a `Ref` has no value of its own: sow what it holds, `ref[...]`."
            )
    if _compat.UNSEEN.value is not None:
        raise UnsupportedError(
            f"the site {name!r} (sown at {_compat.caller()}) is inside {_compat.UNSEEN.value}, so "
            "that it cannot be collected or planted: sow its inputs or outputs instead"
        )
    if not _compat.tracing():
        return value  # nobody can be listening
    _check_place(name, "sow")
    leaves, structure = Structure.flatten(value, is_array)
    label = Label(name, "sow", structure, _compat.caller(), specs_of(value, spec, name))
    return structure.unflatten(mark(leaves, label, ((),) * len(leaves)))


def perturb(value: Any, *, name: str, log: bool = False, spec: Any = None) -> Any:
    """Make the cotangent of `value` visible and replaceable under `name`.

    The identity; but in the backward pass of `jax.grad` (or `vjp`, `jacrev`, ...) the cotangent
    that arrives here is sown, so that `capture(jax.grad(f))` collects it and
    `plant(jax.grad(f), ...)` edits it. Forward mode passes through. As `Module.perturb` of Flax,
    but with no variables to initialise and no shape to agree with.

    A cotangent exists only where `value` depends on something that is differentiated, and where
    the output depends on `value`.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def loss(x):
            return jnp.sum(harvest.perturb(x, name="gx") ** 2)

        x = jnp.array([1.0, 2.0])
        grads, collected = harvest.capture(jax.grad(loss))(x)
        assert (collected["gx"][0] == 2 * x).all()

        clipped = harvest.plant(jax.grad(loss), {"gx": lambda ct: jnp.clip(ct, -3, 3)})
        assert (clipped(x) == jnp.array([2.0, 3.0])).all()
        ```

    **Arguments:**

    - `value`: any pytree. Leaves that have no cotangent (integers, static leaves) come back
        unchanged, and are `None` in what is collected.
    - `name`: a non-empty string without `/`.
    - `log`: also log the cotangent under `name` in JAX's own backward-pass logs
        (`jax.vjp(f, x)[1].with_logs`). Off by default, since JAX refuses two equal log keys in one
        backward pass.
    - `spec`: as for [`harvest.sow`][], of the cotangent.

    **Returns:**

    `value`. The result must be used: what it is computed into is what its cotangent is of.

    **Raises:**

    - [`harvest.SowError`][]: the name is empty, not a string or contains `/`.
    - [`harvest.UnsupportedError`][]: inside a `jax.custom_derivatives.linear_call`.
    """
    _check_name(name, "perturb")
    if not _compat.tracing():
        return value
    _check_place(name, "perturb")
    leaves, treedef = jax.tree.flatten(value)
    differentiable = list(map(_is_differentiable, leaves))
    if not any(differentiable):
        return value
    inputs = [x for x, d in zip(leaves, differentiable, strict=True) if d]
    # The dynamic leaves of the cotangent; `None` is no leaf, so the rest leaves no trace.
    cotangent = jax.tree.unflatten(
        treedef, [x if d else None for x, d in zip(leaves, differentiable, strict=True)]
    )
    _, structure = Structure.flatten(cotangent, lambda leaf: True)
    specs = specs_of(cotangent, spec, name, "perturb")
    label = Label(name, "cotangent", structure, _compat.caller(), specs, log)
    prim = Perturb([jax.typeof(x) for x in inputs], label, ((),) * len(inputs))
    outs = iter(prim(*inputs))
    return jax.tree.unflatten(
        treedef, [next(outs) if d else x for x, d in zip(leaves, differentiable, strict=True)]
    )


def _is_differentiable(leaf: Any) -> bool:
    return is_array(leaf) and _types.tangent_of(jax.typeof(leaf)) is not None


def scope(name: str) -> AbstractContextManager[None]:
    """Prefix the keys of everything sown inside: `"block3/h"`.

    As `jax.named_scope`, whose label it also sets in profiles; but only scopes made here enter
    keys, so that those of other libraries do not. It works across `jit`, `scan`, `grad`, `vmap`
    and `checkpoint`. As `nest` of Oryx.

    !!! Example

        ```python
        import harvest

        def f(x):
            for i in range(2):
                with harvest.scope(f"layers/{i}"):
                    x = harvest.sow(x + 1, name="h")
            return x

        assert list(harvest.reap(f)(0.0)) == ["layers/0/h", "layers/1/h"]
        ```

    **Arguments:**

    - `name`: a non-empty string; `/` in it nests.

    **Returns:**

    A context manager.

    **Raises:**

    - [`harvest.SowError`][]: the name is not a string, or it or a component of it is empty.
    """
    if not isinstance(name, str) or not all(name.split("/")):
        raise SowError(
            f"`scope` got {name!r}; wanted a string whose components between `/` are not empty."
        )
    return _scopes(name.split("/"))


@contextmanager
def _scopes(names: list[str]) -> Iterator[None]:
    if not names:
        yield
        return
    with jax.named_scope(UserScope(names[0])), _scopes(names[1:]):
        yield


def _check_name(name: Any, caller: str) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        hint = " To nest names, use `harvest.scope`." if isinstance(name, str) and name else ""
        raise SowError(
            f"`{caller}` got the name {name!r}; wanted a non-empty string without `/`.{hint}"
        )


def _check_place(name: str, caller: str) -> None:
    if _compat.tracing_a_linear_call():
        raise UnsupportedError(
            f"`{caller}(..., name={name!r})` at {_compat.caller()} is inside a `linear_call`, "
            f"which JAX cannot compile with it: `{caller}` what goes in or what comes out instead"
        )


def _at(path: Any) -> str:
    keys = jax.tree_util.keystr(path)
    return f" at {keys}" if keys else ""
