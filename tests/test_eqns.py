"""Any intermediate of any function: against the same values computed by hand."""

import functools
import inspect
import math

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.hijax import HiType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import harvest
from harvest import (
    SelectError,
    UnknownSiteError,
    by_key,
    capture,
    folds,
    has_type,
    plant,
    reap,
    scope,
    sites,
    sow,
    sow_eqns,
)

from . import helpers, hi_programs
from .meshes import MESHES

X = np.array([0.5, 1.0, 1.5, 2.0], np.float32)
W = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 4, 4)
KEY = jax.random.key(0)
close = np.testing.assert_allclose


def relu(x):
    return np.maximum(x, 0)


def layer(x, w):
    return jax.nn.relu(w @ x)


def stack(w, x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def by_hand(w, x):
    """The products, and what is after them, of `stack`."""
    products, outs = [], []
    for each in w:
        products.append(each @ x)
        x = relu(products[-1])
        outs.append(x)
    return np.stack(products), np.stack(outs)


# ------------------------------------------------------------------------- attention weights


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def is_weights(eqn):
    return eqn.primitive == "div" and eqn.outputs[0].shape == (2, 5, 5)


class ByHand:
    """`eqx.nn.MultiheadAttention` with two heads, in numpy."""

    def __init__(self, attention, x):
        self.out_weight = np.asarray(attention.output_proj.weight)
        project = lambda linear: (x @ np.asarray(linear.weight).T).reshape(5, 2, -1)
        q, k, self.v = map(
            project, (attention.query_proj, attention.key_proj, attention.value_proj)
        )
        self.weights = softmax(np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]))

    def output(self, weights):
        return np.einsum("hqk,khd->qhd", weights, self.v).reshape(5, -1) @ self.out_weight.T


@pytest.fixture
def attention():
    module = eqx.nn.MultiheadAttention(2, 8, key=KEY)
    x = np.asarray(jax.random.normal(jax.random.key(1), (5, 8)))
    return module, x, ByHand(module, x)


def test_attention_weights_of_equinox(attention):
    module, x, hand = attention
    fn = sow_eqns(lambda x: module(x, x, x), is_weights, "weights")
    out, acts = capture(fn)(x)
    close(acts["weights/0"][0], hand.weights, rtol=1e-5)
    close(out, hand.output(hand.weights), rtol=1e-4, atol=1e-6)
    close(out, module(x, x, x), rtol=1e-5)


def test_replaced_attention_weights_of_equinox(attention):
    module, x, hand = attention
    fn = sow_eqns(lambda x: module(x, x, x), is_weights, "weights")
    uniform = np.full((2, 5, 5), 0.2, np.float32)
    close(plant(fn, {"weights/0": uniform})(x), hand.output(uniform), rtol=1e-4, atol=1e-6)
    flipped = plant(fn, {"weights/0": lambda w: w[::-1]})(x)
    close(flipped, hand.output(hand.weights[::-1]), rtol=1e-4, atol=1e-6)
    close(plant(fn, reap(fn)(x))(x), module(x, x, x), rtol=1e-5)


def test_attention_weights_by_the_scope_that_they_leave(attention):
    module, x, hand = attention
    scores = reap(sow_eqns(lambda x: module(x, x, x), "*/sd,Sd->sS", "scores"))(x)["scores/0"]
    close(softmax(np.asarray(scores)), hand.weights, rtol=1e-5)


@pytest.mark.parametrize("mask", [False, True])
def test_attention_weights_of_jax(mask):
    q, k, v = np.asarray(jax.random.normal(KEY, (3, 5, 2, 4)))
    scores = np.einsum("qhd,khd->hqk", q, k) / 2
    fn = sow_eqns(lambda q: jax.nn.dot_product_attention(q, k, v, is_causal=mask), "div")
    weights = softmax(np.where(np.tri(5, dtype=bool) | (not mask), scores, -np.inf))
    out, acts = capture(fn)(q)
    close(acts["div/0"][0], weights[None, None], rtol=1e-5, atol=1e-7)  # of a batch in groups
    close(out, np.einsum("hqk,khd->qhd", weights, v), rtol=1e-4, atol=1e-6)
    eye = np.broadcast_to(np.eye(5, dtype=np.float32), (1, 1, 2, 5, 5))
    close(plant(fn, {"div/0": eye})(q), v, rtol=1e-6)


