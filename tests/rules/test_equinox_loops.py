"""The loops of `equinox.internal`, which differential equations and root finders are built on."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from harvest import CondSum, UnsupportedError, add, at, capture, folds, plant, reap, sites, sow
from tests.helpers import equinox_differentiates

X = jnp.array([0.5, 1.0])
KINDS = ["lax", "checkpointed", "bounded"]
FOLDS = folds.last(), folds.count(), folds.stack(5)


def tagged(value):
    return sow(value, name="h")


def steps(x, n=3, kind="lax", tag=tagged):
    """`n` times `x = cos(h)` with `h = 2 * x`."""

    def body(carry):
        i, x = carry
        return i + 1, jnp.cos(tag(2 * x))

    bounds = {} if kind == "lax" else {"max_steps": 5}
    return eqxi.while_loop(
        lambda carry: carry[0] < n, body, (jnp.asarray(0), x), kind=kind, **bounds
    )[1]


def by_hand(x, n=3, edit=lambda h, i: h):
    values = []
    for i in range(n):
        values.append(edit(2 * x, i))
        x = jnp.cos(values[-1])
    return x, values


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def loop(kind):
    return lambda x, n=3: steps(x, n, kind)


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_a_loop_is_folded(kind, around):
    out, values = by_hand(X)
    got, acts = capture(around(loop(kind)), {"h": FOLDS}, mode="strict")(X)
    last, count, stack = acts["h"]
    close((got, last, count), (out, values[-1], 3))
    close((stack.values[:3], stack.count, stack.overflow), (np.stack(values), 3, False))
    assert [site.key for site in sites(loop(kind))(X)] == ["h"]


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_a_loop_without_a_fold_is_an_error(kind):
    with pytest.raises(UnsupportedError, match=r"`while_loop`, whose trip count .*folds\.last"):
        capture(loop(kind))(X)


def test_a_bounded_loop_is_a_scan_of_a_cond():
    out, values = by_hand(X)
    got, acts = capture(loop("bounded"), mode="strict")(X)
    assert isinstance(acts["h"], CondSum) and acts["h"].branches[0] is None
    ran = acts["h"].index == 1
    close((got, acts["h"].branches[1][ran]), (out, np.stack(values)))
    close(plant(loop("bounded"), reap(loop("bounded"))(X))(X), out)


@pytest.mark.parametrize(
    "kind, axes, branch",
    [("lax", [None], None), ("checkpointed", [None], None), ("bounded", [16], (1,))],
)
def test_sites_of_a_loop(kind, axes, branch):
    (site,) = sites(loop(kind))(X)
    assert [axis.size for axis in site.axes] == axes
    assert (site.aval.shape, site.branch) == ((2,), branch)
    # Equinox takes steps by sixteen; of a sum of branches there is the index too.
    assert site.nbytes == (16 * (8 + 4) if kind == "bounded" else 8)


@kinds
def test_a_loop_is_edited(kind):
    close(plant(loop(kind), {"h": jnp.square})(X), by_hand(X, edit=lambda h, i: h * h)[0])
    edited = plant(loop(kind), {"h": at(1, add(1.0))})
    close(edited(X), by_hand(X, edit=lambda h, i: h + float(i == 1))[0])


@kinds
def test_a_loop_of_a_batch(kind):
    run = capture(loop(kind), {"h": FOLDS[:2]}, mode="strict")
    for x, fn in ((X, jax.vmap(run, (0, None))), (X, jax.jit(jax.vmap(run, (0, None))))):
        out, values = by_hand(x)
        close(fn(x, 3), (out, {"h": (values[-1], np.full(2, 3))}))


@kinds
def test_a_batch_runs_until_the_last_of_it_is_done(kind):
    """Equinox has one predicate for all, and drops what the others compute meanwhile."""
    n = jnp.array([1, 3])
    run = lambda f: f(loop(kind), {"h": FOLDS[1]}, mode="strict")
    for fn in (jax.vmap(run(capture)), run(lambda f, *a, **k: capture(jax.vmap(f), *a, **k))):
        out, acts = fn(X, n)
        close(out, jnp.stack([by_hand(X[0], 1)[0], by_hand(X[1], 3)[0]]))
        close(acts["h"], np.full(2, 3))


def test_the_gradient_of_a_bounded_loop():
    loss = lambda x: jnp.sum(steps(x, kind="bounded"))
    grad = jax.grad(lambda x: jnp.sum(by_hand(x)[0]))(X)
    close(jax.grad(lambda x: capture(loss)(x)[0])(X), grad)
    of_last = jax.grad(lambda x: jnp.sum(reap(loss, {"h": folds.last()})(x)["h"]))
    close(of_last(X), jax.grad(lambda x: jnp.sum(by_hand(x)[1][-1]))(X))
    close(
        capture(jax.grad(loss), {"h": folds.last()}, mode="strict")(X),
        (grad, {"h": by_hand(X)[1][-1]}),
    )

    def at_sites(eps):
        return jnp.sum(by_hand(X, edit=lambda h, i: h + eps[i])[0])

    grads = harvest.grad(loss)(X)["h"]
    close(grads.branches[1][:3], jax.grad(at_sites)(jnp.zeros((3, 2))))


@equinox_differentiates
def test_the_gradient_of_a_checkpointed_loop():
    loss = lambda x: jnp.sum(steps(x, kind="checkpointed"))
    out, values = by_hand(X)
    grad = jax.grad(lambda x: jnp.sum(by_hand(x)[0]))(X)

    def collected(x):
        out, acts = capture(loss, {"h": FOLDS[:2]}, mode="strict")(x)
        return out, acts["h"]

    close(jax.value_and_grad(collected, has_aux=True)(X), ((jnp.sum(out), (values[-1], 3)), grad))
    got, acts = capture(jax.grad(loss), {"h": FOLDS[:2]})(X)
    forward, backward = acts["h"]  # the backward pass evaluates steps again, and sows again
    close((got, forward), (grad, (values[-1], 3)))
    assert backward[1] >= 3
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(plant(loss, {"h": jnp.square}))(X)  # a planted body is inlined


@equinox_differentiates
@kinds
def test_a_scan_of_equinox(kind):
    def f(x):
        step = lambda x, i: (jnp.cos(tagged(2 * x)), x + i)
        return eqxi.scan(
            step,
            x,
            jnp.arange(3.0),
            kind=kind,
            checkpoints="all" if kind == "checkpointed" else None,
        )

    out, values = by_hand(X)
    carries = np.stack([X, *(np.cos(h) for h in values[:2])]) + np.arange(3.0)[:, None]
    select = {"h": None if kind == "lax" else FOLDS[0]}
    wanted = np.stack(values) if kind == "lax" else values[-1]
    close(capture(f, select, mode="strict")(X), ((out, carries), {"h": wanted}))
    grad = jax.grad(lambda x: jnp.sum(by_hand(x)[0]))(X)
    close(jax.grad(lambda x: jnp.sum(capture(f, select)(x)[0][0]))(X), grad)
