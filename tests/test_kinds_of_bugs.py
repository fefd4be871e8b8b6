"""What goes wrong in libraries that look into programs: one test for each kind, by mathematics.

The names say the kind. Most were reported by users of sow, hook or tap interfaces.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import (
    CondSum,
    PlantError,
    UnknownSiteError,
    UnsupportedError,
    capture,
    folds,
    plant,
    reap,
    scope,
    sites,
    sow,
)

XS = jnp.arange(1.0, 4.0)


def scanned(x, length=3):
    step = lambda x, _: (x * sow(x + 1, name="h"), None)
    return lax.scan(step, x, length=length)[0]


# ------------------------------------------------------------------------- silently missing


def test_values_in_a_loop_under_differentiation_are_not_lost():
    step = lambda x, _: (sow(jnp.sin(x), name="bare") * 0 + 2 * x, None)
    f = lambda x: lax.scan(step, x, length=3)[0]
    gradient, collected = capture(jax.grad(f))(1.0)
    assert gradient == 8
    np.testing.assert_allclose(collected["bare"][0], np.sin([1.0, 2.0, 4.0]), rtol=1e-6)


def test_a_constant_is_not_lost_in_any_structure():
    def f(x):
        constant = lambda x: (sow(jnp.float32(7), name="c"), x)[1]
        return constant(x)

    loop = lambda f: lambda x: lax.fori_loop(0, 1, lambda _, x: f(x), x)
    branch = lambda f: lambda x: lax.cond(x > 0, f, f, x)
    for around in (lambda f: f, jax.jit, jax.checkpoint, loop, branch):
        assert jnp.ravel(reap(around(f))(1.0)["c"]).tolist() == [7]


def test_keyword_arguments_are_arguments():
    f = jax.jit(lambda x, *, scale: x * sow(scale + 1, name="h"))
    assert reap(f)(2.0, scale=3.0) == {"h": 4.0}
    assert plant(f, {"h": 10.0})(2.0, scale=3.0) == 20


def test_a_loop_that_never_runs_has_no_values():
    assert reap(scanned)(1.0)["h"].shape == (3,)
    assert reap(functools.partial(scanned, length=0))(1.0)["h"].shape == (0,)


def test_zero_iterations_are_told_from_zeros():
    f = lambda n: lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, sow(c[1], name="h")), (0, 0.0)
    )
    for n in (0, 2):
        last, count = reap(f, {"h": (folds.last(), folds.count())})(n)["h"]
        assert (last, count) == (0, n)


def test_a_value_in_one_branch_only_is_not_a_number_in_the_other():
    f = lambda x: lax.cond(x > 0, lambda x: sow(2 * x, name="h"), lambda x: x, x)
    taken, other = reap(f)(3.0)["h"], reap(f)(-3.0)["h"]
    assert isinstance(taken, CondSum) and taken.index == 1 and taken.branches == (None, 6.0)
    assert other.index == 0 and other.branches == (None, 0.0)


def test_branches_that_are_not_taken_collect_nothing_for_any_example():
    f = lambda x: lax.cond(x > 0, lambda x: sow(2 * x, name="h"), lambda x: x, x)
    h = jax.vmap(reap(f))(jnp.array([3.0, -3.0]))["h"]
    assert h.index.tolist() == [1, 0] and h.branches[1].tolist() == [6, 0]


def test_pytrees_in_branches():
    f = lambda x: lax.cond(
        x > 0, lambda x: sow({"a": x}, name="h"), lambda x: sow({"a": -x}, name="h"), x
    )["a"]
    assert reap(f)(-2.0) == {"h": {"a": 2.0}}
    assert plant(f, {"h": {"a": 9.0}})(-2.0) == 9


# ---------------------------------------------------------------------- tracers, and state


def test_no_tracer_escapes_a_loop_a_jit_or_a_checkpoint():
    for around in (lambda f: f, jax.jit, jax.checkpoint):
        h = reap(around(scanned))(1.0)["h"]
        assert not isinstance(h, jax.core.Tracer)
        assert h.tolist() == [2, 3, 7]  # x = 1, 2, 6


def test_what_was_collected_can_be_an_argument_without_growing():
    @jax.jit
    def step(x, before):
        out, collected = capture(scanned)(x)
        return out, collected

    _, first = step(1.0, None)
    collected = first
    for _ in range(3):
        _, collected = step(1.0, collected)
    assert jax.tree.structure(collected) == jax.tree.structure(first)
    assert step._cache_size() == 2  # without, and with


def test_an_exception_leaves_nothing_behind():
    def f(x, fail):
        h = sow(x, name="h")
        if fail:
            raise RuntimeError("stop")
        return h

    with pytest.raises(RuntimeError, match="stop"):
        reap(f)(1.0, True)
    assert reap(f)(1.0, False) == {"h": 1.0}
    assert f(2.0, False) == 2


def test_a_transform_keeps_name_and_documentation():
    def model(x):
        """Of the user."""
        return sow(x, name="h")

    for transformed in (reap(model), capture(model), plant(model, {}), harvest.grad(model)):
        assert (transformed.__name__, transformed.__doc__) == ("model", "Of the user.")


# ------------------------------------------------------------------------------- repeated


def test_a_checkpoint_does_not_collect_twice():
    f = lambda x: jax.checkpoint(lambda x: jnp.sin(sow(x**2, name="h")))(x)
    gradient, collected = capture(jax.grad(f))(3.0)
    np.testing.assert_allclose(gradient, 6 * np.cos(9.0), rtol=1e-5)
    assert collected == {"h": (9.0,)}


def test_one_name_may_occur_many_times_and_anywhere():
    def f(x):
        for _ in range(2):
            x = sow(x + 1, name="h")
        return scanned(x)

    h = capture(f)(1.0)[1]["h"]
    assert [np.asarray(x).tolist() for x in h] == [2, 3, [4, 13, 157]]


def test_the_same_name_in_both_branches_under_vmap():
    f = lambda x: lax.cond(x > 0, lambda x: sow(x, name="h"), lambda x: sow(-x, name="h"), x)
    x = jnp.array([2.0, -3.0])
    assert jax.vmap(reap(f))(x)["h"].tolist() == [2, 3]


def test_modes_do_not_leak_from_one_site_to_another():
    """Two sites in one loop, of which one is folded, and the other is in a branch."""

    def step(x, _):
        x = sow(x + 1, name="a")
        lax.cond(x > 2, lambda: sow(x, name="b"), lambda: jnp.float32(0))
        return x, None

    f = lambda x: lax.scan(step, x, length=3)[0]
    collected = reap(f, {"a": folds.last(), "b": None})(0.0)
    assert collected["a"] == 3
    assert collected["b"].branches[1].tolist() == [0, 0, 3]


def test_scopes_are_not_filtered_by_name():
    def f(x):
        with scope("block"):
            return scanned(x)

    assert reap(f, "block/h")(1.0)["block/h"].tolist() == [2, 3, 7]
    assert reap(f, "**/h")(1.0).keys() == {"block/h"}


# ----------------------------------------------------------------------------------- axes


def test_axes_do_not_depend_on_where_vmap_stands():
    f = lambda x: sow(2 * x, name="h").sum() + sow(jnp.ones(()), name="one")
    x = jnp.arange(30.0).reshape(2, 3, 5)
    inside, outside = reap(jax.vmap(f, in_axes=2))(x), jax.vmap(reap(f), in_axes=2)(x)
    np.testing.assert_array_equal(inside["h"], outside["h"])
    assert inside["h"].shape == (5, 2, 3)
    assert inside["one"].shape == ()  # the same for all


def test_a_value_that_does_not_change_in_a_loop_has_the_axis_of_the_loop():
    f = lambda x, w: lax.scan(lambda x, _: (x * sow(w, name="h"), None), x, length=3)[0]
    assert reap(f)(1.0, 2.0)["h"].tolist() == [2, 2, 2]


def test_a_loop_keeps_the_order_of_its_inputs_in_reverse():
    f = lambda xs: lax.scan(lambda c, x: (c + sow(x, name="h"), None), 0.0, xs, reverse=True)[0]
    assert reap(f)(XS)["h"].tolist() == XS.tolist()
    assert plant(f, {"h": 2 * XS})(XS) == 12


# -------------------------------------------------------------------------- interventions


def test_a_misspelt_key_is_not_ignored():
    with pytest.raises(UnknownSiteError, match=r"'hh' matches no site; did you mean 'h'"):
        plant(scanned, {"hh": jnp.ones(3)})(1.0)


def test_a_value_of_another_shape_is_not_broadcast():
    for wrong in (jnp.ones(()), jnp.ones((1,)), jnp.ones((3, 1))):
        with pytest.raises(PlantError, match=r"wanted f32\[3\]"):
            plant(scanned, {"h": wrong})(1.0)


def test_a_value_of_another_type_does_not_change_the_result():
    with pytest.raises(PlantError, match=r"got i32\[3\], wanted f32\[3\]"):
        plant(scanned, {"h": jnp.arange(3)})(1.0)
    assert plant(lambda x: sow(x, name="h") / 2, {"h": 1})(jnp.float32(3)).dtype == jnp.float32


def test_a_value_of_another_structure_is_named():
    f = lambda x: sow((x, x), name="pair")[0]
    with pytest.raises(PlantError, match=r"structure .*'pair'"):
        plant(f, {"pair": {"a": 1.0, "b": 2.0}})(1.0)


def test_a_value_may_be_edited_in_terms_of_itself():
    assert plant(scanned, {"h": lambda h: h})(1.0) == scanned(1.0) == 42
    assert plant(scanned, {"h": lambda h: 2 * h})(1.0) == 4 * 10 * 82


def test_an_edit_that_returns_the_value_unchanged_changes_no_gradient():
    f = lambda x: plant(scanned, {"h": lambda h: h})(x)
    np.testing.assert_allclose(jax.grad(f)(1.0), jax.grad(scanned)(1.0))


def test_the_order_of_interventions_is_free():
    """What comes later in the program may be planted by what was collected before, or after."""

    def f(x):
        a = sow(x + 1, name="a")
        return sow(2 * a, name="b")

    collected = reap(f)(1.0)
    assert plant(f, {"b": collected["b"], "a": 9.0})(5.0) == 4
    assert plant(f, {"b": collected["a"]})(5.0) == 2


def test_from_one_site_into_another():
    f = lambda x: sow(sow(x, name="source") * 3, name="target") + 1
    patched = lambda clean, x: plant(f, {"target": reap(f, "source")(clean)["source"]})(x)
    assert patched(5.0, 1.0) == 6


def test_every_head_of_any_model():
    """A head is an index of a value: nothing knows of architectures."""
    f = lambda x: sow(x.reshape(2, 3), name="z").sum(axis=1)
    cut = lambda head: plant(f, {"z": harvest.scale((jnp.arange(2) != head)[:, None])})
    for head in range(2):
        out = cut(head)(jnp.arange(6.0))
        assert out.tolist() == [0 if head == 0 else 3, 0 if head == 1 else 12]


def test_dicts_have_cotangents_too():
    def loss(x):
        return harvest.perturb({"a": x, "b": 2 * x}, name="h")["b"] ** 2

    assert reap(jax.grad(loss))(3.0) == {"h": {"a": 0.0, "b": 12.0}}


# ---------------------------------------------------------------------------- derivatives


def test_rules_of_a_gradient_gain_no_results():
    @jax.custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (sow(2 * x * ct, name="ct"),))
    value, collected = jax.grad(capture(f), has_aux=True)(3.0)
    assert value == 6 and collected == {}
    assert reap(jax.grad(f))(3.0) == {"ct": 6.0}


def test_a_jacobian_between_two_values_inside():
    f = lambda x: sow(jnp.sin(sow(x**2, name="a")), name="b") + 1
    _, _, tangents = harvest.jvp(f, {"a": 1.0}, "b")(2.0)
    np.testing.assert_allclose(tangents["b"], np.cos(4.0), rtol=1e-6)


def test_cotangents_of_what_the_loss_does_not_depend_on_are_zeros():
    f = lambda x: sow(x, name="used") + 0 * sow(2 * x, name="other")
    assert harvest.grad(f)(1.0) == {"used": 1.0, "other": 0.0}


# ------------------------------------------------------------------------------- programs


def test_a_structure_without_a_rule_is_an_error_that_names_it():
    def f(x):
        solve = lambda matvec, b: sow(b / 2, name="h")
        return lax.custom_linear_solve(lambda x: 2 * x, x, solve, symmetric=True)

    with pytest.raises(UnsupportedError, match=r"'h' .*`custom_linear_solve`"):
        reap(f)(4.0)
    assert f(4.0) == 2


def test_the_table_of_a_model_with_loops_and_batches():
    f = jax.vmap(lambda x: scanned(x))
    (site,) = sites(f)(XS)
    assert (site.key, [axis.size for axis in site.axes]) == ("h", [3, 3])


def test_activations_while_a_sequence_grows():
    """Decoding, with a token for each step: every step has its values."""

    def decode(token, steps):
        def step(token, _):
            logits = sow(jnp.arange(4.0) * (token + 1), name="logits")
            token = jnp.argmax(-abs(logits - 2)).astype(token.dtype)
            return token, token

        return lax.scan(step, token, length=steps)[1]

    model = functools.partial(decode, steps=3)
    logits = reap(model)(jnp.asarray(0))["logits"]
    np.testing.assert_array_equal(logits, np.outer([1, 3, 2], np.arange(4)))
    steer = harvest.at(1, lambda logits: logits.at[3].set(2.0))
    assert plant(model, {"logits": steer})(jnp.asarray(0)).tolist() == [2, 3, 0]


def test_parameters_of_a_model_change_without_a_new_trace():
    traces = []

    class Model(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            traces.append(None)
            return sow(self.w * x, name="h").sum()

    for w in range(4):
        assert reap(Model(jnp.full(3, float(w))))(XS)["h"].tolist() == (w * XS).tolist()
    assert len(traces) == 1
