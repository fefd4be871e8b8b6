"""Make a language model friendlier, or not, by adding one vector to its residual stream.

    python -m examples.steering

The vector is the mean difference between sentences that are alike but for their sentiment
(activation addition: Turner et al., 2023, arXiv:2308.10248; Rimsky et al., 2023, arXiv:2312.06681).

1. It is added at the last token of four prompts, at every layer and in seven doses. Is a positive
   word more likely to come next than a negative one? At layer 14, more with each dose.
2. Random vectors of the same length, in the same doses, do no such thing.
3. Text that is sampled from the model while it is steered.
4. An intervention is a value: it is written to a file, read, and does the same again.

Takes a minute, and writes its figure and the file to `examples/out`. "Other run" in the table:
independent code for the same, which was thrown away (JAX 0.12.0, Equinox 0.13.8).
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import harvest

from ._report import Report
from .figures import steering as figures
from .models import smollm2
from .models.generate import generate

PAIRS = [  # positive, negative
    ("I love this, it is wonderful", "I hate this, it is terrible"),
    ("The day was happy and beautiful", "The day was sad and ugly"),
    ("What a great and lovely film", "What a bad and boring film"),
    ("She is kind and I adore her", "She is cruel and I despise her"),
]
POSITIVE = " good", " great", " wonderful", " happy", " excellent", " amazing", " beautiful"
NEGATIVE = " bad", " terrible", " awful", " sad", " horrible", " poor", " ugly"
PROMPTS = ["My neighbour's dog is", "I went to see the film, and it was"]
PROMPTS += ["The food at that restaurant is", "Today I feel"]
STORY, NEW = "When I think about my job, I feel", 20
LAYER, DOSES, N_RANDOM = 14, (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0), 6


@eqx.filter_jit
def directions(
    model: smollm2.SmolLM2, tokens: Int[Array, "sentences T"], length: Int[Array, " sentences"]
) -> Float[Array, "layers D"]:
    """From each second sentence to the one before it, at the last token, on average."""
    resid = harvest.reap(jax.vmap(model), "resid_pre")(tokens, length)["resid_pre"]
    ends = resid[:, jnp.arange(len(length)), length - 1]  # (layers, sentences, D)
    return jnp.mean(ends[:, ::2] - ends[:, 1::2], axis=1)


def score(
    model: smollm2.SmolLM2,
    tokens: Int[Array, " T"],
    length: Int[Array, ""],
    words: Int[Array, "2 words"],
) -> Float[Array, ""]:
    """How much likelier words of the first kind are to come next than those of the second."""
    logits = model(tokens, length)[length - 1]
    positive, negative = jax.nn.logsumexp(logits[words], axis=-1)
    return positive - negative


def steer(
    resid: Float[Array, "T D"], direction: Float[Array, "T D"], row: dict[str, Array]
) -> Float[Array, "T D"]:
    """The edit of one experiment: so much of a direction added."""
    return resid + row["dose"] * direction


@eqx.filter_jit
def at_layer(vectors: Float[Array, "vectors T D"], *args) -> Float[Array, "vectors doses"]:
    """The scores (`args` are those of `score`) with each vector added, in each dose."""

    def steered(vector, dose):
        edit = harvest.at(LAYER, harvest.add(dose * vector))
        return harvest.plant(score, {"resid_pre": edit})(*args)

    row = jax.vmap(steered, in_axes=(None, 0))
    return jax.lax.map(lambda vector: row(vector, jnp.asarray(DOSES)), vectors)


def rises(curves: Float[np.ndarray, "*curves doses"]) -> Bool[np.ndarray, "*curves"]:
    """Whether a curve rises with every dose: then its rank correlation with the dose is 1."""
    return (np.diff(curves) > 0).all(axis=-1)


def main(seed: int = 0, out: str = "examples/out") -> Report:
    """Runs everything; `seed` chooses the random vectors, and samples the text."""
    report = Report(out)
    noise_key, text_key = jax.random.split(jax.random.key(seed))

    with report.step("Loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2.load()
        words = jnp.stack([smollm2.encode_words(tokenizer, k) for k in (POSITIVE, NEGATIVE)])
        encode = lambda texts: smollm2.encode(tokenizer, texts)
        prompts = list(zip(*encode(PROMPTS), strict=True))

    with report.step("Finding the direction, at every layer"):
        vectors = directions(model, *encode([text for pair in PAIRS for text in pair]))
        noise = jax.random.normal(noise_key, (N_RANDOM, vectors.shape[1]))
        noise *= jnp.linalg.norm(vectors[LAYER]) / jnp.linalg.norm(noise, axis=1, keepdims=True)

    swept, control, grid = [], [], harvest.grid(dose=jnp.asarray(DOSES))
    for tokens, length in report.track(prompts, "Steering every layer, in each dose"):
        last = jax.nn.one_hot(length - 1, tokens.size)[None, :, None]
        args, source = (model, tokens, length, words), {"resid_pre": vectors[:, None] * last}
        swept.append(harvest.sweep(score, source, steer, grid)(*args)["resid_pre"])
        control.append(at_layer(noise[:, None] * last, *args))
    swept, control = np.stack(swept), np.stack(control)  # prompts, layers or vectors, doses

    story, (length,) = encode([STORY])
    dosed = {k: harvest.at(LAYER, harvest.add(k * vectors[LAYER])) for k in (-1.0, 0.0, 1.0)}
    for dose in report.track(tuple(dosed), "Writing while steered"):
        planted = harvest.plant(model, {"resid_pre": dosed[dose]})
        text = generate(planted, story[0], length, NEW, key=text_key, temperature=0.5).tolist()
        report.console.print(f"  {dose:+.0f}: {tokenizer.decode(text)!r}")

    with report.step("Writing the interventions to a file, and running one from there"):
        path = report.folder / "steering.eqx"
        eqx.tree_serialise_leaves(path, dosed)
        read = eqx.tree_deserialise_leaves(path, like=jax.tree.map(jnp.zeros_like, dosed))
        run = lambda edit: harvest.plant(model, {"resid_pre": edit})(story[0])
        before, after = run(dosed[1.0]), run(read[1.0])

    with report.step("Drawing"):
        report.save(figures.steering(DOSES, PROMPTS, swept, LAYER, control), "steering.png")

    changes = lambda x: (x[..., DOSES.index(1)] - x[..., DOSES.index(-1)]).mean(axis=0)
    change, largest = changes(swept)[LAYER], abs(changes(control)).max()
    unsteered = np.stack([score(model, *prompt, words) for prompt in prompts])
    off = float(abs(swept[:, 0, DOSES.index(0)] - unsteered).max())
    expect, n, rise, random = report.expect, len(PROMPTS), rises(swept), rises(control).all(axis=0)
    expect("prompts that rise with the dose", int(rise[:, LAYER].sum()), n, n, "other run")
    expect("... at layers 10 and 18", int(rise[:, [10, 18]].sum()), 1.5 * n, 2 * n, "other run")
    expect("random vectors that rise on all", int(random.sum()), 0, 0, "no meaning")
    expect("change, dose -1 to 1", change, 2, math.inf, "other run: 3.3")
    expect("... random, largest", largest, 0, change / 2, "no meaning")
    expect("dose 0, change of the score", off, 0, 1e-3, "identity")
    expect("from the file, change of logits", float(abs(after - before).max()), 0, 0, "equal")
    return report.finish()


if __name__ == "__main__":
    Report.run(main)
