"""What harvest costs: counts from lowered and compiled programs, and times side by side.

Run as `python -m tests.benchmarks.overhead`; exits with 1 if a count differs from that of the
program without harvest, or if a ratio of times is past its limit.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp

import harvest
from examples.models import smollm2
from harvest._walk import Walk

from . import transformer as model

COUNTS = ("flops", "bytes", "instructions", "temp bytes")
failures: list[str] = []


def check(ok: bool, what: str) -> str:
    if not ok:
        failures.append(what)
    return "ok" if ok else "DIFFERS"


def total(fn: Callable) -> Callable:
    """A scalar of all that `fn` returns, so that gradients pass through outputs and sites."""
    return lambda *args: sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(fn(*args)))


# ------------------------------------------------------------------- free when off: law 4


def lowered(fn: Callable, *args: Any) -> str:
    return jax.jit(fn).lower(*args).as_text()


def programs() -> dict[str, tuple[Callable, Callable]]:
    """Each with sows, and without."""
    forms = {
        "unrolled": (
            model.unrolled,
            functools.partial(model.unrolled, see=model.ignore, scope=model.no_scope),
        ),
        "scanned": (model.scanned, functools.partial(model.scanned, see=model.ignore)),
        "jit per layer": (
            functools.partial(model.unrolled, wrap=jax.jit),
            functools.partial(model.unrolled, wrap=jax.jit, see=model.ignore, scope=model.no_scope),
        ),
        "remat per layer": (
            functools.partial(model.unrolled, wrap=jax.checkpoint),
            functools.partial(
                model.unrolled, wrap=jax.checkpoint, see=model.ignore, scope=model.no_scope
            ),
        ),
        "scan of remat": (
            functools.partial(model.scanned, wrap=jax.checkpoint),
            functools.partial(model.scanned, wrap=jax.checkpoint, see=model.ignore),
        ),
    }
    return forms


def report_lowered_text() -> None:
    print("\nLowered text with and without sows (characters)")
    weights, x = model.parameters(), model.tokens()
    batch = jnp.stack([x, x])
    transforms: dict[str, Callable[[Callable], tuple[Callable, Any]]] = {
        "forward": lambda f: (f, x),
        "grad": lambda f: (jax.grad(total(f)), x),
        "vmap": lambda f: (jax.vmap(f, in_axes=(None, 0)), batch),
        "vmap axis 2": lambda f: (
            jax.vmap(f, in_axes=(None, 2)),
            jnp.moveaxis(batch, 0, 2),
        ),
        "grad of remat": lambda f: (jax.grad(total(jax.checkpoint(f))), x),
    }
    for name, (sown, plain) in programs().items():
        for label, transform in transforms.items():
            (f, arg), (g, _) = transform(sown), transform(plain)
            with_sows, without = lowered(f, weights, arg), lowered(g, weights, arg)
            verdict = check(with_sows == without, f"lowered text of {name}, {label}")
            print(f"  {name:16} {label:14} {len(with_sows):>8} {len(without):>8}  {verdict}")


# ---------------------------------------------------------------- no overhead when on: law 5


def counts(fn: Callable, *args: Any) -> tuple[int, ...]:
    compiled = jax.jit(fn).lower(*args).compile()
    cost = compiled.cost_analysis()
    memory = compiled.memory_analysis()
    instructions = sum(" = " in line for line in compiled.as_text().splitlines())
    return (
        int(cost["flops"]),
        int(cost["bytes accessed"]),
        instructions,
        memory.temp_size_in_bytes,
    )


def report_capture() -> None:
    print("\nCompiled `capture` beside the function that returns the same values by hand")
    weights, x = model.parameters(), model.tokens()
    pairs = {
        "unrolled": (model.unrolled, model.unrolled_by_hand),
        "scanned": (model.scanned, model.scanned_by_hand),
        "jit per layer": (
            functools.partial(model.unrolled, wrap=jax.jit),
            functools.partial(model.unrolled_by_hand, wrap=jax.jit),
        ),
    }
    for name, (sown, by_hand) in pairs.items():
        for label, transform in {
            "forward": lambda f: f,
            "grad": lambda f: jax.grad(total(f)),
        }.items():
            mine = counts(transform(harvest.capture(sown)), weights, x)
            theirs = counts(transform(by_hand), weights, x)
            for count, a, b in zip(COUNTS, mine, theirs, strict=True):
                verdict = check(a == b, f"{count} of capture, {name}, {label}")
                print(f"  {name:14} {label:8} {count:13} {a:>14} {b:>14}  {verdict}")


# ------------------------------------------------------------------------------ dispatch


def call_time(fn: Callable, *args: Any, calls: int = 2000) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn(*args)
    return (time.perf_counter() - start) / calls


def report_dispatch() -> None:
    print("\nTime of one call of a jitted function (us, median of 15 alternating rounds)")
    x = jnp.ones(8)
    sown = jax.jit(lambda x: harvest.sow(x * 2, name="h") + 1)
    bare = jax.jit(lambda x: (harvest.sow(x * 2, name="h"), x * 2 + 1)[1])
    plain = jax.jit(lambda x: x * 2 + 1)
    for fn in (sown, bare, plain):
        fn(x)
    rounds = [[call_time(fn, x) for fn in (sown, bare, plain)] for _ in range(15)]
    for name, column in (("used sow", 0), ("bare sow", 1)):
        ratio = statistics.median(row[column] / row[2] for row in rounds)
        mine = statistics.median(row[column] for row in rounds) * 1e6
        theirs = statistics.median(row[2] for row in rounds) * 1e6
        # Off the C++ fast path the ratio would be 3 to 15.
        verdict = check(ratio < 2, f"call time with a {name}")
        print(f"  {name:14} {mine:8.1f} {theirs:8.1f}  ratio {ratio:.2f}  {verdict}")


# -------------------------------------------------------------------------------- traces


def report_traces() -> None:
    print("\nTraces of the user's function")
    weights, x = model.parameters(), model.tokens()
    traces = 0

    def fn(weights, x):
        nonlocal traces
        traces += 1
        return model.scanned(weights, x)

    harvest.sites(fn)(weights, x)
    harvest.capture(fn)(weights, x)
    harvest.reap(fn, "resid")(weights, x)
    print(f"  sites, capture and reap: {traces}  {check(traces == 1, 'traces, shared')}")
    harvest.plant(fn, {"z": harvest.add(1.0)})(weights, x)
    harvest.plant(fn, {"resid": harvest.add(1.0)})(weights, x)
    print(f"  and all plants: {traces}  {check(traces == 2, 'traces of plants')}")
    before = traces
    for step in range(5):
        new = jax.tree.map(lambda w: w + step, weights)  # noqa: B023
        harvest.capture(fn)(new, x + step)
        harvest.reap(fn, ["z", "resid"])(new, x)
        harvest.plant(fn, {"z": harvest.add(float(step))})(new, x)
    repeated = traces - before
    print(f"  per repeated call: {repeated}  {check(repeated == 0, 'traces, repeated')}")


def report_nesting() -> None:
    print("\nSub-jaxprs visited, for jits nested to a depth")
    visits = {}
    for depth in (12, 24, 48):
        fn = lambda x: harvest.sow(jnp.sin(x), name="h")
        for _ in range(depth):
            fn = jax.jit(lambda x, fn=fn: fn(x) + 1)
        walk = Walk()
        start = time.perf_counter()
        walk.entries(jax.make_jaxpr(fn)(1.0).jaxpr)
        harvest.capture(fn)(1.0)
        seconds = time.perf_counter() - start
        visits[depth] = walk.visits
        print(f"  depth {depth:3}: {walk.visits:4} visits, {seconds:.2f} s to trace and compile")
    check(all(n <= depth + 1 for depth, n in visits.items()), "visits of nested jits")


# ------------------------------------------------------------------------------- SmolLM2


def report_smollm2() -> None:
    print("\nSmolLM2-135M, scanned, 32 tokens")
    net, _ = smollm2.load()
    arrays, static = eqx.partition(net, eqx.is_array)
    tokens = jnp.arange(32)
    model = lambda arrays, tokens: eqx.combine(arrays, static)(tokens)
    sites = harvest.sites(model)(arrays, tokens)
    print(f"  {len(sites)} sites, {sites.nbytes / 1e6:.1f} MB if all are collected")

    texts = {}
    for label, fn in {"forward": model, "grad": jax.grad(total(model))}.items():
        texts[label] = lowered(fn, arrays, tokens)
    with mock.patch.object(harvest, "sow", lambda value, *, name: value):
        bare = lambda arrays, tokens: model(arrays, tokens)  # not yet traced
        assert len(harvest.sites(bare)(arrays, tokens)) == 0
        for label, fn in {"forward": bare, "grad": jax.grad(total(bare))}.items():
            same = check(lowered(fn, arrays, tokens) == texts[label], f"SmolLM2 text, {label}")
            print(f"  lowered text with and without sows, {label}: {same}")

    flops = {}
    captured = harvest.capture(model, "resid_post")
    for name, fn in (("plain", model), ("capture", captured)):
        start = time.perf_counter()
        low = jax.jit(fn).lower(arrays, tokens)
        traced = time.perf_counter()
        compiled = low.compile()
        done = time.perf_counter()
        flops[name] = compiled.cost_analysis()["flops"]
        temp = compiled.memory_analysis().temp_size_in_bytes
        print(
            f"  {name:8} trace {traced - start:5.2f} s   compile {done - traced:5.2f} s   "
            f"flops {flops[name]:.0f}   temp {temp / 1e6:.1f} MB"
        )
    print(f"  flops: {check(flops['plain'] == flops['capture'], 'flops of SmolLM2')}")


def main() -> int:
    report_lowered_text()
    report_capture()
    report_dispatch()
    report_traces()
    report_nesting()
    report_smollm2()
    for failure in failures:
        print(f"DIFFERS: {failure}")
    print("\nall counts equal" if not failures else f"\n{len(failures)} counts differ")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
