"""`check_types`: sites are checked while a program is traced, and never when it runs."""

import collections
import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, Shaped, jaxtyped

from harvest import (
    SelectError,
    Sharded,
    SiteTypeError,
    UnknownSiteError,
    add,
    by_key,
    capture,
    check_types,
    grad,
    plant,
    reap,
    scope,
    sites,
    sow,
)

from .helpers import PROGRAMS
from .meshes import P, put, sown
from .shards import AxisType, mesh_of

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def fn(x):
    with scope("in"):
        x = sow(jnp.tanh(x), name="h")
    with scope("out"):
        return sow(x[1:] * 2, name="h")


RIGHT = {
    "one dimension": {"in/h": Float[Array, "time d"]},
    "shared": {"in/h": Float[Array, "time d"], "out/h": Float[Array, "_ d"]},
    "symbolic": {"in/h": Float[Array, "time d"], "out/h": Float[Array, "time-1 d"]},
    "symbolic first": {"out/h": Float[Array, "time d"], "in/h": Float[Array, "time+1 d"]},
    "glob": {"*/h": Float[Array, "_ d"]},
    "all": {"**": Float[Array, "... d"], None: Shaped[Array, "_ 3"]},
    "several": {("in/h", "out/h"): Float[Array, "_ 3"]},
    "predicate": {by_key("in/*"): Float[Array, "4 3"]},
    "function": {lambda site: site.scope == "out": Float[Array, "3 3"]},
    "annotation": {Float[Array, "n n"]: Float[Array, "3 3"]},
    "union": {"*/h": Int[Array, "..."] | Float[Array, "_ d"]},
    "tree": {"*/h": PyTree[Float[Array, "_ d"], "T"]},
    "nothing": {},
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_types_change_nothing(name):
    f = check_types(fn, RIGHT[name])
    np.testing.assert_array_equal(f(X), 2 * jnp.tanh(X)[1:])
    assert jax.jit(f).lower(X).as_text() == jax.jit(fn).lower(X).as_text()
    np.testing.assert_array_equal(reap(f)(X)["in/h"], jnp.tanh(X))
    assert [site.key for site in sites(f)(X)] == ["in/h", "out/h"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_costs_nothing(name):
    f = sown(PROGRAMS[name])
    checked = check_types(f, {"h": Float[Array, "..."]})
    for transform, x in ((lambda f: f, X[0]), (jax.vmap, X)):
        plain = jax.jit(transform(f)).lower(x).as_text()
        assert jax.jit(transform(checked)).lower(x).as_text() == plain
    # JAX transposes the equations of a program in another order than those of a function.
    gradient = lambda f: jax.jit(jax.grad(lambda x: f(x).sum())).lower(X[0]).as_text()
    operations = lambda text: collections.Counter(re.findall(r"stablehlo\.\w+", text))
    assert operations(gradient(checked)) == operations(gradient(f))


def line(text):
    """The line of this file that sows so."""
    with open(__file__) as file:
        (number,) = [n for n, row in enumerate(file, 1) if text in row and "line(" not in row]
    return re.escape(f"{__file__}:{number}")


def test_a_dimension_bound_by_one_site_and_broken_by_another():
    types = {"in/h": Float[Array, "time d"], "out/h": Float[Array, "time d"]}
    match = (
        rf"^`check_types`: the site 'out/h' \(sown at {line('x[1:] * 2')}\) is f32\[3,3\]; wanted "
        r"Float\[Array, 'time d'\]: the size of dimension time is 3 which does not equal the "
        rf"existing value of 4; there time=4 \(by 'in/h', sown at {line('jnp.tanh(x), name=')}\), "
        rf"d=3 \(by 'in/h', sown at {line('jnp.tanh(x), name=')}\)"
    )
    checked = check_types(fn, types)
    calls = [checked, jax.jit(checked), reap(checked), lambda x: jax.eval_shape(checked, x)]
    for call in (*calls, lambda x: jax.vmap(checked)(x[None])):
        with pytest.raises(SiteTypeError, match=match):
            call(X)


def test_nothing_runs_before_the_check():
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return sow(x, name="h")

    with pytest.raises(SiteTypeError, match=r"this array has dtype float32, not any of"):
        check_types(f, {"h": Int[Array, "..."]})(X)
    assert ran == []
    check_types(f, {"h": Float[Array, "..."]})(X).block_until_ready()
    jax.effects_barrier()
    assert ran == [1]


def test_it_is_checked_once_for_each_type():
    checks = []

    def select(site):
        checks.append(site.key)
        return True

    f = jax.jit(check_types(lambda x: sow(x, name="h"), {select: Float[Array, "n d"]}))
    for _ in range(3):
        f(X)
    assert checks == ["h"]
    f(X[1:])
    assert checks == ["h", "h"]


def loops(x):
    def step(carry, _):
        return sow(jnp.tanh(carry), name="h"), sow(carry.sum(), name="norm")

    x, norms = lax.scan(step, x, length=5)
    x = lax.cond(x[0] > 0, lambda x: sow(x, name="c"), lambda x: sow(x[:2], name="c")[0] * x, x)
    return sow(lax.while_loop(lambda x: x[0] < 3, lambda x: sow(x + 1, name="w"), x), name="out")


def test_types_are_as_sown_whatever_is_around():
    types = {"h": Float[Array, "d"], "norm": Float[Array, ""], "w": Float[Array, "d"]}
    types |= {"out": Float[Array, "d"], "c": Float[Array, "_"]}
    wanted = loops(X[0])
    np.testing.assert_array_equal(check_types(loops, types)(X[0]), wanted)
    np.testing.assert_array_equal(check_types(jax.vmap(loops), types)(X), jax.vmap(loops)(X))
    np.testing.assert_array_equal(jax.vmap(check_types(loops, types))(X), jax.vmap(loops)(X))
    # One branch has another type: both are checked.
    with pytest.raises(SiteTypeError, match=r"the site 'c' \(.*\) is f32\[2\]; wanted .*there d=3"):
        check_types(loops, types | {"c": Float[Array, "d"]})(X[0])


def test_in_other_transforms():
    types = {"*/h": Float[Array, "_ d"]}
    checked, h = check_types(fn, types), np.ones_like(X)
    np.testing.assert_array_equal(plant(checked, {"in/h": h})(X), plant(fn, {"in/h": h})(X))
    np.testing.assert_array_equal(
        plant(checked, {"*/h": add(1.0)})(X), plant(fn, {"*/h": add(1.0)})(X)
    )
    np.testing.assert_array_equal(
        check_types(plant(fn, {"in/h": h}), types)(X), plant(fn, {"in/h": h})(X)
    )
    np.testing.assert_array_equal(plant(checked, reap(checked)(X))(X), fn(X))
    loss = lambda f: lambda x: f(x).sum()
    np.testing.assert_array_equal(jax.grad(loss(checked))(X), jax.grad(loss(fn))(X))
    jax.tree.map(np.testing.assert_array_equal, grad(loss(checked))(X), grad(loss(fn))(X))
    jax.tree.map(np.testing.assert_array_equal, capture(checked)(X), capture(fn)(X))
    assert check_types(reap(fn), {})(X).keys() == {"in/h", "out/h"}
    twice = check_types(check_types(fn, types), {"in/h": Float[Array, "d"]})
    with pytest.raises(SiteTypeError, match="this array has 2 dimensions, not the 1"):
        twice(X)


def test_sites_of_trees_and_keys():
    def f(x, key):
        sow({"a": x, "b": (x[0], 3)}, name="tree")
        sow(key, name="key")
        return sow((x, x), name="pair")

    key = jax.random.key(0)
    types = {
        "tree": PyTree[Float[Array, "..."] | int],
        "key": PRNGKeyArray,
        "pair": Float[Array, "a b"],
    }
    check_types(f, types)(X, key)
    with pytest.raises(SiteTypeError, match=r"at \['b'\]\[0\], this array has 1 dimensions"):
        check_types(f, {"tree": Float[Array, "a b"]})(X, key)
    trees = {
        "tree": PyTree[Shaped[Array, "..."] | int, "T"],
        "pair": PyTree[Shaped[Array, "..."], "T"],
    }
    with pytest.raises(SiteTypeError, match=r"'pair' .* this is no PyTree.*; there T=PyTreeDef"):
        check_types(f, trees)(X, key)


def test_repeated_sites_are_all_checked():
    def f(x):
        return sow(sow(x, name="h")[1:], name="h")

    assert check_types(f, {"h": Float[Array, "_ d"]})(X).shape == (3, 3)
    with pytest.raises(SiteTypeError, match=r"size of dimension time is 3 .* there time=4"):
        check_types(f, {"h": Float[Array, "time d"]})(X)


def test_names_of_a_function_around_are_others():
    @jaxtyped(typechecker=None)
    def around(x):
        assert isinstance(x, Float[Array, "d time"])
        return check_types(fn, {"in/h": Float[Array, "time d"]})(x)

    assert around(jnp.asarray(X)).shape == (3, 3)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_in_a_shard_map(kind, check_vma):
    mesh = mesh_of(kind)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)

    def body(x, w):
        sow(w, name="w")
        return sow(x @ w, name="h", spec=P("data"))

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma
    )
    args = put(x, mesh, "data"), put(np.ones((4, 3), np.float32), mesh)
    types = {
        "h": Sharded[Float[Array, "batch out"], P("data")],
        "w": Sharded[Float[Array, "d out"], P()],
    }
    np.testing.assert_allclose(check_types(f, types)(*args), x.sum(1, keepdims=True) * np.ones(3))
    check_types(f, {"h": Float[Array, "2 3"]})(*args)  # of one shard
    check_types(f, {"h": Sharded[Float[Array, "8 3"], P("data")]})(*args)
    with pytest.raises(SiteTypeError, match=r"batch is 8 .*existing value of 4.* there batch=4"):
        check_types(f, types | {"w": Sharded[Float[Array, "batch out"], P()]})(*args)
    with pytest.raises(SiteTypeError, match=r"assembled as P\('data',?\), not as P\(None"):
        check_types(f, {"h": Sharded[Float[Array, "..."], P(None, "data")]})(*args)
    if check_vma:
        with pytest.raises(SiteTypeError, match="this shard varies over no mesh axis"):
            check_types(f, {"w": Sharded[Float[Array, "..."], P("data")]})(*args)


