"""The form of tangents: of trees, in branches and while loops; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    CondSum,
    DuplicateSiteError,
    HarvestWarning,
    PlantError,
    SelectError,
    UnknownSiteError,
    UnsupportedError,
    folds,
    grad,
    jvp,
    sow,
)
from tests.helpers import PROGRAMS, SIZE

X = jnp.linspace(0.4, 1.3, SIZE)
T = jnp.array([1.0, -2.0, 3.0, 0.5])


def f(x):
    a = sow(x**2, name="a")
    return sow(jnp.sin(a), name="b")


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def test_trees():
    def g(x):
        h = sow({"x": x, "ints": jnp.arange(3), "static": (3, "s", None)}, name="h")
        y = sow((h["x"] ** 2, h["ints"] + 1, 2.5, "text"), name="y")
        return y[0], y[1], 1, "text", None

    zeros = np.zeros(3, jax.dtypes.float0)
    forms = [
        {"x": T, "ints": zeros, "static": (3, "s", None)},
        {"x": T, "ints": jnp.zeros(3, int), "static": (None, None, None)},
        {**grad(lambda x: jnp.sum(g(x)[0]))(X)["h"], "x": T},
    ]
    for form in forms:
        out, out_tangent, tangents = jvp(g, {"h": form})(X)
        assert out[2:] == (1, "text", None)
        close(out[:2], (X**2, jnp.arange(1, 4)))
        close(out_tangent[0], 2 * X * T)
        assert out_tangent[1].dtype == jax.dtypes.float0 and out_tangent[2:] == (None,) * 3
        close((tangents["h"]["x"], tangents["y"][0]), (T, 2 * X * T))
        assert tangents["h"]["ints"].dtype == tangents["y"][1].dtype == jax.dtypes.float0
        assert tangents["h"]["static"] == (None,) * 3 and tangents["y"][2:] == (None, None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tangents_are_of_the_dtype_of_the_site(dtype):
    g = lambda x: 3 * sow(x.astype(dtype), name="h").astype(jnp.float32)
    for one in (1, 1.0, jnp.ones((), dtype)):
        _, out_tangent, tangents = jvp(g, {"h": one})(jnp.float32(2))
        assert tangents["h"].dtype == dtype and out_tangent == 3


def one_sided(taken, x):
    return lax.cond(taken, lambda x: sow(2 * x, name="h") ** 2, lambda x: x, x)


def test_a_branch_without_the_site():
    for form in (T, CondSum(jnp.asarray(1), (None, T))):
        for taken in (True, False):
            got = jvp(one_sided, {"h": form})(jnp.asarray(taken), X)
            here = T if taken else 0 * T
            tangents = {"h": CondSum(jnp.asarray(int(taken)), (None, here))}
            close(got[1:], (4 * X * here, tangents))


def test_branches_of_different_types_in_a_loop():
    def g(xs):
        pair = lambda x: jnp.sum(sow((x, 3 * x), name="h")[1])
        single = lambda x: sow(x**2, name="h")

        def step(total, row):
            return total + lax.cond(row[0] % 2 == 0, pair, single, row[1]), None

        return lax.scan(step, 0.0, (jnp.arange(SIZE), xs))[0]

    even = jnp.array([1.0, 0.0, 1.0, 0.0])
    pushed = CondSum(jnp.zeros(SIZE, int), (T, (jnp.ones(SIZE), 2 * T)))
    index = jnp.array([1, 0, 1, 0])
    wanted = CondSum(index, ((1 - even) * T, (even, 2 * even * T)))
    _, out_tangent, tangents = jvp(g, {"h": pushed})(X)
    close((out_tangent, tangents), (jnp.sum((1 + even) * T), {"h": wanted}))


def halved(trips, x):
    step = lambda carry: (carry[0] + 1, sow(carry[1] ** 2 / 2, name="h"))
    return lax.while_loop(lambda carry: carry[0] < trips, step, (0, x))[1]


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_a_tangent_enters_in_every_iteration_of_a_while_loop(trips):
    def by_hand(eps):
        x = X
        for _ in range(trips):
            x = x**2 / 2 + eps
        return x

    wanted = jax.jvp(by_hand, (0 * X,), (T,))
    reducers = {"h": (folds.last(), folds.count())}
    *got, tangents = jvp(halved, {"h": T}, reducers)(jnp.asarray(trips), X)
    close(tuple(got), wanted)
    last, count = tangents["h"]
    close(last, wanted[1] if trips else 0 * T)
    assert count.dtype == jax.dtypes.float0
    many = jnp.full(2, trips)
    batched = jax.vmap(jvp(halved, {"h": T}, []))(many, jnp.stack([X, X]))
    close(batched[1], jnp.stack([wanted[1]] * 2))


# --------------------------------------------------------------------------- what is refused

WRONG = [
    (X[:2], r"got f32\[2\], wanted f32\[4\], for the site 'a' \(sown at .*test_jvp_forms.py:\d+\)"),
    (X[None], r"got f32\[1,4\], wanted f32\[4\]"),
    (jnp.arange(SIZE), r"got i32\[4\], wanted f32\[4\].*cast it with `.astype\('float32'\)`"),
    ([X], r"got a tangent of structure .*\[\*\].*, wanted PyTreeDef\(\*\), for the site 'a'"),
    ((X,), r"got a t(uple|angent of structure) .* the site 'a'"),
    (jnp.sin, "got a `PjitFunction`, wanted f32"),
    ("text", "got a `str`, wanted f32"),
]


@pytest.mark.parametrize("t, message", WRONG)
def test_tangents_that_do_not_fit(t, message):
    with pytest.raises(PlantError, match=message):
        jvp(f, {"a": t})(X)


def test_tangents_of_leaves_without_derivative_are_of_their_shape():
    g = lambda x: sow((x, jnp.arange(3)), name="h")[0]
    with pytest.raises(PlantError, match=r"got i32\[2\] for i32\[3\], wanted zeros of .*float0"):
        jvp(g, {"h": (X, jnp.arange(2))})(X)


def test_wrong_keys():
    with pytest.raises(UnknownSiteError, match="`tangents`: the key 'aa' matches no site; did"):
        jvp(f, {"aa": X})(X)
    with pytest.raises(UnknownSiteError, match="`jvp`: the key 'typo' matches no site"):
        jvp(f, {"a": X}, "typo")(X)
    with pytest.raises(SelectError, match="`select` got 3 of type `int`"):
        jvp(f, {"a": X}, 3)
    twice = lambda x: sow(sow(x, name="h"), name="h")
    with pytest.raises(DuplicateSiteError, match=r"`jvp`: 'h' is sown 2 times"):
        jvp(twice, {}, "h")(X)
    with pytest.raises(DuplicateSiteError, match=r"'h' is sown 2 times"):
        jvp(twice, {"h": X}, [])(X)


def test_values_of_a_while_loop_have_no_stack():
    with pytest.raises(UnsupportedError, match=r"`jvp`: the site 'h' .*folds.last\(\)"):
        jvp(halved, {"h": X})(jnp.asarray(2), X)


def test_branches_that_do_not_fit():
    taken = jnp.asarray(True)
    with pytest.raises(PlantError, match="got a `CondSum` of 3 branches, wanted 2"):
        jvp(one_sided, {"h": CondSum(jnp.asarray(1), (None, X, X))})(taken, X)
    with pytest.raises(PlantError, match=r"got a value for branch 0 .*wanted None there"):
        jvp(one_sided, {"h": CondSum(jnp.asarray(1), (X, X))})(taken, X)


def test_a_bare_sow_lets_nothing_through():
    def bare(x):
        sow(2 * x, name="h")
        return x

    with pytest.warns(HarvestWarning, match=r"'h' changes nothing.*write `h = sow\(h, name='h'\)`"):
        close(jvp(bare, {"h": X})(X), (X, 0 * X, {"h": X}))


def test_functions_without_forward_mode():
    fn, site = PROGRAMS["custom_vjp"].fn, lambda h, step: sow(h, name="h")
    # What enters at a site inside does not come in by the arguments, which the rule is for.
    inside = jvp(lambda x: fn(x, site), {"h": X})(X)
    close(inside[1], X * X)  # the function is `x * h(x)`
    after = lambda x: fn(sow(x, name="h"), lambda h, step: h)
    with pytest.raises(TypeError, match=r"forward-mode .* custom_vjp"):
        jvp(after, {"h": X})(X)
    before = lambda x: sow(fn(x, lambda h, step: h), name="h")
    close(jvp(before, {"h": X})(X)[1], X)
