"""What an example shows on the terminal: its progress, and its results beside what is expected."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

# Runtime type checkers do not take an `int` for a `float`.
type Number = int | float


@dataclasses.dataclass(frozen=True)
class Report:
    """Shows an example's progress, and collects its results."""

    console: Console = dataclasses.field(default_factory=Console)
    rows: list[tuple[str, str, str, str, bool]] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A context manager: shows what is being done, then how long it took."""
        start = time.perf_counter()
        with self.console.status(f"{what} ..."):
            yield
        self.console.print(f"{what} [dim]({time.perf_counter() - start:.1f} s)")

    def expect(self, what: str, measured: Number, low: Number, high: Number, because: str) -> None:
        """Adds a row to the table.

        **Arguments:**

        - `what`: the quantity.
        - `measured`: its value.
        - `low`, `high`: what it should lie between; `math.inf` for no bound.
        - `because`: where the expectation comes from.
        """
        ok = low <= measured <= high
        self.rows.append((what, f"{measured:.4g}", _interval(low, high), because, ok))

    def finish(self) -> None:
        """Prints the table.

        **Raises:**

        `SystemExit` if something is not as expected.
        """
        table = Table("", "measured", "expected", "because", "", box=box.SIMPLE)
        for *cells, ok in self.rows:
            table.add_row(*cells, "[green]ok" if ok else "[red]NO")
        self.console.print(table)
        wrong = [what for what, *_, ok in self.rows if not ok]
        if wrong:
            raise SystemExit(f"Not as expected: {', '.join(wrong)}.")


def _interval(low: Number, high: Number) -> str:
    if low == high:
        return f"{low:.4g}"
    if math.isinf(high):
        return f"above {low:.4g}"
    if math.isinf(low):
        return f"below {high:.4g}"
    return f"{low:.4g} to {high:.4g}"
