"""What the command lines of runs have in common."""

import argparse
import os
import sys
from collections.abc import Callable

import jax

import harvest

from .settings import SettingError


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

    `SystemExit` with what is wrong. Of several processes, one that fails ends without a word to the
    others, which JAX ends then: a normal exit would wait for them, and they for it.
    """
    try:
        return main()
    except (SettingError, OSError, harvest.HarvestError) as error:
        if jax.process_count() > 1:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped. The same command goes on from the last place that was kept.")
