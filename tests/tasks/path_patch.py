"""How much of a logit difference goes from head 0 of layer 0 to the keys, only, of layer 1.

Two attention-only layers with norms. The page is docs/how-to/path-patching.md.
"""

import jax
import jax.numpy as jnp

import harvest

VOCAB, T, D, HEADS, K = 13, 6, 16, 4, 5


def heads(w, *read):
    """What each head writes, given what its queries, its keys and its values read."""
    norm = lambda x: jax.nn.standardize(x) * w["gain"]
    q, k, v = map(lambda x, w: jnp.einsum("td,hdk->htk", norm(x), w), read, w["qkv"])
    pattern = jax.nn.softmax(q @ k.mT / K**0.5, where=jnp.tril(jnp.ones((T, T), bool)))
    return pattern @ v @ w["output"]


def difference(params, tokens):
    """Of the logits of two tokens, at the last position."""
    x = params["embed"][tokens] + params["position"]
    for i, w in enumerate(params["layers"]):
        with harvest.scope(f"layers/{i}"):
            # The readers are named before the norm, where the stream is a sum.
            read = [harvest.sow(x, name=f"{name}_in") for name in "qkv"]
            x = x + harvest.sow(heads(w, *read), name="result").sum(axis=0)
    return x[-1] @ (params["embed"][2] - params["embed"][11])


def by_hand(params, tokens, to_keys):
    """`difference` with `to_keys` added to what the keys of layer 1 read; and layer 0's heads."""
    x = params["embed"][tokens] + params["position"]
    written = heads(params["layers"][0], x, x, x)
    x = x + written.sum(axis=0)
    x = x + heads(params["layers"][1], x, x + to_keys, x).sum(axis=0)
    return x[-1] @ (params["embed"][2] - params["embed"][11]), written


def main() -> None:
    keys = iter(jax.random.split(jax.random.key(1), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape)
    shapes = {"qkv": (3, HEADS, D, K), "output": (HEADS, K, D), "gain": (D,)}
    layers = [{name: draw(*shape) / 2 for name, shape in shapes.items()} for _ in range(2)]
    params = {"embed": draw(VOCAB, D), "position": draw(T, D), "layers": layers}
    clean, corrupted = jnp.array([[1, 4, 7, 3, 4, 9], [1, 4, 5, 3, 4, 9]])

    head_0 = lambda tokens: harvest.reap(difference)(params, tokens)["layers/0/result"][0]
    edit = {"layers/1/k_in": harvest.add(head_0(corrupted) - head_0(clean))}
    effect = harvest.plant(difference, edit)(params, clean) - difference(params, clean)
    (before, at_clean), (after, at_corrupted) = (by_hand(params, x, 0) for x in (clean, corrupted))
    expected = by_hand(params, clean, at_corrupted[0] - at_clean[0])[0] - before
    assert abs(expected) > 1e-2 and jnp.allclose(effect, expected, atol=1e-4)
    print(f"head 0.0 -> keys of layer 1: {effect:+.4f} of {after - before:+.4f}")


if __name__ == "__main__":
    main()
