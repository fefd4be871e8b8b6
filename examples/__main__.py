"""All experiments, one after the other, and one table of what they found.

python -m examples
"""

import importlib
import time

from rich import box
from rich.console import Console
from rich.table import Table

from . import EXPERIMENTS


def main(seed: int = 0, out: str = "examples/out") -> None:
    """Runs all experiments; `seed` is handed to each.

    **Raises:**

    `SystemExit` if something is not as expected.
    """
    table = Table("", "", "measured", "expected", "because", "", "seconds", box=box.SIMPLE)
    wrong = []
    for name in EXPERIMENTS:
        Console().rule(name)
        start = time.perf_counter()
        report = importlib.import_module(f"examples.{name}").main(seed, out)
        seconds = f"{time.perf_counter() - start:.0f}"
        for row in report.rows:
            table.add_row(name, *row.cells(), seconds)
            name = seconds = ""
        table.add_section()
        wrong += report.wrong
    Console().print(table)
    if wrong:
        raise SystemExit(f"Not as expected: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
