"""The parts of the steering experiment, by hand; a small whole of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

import harvest
from examples import steering
from examples.figures import steering as figures
from examples.models import smollm2

FEW = 4  # layers


@pytest.fixture(scope="module")
def small(model):
    """The first layers: a model of its own, of which runs are cheap."""
    blocks = jax.tree.map(lambda w: w[:FEW], model.blocks)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


def test_directions(small, tokenizer):
    texts = ["I love it", "I hate it so", "Good", "Bad"]
    got = steering.directions(small, *smollm2.encode(tokenizer, texts))
    # Each sentence on its own, without padding.
    ends = [
        harvest.reap(small, "resid_pre")(jnp.asarray(tokenizer.encode(text).ids))["resid_pre"][
            :, -1
        ]
        for text in texts
    ]
    expected = (ends[0] - ends[1] + ends[2] - ends[3]) / 2
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_score_is_of_probabilities(small, tokenizer):
    tokens = jnp.asarray(tokenizer.encode("Today I feel").ids)
    words = jnp.array([[5, 6, 7], [100, 200, 300]])
    p = np.asarray(jax.nn.softmax(small(tokens)[-1]), np.float64)
    expected = np.log(p[[5, 6, 7]].sum() / p[[100, 200, 300]].sum())
    padded = jnp.pad(tokens, (0, 3))
    got = steering.score(small, padded, jnp.asarray(tokens.size), words)
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_the_sweep_is_what_is_planted(small, tokenizer, monkeypatch):
    monkeypatch.setattr(steering, "LAYER", 2)
    tokens, (length,) = smollm2.encode(tokenizer, ["Today I feel"])
    args = small, tokens[0], length, jnp.array([[5, 6], [100, 200]])
    vectors = 10 * jax.random.normal(jax.random.key(0), (FEW, 1, 576))
    source = {"resid_pre": vectors * jnp.ones((1, tokens.shape[1], 1))}
    grid = harvest.grid(dose=jnp.asarray(steering.DOSES))
    swept = harvest.sweep(steering.score, source, steering.steer, grid)(*args)["resid_pre"]
    planted = steering.at_layer(source["resid_pre"], *args)  # all at layer 2
    np.testing.assert_allclose(planted[2], swept[2], rtol=1e-3, atol=1e-4)
    assert np.ptp(planted[1]) > 0.01 and not np.allclose(planted[1], swept[1], atol=0.01)


def test_a_figure_of_many_prompts():
    swept, control = np.ones((12, 30, 7)), np.ones((12, 2, 7))
    figure = figures.steering(steering.DOSES, ["x"] * 12, swept, 14, control)
    assert [len(ax.lines) for ax in figure.axes[:2]] == [12 + 1, 2 * 12 + 1]  # and that of zero
    plt.close(figure)


def test_rises():
    curves = np.array([[1.0, 2, 3], [1, 3, 2], [1, 1, 2], [3, 2, 1]])
    assert steering.rises(curves).tolist() == [True, False, False, False]


@pytest.mark.parametrize("index", [2, slice(1, 3), [0, -1]], ids=str)
def test_edits_come_back_from_a_file(small, tmp_path, index):
    """Interventions are pytrees: what is in a file is what was planted."""
    index = jnp.asarray(index) if isinstance(index, list) else index
    tokens = jnp.arange(5)
    row = jax.random.normal(jax.random.key(0), (576,))
    edits = {
        "resid_pre": harvest.at(index, harvest.chain(harvest.add(row), harvest.scale(1.5))),
        "z": harvest.each(harvest.scale(jnp.ones((FEW, 9, 1)).at[1, 3].set(0))),
    }
    eqx.tree_serialise_leaves(tmp_path / "edits.eqx", edits)
    like = jax.tree.map(jnp.zeros_like, edits)
    read = eqx.tree_deserialise_leaves(tmp_path / "edits.eqx", like)
    expected = harvest.plant(small, edits)(tokens)
    np.testing.assert_array_equal(harvest.plant(small, read)(tokens), expected)
    assert not np.allclose(harvest.plant(small, like)(tokens), expected, atol=0.1)
