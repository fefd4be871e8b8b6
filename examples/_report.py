"""What an example shows on the terminal: its progress, and its results beside what is expected."""

import argparse
import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

# Runtime type checkers do not take an `int` for a `float`.
type Number = int | float

OTHER_RUN = (
    '"Other run": the same experiment, from independent code that was thrown away afterwards '
    "(JAX 0.12.0, Equinox 0.13.8)."
)


def options() -> argparse.Namespace:
    """What the command line says: `--seed N` and `--out FOLDER`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="what is random follows from it")
    parser.add_argument("--out", default="examples/out", help="the folder for figures")
    return parser.parse_args()


class Row(NamedTuple):
    """A quantity, what was measured, and between which bounds it should be by which source."""

    what: str
    measured: Number
    low: Number
    high: Number
    because: str

    @property
    def ok(self) -> bool:
        return self.low <= self.measured <= self.high

    def cells(self) -> tuple[str, ...]:
        """As text: the last cell says whether it is as expected."""
        mark = "[green]ok" if self.ok else "[red]NO"
        expected = _interval(self.low, self.high)
        return self.what, f"{self.measured:.4g}", expected, self.because, mark


class Report:
    """Shows an example's progress, and collects its results and its figures."""

    def __init__(self, out: str | pathlib.Path):
        """**Arguments:**

        - `out`: the folder that figures and other files go to. It is made if it is not there.
        """
        self.console = Console(force_jupyter=False)  # text, in a notebook too
        self.folder = pathlib.Path(out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A context manager: shows what is being done, then how long it took."""
        start = time.perf_counter()
        with self.console.status(f"{what} ..."):
            yield
        self._done(what, start)

    def track[T](self, items: Sequence[T], what: str) -> Iterable[T]:
        """The items, one after the other, with a progress bar; a loop may leave it early."""
        start = time.perf_counter()
        with contextlib.suppress(GeneratorExit):
            quiet = not self.console.is_terminal
            with Progress(console=self.console, transient=True, disable=quiet) as progress:
                yield from progress.track(items, description=what)
        self._done(what, start)

    def save(self, figure: Figure, name: str) -> None:
        """Writes a figure into the folder."""
        figure.savefig(self.folder / name, dpi=150)
        self.console.print(f"Wrote {self.folder / name}")

    def expect(self, what: str, measured: Number, low: Number, high: Number, because: str) -> None:
        """Adds a row to the table.

        **Arguments:**

        - `what`: the quantity.
        - `measured`: its value.
        - `low`, `high`: what it should lie between; `math.inf` for no bound.
        - `because`: where the expectation comes from.
        """
        self.rows.append(Row(what, measured, low, high, because))

    def finish(self) -> "Report":
        """Prints the table."""
        table = Table("", "measured", "expected", "because", "", box=box.SIMPLE)
        for row in self.rows:
            table.add_row(*row.cells())
        self.console.print(table)
        if any("other run" in row.because for row in self.rows):
            self.console.print(OTHER_RUN, style="dim")
        return self

    @property
    def wrong(self) -> list[str]:
        """What is not as expected."""
        return [row.what for row in self.rows if not row.ok]

    @staticmethod
    def run(main: Callable[[int, str], "Report"]) -> None:
        """Runs an example with the [`options`][] of the command line.

        **Raises:**

        `SystemExit` if something is not as expected.
        """
        given = options()
        if wrong := main(given.seed, given.out).wrong:
            raise SystemExit(f"Not as expected: {'; '.join(wrong)}.")

    def _done(self, what: str, start: float) -> None:
        self.console.print(f"{what} [dim]({time.perf_counter() - start:.1f} s)")


def _interval(low: Number, high: Number) -> str:
    if low == high:
        return f"{low:.4g}"
    if math.isinf(high):
        return f"above {low:.4g}"
    if math.isinf(low):
        return f"below {high:.4g}"
    return f"{low:.4g} to {high:.4g}"
