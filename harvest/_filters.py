"""The predicates over leaves of pytrees and sites: `has_type`, `has_spec`, ..."""

import dataclasses
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import AbstractDtype, AnnotationError

from ._annotations import is_annotation, is_instance, is_union
from ._errors import SelectError, ShardingError
from ._globs import glob
from ._observed import is_definite
from ._predicate import HasType, Predicate
from ._types import describe


def has_type(annotation: Any) -> Predicate:
    """Holds for values of the type that a jaxtyping annotation says.

    !!! Example

        ```python
        import equinox as eqx
        import harvest
        import jax.numpy as jnp
        from jaxtyping import Array, Float

        square = harvest.has_type(Float[Array, "n n"])
        assert eqx.filter([jnp.ones((2, 2)), jnp.ones((2, 3))], square)[1] is None

        f = lambda x: harvest.sow(x.sum(), name="sum") * harvest.sow(x, name="x")
        assert list(harvest.reap(f, square)(jnp.ones((2, 2)))) == ["x"]
        assert list(harvest.reap(f, Float[Array, "n n"])(jnp.ones((2, 2)))) == ["x"]  # as well
        ```

    **Arguments:**

    - `annotation`: any that jaxtyping has, with families of dtypes, variadic and symbolic
        dimensions, `PRNGKeyArray`, `PyTree[...]` or [`harvest.Sharded`][]; or a class; or a union
        of these. Names of dimensions hold within one leaf, or within one `PyTree[...]`. What says
        `Array` takes arrays of numpy and `jax.ShapeDtypeStruct`s as well; the type of a site is
        that of one iteration, of one example of a batch, and of one shard.

    **Returns:**

    A [`harvest.Predicate`][]. Wherever a predicate is taken, the annotation itself is.

    **Raises:**

    - [`harvest.SelectError`][]: `annotation` is none, or cannot be checked alone.
    """
    is_class = isinstance(annotation, type) and not _is_family(annotation)
    is_one = is_class or is_annotation(annotation) or is_union(annotation)
    if not (is_one and _can_be_asked(annotation)):
        hint = f": write `{annotation.__name__}[Array, '...']`" if _is_family(annotation) else ""
        raise SelectError(
            f"`has_type` got {annotation!r}; wanted a jaxtyping annotation, or a class{hint}"
        )
    return HasType(annotation)


def _can_be_asked(annotation: Any) -> bool:
    """Whether `isinstance` takes it: not `Any`, nor `Sharded` alone."""
    try:
        is_instance(None, annotation)
    except AnnotationError:  # of names that are not bound
        return True
    except (TypeError, ShardingError):
        return False
    return True


def _is_family(x: Any) -> bool:
    """Whether it is a family of dtypes, such as `Float`, without array type and shape."""
    return isinstance(x, type) and issubclass(x, AbstractDtype)


def has_spec(spec: PartitionSpec) -> Predicate:
    """Holds for arrays that are split over a mesh as a `PartitionSpec` says.

    Inside a `shard_map` it cannot be seen which axis of an array is split: there it holds for what
    varies over exactly the mesh axes of the spec.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        x = jax.device_put(jnp.ones((jax.device_count(), 2)), NamedSharding(mesh, P("data")))
        by_rows = harvest.has_spec(P("data", None))
        assert by_rows(x) == (jax.device_count() > 1)
        ```

    **Arguments:**

    - `spec`: a `jax.sharding.PartitionSpec`. `None`s at its end do not matter, nor do mesh axes of
        size 1.

    **Returns:**

    A [`harvest.Predicate`][]. It does not hold where nothing is known of the sharding: for tracers
    and sites on a mesh with automatic axes, and inside a `shard_map` with `check_vma=False`.

    **Raises:**

    - [`harvest.SelectError`][]: `spec` is no `PartitionSpec`, or something in it is unconstrained,
        reduced or unreduced.
    """
    if not isinstance(spec, PartitionSpec) or not is_definite(spec):
        raise SelectError(
            f"`has_spec` got {spec!r}; wanted a `jax.sharding.PartitionSpec`, with nothing that is "
            "unconstrained or unreduced"
        )
    return _HasSpec(spec)


