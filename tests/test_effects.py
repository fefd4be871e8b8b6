"""Side effects happen exactly as often, and as ordered, as without the transform."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import harvest
from harvest import capture, plant, reap, sites, sow

X = np.array([0.5, 1.0, 2.0], np.float32)
LOG: list[tuple[str, float]] = []


def note(tag, x):
    LOG.append((tag, float(np.sum(x))))


EFFECTS = {
    "debug": lambda tag, x: jax.debug.callback(functools.partial(note, tag), x),
    "debug, ordered": lambda tag, x: jax.debug.callback(
        functools.partial(note, tag), x, ordered=True
    ),
    "io": lambda tag, x: io_callback(functools.partial(note, tag), None, x),
    "io, ordered": lambda tag, x: io_callback(functools.partial(note, tag), None, x, ordered=True),
}


def body(effect, x):
    """Effects in front of a site, of its value, and after what anybody asks for."""
    effect("before", x)
    h = sow(jnp.sin(x), name="h")
    effect("after", h)
    tail = jnp.exp(h)
    effect("tail", tail)
    return tail


def custom_jvp(fn):
    custom = jax.custom_jvp(fn)
    custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0] * 7))
    return custom


def custom_vjp(fn):
    custom = jax.custom_vjp(fn)
    custom.defvjp(lambda x: (fn(x), None), lambda _, ct: (ct * 7,))
    return custom


STRUCTURES = {  # and how often each effect happens in it
    "straight": (lambda fn, x: fn(x), 1),
    "jit": (lambda fn, x: jax.jit(fn)(x), 1),
    "jit, twice": (lambda fn, x: jax.jit(lambda x: jax.jit(fn)(x))(x) + jax.jit(jnp.cos)(x), 1),
    "scan": (lambda fn, x: lax.scan(lambda c, _: (fn(c), None), x, length=3)[0], 3),
    "scan, reverse": (
        lambda fn, x: lax.scan(lambda c, x: (c, fn(x)), 0.0, x, reverse=True)[1],
        3,
    ),
    "nested scan": (
        lambda fn, x: lax.scan(lambda c, _: (lax.map(fn, c), None), x, length=2)[0],
        6,
    ),
    "cond, taken": (lambda fn, x: lax.cond(x[0] > 0, fn, lambda x: x, x), 1),
    "cond, not taken": (lambda fn, x: lax.cond(x[0] < 0, fn, lambda x: x, x), 0),
    "switch in scan": (
        lambda fn, x: lax.scan(
            lambda c, i: (lax.switch(i, [fn, lambda x: x, fn], c), None), x, jnp.arange(3)
        )[0],
        2,
    ),
    "vmap": (lambda fn, x: jax.vmap(fn)(x), 3),
    "checkpoint": (lambda fn, x: jax.checkpoint(fn)(x), 1),
    "custom_jvp": (lambda fn, x: custom_jvp(fn)(x), 1),
    "custom_vjp": (lambda fn, x: custom_vjp(fn)(x), 1),
}
SOME = ["straight", "jit", "scan", "cond, taken"]
PROGRAMS = [
    *(("debug", structure) for structure in STRUCTURES),
    *(("debug, ordered", structure) for structure in SOME),
    *(("io", structure) for structure in [*SOME, "vmap"]),
    # JAX refuses others than those of `jax.debug` in `checkpoint` and custom derivatives.
    *(("io, ordered", structure) for structure in list(STRUCTURES)[:9]),
]
TRANSFORMS = {
    "capture": capture,
    "reap": lambda fn: reap(fn, mode="append"),
    "reap nothing": lambda fn: reap(fn, []),
    "jit of reap": lambda fn: jax.jit(reap(fn, mode="append")),
    "identity edit": lambda fn: plant(fn, {"h": lambda h: h}),
    "reap of plant": lambda fn: reap(plant(fn, {"h": harvest.scale(1.0)})),
}


def assert_same(got, wanted, ordered=False):
    if not ordered:
        got, wanted = sorted(got), sorted(wanted)
    assert [tag for tag, _ in got] == [tag for tag, _ in wanted]
    np.testing.assert_allclose([x for _, x in got], [x for _, x in wanted], rtol=1e-5)


def logged(fn, *args):
    LOG.clear()
    jax.block_until_ready(jax.tree.leaves(fn(*args)))
    jax.effects_barrier()
    return list(LOG)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("effect, structure", PROGRAMS)
def test_as_often(effect, structure, transform):
    around, count = STRUCTURES[structure]

    def fn(x):
        return around(functools.partial(body, EFFECTS[effect]), x)

    wanted = logged(jax.jit(fn), X)
    tags = ["before", "after", "tail"] if count else []
    assert collections.Counter(tag for tag, _ in wanted) == dict.fromkeys(tags, count)
    for _ in range(2):
        got = logged(TRANSFORMS[transform](fn), X)
        assert_same(got, wanted, ordered=effect.endswith("ordered"))


@pytest.mark.parametrize("effect", EFFECTS)
def test_sites_has_none(effect):
    assert logged(sites(functools.partial(body, EFFECTS[effect])), X) == []


def differentiated(fn):
    return {  # each is `fn` itself, its effects included
        "capture": lambda x: capture(fn)(x)[0],
        "plant": plant(fn, {"h": lambda h: h}),
        "reap": lambda x: reap(lambda x: sow(fn(x), name="end"), "end")(x)["end"],
    }


OUTSIDE = {
    "grad": jax.grad,
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (x,)),
    "vmap of grad": lambda fn: lambda x: jax.vmap(jax.grad(fn))(jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize(
    "structure, outside",
    [
        *((structure, "grad") for structure in STRUCTURES),
        *((structure, "jvp") for structure in [*SOME, "checkpoint", "custom_jvp"]),
        *((structure, "vmap of grad") for structure in [*SOME[:3], "checkpoint", "custom_vjp"]),
    ],
)
def test_as_often_under_differentiation(structure, outside):
    around, _ = STRUCTURES[structure]
    outside = OUTSIDE[outside]

    def fn(x):
        return jnp.sum(around(functools.partial(body, EFFECTS["debug"]), x))

    wanted = logged(jax.jit(outside(fn)), X)
    for inside in differentiated(fn).values():
        assert_same(logged(outside(inside), X), wanted)
    for transform in (capture, lambda fn: reap(fn, mode="append")):
        assert_same(logged(transform(outside(fn)), X), wanted)


def test_printing(capsys):
    def fn(x):
        jax.debug.print("x = {}", x)
        return lax.map(lambda x: jax.debug.print("row") or sow(x, name="h"), x)

    for transform in TRANSFORMS.values():
        logged(transform(fn), X)
        assert sorted(capsys.readouterr().out.split("\n")) == ["", "row"] + ["row"] * 2 + [
            "x = [0.5 1.  2. ]"
        ]


def test_a_planted_branch_has_its_effects():
    fn = functools.partial(body, EFFECTS["debug"])
    tags = lambda log: sorted(tag for tag, _ in log)
    for around in (lambda fn: fn, jax.jit, jax.checkpoint, custom_jvp, custom_vjp):
        planted = plant(lambda x: around(fn)(x), {"h": X})  # noqa: B023
        assert tags(logged(planted, X)) == ["after", "before", "tail"]
        assert ("after", 3.5) in LOG


def test_results_of_callbacks_are_used():
    def fn(x):
        shape = jax.ShapeDtypeStruct((3,), np.float32)
        double = lambda tag, x: note(tag, x) or np.float32(2) * x
        y = io_callback(functools.partial(double, "io"), shape, x)
        z = jax.pure_callback(functools.partial(double, "pure"), shape, x)
        return sow(y, name="y") + sow(z, name="z")

    np.testing.assert_array_equal(reap(fn)(X)["y"], 2 * X)
    # What is pure is not kept if nobody needs it; what is not, is.
    assert logged(reap(fn, "y"), X) == [("io", 3.5)]
    assert sorted(logged(reap(fn, "z"), X)) == [("io", 3.5), ("pure", 3.5)]
    assert sorted(logged(capture(fn), X)) == [("io", 3.5), ("pure", 3.5)]


def increment(ref, x):
    ref[...] += 1
    h = sow(jnp.sin(x), name="h")
    ref[...] += 1
    return jnp.exp(h)


COUNTED = ["straight", "jit", "scan", "nested scan", "cond, taken", "cond, not taken"]


@pytest.mark.parametrize("structure", COUNTED)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_refs_are_written_as_often(structure, transform):
    around, count = STRUCTURES[structure]
    fn = lambda ref, x: around(lambda x: increment(ref, x), x)
    ref = jax.new_ref(jnp.array(0))
    for calls in (1, 2):
        TRANSFORMS[transform](fn)(ref, X)
        assert ref[...] == 2 * count * calls
    TRANSFORMS[transform](lambda x: fn(ref, x))(X)
    assert ref[...] == 2 * count * 3
