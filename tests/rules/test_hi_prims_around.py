"""Where a user's `HiPrim` may be, what cannot be looked into, and values of hi types."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.hijax import HiType, instantiate_zeros, linearize_from_jvp, register_hitype
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from harvest import HarvestWarning, UnsupportedError, capture, plant, reap, sites, sow
from tests import hi_types
from tests.hi_prims import Op

X = jnp.float32(0.6)
TWO = jnp.float32(2)


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


# ------------------------------------------------------------------------------- environments

MESH = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))


class Sum(Op):
    """The sum over a mesh axis, or over that of a `vmap`."""

    def expand(self, x):
        return sow(lax.psum(x, "i"), name="sum")


def summed(x):
    return Sum(jax.typeof(x), out=jax.typeof(lax.psum(x, "i")))(x)


def over_shards(f, check_vma):
    spec = PartitionSpec
    return jax.shard_map(f, mesh=MESH, in_specs=spec("i"), out_specs=spec(), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
def test_names_of_mesh_axes_around_the_transform(check_vma):
    x = jnp.arange(4.0)
    f = over_shards(lambda x: capture(summed)(x), check_vma)
    close(f(x), ([2, 4], {"sum": ([2, 4],)}))
    planted = over_shards(lambda x: plant(summed, {"sum": jnp.negative})(x), check_vma)
    close(planted(x), [-2, -4])


@pytest.mark.parametrize("check_vma", [True, False])
def test_names_of_mesh_axes_inside_of_the_transform(check_vma):
    x = jnp.arange(4.0)
    f = over_shards(summed, check_vma)
    (site,) = sites(f)(x)
    assert site.key == "sum"
    # Without `check_vma` nothing tells that the shards are equal.
    value = np.float32([2, 4] if check_vma else [[2, 4], [2, 4]])
    close(capture(f)(x), ([2, 4], {"sum": (value,)}))
    close(plant(f, {"sum": -value})(x), [-2, -4])
    close(plant(f, reap(f)(x))(x), [2, 4])
    text = str(jax.make_jaxpr(capture(f))(x))
    assert text.count("name=Sum") == 1 and ("psum_invariant" in text) == check_vma
    assert str(jax.make_jaxpr(capture(f, []))(x)).count(" = Sum ") == 1


def test_the_name_of_an_axis_of_vmap():
    class Mean(Sum):
        def batch(self, axis_data, args, dims):
            assert axis_data.name == "i"
            return jnp.sum(args[0], dims[0]), None

    f = lambda x: Mean.apply(x)
    x = jnp.arange(3.0)
    out, collected = jax.vmap(capture(f), axis_name="i")(x)
    close((out, collected), ([3, 3, 3], {"sum": ([3, 3, 3],)}))


def test_explicit_sharding():
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)
    product = PartitionSpec("i", None)

    class MatMul(Op):
        def expand(self, x, y):
            return sow(jnp.matmul(x, y, out_sharding=product), name="h") * 2

    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 4), "f"), NamedSharding(mesh, PartitionSpec("i", "j")))
        out = jax.typeof(jnp.matmul(x, x.T, out_sharding=product))
        f = lambda x: MatMul(jax.typeof(x), jax.typeof(x.T), out=out)(x, x.T)
        got, collected = capture(f)(x)
        assert jax.typeof(got).sharding.spec == jax.typeof(collected["h"][0]).sharding.spec
        close(got, 2 * np.full((4, 4), 4))
        close(collected["h"][0], np.full((4, 4), 4))
        close(plant(f, reap(f)(x))(x), got)


# ------------------------------------------------------- what cannot be traced beforehand


class Moody(Op):
    """Fails to be traced the first time."""

    def expand(self, x):
        if len(self.calls) == 0:
            self.calls.append(None)
            raise RuntimeError("not now")
        return sow(x, name="moody") if self.sows else x

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd(self, res, ct, accum):
        accum.accum(100 * ct)


class Calls(list):
    """A parameter, which is hashed."""

    __hash__ = object.__hash__


def moody(sows):
    calls = Calls()
    return lambda x: sow(Moody.apply(x, calls=calls, sows=sows) + 1, name="z")


UNSEEN = {
    "capture": lambda f: lambda x: capture(f)(x),
    "reap": lambda f: lambda x: reap(f)(x),
    "jit": lambda f: jax.jit(capture(f)),
    "unneeded": lambda f: reap(lambda x: (sow(x, name="y"), f(x)), "y"),
    "grad": lambda f: jax.grad(lambda x: capture(f)(x)[0]),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: capture(f)(x)[0])),
    "vmap": lambda f: lambda x: jax.vmap(capture(f))(x[None]),
    "scan": lambda f: lambda x: capture(lambda x: lax.map(f, x))(x[None]),
    "cond": lambda f: capture(lambda x: lax.cond(x > 0, f, lambda x: x, x)),
    "outer": lambda f: capture(lambda x: capture(f)(x)),
}


@pytest.mark.parametrize("use", UNSEEN)
def test_a_sow_in_what_cannot_be_looked_into_is_an_error(use):
    message = (
        r"'moody' \(sown at .*test_hi_prims_around.py:\d+\) is inside `Moody`, which cannot be "
        r"traced by itself \(RuntimeError: not now\)"
    )
    with pytest.raises(UnsupportedError, match=message):
        UNSEEN[use](moody(True))(X)


@pytest.mark.parametrize("use", UNSEEN)
def test_what_cannot_be_looked_into_is_harmless_if_it_does_not_sow(use):
    got = UNSEEN[use](moody(False))(X)
    plain = moody(False)
    with pytest.raises(RuntimeError, match="not now"):
        plain(X)
    close(got, UNSEEN[use](lambda x: sow(x + 1, name="z"))(X) if "grad" not in use else 100)


def test_the_table_of_sites_says_what_it_does_not_have():
    with pytest.warns(HarvestWarning, match="does not have what is sown inside `Moody`, which"):
        table = sites(moody(True))(X)
    assert [site.key for site in table] == ["z"]


# --------------------------------------------------------------------------- values of hi types


@dataclass(frozen=True)
class Boxed(HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        return [jax.core.ShapedArray(self.shape, jnp.dtype("float32"))]

    def lower_val(self, hi_val):
        return [hi_val.value]

    def raise_val(self, *lo_vals):
        return Box(*lo_vals)

    def to_tangent_aval(self):
        return self.lo_ty()[0]


@dataclass(frozen=True)
class Box:
    value: jax.Array


register_hitype(Box, lambda box: Boxed(jnp.shape(box.value)))


class Put(Op):
    def __init__(self, aval):
        super().__init__(aval, out=Boxed(aval.shape))

    def expand(self, x):
        return Box(sow(x + 5, name="put"))

    def vjp_fwd(self, nzs_in, x):
        return self(x), None

    def vjp_bwd(self, res, ct, accum):
        accum.accum(10 * ct)

    def jvp(self, primals, tangents):
        return self(*primals), 10 * instantiate_zeros(*tangents)

    lin, linearized = linearize_from_jvp


class Take(Put):
    def __init__(self, aval):
        Op.__init__(self, aval, out=aval.lo_ty()[0])

    def expand(self, box):
        return sow(2 * box.value, name="taken") + 1


def boxed(x):
    return Take.apply(Put.apply(x))


def test_inputs_and_results_of_hi_types():
    close(capture(boxed)(X), (2 * 5.6 + 1, {"put": (5.6,), "taken": (2 * 5.6,)}))
    close(plant(boxed, {"put": TWO})(X), 5)
    close(plant(boxed, {"taken": jnp.negative})(X), 1 - 2 * 5.6)
    close(plant(boxed, reap(boxed)(X))(X), boxed(X))
    close(jax.grad(lambda x: capture(boxed)(x)[0])(X), 100)
    close(jax.grad(lambda x: reap(boxed, "put")(x)["put"])(X), 1)
    steps = lambda x: lax.scan(lambda x, _: (boxed(x), None), x, length=2)[0]
    x1 = 2 * 5.6 + 1
    close(reap(steps)(X), {"put": [5.6, x1 + 5], "taken": [2 * 5.6, 2 * (x1 + 5)]})
    assert list(capture(jax.grad(boxed))(X)[1]) == ["put", "taken"]


def test_a_derivative_through_a_hi_type_is_refused():
    message = "through a value of the hi type Boxed.* collect or plant outside of `jax.grad`"
    planted = plant(boxed, {"taken": jnp.negative})
    for differentiated in (
        jax.grad(lambda x: reap(boxed)(x)["taken"]),
        jax.grad(planted),
        lambda x: jax.jvp(planted, (x,), (TWO,)),
        lambda x: jax.linearize(planted, x)[1](TWO),
    ):
        with pytest.raises(UnsupportedError, match=message):
            differentiated(X)


def test_values_of_hi_types_that_a_primitive_makes_by_hand():
    class ByHand(Op):
        def expand(self, x):
            return Put.apply(x).value * 2  # JAX evaluates it to a `Box`, a trace does not

    with pytest.raises(UnsupportedError, match=r"'put' .* is inside `ByHand`, which cannot be"):
        capture(ByHand.apply)(X)
    close(jax.jit(ByHand.apply)(X), 2 * 5.6)


class Dequantized(hi_types.Op):
    def __init__(self, aval):
        super().__init__([aval], aval.array)

    def expand(self, q):
        return 2 * sow(q.values.astype(jnp.float32) * q.scale, name="h")

    def batch(self, axis_data, args, dims):
        return Dequantized(jax.typeof(args[0]))(*args), dims[0] and dims[0].axis


def test_a_batch_axis_of_a_hi_type_is_known_to_the_rules_of_the_primitive():
    def f(x):
        q = hi_types.quantize(x)
        return Dequantized(jax.typeof(q))(q)

    xs = jnp.array([[[127.0, -64.0]], [[254.0, 2.0]]])  # of which nothing is rounded
    close(reap(jax.vmap(f))(xs), {"h": xs})
    close(plant(jax.vmap(f), {"h": lambda h: h + 1})(xs), 2 * (xs + 1))
    for inside in (reap(f), plant(f, {"h": lambda h: h + 1})):
        message = r"a batch axis through a value of the hi type q8.* outside of .* `jax.vmap`"
        with pytest.raises(UnsupportedError, match=message):
            jax.vmap(inside)(xs)
