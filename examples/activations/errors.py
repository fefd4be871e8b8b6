"""What goes wrong with files, in the terms of a user."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator

GO_ON = "Give the same command of examples.harvest_activations again; it goes on."
ELSEWHERE = "Give another folder by `--out`."


class StoreError(OSError):
    """What could not be written or read, and what to do."""


@contextlib.contextmanager
def explained(what: str, advice: str = ELSEWHERE) -> Iterator[None]:
    """A context in which what goes wrong with files is a [`StoreError`][].

    **Arguments:**

    - `what`: what cannot be done then, as `"write into /data"`.
    - `advice`: what to do then, unless the disk is full.
    """
    try:
        yield
    except StoreError:
        raise
    except ValueError as error:
        # TensorStore raises it with a code in front, whatever it is.
        if not re.match("[A-Z_]+: ", str(error)):
            raise
        raise StoreError(f"Cannot {what}: {_in_our_terms(str(error), advice)}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise StoreError(f"Cannot {what}: {reason}. {_advice(error.errno, advice)}") from None


def _in_our_terms(text: str, advice: str) -> str:
    if text.startswith("NOT_FOUND"):
        return f"some of it is not written. {GO_ON}"
    if number := re.search(r"\[os_error_code='(\d+)'\]", text):
        code = int(number[1])
        return f"{os.strerror(code)}. {_advice(code, advice)}"
    return f"{text.partition(' [tensorstore_spec=')[0]}. {advice}"


def _advice(number: int | None, otherwise: str) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "What is written is whole: make room, and give the same command again."
    return otherwise
