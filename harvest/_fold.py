"""What a fold is: a reducer that combines the iterations of the loops around a site."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax

from . import _compat, _types
from ._errors import SelectError
from ._structure import Packed, Structure


class Level(NamedTuple):
    """What a fold does in one of the loops around a site."""

    folded: bool = True  # otherwise the loop stacks its results
    only: int | None = None  # the only iteration it needs, if that is known


class Fold(eqx.Module):
    """A reducer over the iterations of the loops around a site, in constant memory.

    In a `select`, it stands where a function of one value may stand. It is updated in every
    iteration in which the site runs: in a `cond`, only where its branch is taken.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        class SumOfSquares(harvest.Fold):
            def init(self, aval):
                return jnp.zeros(aval.shape, aval.dtype)

            def update(self, state, value, index):
                return state + value**2

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        assert harvest.reap(f, {"h": SumOfSquares()})(jnp.arange(4.0))["h"] == 0 + 1 + 4 + 9
        ```

    An [`equinox.Module`](https://docs.kidger.site/equinox/api/module/module/): its arrays are
    arguments of the compiled program, so that new ones do not retrace.

    Inside a `jax.shard_map` a fold sees one shard; its results are stacked along a new axis, as
    those of a `sow` without `spec`. Unless its class has `like_value = True`, which says that the
    result has the axes of the value: then they make up a global array by the `spec`. So it is with
    `at`, `last`, `maximum` and `mean`.
    """

    like_value: ClassVar[bool] = False

    def init(self, aval: Any) -> Any:
        """The state before the first iteration: a pytree of arrays, and of values of hi types.

        **Arguments:**

        - `aval`: the type of the value, in one iteration and for one example of a batch: a pytree
            like the sown one, with a `jax.ShapeDtypeStruct` for each array, or a `HiType`.
        """
        raise NotImplementedError

    def update(self, state: Any, value: Any, index: tuple[Any, ...]) -> Any:
        """The state after an iteration, of the types of `state`.

        **Arguments:**

        - `state`: the state before it.
        - `value`: the value of the site.
        - `index`: the iteration, a traced integer for each loop that is folded, outermost first;
            empty outside of any loop.
        """
        raise NotImplementedError

    def finish(self, state: Any, count: Any) -> Any:
        """The result, by default the state.

        **Arguments:**

        - `state`: the state after the last iteration.
        - `count`: how many times the site ran, a traced integer.
        """
        return state

    def of(self, fn: Callable[[Any], Any]) -> "Fold":
        """This fold, of a function of the value: `mean().of(lambda p: p[:, -1])`."""
        return Of(self, fn)

    def over(self, *loops: int) -> "Fold":
        """This fold over some of the loops around the site only; the others stack its results.

        **Arguments:**

        - `*loops`: their numbers, 0 for the outermost, or -1 for the innermost.
        """
        return Over(self, loops)

    def within(self, lengths: tuple[int | None, ...]) -> "tuple[Fold, tuple[Level, ...]]":
        """The fold for loops of these lengths (None in a `while_loop`), and what it does there."""
        return self, (Level(),) * len(lengths)


class Of(Fold):
    fold: Fold
    fn: Callable[[Any], Any]

    def init(self, aval):
        return self.fold.init(result_type(self.fn, aval))

    def update(self, state, value, index):
        return self.fold.update(state, self.fn(value), index)

    def finish(self, state, count):
        return self.fold.finish(state, count)

    def within(self, lengths):
        fold, levels = self.fold.within(lengths)
        return Of(fold, self.fn), levels


class Over(Fold):
    fold: Fold
    loops: tuple[int, ...] = eqx.field(static=True)

    def within(self, lengths):
        depth = len(lengths)
        for loop in self.loops:
            if not isinstance(loop, int) or not -depth <= loop < depth:
                raise SelectError(
                    f"got a fold `.over{self.loops}` in {depth} nested loops of lengths {lengths}; "
                    "wanted numbers of loops, 0 for the outermost"
                )
        chosen = {loop % depth for loop in self.loops}
        fold, inner = self.fold.within(tuple(lengths[i] for i in sorted(chosen)))
        levels = iter(inner)
        return fold, tuple(next(levels) if i in chosen else Level(False) for i in range(depth))


def result_type(fn: Callable[[Any], Any], aval: Any) -> Any:
    """What `fn` returns for values of this type."""
    leaves, structure = Structure.flatten(aval, is_type)
    packed = _types.result_types(lambda *x: Packed.pack(fn(structure.unflatten(x))), *leaves)
    return packed.unflatten()


def is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or _compat.is_hi_type(leaf)


def flat_index(index: Sequence[Any], lengths: Sequence[int]) -> Any:
    """The number of an iteration among those of all nested loops."""
    sizes = [math.prod(lengths[i + 1 :]) for i in range(len(lengths))]
    return sum(i * size for i, size in zip(index, sizes, strict=True))