def test_a_batch_of_attention_weights(attention):
    module, x, hand = attention
    xs = np.stack([x, 2 * x])
    fn = sow_eqns(lambda x: module(x, x, x), is_weights)
    for batched in (jax.vmap(reap(fn)), reap(jax.vmap(fn))):
        got = batched(xs)["div/0"]
        close(got, np.stack([ByHand(module, x).weights for x in xs]), rtol=1e-5)


# ---------------------------------------------------------------------------- in structures

OPAQUE = {"hi_prim", "scan_of_hi_prim"}
STRUCTURES = [name for name in helpers.PROGRAMS if name not in OPAQUE]
XS = np.array([0.3, 0.5, 0.7, 0.9], np.float32)


def named(program):
    return lambda x: program.fn(x, lambda h, step: checkpoint_name(h, "h"))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_in_a_structure(name, around):
    program = helpers.PROGRAMS[name]
    fn = sow_eqns(named(program), "checkpoint_name:h")
    out, acts = around(capture(fn))(XS)
    (key,) = acts
    assert key == "h/0"
    close(acts[key][0], program.values(XS), rtol=1e-5)
    close(out, named(program)(XS), rtol=1e-5)
    close(around(plant(fn, reap(fn)(XS)))(XS), out, rtol=1e-5)


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_edit_in_a_structure(name):
    program = helpers.PROGRAMS[name]
    fn = sow_eqns(named(program), "checkpoint_name:h")
    wanted = program.fn(XS, lambda h, step: h * 2 + 1)
    close(plant(fn, {"h/0": lambda h: h * 2 + 1})(XS), wanted, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in STRUCTURES if n != "fori"])
def test_a_derivative_around_a_structure(name):
    program = helpers.PROGRAMS[name]
    fn = sow_eqns(named(program), "checkpoint_name:h")
    loss = lambda fn: lambda x: jnp.sum(fn(x) ** 2)
    grads, acts = capture(jax.grad(loss(fn)))(XS)
    close(grads, jax.grad(loss(named(program)))(XS), rtol=1e-5)
    if name.startswith("custom_"):  # whose rule takes the place of its body
        assert acts == {}
        program = helpers.PROGRAMS["plain"]
    else:
        close(acts["h/0"][0], program.values(XS), rtol=1e-5)
    close(harvest.grad(loss(fn))(XS)["h/0"], cotangents(program), rtol=1e-4, atol=1e-5)


def cotangents(program):
    """The derivative of the loss with respect to what is added at the site."""
    zeros = jnp.zeros_like(program.values(XS))

    def loss(eps):
        def site(h, step):
            index = () if step is None else step
            return h + eps[index]

        return jnp.sum(program.fn(XS, site) ** 2)

    return jax.grad(loss)(zeros)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_batch_around_a_structure(name):
    program = helpers.PROGRAMS[name]
    xs = np.stack([XS, XS + 0.1])
    values = np.stack([program.values(x) for x in xs])
    fn = sow_eqns(named(program), "checkpoint_name:h")
    close(jax.vmap(reap(fn))(xs)["h/0"], values, rtol=1e-5)
    inside = np.moveaxis(values, 0, len(program.loops))
    close(reap(jax.vmap(fn))(xs)["h/0"], inside, rtol=1e-5)


@pytest.mark.parametrize("remat3", [True], indirect=True)
def test_in_the_checkpoint_that_is_a_hi_prim(remat3):
    fn = sow_eqns(jax.checkpoint(lambda x: jnp.sin(x) * 2), "sin")
    close(reap(fn)(X)["sin/0"], np.sin(X), rtol=1e-6)
    close(plant(fn, {"sin/0": X})(X), 2 * X)
    close(jax.grad(lambda x: fn(x).sum())(X), 2 * np.cos(X), rtol=1e-6)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f))]
)
def test_in_a_scan(wrap):
    fn = sow_eqns(lambda w, x: wrap(stack)(w, x), ["dot_general", "jit:relu"])
    products, outs = by_hand(W, X)
    acts = reap(fn)(W, X)
    close(acts["dot_general/0"], products, rtol=1e-5, atol=1e-6)
    close(acts["relu/0"], outs, rtol=1e-5, atol=1e-6)
    planted = plant(fn, {"relu/0": harvest.at(1, harvest.add(np.float32(1)))})(W, X)
    close(planted, relu(W[2] @ (outs[1] + 1)), rtol=1e-5)


