"""A vision transformer of the package equimo, by paths and split by hand."""

import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import third_party
from examples.models import vit

DEPTH = 3


@pytest.fixture(autouse=True)
def as_its_author_has_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def model():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return vit.make(jax.random.key(0), DEPTH)


@pytest.fixture(scope="module")
def image():
    return vit.images(jax.random.key(1), 1)[0][0]


def split(model, image, edit=lambda i, x: x):
    """The output of each attention, MLP and block, and the logits."""
    outs = {}
    x, *_ = model.prepare_tokens(image, key=None, inference=True)
    (chunk,) = model.blocks
    for i, block in enumerate(chunk.blocks):
        attended = block.attn(jax.vmap(block.prenorm)(x), key=None, inference=True)
        x = x + attended
        added = block.mlp(jax.vmap(block.norm)(x), key=None, inference=True)
        x = x + added
        path = f"blocks/0/blocks/{i}"
        outs |= {f"{path}/attn/out": attended, f"{path}/mlp/out": added, f"{path}/out": x}
        x = edit(i, x)
    return outs, model.head(jax.vmap(model.norm)(x)[1:].mean(axis=0))


@pytest.fixture(scope="module")
def tapped(model):
    return harvest.tap(model, [third_party.BLOCKS, "**/attn", "**/mlp"])


def run(model, image):
    return model(image, inference=True)


def test_every_block_by_its_path(model, tapped, image):
    expected, logits = split(model, image)
    got, acts = harvest.capture(run, mode="strict")(tapped, image)
    assert list(acts) == list(expected) and len(acts) == 3 * DEPTH
    for key, value in acts.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_allclose(run(model, image), logits, atol=1e-4)


@pytest.mark.parametrize("i", range(DEPTH))
def test_what_is_planted_at_a_block_runs_on(model, tapped, image, i):
    reverse = lambda x: x[:, ::-1]
    _, expected = split(model, image, lambda j, x: reverse(x) if i == j else x)
    planted = harvest.plant(run, {f"blocks/0/blocks/{i}/out": reverse})(tapped, image)
    np.testing.assert_allclose(planted, expected, atol=1e-4)
    assert not np.allclose(planted, run(model, image), atol=1e-3)


def test_batches_gradients_and_patterns(model, tapped, image):
    images = jnp.stack([image, -image])
    acts = harvest.reap(third_party.classify)(tapped, images)
    for n, image in enumerate(images):
        for key, value in split(model, image)[0].items():
            np.testing.assert_allclose(acts[key][n], value, atol=1e-4, rtol=1e-4)

    loss = lambda model: jnp.sum(run(model, image) ** 2)
    grads, expected = eqx.filter_grad(loss)(tapped).module, eqx.filter_grad(loss)(model)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)

    pattern = harvest.reap(run)(harvest.tap(model, "blocks/0/blocks/1/attn/attn_drop"), image)
    (pattern,) = pattern.values()
    assert pattern.shape == (3, 37, 37)
    np.testing.assert_allclose(pattern.sum(axis=-1), 1, rtol=1e-4)


def test_by_hand(model, image):
    states = third_party.by_hand(model, image)
    expected = split(model, image)[0]
    for i in range(DEPTH):
        np.testing.assert_allclose(states[i + 1], expected[f"blocks/0/blocks/{i}/out"], atol=1e-4)


def test_patches_that_a_shape_covers():
    image, _, patch = vit.images(jax.random.key(2), 3)
    on = np.asarray(third_party.on_shape(patch))
    bright = np.asarray(image)[:, 0].reshape(3, vit.GRID, vit.PATCH, vit.GRID, vit.PATCH)
    bright = bright.mean(axis=(2, 4))
    assert on.shape == bright.shape and (on.sum(axis=(1, 2)) == 4).all()
    assert (bright[on > 0] > 0.15).all() and (bright[on == 0] < 0.25).all()


def test_missing_equimo(monkeypatch):
    monkeypatch.setitem(sys.modules, "equimo.vision.models.vit", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(vit.INSTALL)):
        vit.make(jax.random.key(0))