def test_explicit_axes_are_checked():
    x = put(np.ones((8, 4), np.float32), mesh_of(AxisType.Explicit), "data")
    f = lambda x: sow(x.T, name="h")
    check_types(f, {"h": Sharded[Float[Array, "d n"], P(None, "data")]})(x)
    with pytest.raises(SiteTypeError, match=r"sharded as P\(None, 'data'\), not as P\('data',\)"):
        check_types(f, {"h": Sharded[Float[Array, "d n"], P("data")]})(x)


WRONG = {
    "unbound": (
        {"in/h": Float[Array, "n+1 d"]},
        SiteTypeError,
        r"'in/h' .*; wanted Float\[Array, 'n\+1 d'\]: Cannot process symbolic axis 'n\+1'",
    ),
    "key": (
        {"in/hh": Float[Array, "..."]},
        UnknownSiteError,
        "'in/hh' matches no site; did you mean",
    ),
    "glob": ({"**/q": Float[Array, "..."]}, UnknownSiteError, r"the glob '\*\*/q' matches no site"),
    "by_key": ({by_key("q"): Float[Array, "..."]}, UnknownSiteError, "the key 'q' matches no site"),
    "annotation": ({"in/h": 3}, SelectError, "got 3; wanted a jaxtyping annotation"),
    "family": ({"in/h": Float}, SelectError, "wanted a jaxtyping annotation"),
    "select": ({3: Float[Array, "..."]}, SelectError, "got 3 of type `int`; wanted None"),
    "mapping": (Float[Array, "..."], SelectError, "wanted a mapping from keys or globs to annot"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name, monkeypatch):
    types, error, match = WRONG[name]
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as without the import hook
    with pytest.raises(error, match=match):
        check_types(fn, types)(X)


def test_nothing_is_printed(capsys):
    with pytest.raises(SiteTypeError, match="there time=4"):
        check_types(fn, {"*/h": Float[Array, "time d"]})(X)
    assert capsys.readouterr() == ("", "")
