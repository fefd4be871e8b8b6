"""What a long run is made of: its texts, the model on a mesh, and the store of what it sees."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import harvest


class SettingError(ValueError):
    """Settings that cannot be."""


def check_same(where: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """**Raises:** `SettingError` if what is in a folder was made with other settings."""
    for name, value in now.items():
        if (was := before.get(name)) != value:
            raise SettingError(
                f"What is in {where} was made with {name}={was}, and this is {name}={value}. Give "
                "the settings it was made with, or another folder by `--out`."
            )


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
