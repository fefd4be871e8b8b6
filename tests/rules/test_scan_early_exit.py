"""A `scan` of which only known iterations are wanted ends with the last of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from harvest import add, at, capture, folds, plant, reap, scope, sow

LAYERS, SIZE = 12, 8
WS = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, SIZE, SIZE)) / 3, np.float32)
X = jnp.linspace(-1, 1, SIZE)


def layer(x, w):
    x = sow(jnp.tanh(w @ x), name="h")
    return x, 2 * x


def model(ws, x, wrap=lambda f: f, **options):
    scanned = lambda ws, x: lax.scan(layer, x, ws, **options)[0]
    x = wrap(scanned)(ws, x)
    sow(x.sum(), name="logits")
    return x


def by_hand(ws, x, reverse=False):
    values = np.zeros((len(ws), SIZE))
    for i in reversed(range(len(ws))) if reverse else range(len(ws)):
        values[i] = x = np.tanh(np.asarray(ws[i]) @ x)
    return values


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile()


def trips(fn, *args):
    """The trip counts of the loops in the compiled program, each once, in ascending order.

    A loop of one trip is no loop any more.
    """
    text = compiled(fn, *args).as_text()
    return sorted({int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', text)})


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def custom_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def custom_vjp(fn):
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, ct: vjp(ct))
    return wrapped


AROUND = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "several": lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
    "cond": lambda f: lambda ws, x: lax.cond(x[0] < 9, f, lambda _, x: x, ws, x),
    "vmap": lambda f: lambda ws, x: jax.vmap(f, (None, 0))(ws, x[None])[0],
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
}


@pytest.mark.parametrize("k", [1, 3, -1, -3])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}])
def test_it_ends_with_the_iteration(k, options):
    reverse = options.get("reverse", False)
    reaped = reap(lambda ws, x: model(ws, x, **options), {"h": folds.at(k)})
    close(reaped(WS, X)["h"], by_hand(WS, X, reverse)[k])
    ran = LAYERS - k % LAYERS if reverse else k % LAYERS + 1
    if ran > 1 and "unroll" not in options:
        assert trips(reaped, WS, X) == [ran]


@pytest.mark.parametrize("around", AROUND)
def test_structures_around(around):
    reaped = reap(lambda ws, x: model(ws, x, AROUND[around]), {"h": folds.at(3)})
    close(reaped(WS, X)["h"].reshape(SIZE), by_hand(WS, X)[3])
    assert trips(reaped, WS, X) == [4]


def test_vmap_around():
    reaped = jax.vmap(reap(model, {"h": folds.at(3)}), (None, 0))
    close(reaped(WS, X[None])["h"][0], by_hand(WS, X)[3])
    assert trips(reaped, WS, X[None]) == [4]


OTHERS = {  # what is wanted as well, and how many layers have to run
    "nothing": ((), 3),
    "an earlier one": ((folds.at(1),), 3),
    "later ones": ((folds.at(3), folds.at(-2)), 11),
    "of": ((folds.at(4).of(jnp.sum),), 5),
    "over": ((folds.at(4).over(0),), 5),
    "array": ((folds.at(jnp.array(1)),), LAYERS),
    "mean": ((folds.mean(),), LAYERS),
    "all": ((None,), LAYERS),
    "function": ((jnp.sum,), LAYERS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_several_reducers(name):
    others, ran = OTHERS[name]
    reaped = reap(model, {"h": (folds.at(2), *others)})
    close(reaped(WS, X)["h"][0], by_hand(WS, X)[2])
    assert trips(reaped, WS, X) == [ran]


UNSHORTENED = {
    "another site": lambda f: reap(f, {"h": folds.at(3), "logits": None}),
    "outputs": lambda f: capture(f, {"h": folds.at(3)}),
    "a traced index": lambda f: (
        lambda ws, x: reap(f, {"h": folds.at(x.size - 5 + 0 * jnp.argmax(x))})(ws, x)
    ),
    "somebody else": lambda f: reap(
        lambda *args: sow(reap(f, {"h": folds.at(3)})(*args), name="z")
    ),
}


@pytest.mark.parametrize("name", UNSHORTENED)
def test_what_needs_all_iterations(name):
    fn = UNSHORTENED[name](model)
    assert trips(fn, WS, X) == [LAYERS]
    got = next(leaf for leaf in jax.tree.leaves(fn(WS, X)) if leaf.shape == X.shape)
    close(got, by_hand(WS, X)[-1 if name == "outputs" else 3])


def test_two_sites_in_two_loops():
    def f(ws, x):
        for name in "ab":
            with scope(name):
                x = jnp.sin(model(ws, x))
        return x

    assert trips(reap(f, {"a/h": folds.at(2)}), WS, X) == [3]
    assert trips(reap(f, {"b/h": folds.at(2)}), WS, X) == [3, LAYERS]
    assert trips(reap(f, {"a/h": folds.at(3), "b/h": folds.at(2)}), WS, X) == [3, LAYERS]


def two_in_a_body(ws, x):
    def body(x, w):
        x, y = layer(x, w)
        return sow(jnp.cos(x), name="g"), y

    return lax.scan(body, x, ws)[0]


def test_two_sites_in_one_loop():
    assert trips(reap(two_in_a_body, {"h": folds.at(2), "g": folds.at(4)}), WS, X) == [5]
    assert trips(reap(two_in_a_body, {"h": folds.at(2), "g": folds.last()}), WS, X) == [LAYERS]
    assert trips(reap(two_in_a_body, {"h": folds.at(2)}), WS, X) == [3]


# ------------------------------------------------------------------------------------- nested


def rows(ws, x):
    """A scan over twelve inputs of a scan over twelve layers, whose results nobody needs."""
    return lax.map(lambda row: model(ws, row), jnp.stack([x + n for n in range(12)]))


def carried(ws, x):
    """The same, where each input is the output of the one before it."""
    return lax.scan(lambda x, _: (model(ws, x), None), x, length=12)[0]


NESTED = [
    (rows, (1, 3), [2, 4]),
    (rows, (1, -1), [2, 12]),
    (rows, (..., 3), [4, 12]),
    (rows, (5, ...), [6, 12]),
    (rows, (jnp.array(1), 3), [4, 12]),
    (carried, (1, 3), [2, 12]),
    (carried, (5, ...), [6, 12]),
    (carried, (..., 3), [12]),
]


@pytest.mark.parametrize("f, index, wanted", NESTED)
def test_nested_loops(f, index, wanted):
    values = np.zeros((12, LAYERS, SIZE))
    for n in range(12):
        values[n] = by_hand(WS, values[n - 1, -1] if f is carried and n else X + n * (f is rows))
    reaped = reap(f, {"h": folds.at(index)})
    close(reaped(WS, X)["h"], values[tuple(slice(None) if i is ... else i for i in index)])
    assert trips(reaped, WS, X) == wanted


# ------------------------------------------------------------------------------- side effects


@pytest.mark.parametrize("fold", [folds.at(2), folds.at(jnp.array(2))])
def test_side_effects_are_all_kept(fold, capfd):
    seen = []

    def f(x, print_it):
        def body(x, i):
            if print_it:
                jax.debug.print("iteration {}", i)
            else:
                io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return sow(x + 1, name="h"), None

        return lax.scan(body, x, jnp.arange(6))[0]

    for print_it in (False, True):
        assert reap(f, {"h": fold})(0.0, print_it) == {"h": 3}
        jax.effects_barrier()
    assert seen == list(range(6))
    assert capfd.readouterr().out.count("iteration") == 6


# --------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("around", AROUND)
def test_gradients_are_those_of_the_layers_that_run(around):
    f = lambda ws, x: model(ws, x, AROUND[around])
    short = lambda ws, x: reap(f, {"h": folds.at(3)})(ws, x)["h"].reshape(SIZE)
    by_jax = lambda ws, x: lax.scan(layer, x, ws[:4])[0]
    weights = jnp.arange(float(SIZE))
    wanted = jax.grad(lambda *args: weights @ by_jax(*args), (0, 1))(WS, X)
    got = jax.grad(lambda *args: weights @ short(*args), (0, 1))(WS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)
    assert trips(jax.grad(lambda *args: weights @ short(*args)), WS, X) == [4]


# ------------------------------------------------------------------------------- what is left


def test_all_kinds_of_inputs():
    def f(key, init):
        def body(carry, x):
            h = {"key": jax.random.fold_in(x["keys"], x["n"]), "sum": carry["sum"] + x["n"]}
            return {"sum": sow(h, name="h")["sum"]}, h["key"]

        xs = {"keys": jax.random.split(key, 5), "n": jnp.arange(5)}
        return lax.scan(body, {"sum": init}, xs)

    key = jax.random.key(1)
    got = reap(f, {"h": folds.at(3)})(key, jnp.asarray(7))["h"]
    wanted = jax.random.fold_in(jax.random.split(key, 5)[3], 3)
    assert got["sum"] == 7 + 0 + 1 + 2 + 3
    np.testing.assert_array_equal(jax.random.key_data(got["key"]), jax.random.key_data(wanted))


def test_plants_reach_what_runs():
    planted = plant(model, {"h": at(slice(1, None, 4), add(1.0))})
    x = X
    for i, w in enumerate(WS[:4]):
        x = np.tanh(w @ x) + (i == 1)
    reaped = reap(planted, {"h": folds.at(3)})
    close(reaped(WS, X)["h"], x)
    assert trips(reaped, WS, X) == [4]
    outside = plant(reap(model, {"h": folds.at(3)}), {"h": jnp.ones((LAYERS, SIZE))})
    close(outside(WS, X)["h"], np.ones(SIZE))


def test_a_transform_around_sees_the_whole_loop():
    inner = lambda ws, x: reap(two_in_a_body, {"h": folds.at(2)})(ws, x)["h"]
    x, hs, gs = X, [], []
    for w in np.asarray(WS):
        hs.append(np.tanh(w @ x))
        gs.append(x := np.cos(hs[-1]))
    out, collected = capture(inner, mode="strict")(WS, X)
    close(out, hs[2])
    close(collected["g"], np.stack(gs))


def test_the_stacked_weights_are_not_copied():
    ws, x = jnp.zeros((LAYERS, 64, 64)), jnp.zeros(64)
    one_layer = ws.nbytes / LAYERS
    for select in ({"h": folds.at(3)}, {"h": (folds.at(3), folds.at(1))}):
        memory = compiled(reap(model, select), ws, x).memory_analysis()
        assert memory.temp_size_in_bytes < 2 * one_layer


def test_later_layers_of_an_unrolled_model_do_not_run():
    def unrolled(ws, x):
        for i, w in enumerate(ws):
            with scope(str(i)):
                x, _ = layer(x, w)
        return x

    def flops(fn):
        return compiled(fn, WS, X).cost_analysis()["flops"]

    reaped = reap(unrolled, "3/h")
    close(reaped(WS, X)["3/h"], by_hand(WS, X)[3])
    assert flops(reaped) < 0.4 * flops(unrolled)
