"""What the research verbs cost: memory of folds, early exit, and sweeps of a grid of patches.

Run as `python -m tests.benchmarks.research`; exits with 1 if a count is off, or if a ratio of times
is past its limit. Times are the minimum of rounds in which all contestants run in turn.
"""

import functools
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import harvest

from . import transformer as model

ROUNDS = 7
failures: list[str] = []


def check(ok: bool, what: str) -> str:
    if not ok:
        failures.append(what)
    return "ok" if ok else "FAILS"


def compiled(fn: Callable, *args: Any) -> Any:
    return jax.jit(fn).lower(*args).compile()


def temp_bytes(fn: Callable, *args: Any) -> int:
    return compiled(fn, *args).memory_analysis().temp_size_in_bytes


# ----------------------------------------------------------------------- folds and early exit


def report_folds() -> None:
    print("\nTemp memory of a fold over the layers, beyond that of the plain model (bytes)")
    weights, x = model.parameters(), model.tokens()
    plain = temp_bytes(model.scanned, weights, x)
    layer, edges = jnp.asarray(3), jnp.linspace(-5.0, 5.0, 101)
    folds = {
        "last": harvest.folds.last(),
        "at(traced)": harvest.folds.at(layer),
        "mean": harvest.folds.mean(),
        "maximum": harvest.folds.maximum(),
        "moments": harvest.folds.moments(),
        "histogram": harvest.folds.histogram(edges),
        "top_k(2)": harvest.folds.top_k(2),
        "every(4)": harvest.folds.every(4),
    }
    whole = temp_bytes(harvest.capture(model.scanned, "neurons"), weights, x) - plain
    value = jax.ShapeDtypeStruct((model.TOKENS, 4 * model.SIZE), x.dtype)
    stack = model.LAYERS * value.size * 4
    # `jnp.histogram` of one value needs room of its own.
    working = {"histogram": temp_bytes(lambda v: jnp.histogram(v, edges)[0], value)}
    for name, fold in folds.items():
        read = harvest.capture(model.scanned, {"neurons": fold})
        result = jax.eval_shape(read, weights, x)[1]["neurons"]
        # The slot of a fold, and the value of one layer that goes into it.
        slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((result, value)))
        beyond = temp_bytes(read, weights, x) - plain
        verdict = check(beyond <= 2 * slot + working.get(name, 0), f"temp memory of {name}")
        print(f"  {name:12} slot {slot:>8}   beyond plain {beyond:>8}   {verdict}")
    print(f"  all layers   stack {stack:>7}   beyond plain {whole:>8}")


def report_early_exit() -> None:
    print("\n`reap` at layer 3 of 12")
    weights, x = model.parameters(), model.tokens()
    at_3 = harvest.reap(model.scanned, {"resid": harvest.folds.at(3)})
    text = compiled(at_3, weights, x).as_text()
    trips = re.findall(r"known_trip_count\D*(\d+)", text)
    print(f"  scanned: trip counts {trips}  {check(trips == ['4'], 'trip count at layer 3')}")
    stacked = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    temp = temp_bytes(at_3, weights, x)
    same = check(temp < stacked / 2, "stacked weights are copied")
    print(f"  scanned: temp {temp} bytes, stacked weights {stacked}  {same}")
    flops = [
        compiled(fn, weights, x).cost_analysis()["flops"]
        for fn in (harvest.reap(model.unrolled, "layers/3/resid"), model.unrolled)
    ]
    share = flops[0] / flops[1]
    print(f"  unrolled: {share:.1%} of the flops  {check(share < 0.4, 'flops at layer 3')}")


# ------------------------------------------------------------------------------------ sweeps

WIDTH = 256  # of the model that is swept


def patched(resid: jax.Array, source: jax.Array, pos: Any) -> jax.Array:
    return resid.at[pos].set(source[pos])


def metric(x: jax.Array) -> jax.Array:
    return x[-1, 0]


def scanned(weights: Any, x: jax.Array) -> jax.Array:
    return metric(model.scanned(weights, x))


def unrolled(weights: Any, x: jax.Array) -> jax.Array:
    return metric(model.unrolled(weights, x))


def layer(weights: Any, x: jax.Array) -> jax.Array:
    return model.layer(weights, x, model.ignore)


def slice_of(weights: Any, i: Any) -> Any:
    return jax.tree.map(lambda w: w[i], weights)


def one_scanned(weights, x, source, where, pos):
    """The patched run, by hand; `where` is the layer."""

    def step(x, row):
        i, weights, source = row
        x = layer(weights, x)
        return jnp.where(i == where, patched(x, source, pos), x), None

    return metric(lax.scan(step, x, (jnp.arange(model.LAYERS), weights, source))[0])


def one_unrolled(weights, x, source, where, pos):
    for i in range(model.LAYERS):
        x = layer(slice_of(weights, i), x)
        x = jnp.where(i == where, patched(x, source[i], pos), x)
    return metric(x)


