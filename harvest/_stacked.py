"""Reading unrolled layers like scanned ones."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ._errors import SelectError, UnknownSiteError, nearest
from ._globs import glob
from ._lowered import on_arrays
from ._types import describe


def stacked(acts: Mapping[str, Any], pattern: str) -> Any:
    """The values of all keys that match, stacked on a new leading axis.

    So that unrolled layers read like scanned ones.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        def f(x):
            for i in range(12):
                with harvest.scope(f"layers/{i}"):
                    x = harvest.sow(x + 1, name="h")
            return x

        acts = harvest.reap(f)(jnp.zeros(3))
        assert (harvest.stacked(acts, "layers/*/h")[:, 0] == jnp.arange(1, 13)).all()
        ```

    **Arguments:**

    - `acts`: what [`harvest.reap`][] returned, or any mapping with keys as it makes them.
    - `pattern`: a glob. Matching keys are stacked in natural order: `layers/2` before `layers/10`.

    **Returns:**

    A pytree like the values, each leaf with a new leading axis as long as there are keys.

    **Raises:**

    - [`harvest.UnknownSiteError`][]: no key matches.
    - [`harvest.SelectError`][]: the values are not of one structure and shape, or `pattern` is no
        string.
    """
    if not isinstance(pattern, str):
        raise SelectError(
            f"`stacked` got {pattern!r} of type `{type(pattern).__name__}`; wanted a glob on keys"
        )
    matching = sorted(filter(glob(pattern), acts), key=_natural)
    if not matching:
        raise UnknownSiteError(
            f"`stacked`: {pattern!r} matches no key; {nearest(pattern, dict.fromkeys(acts))}"
        )
    first = acts[matching[0]]
    for key in matching[1:]:
        if _types(acts[key]) != _types(first):
            raise SelectError(
                f"`stacked`: cannot stack {key!r}, which is {_types(acts[key])}, on "
                f"{matching[0]!r}, which is {_types(first)}"
            )
    return jax.tree.map(_stack, *(acts[key] for key in matching))


def _stack(*leaves: Any) -> Any:
    return on_arrays(lambda *rows: jnp.stack(rows), *leaves)


def _natural(key: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _types(value: Any) -> Any:
    return jax.tree.map(describe, value)
