"""Gradients with respect to sown values: every structure, against plain JAX and differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import CondSum, capture, grad, reap, scope, sow, value_and_grad
from tests.helpers import PROGRAMS, SIZE
from tests.nesting import loops, nested, without_rules

X = jnp.linspace(0.4, 1.3, SIZE)
XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)
WEIGHTS = jnp.array([1.0, -2.0, 3.0, 0.5])


def close(got, wanted, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), got, wanted)


def sown(h, step):
    return sow(h, name="h")


def unsown(h, step):
    return h


def loss(program, site=sown):
    return lambda x: jnp.sum(PROGRAMS[program].fn(x, site) * WEIGHTS)


def loss_with(program, eps, x):
    """The loss in plain JAX, with `eps` added at the site."""
    # JAX differentiates no custom rule with respect to what its function closes over.
    fn = PROGRAMS["plain" if program.startswith("custom") else program].fn
    return jnp.sum(fn(x, lambda h, step: h + (eps if step is None else eps[step])) * WEIGHTS)


def zeros(program):
    return jnp.zeros((*PROGRAMS[program].loops, SIZE))


def by_hand(program, x):
    return jax.grad(lambda eps: loss_with(program, eps, x))(zeros(program))


def cases(*ways):
    """Every program in every way; under both implementations of remat if it has one."""
    return [
        pytest.param(program, *way, remat3, id="-".join((program, *way, str(remat3))))
        for program in PROGRAMS
        for way in ([(way,) for way in ways] or [()])
        for remat3 in ([False, True] if "remat" in program + "".join(way) else [False])
    ]


WAYS = {
    "jit": lambda f: jax.jit(grad(f)),
    "of jit": lambda f: grad(jax.jit(f)),
    "of remat": lambda f: grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("program, way, remat3", cases(*WAYS), indirect=["remat3"])
def test_as_of_what_is_added_at_the_site(program, way, remat3):
    close(WAYS[way](loss(program))(X), {"h": by_hand(program, X)})


@pytest.mark.parametrize("program, remat3", cases(), indirect=["remat3"])
def test_finite_differences(program, remat3):
    step = 1e-2

    @jax.vmap
    def slopes(one):
        up, down = (loss_with(program, s * step * one, X) for s in (1, -1))
        return (up - down) / (2 * step)

    shape = zeros(program).shape
    ones = jnp.eye(zeros(program).size).reshape(-1, *shape)
    np.testing.assert_allclose(
        grad(loss(program))(X)["h"], slopes(ones).reshape(shape), rtol=2e-3, atol=1e-3
    )


@pytest.mark.parametrize("program, remat3", cases(), indirect=["remat3"])
def test_value_and_gradients_of_arguments_are_those_of_jax(program, remat3):
    value, (at_h, at_x) = value_and_grad(loss(program), argnums=0)(X)
    plain = loss(program, unsown)
    close((value, at_x), jax.value_and_grad(plain)(X))
    close(at_h, {"h": by_hand(program, X)})
    with jax.disable_jit():  # operation by operation, the values are the same bit for bit
        assert value_and_grad(loss(program))(X)[0] == plain(X)


@pytest.mark.parametrize("program, remat3", cases(), indirect=["remat3"])
def test_vmap(program, remat3):
    each = jnp.stack([by_hand(program, x) for x in XS])
    close(jax.vmap(grad(loss(program)))(XS)["h"], each)
    total = lambda xs: jnp.sum(jax.vmap(loss(program))(xs))
    axis = len(PROGRAMS[program].loops)  # loops first, then the batch
    close(grad(total)(XS)["h"], jnp.moveaxis(each, 0, axis))
    close(grad(lambda xs: total(xs.T))(XS.T)["h"], jnp.moveaxis(each, 0, axis))


NESTED = [
    "jit/remat/custom_vjp",
    "cond/scan/jit",
    "scan/remat/cond",
    "remat/scan/remat",
    "scan/map",
    "map/reverse",
    "custom_jvp/scan",
    "scan/custom_vjp",
    "custom_vjp/custom_jvp",
    "remat/custom_vjp/cond",
    "reverse/custom_jvp/map",
]


@pytest.mark.parametrize("names", NESTED)
def test_nested_structures(names):
    eps = jnp.zeros((*loops(names), SIZE))
    plain = without_rules(names)
    total = lambda x, eps: jnp.sum(plain(x, lambda h, step: h + eps[step]) * WEIGHTS)
    fn = lambda x: jnp.sum(nested(names)(x, sown) * WEIGHTS)
    at_x, at_h = jax.grad(total, (0, 1))(X, eps)
    close(grad(fn, argnums=0)(X), ({"h": at_h}, at_x))
    outputs, values = capture(grad(fn))(X)
    close(outputs, {"h": at_h})
    close(values, capture(fn)(X)[1])
    each = jax.vmap(jax.grad(total, 1), in_axes=(0, None))(XS, eps)
    close(jax.vmap(grad(fn))(XS), {"h": each})


# ----------------------------------------------------------------------------- where it is zero


def test_zeros_where_nothing_depends_on_the_site():
    def f(x):
        a = sow(2 * x, name="a")
        sow(lax.stop_gradient(a), name="b")
        c = sow((x, jnp.sum(x)), name="c")
        return jnp.sum(lax.stop_gradient(a) * c[0])

    with pytest.warns(harvest.HarvestWarning, match="'b' changes nothing"):
        grads = grad(f)(X)
    close(grads, {"a": 0 * X, "b": 0 * X, "c": (2 * X, 0.0)})


def test_a_site_whose_result_is_not_used_is_warned_about():
    def f(x):
        sow(x, name="h")  # the line that the message names
        return jnp.sum(x)

    line = f.__code__.co_firstlineno + 1
    with pytest.warns(
        harvest.HarvestWarning, match=rf"test_grad.py:{line} .*write `h = sow\(h, name='h'\)`"
    ):
        close(grad(f)(X), {"h": 0 * X})


def test_branches_that_are_not_taken():
    def f(number, x):
        branches = [lambda x, k=k: jnp.sum(sow(k * x, name="h") ** k) for k in (1, 2, 3)]
        return lax.switch(number, branches, x) + jnp.sum(sow(x, name="g"))

    for k in range(3):
        wanted = (k + 1) * ((k + 1) * X) ** k
        close(grad(f)(jnp.asarray(k), X), {"h": wanted, "g": jnp.ones(SIZE)})


def one_sided(taken, x):
    x = lax.cond(taken, lambda x: sow(2 * x, name="h") ** 2, lambda x: x, x)
    return jnp.sum(x * WEIGHTS)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_branch_without_the_site(transform):
    for taken in (True, False):
        gradient = grad(transform(one_sided))(jnp.asarray(taken), X)["h"]
        assert isinstance(gradient, CondSum) and gradient.index == int(taken)
        assert gradient.branches[0] is None
        close(gradient.branches[1], 4 * X * WEIGHTS if taken else 0 * X)
        outputs, values = capture(grad(transform(one_sided)))(jnp.asarray(taken), X)
        close(outputs, {"h": gradient})
        close(values, capture(transform(one_sided))(jnp.asarray(taken), X)[1])


def test_branches_of_different_types_in_a_loop():
    def f(xs):
        pair = lambda x: jnp.sum(sow((x, 3 * x), name="h")[1])
        single = lambda x: sow(x**2, name="h")

        def step(total, row):
            i, x = row
            return total + lax.cond(i % 2 == 0, pair, single, x), None

        return lax.scan(step, 0.0, (jnp.arange(SIZE), xs))[0]

    even = jnp.array([1.0, 0.0, 1.0, 0.0])
    close(grad(f)(X)["h"], CondSum(jnp.array([1, 0, 1, 0]), (1 - even, (0 * even, even))))


def test_a_predicate_that_vmap_batched():
    fn = jax.vmap(one_sided, in_axes=(0, 0))
    taken = jnp.array([True, False])
    gradient = jax.vmap(grad(one_sided))(taken, XS)["h"]
    close(gradient.branches[1], jnp.stack([4 * XS[0] * WEIGHTS, 0 * X]))
    with pytest.warns(harvest.HarvestWarning, match=r"put `grad` inside: `jax.vmap\(grad\(f\)\)`"):
        inside = grad(lambda taken, xs: jnp.sum(fn(taken, xs)))(taken, XS)["h"]
    close(inside, gradient.branches[1])


# --------------------------------------------------------------------------------- types and keys


def test_gradients_are_of_the_form_of_the_value():
    def f(x):
        value = {
            "x": x,
            "half": x.astype(jnp.bfloat16),
            "z": jax.lax.complex(x, 2 * x),
            "ints": jnp.arange(3),
            "mask": x > 0,
            "key": jax.random.key(0),
            "static": (3, 2.5, "s", None, jnp.sin),
        }
        h = sow(value, name="h")
        parts = (h["x"] ** 2, h["half"].astype(x.dtype), jnp.abs(h["z"]) ** 2)
        return sum(jnp.sum(part) for part in parts)

    gradient, value = grad(f)(X)["h"], reap(f)(X)["h"]
    assert gradient.keys() == value.keys()
    close(gradient["x"], 2 * X)
    assert gradient["half"].dtype == jnp.bfloat16
    close(gradient["half"].astype(jnp.float32), jnp.ones(SIZE))
    close(gradient["z"], jax.lax.complex(2 * X, -4 * X))  # as `jax.grad` has it, the conjugate
    for name in ("ints", "mask", "key"):
        assert gradient[name].dtype == jax.dtypes.float0
        assert gradient[name].shape == value[name].shape
    assert gradient["static"] == (None,) * 5


def test_sites_without_anything_to_differentiate():
    step = lambda x, i: (x * sow(i, name="i").astype(x.dtype), sow("s", name="s"))
    f = lambda x: jnp.sum(lax.scan(lambda x, i: (step(x, i)[0], None), x, jnp.arange(3))[0])
    grads = grad(f)(X)
    assert grads["s"] is None
    assert grads["i"].dtype == jax.dtypes.float0 and grads["i"].shape == (3,)


def layers(x):
    for i in range(3):
        with scope(f"layers/{i}"):
            x = sow(x**2, name="resid")
            x = sow(2 * x, name="mlp")
    return jnp.sum(x)


SELECTED = {
    "all": (None, [f"layers/{i}/{name}" for i in range(3) for name in ("resid", "mlp")]),
    "key": ("layers/1/mlp", ["layers/1/mlp"]),
    "glob": ("layers/*/mlp", [f"layers/{i}/mlp" for i in range(3)]),
    "predicate": (lambda site: site.scope == "layers/1", ["layers/1/resid", "layers/1/mlp"]),
    "sequence": (
        ["layers/2/mlp", "layers/0/*"],
        ["layers/0/resid", "layers/0/mlp", "layers/2/mlp"],
    ),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_sites_in_call_order(name):
    select, keys = SELECTED[name]
    everything, grads = grad(layers)(X), grad(layers, select)(X)
    assert list(grads) == keys
    close(grads, {key: everything[key] for key in keys})


def test_occurrences_in_call_order():
    f = lambda x: jnp.sum(sow(3 * sow(x**2, name="h"), name="h") ** 2)
    close(grad(f, mode="append")(X), {"h": (18 * X**2, 6 * X**2)})
    close(grad(layers, "layers/2/mlp", mode="append")(X), {"layers/2/mlp": (jnp.ones(SIZE),)})