def test_in_a_while_loop():
    def fn(x):
        return lax.while_loop(lambda x: x < 100, lambda x: jnp.square(x) + 1, x)

    sown = sow_eqns(fn, "square")
    values, x = [], 2.0
    while x < 100:
        values.append(x * x)
        x = values[-1] + 1
    assert reap(sown, {"square/0": folds.last()})(2.0)["square/0"] == values[-1]
    assert reap(sown, {"square/0": folds.mean()})(2.0)["square/0"] == np.mean(values)
    assert plant(sown, {"square/0": lambda s: s + 1})(2.0) == ((2**2 + 2) ** 2 + 2) ** 2 + 2
    with pytest.raises(harvest.UnsupportedError, match="trip count is not known"):
        reap(sown)(2.0)


def test_in_branches():
    def fn(i, x):
        branches = [lambda x: jnp.sin(x), lambda x: jnp.sin(2 * x), lambda x: jnp.cos(x)]
        return lax.switch(i, branches, x) + jnp.sin(x)

    sown = sow_eqns(fn, "sin")
    for i, taken in enumerate([np.sin(X), np.sin(2 * X), None]):
        acts = reap(sown)(jnp.int32(i), X)
        assert list(acts) == ["sin/0", "sin/1"]
        assert acts["sin/0"].branches[2] is None and acts["sin/0"].index == i
        if taken is not None:
            close(acts["sin/0"].branches[i], taken, rtol=1e-6)
        close(acts["sin/1"], np.sin(X), rtol=1e-6)


def test_the_same_in_all_branches_is_one_site():
    def fn(x):
        return lax.cond(x[0] > 1, lambda x: jnp.sin(x), lambda x: jnp.sin(2 * x), x)

    sown = sow_eqns(fn, "sin")
    close(reap(sown)(X)["sin/0"], np.sin(2 * X), rtol=1e-6)
    close(reap(sown)(X + 1)["sin/0"], np.sin(X + 1), rtol=1e-6)
    close(plant(sown, {"sin/0": X})(X), X)