def whole_grid(one, weights, x, source):
    """One `vmap` over all layers and positions."""
    over_pos = jax.vmap(one, in_axes=(None, None, None, None, 0))
    over_layers = jax.vmap(over_pos, in_axes=(None, None, None, 0, None))
    layers, positions = jnp.arange(model.LAYERS), jnp.arange(model.TOKENS)
    return over_layers(weights, x, source, layers, positions)


def sharing_scanned(weights, x, source):
    """A run for each layer that starts there, from what the plain run has there."""

    def step(x, weights):
        x = layer(weights, x)
        return x, x

    _, resid = lax.scan(step, x, weights)

    def at_layer(i):
        def at_position(pos):
            x = patched(resid[i], source[i], pos)
            run = lambda j, x: layer(slice_of(weights, j), x)
            return metric(lax.fori_loop(i + 1, model.LAYERS, run, x))

        return jax.vmap(at_position)(jnp.arange(model.TOKENS))

    return lax.map(at_layer, jnp.arange(model.LAYERS))


def sharing_unrolled(weights, x, source):
    results = []
    for i in range(model.LAYERS):
        x = layer(slice_of(weights, i), x)

        def at_position(pos, i=i, x=x):
            x = patched(x, source[i], pos)
            for j in range(i + 1, model.LAYERS):
                x = layer(slice_of(weights, j), x)
            return metric(x)

        results.append(jax.vmap(at_position)(jnp.arange(model.TOKENS)))
    return jnp.stack(results)


def python_loop(one, weights, x, source):
    jitted = jax.jit(one)

    def run():
        return np.array(
            [
                [jitted(weights, x, source, i, pos) for pos in range(model.TOKENS)]
                for i in range(model.LAYERS)
            ]
        )

    return run


def interleaved(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The least time of each, in rounds of all."""
    times = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def report_sweep(
    name: str, fn: Callable, one: Callable, sharing: Callable, keys: list[str]
) -> None:
    print(f"\nA sweep of {model.LAYERS} layers x {model.TOKENS} positions, width {WIDTH}, {name}")
    weights = model.parameters(size=WIDTH)
    clean, x = model.tokens(1, WIDTH), model.tokens(2, WIDTH)
    traces = 0

    def counted(weights, x):
        nonlocal traces
        traces += 1
        return fn(weights, x)

    acts = harvest.reap(fn, keys)(weights, clean)
    source = acts[keys[0]] if len(keys) == 1 else jnp.stack([acts[key] for key in keys])
    positions = harvest.grid(pos=jnp.arange(model.TOKENS))
    edit = lambda resid, source, row: patched(resid, source, row["pos"])
    swept = harvest.sweep(counted, acts, edit, positions)

    def together(weights, x, source):
        return whole_grid(one, weights, x, source)

    start = time.perf_counter()
    mine = jax.block_until_ready(swept(weights, x))
    first = time.perf_counter() - start
    mine = np.asarray(mine[keys[0]] if len(keys) == 1 else jnp.stack([mine[k] for k in keys]))
    programs = {
        "sweep": functools.partial(swept, weights, x),
        "one vmap": functools.partial(jax.jit(together), weights, x, source),
        "sharing": functools.partial(jax.jit(sharing), weights, x, source),
        "loop": python_loop(one, weights, x, source),
    }
    for label, run in programs.items():
        if label != "sweep":
            error = float(np.abs(np.asarray(run()) - mine).max())
            print(f"  equal to {label:9} to {error:.1e}  {check(error < 1e-4, f'{name}: {label}')}")
    times = interleaved(programs)
    print(f"  traces {traces}  {check(traces == 1, f'{name}: traces')}   first call {first:.1f} s")
    for other, limit in (("one vmap", 0.6), ("sharing", 1.25), ("loop", 1 / 3)):
        ratio = times["sweep"] / times[other]
        verdict = check(ratio <= limit, f"{name}: time beside {other}")
        both = f"{times['sweep']:.2f} s, {other:9} {times[other]:.2f} s"
        print(f"  {both}: {ratio:.2f} of {limit:.2f}  {verdict}")
    for label, program in (("sweep", swept), ("one vmap", together), ("sharing", sharing)):
        args = (weights, x) if label == "sweep" else (weights, x, source)
        print(f"  temp memory of {label:9} {temp_bytes(program, *args) / 1e6:8.1f} MB")


def main() -> int:
    report_folds()
    report_early_exit()
    report_sweep("scanned", scanned, one_scanned, sharing_scanned, ["resid"])
    keys = [f"layers/{i}/resid" for i in range(model.LAYERS)]
    report_sweep("unrolled", unrolled, one_unrolled, sharing_unrolled, keys)
    for failure in failures:
        print(f"FAILS: {failure}")
    print("\nall as it should be" if not failures else f"\n{len(failures)} checks fail")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