def is_varying(*axes: Any) -> Predicate:
    """Holds for arrays that are split over mesh axes.

    Inside a `shard_map`, for shards that vary over them.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((jax.device_count(),), ("data",))

        def body(x, w):
            return harvest.sow(w * 2, name="w") * harvest.sow(x, name="x")

        f = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        x = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, P("data")))
        w = jax.device_put(jnp.ones(()), jax.sharding.NamedSharding(mesh, P()))
        assert list(harvest.reap(f, harvest.is_varying("data"))(x, w)) == ["x"]
        ```

    **Arguments:**

    - `axes`: names of mesh axes, all of which have to split the array; if there are none, any.

    **Returns:**

    A [`harvest.Predicate`][]. It does not hold where nothing is known; see [`harvest.has_spec`][].

    **Raises:**

    - [`harvest.SelectError`][]: an axis is no string.
    """
    for axis in axes:
        if not isinstance(axis, str):
            raise SelectError(
                f"`is_varying` got {axis!r} of type `{type(axis).__name__}`; wanted names of mesh "
                "axes: it returns a predicate, and is none itself"
            )
    return _IsVarying(axes)


def is_replicated() -> Predicate:
    """Holds for arrays of which every device has all.

    Inside a `shard_map`, for those that vary over no mesh axis. Arrays on one device are of this
    kind, and those of numpy.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        assert harvest.is_replicated()(jnp.ones(3))
        assert not harvest.is_replicated()("not an array")
        ```

    **Returns:**

    A [`harvest.Predicate`][]. It does not hold where nothing is known; see [`harvest.has_spec`][].
    """
    return _IsReplicated()


def by_key(pattern: str) -> Predicate:
    """Holds for sites by their keys, and for leaves of a pytree by their paths.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp
        from jaxtyping import Array, Float

        def f(x):
            with harvest.scope("layers/0"):
                return harvest.sow(x.sum(), name="sum") * harvest.sow(x, name="x")

        vectors = harvest.by_key("layers/**") & Float[Array, "n"]
        assert list(harvest.reap(f, vectors)(jnp.ones(3))) == ["layers/0/x"]

        tree = {"layers": [jnp.ones(3), jnp.ones(())], "head": jnp.ones(3)}
        assert vectors.filter_spec(tree) == {"layers": [True, False], "head": False}
        ```

    **Arguments:**

    - `pattern`: a key, or a glob: `*` and `?` stop at `/`, `**` crosses it.

    **Returns:**

    A [`harvest.Predicate`][]. A leaf alone does not know its path, so that of a pytree a filter is
    made by [`filter_spec`][harvest.Predicate.filter_spec].

    **Raises:**

    - [`harvest.SelectError`][]: `pattern` is no string; or, when called, there is a leaf only.
    - [`harvest.UnknownSiteError`][]: when it is used, the pattern matches nothing.
    """
    if not isinstance(pattern, str):
        raise SelectError(f"`by_key` got {pattern!r}; wanted a key or a glob")
    return _ByKey(pattern)


@dataclasses.dataclass(frozen=True)
class _HasSpec(Predicate):
    spec: PartitionSpec

    def holds(self, subject):
        observed = subject.observed
        return observed is not None and observed.whole and not observed.misfit(self.spec)

    def __repr__(self) -> str:
        return f"has_spec({self.spec})"


@dataclasses.dataclass(frozen=True)
class _IsVarying(Predicate):
    axes: tuple[str, ...]

    def holds(self, subject):
        named = frozenset() if subject.observed is None else subject.observed.named
        return named.issuperset(self.axes) if self.axes else bool(named)

    def __repr__(self) -> str:
        return f"is_varying({', '.join(map(repr, self.axes))})"


@dataclasses.dataclass(frozen=True)
class _IsReplicated(Predicate):
    def holds(self, subject):
        observed = subject.observed
        return observed is not None and observed.whole and not observed.named

    def __repr__(self) -> str:
        return "is_replicated()"


@dataclasses.dataclass(frozen=True)
class _ByKey(Predicate):
    pattern: str

    @property
    def globs(self):
        return (self.pattern,)

    def holds(self, subject):
        if subject.key is None:
            raise SelectError(
                f"{self} got {describe(subject.leaf)} alone, which does not know where it is in a "
                "pytree; make a filter for the whole of it: `predicate.filter_spec(tree)`"
            )
        # A key is a key even if it contains the characters of a glob.
        return subject.key == self.pattern or glob(self.pattern)(subject.key)

    def __repr__(self) -> str:
        return f"by_key({self.pattern!r})"
