"""Sowing what a function does not sow itself: `sow_eqns`."""

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr

from . import _compat
from ._equation import Equation as Equation
from ._errors import SowError
from ._interpreter import Replay
from ._rewrite import as_sow, rewritten
from ._select import is_static
from ._stage import Transformed, trace_afresh
from ._walk import Walk
from ._where import Choices, check_where, choose


def sow_eqns(
    fn: Callable[..., Any], where: Any = None, name: str | None = None
) -> Callable[..., Any]:
    """As `fn`, but sows the outputs of chosen equations of its program.

    So that any intermediate value of any function can be collected, replaced or differentiated,
    without an edit of its source. The result is transformed as any function that sows:
    `reap(sow_eqns(fn, ...))`, `plant(sow_eqns(fn, ...), {...})`.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(w, x):
            layer = lambda x, w: (jax.nn.relu(w @ x), None)
            return jax.lax.scan(layer, x, w)[0]

        w, x = jnp.ones((4, 3, 3)), jnp.ones(3)
        acts = harvest.reap(harvest.sow_eqns(f, ["dot_general", "jit:relu"]))(w, x)
        assert acts["dot_general/0"].shape == acts["relu/0"].shape == (4, 3)

        sown = harvest.sow_eqns(f, "jit:relu", "act")
        assert (harvest.plant(sown, {"act/0": harvest.zero()})(w, x) == 0).all()
        print(harvest.sites(harvest.sow_eqns(f))(w, x))  # all that there is
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `where`: which equations.
        - `None` or `...`: all.
        - The name of a primitive, as `jax.make_jaxpr` prints it: `"dot_general"`, `"scan"`.
        - `"jit:relu"`: what jitted functions of that name return. Much of `jax.numpy` and `jax.nn`
            is jitted. May be a glob.
        - A glob of `jax.named_scope`s, joined by `/`: the values that leave such a scope, as
            `"**/attention"`. Globs are as in `select` of [`harvest.reap`][]. Where a scope is
            called as a primitive is, `"scope:add"` is the scope and `"add"` the primitive.
        - `"checkpoint_name:resid"`: what `jax.ad_checkpoint.checkpoint_name` names. May be a glob.
        - A predicate that takes a [`harvest.Equation`][].
        - A jaxtyping annotation, or a [`harvest.Predicate`][] such as `has_type`: the equations all
            of whose outputs it holds for.
        - A sequence of these, for all that any of them means.
    - `name`: what they are sown as. By default, what leaves a scope goes by the path of the scope,
        what has a `checkpoint_name` by that, what a jitted function returns by the name of the
        function, and everything else by its primitive.

    **Returns:**

    A function like `fn`. The keys of its sites are names with numbers, `"dot_general/0"`, that
    count equations of the same name in call order: so every key stands for one site, and
    `mode="strict"` collects them. Equations in a loop are one site, with stacked values, and the
    i-th ones in the branches of a `cond` are one site, as for [`harvest.sow`][]. In a
    [`harvest.scope`][] or a part of a tapped model, keys begin with that of the equation; numbers
    count on through the whole program. An equation that contains others (a `jit`, a `scan`) comes
    after those. A value is an array, or a tuple where an
    equation has several outputs. `harvest.stacked(acts, "dot_general/*")` is all of them as one
    array.

    What is compiled is what would be for `fn`, and nothing more: derivative rules apply, and shared
    functions stay shared.

    An equation is what `fn` is made of *as it is called*: `sow_eqns(jax.grad(f))` has those of the
    backward pass too, and in `sow_eqns(jax.vmap(f))` values have their batch axes somewhere. Inside
    of the transform, `jax.vmap(sow_eqns(f))` has those of one example. Under `jax.grad`, those in
    the body of a function with a derivative rule of its own are not evaluated: put `sow_eqns`
    around, or choose its output (`"custom_jvp_call"`).

    There is nothing to see inside of what is compiled as a whole: a `pallas_call`, cuDNN's
    attention, an FFI call or a `HiPrim` is one equation. Nor is anything sown in the predicate of a
    `while_loop`. And a value that is not computed (an argument that is returned as it is) is not
    the output of any equation.

    **Raises:**

    - [`harvest.UnknownSiteError`][]: `where`, or an item of it, means no equation.
    - [`harvest.UnsupportedError`][]: it only means equations inside of something that is compiled
        as a whole.
    - [`harvest.SelectError`][]: it is of the wrong type.
    - [`harvest.SowError`][]: `name` is empty, or a component of it between `/` is.
    """
    return SowEqns(fn, where, name)


class SowEqns(Transformed):
    _static = ("where", "name")

    def __init__(self, fn: Callable[..., Any], where: Any, name: str | None):
        super().__init__(fn, "sow_eqns")
        if name is not None and not (isinstance(name, str) and all(name.split("/"))):
            raise SowError(
                f"`sow_eqns` got the name {name!r}; wanted a string whose components between `/` "
                "are not empty"
            )
        self.where, self.name = check_where(where), name

    def _resolved(self, args, kwargs, trace):
        if is_static(self.where) or trace is trace_afresh:
            return self
        program = trace("sow_eqns", self.fn, args, kwargs)
        return self._with(where=self._choices(program.jaxpr))

    def _inline(self, args, kwargs, trace):
        program = trace("sow_eqns", self.fn, args, kwargs)
        decided = isinstance(self.where, Choices)
        choices = self.where if decided else self._choices(program.jaxpr)
        sow = functools.partial(as_sow, _compat.defined_at(self.fn))
        jaxpr = rewritten(program.jaxpr, choices, sow)
        return program.result(Replay(Walk()).unchanged(jaxpr, program.leaves)), ()

    def _choices(self, jaxpr: Jaxpr) -> Choices | None:
        return choose(jaxpr, self.where, self.name, _compat.defined_at(self.fn))
