"""The same transformer in numpy, and what there is to compare: values, interventions, gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .model import LAYERS, SITES, Way, evaluate, inputs

STEP = 1e-30  # of derivatives by complex steps, which are exact


class ByHand(Way):
    """Sites are appended to lists, and edits are functions of the value and the layer."""

    np = np

    def __init__(self, edits: Mapping[str, Callable[[Any, int], Any]] = {}):
        self.edits = edits
        self.seen: dict[str, list[Any]] = {name: [] for name in (*SITES, "gresid")}

    def see(self, value, name):
        layer = len(self.seen[name])
        value = self.edits[name](value, layer) if name in self.edits else value
        self.seen[name].append(value)
        return value

    see_cotangent = see

    def loop(self, layer, x, weights):
        for n in range(LAYERS):
            x = layer(self, {name: w[n] for name, w in weights.items()}, x)
        return x


def run(seed: int, edits: Mapping[str, Callable[[Any, int], Any]] = {}) -> tuple[Any, Any]:
    """The outputs, and the values at each site, the layers in front."""
    way = ByHand(edits)
    out = evaluate(way, *inputs(seed))
    return out, {name: np.stack(values) for name, values in way.seen.items()}


def gradient(name: str) -> np.ndarray:
    """That of the loss, with respect to the values at a site."""
    like = run(0)[1][name]
    result = np.zeros(like.shape)
    for index in np.ndindex(like.shape):
        step = np.zeros(like.shape, complex)
        step[index] = STEP * 1j
        nudge = {name: lambda value, layer, step=step: value + step[layer]}
        result[index] = run(0, nudge)[0]["loss"].imag / STEP
    return result


def swept(factors: np.ndarray) -> np.ndarray:
    """The loss when the residual stream behind one layer is scaled, for each layer and factor."""

    def loss(chosen: int, factor: float) -> float:
        return run(0, {"resid": lambda x, layer: x * factor if layer == chosen else x})[0]["loss"]

    return np.array([[loss(layer, factor) for factor in factors] for layer in range(LAYERS)])
