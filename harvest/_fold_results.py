"""What the folds return that have more than one result."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Bool, Int


class Moments(eqx.Module):
    """What [`harvest.folds.moments`][] returns.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        h = harvest.reap(f, {"h": harvest.folds.moments()})(jnp.arange(4.0))["h"]
        assert (h.mean, h.variance) == (1.5, 1.25)
        ```

    **Arguments:**

    - `mean`: over the iterations, of the shape of one value.
    - `variance`: over the iterations, as `jnp.var`.
    """

    mean: Any
    variance: Any


class TopK(eqx.Module):
    """What [`harvest.folds.top_k`][] returns.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda xs: jax.lax.map(lambda x: harvest.sow(x, name="h"), xs)
        h = harvest.reap(f, {"h": harvest.folds.top_k(2)})(jnp.array([1.0, 9.0, 4.0]))["h"]
        assert h.values.tolist() == [9, 4] and h.indices[0].tolist() == [1, 2]
        ```

    **Arguments:**

    - `values`: the `k` largest, largest first: `(k, *shape)`.
    - `indices`: the iterations they come from: for each loop an array like `values`, outermost
        first. -1 where there were fewer than `k`.
    """

    values: Any
    indices: Any


class Stack(eqx.Module):
    """What [`harvest.folds.stack`][] returns.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.while_loop(lambda x: x < 9, lambda x: harvest.sow(2 * x, name="h"), x)

        h = harvest.reap(f, {"h": harvest.folds.stack(8)})(1.0)["h"]
        assert h.values[: h.count].tolist() == [2, 4, 8, 16] and not h.overflow
        ```

    **Arguments:**

    - `values`: those of the first iterations, in the order in which they ran, and zeros behind:
        `(max_steps, *shape)`.
    - `count`: how many times the site ran.
    - `overflow`: whether it ran more than `max_steps` times.
    """

    values: Any
    count: Int[Array, ""]
    overflow: Bool[Array, ""]
