"""What folds are: functions of the values that were recorded, and of their indices."""

import jax
import jax.numpy as jnp
import numpy as np

from harvest import Fold, folds
from tests.loops import Record

EDGES = np.array([-1.0, -0.3, 0.2, 0.9, 4.0], np.float32)


class Weighted(Fold):
    """Of a user: a sum with weights by iteration, and a count."""

    weight: jax.Array

    def init(self, aval):
        return {"sum": jnp.zeros(aval.shape, aval.dtype)}

    def update(self, state, value, index):
        weight = sum((i.astype(value.dtype) for i in index), self.weight)
        return {"sum": state["sum"] + weight * value}

    def finish(self, state, count):
        return state["sum"], count


def stacked(records: list[Record]) -> np.ndarray:
    return np.stack([record.value for record in records])


def _top(records, k):
    values = stacked(records)
    best = np.argsort(-values, axis=0, kind="stable")[:k]
    indices = [np.array([r.index[n] for r in records])[best] for n in range(len(records[0].index))]
    return (np.take_along_axis(values, best, axis=0), *indices)


def _first(records, room):
    values = np.zeros((room, *records[0].value.shape), np.float32)
    values[: len(records)] = stacked(records)[:room]
    return values, len(records), len(records) > room


def _weighted(records, weight):
    total = sum((weight + sum(r.index)) * r.value for r in records)
    return total, len(records)


def every(records, n, loops):
    numbers = [int(np.ravel_multi_index(r.index, loops)) if loops else 0 for r in records]
    values = np.zeros((-(-int(np.prod(loops)) // n), *records[0].value.shape), np.float32)
    for number, record in zip(numbers, records, strict=True):
        if number % n == 0:
            values[number // n] = record.value
    return values


FOLDS = {
    "last": (folds.last(), lambda r: r[-1].value),
    "mean": (folds.mean(), lambda r: stacked(r).mean(axis=0)),
    "maximum": (folds.maximum(), lambda r: stacked(r).max(axis=0)),
    "count": (folds.count(), len),
    "moments": (folds.moments(), lambda r: (stacked(r).mean(axis=0), stacked(r).var(axis=0))),
    "histogram": (folds.histogram(EDGES), lambda r: np.histogram(stacked(r), EDGES)[0]),
    "top_k": (folds.top_k(2), lambda r: _top(r, 2)),
    "stack": (folds.stack(5), lambda r: _first(r, 5)),
    "overflowing stack": (folds.stack(2), lambda r: _first(r, 2)),
    "weighted": (Weighted(jnp.float32(2)), lambda r: _weighted(r, 2)),
    "of": (folds.mean().of(jnp.sum), lambda r: stacked(r).sum(axis=1).mean()),
}


def same(got, wanted):
    """The same leaves in the same order, to the precision of the dtype."""
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
