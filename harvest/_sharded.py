"""`Sharded`: an annotation of the type of an array and of how it is split over a mesh."""

import contextlib
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import AnnotationError

from ._annotations import ShardedType, afresh, binds, is_annotation, is_sharded, name_of, why_not
from ._errors import ShardingError
from ._observed import StandIn, is_definite, observe


class _MetaSharded(ShardedType):
    def __getitem__(cls, item: Any) -> Any:
        annotation, spec = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
        is_spec = isinstance(spec, PartitionSpec) and is_definite(spec)
        if not is_annotation(annotation) or not is_spec:
            raise ShardingError(
                f"`Sharded` got {item!r}; wanted a jaxtyping annotation and a "
                "`jax.sharding.PartitionSpec` (with nothing that is unconstrained or unreduced), "
                "as in `Sharded[Float[Array, 'n d'], P('data')]`"
            )
        name = f"Sharded[{name_of(annotation)}, {spec}]"
        # Of no module, as jaxtyping's: beartype wants one text of a class alone and in a union.
        members = {"annotation": annotation, "spec": spec, "__module__": "builtins"}
        return _MetaSharded(name, (cls,), members)

    def __repr__(cls) -> str:
        return cls.__name__ if is_sharded(cls) else super().__repr__()

    @binds
    def __instancecheck__(cls, obj: Any) -> bool:
        return _why_no_instance(cls, obj) == ""

    # What beartype asks for, and as jaxtyping's annotations have it. It looks at the signature,
    # which an import hook that wraps functions would change.
    __instancecheck_str__ = lambda cls, obj: _why_no_instance(cls, obj)


@binds
def _why_no_instance(cls: Any, obj: Any) -> str:
    """Why something is no instance of a `Sharded[...]`; empty if it is one."""
    if not is_sharded(cls):
        raise ShardingError("`Sharded` alone is no annotation; write `Sharded[..., P()]`")
    leaves, treedef = jax.tree.flatten(obj)
    observed = list(map(observe, leaves))
    shapes = [o and _global_shape(o, cls.spec) for o in observed]
    rows = list(zip(leaves, observed, shapes, strict=True))
    values = [leaf if o is None else StandIn(o, shape) for leaf, o, shape in rows]
    value = jax.tree.unflatten(treedef, values)
    misfit = next(filter(None, (o and o.misfit(cls.spec) for o in observed)), "")
    if not misfit:
        why = why_not(value, cls.annotation)
    else:
        why = ""
        with afresh(), contextlib.suppress(AnnotationError):  # so that nothing is bound
            why = why_not(value, cls.annotation)
    if why and (whole := next((shape for _, o, shape in rows if o and o.shape != shape), None)):
        why += f" (as a shard of an array of shape {whole})"
    return ", and ".join(filter(None, (misfit, why)))


def _global_shape(observed: Any, spec: PartitionSpec) -> tuple[int, ...]:
    fits = len(spec.partitions) <= len(observed.shape)
    return observed.global_shape(spec) if fits else observed.shape


if TYPE_CHECKING:
    # What type checkers take for an annotation with anything in it, as for jaxtyping's.
    from typing import Annotated as Sharded
else:

    class Sharded(metaclass=_MetaSharded):
        """As a jaxtyping annotation, but also says how an array is split over a mesh.

        Its dimensions are those of the global array. Inside a `shard_map`, where the same value is
        a shard, they are checked against the local ones times the sizes of the mesh axes. So one
        signature is right for a function, and for the same function in a `shard_map`.

        !!! Example

            ```python
            import harvest
            import jax
            import jax.numpy as jnp
            from beartype import beartype
            from harvest import Sharded
            from jax.sharding import NamedSharding
            from jax.sharding import PartitionSpec as P
            from jaxtyping import Array, Float, jaxtyped

            @jaxtyped(typechecker=beartype)
            def apply(
                x: Sharded[Float[Array, "batch d"], P("data", None)],
                w: Sharded[Float[Array, "d"], P()],
            ) -> Sharded[Float[Array, "batch"], P("data")]:
                return x @ w

            size = jax.device_count()
            mesh = jax.make_mesh((size,), ("data",))
            x = jax.device_put(jnp.ones((2 * size, 3)), NamedSharding(mesh, P("data", None)))
            w = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
            inside = jax.shard_map(apply, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
            assert (apply(x, w) == inside(x, w)).all()
            ```

        `Sharded[annotation, spec]` is a class for `isinstance`, beartype and `jaxtyped`. Names of
        dimensions bind across arguments, as jaxtyping's do.

        - Outside of any `shard_map` it checks dtype, shape, and the sharding: of an array that of
            its devices, of a tracer that of its type, which has the explicit axes of a mesh.
        - Inside, it checks dtype, the global shape, and that the shard varies over exactly the
            manual mesh axes of the spec. By which of its axes it is split cannot be seen.
        - Where nothing can be observed, it checks dtype and shape only: for a tracer as far as mesh
            axes are automatic, and under `check_vma=False`.

        Why something is no instance is in what beartype says; elsewhere, ask
        `annotation.__instancecheck_str__(value)`, as of jaxtyping's own annotations.

        **Arguments:**

        - `annotation`: a jaxtyping annotation, or a union of them. With a `PyTree[...]`, all of its
            arrays are split in the same way.
        - `spec`: a `jax.sharding.PartitionSpec`.

        **Raises:**

        - [`harvest.ShardingError`][]: it is given something else.
        """
