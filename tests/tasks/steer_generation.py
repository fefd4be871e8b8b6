"""Steer a recurrent model that samples in a scan, from step k on, in one trace; save and load that.

The pages are docs/how-to/steer.md and docs/how-to/save-and-load-interventions.md.
"""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp

import harvest

D, STEPS, traces = 16, 10, []
cell = lambda model, h, token: harvest.sow(model["gru"](model["embed"][token], h), name="hidden")
# The steps are a mask, which is an array: so a new `k` does not compile anew either.
steer = lambda k, push: {"write/hidden": harvest.at(jnp.arange(STEPS) >= k, harvest.add(push))}


def sample(model, prompt, keys):
    def write(carry, key):
        hidden = cell(model, *carry)
        token = jax.random.categorical(key, hidden @ model["embed"].T)
        return (hidden, token), token

    with harvest.scope("read"):
        hidden, _ = jax.lax.scan(lambda h, t: (cell(model, h, t), None), jnp.zeros(D), prompt[:-1])
    with harvest.scope("write"):
        return jax.lax.scan(write, (hidden, prompt[-1]), keys)[1]


def by_hand(model, prompt, keys, k, push):
    hidden, token, tokens = jnp.zeros(D), prompt[-1], []
    for seen in prompt[:-1]:
        hidden = model["gru"](model["embed"][seen], hidden)
    for step, key in enumerate(keys):
        hidden = model["gru"](model["embed"][token], hidden) + (step >= k) * push
        tokens.append(token := jax.random.categorical(key, hidden @ model["embed"].T))
    return jnp.stack(tokens)


def main() -> None:
    a, b, *keys = jax.random.split(jax.random.key(0), 2 + STEPS)
    model = {"embed": jax.random.normal(a, (12, D)), "gru": eqx.nn.GRUCell(D, D, key=b)}
    call = model, jnp.array([3, 1, 4, 1]), jnp.stack(keys)
    # Each trace of what is jitted is a compilation. (`append` returns None.)
    run = eqx.filter_jit(lambda plants: traces.append(1) or harvest.plant(sample, plants)(*call))
    for k, dose in [(4, 0.0), (4, 0.5), (4, 2.0), (7, 2.0)]:
        push = dose * model["embed"][7]  # towards token 7
        tokens = run(steer(k, push))
        assert (tokens == by_hand(*call, k, push)).all()
    path = tempfile.mkdtemp() + "/steer.eqx"
    eqx.tree_serialise_leaves(path, steer(k, push))
    loaded = eqx.tree_deserialise_leaves(path, eqx.filter_eval_shape(steer, 0, push))
    assert (run(loaded) == tokens).all() and len(traces) == 1
    print(f"from step {k} on: {tokens}, from {len(traces)} trace")


if __name__ == "__main__":
    main()
