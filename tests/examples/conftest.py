import pytest

from examples.models import smollm2


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
