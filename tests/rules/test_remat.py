import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from harvest import at, capture, plant, reap, sow

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
POLICIES = {
    "none": None,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("saved"),
}


@pytest.fixture(params=[False, True], ids=["remat2", "remat3"], autouse=True)
def remat3(request):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", before)


def tagged(value, key):
    return sow(value, name=key)


def untagged(value, key):
    return value


def layer(tag, x, w):
    x = tag(checkpoint_name(jnp.sin(x @ w), "saved"), "used")
    tag(jnp.cos(x), "bare")
    return jnp.tanh(x @ w)


def model(x, tag=tagged, policy=None, prevent_cse=True):
    """Two checkpointed layers that share one function."""
    block = jax.checkpoint(
        functools.partial(layer, tag), policy=POLICIES.get(policy), prevent_cse=prevent_cse
    )
    return jnp.sum(block(block(x, x), 2 * x) ** 2)


def model_by_hand(x, first=0.0):
    """Its value, and what it sows; `first` is added to the first "used"."""
    h = jnp.sin(x @ x) + first
    y = jnp.tanh(h @ x)
    g = jnp.sin(y @ (2 * x))
    out = jnp.sum(jnp.tanh(g @ (2 * x)) ** 2)
    return out, {"used": (h, g), "bare": (jnp.cos(h), jnp.cos(g))}


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


