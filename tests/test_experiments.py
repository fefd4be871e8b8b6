"""Edits and sources, as `sweep` and `attribute` are given them."""

import functools
import itertools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    HarvestWarning,
    PlantError,
    SelectError,
    UnknownSiteError,
    add,
    at,
    attribute,
    chain,
    each,
    indexed,
    plant,
    replace,
    scale,
    sow,
    sweep,
    zero,
)
from tests.experiments import X, by_hand, same, sown
from tests.helpers import SIZE, scan

F = sown(scan)
V = jnp.arange(float(SIZE))


def nested(x):
    return lax.scan(lambda x, _: (F(x), None), x, length=2)[0]


# ---------------------------------------------------------------------------------------- edits


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    act: Callable = jnp.tanh

    def __call__(self, h, row):
        return self.act(self.weight @ h * row + self.bias)


AFFINE = Affine(jnp.cos(jnp.arange(16.0)).reshape(4, 4), V)
EDITS = {  # an edit, and by hand
    "zero": (zero(), lambda h, k: 0 * h),
    "add": (add(2.0), lambda h, k: h + 2),
    "scale": (scale(V), lambda h, k: h * V),
    "replace": (replace(V), lambda h, k: V),
    "chain": (chain(add(1.0), jnp.sin, scale(2.0)), lambda h, k: 2 * jnp.sin(h + 1)),
    "module": (AFFINE, AFFINE),
    "partial": (functools.partial(lambda b, h, row: h * b + row, 2.0), lambda h, k: h * 2 + k),
    "mapping": ({"g": zero(), "h": add(2.0), "*": zero()}, lambda h, k: h + 2),
    "globs": ({"?": add(2.0), "h": zero()}, lambda h, k: h + 2),
    "predicates": (
        {lambda site: site.name == "g": zero(), lambda site: len(site.axes) == 1: add(2.0)},
        lambda h, k: h + 2,
    ),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_edits(wrap, name):
    program = lambda x, site: scan(site(x, None, "g"), site)
    edit, by = EDITS[name]
    got = wrap(sweep(sown(program), "h", edit, jnp.arange(2.0)))(X)
    wanted = by_hand(program, (3,), X, lambda h, row: by(h, row["k"]), axes={"k": [0.0, 1.0]})
    same(got, {"h": wanted})


def test_an_edit_may_ask_for_its_iteration():
    number = lambda index: (10 * index[0] + index[1]).astype(X.dtype)
    got = sweep(nested, "h", indexed(lambda h, index: h + number(index)))(X)["h"]
    for i, j in itertools.product(range(2), range(3)):
        same(got[i, j], plant(nested, {"h": at((i, j), add(10.0 * i + j))})(X))


def test_sites_of_different_shape_have_edits_of_their_own():
    def f(x):
        a = sow(jnp.outer(x, x), name="a")
        b = sow(jnp.sum(a), name="b")
        return sow({"x": a[0] * b, "n": 1}, name="c")["x"]

    edits = {
        "a": lambda a, row: a.at[row["i"], row["i"]].set(0),
        "b": lambda b, row: b + row["i"].astype(b.dtype),
        "c": lambda c, row: {**c, "x": c["x"].at[row["i"]].set(0)},
    }
    got = sweep(f, None, edits, {"i": jnp.arange(SIZE)})(X)
    for key, i in itertools.product(edits, range(SIZE)):
        edit = functools.partial(edits[key], row={"i": jnp.asarray(i)})
        same(got[key][i], plant(f, {key: edit})(X))


def test_a_key_with_the_characters_of_a_glob_is_a_key():
    f = lambda x: sow(x, name="a*") - sow(2 * x, name="ab")
    got = sweep(f, None, {"a*": zero(), "ab": add(1.0)})(X)
    same(got, {"a*": -2 * X, "ab": -X - 1})


# -------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_source_chooses_the_sites_and_may_be_of_another_form(wrap):
    f = lambda x: sow(nested(x), name="g")
    mean = np.arange(6, dtype=np.float32).reshape(2, 3)
    source = {"h": {"mean": mean, "std": (np.full((2, 3), 2, np.float32), "static")}}

    def normalise(h, source):
        assert source["std"][1] == "static"
        return (h - source["mean"]) / source["std"][0]

    got = wrap(sweep(f, source, normalise))(X)
    assert list(got) == ["h"]
    for i, j in itertools.product(range(2), range(3)):
        edit = lambda h, mean=mean[i, j]: (h - mean) / 2
        same(got["h"][i, j], plant(f, {"h": at((i, j), edit)})(X))


# ------------------------------------------------------------------------------ what is refused

REFUSED = [
    (3.0, PlantError, "`edit` got 3.0 of type `float`; wanted a function of a value, its source"),
    ({"h": X}, PlantError, r"`edit` got Array\(.*; wanted a function of a value, its source"),
    ({3: zero()}, SelectError, "`edit` got 3 of type `int`; wanted None"),
    (each(scale(X)), PlantError, "`edit` got `harvest.each`, and each iteration is edited in a"),
    (chain(at(1, zero())), PlantError, "`edit` got `harvest.at`, and each iteration is edited in"),
]


@pytest.mark.parametrize("edit, kind, message", REFUSED)
@pytest.mark.parametrize("transform", [sweep, attribute])
def test_edits_that_are_refused_at_once(transform, edit, kind, message):
    with pytest.raises(kind, match=message):
        transform(F, "h", edit)


SITE = r"the site 'h' \(sown at .*experiments.py:\d+\)"
UNFIT = [
    (X, lambda h, row: h[:2], rf"got f32\[2\], wanted f32\[4\], for {SITE}"),
    (X, lambda h, row: h > row, rf"got bool\[4\], wanted f32\[4\], for {SITE}; cast"),
    (X, lambda h, row: (h, row), rf"got a value of structure .*, wanted PyTreeDef.* for {SITE}"),
    (None, add(jnp.ones(3)), rf"got an operand of type f32\[3\], .*f32\[4\], for {SITE}"),
    (None, replace(jnp.ones((3, SIZE))), rf"got f32\[3,4\], wanted f32\[4\], for {SITE}"),
]
WRAPS = {"scan": lambda f: f, "remat": jax.checkpoint}


@pytest.mark.parametrize("grid, edit, message", UNFIT)
@pytest.mark.parametrize("wrap", WRAPS)
def test_edits_that_do_not_fit(wrap, grid, edit, message):
    fn = lambda x: jnp.sum(WRAPS[wrap](F)(x))
    for transform in (sweep, attribute):
        with pytest.raises(PlantError, match=message):
            transform(fn, "h", edit, grid)(X)


AXES = rf"for {SITE}; wanted the axes \(3,\) of the loops"
BAD_SOURCES = [
    ({"h": (jnp.zeros((3, SIZE)),)}, PlantError, "got a tuple for the site 'h'.* as `capture`"),
    ({"h": jnp.ones((4, SIZE))}, PlantError, rf"`source` got f32\[4,4\] {AXES}"),
    ({"h": {"mean": jnp.float32(0)}}, PlantError, rf"`source` got f32\[\] {AXES}"),
    ({"*": jnp.ones((3, SIZE))}, SelectError, rf"`source` has the keys \['\*'\], .* for {SITE}"),
    ({"g": jnp.ones((3, SIZE))}, UnknownSiteError, "the key 'g' matches no site; there are 'h'"),
]


@pytest.mark.parametrize("source, kind, message", BAD_SOURCES)
@pytest.mark.parametrize("transform", [sweep, attribute])
def test_sources_that_do_not_fit(transform, source, kind, message):
    with pytest.raises(kind, match=message):
        transform(lambda x: jnp.sum(F(x)), source, lambda h, source: h)(X)


def test_sources_that_are_refused_at_once():
    with pytest.raises(SelectError, match="`source` got 3 of type `int`; wanted None"):
        sweep(F, 3, zero())
    with pytest.raises(SelectError, match=r"`source` got a dict with the keys \[\('h',\)\]"):
        sweep(F, {("h",): X}, zero())


def test_every_site_has_an_edit_and_every_edit_a_site():
    f = lambda x: sow(x, name="g") + sow(x, name="h")
    with pytest.raises(SelectError, match="`sweep`: nothing in `edit` matches the site 'h'"):
        sweep(f, None, {"g": zero()})(X)
    with pytest.raises(UnknownSiteError, match=r"`edit`: the key 'hh' matches no site; .*'h'"):
        sweep(f, None, {"g": zero(), "hh": zero(), "*": zero()})(X)


def test_what_an_edit_raises_names_the_site():
    with pytest.raises(TypeError, match="positional argument") as caught:
        sweep(F, "h", lambda h: h, X)(X)
    assert any("raised by the edit of the site 'h'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("transform", [sweep, attribute])
def test_editing_what_feeds_nothing_warns(transform):
    def bare(x):
        sow(2 * x, name="h")
        return jnp.sum(x)

    with pytest.warns(HarvestWarning, match=r"'h' changes nothing.*write `h = sow\(h, name='h'\)`"):
        got = transform(bare, "h", zero(), X)(X)
    same(got, {"h": jnp.full(SIZE, jnp.sum(X))})
