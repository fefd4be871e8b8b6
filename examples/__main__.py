"""All experiments, one after the other, and one table of what they found.

python -m examples [--seed N] [--out FOLDER]
"""

import importlib
import time

from rich import box
from rich.console import Console
from rich.table import Table

from . import EXPERIMENTS
from ._report import OTHER_RUN, options


def main(seed: int = 0, out: str = "examples/out") -> None:
    """Runs all experiments; `seed` is handed to each.

    **Raises:**

    `SystemExit` if something is not as expected.
    """
    table = Table("", "measured", "expected", "because", "", box=box.SIMPLE)
    wrong = []
    for name in EXPERIMENTS:
        Console().rule(name)
        start = time.perf_counter()
        report = importlib.import_module(f"examples.{name}").main(seed, out)
        table.add_row(f"[bold]{name}", f"[dim]{time.perf_counter() - start:.0f} s")
        for row in report.rows:
            table.add_row(*row.cells())
        table.add_section()
        wrong += [f"{name}: {what}" for what in report.wrong]
    Console().print(table)
    Console().print(OTHER_RUN, style="dim")
    if wrong:
        raise SystemExit(f"Not as expected: {'; '.join(wrong)}.")


if __name__ == "__main__":
    given = options()
    main(given.seed, given.out)
