"""A progress bar for what runs inside of one compiled program."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from ._errors import UnsupportedError

_bars: dict[int, Any] = {}  # by token; a bar is made when its total is known
_tokens = itertools.count(1)
_lock = threading.Lock()


@contextlib.contextmanager
def progress_bar() -> Iterator[int]:
    """A bar for the calls of `tick` with this token."""
    try:
        import tqdm.auto as tqdm
    except ImportError:
        raise UnsupportedError("`progress=True` needs tqdm: `pip install tqdm`") from None
    token = next(_tokens)
    _bars[token] = lambda total: tqdm.tqdm(total=total, unit="run")
    try:
        yield token
    finally:
        bar = _bars.pop(token)
        if hasattr(bar, "close"):
            bar.close()


def tick(token: Any, count: Any, total: Any) -> None:
    """Called by the program: `count` more of `total` runs are done."""
    with _lock:
        bar = _bars.get(int(token))
        if bar is None:
            return
        if not hasattr(bar, "update"):
            bar = _bars[int(token)] = bar(int(total))
        bar.update(min(int(count), bar.total - bar.n))
