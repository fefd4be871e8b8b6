"""A program as a table: `Line` and `Listing`, which `show` returns."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import jax

from ._columns import aligned, near
from ._listing_html import as_html
from ._sparkline import summary


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A line of a [`harvest.Listing`][].

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        f = lambda x: harvest.sow(jnp.sin(x), name="h") * 2
        first, sine, product, last = harvest.show(f, values=True)(jnp.ones(3))
        assert (first.kind, first.text) == ("input", "a = args[0]")
        assert (sine.text, sine.type, sine.key) == ("b = sin a", "f32[3]", "h")
        assert (sine.value == jnp.sin(jnp.ones(3))).all()
        assert (last.kind, last.text) == ("output", "return c")
        ```

    **Arguments:**

    - `kind`: what it is about:
        - `"input"`, `"constant"`: an argument of the program, or an array that it closes over.
        - `"equation"`: an operation.
        - `"sow"`: what is sown of something else than the operation before, or made visible by
            [`harvest.perturb`][].
        - `"body"`: the heading of a body of the equation before: a branch, an iteration.
        - `"output"`: what the program, or a body, returns.
    - `depth`: how many equations it is inside of.
    - `text`: the operation, with a letter for each value, as `jax.make_jaxpr` prints it. Long
        parameters are left out.
    - `type`: of the results, as `f32[12,128]`, in one iteration of the loops around it.
    - `key`: of the site, where a result of it is sown; several are joined by commas.
    - `source`: the user's file and line.
    - `value`: the results, if values were asked for: an array, or a tuple of several. In loops with
        an axis for each of them, in front; in a `while_loop`, those of the last iteration. None if
        there is none: in a branch that did not run, in what is compiled as a whole. In a branch
        that ran in some iterations of a loop, of these only.
    """

    kind: Literal["input", "constant", "equation", "sow", "body", "output"]
    depth: int
    text: str
    type: str = ""
    key: str = ""
    source: str = ""
    value: Any = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Its cells in the table: program, type, key, value, source."""
        values = " ".join(map(summary, jax.tree.leaves(self.value)))
        return "  " * self.depth + self.text, self.type, self.key, values, near(self.source)


_HEADER = ("program", "type", "key", "value", "source")


class Listing(Sequence[Line]):
    """A program, line by line, as [`harvest.show`][] returns it.

    It prints as a table. A notebook shows it as HTML: with
    [treescope](https://treescope.readthedocs.io), if that is installed and there are values, a
    click on a line opens a heat map of its value.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def model(x):
            layer = lambda x, _: (harvest.sow(jnp.tanh(x), name="h"), None)
            return jax.lax.scan(layer, x, length=4)[0]

        program = harvest.show(model, values=True)(jnp.ones(3))
        (tanh,) = [line for line in program if line.key == "h"]
        assert tanh.text.endswith("tanh c") and tanh.value.shape == (4, 3)
        print(program)
        ```
    """

    def __init__(self, lines: Sequence[Line]):
        self._lines = tuple(lines)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> "Listing": ...
    def __getitem__(self, index):
        return Listing(self._lines[index]) if isinstance(index, slice) else self._lines[index]

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        header, *lines = self._rows()
        return "\n".join([header, "-" * len(header), *lines])

    def _repr_html_(self) -> str:
        return as_html(self._rows(), [jax.tree.leaves(line.value) for line in self])

    def _rows(self) -> list[str]:
        """The header and the lines as text, without the columns that are empty."""
        rows = [line.cells for line in self]
        columns = zip(_HEADER, *rows, strict=True)
        filled: Iterator[tuple[str, ...]] = (c for c in columns if any(c[1:]) or c[0] == _HEADER[0])
        return aligned(zip(*filled, strict=True))
