"""Metadata stays on the calls that have it, and what is collected inside is an output of theirs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import must_fuse_call, xla_metadata_call, xla_metadata_call2

import harvest
from harvest import add, at, capture, folds, plant, reap, sites, sow

X = jnp.array([0.3, -1.2, 2.0])
XS = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
# The metadata of the derivatives, as given, and what a backward pass is then tagged with.
OF_DERIVATIVES = {
    "same": ("same", "forward"),
    "other": ({"tag": "backward"}, "backward"),
    "none": ("drop", None),
}


def tagged(value):
    return sow(value, name="h")


def untagged(value):
    return value


def body(x, tag=tagged):
    return 2 * tag(jnp.sin(x))


def f(x, tag=tagged, **options):
    return xla_metadata_call2(lambda x: body(x, tag), {"tag": "forward"}, **options)(x) + 1


def close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def lowered(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def tags(fn, *args):
    """The tags of the calls in the lowered text."""
    calls = re.findall(r"call @xla_metadata_call\w*\(.*", lowered(fn, *args))
    found = [re.search(r'frontend_attributes = \{tag = "(\w+)"\}', call) for call in calls]
    return [match and match[1] for match in found]


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_values_are_collected_and_the_metadata_stays(around):
    close(capture(around(f))(X), (2 * np.sin(X) + 1, {"h": (np.sin(X),)}))
    assert [site.key for site in sites(around(f))(X)] == ["h"]
    assert tags(capture(around(f)), X) == tags(reap(around(f)), X) == ["forward"]


def test_other_spellings():
    for wrap in (xla_metadata_call(depth=3, wide=True), must_fuse_call(identifier=3)):
        fn = wrap(body)
        close(capture(fn)(X), (2 * np.sin(X), {"h": (np.sin(X),)}))
        (attributes,) = re.findall(r"frontend_attributes = \{[^}]*\}", lowered(fn, X))
        assert attributes in lowered(capture(fn), X)


@pytest.mark.parametrize("of_derivatives, tag", OF_DERIVATIVES.values(), ids=OF_DERIVATIVES)
def test_gradients_around_and_inside_keep_the_metadata_of_derivatives(of_derivatives, tag):
    def loss(x, tag=tagged):
        return jnp.sum(f(x, tag, ad_metadata=of_derivatives))

    def collected(x):
        out, acts = capture(loss)(x)
        return out, acts["h"][0]

    wanted = tags(jax.grad(lambda x: loss(x, untagged)), X)
    assert wanted == ["forward", tag]
    close(jax.grad(collected, has_aux=True)(X), (2 * np.cos(X), np.sin(X)))
    assert tags(jax.grad(collected, has_aux=True), X) == wanted
    close(capture(jax.grad(loss))(X), (2 * np.cos(X), {"h": (np.sin(X),)}))
    assert tags(capture(jax.grad(loss)), X) == wanted
    close(jax.grad(lambda x: jnp.sum(collected(x)[1]))(X), np.cos(X))


def test_forward_mode_and_vmap():
    tangents = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))
    (out, acts), (dout, dacts) = tangents(capture(f))(X)
    close((out, dout), (2 * np.sin(X) + 1, 2 * np.cos(X)))
    close((acts["h"][0], dacts["h"][0]), (np.sin(X), np.cos(X)))
    close(capture(tangents(f))(X), ((out, dout), {"h": (np.sin(X),)}))
    wanted = 2 * np.sin(XS) + 1, {"h": (np.sin(XS),)}
    for fn in (jax.vmap(capture(f)), capture(jax.vmap(f))):
        close(fn(XS), wanted)
        assert tags(fn, XS) == ["forward"]
    close(capture(jax.vmap(f, in_axes=1))(XS.T), wanted)


def loop(x):
    """The call in a scan, and a scan in the call."""

    def step(x):
        return lax.scan(lambda x, i: (0.5 * tagged(jnp.sin(x) + i), None), x, jnp.arange(2.0))[0]

    call = xla_metadata_call(step, tag="forward")
    return lax.scan(lambda x, _: (call(x), None), x, length=3)[0]


def loop_by_hand(x, edit=lambda h, i, j: h):
    values = []
    for i in range(3):
        row = []
        for j in range(2):
            row.append(edit(np.sin(x) + j, i, j))
            x = 0.5 * row[-1]
        values.append(np.stack(row))
    return x, np.stack(values)


def test_scans_around_and_inside():
    out, values = loop_by_hand(X)
    close(capture(loop, mode="strict")(X), (out, {"h": values}))
    close(reap(loop, {"h": folds.maximum()})(X), {"h": values.max((0, 1))})
    assert tags(capture(loop), X) == ["forward"]
    close(plant(loop, reap(loop)(X))(X), loop(X))
    edited = plant(loop, {"h": at((1, 0), add(1.0))})
    close(edited(X), loop_by_hand(X, lambda h, i, j: h + ((i, j) == (1, 0)))[0])
    assert tags(edited, X) == ["forward"]


def test_values_are_replaced_and_edited():
    close(plant(f, {"h": X})(X), 2 * X + 1)
    close(plant(f, {"h": lambda h: h * h})(X), 2 * np.sin(X) ** 2 + 1)
    close(plant(f, reap(f)(X))(X), f(X))
    close(plant(f, capture(f)(X)[1], mode="append")(X), f(X))
    close(jax.vmap(plant(f, {"h": X}))(XS), np.broadcast_to(2 * X + 1, (2, 3)))
    assert tags(plant(f, {"h": X}), X) == ["forward"]
    close(jax.grad(lambda x: jnp.sum(plant(f, {"h": jnp.square})(x)))(X), 4 * np.sin(X) * np.cos(X))
    close(harvest.grad(lambda x: jnp.sum(f(x) ** 2))(X), {"h": 4 * (2 * np.sin(X) + 1)})


def test_outputs_that_nobody_needs_and_constants():
    table = np.arange(3.0, dtype=np.float32)

    def fn(x):
        y = 2 * x
        call = xla_metadata_call(lambda x: (jnp.cos(x) * y, tagged(x + table)), tag="forward")
        return call(x)[1]

    close(capture(fn)(X), (X + table, {"h": (X + table,)}))
    close(reap(fn)(X), {"h": X + table})
    assert "cosine" not in jax.jit(reap(fn)).lower(X).as_text()


def test_sows_are_free_in_lowered_programs():
    def text(transform, tag, arg):
        def run(x):
            return f(x, tag)

        return lowered(transform(run), arg)

    grad = lambda f: jax.grad(lambda x: jnp.sum(f(x)))
    for transform, arg in ((lambda f: f, X), (grad, X), (jax.vmap, XS)):
        assert text(transform, tagged, arg) == text(transform, untagged, arg)


def test_nans_are_found_in_the_body():
    fn = xla_metadata_call(lambda x: jnp.log(tagged(x)), tag="forward")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as info:
        capture(fn)(-jnp.ones(2))
    assert any("`log`" in note for note in info.value.__notes__)
