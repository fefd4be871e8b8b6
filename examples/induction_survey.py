"""Which of the 270 heads of SmolLM2 copy what came before, and how they know where to look.

    python -m examples.induction_survey

Induction heads look at the token that came next the last time, and copy it (Olsson et al., 2022,
arXiv:2209.11895). To find it they need heads that tell each token what the one before it was
(Elhage et al., 2021, "A Mathematical Framework for Transformer Circuits": composition through
keys). The quickstart has the short version.

1. In sequences that repeat themselves, how much each head attends to the token to copy, and how
   much to the token just before.
2. The loss with the strongest one, three, six and ten induction heads silenced: copying ends, and
   what cannot be copied is as hard as before. With as many others, most of the copying stays.
3. What the strongest previous-token head wrote is taken out of the keys of all later layers, of
   their queries, and of their values: the induction heads need it in their keys.

Takes about a minute, and writes its figure to `examples/out`. "Other run" in the table: the same
from independent code that was thrown away, with other tokens (JAX 0.12.0, Equinox 0.13.8).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .figures import induction_survey as figures
from .models import induction, smollm2
from .models.induction import PERIOD

SEQUENCES = 6
COUNTS, DRAWS = (1, 3, 6, 10), 3  # of heads to silence, and of random choices of as many
# The strongest of another run, with other tokens.
INDUCTION = (18, 6), (17, 3), (17, 4), (18, 7), (23, 2), (23, 7), (17, 5)
PREVIOUS = (16, 0), (11, 1), (2, 1), (1, 2)


def previous_scores(
    pattern: Float[Array, "layers batch heads T T"],
) -> Float[Array, "layers heads"]:
    """How much each head attends from a token to the one before it."""
    return jnp.mean(jnp.diagonal(pattern, offset=-1, axis1=-2, axis2=-1), axis=(1, 3))


@eqx.filter_jit
def silenced(
    model: smollm2.SmolLM2, tokens: Int[Array, "batch T"], keep: Float[Array, "layers heads 1"]
) -> Float[Array, " T-1"]:
    """The loss at each token but the first, with the output of every head times `keep`."""
    heads = harvest.each(harvest.scale(keep))
    return harvest.plant(induction.losses, {"z": heads})(model, tokens)


@eqx.filter_jit
def without(
    model: smollm2.SmolLM2, tokens: Int[Array, "batch T"], layer: int, head: int, key: str
) -> Float[Array, "layers heads"]:
    """The induction scores when the site `key` of later layers lacks what a head wrote."""

    assert isinstance(model.blocks, smollm2.Block)
    w = model.blocks.attention.output[layer, head]

    def pattern(tokens: Int[Array, " T"]) -> Float[Array, "layers heads T T"]:
        z = harvest.reap(model, {"z": harvest.folds.at(layer)})(tokens)["z"]
        wrote = z[:, head] @ w  # (T, D)
        edit = harvest.at(slice(layer + 1, None), harvest.add(-wrote))
        return harvest.reap(harvest.plant(model, {key: edit}), "pattern")(tokens)["pattern"]

    return induction.scores(jnp.moveaxis(jax.vmap(pattern)(tokens), 0, 1))


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the random tokens and the random heads."""
    report = Report(out)
    token_key, head_key = jax.random.split(jax.random.key(seed))

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, _ = smollm2.load()
        tokens = induction.repeated(token_key, SEQUENCES, len(model.embedding))

    with report.step("Scoring the attention patterns of all heads"):
        pattern = harvest.reap(eqx.filter_vmap(model), "pattern")(tokens)["pattern"]
        scores = np.asarray(induction.scores(pattern))
        previous = np.asarray(previous_scores(pattern))
        ranked, before = map(induction.strongest_first, (scores, previous))

    # Neither kind among the random heads: they are all of the mechanism.
    kinds = {tuple(head) for head in [*ranked[:10].tolist(), *before[:10].tolist()]}
    others = np.asarray([head for head in ranked.tolist() if tuple(head) not in kinds])
    experiments = [("nothing", ranked[:0])]
    for n in COUNTS:
        experiments.append((f"{n} induction", ranked[:n]))
        for draw in range(DRAWS):
            draw_key = jax.random.fold_in(head_key, DRAWS * n + draw)
            random = jax.random.choice(draw_key, others, (n,), replace=False)
            experiments.append((f"{n} random", np.asarray(random)))
    runs: dict[str, list[Float[np.ndarray, " T-1"]]] = {}
    for name, heads in report.track(experiments, "Silencing heads"):
        curve = np.asarray(silenced(model, tokens, induction.all_but(heads, scores)))
        runs.setdefault(name, []).append(curve)
    curves = {name: np.mean(values, axis=0) for name, values in runs.items()}

    layer, head = before[0].tolist()
    what = f"Taking what head {layer}.{head} wrote out of keys, queries, values"
    found, paths = tuple(ranked[: len(INDUCTION)].T), {"nothing": scores}
    for key in report.track(("k_in", "q_in", "v_in"), what):
        paths[key] = np.asarray(without(model, tokens, layer, head, key))
    paths = {key: values[found] for key, values in paths.items()}

    with report.step("Drawing"):
        maps = {"induction heads": scores, "previous-token heads": previous}
        figure = figures.survey(maps, curves, COUNTS, ranked[: len(INDUCTION)], paths, before[0])
        report.save(figure, "induction_survey.png")

    first = {name: float(curve[: PERIOD - 1].mean()) for name, curve in curves.items()}
    second = {name: float(curve[PERIOD:].mean()) for name, curve in curves.items()}
    drift = max(abs(first[f"{n} induction"] / first["nothing"] - 1) for n in COUNTS)
    listed = len({*map(tuple, ranked[:7].tolist())} & {*INDUCTION})
    listed_before = len({*map(tuple, before[:5].tolist())} & {*PREVIOUS})
    cost = {name: loss - second["nothing"] for name, loss in second.items()}
    share = cost["3 random"] / cost["3 induction"]
    left = {key: float(values[0] / scores.max()) for key, values in paths.items()}
    uniform = math.log(len(model.embedding))
    expect, survey, keys = report.expect, "other run", "Elhage et al.: K-composition"
    expect("listed heads in the first 7", listed, 6, 7, survey)
    expect("... previous-token, first 5", listed_before, 3, 4, survey)
    expect("loss, first half", first["nothing"], uniform, 16, "random tokens")
    expect("loss, second half", second["nothing"], 0, uniform / 2, "is a copy")
    expect("... 1 head off", second["1 induction"], 4, 6.5, f"{survey}: 5.14")
    expect("... 3 off", second["3 induction"], 6, 9, f"{survey}: 7.42")
    expect("... 10 off", second["10 induction"], 10, 15, f"{survey}: 12.25")
    expect("... 3 others: share of that change", share, -0.5, 0.5, "most copying stays")
    expect("first half, induction off: change", drift, 0, 0.05, "nothing to copy")
    expect("share of best score, without keys", left["k_in"], 0, 0.2, keys)
    expect("... queries", left["q_in"], 0.6, 1.2, keys)
    expect("... values", left["v_in"], 0.6, 1.2, keys)
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
