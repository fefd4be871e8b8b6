"""Train a sparse autoencoder on a store of activations, and plant it in the model they are of.

    python -m examples.harvest_activations
    python -m examples.train_sae

1. grain reads files of the store in a random order, some together, whose vectors it shuffles.
2. An autoencoder of 32 latents at a time is trained on them with optax; each step is split over
   all devices. Orbax keeps the weights, the optimiser and the place in the data, so that a run
   that was stopped goes on by the same command.
3. Files that it has not seen: how much does it explain, beside as many principal components?
4. It is planted in the model where its data is from: how much worse are the predictions?

Takes about a minute after the default harvest.
"""

import argparse
import functools
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import harvest

from ._report import Report
from .activations import reader, store
from .activations.command import command, natural, positive
from .activations.errors import explained
from .activations.lock import alone
from .activations.settings import SettingError, check_same
from .harvest_activations import OUT
from .models import sae, smollm2, training
from .models.sae import TopK
from .models.smollm2 import SmolLM2

HELD_OUT = 3  # files
TOGETHER = 8  # files whose vectors are shuffled together
BATCH = 512  # vectors
AT_ONCE = 24  # steps in one call
SAVE_EVERY = 5  # calls
SETTINGS = ("site", "latents", "k", "epochs", "rate", "seed")  # that a run cannot go on without