@pytest.mark.parametrize("prevent_cse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_sites_are_collected_once(policy, prevent_cse):
    close(capture(model)(X, policy=policy, prevent_cse=prevent_cse), model_by_hand(X))


@pytest.mark.parametrize(
    "transform", [capture, lambda f: plant(f, {"used": affine}, mode="append")]
)
def test_a_checkpoint_keeps_its_options(transform):
    f = functools.partial(model, policy="dots", prevent_cse=False)
    text = str(jax.make_jaxpr(transform(f))(X))
    assert text.count("prevent_cse=False") == 2
    assert len(re.findall("policy=(<function )?dots_saveable", text)) == 2


@pytest.mark.parametrize("prevent_cse", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_has_one_record_of_each_site(policy, prevent_cse):
    options = {"policy": policy, "prevent_cse": prevent_cse}
    grad, collected = capture(jax.grad(model))(X, **options)
    close(collected, model_by_hand(X)[1])
    close(grad, jax.grad(lambda x: model_by_hand(x)[0])(X))
    close(jax.grad(capture(model), has_aux=True)(X, **options), (grad, collected))


@pytest.mark.parametrize("policy", POLICIES)
def test_sows_change_nothing_in_a_lowered_gradient(policy):
    def text(tag):
        def f(x):
            return model(x, tag, policy)

        return jax.jit(jax.grad(f)).lower(X).as_text()

    assert text(tagged) == text(untagged)


@pytest.mark.parametrize("policy", POLICIES)
def test_collected_gradients_save_what_the_hand_written_ones_save(policy):
    def f(x):
        return capture(functools.partial(model, policy=policy))(x)

    def by_hand(x):
        options = {"policy": POLICIES[policy]}

        @functools.partial(jax.checkpoint, **options)
        def block(x, w):
            h = checkpoint_name(jnp.sin(x @ w), "saved")
            return jnp.tanh(h @ w), {"used": h, "bare": jnp.cos(h)}

        y, first = block(x, x)
        y, second = block(y, 2 * x)
        return jnp.sum(y**2), {key: (first[key], second[key]) for key in first}

    mine, wanted = (jax.jit(jax.grad(g, has_aux=True)).lower(X).compile() for g in (f, by_hand))
    close(mine(X), wanted(X))
    assert mine.cost_analysis()["flops"] == wanted.cost_analysis()["flops"]
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (mine, wanted)]
    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------------------------- plants


def test_round_trip():
    acts = reap(model, "used", mode="append")(X)
    close(plant(model, acts, mode="append")(X), model(X))
    acts = reap(scan_of_remat)(X)
    close(plant(scan_of_remat, acts)(X), scan_of_remat(X))


def affine(h):
    return 2 * h + 1


def test_the_gradient_of_a_planted_body_is_that_of_the_planted_function():
    planted = plant(model, {"used": (affine, None)}, mode="append")

    def by_hand(x):
        return model_by_hand(x, first=jnp.sin(x @ x) + 1)[0]

    close(planted(X), by_hand(X))
    close(jax.grad(planted)(X), jax.grad(by_hand)(X))
    direction, step = jnp.exp(X), 1e-3
    slope = jnp.vdot(jax.grad(planted)(X), direction)
    differences = (by_hand(X + step * direction) - by_hand(X - step * direction)) / (2 * step)
    assert abs(slope) > 1
    np.testing.assert_allclose(slope, differences, rtol=1e-2)


def test_a_planted_value_is_a_constant_to_the_gradient():
    f = lambda x, w: jnp.sum(jax.checkpoint(functools.partial(layer, tagged))(x, w))
    value = jnp.cos(X)
    grads = jax.grad(plant(f, {"used": value}), argnums=(0, 1))(X, 2 * X)
    close(grads[0], jnp.zeros((4, 4)))
    close(grads[1], jax.grad(lambda w: jnp.sum(jnp.tanh(value @ w)))(2 * X))
    close(
        jax.grad(lambda v: plant(f, {"used": v})(X, X))(value),
        jax.grad(lambda v: jnp.sum(jnp.tanh(v @ X)))(value),
    )


def test_plants_reach_the_recomputation_of_a_gradient():
    # From outside of the gradient, what is replaced is the value, in both passes.
    f = lambda x: jnp.sum(jax.checkpoint(functools.partial(layer, tagged))(x, X))
    value = jnp.cos(X)
    after = (1 - jnp.tanh(value @ X) ** 2) @ X.T
    close(plant(jax.grad(f), {"used": value})(X), (after * jnp.cos(X @ X)) @ X.T)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_planted_gradient_keeps_its_recomputation_apart(prevent_cse):
    grad = jax.grad(functools.partial(model, prevent_cse=prevent_cse))
    planted = plant(grad, {"used": affine}, mode="append")
    plain, edited = (jax.jit(g).lower(X).as_text() for g in (grad, planted))
    barriers = plain.count("optimization_barrier")
    assert (barriers > 0) == prevent_cse
    assert edited.count("optimization_barrier") == barriers


# ----------------------------------------------------------------------------------- compositions


def scan_of_remat(x):
    body = jax.checkpoint(lambda x: sow(jnp.sin(2 * x), name="h"))
    return jnp.sum(lax.scan(lambda x, _: (body(x), None), x, length=3)[0])


def remat_of_scan(x):
    @jax.checkpoint
    def f(x):
        return lax.scan(lambda x, _: (sow(jnp.sin(2 * x), name="h"), None), x, length=3)[0]

    return jnp.sum(f(x))


def remat_of_jit(x):
    return jnp.sum(
        lax.scan(
            lambda x, _: (
                jax.checkpoint(jax.jit(lambda x: sow(jnp.sin(2 * x), name="h")))(x), None
            ),
            x,
            length=3,
        )[0]
    )  # fmt: skip


def remat_of_remat(x):
    inner = jax.checkpoint(lambda x: sow(jnp.sin(2 * x), name="h"))
    return jnp.sum(lax.scan(lambda x, _: (jax.checkpoint(inner)(x), None), x, length=3)[0])


def steps_by_hand(x, edit=lambda h, i: h):
    hs = []
    for i in range(3):
        x = edit(jnp.sin(2 * x), i)
        hs.append(x)
    return jnp.sum(x), {"h": jnp.stack(hs)}


@pytest.mark.parametrize("f", [scan_of_remat, remat_of_scan, remat_of_jit, remat_of_remat])
def test_with_scan_jit_and_itself(f):
    out, values = steps_by_hand(X)
    wanted = jax.grad(lambda x: steps_by_hand(x)[0])(X)
    close(capture(f, mode="strict")(X), (out, values))
    close(capture(jax.grad(f), mode="strict")(X), (wanted, values))
    close(jax.grad(capture(f, mode="strict"), has_aux=True)(X), (wanted, values))
    by_hand = lambda x: steps_by_hand(x, lambda h, i: affine(h) if i == 1 else h)[0]
    edited = plant(f, {"h": at(1, affine)})
    close(jax.value_and_grad(edited)(X), jax.value_and_grad(by_hand)(X))
    of_values = jax.grad(lambda v: plant(f, {"h": v})(X))(values["h"])
    close(of_values, jnp.zeros((3, 4, 4)).at[2].set(1.0))


def test_a_barrier_for_some_of_the_arguments():
    f = jax.checkpoint(lambda x, y: sow(jnp.sin(x), name="h") * y, prevent_cse=(True, False))
    x, y = jnp.float32(0.3), jnp.float32(2.0)
    out, collected = capture(f)(x, y)
    np.testing.assert_allclose((out, collected["h"][0]), (2 * np.sin(0.3), np.sin(0.3)), rtol=1e-6)
    gradient, collected = capture(jax.grad(f))(x, y)
    np.testing.assert_allclose(gradient, 2 * np.cos(0.3), rtol=1e-6)
    np.testing.assert_allclose(collected["h"], [np.sin(0.3)], rtol=1e-6)
    planted = jax.grad(plant(f, {"h": lambda h: 3 * h}))(x, y)
    np.testing.assert_allclose(planted, 6 * np.cos(0.3), rtol=1e-6)