CUSTOM = {
    "relu": (jax.nn.relu, "max", lambda x: np.maximum(x, 0)),
    "silu": (jax.nn.silu, "logistic", lambda x: 1 / (1 + np.exp(-x))),
    "softplus": (jax.nn.softplus, "log1p", lambda x: np.log1p(np.exp(-np.abs(x)))),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_in_functions_of_jax(name):
    fn, primitive, value = CUSTOM[name]
    x = X - 1.2
    acts = reap(sow_eqns(fn, primitive))(x)
    close(acts[f"{primitive}/0"], value(x), rtol=1e-5)
    # A rule for derivatives is applied as before.
    loss = lambda fn: jax.grad(lambda x: fn(x).sum())
    assert_same(loss(sow_eqns(fn))(x), loss(fn)(x))
    assert_same(loss(lambda x: capture(sow_eqns(fn))(x)[0])(x), loss(fn)(x))


def assert_same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_a_custom_rule_is_kept():
    f = jax.custom_vjp(lambda x: jnp.sin(x) * 2)
    f.defvjp(lambda x: (f(x), None), lambda _, ct: (ct * 7,))  # no derivative of sin
    sown = sow_eqns(f, "sin")
    out, pullback = jax.vjp(lambda x: capture(sown)(x), X)
    close(out[1]["sin/0"][0], np.sin(X), rtol=1e-6)
    zero = jnp.zeros(4)
    close(pullback((jnp.ones(4), {"sin/0": (zero,)}))[0], np.full(4, 7.0))
    close(pullback((zero, {"sin/0": (jnp.ones(4),)}))[0], np.cos(X), rtol=1e-6)
    planted = plant(sown, {"sin/0": lambda s: 3 * s})  # is another function, as it is written
    close(jax.grad(lambda x: planted(x).sum())(X), 6 * np.cos(X), rtol=1e-6)


def test_a_jitted_function_that_is_called_often():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)

    def fn(x):
        outer = jax.jit(lambda x: inner(inner(x)))
        return outer(outer(jnp.cos(x))) + jnp.sin(x)

    acts = reap(sow_eqns(fn, "sin"))(X)
    values, x = [], np.cos(X)
    for _ in range(4):
        values.append(np.sin(x))
        x = 2 * values[-1]
    assert list(acts) == [f"sin/{i}" for i in range(5)]
    for i, value in enumerate([*values, np.sin(X)]):
        close(acts[f"sin/{i}"], value, rtol=1e-5)
    got = plant(sow_eqns(fn, "sin"), {"sin/2": X})(X)
    close(got, 2 * np.sin(2 * X) + np.sin(X), rtol=1e-5)
    stacked = harvest.stacked(acts, "sin/*")
    close(stacked, np.stack([*values, np.sin(X)]), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map(check_vma):
    mesh = MESHES["auto"]
    spec = P(("d", "m"))
    body = lambda x: jnp.sin(x) / lax.psum(x, ("d", "m"))
    fn = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    x = np.arange(1, 9, dtype=np.float32)
    acts = reap(sow_eqns(fn, "sin"))(x)
    close(acts["sin/0"], np.sin(x)[:, None], rtol=1e-6)
    doubled = plant(sow_eqns(fn, "sin"), {"sin/0": lambda s: 2 * s})(x)
    close(doubled, 2 * np.sin(x) / x.sum(), rtol=1e-6)


@pytest.mark.parametrize("structure", ["plain", "jit", "scan", "cond", "remat"])
@pytest.mark.parametrize("name", hi_programs.KINDS)
def test_values_of_hi_types(name, structure):
    kind, around = hi_programs.KINDS[name], hi_programs.STRUCTURES[structure].run
    made = lambda x: around(lambda x: kind.use(kind.make(x)), x)
    is_hi = lambda e: isinstance(e.outputs[0], HiType) and not e.leaves
    theirs = lambda x: around(lambda x: kind.use(sow(kind.make(x), name="h")), x)
    fn = sow_eqns(made, is_hi, "h")
    wanted = hi_programs.by_hand(reap(theirs)(hi_programs.X)["h"])
    values = map(hi_programs.by_hand, reap(fn)(hi_programs.X).values())
    # A product is made of several equations, and taken apart by others.
    jax.tree.map(close, next(v for v in values if len(v) == len(wanted)), wanted)
    close(plant(fn, reap(fn)(hi_programs.X))(hi_programs.X), made(hi_programs.X), rtol=1e-5)


# ------------------------------------------------------------------------------- derivatives


def test_the_equations_of_a_gradient():
    f = lambda x: jnp.sum(jnp.sin(x) * 3)
    acts = reap(sow_eqns(jax.grad(f)))(X)
    close(acts["cos/0"], np.cos(X), rtol=1e-6)
    close(plant(sow_eqns(jax.grad(f), "cos"), {"cos/0": X})(X), 3 * X, rtol=1e-6)
    backward = lambda eqn: "transpose" in eqn.transforms
    last = list(reap(sow_eqns(jax.grad(f), backward))(X).values())[-1]
    close(last, 3 * np.cos(X), rtol=1e-6)


def test_the_backward_pass_of_a_scan():
    loss = lambda w: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(w * x), None), 1.0, w)[0])
    w = np.array([0.5, -0.3, 0.8], np.float32)
    is_ct = lambda e: e.primitive == "mul" and "transpose" in e.transforms and "scan" in e.inside
    acts = reap(sow_eqns(jax.grad(loss), is_ct, "ct"))(w)
    xs = [1.0]
    for each in w:
        xs.append(np.tanh(each * xs[-1]))
    ct, cts = 1.0, {}
    for i in reversed(range(3)):
        before = ct * (1 - xs[i + 1] ** 2)
        cts[i], ct = before * xs[i], before * w[i]
    wanted = np.array([cts[i] for i in range(3)])
    assert any(np.allclose(a, wanted, rtol=1e-4) for a in acts.values() if a.shape == (3,))
    close(jax.grad(loss)(w), wanted, rtol=1e-5)


