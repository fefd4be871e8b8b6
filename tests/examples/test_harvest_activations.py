"""A run that writes activations: what is in the store."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.activations import parallel, shakespeare, store
from harvest import sow

from . import small
from .runs import BATCH, T, check, contents, files


def test_what_is_stored(harvest):
    found = contents(harvest("a"))
    check(found, 6)
    # Every letter of the texts once: those that the run got to, in some order.
    text = bytes(found["tokens"].astype(np.uint8).ravel()).decode("ascii")
    expected = small.texts()
    while text:
        (first,) = [t for t in expected if t.startswith(text[:50])]
        assert first.startswith(text[: len(first)])
        expected.remove(first)
        text = text[len(first) :]


@pytest.mark.parametrize("model", [1, 2])
def test_on_a_mesh(harvest, model):
    """Each device writes the sequences that it has, with weights split or not."""
    folder = harvest("a", f"--model={model}")
    check(contents(folder), 6)
    assert len(jax.devices()) == BATCH  # one sequence each
    sizes = [len(data) for name, data in files(folder).items() if name.startswith("tokens/c")]
    assert sizes == [T * 4] * (6 * BATCH)


def test_what_several_devices_have_is_written_by_one(tmp_path):
    """A value that is split over groups of two, of which both have all of their part."""
    rows = NamedSharding(parallel.make_mesh(2), P("data"))
    value = jax.device_put(jnp.arange(64).reshape(8, 8), rows)
    type = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=rows)
    into = store.create(tmp_path, {"h": type}, 1, {})
    futures = into.write({"h": value}, 0)
    into.wait(futures)
    assert len(futures) == 4 and len(value.addressable_shards) == 8
    np.testing.assert_array_equal(into["h"].read().result(), value)


def test_names_of_arrays(tmp_path):
    """Keys of sites may have slashes, as those in scopes have."""
    values = {"layers/3/resid": jnp.arange(8.0).reshape(8, 1), "tokens": jnp.arange(8)}
    types = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        for name, value in values.items()
    }
    for _ in range(2):
        into = store.create(tmp_path, types, 1, {})
        into.wait(into.write(values, 0))
    found = contents(tmp_path)
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


def test_what_is_no_floating_point_is_stored_as_it_is():
    def model(tokens):
        layer = lambda x, _: (sow(x + 300, name="number"), sow(x / 3, name="third"))
        return jax.lax.scan(layer, tokens, length=2)[0]

    collect = parallel.collector(["number", "third"], 1, jnp.bfloat16, parallel.make_mesh(1))
    tokens = jnp.arange(8 * 4).reshape(8, 4)
    acts = collect(jax.tree_util.Partial(model), tokens)
    np.testing.assert_array_equal(acts["number"], tokens + 600)
    assert acts["number"].dtype == tokens.dtype and acts["third"].dtype == jnp.bfloat16


def test_weights_are_split():
    model, _ = small.load()
    on_mesh = parallel.place(model, parallel.make_mesh(2))
    whole = {
        jax.tree_util.keystr(path): w for path, w in jax.tree_util.tree_leaves_with_path(model)
    }
    for path, w in jax.tree_util.tree_leaves_with_path(on_mesh):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(w, whole[name])
        parts = w.size // w.addressable_shards[0].data.size
        assert parts == (1 if "norm" in name else 2), name


def test_several_sites(harvest):
    sites = ["--sites", "resid_post", "z", "pattern"]
    found = contents(harvest("a", *sites))
    check(found, 6)
    assert found["z"].shape == (BATCH * 6, T, small.HEADS, small.CHANNELS)
    rows = found["pattern"].astype(np.float32).sum(axis=-1)
    np.testing.assert_allclose(rows, np.ones_like(rows), atol=0.03)


def test_texts_that_end(harvest):
    """What does not fill a batch is left out; asking again changes nothing."""
    letters = sum(map(len, small.texts()))
    whole = letters // T // BATCH
    once = files(harvest("a", batches=whole + 50))
    check(contents(harvest("a", batches=whole + 50)), whole)
    folder = harvest("a", batches=whole + 500)
    assert sum(path.is_dir() for path in folder.rglob("*")) < 5 * BATCH * whole  # no empty ones
    assert files(harvest("a", batches=whole + 60)) == once == files(harvest("b", batches=whole))


def test_fewer_batches_than_there_are(harvest, capsys):
    """It says how many there are, whatever was asked for."""
    assert files(harvest("a", batches=5)) == files(harvest("a", batches=3))
    said = f"5 batches of {BATCH} x {T} tokens are in "
    assert all(line.startswith(said) for line in capsys.readouterr().out.splitlines())


def test_a_dry_run_writes_nothing(harvest):
    assert not harvest("a", "--dry-run").exists()


@pytest.mark.parametrize("model", [1, 2])
def test_a_plan(harvest, capsys, model):
    """What it says of the store is within a tenth of the store's files."""
    harvest("a", f"--model={model}", "--sites", "pattern", "mlp_post", "--plan", "--length=64")
    printed = capsys.readouterr().out
    size, tokens = re.search(
        r"([\d.]+) MB for .* of 6 batches, ([\d,]+) tokens of", printed
    ).groups()
    assert tokens == f"{6 * BATCH * 64:,}"
    folder = harvest("a", f"--model={model}", "--sites", "pattern", "mlp_post", "--length=64")
    there = sum(map(len, files(folder).values()))
    assert float(size) * 1e6 == pytest.approx(there, rel=0.1)


def test_the_order_of_texts():
    """It is random, and follows from the seed; what fills no sequence is left out."""

    def read(seed):
        data = shakespeare.batches(small.texts(), small.Letters(), 1, T, seed)
        return bytes(np.concatenate(list(data)).astype(np.uint8).ravel()).decode("ascii")

    def order(letters):
        return tuple(sorted(range(len(texts)), key=lambda i: letters.index(texts[i][:50])))

    texts, seeds = small.texts(), range(6)
    orders = [order(read(seed)) for seed in seeds]
    for seed, numbers in zip(seeds, orders, strict=True):
        whole = "".join(texts[number] for number in numbers)
        assert read(seed) == whole[: len(whole) // T * T]
    assert len(set(orders)) > 3
