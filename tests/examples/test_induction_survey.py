"""The pieces of the survey, by hand, on the first layers of the model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from examples import induction_survey
from examples.models import induction

FEW = 3  # layers


@pytest.fixture(scope="module")
def small(model):
    """The first layers: a model of its own, of which runs are cheap."""
    blocks = jax.tree.map(lambda w: w[:FEW], model.blocks)
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


@pytest.fixture(scope="module")
def tokens():
    return induction.repeated(jax.random.key(0), 2, 49152)


def test_previous_scores():
    previous, first = jnp.eye(6, k=-1), jnp.zeros((6, 6)).at[:, 0].set(1)
    pattern = jnp.stack([previous, first, 0.5 * (previous + first)])[None, None]
    got = induction_survey.previous_scores(pattern)
    # The second token is the only one whose previous token is the first.
    np.testing.assert_allclose(got, [[1, 0.2, 0.6]], rtol=1e-6)


def test_a_silenced_head_has_no_output_weights(small, tokens):
    """The loss with heads silenced is that of a model whose weights for them are zero."""
    heads = np.array([[1, 2], [2, 5]])
    keep = induction.all_but(heads, np.zeros((FEW, 9)))
    where = lambda model: model.blocks.attention.output
    cut = eqx.tree_at(where, small, where(small).at[heads[:, 0], heads[:, 1]].set(0))
    ones = jnp.ones((FEW, 9, 1))
    got, expected = (
        induction_survey.silenced(small, tokens, keep),
        induction_survey.silenced(cut, tokens, ones),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert not np.allclose(got, induction_survey.silenced(small, tokens, ones), atol=0.01)


@pytest.mark.parametrize("key", ["k_in", "q_in", "v_in"])
def test_what_a_head_wrote_is_taken_out(small, tokens, key):
    layer, head = 0, 2
    got = induction_survey.without(small, tokens, layer, head, key)

    def by_hand(tokens):
        """One block after the other, each fed with what it is to see at the site."""
        mask = jnp.tril(jnp.ones((tokens.size, tokens.size), bool))
        resid, wrote, patterns = small.embedding[tokens], 0.0, []
        for i in range(FEW):
            block = jax.tree.map(lambda w, i=i: w[i], small.blocks)
            edit = {key: resid - wrote}
            attend = harvest.plant(block.attention, edit)
            out, acts = harvest.capture(attend, ["z", "pattern"], mode="strict")(resid, mask)
            patterns.append(acts["pattern"])
            resid = resid + out
            resid = resid + block.mlp(resid)
            if i == layer:
                wrote = acts["z"][:, head] @ block.attention.output[head]
        return jnp.stack(patterns)

    patterns = eqx.filter_jit(jax.vmap(by_hand, out_axes=1))(tokens)
    np.testing.assert_allclose(got, induction.scores(patterns), rtol=1e-2, atol=1e-5)
    intact = harvest.reap(jax.vmap(small), "pattern")(tokens)["pattern"]
    change = abs(got - induction.scores(intact)).max(axis=1)
    # Values of layer 1 reach the patterns of layer 2 first.
    first = layer + 1 + (key == "v_in")
    assert change[:first].max() < 1e-6 and change[first:].min() > 1e-5


def test_heads_of_the_survey(model, tokens):
    """The strongest heads, and what the strongest needs in its keys."""
    tokens = tokens[:1]
    pattern = harvest.reap(eqx.filter_vmap(model), "pattern")(tokens)["pattern"]
    scores = np.asarray(induction.scores(pattern))
    assert tuple(induction.strongest_first(scores)[0]) == induction_survey.INDUCTION[0]
    before = induction.strongest_first(np.asarray(induction_survey.previous_scores(pattern)))
    assert set(map(tuple, before[:2].tolist())) == set(induction_survey.PREVIOUS[:2])
    for key, low, high in [("k_in", 0, 0.2), ("q_in", 0.6, 1.2)]:
        left = induction_survey.without(model, tokens, *induction_survey.PREVIOUS[0], key)
        assert low <= left[18, 6] / scores[18, 6] <= high