def test_gradients_tangents_and_interventions_at_equations():
    f = lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x))
    sown = sow_eqns(f, ["sin", "exp"])
    grads = harvest.grad(sown)(X)
    close(grads["sin/0"], np.exp(X), rtol=1e-6)
    close(grads["exp/0"], np.sin(X), rtol=1e-6)
    ones = jnp.ones(4)
    _, tangent, _ = harvest.jvp(sown, {"sin/0": ones})(X)
    close(tangent, np.exp(X).sum(), rtol=1e-6)
    out = harvest.sweep(sown, "sin/0", lambda v, i: v.at[i].set(0.0), jnp.arange(4))(X)
    wanted = (np.sin(X) * np.exp(X)).sum() - np.sin(X) * np.exp(X)
    close(out["sin/0"], wanted, rtol=1e-5)
    first = harvest.attribute(sown, "sin/0", lambda v, i: v.at[i].set(0.0), jnp.arange(4))(X)
    close(first["sin/0"], wanted, rtol=1e-5)  # which is linear in it


# -------------------------------------------------------------------- nothing is left of it


def shared(x):
    inner = jax.jit(lambda x: jax.nn.relu(jnp.where(x > 1, jnp.sin(x), x)))
    return inner(inner(x) * 2)


def several(x):
    f = jax.checkpoint(lambda x: lax.cond(x[0] > 1, jnp.sin, jnp.cos, x))
    x, _ = lax.scan(lambda x, _: (f(jax.nn.gelu(x)), None), x, length=3)
    return jnp.linalg.norm(x) * jax.nn.softmax(x)


