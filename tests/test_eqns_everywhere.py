"""All equations of functions that nobody wrote for it, against an evaluation one by one."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Literal

from harvest import capture, plant, reap, sites, sow_eqns

X = np.array([0.3, 1.2, -0.7, 2.0], np.float32)
A = np.arange(16, dtype=np.float32).reshape(4, 4) / 7 + 3 * np.eye(4, dtype=np.float32)
S = A @ A.T
KEY = jax.random.key(0)
PARAMS = {"w": A, "b": X}


@pytest.fixture(autouse=True)
def as_it_comes():
    """Some of these functions need JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def update(optimizer):
    def step(params):
        grads = jax.tree.map(jnp.cos, params)
        return optimizer.update(grads, optimizer.init(params), params)

    return step, PARAMS


FUNCTIONS = {
    "argsort": (jnp.argsort, X),
    "clip": (lambda x: jnp.clip(x, 0, 1), X),
    "convolve": (jnp.convolve, X, X),
    "cov": (jnp.cov, A),
    "cumsum": (jnp.cumsum, X),
    "einsum": (lambda a: jnp.einsum("ij,jk->ik", a, a), A),
    "histogram": (lambda x: jnp.histogram(x, 4), X),
    "interp": (lambda x: jnp.interp(x, jnp.arange(3.0), jnp.arange(3.0) ** 2), X),
    "quantile": (lambda x: jnp.quantile(x, 0.3), X),
    "take": (lambda x: jnp.take(x, jnp.array([0, 9])), X),
    "unique": (lambda x: jnp.unique(x, size=4), X),
    "var": (jnp.var, X),
    "where": (lambda x: jnp.where(x > 0, x, 0), X),
    "at": (lambda x: x.at[1].add(2.0), X),
    "fft": (jnp.fft.fft, X),
    "cholesky": (jnp.linalg.cholesky, S),
    "eigh": (jnp.linalg.eigh, S),
    "inv": (jnp.linalg.inv, A),
    "lstsq": (lambda a, b: jnp.linalg.lstsq(a, b)[0], A, X),
    "qr": (jnp.linalg.qr, A),
    "slogdet": (jnp.linalg.slogdet, A),
    "svd": (jnp.linalg.svd, A),
    "cg": (lambda s, x: jsp.sparse.linalg.cg(s, x)[0], S, X),
    "expm": (jsp.linalg.expm, A / 10),
    "gammaln": (jsp.special.gammaln, X),
    "logsumexp": (jsp.special.logsumexp, X),
    "logpdf": (jsp.stats.norm.logpdf, X),
    "map_coordinates": (lambda a: jsp.ndimage.map_coordinates(a, [X[:1], X[:1]], 1), A),
    "bernoulli": (lambda k: jax.random.bernoulli(k, 0.5, (3,)), KEY),
    "categorical": (lambda k: jax.random.categorical(k, X), KEY),
    "choice": (lambda k: jax.random.choice(k, 5, (2,), replace=False), KEY),
    "gamma": (lambda k: jax.random.gamma(k, 2.0, (2,)), KEY),
    "normal": (lambda k: jax.random.normal(k, (3,)), KEY),
    "permutation": (lambda k: jax.random.permutation(k, 5), KEY),
    "poisson": (lambda k: jax.random.poisson(k, 3.0, (2,)), KEY),
    "split": (jax.random.split, KEY),
    "truncated_normal": (lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (3,)), KEY),
    "dot_product_attention": (lambda q: jax.nn.dot_product_attention(q, q, q), A.reshape(2, 2, 4)),
    "gelu": (jax.nn.gelu, X),
    "softmax": (jax.nn.softmax, X),
    "adafactor": update(optax.adafactor(1e-2)),
    "adam": update(optax.adam(1e-2)),
    "adamw": update(optax.adamw(1e-2)),
    "clipped sgd": update(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))),
    "lion": update(optax.lion(1e-2)),
    "cross entropy": (lambda x: optax.softmax_cross_entropy(x, jax.nn.softmax(x)), X),
    "ctc": (
        lambda x: optax.ctc_loss(
            x[None], jnp.zeros((1, 4)), jnp.ones((1, 2), int), jnp.zeros((1, 2))
        ),
        A,
    ),
    "conv": (lambda a: lax.conv(a[None, None], jnp.ones((1, 1, 2, 2)), (1, 1), "SAME"), A),
    "reduce_window": (lambda a: lax.reduce_window(a, 0.0, lax.add, (2, 2), (1, 1), "SAME"), A),
    "associative_scan": (lambda x: lax.associative_scan(jnp.add, x), X),
    "grad": (jax.grad(lambda x: jax.nn.softplus(x).sum()), X),
    "grad of checkpoint": (jax.grad(lambda x: jax.checkpoint(jnp.tanh)(x).sum()), X),
    "hessian": (jax.hessian(lambda x: jnp.sum(jnp.tanh(x) ** 3)), X),
    "float0": (lambda x: jax.jvp(lambda x: jnp.argmax(x), (x,), (x,)), X),
    "callback": (lambda x: jax.pure_callback(np.sin, jax.typeof(x), x), X),
    "a reference": (lambda x: jax.new_ref(x)[...] * 2, X),
}
# Equations inside of these are left out here, where they are evaluated one by one.
LOOPS = {"while", "scan", "cond"}
CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
CALLS["remat2"] = "jaxpr"


def one_by_one(jaxpr, args):
    """The outputs of a jaxpr, and those of each of its equations in order."""
    values = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    found = []
    for eqn in jaxpr.eqns:
        invals = list(map(read, eqn.invars))
        if eqn.primitive.name in CALLS:
            outs, inner = one_by_one(eqn.params[CALLS[eqn.primitive.name]], invals)
            found += inner
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            outs = eqn.primitive.bind(*invals, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        if outs and eqn.primitive.name != "new_ref":  # which returns no value
            found.append(tuple(outs) if len(outs) != 1 else outs[0])
        values.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars)), found


def check(got, wanted):
    def same(got, wanted):
        if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            got, wanted = jax.random.key_data(got), jax.random.key_data(wanted)
        if wanted.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

    jax.tree.map(same, got, wanted)


def outside_loops(eqn):
    return not LOOPS & set(eqn.inside)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_equation(name):
    fn, *args = FUNCTIONS[name]
    outs, wanted = one_by_one(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args))
    sown = sow_eqns(fn, outside_loops, "eqns")
    out, acts = capture(sown)(*args)
    check(jax.tree.leaves(out), outs)
    assert list(acts) == [f"eqns/{i}" for i in range(len(wanted))]
    check([value for (value,) in acts.values()], wanted)


@pytest.mark.filterwarnings("ignore:planting .* changes nothing:harvest.HarvestWarning")
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "callback"])
def test_what_is_collected_can_be_planted(name):
    fn, *args = FUNCTIONS[name]
    sown = sow_eqns(fn, outside_loops)
    check(plant(sown, reap(sown)(*args))(*args), jax.jit(fn)(*args))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_text_is_the_same(name):
    fn, *args = FUNCTIONS[name]
    named = lambda fn: jax.jit(lambda *args: fn(*args))
    text = named(sow_eqns(fn, ...)).lower(*args).as_text()
    assert text == named(fn).lower(*args).as_text()
    assert len(sites(sow_eqns(fn, ...))(*args)) > 0
