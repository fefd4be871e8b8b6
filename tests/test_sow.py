"""`sow`, `perturb` and `scope`: what they say, and that they change nothing else."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import capture, perturb, reap, scope, sow

X = jnp.array([0.5, 1.0, 2.0])


def h(x):
    return sow(x, name="h")


# ------------------------------------------------------------------------------------ names

NOT_NAMES = [3, None, b"h", "", "a/b", "/", "h/"]


@pytest.mark.parametrize("name", NOT_NAMES, ids=repr)
@pytest.mark.parametrize("mark", [sow, perturb])
def test_a_name_is_a_string_without_slashes(mark, name):
    tag = getattr(mark, "__wrapped__", mark)  # behind the type checker of the tests
    with pytest.raises(harvest.SowError, match=f"`{mark.__name__}` got the name {name!r}; wanted"):
        tag(X, name=name)


@pytest.mark.parametrize("name", [3, None, b"s", "", "/", "a//b", "/a", "a/"], ids=repr)
def test_the_components_of_a_scope_are_not_empty(name):
    make = getattr(scope, "__wrapped__", scope)
    with pytest.raises(harvest.SowError, match=f"`scope` got {name!r}; wanted a string"):
        make(name)


@pytest.mark.parametrize("name", ["h", " ", "jvp(h)", "*", "a.b[0]", "é", "{}", "%s", "\\d"])
def test_any_other_string_is_a_name(name):
    def fn(x):
        with scope(name):
            return sow(x, name=name)

    assert list(reap(fn)(X)) == [f"{name}/{name}"]
    assert list(reap(fn, f"{name}/{name}")(X)) == [f"{name}/{name}"]


# ----------------------------------------------------------------------------------- scopes


def test_scopes_nest():
    def fn(x):
        x = h(x)
        with scope("a"):
            x = h(x)
            with scope("b/c"), scope("d"):
                x = h(x)
            x = sow(x, name="again")
        return sow(x, name="end")

    assert list(reap(fn)(X)) == ["h", "a/h", "a/b/c/d/h", "a/again", "end"]


AROUND = {  # one sow of the shape of `X`, inside a structure
    "call": lambda fn, x: fn(x),
    "jit": lambda fn, x: jax.jit(fn)(x),
    "jit of jit": lambda fn, x: jax.jit(jax.jit(fn))(x),
    "scan": lambda fn, x: lax.scan(lambda c, _: (fn(c), None), x, length=1)[0],
    "map": lambda fn, x: lax.map(fn, x),
    "cond": lambda fn, x: lax.cond(True, fn, fn, x),
    "vmap": lambda fn, x: jax.vmap(fn)(x),
    "checkpoint": lambda fn, x: jax.checkpoint(fn)(x),
    "grad": lambda fn, x: jax.grad(lambda x: fn(x).sum())(x),
    "vmap of grad": lambda fn, x: jax.vmap(jax.grad(fn))(x),
    "jvp": lambda fn, x: jax.jvp(fn, (x,), (x,))[0],
    "hessian": lambda fn, x: jax.hessian(lambda x: fn(x).sum())(x),
    "linearize": lambda fn, x: jax.linearize(fn, x)[0],
    "custom_jvp": lambda fn, x: custom_jvp(fn)(x),
    "custom_vjp": lambda fn, x: custom_vjp(fn)(x),
    "grad of checkpoint": lambda fn, x: jax.grad(lambda x: jax.checkpoint(fn)(x).sum())(x),
    "grad of custom_vjp": lambda fn, x: jax.grad(lambda x: custom_vjp(fn)(x).sum())(x),
}


def custom_jvp(fn):
    custom = jax.custom_jvp(fn)
    custom.defjvp(lambda primals, tangents: (custom(*primals), *tangents))
    return custom


def custom_vjp(fn):
    custom = jax.custom_vjp(fn)
    custom.defvjp(lambda x: (fn(x), None), lambda _, ct: (ct,))
    return custom


@pytest.mark.parametrize("around", AROUND)
def test_scopes_cross(around):
    def inner(x):
        with scope("in"), jax.named_scope("jvp(z)"):
            return h(x)

    def outer(x):
        with jax.named_scope("theirs"), scope("out"), jax.named_scope("vmap"), scope("jvp(z)"):
            return AROUND[around](inner, x)

    assert list(reap(outer)(X)) == ["out/jvp(z)/in/h"]
    with scope("around"):
        assert list(reap(outer)(X)) == ["out/jvp(z)/in/h"]
        assert list(jax.jit(reap(outer))(X)) == ["out/jvp(z)/in/h"]


def test_one_jitted_function_in_many_scopes():
    inner = jax.jit(h)

    def fn(x):
        for i in range(3):
            with scope(f"layers/{i}"):
                x = inner(x)
        return inner(x)

    assert list(reap(fn)(X)) == ["layers/0/h", "layers/1/h", "layers/2/h", "h"]


def test_scope_labels_the_program():
    def fn(x):
        with scope("block/attention"):
            return jnp.sin(h(x))

    text = jax.jit(fn).lower(X).as_text(debug_info=True)
    assert "block/attention/sin" in text


def test_scope_ends_with_an_error():
    def fn(x):
        with contextlib.suppress(KeyError), scope("lost"):
            raise KeyError
        return h(x)

    assert list(reap(fn)(X)) == ["h"]


def test_scope_as_a_decorator():
    assert list(reap(scope("a/b")(lambda x: h(h(x))), mode="append")(X)) == ["a/b/h"]


# -------------------------------------------------------------------------- nothing changes

EAGER = {
    "array": X,
    "numpy": np.ones(3, np.float32),
    "numpy f64": np.ones(3),
    "numpy scalar": np.float64(2),
    "strings": np.array(["text"]),
    "key": jax.random.key(0),
    "float": 2.5,
    "int": 3,
    "text": "text",
    "function": jnp.sin,
    "None": None,
}


@pytest.mark.parametrize("mark", [sow, perturb])
@pytest.mark.parametrize("value", EAGER.values(), ids=EAGER)
def test_outside_of_any_transform_nothing_happens(value, mark):
    assert mark(value, name="h") is value
    tree = {"a": [value, (value,)]}
    marked = mark(tree, name="h")
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    assert all(leaf is value for leaf in jax.tree.leaves(marked))


def python_calls(fn, *args):
    """How many Python functions a call runs: none, if JAX dispatches it in C++."""
    names, outer = [], sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and names.append(frame.f_code.co_name))
    try:
        fn(*args)
    finally:
        sys.setprofile(outer)
    return names


def marked(x):
    sow(x, name="bare")
    return jnp.sin(perturb(h(x), name="g"))


FAST = {
    "jit": marked,
    "grad": jax.grad(lambda x: marked(x).sum()),
    "vmap": jax.vmap(marked),
    "scan": lambda x: lax.scan(lambda c, _: (marked(c), None), x, length=3)[0],
    "checkpoint": jax.grad(lambda x: jax.checkpoint(marked)(x).sum()),
}


@pytest.mark.parametrize("name", FAST)
def test_a_jitted_call_stays_in_cpp(name):
    jitted = jax.jit(FAST[name])
    jitted(X)
    jitted(X)
    assert python_calls(jitted, X) == []
    # The oracle sees what an effect that is not ours costs.
    logged = jax.jit(lambda x: jax.debug.callback(lambda: None) or x)
    logged(X)
    assert python_calls(logged, X) != []


@pytest.mark.parametrize("around", AROUND)
def test_the_lowered_program_is_the_same(around):
    def text(sow, perturb):
        def fn(x):
            sow(x, name="bare")
            return sow(perturb(x, name="g") ** 2, name="h")

        return jax.jit(lambda x: AROUND[around](fn, x)).lower(X).as_text()

    identity = lambda value, name: value
    assert text(sow, perturb) == text(identity, identity)


@pytest.mark.parametrize("around", AROUND)
def test_the_result_is_the_same(around):
    program = lambda fn: lambda x: AROUND[around](fn, x)
    value = program(lambda x: h(jnp.sin(x)))(X)
    np.testing.assert_array_equal(value, program(jnp.sin)(X))


# ---------------------------------------------------------------------------------- perturb


def test_perturb_sows_the_cotangent():
    loss = lambda x: jnp.sum(perturb(x, name="g") ** 3)
    grads, collected = capture(jax.grad(loss))(X)
    np.testing.assert_allclose(grads, 3 * X**2, rtol=1e-6)
    np.testing.assert_allclose(collected["g"][0], 3 * X**2, rtol=1e-6)
    assert capture(loss)(X)[1] == {}


def test_perturb_of_a_tree_has_none_for_what_has_no_cotangent():
    def loss(x):
        tree = perturb({"a": x, "b": (jnp.arange(3), "text", None)}, name="g")
        assert tree["b"][1:] == ("text", None)
        return jnp.sum(2 * tree["a"])

    (cotangent,) = capture(jax.grad(loss))(X)[1]["g"]
    np.testing.assert_array_equal(cotangent["a"], [2.0, 2.0, 2.0])
    assert cotangent["b"] == (None, None, None)


def test_perturb_is_the_identity_in_forward_mode():
    fn = lambda x: perturb(x, name="g") ** 2
    out, tangent = jax.jvp(fn, (X,), (jnp.ones(3),))
    np.testing.assert_allclose(tangent, 2 * X)
    assert capture(lambda x: jax.jvp(fn, (x,), (x,)))(X)[1] == {}


def test_perturb_logs_if_asked():
    loss = lambda x: jnp.sum(perturb(x, name="g", log=True) ** 2)
    _, logs = jax.vjp(loss, X)[1].with_logs(1.0)
    np.testing.assert_allclose(logs["g"], 2 * X)
