"""What a long run is made of: its texts, the model on a mesh, and the store of what it sees."""

import sys
from collections.abc import Callable

import harvest


class SettingError(ValueError):
    """Settings that cannot be."""


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
