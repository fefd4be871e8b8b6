"""What a long run is made of: its texts, the model on a mesh, and the store of what it sees."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import harvest


class SettingError(ValueError):
    """Settings that cannot be."""


# Of these the value says nothing to a user.
OTHER = {
    "texts": "other texts",
    "weights": "other weights",
    "store": "another store, or it has grown",
}


def check_same(where: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """**Raises:** `SettingError` if what is in a folder was made with other settings."""
    for name, value in now.items():
        if (was := before.get(name)) != value:
            other = OTHER.get(name, f"{name}={was}, and this is {name}={value}")
            raise SettingError(
                f"What is in {where} was made with {other}. Give the settings it was made with, or "
                "another folder by `--out`."
            )


def positive(text: str) -> int:
    """A number of things of which there has to be one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def natural(text: str) -> int:
    """A number of things, or a seed."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return int(text)


def command[T](main: Callable[[], T]) -> T:
    """Runs what a command line asks for; what a user can mend is told without a traceback.

    **Raises:**

    `SystemExit` with what is wrong.
    """
    try:
        return main()
    except (SettingError, OSError, harvest.HarvestError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command goes on from here.")
