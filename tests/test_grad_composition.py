"""`grad` with the other transforms, under those of JAX, and what it costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import add, at, capture, grad, plant, reap, scale, sow, value_and_grad
from tests.benchmarks import transformer
from tests.helpers import PROGRAMS, SIZE

X = jnp.linspace(0.4, 1.3, SIZE)
WEIGHTS = jnp.array([1.0, -2.0, 3.0, 0.5])


def close(got, wanted, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), got, wanted)


def sown(h, step):
    return sow(h, name="h")


def loss(program, site=sown):
    return lambda x: jnp.sum(PROGRAMS[program].fn(x, site) * WEIGHTS)


def by_hand(program, edit=lambda h: h):
    """The gradient with respect to what plain JAX adds at the site, after an edit."""
    # JAX differentiates no custom rule with respect to what its function closes over.
    fn, loops = PROGRAMS["plain" if program.startswith("custom") else program][:2]

    def total(eps, x):
        site = lambda h, step: edit(h) + (eps if step is None else eps[step])
        return jnp.sum(fn(x, site) * WEIGHTS)

    return lambda x: jax.grad(total)(jnp.zeros((*loops, SIZE)), x)


def curve(h):
    return (h + 1) ** 2


programs = pytest.mark.parametrize("program", PROGRAMS)

# ------------------------------------------------------------------------------ capture and plant


@programs
def test_gradients_and_values(program):
    for transform in (lambda f: f, jax.jit):
        grads, values = capture(transform(grad(loss(program))))(X)
        close(grads, {"h": by_hand(program)(X)})
        close(values, {"h": (PROGRAMS[program].values(X),)})


@programs
def test_plants(program):
    """The gradient is that behind the edit, and of the arguments that through it."""
    wanted = by_hand(program, curve)(X)
    planted = plant(loss(program), {"h": curve})
    at_sites, at_x = grad(planted, argnums=0)(X)
    close(at_sites, {"h": wanted})
    inlined = loss("plain" if program.startswith("custom") else program, lambda h, _: curve(h))
    close(at_x, jax.grad(inlined)(X))
    nested = lambda x: jnp.sum(
        plant(lambda x: PROGRAMS[program].fn(x, sown), {"h": curve})(x) * WEIGHTS
    )
    close(grad(nested)(X), {"h": wanted})


def test_a_plant_around_a_gradient():
    """It edits the values of the derivative's program, and is not differentiated itself."""
    f = lambda x: jnp.sum(sow(2 * x, name="h") ** 3)
    close(plant(grad(f), {"h": add(1.0)})(X), {"h": 3 * (2 * X + 1) ** 2})
    close(plant(grad(f), {"h": jnp.ones(SIZE)})(X), {"h": jnp.full(SIZE, 3.0)})
    layer = lambda x, _: (sow(x, name="h") ** 2, None)
    layers = lambda x: jnp.sum(lax.scan(layer, x, length=2)[0])
    wanted = jnp.stack([12 * X**3, 6 * X**2])
    edits = {"h": at(1, scale(3.0))}
    close(plant(grad(layers), edits)(X), {"h": wanted})
    reducers = {"h": (harvest.folds.mean(), jnp.sum, None)}
    reduced = (wanted.mean(axis=0), wanted.sum(axis=1), wanted)
    close(plant(grad(layers, reducers), edits)(X), {"h": reduced})


def test_a_planted_value_is_a_constant():
    f = lambda x: jnp.sum(sow(sow(2 * x, name="a") ** 2, name="b"))
    at_sites, at_x = grad(plant(f, {"b": X}), argnums=0)(X)
    close((at_sites, at_x), ({"a": 0 * X, "b": jnp.ones(SIZE)}, 0 * X))


def test_gradients_of_what_another_transform_collects():
    """Activations may be part of the loss, as those of a sparsity penalty are."""
    f = lambda x: sow(jnp.sin(sow(2 * x, name="a")), name="b")

    def penalty(x):
        out, values = capture(f, "b")(x)
        return jnp.sum(out**2) + jnp.sum(values["b"][0] ** 4)

    slope = (2 * jnp.sin(2 * X) + 4 * jnp.sin(2 * X) ** 3) * jnp.cos(2 * X)
    close(grad(penalty, "a")(X), {"a": slope})


def test_cotangents_of_perturb():
    f = lambda x: jnp.sum(harvest.perturb(sow(2 * x, name="h") ** 2, name="ct"))
    grads, values = capture(grad(f))(X)
    close(grads, {"h": 4 * X})
    close(values, {"h": (2 * X,), "ct": (jnp.ones(SIZE),)})
    close(plant(grad(f), {"ct": scale(5.0)})(X), {"h": 20 * X})


# -------------------------------------------------------------------------------- second order


@programs
def test_second_derivatives(program):
    wanted = jax.jacrev(by_hand(program))(X)
    at_site = lambda x: grad(loss(program))(x)["h"]
    close(jax.jacrev(at_site)(X), wanted, rtol=1e-3)
    if program != "custom_vjp":  # which has no forward mode
        close(jax.jacfwd(at_site)(X), wanted, rtol=1e-3)


