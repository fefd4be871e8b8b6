"""Programs line by line, against `jax.make_jaxpr`, `harvest.sites` and what plain JAX computes."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from harvest._sparkline import sparkline, summary

from . import helpers

X = jnp.array([0.3, -0.5, 0.8, 1.2])


def sown(program):
    return lambda x: program.fn(x, lambda h, step: harvest.sow(h, name="h"))


def n_equations(jaxpr):
    return sum(1 + sum(map(n_equations, inner(eqn))) for eqn in jaxpr.eqns)


def inner(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def layers(w, x):
    def layer(x, w):
        with harvest.scope("layer"):
            h = harvest.sow(jnp.tanh(w @ x), name="h")
        return x + h, None

    return jax.lax.scan(layer, x, w)[0]


W = jax.random.normal(jax.random.key(0), (3, 4, 4))


def test_lines():
    program = harvest.show(layers)(W, X)
    assert [line.text for line in program] == [
        "a = args[0]",
        "b = args[1]",
        "c = scan[length=3] b a",
        "iteration i: d starts as b, e = a[i]",
        "f = dot_general e d",
        "g = tanh f",
        "h = add d g",
        "return h",
        "return c",
    ]
    assert [line.depth for line in program] == [0, 0, 0, 1, 2, 2, 2, 2, 0]
    kinds = "input input equation body equation equation equation output output"
    assert [line.kind for line in program] == kinds.split()
    assert program[4].type == program[5].type == "f32[4]" and program[0].type == "f32[3,4,4]"
    (site,) = harvest.sites(layers)(W, X)
    assert program[5].key == site.key == "layer/h" and program[5].source == site.source
    assert [line.key for line in program if line is not program[5]] == [""] * 8
    assert all(line.value is None for line in program)


def test_values():
    program = harvest.show(layers, values=True)(W, X)
    x, products, sums = np.asarray(X), [], []
    for w in np.asarray(W):
        products.append(w @ x)
        x = x + np.tanh(w @ x)
        sums.append(x)
    for line, expected in [(0, W), (1, X), (2, x), (4, products), (6, sums)]:
        np.testing.assert_allclose(program[line].value, expected, rtol=1e-5)
    np.testing.assert_allclose(program[5].value, np.tanh(products), rtol=1e-5)


@pytest.mark.parametrize("name", helpers.PROGRAMS)
def test_every_structure(name):
    """The keys are those of `sites`; values, where they are shown, are what plain JAX computes."""
    program = helpers.PROGRAMS[name]
    fn = sown(program)
    listing = harvest.show(fn, values=True)(X)
    keys = [site.key for site in harvest.sites(fn)(X)]
    lines = [line for line in listing if line.key]
    assert lines and {line.key for line in lines} == set(keys)
    expected = np.asarray(program.values(X))
    ran = [line.value for line in lines if line.value is not None]
    for value in ran:
        wanted = expected if np.shape(value) == expected.shape else expected[-1]
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    returned = listing[-1].text.removeprefix("return ")
    results = {x: [r for r in x.text.partition(" = ")[0].split() if r != "_"] for x in listing}
    (made,) = [x for x in listing if x.kind == "equation" and returned in results[x]]
    value = jax.tree.leaves(made.value)[results[made].index(returned)]
    np.testing.assert_allclose(value, fn(X), rtol=1e-5)


def test_all_equations_are_there():
    def f(x):
        y = jax.lax.cond(x.sum() > 0, jax.nn.relu, lambda x: -x, x)
        return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: 2 * y, y)

    for fn, x in [(f, X), (jax.jit(f), X), (jax.vmap(f), jnp.stack([X, -X]))]:
        program = harvest.show(fn)(x)
        equations = [line for line in program if line.kind == "equation"]
        assert len(equations) == n_equations(jax.make_jaxpr(fn)(x).jaxpr)


def test_a_backward_pass():
    loss = lambda w, x: jnp.sum(harvest.perturb(jnp.tanh(w @ x), name="q"))
    program = harvest.show(jax.grad(loss), values=True)(W[0], X)
    forward, backward = [line for line in program if line.key == "q"]
    assert forward.kind == "sow" and backward.kind == "equation"
    np.testing.assert_array_equal(backward.value, np.ones(4))
    (d_w,) = [line for line in program if line.text.startswith(program[-1].text[-1] + " =")]
    expected = np.outer(1 - np.tanh(W[0] @ X) ** 2, X)
    np.testing.assert_allclose(d_w.value, expected, rtol=1e-5, atol=1e-6)


def test_branches():
    def f(x):
        return jax.lax.cond(x > 0, lambda x: jnp.sin(x), lambda x: jnp.cos(x), x)

    def ran(fn, *args):
        program = harvest.show(fn, values=True)(*args)
        return {x.text.split()[2]: x.value for x in program if x.kind == "equation"}

    assert ran(f, 2.0)["sin"] == jnp.sin(2.0) and ran(f, 2.0)["cos"] is None
    assert ran(f, -2.0)["cos"] == jnp.cos(-2.0) and ran(f, -2.0)["sin"] is None
    some = ran(lambda x: jax.lax.map(f, x), X)
    np.testing.assert_array_equal(some["sin"], jnp.sin(X[X > 0]))
    np.testing.assert_array_equal(some["cos"], jnp.cos(X[X <= 0]))

    nested = lambda x: jax.lax.map(
        lambda x: jax.lax.cond(x > 1, lambda x: x, lambda x: jax.lax.map(f, x[None])[0], x), X
    )
    some = ran(nested, X)
    np.testing.assert_array_equal(some["sin"], jnp.sin(X[(X > 0) & (X <= 1)]))


def test_what_cannot_be_opened_is_shown_if_something_is_sown_in_it():
    add = lambda a, b: harvest.sow(a + b, name="h")
    f = lambda x: jax.lax.reduce(x, jnp.float32(0), add, (0,))
    program = harvest.show(f, values=True)(X)
    assert [line.key for line in program if line.key] == [site.key for site in harvest.sites(f)(X)]
    (line,) = [line for line in program if line.key == "h"]
    assert line.depth == 2 and line.value is None
    (whole,) = [line for line in program if " reduce" in line.text]
    np.testing.assert_allclose(whole.value, np.sum(X), rtol=1e-6)

    times = lambda x: harvest.sow(2 * x, name="h")
    solve = lambda b: jax.lax.custom_linear_solve(times, b, lambda _, b: b / 2, symmetric=True)
    keys = [line.key for line in harvest.show(solve)(X) if line.key]
    assert keys == [site.key for site in harvest.sites(solve)(X)] and keys


def test_the_last_iteration_of_a_while_loop():
    f = lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x)
    (line,) = [x for x in harvest.show(f, values=True)(1.0) if " mul " in x.text]
    assert line.value == 16


def test_shared_functions_are_written_down_for_each_call():
    g = jax.jit(jnp.sin)
    program = harvest.show(lambda x: g(g(x)), values=True)(X)
    sines = [line for line in program if "sin" in line.text and "jit" not in line.text]
    assert [line.text for line in sines] == ["c = sin a", "e = sin b"]
    np.testing.assert_allclose(sines[0].value, np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(sines[1].value, np.sin(np.sin(X)), rtol=1e-6)


def test_arguments_and_constants_have_their_places():
    table = jnp.arange(4.0)
    program = harvest.show(lambda batch: batch["x"] * table, values=True)({"x": X})
    texts = {line.text: line for line in program}
    assert texts["a = args[0]['x']"].kind == "input"
    (constant,) = [line for line in program if line.kind == "constant"]
    np.testing.assert_array_equal(constant.value, table)


def test_what_is_sown_of_an_argument_has_a_line_of_its_own():
    program = harvest.show(lambda x: harvest.sow((x, x + 1), name="both")[0])(X)
    (line,) = [line for line in program if line.key]
    assert (line.kind, line.key, line.type) == ("sow", "both", "f32[4] f32[4]")
    twice = lambda x: harvest.sow(harvest.sow(jnp.sin(x), name="a"), name="b")
    assert "a, b" in [line.key for line in harvest.show(twice)(X)]


def test_text():
    text = str(harvest.show(layers)(W, X))
    header, rule, *lines = text.splitlines()
    assert header.split() == ["program", "type", "key", "source"] and set(rule) == {"-"}
    assert len(lines) == 9 and "value" in str(harvest.show(layers, values=True)(W, X))
    (line,) = [line for line in lines if "tanh" in line]
    assert line.index("layer/h") == header.index("key")


@pytest.mark.parametrize("there", [True, False])
def test_html(monkeypatch, there):
    if not there:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    program = harvest.show(lambda x: jnp.where(x < 0, x, 0.0), values=True)(X)
    html = program._repr_html_()
    assert ("treescope" in html) == there
    if not there:
        assert "&lt;" not in html and "lt a 0.0" in re.sub(r"<[^>]*>", "", html)
    without = harvest.show(lambda x: x)(X)._repr_html_()
    assert without.startswith("<pre") and "a = args[0]" in without


def test_a_slice_is_a_listing():
    program = harvest.show(layers)(W, X)
    assert isinstance(program[:2], harvest.Listing) and len(program[:2]) == 2
    assert program[-1].text == "return c"


def test_types_are_enough_without_values():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    for typed in (shape, jax.typeof(X)):
        assert [x.text for x in harvest.show(jnp.sin)(typed)][-1] == "return b"
        assert [site.spec for site in harvest.sites(layers)(W, typed)] == ["f32[3,4]"]
    with pytest.raises(harvest.UnsupportedError, match="no values to show"):
        harvest.show(jnp.sin, values=True)(shape)
    with pytest.raises(harvest.UnsupportedError, match="no values to show"):
        jax.jit(lambda x: len(harvest.show(jnp.sin, values=True)(x)))(X)
    assert jax.jit(lambda x: len(harvest.show(jnp.sin)(x)))(X) == 3


@pytest.mark.parametrize(
    "value, expected",
    [
        (np.float32(0.25), "0.25"),
        (np.int32(7), "7"),
        (np.True_, "True"),
        (np.array([True, False, True]), "2 of 3 true"),
        (np.arange(8.0), "▁▂▃▄▅▆▇█ 0 .. 7"),
        (np.array([0.0, np.nan, 7.0]), "▁×█ 0 .. 7"),
        (np.array([np.inf, np.nan]), "××"),
        (np.zeros((0, 3)), ""),
        (jnp.array([0.0, 7.0], jnp.bfloat16), "▁█ 0 .. 7"),
        (np.int8([-1, 1]), "▁█ -1 .. 1"),
        (np.array([3 + 4j, 0]), "█▁ 0 .. 5"),
        (np.ones(2), "all 1"),
    ],
)
def test_summaries(value, expected):
    assert summary(value) == expected


def test_what_has_no_numbers_has_no_summary():
    assert summary(jax.random.key(0)) == ""
    assert summary(object()) == ""


def test_a_block_is_the_mean_of_a_part():
    # 24 values in 12 parts of two: the means of the pairs run evenly from 0 to 11.
    values = np.repeat(np.arange(12.0), 2) + np.tile([-0.5, 0.5], 12)
    blocks = "▁▂▃▄▅▆▇█"
    assert sparkline(values) == "".join(blocks[round(i / 11 * 7)] for i in range(12))