TRANSFORMS = {
    "itself": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)),
    "vmap": lambda f: jax.vmap(f, in_axes=1),
    "grad of checkpoint": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x) ** 2)),
}
TEXTS = {"shared": shared, "several": several} | {
    name: named(helpers.PROGRAMS[name]) for name in ("scan_of_scan", "custom_vjp", "cond_of_scan")
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_compiled_is_the_same(name, transform):
    fn = TEXTS[name]
    x = np.stack([XS, XS], 1) if transform == "vmap" else XS
    text = lambda f: jax.jit(TRANSFORMS[transform](f)).lower(x).as_text()
    assert text(sow_eqns(fn)) == text(fn)
    inside = jax.jit(sow_eqns(TRANSFORMS[transform](fn))).lower(x).as_text()
    assert inside == text(fn)


def test_predicates_do_not_retrace():
    traces = []

    def fn(x):
        traces.append(None)
        return jnp.sin(x)

    for i in range(4):
        acts = reap(sow_eqns(fn, lambda eqn: eqn.primitive == "sin"))(X + i)
        close(acts["sin/0"], np.sin(X + i), rtol=1e-6)
        count = len(traces) if i == 0 else count
        assert len(traces) == count


# ---------------------------------------------------------------------------------- what for


def test_all_equations_are_named():
    f = lambda x: checkpoint_name(jax.nn.silu(x) + 1, "resid")
    table = sites(sow_eqns(f))(X)
    assert [site.key for site in table] == ["logistic/0", "mul/0", "silu/0", "add/0", "resid/0"]
    assert (table[0].scope, table[0].name, table[0].kind) == ("logistic", "0", "sow")
    assert [s.key for s in sites(sow_eqns(f, ..., "a/b"))(X)] == [f"a/b/{i}" for i in range(5)]


def test_shorthands():
    def f(x):
        with jax.named_scope("outer"):
            with jax.named_scope("add"):
                x = jnp.sin(x) + 1
            return checkpoint_name(jax.nn.silu(x), "resid")

    keys = lambda where, name=None: list(reap(sow_eqns(f, where, name))(X))
    assert keys("add") == ["add/0"]
    assert keys("primitive:add") == ["add/0"]
    assert keys("scope:**/add") == ["outer/add/0"]
    assert keys("jit:si?u") == keys("jit:silu") == ["silu/0"]
    assert keys("checkpoint_name:*") == ["resid/0"]
    assert keys(["sin", "jit:silu"], "h") == ["h/0", "h/1"]
    assert keys(["sin", lambda e: e.primitive == "sin"]) == ["sin/0"]
    # What leaves both scopes has both names.
    assert keys("outer") == ["outer/0"] and keys("**") == ["outer/add/0", "outer/0"]


def test_what_a_predicate_is_told():
    seen = {}

    def where(eqn):
        seen.setdefault(eqn.label, eqn)
        return True

    def f(w, x):
        with jax.named_scope("net"):
            return jax.vmap(stack, (None, 0))(w, x)

    reap(sow_eqns(f, where))(W, X[None])
    dot, scan = seen["dot_general"], seen["scan"]
    assert (dot.primitive, dot.jit, dot.checkpoint_name) == ("dot_general", None, None)
    assert (dot.scope, dot.transforms, dot.inside) == ("net", ("vmap",), ("scan",))
    assert {aval.shape for aval in dot.inputs} == {(4, 4), (1, 4)}
    assert scan.leaves == ("net",) and scan.inside == () and dot.leaves == ()
    assert dot.source.endswith(f"test_eqns.py:{layer.__code__.co_firstlineno + 1}")
    assert seen["jit:relu"].jit == "relu" and seen["max"].inside[-1] == "jit:relu"


def test_values_that_leave_a_scope():
    def f(x):
        with jax.named_scope("block"):
            a = jnp.sin(x)
            b = jnp.cos(a)  # leaves it, as does the product
            c = a * b
        with jax.named_scope("block"):
            d = jnp.exp(c)
        return b + d

    acts = reap(sow_eqns(f, "block"))(X)
    a = np.sin(X)
    wanted = [np.cos(a), a * np.cos(a), np.exp(a * np.cos(a))]
    assert list(acts) == ["block/0", "block/1", "block/2"]
    for got, value in zip(acts.values(), wanted, strict=True):
        close(got, value, rtol=1e-5)


def test_several_outputs_are_a_tuple():
    acts = reap(sow_eqns(lambda x: lax.top_k(x, 2), "top_k"))(X)
    values, indices = acts["top_k/0"]
    assert_same((values, indices), (np.array([2.0, 1.5], np.float32), np.array([3, 2])))
    planted = plant(sow_eqns(lambda x: lax.top_k(x, 2), "top_k"), {"top_k/0": (X[:2], indices)})
    assert_same(planted(X)[0], X[:2])


def test_beside_what_is_sown():
    def f(x):
        with scope("a"):
            h = sow(jnp.sin(x), name="h")
            return h + jnp.cos(x)

    acts = reap(sow_eqns(f))(X)
    assert list(acts) == ["a/sin/0", "a/h", "a/cos/0", "a/add/0"]
    close(plant(sow_eqns(f), {"a/h": 0 * X, "a/cos/0": X})(X), X)
    close(plant(sow_eqns(f), {"a/sin/0": X, "a/cos/0": 0 * X})(X), X)

    def called(x):
        with scope("outer"):
            return sow_eqns(f, "sin")(x)

    assert list(reap(called)(X)) == ["outer/a/sin/0", "outer/a/h"]


def test_one_in_another():
    f = lambda x: jnp.sin(jnp.sin(x))
    fn = sow_eqns(sow_eqns(f, "sin", "inner"), "sin", "outer")
    assert set(reap(fn)(X)) == {"inner/0", "inner/1", "outer/0", "outer/1"}
    close(plant(fn, {"inner/0": X})(X), np.sin(X), rtol=1e-6)
    twice = lambda x: sow_eqns(f, "sin")(x) + sow_eqns(f, "sin")(x)
    with pytest.raises(harvest.DuplicateSiteError, match="'sin/0' is sown 2 times"):
        reap(twice)(X)


def test_called_outside_of_any_transform():
    close(sow_eqns(jnp.sin)(X), np.sin(X), rtol=1e-6)
    linear = eqx.nn.Linear(4, 2, key=KEY)
    close(sow_eqns(linear)(X), linear(X), rtol=1e-6)
    close(reap(sow_eqns(linear, "dot_general"))(X)["dot_general/0"], linear.weight @ X, rtol=1e-5)


def test_a_plant_that_changes_nothing_warns():
    def f(x):
        jnp.sin(x)
        return x * 2

    with pytest.warns(harvest.HarvestWarning, match="nothing uses the result of the equation at"):
        plant(sow_eqns(f, "sin"), {"sin/0": X})(X)


# ------------------------------------------------------------------------------------ errors


def test_what_matches_nothing():
    def f(x):
        with jax.named_scope("net"):
            return jax.nn.silu(jnp.sin(x))

    def error(where):
        with pytest.raises(harvest.UnknownSiteError, match="no equation") as caught:
            reap(sow_eqns(f, where))(X)
        return str(caught.value)

    assert "did you mean 'sin'" in error("sine") and "did you mean 'net'" in error("nets")
    assert "did you mean 'jit:silu'" in error("jit:sliu")
    assert "there are none" in error("checkpoint_name:x")
    assert "the predicate holds for no equation; there are sin, logistic" in error(lambda e: False)
    assert "'cosine' matches no equation" in error(["sin", "cosine"])


def doubled(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...]) * 2

    return pl.pallas_call(kernel, out_shape=jax.typeof(x), interpret=True)(x) + 1


