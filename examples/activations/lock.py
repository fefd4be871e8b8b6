"""One run at a time in a folder."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from .errors import explained
from .settings import SettingError


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
    """A context that one run at a time is in, of those which write into a folder.

    On other hosts too, if the file system of the folder has locks that they see.

    **Raises:**

    `SettingError` if there is another; `StoreError` if the folder cannot be written, or has no
    locks.
    """
    with contextlib.ExitStack() as stack:
        with explained(f"write into {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however
            except BlockingIOError:
                raise SettingError(f"Another run is writing into {folder}.") from None
        yield
