"""What harvest costs on a mesh: collectives and memory, from compiled programs.

Run as `python -m tests.benchmarks.sharding`; exits with 1 if a count, a sharding or the temporary
memory differs from that of the function that returns (or takes) the same values by hand.
"""

import collections
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX starts its backend

import harvest  # noqa: E402

from . import manual, parallel  # noqa: E402

COLLECTIVES = {
    "all-gather": "gather",
    "all-reduce": "reduce",
    "reduce-scatter": "scatter",
    "all-to-all": "to-all",
    "collective-permute": "permute",
}
failures: list[str] = []


class Pair(NamedTuple):
    """A transformed program, and the function that does the same by hand."""

    name: str
    mesh: Any  # that is set
    transformed: Callable[..., Any]
    by_hand: Callable[..., Any]
    args: tuple[Any, ...]


def pairs() -> Iterator[Pair]:
    """All that is compared; the place for further programs."""
    for form in parallel.forms():
        yield from _of_model(form)
    for form in manual.forms():
        yield from _of_shards(form)


def _of_model(form: parallel.Form) -> Iterator[Pair]:
    def pair(what: str, transformed: Callable, by_hand: Callable, *args: Any) -> Pair:
        return Pair(f"{form.name}, {what}", form.mesh, transformed, by_hand, args)

    sown, weights, x = form.sown, form.weights, form.x
    values = form.values(weights, x)
    yield pair("capture", harvest.capture(sown, mode="strict"), form.captured, weights, x)
    yield pair("reap of two", harvest.reap(sown, ["**z", "**neurons"]), form.reaped, weights, x)
    resid = {key: v for key, v in values.items() if key.endswith("resid")}
    plants = {key: v for key, v in values.items() if key.endswith("z")}
    planted = lambda plants, *args: harvest.plant(sown, plants)(*args)
    yield pair("plant", planted, form.planted, plants, weights, x)
    yield pair("edit", harvest.plant(sown, {"**resid": lambda v: 2 * v}), form.edited, weights, x)
    loss = lambda *args: parallel.loss(sown(*args))
    yield pair("grad", harvest.grad(loss, "**resid"), form.grads, weights, x)
    tangents = lambda tangents, *args: harvest.jvp(sown, tangents, "**neurons")(*args)
    yield pair("jvp", tangents, form.tangents, resid, weights, x)
    if form.scanned:
        for name, fold in {"last": harvest.folds.last(), "mean": harvest.folds.mean()}.items():
            reap = harvest.reap(sown, {"pattern": fold})
            yield pair(f"fold {name}", reap, functools.partial(form.folded, name), weights, x)


def _of_shards(form: manual.Form) -> Iterator[Pair]:
    def pair(what: str, transformed: Callable, by_hand: Callable, *args: Any) -> Pair:
        return Pair(f"{form.name}, {what}", form.mesh, transformed, by_hand, (*args, *form.args))

    sown, loss = form.sown, lambda *args: (form.sown(*args) ** 2).sum()
    planted = lambda neurons, *args: harvest.plant(sown, {"neurons": neurons})(*args)
    neurons = form.captured(*form.args)[1]["neurons"]
    yield pair("capture", harvest.capture(sown, mode="strict"), form.captured)
    yield pair("fold last", harvest.reap(sown, {"neurons": harvest.folds.last()}), form.last)
    yield pair("plant", planted, form.planted, neurons)
    yield pair("grad", harvest.grad(loss, "neurons"), form.grads)


# ------------------------------------------------------------------------------- counts


class Counts(NamedTuple):
    collectives: dict[str, int]
    temp: int  # bytes on each device
    outputs: int
    shardings: Any


def counts(fn: Callable, mesh: Any, args: tuple[Any, ...]) -> Counts:
    with jax.set_mesh(mesh):
        compiled = jax.jit(fn).lower(*args).compile()
    # `-start` and `-done` are the halves of one that does not block.
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    memory = compiled.memory_analysis()
    return Counts(
        dict(collections.Counter(found)),
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        compiled.output_shardings,
    )


def same_shardings(a: Any, b: Any, outputs: Any) -> bool:
    flat = zip(*map(jax.tree.leaves, (a, b, outputs)), strict=True)
    return all(mine.is_equivalent_to(theirs, out.ndim) for mine, theirs, out in flat)


def check(ok: bool, what: str) -> str:
    if not ok:
        failures.append(what)
    return "ok" if ok else "DIFFERS"


def report(pair: Pair) -> None:
    mine, theirs = (counts(fn, pair.mesh, pair.args) for fn in (pair.transformed, pair.by_hand))
    with jax.set_mesh(pair.mesh):
        outputs = jax.eval_shape(pair.by_hand, *pair.args)
    collectives = " ".join(
        f"{mine.collectives.get(kind, 0):>3}/{theirs.collectives.get(kind, 0):<3}"
        for kind in COLLECTIVES
    )
    verdicts = {
        "collectives": mine.collectives == theirs.collectives,
        "shardings": same_shardings(mine.shardings, theirs.shardings, outputs),
        "outputs": mine.outputs == theirs.outputs,
        "temp": mine.temp <= theirs.temp,
    }
    verdict = " ".join(
        f"{what} {check(ok, f'{what} of {pair.name}')}" for what, ok in verdicts.items() if not ok
    )
    print(
        f"  {pair.name:34} {collectives}  {mine.outputs:>8} {mine.temp:>8} {theirs.temp:>8}  "
        f"{verdict or 'ok'}"
    )
    specs = {str(sharding.spec) for sharding in jax.tree.leaves(mine.shardings)}
    print(f"    outputs are sharded by {', '.join(sorted(specs))}")


def main() -> int:
    kinds = " ".join(f"{name:^7}" for name in COLLECTIVES.values())
    print("\nCollectives (with harvest/by hand), and bytes on each device (out, temp, by hand)")
    print(f"  {'':34} {kinds}  {'out':>8} {'temp':>8} {'by hand':>8}")
    for pair in pairs():
        report(pair)
    for failure in failures:
        print(f"DIFFERS: {failure}")
    print("\nall counts equal" if not failures else f"\n{len(failures)} counts differ")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
