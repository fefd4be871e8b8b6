"""`sweep` and `attribute` in `shard_map`, where edits see one shard, against numpy.

The programs are linear in each site, so that an estimate of first order is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

from harvest import attribute, plant, reap, scale, sow, sweep
from tests.shards import P

LAYERS, SHARDS, EACH = 3, 4, 2
X = np.linspace(-1, 2, SHARDS * EACH, dtype=np.float32)
OTHER = np.cos(np.arange(LAYERS * X.size, dtype=np.float32)).reshape(LAYERS, X.size)
FACTORS = np.linspace(0.5, 1.5, LAYERS, dtype=np.float32)


def program(kind, check_vma, spec):
    mesh = jax.make_mesh((SHARDS, 2), ("i", "j"), axis_types=(kind, kind))

    def f(x):
        def layer(x, factor):
            h = sow(factor * x, name="h", spec=spec)
            return h + lax.psum(h.sum(), "i") / 10, None

        body = lambda x: lax.scan(layer, x, jnp.asarray(FACTORS))[0]
        out = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
        return (out(x) * jnp.arange(1.0, 1.0 + x.size)).sum()

    return f, jax.device_put(X, NamedSharding(mesh, P("i")))


def by_hand(edit):
    """The result for an edit of the value of each layer, called as `edit(value, layer)`."""
    results = []
    for chosen in range(LAYERS):
        x = X.astype(np.float64)
        for layer, factor in enumerate(FACTORS):
            x = factor * x
            if layer == chosen:
                x = edit(x, layer)
            x = x + x.sum() / 10
        results.append((x * np.arange(1, 1 + x.size)).sum())
    return results


def first_of_each(x, layer):
    x = x.reshape(SHARDS, EACH).copy()
    x[:, 0] = 5
    return x.reshape(-1)


def by_shard(x, layer):
    return x * np.repeat(np.arange(SHARDS), EACH)


EDITS = {
    "index": (lambda h: h.at[0].set(5.0), first_of_each),
    "axis index": (lambda h: h * lax.axis_index("i").astype(h.dtype), by_shard),
    "communication": (lambda h: h * 0 + lax.pmean(h.sum(), "i"), lambda x, _: 0 * x + x.sum() / 4),
    "constant": (scale(0.5), lambda x, _: x / 2),
}
everywhere = [
    pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]),
    pytest.mark.parametrize("check_vma", [True, False]),
    pytest.mark.parametrize("spec", [None, P("i")], ids=["stacked", "spec"]),
    pytest.mark.parametrize("transform", [sweep, attribute]),
]


def on_every(test):
    for mark in everywhere:
        test = mark(test)
    return test


@on_every
@pytest.mark.parametrize("edit, wanted", EDITS.values(), ids=EDITS)
def test_edits(edit, wanted, transform, spec, check_vma, kind):
    f, x = program(kind, check_vma, spec)
    got = transform(f, "h", edit)(x)["h"]
    np.testing.assert_allclose(got, by_hand(wanted), rtol=1e-4)


@on_every
def test_sources_and_grids(transform, spec, check_vma, kind):
    f, x = program(kind, check_vma, spec)
    h = reap(f)(x)["h"]
    source = {"h": jnp.asarray(as_collected(h, OTHER))}
    edit = lambda h, source, row: h + row * source
    rows = jnp.array([-1.0, 0.25])
    got = transform(f, source, edit, rows)(x)["h"]
    wanted = [by_hand(lambda x, layer, r=r: x + r * OTHER[layer]) for r in np.asarray(rows)]
    np.testing.assert_allclose(got, np.transpose(wanted), rtol=1e-4)
    # An operand of the global form.
    mask = as_collected(h, np.stack([X > 0] * LAYERS))[0].astype(np.float32)
    got = transform(f, "h", scale(jnp.asarray(mask)))(x)["h"]
    np.testing.assert_allclose(got, by_hand(lambda x, _: x * (X > 0)), rtol=1e-4)
    np.testing.assert_allclose(plant(f, {"h": h})(x), f(x), rtol=1e-5)


def as_collected(like, values):
    """Values of shape (layers, 8), with shards stacked where `like` has them stacked."""
    if like.shape == values.shape:
        return values
    copies = like.shape[1] // SHARDS  # along `j`, where nothing says that they are the same
    return np.repeat(values.reshape(LAYERS, SHARDS, EACH), copies, axis=1)