def test_second_derivatives_are_finite_differences():
    f, step = loss("scan"), 1e-2
    at_site = lambda x: grad(f)(x)["h"]
    tangent = jnp.array([0.3, -0.2, 0.5, 0.1])
    wanted = (at_site(X + step * tangent) - at_site(X - step * tangent)) / (2 * step)
    close(jax.jvp(at_site, (X,), (tangent,))[1], wanted, rtol=1e-2)


def test_the_hessian_at_a_site():
    f = lambda x: jnp.sum(sow(2 * x, name="h") ** 3)
    gradient = lambda h: grad(plant(f, {"h": h}))(X)["h"]
    close(jax.jacfwd(gradient)(X), jnp.diag(6 * X))


def test_a_gradient_inside_of_a_gradient():
    def f(x):
        inner = lambda x: jnp.sum(sow(2 * x, name="inner") ** 3)
        return jnp.sum(sow(grad(inner)(x)["inner"], name="outer") ** 2)

    h = 2 * X
    close(grad(f)(X), {"inner": 2 * (3 * h**2) * 6 * h, "outer": 2 * 3 * h**2})


def test_sites_that_a_backward_pass_evaluates_twice():
    f = lambda x: jnp.sum(grad(loss("scan_of_remat"))(x)["h"])
    with pytest.raises(harvest.UnsupportedError, match="`grad` of the function itself"):
        grad(f)(X)


# --------------------------------------------------------------------------- traces and compilation


class Counted:
    def __init__(self, fn):
        self.fn, self.traces = fn, 0

    def __call__(self, *args):
        self.traces += 1
        return self.fn(*args)


AGAIN = {  # called with i = 0, 1, 2: what differs must be no reason to trace
    "inputs": lambda f, i: grad(f)(X + i),
    "numpy": lambda f, i: grad(f)(np.full(SIZE, i, np.float32)),
    "value": lambda f, i: value_and_grad(f)(X + i),
    "argnums": lambda f, i: grad(f, argnums=0)(X),
    "select": lambda f, i: grad(f, ["h"])(X),
    "predicate": lambda f, i: grad(f, lambda site: site.name == "h")(X),
    "fold": lambda f, i: grad(f, {"h": harvest.folds.at(jnp.array(i))})(X),
    "reducer": lambda f, i: grad(f, {"h": jax.tree_util.Partial(jnp.multiply, X + i)})(X),
    "captured": lambda f, i: capture(grad(f))(X + i),
    "planted": lambda f, i: grad(plant(f, {"h": add(X + i)}))(X),
}


@pytest.mark.parametrize("again", AGAIN)
def test_one_trace_and_one_compilation(again):
    fn = Counted(loss("scan"))
    AGAIN[again](fn, 0)
    compiled = len(COMPILED)
    AGAIN[again](fn, 1)
    AGAIN[again](fn, 2)
    assert fn.traces == 1 and len(COMPILED) == compiled


COMPILED: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _count(event, duration, **kwargs):
    if event.endswith("backend_compile_duration"):
        COMPILED.append(event)


def test_traces_are_shared_with_plants():
    fn = Counted(loss("scan"))
    plant(fn, {"h": add(1.0)})(X)
    grad(fn)(X)
    value_and_grad(fn, argnums=0)(X)
    assert fn.traces == 1


# -------------------------------------------------------------------------------- what it costs


def total(model):
    return lambda weights, x: jnp.sum(model(weights, x) ** 2)


def plain(model, **options):
    return total(functools.partial(model, see=transformer.ignore, **options))


MODELS = {  # with sows, and without
    "scanned": (total(transformer.scanned), plain(transformer.scanned)),
    "remat": (
        total(functools.partial(transformer.scanned, wrap=jax.checkpoint)),
        plain(transformer.scanned, wrap=jax.checkpoint),
    ),
}


def counts(fn):
    compiled = jax.jit(fn).lower(transformer.parameters(), transformer.tokens()).compile()
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("model", MODELS)
def test_one_backward_pass_for_all_sites(model):
    """Of all sites in twelve layers; it costs what the gradient of the input does."""
    sown, unsown = MODELS[model]
    flops, temp = counts(grad(sown))
    plain_flops, plain_temp = counts(jax.grad(unsown, argnums=1))
    assert flops <= 1.001 * plain_flops and temp <= 1.05 * plain_temp
    both, _ = counts(grad(sown, argnums=1))
    assert both <= 1.001 * plain_flops


def test_as_cheap_as_by_hand():
    def by_hand(weights, x):
        def deviating(eps):
            def step(x, row):
                weights, eps = row
                return transformer.layer(weights, x, lambda h, name: h + eps[name]), None

            return jnp.sum(lax.scan(step, x, (weights, eps))[0] ** 2)

        values = jax.eval_shape(reap(transformer.scanned), weights, x)
        return jax.grad(deviating)(jax.tree.map(jnp.zeros_like, values))

    sown, _ = MODELS["scanned"]
    assert counts(grad(sown)) == counts(by_hand)
    args = transformer.parameters(), transformer.tokens()
    close(grad(sown)(*args), jax.jit(by_hand)(*args), rtol=1e-3)


def test_the_forward_pass_is_that_of_the_function():
    sown, unsown = MODELS["scanned"]
    args = transformer.parameters(), transformer.tokens()
    value, _ = value_and_grad(sown, argnums=1)(*args)
    assert value == jax.jit(jax.value_and_grad(unsown, argnums=1))(*args)[0]
