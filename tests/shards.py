"""Programs with `shard_map`, and what they sow, computed by numpy without any."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from harvest import sow

P = PartitionSpec
BOTH = P("data", "model")
X = np.random.RandomState(0).randn(8, 4).astype(np.float32)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def cut(value: Any) -> np.ndarray:
    """The shards of a value of shape (8, 4) that is split over both axes, stacked."""
    rows = [np.split(row, 2, axis=1) for row in np.split(value, 4, axis=0)]
    return np.stack([shard for row in rows for shard in row])


def joined(shards: Any) -> np.ndarray:
    """The inverse of `cut`."""
    return np.block([[shards[2 * i], shards[2 * i + 1]] for i in range(4)])


class Sharded(NamedTuple):
    """How a program is put into a `shard_map`."""

    mesh: Any
    check_vma: bool

    def map(self, body, in_specs=BOTH, out_specs=BOTH, **options):
        return jax.shard_map(
            body,
            mesh=options.pop("mesh", self.mesh),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=self.check_vma,
            **options,
        )

    def alike(self, value: Any, count: int = 8) -> np.ndarray:
        """A value that is the same in so many shards, as it is collected."""
        value = np.asarray(value)
        return value if self.check_vma else np.stack([value] * count)


class Program(NamedTuple):
    make: Callable[[Sharded], Callable]  # a function of an array like `X`
    reference: Callable[[Sharded, np.ndarray], tuple[Any, dict[str, Any]]]
    spec: PartitionSpec = BOTH  # of its argument


PROGRAMS: dict[str, Program] = {}


def program(reference, spec=BOTH):
    def decorator(make):
        PROGRAMS[make.__name__] = Program(make, reference, spec)
        return make

    return decorator


def two_sites(x):
    """`h` is assembled by its spec, `u` is stacked."""
    h = sow(jnp.sin(x), name="h", spec=BOTH)
    return sow(h + 1, name="u")


def two_values(sharded, x):
    h = np.sin(x)
    return h + 1, {"h": h, "u": cut(h + 1)}


@program(two_values)
def at_top(sharded):
    return lambda x: sharded.map(two_sites)(x)


@program(two_values)
def in_jit(sharded):
    return lambda x: jax.jit(sharded.map(lambda x: jax.jit(two_sites)(x)))(x)


@program(two_values)
def in_remat(sharded):
    return lambda x: jax.checkpoint(sharded.map(jax.checkpoint(two_sites)))(x)


@jax.custom_vjp
def by_vjp(x):
    return two_sites(x)


by_vjp.defvjp(lambda x: (jnp.sin(x) + 1, x), lambda x, ct: (3 * ct * jnp.cos(x),))


@jax.custom_jvp
def by_jvp(x):
    return two_sites(x)


@by_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jnp.sin(x) + 1, 3 * t * jnp.cos(x)


@program(two_values)
def in_custom_vjp(sharded):
    return lambda x: sharded.map(by_vjp)(x)


@program(two_values)
def in_custom_jvp(sharded):
    return lambda x: sharded.map(by_jvp)(x)


def layer(x, w):
    return two_sites(x) * w, None


def looped_values(sharded, x):
    hs, us = [], []
    for w in (1.0, 2.0, 3.0):
        hs.append(np.sin(x))
        us.append(cut(hs[-1] + 1))
        x = (hs[-1] + 1) * w
    return x, {"h": np.stack(hs), "u": np.stack(us)}


@program(looped_values)
def around_scan(sharded):
    return lambda x: sharded.map(lambda x: lax.scan(layer, x, jnp.arange(1.0, 4))[0])(x)


@program(looped_values)
def inside_scan(sharded):
    def step(x, w):
        return sharded.map(lambda x, w: layer(x, w)[0], (BOTH, P()))(x, w), None

    return lambda x: lax.scan(step, x, jnp.arange(1.0, 4))[0]


@program(lambda sharded, x: twice_looped_values(x))
def between_scans(sharded):
    def step(x, w):
        inner = lambda x, w: lax.scan(layer, x, w * jnp.arange(1.0, 3))[0]
        return sharded.map(inner, (BOTH, P()))(x, w), None

    return lambda x: lax.scan(step, x, jnp.arange(1.0, 4))[0]


def twice_looped_values(x):
    hs, us = [], []
    for w in (1.0, 2.0, 3.0):
        for v in (1.0, 2.0):
            hs.append(np.sin(x))
            us.append(cut(hs[-1] + 1))
            x = (hs[-1] + 1) * w * v
    return x, {"h": np.reshape(hs, (3, 2, 8, 4)), "u": np.reshape(us, (3, 2, 8, 2, 2))}


def sine_or_cosine(sharded, x):
    h = np.sin(x) if x.sum() > 0 else np.cos(x)
    return h, {"h": h}


SINE = lambda x: sow(jnp.sin(x), name="h", spec=BOTH)
COSINE = lambda x: sow(jnp.cos(x), name="h", spec=BOTH)


@program(sine_or_cosine)
def around_cond(sharded):
    def body(x):
        return lax.cond(lax.psum(x.sum(), ("data", "model")) > 0, SINE, COSINE, x)

    return lambda x: sharded.map(body)(x)


@program(sine_or_cosine)
def inside_cond(sharded):
    return lambda x: lax.cond(x.sum() > 0, sharded.map(SINE), sharded.map(COSINE), x)


def each_shard_its_branch(sharded, x):
    shards = np.stack([np.sin(s) if s[0, 0] > 0 else np.cos(s) for s in cut(x)])
    return joined(shards), {"h": joined(shards)}


@program(each_shard_its_branch)
def around_uneven_cond(sharded):
    return lambda x: sharded.map(lambda x: lax.cond(x[0, 0] > 0, SINE, COSINE, x))(x)


def mapped_values(sharded, x):
    h = np.sin(x)
    u = (2 * h).T.reshape(4, 4, 2)  # batch, mesh, own
    return 2 * h, {"h": h.T, "u": u if sharded.check_vma else np.repeat(u, 2, axis=1)}


def example(row):
    return sow(2 * sow(jnp.sin(row), name="h", spec=P("data")), name="u")


@program(mapped_values, P("data"))
def around_vmap(sharded):
    body = jax.vmap(example, in_axes=1, out_axes=1)
    return lambda x: sharded.map(body, P("data"), P("data"))(x)


@program(mapped_values, P("data"))
def inside_vmap(sharded):
    body = sharded.map(example, P("data"), P("data"))
    return lambda x: jax.vmap(body, in_axes=1, out_axes=1)(x)


def partial_values(sharded, x):
    h = np.sin(x)
    return 2 * h, {"h": h, "u": (2 * h).reshape(4, 2, 4)}


@program(partial_values, P("data"))
def over_one_axis(sharded):
    def body(x):
        return sow(2 * sow(jnp.sin(x), name="h", spec=P("data")), name="u")

    return lambda x: jax.jit(sharded.map(body, P("data"), P("data"), axis_names={"data"}))(x)


def collected_values(sharded, x):
    total = x.reshape(4, 2, 4).sum(0)
    rows = np.repeat(x.reshape(4, 2, 4), 2, axis=0)
    numbers = np.arange(4) if sharded.check_vma else np.repeat(np.arange(4), 2)
    if not sharded.check_vma:
        total = np.stack([total[:, :2], total[:, 2:]] * 4)
    out = np.concatenate([x.reshape(4, 2, 4).sum(0) + i for i in range(4)])
    everything = sharded.alike(x.sum())
    return out, {"total": total, "rows": rows, "number": numbers, "sum": everything}


@program(collected_values)
def with_collectives(sharded):
    def body(x):
        spec = P(None, "model") if sharded.check_vma else None
        total = sow(lax.psum(x, "data"), name="total", spec=spec)
        rows = sow(lax.all_gather(x, "model", axis=1, tiled=True), name="rows")
        total = total + 0 * rows[:, :2]
        number = sow(lax.axis_index("data"), name="number")
        everything = sow(lax.psum(x.sum(), ("data", "model")), name="sum")
        return total + number.astype(total.dtype) + 0 * everything

    return lambda x: sharded.map(body)(x)


def tree_values(sharded, x):
    sums = cut(x).sum((1, 2))
    out = np.sin(x) * np.repeat(np.repeat(sums.reshape(4, 2), 2, 0), 2, 1) + x.sum()
    value = {"a": np.sin(x), "b": (sums, 3), "n": None, "z": sharded.alike(x.sum())}
    return out, {"v": value}


@program(tree_values)
def with_pytrees(sharded):
    def body(x):
        total = lax.psum(x.sum(), ("data", "model"))
        v = {"a": jnp.sin(x), "b": (x.sum(), 3), "n": None, "z": total}
        v = sow(v, name="v", spec={"a": BOTH, "b": None, "n": None, "z": None})
        return v["a"] * v["b"][0] + v["z"]

    return lambda x: sharded.map(body)(x)


def place(program: Program, mesh: Any) -> jax.Array:
    """The argument of a program, sharded."""
    return jax.device_put(X, jax.NamedSharding(mesh, program.spec))


def doubled_sine(x):
    return sow(2 * sow(jnp.sin(x), name="h", spec=BOTH), name="u")


def nested(sharded, inside=None, inner=doubled_sine):
    """A `shard_map` over one axis in one over the other; explicit axes are refused by JAX."""
    inside = inside or sharded

    def body(x):
        spec = P(None, "model")
        return inside.map(inner, spec, spec, axis_names={"model"}, mesh=None)(x)

    return lambda x: jax.jit(sharded.map(body, P("data"), P("data"), axis_names={"data"}))(x)


def nested_reference(x):
    h = np.sin(x)
    return 2 * h, {"h": h, "u": cut(2 * h).reshape(4, 2, 2, 2)}
