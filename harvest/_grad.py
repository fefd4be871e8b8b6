"""Differentiating with respect to sown values: `grad` and `value_and_grad`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _compat
from ._checks import check_mode
from ._differentiate import DifferentiatedSite, backward_pass, value_and_aux
from ._errors import GradError
from ._fit import Mode
from ._plan import resolve
from ._plan_probes import is_sum, plan_probes
from ._probe import BRANCH, has_derivative
from ._select import is_static, pairs_of
from ._stage import Place, Program, Transformed, trace_afresh


def grad(
    fn: Callable[..., Any],
    select: Any = None,
    *,
    argnums: int | Sequence[int] = (),
    mode: Mode = "strict",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `jax.grad`, but with respect to sown values.

    One backward pass gives the gradients at all sites, through the structures that `reap` goes
    through. Custom derivative rules still apply, as they do in `jax.grad`.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def loss(x):
            layer = lambda x, w: (harvest.sow(w * x, name="h"), None)
            return jax.lax.scan(layer, x, jnp.array([2.0, 3.0, 4.0]))[0]

        assert harvest.grad(loss)(1.0)["h"].tolist() == [12, 4, 1]  # what comes behind each layer
        at_sites, at_x = harvest.grad(loss, argnums=0)(1.0)
        assert at_x == 24
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][]; it returns a real scalar, or with `has_aux` a pair of a
        scalar and anything else.
    - `select`: as for [`harvest.reap`][]; a reducer applies to the gradient. A function runs in
        the backward pass, inside the loops, so that whole gradients are never kept; a fold combines
        the stacked gradient. Leaves without derivative are None to them.
    - `argnums`: arguments of `fn` to differentiate with respect to as well, in the same backward
        pass: an int or a sequence of ints. Of their leaves, those that are no real or complex
        arrays get None, as from `equinox.filter_grad`; each has to have one that is.
    - `mode`: as for [`harvest.reap`][]: tuples of all occurrences in `"append"`.
    - `has_aux`: whether `fn` returns a pair, the second item of which is passed on.

    **Returns:**

    A function of the arguments of `fn` that returns a dict `{key: gradient}`, in call order. A
    gradient has the form in which `reap` returns the value: zeros where the result does not depend
    on the site, or where it did not run (a branch of a `cond` that is not taken); `float0` for
    integers, as in JAX, and None for static leaves; at a value of a hi type, of the cotangent type
    that its type says. With `argnums`, a pair of that and the
    gradients of the arguments; with `has_aux`, a pair of all that and the second item.

    What `fn` sows can still be collected: `capture(grad(fn))` returns gradients and values. (JAX
    then evaluates functions with a custom derivative rule by that rule, and not by their body: what
    is sown only there can be collected by `capture(fn)`.)

    **Raises:**

    - [`harvest.GradError`][]: the result of `fn` is no real scalar, or `argnums` no arguments that
        can be differentiated.
    - [`harvest.UnsupportedError`][]: a selected site is in a `while_loop`.
    - As [`harvest.reap`][].
    """
    return Grad(fn, select, argnums, mode, has_aux, with_value=False)


