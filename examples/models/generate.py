"""Text from any model of tokens."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@eqx.filter_jit
def generate(
    model: Callable[[Int[Array, " T"], Int[Array, ""]], Float[Array, "T vocab"]],
    tokens: Int[Array, " prompt"],
    length: Int[Array, ""],
    new: int,
    *,
    key: PRNGKeyArray | None = None,
    temperature: float = 1.0,
) -> Int[Array, " prompt+new"]:
    """Continues a prompt, one token after the other, in one compiled scan.

    The model reads all tokens again for each new one: right for a few dozen of them, and for a
    model that is planted, which is steered while it writes. That is a pytree, so that new values at
    its sites do not retrace.

    **Arguments:**

    - `model`: called as `model(tokens, length)`, with padding at the end.
    - `tokens`, `length`: the prompt, padded at the end, and how many of its tokens are real.
    - `new`: how many tokens to add.
    - `key`: to sample with. Without one, each token is the likeliest.
    - `temperature`: what the logits are divided by, to sample.

    **Returns:**

    The prompt, the new tokens and then padding, `length + new` of which are real.
    """

    def step(tokens: Int[Array, " T"], i: Int[Array, ""]) -> tuple[Int[Array, " T"], None]:
        logits = model(tokens, length + i)[length + i - 1]
        if key is None:
            token = jnp.argmax(logits)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return tokens.at[length + i].set(token.astype(tokens.dtype)), None

    return jax.lax.scan(step, jnp.pad(tokens, (0, new)), jnp.arange(new))[0]
