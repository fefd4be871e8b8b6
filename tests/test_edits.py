import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from harvest import (
    PlantError,
    add,
    at,
    chain,
    each,
    indexed,
    plant,
    reap,
    replace,
    scale,
    sow,
    zero,
)

X = jnp.array([1.0, -2.0, 4.0])
LENGTH = 5


def site(x):
    return sow(x, name="h")


def plain(x):
    return sow(x, name="h") + 1


def loop(x):
    """Returns the state after each of five steps `h = 2 x + i`."""

    def step(x, i):
        x = sow(2 * x + i, name="h")
        return x, x

    return lax.scan(step, x, jnp.arange(float(LENGTH)))[1]


def loop_by_hand(x, edit):
    hs = []
    for i in range(LENGTH):
        x = edit(2 * x + i, i)
        hs.append(x)
    return np.stack(hs)


def nested(x):
    """Two by three steps `h = 2 x + 1`."""

    def inner(x, _):
        x = sow(2 * x + 1, name="h")
        return x, x

    return lax.scan(lambda x, _: lax.scan(inner, x, length=3), x, length=2)[1]


def nested_by_hand(x, edit):
    hs = np.zeros((2, 3, *np.shape(x)), np.float32)
    for i in range(2):
        for j in range(3):
            x = hs[i, j] = edit(2 * x + 1, i, j)
    return hs


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


# --------------------------------------------------------------------------- outside of loops

