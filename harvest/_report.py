"""What `debug.nonfinite` reports."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that something had, as [`harvest.debug.Fault`][] lists them.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        f = lambda x: harvest.sow(jnp.log(x), name="log")
        (fault,) = harvest.debug.nonfinite(f)(jnp.array([-1.0, 4.0]))
        (x,) = fault.inputs
        assert (x.name, x.kind, x.low, x.high, x.nan) == ("args[0]", "argument", -1, 4, False)
        ```

    **Arguments:**

    - `name`: the key of a site, or where it is among the arguments: `args[0]['w']`.
    - `kind`: `"sow"`, `"cotangent"`, `"equation"` or `"argument"`.
    - `low`, `high`: the least and the largest of its finite values (absolute values, if it is
        complex; those of its integers, if it has nothing else); infinite if there are none.
    - `nan`, `inf`: whether it had NaNs, or infinities.
    """

    name: str
    kind: Literal["sow", "cotangent", "equation", "argument"]
    low: float
    high: float
    nan: bool
    inf: bool

    def __str__(self) -> str:
        has = [word for word, has in (("NaN", self.nan), ("inf", self.inf)) if has]
        finite = f"{self.low:.4g} .. {self.high:.4g}" if self.low <= self.high else "nothing finite"
        return f"{_of(self.kind)}{self.name}: {', '.join([finite, *has])}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first site (or equation) that holds a NaN, as [`harvest.debug.nonfinite`][] reports it.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def f(x):
            layer = lambda x, _: (harvest.sow(jnp.log(x), name="log"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        (fault,) = harvest.debug.nonfinite(f)(jnp.float32(5))
        assert fault.key == "log" and fault.index == (3,)  # log of log(log(log(5))) = -0.74
        print(fault)
        ```

    **Arguments:**

    - `key`, `kind`, `source`: as of its [`harvest.Site`][]. Of an equation, `kind` is `"equation"`,
        and the key is that which [`harvest.sow_eqns`][] sows it by: `reap(sow_eqns(fn), key)`.
    - `index`: the iteration of the loops around it, outermost first.
    - `lane`: which example of the batches that `vmap` made.
    - `shard`: in a `shard_map`, the place on the mesh, if shards differ: an index by mesh axis.
    - `value`: the [`harvest.debug.Range`][] of the site itself.
    - `inputs`: those of the nearest arguments and watched sites that it is computed from: in that
        iteration and example, or the last one in which they ran, or all those that it is computed
        from. (Of a `while_loop`, only the last iteration is known, and the one before.)
    - `primitive`: of an equation; None for a site.
    - `element`: of an equation, the index of the first such number in its output (in the first of
        its outputs that has any). In it are the axes of a `jax.vmap` inside of `fn`, which are axes
        like any others to an equation: `lane` is empty.
    """

    key: str
    kind: str
    source: str
    index: tuple[int, ...]
    lane: tuple[int, ...]
    shard: dict[str, int]
    value: Range
    inputs: tuple[Range, ...]
    primitive: str | None = None
    element: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = [f"iteration {_listed(self.index)}"] if self.index else []
        where += [f"example {_listed(self.lane)}"] if self.lane else []
        where += [f"shard {name}={index}" for name, index in self.shard.items()]
        where += [f"element {_listed(self.element)}"] if self.element else []
        where += [f"sown at {self.source}" if self.primitive is None else f"at {self.source}"]
        lines = [", ".join([f"{_of(self.kind)}{self.key!r}", *where])]
        lines += [f"    {self.value}"]
        lines += [f"    from {value}" for value in self.inputs]
        return "\n".join(lines)


def _of(kind: str) -> str:
    return "the cotangent of " if kind == "cotangent" else ""


def _listed(index: Sequence[int]) -> str:
    return str(index[0]) if len(index) == 1 else str(tuple(index))


class Report(tuple[Fault, ...]):
    """The faults that [`harvest.debug.nonfinite`][] found: empty, and so false, if there are none.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        report = harvest.debug.nonfinite(lambda x: harvest.sow(jnp.log(x), name="log"))(jnp.ones(3))
        assert not report
        print(report)  # nothing is wrong at 1 site
        ```

    A tuple of [`harvest.debug.Fault`][]s: the first among sown values, and the first among
    cotangents, in the order in which they happened. Or the first equation.
    """

    watched: int
    of: str  # what was watched

    def __new__(cls, faults: Iterable[Fault], watched: int, of: str = "site") -> "Report":
        self = super().__new__(cls, faults)
        self.watched, self.of = watched, of
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # to be copied and pickled
        return tuple(self), self.watched, self.of

    def __repr__(self) -> str:
        sites = f"{self.watched} {self.of}{'' if self.watched == 1 else 's'}"
        if not self:
            return f"nothing is wrong at {sites}"
        return "\n".join([f"of {sites}, the first that is not finite:", *map(str, self)])

    __str__ = __repr__