def value_and_grad(
    fn: Callable[..., Any],
    select: Any = None,
    *,
    argnums: int | Sequence[int] = (),
    mode: Mode = "strict",
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `jax.value_and_grad`, but with respect to sown values: see [`harvest.grad`][].

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def loss(x):
            return jnp.sum(harvest.sow(2 * x, name="h") ** 2)

        value, grads = harvest.value_and_grad(loss)(jnp.array([1.0, 2.0]))
        assert value == 20 and grads["h"].tolist() == [4, 8]
        ```

    **Arguments:**

    As [`harvest.grad`][].

    **Returns:**

    A function of the arguments of `fn` that returns a pair of its result (with `has_aux`, both
    items of it) and the gradients.

    **Raises:**

    As [`harvest.grad`][].
    """
    return Grad(fn, select, argnums, mode, has_aux, with_value=True)


class Grad(Transformed):
    _dynamic = ("fn", "reducers")
    _static = ("select", "mode", "argnums", "has_aux", "with_value")

    def __init__(self, fn, select, argnums, mode: Mode, has_aux: bool, with_value: bool):
        super().__init__(fn, "grad")
        check_mode(mode)
        self.select, self.reducers = pairs_of(select)
        self.argnums = argnums if isinstance(argnums, int) else tuple(argnums)
        self.mode: Mode = mode
        self.has_aux, self.with_value = has_aux, with_value

    def _resolved(self, args, kwargs, trace):
        if is_static(self.select) or trace is trace_afresh:
            return self
        program = trace("grad", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        return self._with(select=tuple(resolve(s, entries, False, "grad") for s in self.select))

    def _finish(self, value):
        (result, aux), (at_sites, at_args) = value
        grads = dict(at_sites)
        if self.argnums != ():
            grads = (grads, at_args[0] if isinstance(self.argnums, int) else at_args)
        if not self.with_value:
            return (grads, aux) if self.has_aux else grads
        return ((result, aux) if self.has_aux else result), grads

    def _inline(self, args, kwargs, trace):
        program = trace("grad", self.fn, args, kwargs, planting=True)
        pairs = list(zip(self.select, self.reducers, strict=True))
        plan = plan_probes(program.walk.entries(program.jaxpr), pairs, self.mode, "grad")
        plan = plan._replace(actions=[action and BRANCH for action in plan.actions])
        sites = [DifferentiatedSite.of(probed.entry, probed.reducer) for probed in plan.probed]
        places = _places(program, self.argnums, len(args))
        inputs = {p: _input(program.leaves[p]) for tree in places for p in _positions(tree)}
        split = functools.partial(value_and_aux, has_aux=self.has_aux)
        done = backward_pass(program, plan, sites, inputs, split)
        branches = iter(done.reads)
        at_sites: dict[str, list[Any]] = {}
        for site, ct in zip(sites, done.cts, strict=True):
            branch = next(branches) if is_sum(site.entry) else None
            at_sites.setdefault(site.entry.key, []).append(site.result(ct, branch))
        at_args = tuple(_filled(tree, done.at_inputs) for tree in places)
        result = (done.value, done.aux), (self._by_key(at_sites), at_args)
        return result, plan.warnings

    def _by_key(self, values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
        if self.mode == "strict":
            return [(key, value) for key, (value,) in values.items()]
        return [(key, tuple(items)) for key, items in values.items()]


def _places(program: Program, argnums: int | tuple[int, ...], count: int) -> list[Any]:
    """For each argument to differentiate, a tree of the places of its floating-point arrays."""
    trees = []
    for argnum in (argnums,) if isinstance(argnums, int) else argnums:
        if not isinstance(argnum, int) or not -count <= argnum < count:
            raise GradError(
                f"`grad` got `argnums={argnums}` in a call with {count} positional argument"
                f"{'' if count == 1 else 's'}; pass what is to be differentiated by position"
            )

        def place(leaf: Any) -> Any:
            is_place = isinstance(leaf, Place)
            return leaf if is_place and _is_inexact(program.leaves[leaf.position]) else None

        tree = jax.tree.map(place, program.places(argnum), is_leaf=lambda x: isinstance(x, Place))
        if not _positions(tree):
            raise GradError(
                f"`grad` got `argnums={argnums}`, but argument {argnum} has no floating-point "
                "array with respect to which to differentiate"
            )
        trees.append(tree)
    return trees


def _is_inexact(leaf: Any) -> bool:
    if _compat.is_hi(leaf):
        return has_derivative(jax.typeof(leaf))
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _input(leaf: Any) -> Any:
    return leaf if _compat.is_hi(leaf) else jnp.asarray(leaf)


def _positions(tree: Any) -> list[int]:
    places = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Place))
    return [place.position for place in places]


def _filled(tree: Any, grads: dict[int, Any]) -> Any:
    is_place = lambda x: isinstance(x, Place)
    return jax.tree.map(lambda place: grads[place.position], tree, is_leaf=is_place)
