"""Values of hi types under `vmap`, in the function and around the transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harvest import PlantError, capture, grad, perturb, plant, reap, sites, sow

from .hi_programs import (
    KINDS,
    OTHER,
    STRUCTURES,
    X,
    by_hand,
    close,
    plainly,
    program,
    stacked,
)
from .hi_types import (
    ProductSpec,
    QSpec,
    dense,
    dequantize,
    pack,
    quantize,
    rank_one,
)

NAMES = [
    "plain",
    "jit",
    "cond",
    "remat",
    "scan",
    "scan of cond",
    "scan of scan",
    "custom_jvp",
    "custom_vjp",
]
structures = pytest.mark.parametrize("structure", [STRUCTURES[n] for n in NAMES], ids=NAMES)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
XS = jnp.stack([X, OTHER, X - OTHER, 0.7 * X])
WEIGHTS = jnp.array([[1.0, -2.0, 0.5], [0.3, 1.5, -0.7]])


def batched(kind, structure, edit=lambda parts, step: parts):
    """By hand, for each example: the results, and what is sown, loop axes first."""
    outs, values = zip(*(plainly(kind, structure, edit)(x) for x in XS), strict=True)
    parts = [stacked(v, structure) for v in values]
    axis = len(structure.loops)
    return np.stack(outs), [np.stack(arrays, axis) for arrays in zip(*parts, strict=True)]


@pytest.mark.parametrize("axis", [0, 1, 2])
@structures
@every_kind
def test_vmap_in_the_function(kind, structure, axis):
    f = jax.vmap(program(kind, structure), in_axes=axis)
    xs = jnp.moveaxis(XS, 0, axis)
    out, collected = capture(f, mode="strict")(xs)
    wanted, values = batched(kind, structure)
    close(out, wanted)
    close(by_hand(collected["h"]), values)
    close(plant(f, collected)(xs), wanted)


@structures
@every_kind
def test_vmap_around(kind, structure):
    f = program(kind, structure)
    type = jax.typeof(reap(f)(X)["h"])
    out_axes = (0, {"h": type.leading_axis_spec()})
    out, collected = jax.vmap(capture(f, mode="strict"), out_axes=out_axes)(XS)
    wanted, values = batched(kind, structure)
    close(out, wanted)
    close(by_hand(collected["h"]), [np.moveaxis(v, len(structure.loops), 0) for v in values])
    again = jax.vmap(lambda x, h: plant(f, {"h": h})(x), in_axes=(0, type.leading_axis_spec()))
    close(again(XS, collected["h"]), wanted)


@structures
@every_kind
def test_edits_see_one_example(kind, structure):
    double = lambda parts, step: [2 * p if i in kind.doubled else p for i, p in enumerate(parts)]
    f = jax.vmap(program(kind, structure))
    close(plant(f, {"h": kind.twice})(XS), batched(kind, structure, double)[0])


@structures
@every_kind
def test_gradients(kind, structure):
    one = lambda x: jnp.sum(WEIGHTS * program(kind, structure)(x))
    at_sites = grad(lambda xs: jnp.sum(jax.vmap(one)(xs)))(XS)["h"]
    each = [by_hand(grad(one)(x)["h"]) for x in XS]
    axis = len(structure.loops)
    wanted = [np.stack(arrays, axis) for arrays in zip(*each, strict=True)]
    close(by_hand(at_sites), wanted, atol=1e-4)
    if structure.loops:
        return
    perturbed = lambda x: jnp.sum(WEIGHTS * program(kind, structure, _perturb)(x))
    for f in (jax.grad(lambda xs: jnp.sum(jax.vmap(perturbed)(xs))), jax.vmap(jax.grad(perturbed))):
        close(by_hand(reap(f)(XS)["g"]), wanted, atol=1e-4)


def _perturb(h):
    return perturb(h, name="g")


# ------------------------------------------------------------ axes by the specs of the types


def in_the_middle(q):
    return jnp.tanh(dequantize(sow(q, name="h"))).sum(0)


def test_axes_are_moved_to_the_front():
    q = quantize(jnp.moveaxis(XS, 0, 1))  # (2, 4, 3)
    f = jax.vmap(in_the_middle, in_axes=QSpec(1), axis_size=4)
    h = reap(f)(q)["h"]
    values = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    np.testing.assert_allclose(*by_hand(h), np.moveaxis(values, 1, 0), rtol=1e-6)
    close(plant(f, {"h": h})(q), f(q))
    halved = plant(f, {"h": lambda q: quantize(dequantize(q) / 2)})(q)
    close(halved, np.tanh(values / 2).sum(0))
    (site,) = sites(f)(q)
    assert (str(site.aval), [a.size for a in site.axes]) == ("q8[2, 3]", [4])
    assert site.spec == "q8[4, 2, 3]" and site.nbytes == 4 * (2 * 3 + 2 * 4)


def test_nested_vmaps():
    xs = jnp.stack([XS, 2 * XS, XS - 1, XS + 1, XS * XS])  # (5, 4, 2, 3)
    q = quantize(jnp.transpose(xs, (2, 0, 1, 3)))  # (2, 5, 4, 3)
    inner = jax.vmap(in_the_middle, in_axes=QSpec(1), axis_size=4)
    f = jax.vmap(inner, in_axes=QSpec(1), axis_size=5)
    h = reap(f)(q)["h"]
    values = np.asarray(q.values, np.float32) * np.asarray(q.scale)
    np.testing.assert_allclose(*by_hand(h), np.transpose(values, (1, 2, 0, 3)), rtol=1e-6)
    close(plant(f, {"h": h})(q), f(q))
    gradient = grad(lambda q: jnp.sum(f(q) ** 3))(q)["h"]
    plain = lambda x: jnp.sum(jnp.tanh(x).sum(2) ** 3)
    close(gradient, jax.grad(plain)(jnp.asarray(np.transpose(values, (1, 2, 0, 3)))), atol=1e-4)


def test_an_axis_that_some_arrays_have():
    u, v = jnp.arange(6.0).reshape(2, 3), jnp.arange(4.0)
    matrix = pack(jax.typeof(rank_one(u[0], v)).inc_rank(2, ProductSpec((0, None))), u, v)
    f = jax.vmap(
        lambda m: dense(sow(m, name="h")).sum(), in_axes=ProductSpec((0, None)), axis_size=2
    )
    h = reap(f)(matrix)["h"]
    close(by_hand(h), [np.asarray(u), np.broadcast_to(v, (2, 4))])
    with pytest.raises(PlantError, match=r"to some of the arrays of the hi type RankOne.*inside"):
        plant(f, {"h": h})(matrix)


def test_independent_values_stay_unbatched():
    q = quantize(X)
    f = jax.vmap(lambda x: x * dequantize(sow(q, name="h")))
    assert jax.typeof(reap(f)(XS)["h"]) == jax.typeof(q)
    g = jax.vmap(lambda q, x: x * dequantize(sow(q, name="h")), in_axes=(None, 0))
    assert jax.typeof(reap(g)(q, XS)["h"]) == jax.typeof(q)


def test_pytrees_of_arrays_and_values():
    def one(x):
        h = sow({"q": quantize(x), "x": x, "n": 3, "m": rank_one(x[0], x[1])}, name="h")
        return dequantize(h["q"]) * h["x"] + dense(h["m"])[:2]

    f = jax.vmap(one)
    out, collected = capture(f, mode="strict")(XS)
    h = collected["h"]
    assert h["n"] == 3
    close(by_hand(h["m"]), [np.asarray(XS[:, 0]), np.asarray(XS[:, 1])])
    close(h["x"], XS)
    close(plant(f, collected)(XS), out)
    edit = lambda h: h | {"q": quantize(0 * h["x"] + 1), "x": h["x"] + 1}
    wanted = XS + 1 + jnp.einsum("bi,bj->bij", XS[:, 0], XS[:, 1])[:, :2]
    close(plant(f, {"h": edit})(XS), wanted)
