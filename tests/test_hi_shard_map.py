"""Values of hi types in `shard_map`, by their `HiPspec`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from harvest import (
    Fold,
    PlantError,
    SowError,
    UnsupportedError,
    add,
    capture,
    folds,
    grad,
    jvp,
    plant,
    reap,
    scale,
    sow,
)

from .hi_programs import KINDS, by_hand, close, rounded
from .hi_types import ProductPspec, QPspec, dequantize, quantize, unpack

SPECS = {
    "quantized": QPspec(P("data", None)),
    "rank one": ProductPspec((P("data"), P())),
    "tuple": ProductPspec((QPspec(P("data", None)), ProductPspec((P(), ProductPspec((P(), P())))))),
}
VALUE = jnp.sin(jnp.arange(1.0, 25.0)).reshape(4, 6)


@pytest.fixture
def mesh():
    # With explicit axes, JAX reshards arrays that come in, and not values of hi types.
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", KINDS)
def test_the_types_of_these_tests_go_through_shard_map(mesh, name):
    """In plain JAX: what comes in and goes out by its `HiPspec` is the same value."""
    value, spec = KINDS[name].make(VALUE), SPECS[name]
    same = jax.jit(jax.shard_map(lambda v: v, mesh=mesh, in_specs=(spec,), out_specs=spec))
    close(by_hand(same(value)), by_hand(value))


# ---------------------------------------------------------- sites in `shard_map`: with its rule


every_kind = pytest.mark.parametrize("name", KINDS)
OTHER = jnp.cos(VALUE)


def sharded(mesh, body, name, spec=None):
    """A compiled `shard_map`, as JAX evaluates none with values of hi types by itself."""
    spec = SPECS[name] if spec is None else spec
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=spec))


def sown(mesh, name):
    return sharded(mesh, lambda v: sow(v, name="h", spec=SPECS[name]), name)


@every_kind
def test_a_value_is_collected_as_the_global_one(mesh, name):
    f, value = sown(mesh, name), KINDS[name].make(VALUE)
    out, collected = capture(f, mode="strict")(value)
    close(by_hand(out), by_hand(value))
    close(by_hand(collected["h"]), by_hand(value))
    assert "shard_map" in str(jax.make_jaxpr(reap(f))(value))


@every_kind
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_planted_value_is_the_global_one(mesh, name, around):
    f, make = sown(mesh, name), KINDS[name].make
    other = around(lambda value, x: plant(f, {"h": make(x)})(value))
    close(by_hand(other(make(VALUE), OTHER)), by_hand(make(OTHER)))
    close(by_hand(plant(f, reap(f)(make(VALUE)))(make(OTHER))), by_hand(make(VALUE)))
    both = lambda value, x: capture(plant(f, {"h": make(x)}))(value)[1]["h"][0]
    close(by_hand(around(both)(make(VALUE), OTHER)), by_hand(make(OTHER)))


@every_kind
def test_an_edit_sees_one_shard(mesh, name):
    kind = KINDS[name]
    got = plant(sown(mesh, name), {"h": kind.twice})(kind.make(VALUE))
    close(by_hand(got), by_hand(kind.twice(kind.make(VALUE))))


def total(mesh):
    """The sum of the squares of what is quantized, which is sown."""

    def body(x):
        return dequantize(sow(quantize(x), name="h", spec=SPECS["quantized"]))

    spec = P("data", None)
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    return lambda x: jnp.sum(f(x) ** 2)


def test_gradients_and_tangents(mesh):
    f, steps = total(mesh), 2 * rounded(VALUE)
    close(grad(f)(VALUE), {"h": steps})
    (gradient, collected) = capture(jax.grad(f), mode="strict")(VALUE)
    close((gradient, by_hand(collected["h"])), (steps, [rounded(VALUE)]))
    _, tangent, at_site = jvp(f, {"h": OTHER}, "h")(VALUE)
    close((tangent, at_site["h"]), (jnp.sum(steps * OTHER), OTHER))


def test_in_a_loop_around(mesh):
    f = sown(mesh, "quantized")

    def repeated(value):
        def step(x, _):
            return 2 * x, dequantize(f(quantize(x)))

        return lax.scan(step, value, length=3)[1]

    wanted = jnp.stack([rounded(k * VALUE) for k in (1.0, 2.0, 4.0)])
    values = reap(repeated)(VALUE)
    close(by_hand(values["h"]), [wanted])
    close(plant(repeated, values)(OTHER), wanted)
    close(plant(repeated, {"h": KINDS["quantized"].twice})(VALUE), 2 * wanted, atol=1e-4)


class Total(Fold):
    """The sum over all iterations, one number for each shard."""

    def init(self, aval):
        return jnp.zeros(())

    def update(self, state, value, index):
        return state + jnp.sum(dequantize(value))


def test_folds_of_arrays(mesh):
    f = sown(mesh, "quantized")
    totals, count, whole = reap(f, {"h": (Total(), folds.count(), dequantize)})(quantize(VALUE))[
        "h"
    ]
    halves = rounded(VALUE).reshape(2, 2, 6)
    close(totals, jnp.sum(halves, axis=(1, 2)))
    assert count == 1
    close(whole, halves)


# -------------------------------------------------------------------------------- what cannot be


def in_a_loop(v):
    spec = SPECS["quantized"]
    return lax.scan(lambda v, _: (sow(v, name="h", spec=spec), None), v, length=3)[0]


REFUSED = {
    "without a spec": (
        lambda v: sow(v, name="h"),
        r"'h'.*the hi type q8\[2, 6\], without a `spec`",
    ),
    "in a loop": (in_a_loop, "'h'.*a loop in a `shard_map`, of a hi type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_spec_outside(mesh, case):
    body, message = REFUSED[case]
    f, value = sharded(mesh, body, "quantized"), quantize(VALUE)
    with pytest.raises(UnsupportedError, match=message):
        reap(f)(value)
    with pytest.raises(UnsupportedError, match=message):
        plant(f, {"h": lambda v: v})(value)
    close(by_hand(capture(f, [])(value)[0]), [rounded(VALUE)])


def test_what_does_not_fit(mesh):
    f, value = sown(mesh, "quantized"), quantize(VALUE)
    with pytest.raises(PlantError, match=r"got q8\[2, 6\], wanted q8\[4, 6\].*'h'"):
        plant(f, {"h": quantize(VALUE[:2])})(value)
    with pytest.raises(PlantError, match=r"got f32\[4,6\], wanted q8\[4, 6\].*'h'"):
        plant(f, {"h": VALUE})(value)
    for edit in (add(1.0), add(quantize(VALUE)), scale(2.0)):
        with pytest.raises(PlantError, match=r"hi type q8.*'h'"):
            plant(f, {"h": edit})(value)
    wrong = sharded(mesh, lambda v: sow(v, name="h", spec=P("data")), "quantized")
    with pytest.raises(SowError, match="wanted a `HiPspec`"):
        reap(wrong)(value)


def test_a_fold_keeps_no_value_of_a_hi_type(mesh):
    message = "state of this fold holds a value of a hi type.*return.*arrays, for the site 'h'"
    with pytest.raises(UnsupportedError, match=message):
        reap(sown(mesh, "quantized"), {"h": folds.last()})(quantize(VALUE))


def test_gradients_with_tangents_of_a_hi_type(mesh):
    """Which plain JAX cannot differentiate either."""
    f = sown(mesh, "tuple")
    loss = lambda x: jnp.sum(dequantize(unpack(f(KINDS["tuple"].make(x)))[0]))
    with pytest.raises(UnsupportedError, match=r"'h'.*whose tangents are of a hi type too"):
        grad(loss)(VALUE)
