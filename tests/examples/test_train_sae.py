"""An autoencoder trained from a store: what it reads, what it computes, and going on."""

import argparse
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import train_sae
from examples._report import Report
from examples.activations import reader, store
from examples.activations.errors import StoreError
from examples.activations.lock import alone
from examples.activations.settings import SettingError
from examples.models import sae, smollm2, training

from . import small

BATCHES, BATCH, T = 10, 8, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    texts = small.archive(folder / "texts.tar.gz")
    sizes = {"batch": BATCH, "length": T, "layer": 1, "batches": BATCHES, "model": 1}
    numbers = [f"--{name}={value}" for name, value in sizes.items()]
    small.main([f"--texts={texts}", f"--out={folder / 'acts'}", *numbers])
    return folder / "acts"


@pytest.fixture
def settings(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_sae"])
    monkeypatch.setattr(smollm2, "load", small.load)
    for name, value in {"BATCH": 24, "AT_ONCE": 5, "SAVE_EVERY": 2}.items():
        monkeypatch.setattr(train_sae, name, value)
    given = vars(train_sae.options())
    small_ones = {"latents": 16, "k": 3, "epochs": 2, "store": str(folder), "out": str(tmp_path)}
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        yield argparse.Namespace(**{**given, **small_ones})


@pytest.fixture
def vectors(folder):
    return reader.Vectors(store.read(folder)["resid_post"])


def test_a_file(folder, vectors):
    values = np.asarray(store.read(folder)["resid_post"].read().result()).astype(np.float32)
    assert vectors.files == BATCHES * BATCH and vectors.rows == T - 1  # eight devices wrote it
    for file in (0, 7, vectors.files - 1):
        np.testing.assert_array_equal(vectors.read(file), values[file, 1:])
    assert vectors.about["layer"] == 1


def test_files_to_train_and_to_test_on(vectors):
    train, test = reader.split(vectors, 4, 0)
    assert sorted([*train, *test]) == list(range(vectors.files)) and len(test) == 4
    assert list(test) != list(reader.split(vectors, 4, 1)[1])


@pytest.mark.parametrize("count, together", [(20, 5), (15, 4), (3, 8)])
def test_batches(vectors, count, together):
    """Every vector once in each epoch, in another order, and those of several files together."""
    files, epochs, batch = list(range(count)), 3, 7
    data = reader.batches(vectors, files, epochs, batch, at_once=4, together=together, seed=0)
    arrays = list(data)
    number = reader.count(vectors, files, epochs, batch)
    assert number == epochs * count * (T - 1) // batch == sum(map(len, arrays))
    assert {array.shape[1:] for array in arrays} == {(batch, small.D)}
    assert {len(array) for array in arrays[:-1]} == {4} and 1 <= len(arrays[-1]) <= 4

    rows = np.concatenate([vectors.read(file) for file in files])
    in_order = lambda rows: rows[np.lexsort(rows.T)]
    batches = np.concatenate(arrays)
    seen = batches.reshape(-1, small.D)
    passes = [seen[i * len(rows) : (i + 1) * len(rows)] for i in range(epochs)]
    for whole in passes[:-1]:  # the last one lacks what does not fill a batch
        np.testing.assert_array_equal(in_order(whole), in_order(rows))
    assert 0 <= len(rows) - len(passes[-1]) < batch
    last = {row.tobytes() for row in passes[-1]}
    assert len(last) == len(passes[-1]) and last <= {row.tobytes() for row in rows}
    assert not np.array_equal(*passes[:2])
    other = reader.batches(vectors, files, 1, batch, at_once=4, together=together, seed=1)
    assert not np.array_equal(next(iter(other)), arrays[0])
    whose = {row.tobytes(): number // (T - 1) for number, row in enumerate(rows)}
    sources = [len({whose[row.tobytes()] for row in batch}) for batch in batches]
    assert np.mean(sources) >= 0.6 * min(together, count)
    if together < count:  # files are together with others than before
        size = together * (T - 1)
        assert len({frozenset(whose[row.tobytes()] for row in p[:size]) for p in passes}) > 1


def test_topk():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    encoder, bias, decoder, offset, x = draw(4, 9), draw(9), draw(9, 4), draw(4), draw(20, 4)
    model = sae.TopK(*map(jnp.asarray, (encoder, bias, decoder, offset)), k=2)
    latents = np.maximum((x - offset) @ encoder + bias, 0)
    for row in latents:
        row[np.argsort(row)[:-2]] = 0
    np.testing.assert_allclose(jax.vmap(model.encode)(x), latents, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(model)(x), latents @ decoder + offset, atol=1e-5)
    np.testing.assert_allclose(
        jax.vmap(model.rescaled(3.0))(3 * x), 3 * jax.vmap(model)(x), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("k", [0, 2, 4])
def test_principal_components(k):
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    mean = x.mean(axis=0)
    u, s, v = np.linalg.svd(x - mean, full_matrices=False)
    expected = (u[:, :k] * s[:k]) @ v[:k] + mean
    np.testing.assert_allclose(jax.vmap(sae.principal(x, k))(x), expected, atol=1e-5)


def trained(settings):
    vectors = reader.Vectors(store.read(train_sae.pathlib.Path(settings.store))["resid_post"])
    files, _ = reader.split(vectors, 4, settings.seed)
    return train_sae.train(vectors, files, settings, Report(settings.out))


def test_what_training_begins_with(settings, vectors, monkeypatch):
    """Without a step it is around the mean of the vectors as they are, not as they are scaled."""
    monkeypatch.setattr(training, "steps", lambda model, state, *_: (model, state, None))
    files, _ = reader.split(vectors, 4, settings.seed)
    some = np.concatenate([vectors.read(file) for file in files[: train_sae.TOGETHER]])
    np.testing.assert_allclose(trained(settings).offset, some.mean(axis=0), rtol=1e-4, atol=1e-6)


def batches_of(settings):
    vectors = reader.Vectors(store.read(settings.store)["resid_post"])
    files, _ = reader.split(vectors, 4, settings.seed)
    together, size = train_sae.TOGETHER, train_sae.AT_ONCE
    return reader.batches(
        vectors, files, settings.epochs, train_sae.BATCH, at_once=size, together=together, seed=0
    )


class Stopped(Exception):
    pass


def test_going_on_is_the_same_as_not_stopping(settings, tmp_path, monkeypatch):
    settings.out = str(tmp_path / "whole")
    whole = trained(settings)

    settings.out = str(tmp_path / "stopped")
    steps, calls = training.steps, []

    def stop(*args):
        calls.append(len(args))
        if len(calls) == 8:
            raise Stopped
        return steps(*args)

    with monkeypatch.context() as patch, pytest.raises(Stopped, match=r"^$"):
        patch.setattr(training, "steps", stop)
        trained(settings)
    total, again = len(list(batches_of(settings))), []
    monkeypatch.setattr(training, "steps", lambda *args: again.append(None) or steps(*args))
    jax.tree.map(np.testing.assert_array_equal, trained(settings), whole)
    assert len(calls) == 8 and len(again) == total - 6  # which was the last that was kept


def test_other_settings(settings):
    trained(settings)
    settings.latents = 32
    with pytest.raises(SettingError, match="made with latents=16, and this is latents=32"):
        trained(settings)


def test_other_sites(settings, folder):
    settings.site = "z"
    with pytest.raises(
        SettingError, match=r"there is no 'z' in .*, but \['resid_post', 'tokens'\]"
    ):
        train_sae.main(settings)
    with pytest.raises(SettingError, match=r"is \(sequences, T, D\), and this one is \(80, 16\)"):
        reader.Vectors(store.read(folder)["tokens"])


def loss_by_hand(tokens, layer=None, edit=None):
    """Of the next letter, if what a layer writes at all positions but the first is edited."""
    model, _ = small.load()
    mask = jnp.tril(jnp.ones((T, T), bool))
    resid = model.embedding[tokens]
    for number in range(small.LAYERS):
        resid = jax.tree.map(lambda w, number=number: w[number], model.blocks)(resid, mask)
        if number == layer:
            resid = jnp.concatenate([resid[:1], jnp.stack([edit(row) for row in resid[1:]])])
    logits = np.asarray(model.norm(resid) @ model.embedding.T, np.float64)[:-1]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(T - 1), tokens[1:]].mean()


def test_a_run(settings, folder, monkeypatch):
    """What it says of the model and of files it has not seen, beside numpy."""
    trained = []

    def train(*args):
        trained.append(own_train(*args))
        return trained[0]

    own_train = train_sae.train
    monkeypatch.setattr(train_sae, "train", train)
    report = train_sae.main(settings)
    measured = {row.what: row.measured for row in report.rows}
    vectors = reader.Vectors(store.read(folder)["resid_post"])
    files = reader.split(vectors, train_sae.HELD_OUT, 0)[1]

    x = np.concatenate([vectors.read(file) for file in files]).astype(np.float64)
    left = np.stack([trained[0](jnp.asarray(row, jnp.float32)) for row in x])
    share = 1 - np.sum((x - left) ** 2) / np.sum((x - x.mean(axis=0)) ** 2)
    assert measured["variance explained"] == pytest.approx(share, abs=1e-3)
    assert 0.3 < share < 1  # three of sixteen latents

    tokens = np.asarray(store.read(folder)["tokens"].read().result())[files]
    own = np.mean([loss_by_hand(row) for row in tokens])
    assert measured["loss"] == pytest.approx(own, rel=1e-4)
    planted = np.mean([loss_by_hand(row, 1, trained[0]) for row in tokens])
    assert abs(planted - own) > 5e-4
    assert measured["... with the autoencoder planted"] == pytest.approx(planted, abs=1e-4)
    assert 0 < measured["stored values, off by"] < 2**-8


@pytest.mark.parametrize(
    "constant, value, message",
    [
        ("BATCH", 20, "20 vectors cannot be divided over 8 devices"),
        ("BATCH", 8000, "there are no 8000 vectors to train on"),
        ("HELD_OUT", 80, "80 files are too few; 80 are to test on"),
    ],
)
def test_what_cannot_be_trained(settings, monkeypatch, constant, value, message):
    monkeypatch.setattr(train_sae, constant, value)
    with pytest.raises(SettingError, match=message):
        train_sae.main(settings)


def test_more_latents_than_there_are(settings):
    settings.k = 17
    with pytest.raises(SettingError, match="17 of 16 latents cannot be kept"):
        train_sae.main(settings)


@pytest.mark.parametrize("name", ["resid_post", "tokens"])
def test_a_store_that_is_not_finished(settings, folder, tmp_path, name):
    """What is not written is no zeros."""
    part = tmp_path / "part"
    shutil.copytree(folder, part)
    (file,) = (path for path in (part / name / "c" / "7").rglob("0") if path.is_file())
    file.unlink()
    settings.store = str(part)
    with pytest.raises(StoreError, match=rf"Some of '{name}' in .* is not written"):
        train_sae.main(settings)
    vectors = reader.Vectors(store.read(part)["resid_post"])
    assert vectors.read(6).any()
    if name == "resid_post":
        with pytest.raises(StoreError, match="Cannot read file 7: some of it is not written"):
            vectors.read(7)


def test_two_runs_at_once(settings):
    with alone(pathlib.Path(settings.out)):
        with pytest.raises(SettingError, match="Another run is writing into"):
            train_sae.main(settings)


def test_a_folder_that_cannot_be_written(settings):
    settings.out = "/sys/harvest"
    reasons = "Read-only file system|Permission denied|Operation not permitted"
    with pytest.raises(StoreError, match=rf"Cannot write into /sys/harvest: ({reasons})"):
        train_sae.main(settings)


@pytest.mark.parametrize("wrong", ["--rate=nan", "--rate=0", "--seed=-1", "--k=0"])
def test_numbers_of_the_command(monkeypatch, capsys, wrong):
    monkeypatch.setattr(sys, "argv", ["train_sae", wrong])
    with pytest.raises(SystemExit, match="2"):
        train_sae.options()
    assert f"argument {wrong.partition('=')[0]}: " in capsys.readouterr().err


def test_another_store_of_as_many_files(settings, folder, tmp_path):
    trained(settings)
    other = tmp_path / "other"
    texts = small.archive(tmp_path / "texts.tar.gz", size=900)
    sizes = {"batch": BATCH, "length": T, "layer": 1, "batches": BATCHES}
    numbers = [f"--{name}={value}" for name, value in sizes.items()]
    small.main([f"--texts={texts}", f"--out={other}", *numbers])
    settings.store = str(other)
    with pytest.raises(SettingError, match="made with another store, or it has grown"):
        trained(settings)


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match="There is no store in"):
        store.read(tmp_path)
