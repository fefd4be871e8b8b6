"""Each experiment from its first line to its figure: the short ones whole, the long ones reduced.

What is reduced is not as expected, and the report has to say so; what must hold at any size (an
identity, a control) is asserted here. `python -m examples` runs them all whole; `tests/examples`
has their parts against numpy.
"""

import equinox as eqx
import jax
import pytest

from examples import (
    EXPERIMENTS,
    causal_tracing,
    grokking,
    induction_heads,
    induction_survey,
    ioi,
    logit_lens,
    steering,
    superposition,
)
from examples.models import smollm2


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an experiment with some of its constants changed; gives its report."""

    def run(experiment, **constants):
        for name, value in constants.items():
            monkeypatch.setattr(experiment, name, value)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            report = experiment.main(out=str(tmp_path))
        name = experiment.__name__.removeprefix("examples.")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        return report, {row.what: row.measured for row in report.rows}

    return run


def test_there_is_a_test_of_each():
    for name in EXPERIMENTS:
        assert f"test_{name}" in globals()


def test_induction_heads(run):
    report, measured = run(induction_heads, STEPS=100, BATCH=8)
    assert measured["loss, two layers"] > 1 and "loss, two layers" in report.wrong
    # The second layer does not build on the first yet, but it does read it.
    cut = measured["... layer 0 cut from K"] - measured["loss, two layers"]
    assert 1e-5 < abs(cut) < 0.1
    assert measured["loss changed by cutting nothing"] < 1e-5


def test_grokking(run):
    """A hundred steps are enough to learn by heart, and for nothing else."""
    report, measured = run(grokking, STEPS=100)
    assert measured["step by which it knows what is taught"] == 100
    assert measured["... in the end"] < 0.1 and "... in the end" in report.wrong
    assert measured["frequencies with 85% of the embedding"] > 6


def test_superposition(run):
    """What is hardly trained is as good as random directions."""
    report, measured = run(superposition, STEPS=20, STEPS_SAE=20)
    random = measured["... random directions"]
    assert measured["mean largest cosine, autoencoder"] == pytest.approx(random, abs=0.1)
    assert {"mean largest cosine, autoencoder", "... most"} <= set(report.wrong)


def test_induction_survey(run, monkeypatch):
    # Five layers have more heads than are strong of either kind, and ten to choose at random.
    model, tokenizer = smollm2.load()
    early = eqx.tree_at(lambda m: m.blocks, model, jax.tree.map(lambda w: w[:5], model.blocks))
    monkeypatch.setattr(smollm2, "load", lambda: (early, tokenizer))
    _, measured = run(induction_survey, DRAWS=1, SEQUENCES=4)
    assert measured["listed heads in the first 7"] == 0
    # Nothing this early copies, so that a repeated half is as hard as the first.
    assert measured["loss, second half"] == pytest.approx(measured["loss, first half"], rel=0.1)


def test_ioi(run):
    """A shorter sentence: what is arithmetic holds all the same."""
    prompt = "When Mary met John, {} spoke to"
    constants = {"CLEAN": prompt.format("John"), "CORRUPTED": prompt.format("Mary")}
    report, measured = run(ioi, **constants, NAMES=ioi.NAMES[:3])
    assert measured["right names, of 6"] == 6
    assert measured["... sum of the parts, off by"] < 1e-4
    assert measured["restored before the names differ"] < 1e-4
    assert measured["... there, layer 29"] == pytest.approx(1, abs=1e-3)


def test_causal_tracing(run):
    report, _ = run(
        causal_tracing, FACTS=causal_tracing.FACTS[:1], N_NOISE=1, MIDDLES=range(3, 30, 18)
    )
    # Of this subject, "iffel" is the token that tells, and not the last.
    assert report.wrong == ["... at the subject's last token"]


def test_logit_lens(run):
    report, _ = run(logit_lens)
    assert not report.wrong


def test_steering(run):
    report, measured = run(
        steering, PROMPTS=steering.PROMPTS[:1], DOSES=(-1.0, 0.0, 1.0), NEW=2, N_RANDOM=1
    )
    # With one prompt and three doses, a single random vector may do as well.
    assert {*report.wrong} <= {"random vectors that rise on all", "... random, largest"}
