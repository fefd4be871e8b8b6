"""What is run in every way, on however many processes, and what it has to give."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import harvest
from harvest import capture, folds, grad, jvp, plant, reap, sweep

from . import by_hand
from .model import SITES, Jit

FACTORS = np.array([0.0, 0.5, 2.0], np.float32)


class Case(NamedTuple):
    name: str
    run: Callable[[], Any]
    wanted: Any  # a pytree of numpy arrays: the same in every way, but for how shards are stacked


def cases(way: Jit) -> Iterator[Case]:
    weights, x = way.arguments()
    loss = lambda *args: way(*args)["loss"]
    out, sown = by_hand.run(0)
    _, elsewhere = by_hand.run(1)
    forward = {name: way.collected(sown[name], name) for name in SITES}

    def at_sites(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays, as they are collected."""
        return {
            name: way.place(way.collected(v, name), way.spec(name)) for name, v in values.items()
        }

    def edited(**edits: Callable[[Any, int], Any]) -> Any:
        return by_hand.run(0, edits)[0]

    captured = capture(way, mode="strict")
    yield Case("capture", lambda: captured(weights, x), (out, forward))
    yield Case("capture in jit", lambda: jax.jit(captured)(weights, x), (out, forward))
    yield Case("round trip", lambda: plant(way, reap(way)(weights, x))(weights, x), out)

    select = {"pattern": folds.mean(), "resid": folds.last()}
    wanted = {"pattern": sown["pattern"].mean(axis=0), "resid": sown["resid"][-1]}
    yield Case("folds", lambda: reap(way, select)(weights, x), wanted)

    for name in SITES:
        planted = edited(**{name: lambda _, layer, name=name: elsewhere[name][layer]})
        run = lambda name=name: plant(way, at_sites({name: elsewhere[name]}))(weights, x)
        yield Case(f"plant {name}", run, planted)

    doubled = edited(neurons=lambda value, layer: 2 * value)
    yield Case("edit", lambda: plant(way, {"neurons": lambda v: 2 * v})(weights, x), doubled)

    direction = np.linspace(-1, 1, sown["resid"].shape[-1], dtype=np.float32)
    steered = edited(resid=lambda value, layer: value + direction)
    yield Case("steer", lambda: plant(way, {"resid": harvest.add(direction)})(weights, x), steered)

    cotangents = {"resid": by_hand.gradient("resid")}
    yield Case("grad", lambda: grad(loss, "resid")(weights, x), cotangents)
    perturbed = {"gresid": by_hand.gradient("gresid")}
    seen = lambda: reap(jax.grad(loss, argnums=1), "gresid")(weights, x)
    yield Case("perturb", seen, perturbed)

    change = elsewhere["resid"] - sown["resid"]
    along = (cotangents["resid"] * change).sum()
    pushed = lambda: jvp(loss, at_sites({"resid": change}), "resid")(weights, x)[:2]
    yield Case("jvp", pushed, (out["loss"], along))

    scaled = lambda value, factor: value * factor
    swept = {"resid": by_hand.swept(FACTORS)}
    yield Case(
        "sweep", lambda: sweep(loss, "resid", scaled, jnp.asarray(FACTORS))(weights, x), swept
    )

    def broken(weights: Any, x: Any) -> Any:
        return way({**weights, "up": weights["up"] * jnp.inf}, x)

    run = lambda: np.asarray(harvest.debug.nonfinite(broken)(weights, x)[0].key == "neurons")
    yield Case("nonfinite", run, np.asarray(True))
