"""Text in columns, as tables print it."""

import os
from collections.abc import Iterable, Sequence
from typing import Any


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for each row, with the cells below each other."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def near(source: str) -> str:
    """A file and line, from the working folder if that is shorter."""
    relative = os.path.relpath(source) if os.path.isabs(source) else source
    return min(relative, source, key=len)


def human(nbytes: Any) -> str:
    """A number of bytes in units that are read easily."""
    if not isinstance(nbytes, int | float):  # of a shape polymorphic program
        return f"{nbytes} B"
    size, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000 or unit == "PB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
