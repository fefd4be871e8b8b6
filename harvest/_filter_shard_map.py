"""`filter_shard_map`: Equinox modules in a `shard_map`."""

import functools
import inspect
from collections.abc import Callable, Sequence, Set
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from . import _compat
from ._annotated_specs import Unread, annotations_of, signature_of, specs_in
from ._errors import ShardingError
from ._mapped_specs import Leaf, Rules, Specs, arrays_in, check_used, spec_of
from ._placed import Placed, axes_of
from ._stage import pack
from ._structure import Bound, Structure, is_held
from ._tap import Tapped


def filter_shard_map(
    fn: Callable[..., Any],
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    axis_names: Set[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """As `jax.shard_map`, but takes Equinox modules, and specs by predicate.

    What is no array, among arguments and results, passes as it is. If `fn` is a module, its arrays
    are arguments too.

    !!! Example

        ```python
        import equinox as eqx
        import harvest
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from jaxtyping import Array, Float

        model = eqx.nn.Linear(3, 8, key=jax.random.key(0))
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=auto)

        # Rows of the matrix and items of the bias on different devices, and so of the result.
        rows = {Float[Array, "out in"]: P("model", None), harvest.by_key("bias"): P("model")}
        sharded = harvest.filter_shard_map(model, mesh, {**rows, ...: P()}, P("model"))
        assert jnp.allclose(sharded(jnp.ones(3)), model(jnp.ones(3)))
        ```

    **Arguments:**

    - `fn`: any callable. [`harvest.Sharded`][] annotations of its arguments, of its result, and of
        the fields of modules among them say what `in_specs` and `out_specs` do not.
    - `mesh`: as for `jax.shard_map`: a mesh, or None for the one that is set.
    - `in_specs`: what each array is split by: a `jax.sharding.PartitionSpec` for all arguments; or
        a pytree of them that is a prefix of the tuple of positional arguments; or a mapping from
        predicates ([`harvest.by_key`][] and the like, globs, annotations, any filter function) to
        specs, for all arrays, those of `fn` too: of a module or a `functools.partial`, not those
        that a function closes over. Of a mapping, the first that holds counts, and `...`
        stands for what is left. Paths are those in one argument. A mapping may also be a leaf of
        the prefix; and None leaves it to annotations.
    - `out_specs`: likewise, of the result. Predicates see the shards.
    - `axis_names`, `check_vma`: as for `jax.shard_map`.

    An array of an argument for which nothing says a spec is an error; on a mesh with explicit axes
    it is split as it is already. An array of `fn` for which nothing says one is replicated.

    **Returns:**

    An Equinox module that is called as `fn` is, also with keywords.

    **Raises:**

    - [`harvest.ShardingError`][]: a spec is missing, is none, or does not fit; or a mapping has one
        for what holds for no array; or the mesh is none.
    - [`harvest.UnknownSiteError`][]: a `by_key` matches no array.
    """
    if not callable(fn):
        raise ShardingError(f"`filter_shard_map` got a `{type(fn).__name__}`; wanted a callable")
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise ShardingError(
            f"`filter_shard_map` got {mesh!r} as the mesh; wanted a `jax.sharding.Mesh`, or None "
            "for the one that is set by `jax.set_mesh`"
        )
    if isinstance(axis_names, str):
        raise ShardingError(
            f"`filter_shard_map` got `axis_names={axis_names!r}`; wanted a set of names"
        )
    if isinstance(fn, _JITTED) and any(map(is_held, jax.tree.leaves(fn))):
        raise ShardingError(
            "`filter_shard_map` got an `eqx.filter_jit` of a module, whose annotations cannot be "
            "seen; put it around: `eqx.filter_jit(harvest.filter_shard_map(module, ...))`"
        )
    if isinstance(fn, functools.partial | eqx.Partial):
        fn = Bound.of(fn)  # whose arguments are arrays of it
    given = Specs.of(in_specs), Specs.of(out_specs)
    mapped = ShardMapped(fn, mesh, *given, frozenset(axis_names), check_vma)
    return eqx.module_update_wrapper(mapped)


_JITTED: Any = type(eqx.filter_jit(lambda: None))


class ShardMapped(eqx.Module):
    fn: Any
    mesh: Any = eqx.field(static=True)
    in_specs: Specs = eqx.field(static=True)
    out_specs: Specs = eqx.field(static=True)
    axis_names: frozenset[str] = eqx.field(static=True)
    check_vma: bool = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        placed = Placed.on(self.mesh, self.axis_names)
        plain = self.fn.module if isinstance(self.fn, Tapped) else self.fn
        signature = signature_of(plain)
        own = arrays_in(plain, "fn", None)
        in_specs = self._of_arguments(placed, signature, own, args, kwargs)
        returned = signature.return_annotation
        out_specs = _distinct([*self.out_specs.all(), *specs_in(returned)])
        for spec in out_specs:
            placed.check_axes(spec, f"`out_specs` has the spec {spec}")
        leaves, structure = Structure.flatten((self.fn, args, kwargs), is_held)
        results: list[tuple[Structure, list[int]]] = []

        def body(leaves: list[Any]) -> tuple[list[Any], ...]:
            fn, args, kwargs = structure.unflatten(leaves)
            packed = pack(fn(*args, **kwargs))
            specs = self._of_results(placed, returned, packed.unflatten())
            groups = [out_specs.index(spec) for spec in specs]
            results.append((packed.structure, groups))
            pairs = list(zip(packed.leaves, groups, strict=True))
            return tuple([leaf for leaf, g in pairs if g == i] for i in range(len(out_specs)))

        # Results are grouped by their specs: how many there are is not known before.
        grouped = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=(in_specs,),
            out_specs=tuple(out_specs),
            axis_names=self.axis_names,
            check_vma=self.check_vma,
        )(leaves)
        ((result, groups),) = results
        arrays = list(map(iter, grouped))
        return result.unflatten([next(arrays[group]) for group in groups])

    def _of_arguments(
        self,
        placed: Placed,
        signature: inspect.Signature,
        own: list[Leaf],
        args: Any,
        kwargs: Any,
    ) -> list[Any]:
        """The specs of the arrays of `(fn, args, kwargs)`."""
        whole, names = self.in_specs.whole, sorted(kwargs)
        of_args, of_kwargs = annotations_of(signature, len(args), names)
        arrays = [*own]
        for i, row in enumerate(zip(args, of_args, strict=True)):
            arrays += arrays_in(row[0], f"args[{i}]", row[1])
        given = [whole if isinstance(whole, Rules) else None for _ in own]
        given += self.in_specs.over(args, "in_specs")
        for name, annotation in zip(names, of_kwargs, strict=True):
            arrays += arrays_in(kwargs[name], f"kwargs[{name!r}]", annotation)
        given += [whole] * (len(arrays) - len(given))
        check_used(self.in_specs, given, arrays, "in_specs")
        specs = []
        for number, (array, prefix) in enumerate(zip(arrays, given, strict=True)):
            spec = spec_of(prefix, array)
            if spec is None or isinstance(spec, Unread):
                inferred = placed.inferred(array.value)
                spec = spec if inferred is None else inferred
            if spec is None and number < len(own):
                spec = PartitionSpec()
            specs.append(placed.checked(spec, array, "in_specs", divides=True))
        return specs

    def _of_results(self, placed: Placed, annotation: Any, result: Any) -> list[Any]:
        """The specs of the arrays of the result, which are shards."""
        arrays = arrays_in(result, "result", annotation)
        given = self.out_specs.over(result, "out_specs")
        check_used(self.out_specs, given, arrays, "out_specs")
        pairs = zip(given, arrays, strict=True)
        specs = [placed.checked(spec_of(*pair), pair[1], "out_specs") for pair in pairs]
        for array, spec in zip(arrays, specs, strict=True):
            varying = _compat.varying(jax.typeof(array.value)) & placed.axes
            if isinstance(spec, PartitionSpec) and (left := sorted(varying - axes_of(spec))):
                raise ShardingError(
                    f"`out_specs` has the spec {spec} for {array.describe()}, which varies over "
                    f"the mesh axis {left[0]!r}: name that, or combine the shards, as by "
                    "`jax.lax.psum`"
                )
        return specs


def _distinct(specs: Sequence[Any]) -> list[Any]:
    distinct: list[Any] = []
    for spec in specs:
        if spec is not None and spec not in distinct:
            distinct.append(spec)
    return distinct
