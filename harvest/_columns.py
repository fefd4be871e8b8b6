"""Text in columns, as tables print it."""

import os
from collections.abc import Iterable, Sequence


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
