"""A run that is stopped, at whatever moment and by whatever, and goes on."""

import os
import random
import resource
import shlex
import subprocess
import time

import numpy as np
import pytest

from examples import harvest_activations
from examples.activations import parallel, store
from examples.activations.errors import StoreError
from examples.activations.lock import alone
from examples.activations.settings import SettingError

from . import small
from .runs import (
    BATCH,
    COMMAND,
    T,
    beginning,
    by_hand,
    check,
    contents,
    files,
    finish,
    kill,
    options,
    process,
    processes,
    wait,
    wait_for_more,
    written,
)


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


def test_going_on_is_the_same_as_not_stopping(harvest):
    harvest("a", batches=4)
    harvest("a", batches=4)
    assert files(harvest("a", batches=9)) == files(harvest("b", batches=9))


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


def test_another_run_into_the_same_folder(harvest, tmp_path):
    with alone(tmp_path / "a"):
        with pytest.raises(SettingError, match=r"Another run is writing into .*a\."):
            harvest("a")
        harvest("b")
    harvest("a")


def test_a_folder_that_cannot_be_written(archive):
    reasons = "Read-only file system|Permission denied|Operation not permitted"
    with pytest.raises(StoreError, match=rf"Cannot write into /sys/\w+: ({reasons})"):
        small.main(options(archive, "/sys/harvest", batches=2))
