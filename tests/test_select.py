"""What `select` and the keys of `plants` mean."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from harvest import capture, plant, reap, scope, sow

KEYS = ["embed", "l/0/h", "l/0/attn/q", "l/0/attn/k", "l/1/h", "l/1/attn/q", "l/10/h", "end"]


def fn(x):
    for i, key in enumerate(KEYS):
        *scopes, name = key.split("/")
        with scope("/".join(scopes)) if scopes else contextlib.nullcontext():
            x = sow(x + i, name=name)
    return x


SELECTED = {
    "all": (None, KEYS),
    "key": ("l/0/h", ["l/0/h"]),
    "star stops at a slash": ("l/*/h", ["l/0/h", "l/1/h", "l/10/h"]),
    "star is one component": ("*", ["embed", "end"]),
    "star within a component": ("e*d", ["embed", "end"]),
    "question mark": ("l/?/h", ["l/0/h", "l/1/h"]),
    "two question marks": ("l/??/h", ["l/10/h"]),
    "two stars cross": ("**/q", ["l/0/attn/q", "l/1/attn/q"]),
    "two stars may be nothing": ("**/embed", ["embed"]),
    "two stars between": ("l/**/h", ["l/0/h", "l/1/h", "l/10/h"]),
    "two stars at the end": ("l/0/**", ["l/0/h", "l/0/attn/q", "l/0/attn/k"]),
    "two stars alone": ("**", KEYS),
    "mixed": ("l/*/**k", ["l/0/attn/k"]),
    "predicate": (lambda site: site.scope == "l/1", ["l/1/h"]),
    "predicate, all": (lambda site: True, KEYS),
    "predicate, none": (lambda site: False, []),
    "numpy predicate": (lambda site: np.bool_(site.name == "h"), ["l/0/h", "l/1/h", "l/10/h"]),
    "no select": ([], []),
    "list": (["end", "embed"], ["embed", "end"]),
    "tuple": (("end", "*"), ["embed", "end"]),
    "set": ({"end", "l/1/h"}, ["l/1/h", "end"]),
    "nested": (["end", ("l/?/h", lambda site: site.name == "k")], None),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected(name):
    select, keys = SELECTED[name]
    keys = ["l/0/h", "l/0/attn/k", "l/1/h", "end"] if keys is None else keys
    assert list(reap(fn, select)(0.0)) == keys
    assert list(capture(fn, select)(0.0)[1]) == keys


@pytest.mark.parametrize("name", [name for name in SELECTED if name not in ("list", "set")])
def test_selected_by_edits(name):
    select, keys = SELECTED[name]
    keys = ["l/0/h", "l/0/attn/k", "l/1/h", "end"] if keys is None else keys
    select = tuple(select) if isinstance(select, list) else select
    if name == "predicate, none":  # to collect nothing is no mistake, to edit nothing is one
        with pytest.raises(
            harvest.UnknownSiteError, match=r"`plants`: `.*` holds for no site; there are"
        ):
            plant(fn, {select: harvest.zero()})(0.0)
        with pytest.raises(
            harvest.UnknownSiteError, match=r"`plants`: `.*` holds for no site; there are"
        ):
            jax.jit(plant(fn, {select: harvest.zero()}))(0.0)
        return
    assert plant(fn, {select: lambda v: v + 100})(0.0) == sum(range(8)) + 100 * len(keys)


LITERAL = ["a*", "a?", "[ab]", "a.c", "(x)", "^a$", "a|b", "a\\d", "**", "a+", "{1}"]
NEAR = ["aa", "a", "abc", "x", "b", "ad", "a1"]


@pytest.mark.parametrize("key", LITERAL)
def test_a_key_is_a_key_whatever_its_characters(key):
    def fn(x):
        for name in [*NEAR, *LITERAL]:
            x = sow(x, name=name)
        return x

    assert list(reap(fn, key)(0.0)) == [key]
    assert list(reap(fn, [key, "x"])(0.0)) == [k for k in [*NEAR, *LITERAL] if k in (key, "x")]
    assert list(reap(plant(fn, {key: lambda v: v + 1}), key)(0.0).values()) == [1.0]


@pytest.mark.parametrize("pattern", ["[ab]", "a.c", "(a)", "a|b", "\\w", "a+"])
def test_only_stars_and_question_marks_are_wild(pattern):
    def fn(x):
        return sow(sow(sow(x, name="a"), name="b"), name="abc")

    with pytest.raises(harvest.UnknownSiteError, match=r"the key .* matches no site"):
        reap(fn, pattern)(0.0)


UNKNOWN = {
    "near": ("l/0/atn/q", r"the key 'l/0/atn/q' matches no site; did you mean 'l/0/attn/q'"),
    "far": ("zzzzz", r"the key 'zzzzz' matches no site; there are 'embed' "),
    "glob": ("l/*/x", r"the glob 'l/\*/x' matches no site"),
    "one of many": (["end", "l/*/h", "emned"], r"'emned' matches no site; did you mean 'embed'"),
    "nested": (["end", ("zzz", lambda site: True)], r"'zzz' matches no site"),
    "two stars in a component": ("e**/d", r"the glob .* matches no site"),
    "slash": ("l/0", r"'l/0' matches no site; did you mean"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    select, match = UNKNOWN[name]
    for transform in (reap, capture):
        with pytest.raises(harvest.UnknownSiteError, match=f"`{transform.__name__}`: .*{match}"):
            transform(fn, select)(0.0)
    select = tuple(select) if isinstance(select, list) else select
    with pytest.raises(harvest.UnknownSiteError, match=f"`plants`: .*{match}"):
        plant(fn, {select: harvest.zero()})(0.0)


def test_unknown_in_a_program_without_sites():
    with pytest.raises(KeyError, match="'h' matches no site; there are none"):
        reap(jnp.sin, "h")(1.0)
    assert reap(jnp.sin)(1.0) == {}
    assert reap(jnp.sin, lambda site: True)(1.0) == {}


@pytest.mark.parametrize("select", [3, 2.5, True, ["h", 3], {3: None}], ids=repr)
def test_of_a_wrong_type(select):
    for transform in (reap, capture):
        with pytest.raises(harvest.SelectError, match=r"`select` got .* of type .*; wanted None"):
            transform(fn, select)


@pytest.mark.parametrize("key", [3, 2.5, True, ("h", 3)], ids=repr)
def test_plants_of_a_wrong_type(key):
    with pytest.raises(harvest.SelectError, match=r"`plants` got .* of type .*; wanted None"):
        plant(fn, {key: 0.0})


def test_a_value_needs_a_key():
    with pytest.raises(harvest.PlantError, match=r"a value for 'l/\*/h'; wanted an edit"):
        plant(fn, {"l/*/h": 0.0})(0.0)
    with pytest.raises(harvest.PlantError, match="a value for None; wanted an edit"):
        plant(fn, {None: 0.0})(0.0)


def test_two_selections_must_not_meet():
    with pytest.raises(harvest.PlantError, match=r"both 'l/0/h' and 'l/\*/h' reach the site"):
        plant(fn, {"l/0/h": harvest.zero(), "l/*/h": harvest.add(1.0)})(0.0)


def test_a_predicate_sees_the_site():
    seen = []
    reap(fn, lambda site: seen.append(site))(0.0)
    assert [site.key for site in seen] == KEYS
    assert {site.kind for site in seen} == {"sow"}
    assert all(site.aval.shape == () and site.aval.dtype == np.float32 for site in seen)


def test_a_predicate_chooses_among_occurrences():
    def twice(x):
        return sow(sow(x + 1, name="h") + 1, name="h")

    assert reap(twice, lambda site: site.occurrence == 1)(0.0) == {"h": 2}
    first = {lambda site: site.occurrence == 0: harvest.scale(5.0)}
    assert plant(twice, first, mode="append")(1.0) == 11