SIMPLE = {
    "callable": (jnp.square, [2, 5, 17]),
    "replace": (replace(jnp.array([7.0, 8.0, 9.0])), [8, 9, 10]),
    "value": (np.float32([7, 8, 9]), [8, 9, 10]),
    "add a number": (add(10), [12, 9, 15]),
    "add an array": (add(jnp.array([1.0, 2.0, 3.0])), [3, 1, 8]),
    "add broadcasts": (add(np.ones((1,), np.float32)), [3, 0, 6]),
    "add casts": (add(np.float64(0.5)), [2.5, -0.5, 5.5]),
    "add integers": (add(jnp.array([1, 2, 3])), [3, 1, 8]),
    "scale": (scale(0.5), [1.5, 0, 3]),
    "scale by a mask": (scale(np.array([True, False, True])), [2, 1, 5]),
    "zero": (zero(), [1, 1, 1]),
    "chain": (chain(add(1), jnp.square, scale(jnp.float32(2))), [9, 3, 51]),
    "empty chain": (chain(), [2, -1, 5]),
    "module": (eqx.nn.Lambda(jnp.negative), [0, 3, -3]),
    "indexed": (indexed(lambda h, index: h + len(index)), [2, -1, 5]),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_edits(name):
    edit, wanted = SIMPLE[name]
    out = plant(plain, {"h": edit})(X)
    close(out, np.float32(wanted))
    assert out.dtype == jnp.float32


@pytest.mark.parametrize("name", SIMPLE)
def test_edits_inside_of_jit_and_checkpoint(name):
    edit, wanted = SIMPLE[name]
    close(plant(jax.jit(plain), {"h": edit})(X), wanted)
    close(plant(jax.checkpoint(plain), {"h": edit})(X), wanted)


class Scaled(eqx.Module):
    """A probe that is callable, and as a value a pytree like any other."""

    factor: jax.Array

    def __call__(self, h):
        return self.factor * h


def test_replace_takes_a_value_that_is_callable():
    f = lambda x: sow(Scaled(x), name="h")(x)
    close(plant(f, {"h": replace(Scaled(jnp.float32(3)))})(jnp.float32(2)), 6)
    double = lambda module: Scaled(2 * module.factor)
    close(plant(f, {"h": double})(jnp.float32(2)), 8)


def pair(x):
    h = sow({"a": x, "b": (x[0], "static", jnp.int32(3))}, name="h")
    return h["a"] * h["b"][0] + h["b"][2].astype(x.dtype)


ONE_EACH = {"a": X, "b": (jnp.float32(5), "static", 1)}
PYTREES = {
    "zero": (zero(), [0, 0, 0]),
    "add to all": (add(2), [14, 5, 23]),
    "add to each": (add(ONE_EACH), [16, -20, 52]),
    "scale": (scale(2), [10, -2, 22]),
    "callable": (lambda h: {**h, "a": h["a"] + 1}, [5, 2, 8]),
    "chain": (chain(scale(2), lambda h: {**h, "a": h["a"] + 1}), [12, 0, 24]),
}


@pytest.mark.parametrize("name", PYTREES)
def test_edits_of_pytrees(name):
    edit, wanted = PYTREES[name]
    close(plant(pair, {"h": edit})(X), wanted)


INTEGERS = [(add(3), [4, 5, 6]), (scale(2), [2, 4, 6]), (zero(), [0, 0, 0]), (add(True), [2, 3, 4])]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
@pytest.mark.parametrize("edit, wanted", INTEGERS)
def test_integers_stay_integers(edit, wanted, dtype):
    out = plant(site, {"h": edit})(jnp.arange(1, 4, dtype=dtype))
    np.testing.assert_array_equal(out, wanted)
    assert out.dtype == dtype


def test_an_edit_may_sow():
    edit = lambda h: 2 * sow(h + 1, name="inner")
    acts = reap(plant(plain, {"h": edit}))(X)
    close(acts["inner"], X + 1)
    close(acts["h"], 2 * (X + 1))


WRONG = [
    (plain, add(jnp.ones(2)), r"f32\[2\], which does not broadcast to f32\[3\].*'h'"),
    (plain, add(jnp.ones((2, 3))), r"f32\[2,3\], which does not broadcast to f32\[3\].*'h'"),
    (plain, scale(1j), r"operand of type c\w+\[\] for f32\[3\].*'h'"),
    (lambda x: site(jnp.arange(3)), add(0.5), r"f\w+\[\] for i32\[3\].*'h'"),
    (lambda x: site(x > 0), add(1), r"i\w+\[\] for bool\[3\].*'h'"),
    (plain, add((X, X)), r"structure .* for a value of structure"),
    (plain, lambda h: h[:2], r"got f32\[2\], wanted f32\[3\].*'h' \(sown at .*test_edits.py:\d+"),
    (plain, lambda h: h > 0, r"got bool\[3\], wanted f32\[3\].*'h'"),
    (plain, lambda h: (h, h), r"got a value of structure .*, wanted .*'h'"),
    (plain, lambda h: None, r"got a value of structure .*, wanted .*'h'"),
    (plain, indexed(lambda h, i: h.astype(jnp.float16)), r"got f16\[3\], wanted f32\[3\]"),
]


@pytest.mark.parametrize("f, edit, message", WRONG)
def test_edits_that_do_not_fit(f, edit, message):
    with pytest.raises(PlantError, match=message):
        plant(f, {"h": edit})(X)


@pytest.mark.parametrize("edit, operand", [(add, "a"), (scale, object())])
def test_operands_of_a_wrong_kind_are_refused_at_once(edit, operand):
    with pytest.raises(PlantError, match=f"`{edit.__name__}` got .*; wanted a number, an array"):
        edit(operand)


# ------------------------------------------------------------------------------------ in loops

INDICES = {
    "int": (3, [3]),
    "negative int": (-2, [3]),
    "slice": (slice(1, 4), [1, 2, 3]),
    "open slice": (slice(3, None), [3, 4]),
    "slice from the end": (slice(-2, None), [3, 4]),
    "stepping slice": (slice(None, None, 2), [0, 2, 4]),
    "slice backwards": (slice(None, 0, -2), [4, 2]),
    "empty slice": (slice(3, 3), []),
    "list": ([0, 4], [0, 4]),
    "array": (jnp.array([4, 1]), [1, 4]),
    "negative entries": (np.array([-1, 0]), [0, 4]),
    "scalar array": (jnp.int32(-1), [4]),
    "numpy scalar": (np.int64(2), [2]),
    "mask": (jnp.array([True, False, False, True, False]), [0, 3]),
    "list mask": ([False, True, False, False, False], [1]),
    "ellipsis": (..., [0, 1, 2, 3, 4]),
    "tuple": ((2,), [2]),
}


def halved(h):
    return h / 2


@pytest.mark.parametrize("name", INDICES)
def test_at_touches_the_chosen_iterations(name):
    index, chosen = INDICES[name]
    wanted = loop_by_hand(3, lambda h, i: h / 2 if i in chosen else h)
    close(plant(loop, {"h": at(index, halved)})(jnp.float32(3)), wanted)
    close(plant(jax.jit(loop), {"h": at(index, halved)})(jnp.float32(3)), wanted)


@pytest.mark.parametrize("name", ["scalar array", "array", "negative entries", "mask"])
def test_indices_may_be_traced(name):
    index, chosen = INDICES[name]
    edited = jax.jit(lambda x, index: plant(loop, {"h": at(index, halved)})(x))
    wanted = loop_by_hand(3, lambda h, i: h / 2 if i in chosen else h)
    close(edited(jnp.float32(3), jnp.asarray(index)), wanted)


def test_indices_may_be_mapped():
    edited = lambda index: plant(loop, {"h": at(index, halved)})(jnp.float32(3))
    wanted = [loop_by_hand(3, lambda h, i, k=k: h / 2 if i == k else h) for k in range(LENGTH)]
    close(jax.vmap(edited)(jnp.arange(LENGTH)), wanted)
    close(jax.vmap(edited)(jnp.eye(LENGTH, dtype=bool)), wanted)


NESTED_INDICES = [
    ((1, 2), lambda i, j: (i, j) == (1, 2)),
    ((..., 0), lambda i, j: j == 0),
    ((-1, ...), lambda i, j: i == 1),
    ((0, slice(1, None)), lambda i, j: i == 0 and j > 0),
    ((jnp.array([0, 1]), np.array([False, True, False])), lambda i, j: j == 1),
    ((..., ...), lambda i, j: True),
]


@pytest.mark.parametrize("index, chosen", NESTED_INDICES)
def test_at_in_nested_loops_takes_one_index_for_each(index, chosen):
    wanted = nested_by_hand(1.0, lambda h, i, j: h / 2 if chosen(i, j) else h)
    close(plant(nested, {"h": at(index, halved)})(jnp.float32(1)), wanted)


BAD_INDICES = [
    (loop, at(5, zero()), r"index 5 for a loop of length 5.*'h' \(sown at .*test_edits.py:\d+"),
    (loop, at(-6, zero()), "index -6 for a loop of length 5"),
    (loop, at([True, False], zero()), r"mask of shape \(2,\) for a loop of length 5"),
    (loop, at((1, 2), zero()), r"2 index\(es\) in 1 nested loops"),
    (nested, at(1, zero()), r"1 index\(es\) in 2 nested loops.*with `\.\.\.` for all"),
    (nested, at((0, 3), zero()), "index 3 for a loop of length 3"),
    (plain, at(0, zero()), r"`at\(\.\.\.\)` where there is no loop.*'h'"),
    (plain, each(add(X)), r"`each\(\.\.\.\)` where there is no loop.*'h'"),
    (loop, each(add(X)), r"loop axes \(5,\), and got an array of shape \(3,\).*'h'"),
    (nested, each(add(jnp.ones((2, 2)))), r"loop axes \(2, 3\), and got .* shape \(2, 2\)"),
    (loop, at(0, replace(jnp.ones(4))), r"got f32\[4\], wanted f32\[\].*in one iteration"),
    (loop, replace(jnp.ones(4)), r"got f32\[4\], wanted f32\[5\], for the site 'h'"),
    (loop, np.float32(1), r"got f32\[\], wanted f32\[5\]"),
    (nested, jnp.ones((3, 2)), r"got f32\[3,2\], wanted f32\[2,3\]"),
    (loop, chain(add(1), at(7, zero())), "index 7 for a loop of length 5"),
    (loop, at(0, chain(each(add(X)))), r"shape \(3,\)"),
]  # fmt: skip


@pytest.mark.parametrize("f, edit, message", BAD_INDICES)
def test_indices_that_do_not_fit(f, edit, message):
    with pytest.raises(PlantError, match=message):
        plant(f, {"h": edit})(jnp.float32(1))


@pytest.mark.parametrize("index", [1.5, "a", True, None, np.ones(3), np.array(True), [[0, 1]]])
def test_indices_of_a_wrong_kind_are_refused_at_once(index):
    with pytest.raises(PlantError, match=r"`at` got .* index.*; wanted"):
        at(index, zero())


def test_a_value_in_at_is_of_one_iteration_or_stacked():
    once, stacked = jnp.float32(7), 10 * jnp.arange(5.0)
    by_hand = lambda value: loop_by_hand(3, lambda h, i: value(i) if i in (1, 3) else h)
    for index in ([1, 3], slice(1, 4, 2)):
        close(plant(loop, {"h": at(index, once)})(jnp.float32(3)), by_hand(lambda i: 7))
        close(plant(loop, {"h": at(index, stacked)})(jnp.float32(3)), by_hand(lambda i: 10 * i))
        close(
            plant(loop, {"h": at(index, chain(replace(stacked), add(1)))})(jnp.float32(3)),
            by_hand(lambda i: 10 * i + 1),
        )


def test_several_indices_are_chained():
    edit = chain(at(0, zero()), at(-1, add(5)), at([0, 2], lambda h: h + 1))
    wanted = loop_by_hand(3, lambda h, i: {0: 1, 2: h + 1, 4: h + 5}.get(i, h))
    close(plant(loop, {"h": edit})(jnp.float32(3)), wanted)


PER_LAYER = np.float32([1, 0, 2, -1, 3])
MODULES = eqx.filter_vmap(lambda key: eqx.nn.Linear("scalar", "scalar", key=key))(
    jax.random.split(jax.random.key(0), LENGTH)
)


def linear(h, i):
    return np.ravel(MODULES.weight)[i] * h + np.ravel(MODULES.bias)[i]


EACH = {
    "scale": (scale(PER_LAYER), lambda h, i: h * PER_LAYER[i]),
    "add": (add(jnp.asarray(PER_LAYER)), lambda h, i: h + PER_LAYER[i]),
    "value": (PER_LAYER, lambda h, i: PER_LAYER[i]),
    "module": (MODULES, linear),
    "chain": (chain(MODULES, scale(PER_LAYER)), lambda h, i: PER_LAYER[i] * linear(h, i)),
    "at": (at(2, add(PER_LAYER)), lambda h, i: h + PER_LAYER[i] if i == 2 else h),
    "mask": (at(PER_LAYER > 0, add(PER_LAYER)), lambda h, i: h + max(PER_LAYER[i], 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", EACH)
def test_each_slices_arrays_along_the_loop(name):
    edit, by_hand = EACH[name]
    close(plant(loop, {"h": each(edit)})(jnp.float32(3)), loop_by_hand(3, by_hand))


def test_each_inside_of_other_edits():
    edit = at(slice(1, 3), chain(each(add(PER_LAYER)), scale(2)))
    by_hand = lambda h, i: 2 * (h + PER_LAYER[i]) if i in (1, 2) else h
    close(plant(loop, {"h": edit})(jnp.float32(3)), loop_by_hand(3, by_hand))


def test_each_in_nested_loops_has_all_loop_axes():
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    wanted = nested_by_hand(X, lambda h, i, j: h * grid[i, j])
    close(plant(nested, {"h": each(scale(grid))})(X), wanted)
    heads = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    wanted = nested_by_hand(X, lambda h, i, j: h + heads[i, j])
    close(plant(nested, {"h": each(add(heads))})(X), wanted)


# ----------------------------------------------------------------------------------- batches


def of_matrix(x):
    return sow(2 * x, name="h") ** 2


BATCHED = {
    "callable": (lambda h: h / jnp.max(h), lambda h: h / np.max(h)),
    "add": (add(X), lambda h: h + X[None]),
    "scale": (scale(jnp.float32([[2], [3]])), lambda h: h * np.float32([[2], [3]])),
    "zero": (zero(), np.zeros_like),
    "chain": (chain(jnp.sort, add(1)), lambda h: np.sort(h) + 1),
    "indexed": (indexed(lambda h, index: h - h[0, 0]), lambda h: h - h[0, 0]),
}
BATCH = jnp.arange(1.0, 25.0).reshape(4, 2, 3)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_edits_see_one_example_of_a_batch(name, axis):
    edit, by_hand = BATCHED[name]
    one, two = (np.stack([by_hand(k * x) ** 2 for x in np.asarray(BATCH)]) for k in (2, 4))
    xs = jnp.moveaxis(BATCH, 0, axis)
    mapped = jax.vmap(of_matrix, in_axes=axis)
    close(plant(mapped, {"h": edit})(xs), one)
    close(jax.vmap(plant(of_matrix, {"h": edit}), in_axes=axis)(xs), one)
    close(plant(jax.vmap(mapped), {"h": edit})(jnp.stack([xs, 2 * xs])), np.stack([one, two]))
    # (batch, 2, 2, 3), the outer map over any axis, the inner one over the first of the others
    xs = jnp.moveaxis(jnp.stack([BATCH, 2 * BATCH], axis=1), 0, axis)
    mapped = jax.vmap(jax.vmap(of_matrix), in_axes=axis)
    close(plant(mapped, {"h": edit})(xs), np.stack([one, two], axis=1))


@pytest.mark.parametrize("name", [name for name in EACH if name != "value"])
def test_edits_in_loops_see_one_example_of_a_batch(name):
    edit, by_hand = EACH[name]
    wanted = np.stack([loop_by_hand(x, by_hand) for x in np.asarray(X)])
    close(plant(jax.vmap(loop), {"h": each(edit)})(X), wanted)


def test_an_edit_may_not_batch_what_was_not():
    f = lambda x: sow({"a": x, "b": jnp.ones(3)}, name="h")["a"]
    edit = lambda h: {"a": h["a"], "b": h["a"]}
    close(jax.vmap(plant(f, {"h": edit}))(BATCH[0]), BATCH[0])
    with pytest.raises(PlantError, match="'h'"):
        plant(jax.vmap(f), {"h": edit})(BATCH[0])


# --------------------------------------------------------------------------------- gradients


def test_a_planted_value_is_a_constant():
    f = lambda x: sow(x, name="h") ** 2 + 3 * x
    total = lambda x, value: jnp.sum(plant(f, {"h": value})(x))
    for g in (total, lambda x, value: total(x, replace(value))):
        of_x, of_value = jax.grad(g, argnums=(0, 1))(X, 5 * X)
        close(of_x, [3, 3, 3])
        close(of_value, 2 * 5 * X)


STEERED = {
    "add": (add, lambda h, k: h + k),
    "scale": (scale, lambda h, k: h * k),
    "callable": (lambda k: lambda h: h**2 * k, lambda h, k: h**2 * k),
    "chain": (lambda k: chain(add(k), scale(k)), lambda h, k: (h + k) * k),
    "zero": (lambda k: chain(zero(), add(k)), lambda h, k: 0 * h + k),
}


@pytest.mark.parametrize("name", STEERED)
def test_edits_differentiate_as_written(name):
    edit, by_hand = STEERED[name]
    f = lambda x, k: jnp.sum(plant(of_matrix, {"h": edit(k)})(x))
    g = lambda x, k: jnp.sum(by_hand(2 * x, k) ** 2)
    args = X, jnp.float32(3)
    for got, wanted in zip(jax.grad(f, (0, 1))(*args), jax.grad(g, (0, 1))(*args), strict=True):
        close(got, wanted)


def test_gradients_of_each_reach_each_layer():
    f = lambda factors: jnp.sum(plant(loop, {"h": each(scale(factors))})(jnp.float32(3))[-1])

    def by_hand(factors):
        x = jnp.float32(3)
        for i in range(LENGTH):
            x = (2 * x + i) * factors[i]
        return x

    factors = jnp.array([1.0, 0.5, 2.0, -1.0, 3.0])
    close(jax.grad(f)(factors), jax.grad(by_hand)(factors))


def test_iterations_that_are_not_chosen_have_no_part_in_the_gradient():
    # At 0 the square root has an infinite slope, which a mask would turn into NaN.
    edited = plant(loop, {"h": at(-1, jnp.sqrt)})
    slope = jax.grad(lambda x: edited(x)[-1])(jnp.float32(0))
    last = 2**4 * (0 + 1 / 2 + 2 / 4 + 3 / 8 + 4 / 16)
    close(slope, 2**5 / (2 * np.sqrt(last)))


def test_collected_after_an_edit():
    got = reap(plant(loop, {"h": at(2, zero())}))(jnp.float32(3))["h"]
    close(got, loop_by_hand(3, lambda h, i: 0 if i == 2 else h))


@pytest.mark.parametrize("edit", [lambda v: v + 1, indexed(lambda v, _: v + 1)])
def test_edits_of_what_is_the_same_for_all_examples(edit):
    f = jax.vmap(lambda x, y: x * sow(2 * y, name="h"), in_axes=(0, None))
    xs = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(plant(f, {"h": edit})(xs, jnp.float32(2)), 5 * xs)


def test_only_arrays_are_leaves_of_an_edit():
    assert jax.tree.leaves(at(1, zero())) == jax.tree.leaves(at((slice(1, 3), ...), zero())) == []
    edits = at(jnp.arange(5), add(jnp.ones((5, 3))))
    swept = jax.vmap(lambda edit: plant(loop, {"h": edit})(X))(edits)
    for k in range(5):
        np.testing.assert_allclose(swept[k], plant(loop, {"h": at(k, add(1))})(X))


def test_each_of_nothing_is_refused():
    with pytest.raises(PlantError, match=r"without arrays.*'h'"):
        plant(loop, {"h": each(jnp.sin)})(X)


def test_a_partial_is_an_edit_with_arrays():
    scaled = functools.partial(lambda factor, h: factor * h, jnp.arange(5.0))
    wanted = plant(loop, {"h": each(scale(jnp.arange(5.0)))})(X)
    np.testing.assert_allclose(plant(loop, {"h": each(scaled)})(X), wanted)


def test_keys_have_no_arithmetic():
    def f(key):
        return jax.random.uniform(sow(key, name="key"))

    key = jax.random.key(0)
    for edit in (add(1), scale(2)):
        with pytest.raises(PlantError, match=r"arithmetic for a value of type key.*which has none"):
            plant(f, {"key": edit})(key)
    assert plant(f, {"key": jax.random.key(1)})(key) == jax.random.uniform(jax.random.key(1))
