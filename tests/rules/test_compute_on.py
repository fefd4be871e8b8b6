"""Where something is computed, and in which memory its outputs are, stays as it is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on

import harvest
from harvest import add, at, capture, folds, plant, reap, sites, sow

X = jnp.array([0.3, -1.2, 2.0])
XS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
ON_HOST = {"compute_type": "device_host", "out_memory_spaces": DEVICE}


def tagged(value):
    return sow(value, name="h")


def untagged(value):
    return value


def f(x, tag=tagged):
    return compute_on(lambda x: 2 * tag(jnp.sin(x)), **ON_HOST)(x) + 1


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def lowered(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def on_host(fn, *args):
    """How many calls are on the host, in the lowered text."""
    calls = re.findall(r"call @compute_on\w*\(.*", lowered(fn, *args))
    assert all('frontend_attributes = {_xla_compute_type = "host"}' in call for call in calls)
    return len(calls)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_values_are_collected_on_the_host(around):
    close(capture(around(f))(X), (2 * np.sin(X) + 1, {"h": (np.sin(X),)}))
    assert [site.key for site in sites(around(f))(X)] == ["h"]
    assert on_host(capture(around(f)), X) == on_host(reap(around(f)), X) == 1
    # Everything that is computed in it is told so as well.
    sines = re.findall(r"stablehlo.sine.*", lowered(capture(around(f)), X))
    assert len(sines) == 1 and '_xla_compute_type = "host"' in sines[0]


def test_gradients_forward_mode_and_vmap():
    loss = lambda x: jnp.sum(f(x))

    def collected(x):
        out, acts = capture(loss)(x)
        return out, acts["h"][0]

    grad = jax.grad(collected, has_aux=True)
    close(grad(X), (2 * np.cos(X), np.sin(X)))
    close(capture(jax.grad(loss))(X), (2 * np.cos(X), {"h": (np.sin(X),)}))
    assert (
        on_host(grad, X) == on_host(capture(jax.grad(loss)), X) == on_host(jax.grad(loss), X) == 2
    )
    close(jax.grad(lambda x: jnp.sum(collected(x)[1]))(X), np.cos(X))

    (out, acts), (dout, dacts) = jax.jvp(capture(f), (X,), (jnp.ones(3),))
    close((out, dout), (2 * np.sin(X) + 1, 2 * np.cos(X)))
    close((acts["h"][0], dacts["h"][0]), (np.sin(X), np.cos(X)))
    for fn in (jax.vmap(capture(f)), capture(jax.vmap(f))):
        close(fn(XS), (2 * np.sin(XS) + 1, {"h": (np.sin(XS),)}))
        assert on_host(fn, XS) == 1


def test_scans_around_and_inside():
    def step(x):
        return lax.scan(lambda x, i: (0.5 * tagged(jnp.sin(x) + i), None), x, jnp.arange(2.0))[0]

    def loop(x):
        return lax.scan(lambda x, _: (compute_on(step, **ON_HOST)(x), None), x, length=3)[0]

    def by_hand(x, edit=lambda h, i, j: h):
        values = []
        for i in range(3):
            row = []
            for j in range(2):
                row.append(edit(np.sin(x) + j, i, j))
                x = 0.5 * row[-1]
            values.append(np.stack(row))
        return x, np.stack(values)

    out, values = by_hand(X)
    close(capture(loop, mode="strict")(X), (out, {"h": values}))
    close(reap(loop, {"h": folds.maximum()})(X), {"h": values.max((0, 1))})
    assert on_host(capture(loop), X) == 1
    close(plant(loop, reap(loop)(X))(X), loop(X))
    edited = plant(loop, {"h": at((1, 0), add(1.0))})
    close(edited(X), by_hand(X, lambda h, i, j: h + ((i, j) == (1, 0)))[0])
    assert on_host(edited, X) == 1


def test_values_are_replaced_and_edited():
    close(plant(f, {"h": X})(X), 2 * X + 1)
    close(plant(f, {"h": jnp.square})(X), 2 * np.sin(X) ** 2 + 1)
    close(plant(f, reap(f)(X))(X), f(X))
    close(plant(f, capture(f)(X)[1], mode="append")(X), f(X))
    close(jax.vmap(plant(f, {"h": X}))(XS), np.broadcast_to(2 * X + 1, (2, 3)))
    assert on_host(plant(f, {"h": X}), X) == 1
    close(jax.grad(lambda x: jnp.sum(plant(f, {"h": jnp.square})(x)))(X), 4 * np.sin(X) * np.cos(X))
    close(harvest.grad(lambda x: jnp.sum(f(x) ** 2))(X), {"h": 4 * (2 * np.sin(X) + 1)})


# ------------------------------------------------------------------------------------ memory spaces


def offloaded(x):
    """`h` is in the memory of the host, `g` in that of the device, as are the two outputs."""

    def body(on_host, on_device):
        h = sow(2 * on_host, name="h")
        return h + h, sow(3 * on_device, name="g")

    spaces = (HOST, DEVICE)
    call = compute_on(body, compute_type="device_host", out_memory_spaces=spaces)
    return call(jax.device_put(x, HOST), x)


def spaces(fn, *args):
    avals = jax.make_jaxpr(fn)(*args).out_avals
    return [aval.memory_space for aval in avals]


def test_memory_spaces_of_outputs_and_of_what_is_collected_stay():
    close(capture(offloaded)(X), ((4 * X, 3 * X), {"h": (2 * X,), "g": (3 * X,)}))
    out, acts = capture(offloaded)(X)
    assert [x.sharding.memory_kind for x in (*out, *acts["h"], *acts["g"])] == [
        *("pinned_host", "device"),
        *("pinned_host", "device"),
    ]
    assert spaces(capture(offloaded, ["g", "h"]), X) == [HOST, DEVICE, DEVICE, HOST]
    assert spaces(reap(offloaded), X) == [DEVICE, HOST]
    assert spaces(lambda x: plant(offloaded, {"g": 0 * x})(x), X) == [HOST, DEVICE]


def test_values_are_planted_into_the_memory_of_their_site():
    acts = reap(offloaded)(X)
    close(plant(offloaded, acts)(X), offloaded(X))
    close(plant(offloaded, {"h": X})(X), (2 * X, 3 * X))  # from the device
    close(plant(offloaded, {"h": lambda h: h * h})(X), (8 * X**2, 3 * X))
    assert spaces(plant(offloaded, {"h": X}), X) == [HOST, DEVICE]

    def fn(x):  # where values of two memories do not mix
        x = jax.device_put(x, HOST)
        return lax.cond(x.size > 0, lambda x: sow(2 * x, name="h") + x, lambda x: x, x)

    close(capture(fn)(X)[1]["h"][0].branches[1], 2 * X)
    close(plant(fn, {"h": X})(X), 2 * X)
    close(plant(fn, {"h": add(X)})(X), 4 * X)
    close(plant(fn, reap(fn)(X))(X), fn(X))


def test_options_of_the_compiler_stay():
    options = {"compiler_options": {"xla_some_option": True}}

    def fn(x):
        return compute_on(lambda x: 2 * tagged(jnp.sin(x)), **ON_HOST, **options)(x)

    (config,) = re.findall(r'backend_config = "(\{.*?\})"', lowered(fn, X))
    assert "xla_some_option" in config
    assert config in lowered(capture(fn), X)


def test_sows_are_free_in_lowered_programs():
    def text(transform, tag, arg):
        def run(x):
            return f(x, tag)

        return lowered(transform(run), arg)

    grad = lambda f: jax.grad(lambda x: jnp.sum(f(x)))
    for transform, arg in ((lambda f: f, X), (grad, X), (jax.vmap, XS)):
        assert text(transform, tagged, arg) == text(transform, untagged, arg)


def test_nans_are_found_in_the_body():
    fn = compute_on(lambda x: jnp.log(tagged(x)), **ON_HOST)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as info:
        capture(fn)(-jnp.ones(2))
    assert any("`log`" in note for note in info.value.__notes__)