def test_inside_of_a_kernel():
    with pytest.raises(
        harvest.UnsupportedError, match="'sin' matches equations inside of `pallas_call`, at "
    ):
        reap(sow_eqns(doubled, "sin"))(X)
    with pytest.raises(harvest.UnsupportedError, match="the predicate holds for equations inside"):
        reap(sow_eqns(doubled, lambda eqn: eqn.primitive == "sin"))(X)
    with pytest.raises(harvest.UnknownSiteError, match="nothing inside of `pallas_call`"):
        reap(sow_eqns(doubled, "tan"))(X)
    close(reap(sow_eqns(doubled, "pallas_call"))(X)["pallas_call/0"], 2 * np.sin(X), rtol=1e-6)
    assert list(reap(sow_eqns(doubled))(X)) == ["pallas_call/0", "add/0"]


@pytest.mark.parametrize(
    "fn, where, match",
    [
        (lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: 2 * x, x), "lt", "its predicate"),
        (named(helpers.PROGRAMS["hi_prim"]), "sin", "a `HiPrim`, which is one equation"),
    ],
)
def test_inside_of_what_cannot_be_opened(fn, where, match):
    with pytest.raises(harvest.UnsupportedError, match=match):
        reap(sow_eqns(fn, where))(X)


@pytest.mark.parametrize("where", [3, "", [], int, ["sin", 3]])
def test_a_wrong_where(where):
    with pytest.raises(harvest.SelectError, match=r"wanted the name of a primitive, 'jit:NAME'"):
        sow_eqns(jnp.sin, where)


@pytest.mark.parametrize("name", ["", "a//b", "/a"])
def test_a_wrong_name(name):
    with pytest.raises(harvest.SowError, match="components between `/` are not empty"):
        sow_eqns(jnp.sin, None, name)


def test_the_error_of_a_predicate():
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        reap(sow_eqns(jnp.sin, lambda eqn: 1 / 0))(X)
    assert any("the predicate of `sow_eqns` for `sin`" in note for note in caught.value.__notes__)


# --------------------------------------------------------------------------------- libraries


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.sin(nn.Dense(4, name="dense")(x)), None


