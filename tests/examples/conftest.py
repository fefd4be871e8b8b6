import pytest

from examples.models import smollm2

from . import runs, small


# A missing package is an error here, with the command that installs it, never a skip.
@pytest.fixture(scope="session")
def loaded():
    return smollm2.load()


@pytest.fixture(scope="session")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Texts for a harvest with a small model."""
    return small.archive(tmp_path_factory.mktemp("texts") / "texts.tar.gz")


@pytest.fixture
def harvest(archive, tmp_path):
    """Runs it, with some options; gives its folder."""

    def harvest(name, *more, batches=6):
        folder = tmp_path / name
        small.main(runs.options(archive, folder, *more, batches=batches))
        return folder

    return harvest


@pytest.fixture(autouse=True)
def none_is_left():
    """Ends the processes of a test that has failed."""
    yield
    while runs.started:
        running = runs.started.pop()
        running.kill()
        running.wait()
