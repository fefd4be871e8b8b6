"""Models that somebody else wrote, with the outputs of their parts sown: `tap`."""

import inspect
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax

from . import _compat
from ._errors import SelectError
from ._parts import chosen
from ._scopes import PartScope
from ._tapped import Tap, tapped, untapped


def tap(module: Any, where: Any, *, inputs: bool = False) -> "Tapped":
    """As `module`, but its layers sow what they return, each in a scope of its path.

    For models that somebody else wrote: nothing of their source is edited, and nothing is patched.
    As the forward hooks of PyTorch, or the hook points of TransformerLens; but a layer inside of a
    `scan` is collected stacked, and whatever is collected can be planted, differentiated and swept.

    !!! Example

        ```python
        import equinox as eqx
        import harvest
        import jax
        import jax.numpy as jnp

        mlp = eqx.nn.MLP(2, 3, 8, depth=2, key=jax.random.key(0))
        tapped = harvest.tap(mlp, eqx.nn.Linear)
        x = jnp.ones(2)

        acts = harvest.reap(tapped)(x)
        assert list(acts) == ["layers/0/out", "layers/1/out", "layers/2/out"]
        assert jnp.allclose(acts["layers/0/out"], mlp.layers[0](x))

        silent = harvest.plant(tapped, {"layers/1/out": harvest.zero()})
        assert jnp.allclose(silent(x), mlp.layers[2](jnp.zeros(8)))
        assert tapped.module is mlp
        ```

    **Arguments:**

    - `module`: an Equinox module, or another pytree that can be called. It is not changed.
    - `where`: which parts of it, out of those that can be called. A type (all layers that are
        instances of it), a glob on paths such as `"layers/*/attn"`, a predicate that is called with
        a path and the layer there, or a sequence of these. A path has the names of fields, the keys
        of dicts and the positions in lists and tuples, joined by `/`; that of `module` itself is
        empty. Functions that a layer holds, such as activations, are chosen by a glob that ends in
        their name (`"**/activation"`), or that matches nothing else.
    - `inputs`: sow the arguments of these parts too, as `in`: the argument itself if there is one,
        else a tuple. Keyword arguments are in it if one of them has an array: as a dict, the last.

    **Returns:**

    A callable that behaves like `module`, with its attributes and methods: an Equinox module whose
    only child, `.module`, is `module` (also if the model has a field of that name). So gradients,
    optimisers and `eqx.tree_at` find parameters where they are, and new ones do not retrace.

    A part whose path is `layers/3/attn` sows what it returns as `layers/3/attn/out`, and what its
    author sows inside as `resid` becomes `layers/3/attn/resid` (so an `out` of theirs would be
    there twice). A part that is called again is another occurrence (`mode="append"`), and a part
    that returns several things sows all of them, as one pytree.

    While the model runs, these parts are instances of subclasses of their classes, and functions
    are wrapped; `isinstance`, attributes, methods and operators are as they were. What can tell the
    difference: `type(layer) is Linear`, `activation is jax.nn.relu`, `==` of two layers, one more
    item in `dataclasses.fields(layer)`, and a model that combines layers by `jax.tree.map` while it
    runs, which is an error if they are chosen. Methods of a layer other than `__call__` sow nothing
    of their own. Neither does `tapped.module`, nor a layer that is taken out of the model and then
    called, as `tapped.layers[3](x)`: it is the author's. Tap it for itself.

    **Raises:**

    - [`harvest.UnknownSiteError`][]: a glob, type or predicate chooses nothing.
    - [`harvest.SelectError`][]: `where` is something else; or `module` is a list, tuple or dict.
    """
    if isinstance(module, list | tuple | dict) and not callable(module):
        raise SelectError(
            f"`tap` got a `{type(module).__name__}`, which nobody calls, so that nothing would be "
            "sown; wanted a model that has its layers inside, or tap each of them"
        )
    taps: dict[Any, bool] = {}
    if isinstance(module, Tapped):  # the paths are those of the model itself
        taps = dict(module._chosen)
        module = module.module
    for path in chosen(module, where):
        taps[path] = taps.get(path, False) or inputs
    is_stateful = isinstance(module, eqx.nn.StatefulLayer)
    cls: Any = _TappedStateful if is_stateful else Tapped
    return cls(module, tuple(Tap(*pair) for pair in taps.items()))


class Tapped(eqx.Module):
    """A model whose chosen parts sow what they return."""

    module: Any
    _chosen: tuple[Tap, ...] = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _called(self, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):  # while JAX makes it
            raise AttributeError(name)
        value = getattr(self.module, name)
        return _Method(self, name) if _is_method(self.module, name, value) else value

    # Python looks these up in the class, past `__getattr__`.

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return bool(self.module)


class _TappedStateful(Tapped, eqx.nn.StatefulLayer):
    """One that takes an `equinox.nn.State`, which `equinox.nn.Sequential` hands to such layers."""

    def is_stateful(self) -> bool:
        return self.module.is_stateful()


class _Method(eqx.Module):
    """A method of a tapped model."""

    owner: Tapped
    name: str = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _called(self.owner, self.name, args, kwargs)

    @property
    def __wrapped__(self) -> Any:
        return getattr(self.owner.module, self.name)


def _is_method(module: Any, name: str, value: Any) -> bool:
    if getattr(value, "__self__", None) is module:  # of a property that returns it, too
        return True
    defined = inspect.getattr_static(type(module), name, None)
    return (
        name not in getattr(module, "__dict__", ())
        and callable(defined)
        and not isinstance(defined, type)
    )


def _called(model: Tapped, method: str | None, args: Any, kwargs: Any) -> Any:
    if not _compat.tracing():
        run = model.module  # nobody can be listening
        return (run if method is None else getattr(run, method))(*args, **kwargs)
    run = tapped(model.module, model._chosen)
    with jax.named_scope(PartScope(type(model.module).__name__, ())):
        try:
            out = (run if method is None else getattr(run, method))(*args, **kwargs)
        except Exception as error:
            ours = "harvest.tap" in str(error) or "harvest._tapped" in str(error)
            if ours and isinstance(error, ValueError | TypeError) and "pytree" in str(error):
                error.add_note(
                    "harvest: while a tapped model runs, the parts that are chosen are of types of "
                    "their own, and have their paths in their structure, so that they cannot be "
                    "combined with each other, or with others, by `jax.tree.map` and the like; "
                    "choose parts around or beside those"
                )
            raise
        return untapped(out)
