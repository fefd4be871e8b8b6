"""Derivatives at sites of hi types: their cotangents are of the type that their type says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    HarvestWarning,
    PlantError,
    capture,
    grad,
    jvp,
    perturb,
    plant,
    reap,
    sow,
    value_and_grad,
)

from .hi_programs import KINDS, OTHER, STRUCTURES, X, by_hand, close, plainly, program, stacked
from .hi_types import quantize, unpack

everywhere = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# JAX has no reverse mode of a `custom_vmap`.
BACKWARD = {name: s for name, s in STRUCTURES.items() if name != "custom_vmap"}
backward = pytest.mark.parametrize("structure", BACKWARD.values(), ids=BACKWARD)
WEIGHTS = jnp.array([[1.0, -2.0, 0.5], [0.3, 1.5, -0.7]])


def weighed(f):
    return lambda x: jnp.sum(WEIGHTS * f(x))


def with_eps(kind, structure):
    """By hand: the result and what is sown, as functions of what is added at the site."""

    def fn(eps, x=X):
        edit = lambda parts, step: [p + e[step] for p, e in zip(parts, eps, strict=True)]
        return plainly(kind, structure, edit)(x)

    return fn


def zeros(kind, structure):
    count = math.prod(structure.loops)
    return [jnp.zeros((count, *part.shape)) for part in kind.parts(X)]


@backward
@every_kind
def test_gradients(kind, structure):
    f = weighed(program(kind, structure))
    value, (at_sites, at_x) = value_and_grad(f, argnums=0)(X)
    of_eps = lambda eps, x: weighed(lambda x: with_eps(kind, structure)(eps, x)[0])(x)
    wanted, by_eps = jax.value_and_grad(of_eps, argnums=(0, 1))(zeros(kind, structure), X)
    close(value, wanted)
    close(by_hand(at_sites["h"]), stacked(by_eps[0], structure), atol=1e-4)
    close(at_x, by_eps[1], atol=1e-4)
    close(by_hand(grad(f, mode="append")(X)["h"][0]), by_hand(at_sites["h"]))


@everywhere
@every_kind
def test_tangents_are_pushed_in(kind, structure):
    f = program(kind, structure)
    plain = program(kind, STRUCTURES["plain"])
    like = f if structure in BACKWARD.values() else plain
    pushed = grad(weighed(like))(OTHER)["h"]  # of the right type
    out, out_tangent, tangents = jvp(f, {"h": pushed})(X)
    eps = [e.reshape(-1, *e.shape[len(structure.loops) :]) for e in by_hand(pushed)]
    fn = with_eps(kind, structure)
    (wanted, _), (tangent, arriving) = jax.jvp(fn, (zeros(kind, structure),), (eps,))
    close(out, wanted)
    close(out_tangent, tangent, atol=1e-4)
    close(by_hand(tangents["h"]), stacked(arriving, structure), atol=1e-4)


@backward
@every_kind
def test_what_is_collected_differentiates(kind, structure):
    def loss(x):
        out, collected = capture(program(kind, structure), mode="strict")(x)
        use = kind.use
        for size in reversed(structure.loops):
            spec = jax.typeof(collected["h"]).leading_axis_spec()
            use = jax.vmap(use, in_axes=(spec,), axis_size=size)
        return jnp.sum(WEIGHTS * out) + jnp.sum(jnp.sin(use(collected["h"])))

    def plain(x):
        out, values = plainly(kind, structure)(x)
        return jnp.sum(WEIGHTS * out) + jnp.sum(jnp.sin(jax.vmap(kind.of_parts)(values)))

    close(jax.grad(loss)(X), jax.grad(plain)(X), atol=1e-4)


@everywhere
@every_kind
def test_gradients_flow_to_planted_values(kind, structure):
    f = program(kind, structure)
    planted = reap(f)(OTHER)["h"]
    loss = lambda x, h: weighed(plant(f, {"h": h}))(x)
    _, at_value = jax.grad(loss, argnums=(0, 1))(X, planted)

    def plain(parts):
        edit = lambda _, step: [p[step] for p in parts]
        return weighed(lambda x: plainly(kind, structure, edit)(x)[0])(X)

    wanted = jax.grad(plain)(plainly(kind, structure)(OTHER)[1])
    close(by_hand(at_value), stacked(wanted, structure), atol=1e-4)


@everywhere
@every_kind
def test_edits_differentiate(kind, structure):
    double = lambda parts, step: [2 * p if i in kind.doubled else p for i, p in enumerate(parts)]
    f = weighed(plant(program(kind, structure), {"h": kind.twice}))
    plain = weighed(lambda x: plainly(kind, structure, double)(x)[0])
    close(jax.grad(f)(X), jax.grad(plain)(X), atol=1e-4)


@backward
@every_kind
def test_cotangents_are_sown(kind, structure):
    f = weighed(program(kind, structure, lambda h: perturb(h, name="g")))
    gradient, collected = capture(jax.grad(f), mode="strict")(X)
    fn = with_eps(kind, structure)
    plain = lambda eps, x: jnp.sum(WEIGHTS * fn(eps, x)[0])
    wanted = jax.grad(plain, argnums=(0, 1))(zeros(kind, structure), X)
    close(gradient, wanted[1], atol=1e-4)
    close(by_hand(collected["g"]), stacked(wanted[0], structure), atol=1e-4)


@every_kind
def test_finite_differences(kind):
    """Of what is planted, part by part, in one direction."""
    f = weighed(program(kind, STRUCTURES["plain"]))
    gradients = by_hand(grad(f)(X)["h"])
    parts = kind.parts(X)
    loss = lambda parts: jnp.sum(WEIGHTS * jnp.tanh(X + kind.of_parts(parts)))
    for number, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        direction = jnp.cos(jnp.arange(part.size, dtype=float)).reshape(part.shape)
        ends = [
            [p + sign * 1e-2 * direction if i == number else p for i, p in enumerate(parts)]
            for sign in (1, -1)
        ]
        slope = (loss(ends[0]) - loss(ends[1])) / 2e-2
        close(jnp.sum(jnp.asarray(gradient) * direction), slope, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["plain", "scan", "remat of scan", "scan of cond"])
@every_kind
def test_gradients_in_branches_that_do_not_run(kind, name):
    """And where nothing depends on a value, they are zeros of its tangent type."""
    structure = STRUCTURES[name]

    def f(x):
        out = program(kind, structure)(x)
        sow(kind.make(out), name="unused")
        skipped = lambda x: kind.use(sow(kind.make(x), name="skipped"))
        return jnp.sum(lax.cond(jnp.asarray(False), skipped, lambda x: x, out))

    with pytest.warns(HarvestWarning, match="'unused' changes nothing"):
        gradients = grad(f)(X)
    zeros_of = [np.zeros(part.shape, np.float32) for part in kind.parts(X)]
    close(by_hand(gradients["unused"]), zeros_of)
    skipped = gradients["skipped"]
    assert skipped.index == 0 and skipped.branches[0] is None
    close(by_hand(skipped.branches[1]), zeros_of)


@every_kind
def test_arguments_of_hi_types(kind):
    """They may be differentiated, in the same pass."""
    value = kind.make(X)
    f = lambda h, x: jnp.sum(WEIGHTS * x * kind.use(sow(h, name="h")))
    at_sites, (at_value, at_x) = grad(f, argnums=(0, 1))(value, X)
    by_parts = jax.grad(lambda parts: jnp.sum(WEIGHTS * X * kind.of_parts(parts)))(kind.parts(X))
    close(by_hand(at_value), list(map(np.asarray, by_parts)))
    close(by_hand(at_sites["h"]), by_hand(at_value))
    close(at_x, WEIGHTS * kind.of_parts(kind.parts(X)))


def test_values_and_gradients_together():
    f = weighed(program(KINDS["rank one"], STRUCTURES["scan"]))
    gradients, values = capture(grad(f), mode="strict")(X)
    close(by_hand(values["h"]), by_hand(reap(f)(X)["h"]))
    close(by_hand(gradients["h"]), by_hand(grad(f)(X)["h"]))
    _, second = jax.value_and_grad(lambda x: jnp.sum(by_parts(grad(f)(x)["h"])))(X)
    plain = lambda x: sum(
        jnp.sum(g)
        for g in jax.grad(lambda e: weighed(lambda x: with_eps(*PAIR)(e, x)[0])(x))(zeros(*PAIR))
    )
    close(second, jax.grad(plain)(X), atol=1e-3)


PAIR = (KINDS["rank one"], STRUCTURES["scan"])


def by_parts(tangent):
    return sum(jnp.sum(part) for part in unpack(tangent))


def test_perturbed_cotangents_are_edited():
    kind, structure = KINDS["rank one"], STRUCTURES["scan"]
    f = weighed(program(kind, structure, lambda h: perturb(h, name="g")))
    ct = reap(jax.grad(f))(X)["g"]
    close(plant(jax.grad(f), {"g": ct})(X), jax.grad(f)(X))
    stopped = plant(jax.grad(f), {"g": harvest.zero()})(X)
    plain = lambda x: weighed(
        lambda x: plainly(kind, structure, lambda p, _: jax.lax.stop_gradient(p))(x)[0]
    )(x)
    close(stopped, jax.grad(plain)(X), atol=1e-4)


WRONG = {
    "a value": (KINDS["quantized"], lambda: quantize(X), r"got q8\[2, 3\], wanted f32\[2,3\]"),
    "an array": (KINDS["rank one"], lambda: X, r"got f32\[2,3\], wanted Factors\(float32\[3\]"),
    "a structure": (KINDS["rank one"], lambda: (X, X), "got a tangent of structure|got a tuple"),
}


@pytest.mark.parametrize("kind, tangent, message", WRONG.values(), ids=WRONG)
def test_tangents_of_another_type(kind, tangent, message):
    with pytest.raises(PlantError, match=message):
        jvp(program(kind, STRUCTURES["plain"]), {"h": tangent()})(X)