@pytest.fixture
def as_it_comes():
    """Haiku needs JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


OVER = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
LIFTED = {
    "plain": (Block, 1),
    "remat": (nn.remat(Block), 1),
    "jit": (nn.jit(Block), 1),
    "scan": (nn.scan(Block, **OVER, check_constancy_invariants=False), 3),
}


@pytest.mark.parametrize("name", LIFTED)
def test_the_layers_of_linen(name, as_it_comes):
    lifted, length = LIFTED[name]
    model = lifted()
    params = model.init(KEY, X, None)
    dense = params["params"]["dense"]
    kernels = np.asarray(dense["kernel"]).reshape(length, 4, 4)
    values, x = [], X
    for kernel in kernels:
        values.append(x @ kernel)
        x = np.sin(values[-1])
    fn = sow_eqns(model.apply, "**/dense")
    ((key, got),) = reap(fn)(params, X, None).items()
    assert key.endswith("/dense/0")
    close(np.reshape(got, (length, 4)), np.stack(values), rtol=1e-5)
    out, _ = plant(fn, {key: harvest.zero()})(params, X, None)
    close(out, 0 * X)


def test_the_layers_of_haiku(as_it_comes):
    model = hk.transform(lambda x: hk.nets.MLP([5, 4], name="mlp")(x))
    params = model.init(KEY, X)
    acts = reap(sow_eqns(model.apply, "mlp/linear_*"))(params, None, X)
    hidden = X @ np.asarray(params["mlp/~/linear_0"]["w"])
    close(acts["mlp/linear_0/0"], hidden, rtol=1e-5)
    out = relu(hidden) @ np.asarray(params["mlp/~/linear_1"]["w"])
    close(acts["mlp/linear_1/0"], out, rtol=1e-5)


def test_the_layers_of_equinox():
    mlp = eqx.nn.MLP(4, 2, 3, 1, key=KEY)
    acts = reap(sow_eqns(mlp, "**/eqx.nn.Linear", "linear"))(X)
    hidden = mlp.layers[0].weight @ X + mlp.layers[0].bias
    close(acts["linear/0"], hidden, rtol=1e-5)
    close(acts["linear/1"], mlp(X), rtol=1e-5)


def test_by_the_types_of_outputs():
    f = lambda x: jnp.sin(x) @ jnp.cos(x)  # a number, of two vectors
    for where in [Float[Array, "n"], has_type(Float[Array, "n"]), [Float[Array, "n"], "sin"]]:
        acts = reap(sow_eqns(f, where))(X)
        assert list(acts) == ["sin/0", "cos/0"]
        np.testing.assert_allclose(acts["cos/0"], np.cos(X), rtol=1e-6)
    with pytest.raises(UnknownSiteError, match=r"has_type\(Int\[Array, 'n'\]\)"):
        sow_eqns(f, Int[Array, "n"])(X)
    with pytest.raises(SelectError, match=r"`sow_eqns` got by_key\('sin/\*'\), which is for keys"):
        sow_eqns(f, by_key("sin/*"))


def test_a_glob_is_of_scopes():
    with pytest.raises(UnknownSiteError, match=r"'s\*' matches no equation; .* is of named scopes"):
        sow_eqns(jnp.sin, "s*")(X)


def here():
    return inspect.currentframe().f_back.f_lineno


def test_the_line_of_an_outermost_jit_is_that_of_its_function():
    def f(x):
        return jnp.sin(x)

    line = f.__code__.co_firstlineno
    (sin, jit) = sites(sow_eqns(jax.jit(f)))(1.0)
    assert jit.key == "f/0" and jit.source.endswith(f"test_eqns.py:{line}")
    assert sin.source.endswith(f"test_eqns.py:{line + 1}")
    *_, jit = sites(sow_eqns(jax.jit(functools.partial(jnp.add, 1.0))))(1.0)
    assert jit.source.endswith(f"test_eqns.py:{here() - 1}")
    linear = eqx.nn.Linear(2, 2, key=KEY)
    *_, jit = sites(sow_eqns(eqx.filter_jit(linear)))(jnp.ones(2))
    assert jit.source.endswith(
        f"_linear.py:{inspect.unwrap(eqx.nn.Linear.__call__).__code__.co_firstlineno}"
    )


def test_a_predicate_over_arrays_does_not_hold_for_values_of_hi_types():
    kind = hi_programs.KINDS["quantized"]
    f = lambda x: kind.use(kind.make(x))
    values = reap(sow_eqns(f, has_type(Float[Array, "..."]), "all"))(hi_programs.X)
    assert list(values) == ["all/0"]  # and not that of `Quantize`
    np.testing.assert_allclose(values["all/0"], hi_programs.rounded(hi_programs.X), rtol=1e-5)