def rate(text: str) -> float:
    """A learning rate."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return float(text)


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--store", default=OUT, help="the folder that examples.harvest_activations wrote")
    add("--site", default="resid_post", help="what to train on")
    add("--latents", type=positive, default=2304, help="how many directions")
    add("--k", type=positive, default=32, help="how many of them in each vector")
    add("--epochs", type=positive, default=3, help="how often each vector is seen")
    add("--rate", type=rate, default=2e-3, help="the first learning rate of Adam")
    add("--seed", type=natural, default=0, help="what is random follows from it")
    add("--out", default=f"{OUT}/sae", help="the folder for what is trained")
    return parser.parse_args()


def loss(model: TopK, x: Float[Array, "batch D"]) -> Float[Array, ""]:
    """The squared error of a vector, on average."""
    return jnp.mean(jnp.sum((jax.vmap(model)(x) - x) ** 2, axis=1))


@eqx.filter_jit
def share_explained(edit: Callable, x: Float[Array, "rows D"]) -> Float[Array, ""]:
    """How much of the variance is in what an edit leaves."""
    missed = jnp.sum((x - jax.vmap(edit)(x)) ** 2)
    return 1 - missed / jnp.sum((x - x.mean(axis=0, keepdims=True)) ** 2)


def train(vectors: reader.Vectors, files: Any, given: argparse.Namespace, report: Report) -> TopK:
    """An autoencoder of the vectors in some files, from where a run before has stopped."""
    steps = reader.count(vectors, files, given.epochs, BATCH)
    check(given, steps)
    some = np.concatenate([vectors.read(file) for file in files[:TOGETHER]])
    mean = some.mean(axis=0)
    scale = np.sqrt(np.mean(np.sum((some - mean) ** 2, axis=1)))
    model = sae.topk(jax.random.key(given.seed), jnp.asarray(mean / scale), given.latents, given.k)
    optimiser = optax.adam(optax.cosine_decay_schedule(given.rate, steps))
    state = training.init(model, optimiser)
    batches = reader.batches(
        vectors,
        files,
        given.epochs,
        BATCH,
        at_once=AT_ONCE,
        together=TOGETHER,
        seed=given.seed,
    )
    data = iter(batches)

    fixed = settings(given, vectors)
    keep = ocp.CheckpointManagerOptions(
        max_to_keep=1, save_interval_steps=SAVE_EVERY, enable_async_checkpointing=False
    )
    with explained(f"write into {given.out}"):
        saved = ocp.CheckpointManager(pathlib.Path(given.out).absolute() / "progress", options=keep)
    done = saved.latest_step() or 0
    if done:
        model, state = resume(saved, done, fixed, (model, state), data)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P(None, "data"))
    model, state = jax.device_put((model, state), NamedSharding(mesh, P()))
    count = -(-steps // AT_ONCE)
    for number in report.track(range(done + 1, count + 1), "Training an autoencoder"):
        xs = jax.device_put(next(data) / scale, split)
        model, state, _ = training.steps(model, state, xs, loss, optimiser)
        args = ocp.args.Composite(
            trained=ocp.args.StandardSave((model, state)),
            data=grain.checkpoint.CheckpointSave(data),
            settings=ocp.args.JsonSave(fixed),
        )
        with explained(f"write into {given.out}"):
            saved.save(number, args=args, force=number == count)
    saved.close()
    return model.rescaled(scale)


def check(given: argparse.Namespace, steps: int) -> None:
    """**Raises:** `SettingError` if so many steps cannot be made with the settings."""
    if BATCH % jax.device_count():
        raise SettingError(f"{BATCH} vectors cannot be divided over {jax.device_count()} devices")
    if given.k > given.latents:
        raise SettingError(f"{given.k} of {given.latents} latents cannot be kept")
    if steps < 1:
        raise SettingError(f"there are no {BATCH} vectors to train on")


def settings(given: argparse.Namespace, vectors: reader.Vectors) -> dict[str, Any]:
    """What is trained follows from these."""
    chosen = {name: getattr(given, name) for name in SETTINGS}
    sizes = {"batch": BATCH, "at_once": AT_ONCE, "together": TOGETHER, "held_out": HELD_OUT}
    return chosen | sizes | {"store": [vectors.about, list(vectors.array.shape)]}


def resume[T](
    saved: ocp.CheckpointManager, step: int, fixed: dict[str, Any], like: T, data: Any
) -> T:
    """What was trained until a step, which is like this; the data go on behind it.

    **Raises:**

    `SettingError` if it was with other settings.
    """
    kept = saved.restore(step, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))
    check_same(saved.directory, kept["settings"], fixed)
    args = ocp.args.Composite(
        trained=ocp.args.StandardRestore(like), data=grain.checkpoint.CheckpointRestore(data)
    )
    return saved.restore(step, args=args)["trained"]


class Behind(eqx.Module):
    """An edit that acts on all positions but the first."""

    edit: Any

    def __call__(self, resid: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return jax.vmap(self.edit)(resid).at[0].set(resid[0])


@eqx.filter_jit
def predict(model: Any, tokens: Int[Array, "batch T"]) -> Float[Array, ""]:
    """The loss of the next token, on average."""
    logits = jax.vmap(model)(tokens)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@eqx.filter_jit
def difference(
    model: SmolLM2, site: str, layer: int, tokens: Int[Array, "sequences T"], stored: Array
) -> Float[Array, ""]:
    """What stored vectors are off by, beside their length, from what the whole model computes."""
    select = {site: harvest.folds.at(layer)}
    own = harvest.reap(jax.vmap(model), select)(tokens)[site][:, 1:].reshape(stored.shape)
    norm = lambda x: jnp.linalg.norm(x, axis=-1)
    return jnp.max(norm(own - stored) / norm(own))


def main(given: argparse.Namespace) -> Report:
    """Trains, and tests what was trained.

    **Raises:**

    `OSError` if there is no store; `SettingError` if something else was trained in that folder.
    """
    with explained(f"write into {given.out}"):
        report = Report(given.out)
    acts = store.read(pathlib.Path(given.store).absolute())
    acts.check()
    if given.site not in acts.arrays:
        raise SettingError(
            f"there is no {given.site!r} in {acts.folder}, but {sorted(acts.arrays)}"
        )
    vectors = reader.Vectors(acts[given.site])
    if vectors.files <= HELD_OUT:
        raise SettingError(f"{vectors.files} files are too few; {HELD_OUT} are to test on")
    files, held_out = reader.split(vectors, HELD_OUT, given.seed)
    with alone(report.folder):
        trained = train(vectors, files, given, report)

    with report.step("Looking at what it has not seen"):
        known = np.concatenate([vectors.read(file) for file in files[: 2 * TOGETHER]])
        x = jnp.asarray(np.concatenate([vectors.read(file) for file in held_out]))
        components = sae.principal(known, given.k)
        share, of_components = (float(share_explained(edit, x)) for edit in (trained, components))

    with report.step("Planting it in the model"):
        model, _ = smollm2.load()
        layer = vectors.about["layer"]
        tokens = [acts["tokens"][vectors.part(file)].read().result() for file in held_out]
        tokens = list(map(jnp.asarray, tokens))
        stored = [jnp.asarray(vectors.read(file)) for file in held_out]
        offs = map(functools.partial(difference, model, given.site, layer), tokens, stored)
        off = float(np.max(list(offs)))
        losses = []
        for edit in (None, trained, components, sae.principal(known, 0)):
            plants = {} if edit is None else {given.site: harvest.at(layer, Behind(edit))}
            planted = harvest.plant(model, plants)
            losses.append(float(np.mean([predict(planted, t) for t in tokens])))
        own, spliced, linear, mean = losses

    report.expect("stored values, off by", off, 0, 2**-8, "8 bits of bfloat16")
    report.expect("variance explained", share, max(0, of_components), 1, "principal components")
    report.expect("loss", own, 0, np.log(len(model.embedding)), "uniform")
    report.expect("... with the autoencoder planted", spliced, own, linear, "principal components")
    report.expect("... with the mean planted", mean, linear, np.inf, "principal components")
    return report.finish()


if __name__ == "__main__":
    if wrong := command(lambda: main(options())).wrong:
        sys.exit(f"Not as expected: {'; '.join(wrong)}.")
