"""Laws 1 to 4 on every program of the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from tests.helpers import PROGRAMS, SIZE

X = jnp.linspace(0.4, 1.3, SIZE)
programs = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


def _sown(program):
    return lambda x: program.fn(x, lambda h, step: harvest.sow(h, name="h"))


def _plain(program):
    return lambda x: program.fn(x, lambda h, step: h)


@programs
def test_operation_by_operation_the_result_is_the_same_to_the_bit(program):
    fn, plain = _sown(program), _plain(program)
    with jax.disable_jit():
        out = harvest.capture(fn)(X)[0]
        assert np.asarray(out).tobytes() == np.asarray(plain(X)).tobytes()


@programs
def test_gradients_are_those_of_the_plain_program(program):
    captured = lambda x: jnp.sum(harvest.capture(_sown(program))(x)[0])
    plain = lambda x: jnp.sum(_plain(program)(x))
    np.testing.assert_allclose(jax.grad(captured)(X), jax.grad(plain)(X), rtol=1e-5)


@programs
def test_round_trip(program):
    fn = _sown(program)
    acts = harvest.reap(fn)(X)
    np.testing.assert_allclose(harvest.plant(fn, acts)(X), fn(X), rtol=1e-6)
    acts = harvest.reap(fn, mode="append")(X)
    np.testing.assert_allclose(harvest.plant(fn, acts, mode="append")(X), fn(X), rtol=1e-6)


@programs
def test_it_commutes_with_jit_and_vmap(program):
    fn = _sown(program)
    for a, b in zip(
        jax.tree.leaves(harvest.capture(jax.jit(fn))(X)),
        jax.tree.leaves(jax.jit(harvest.capture(fn))(X)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    xs = jnp.stack([X, -X])
    inside = jax.vmap(harvest.reap(fn))(xs)["h"]
    outside = harvest.reap(jax.vmap(fn))(xs)["h"]
    np.testing.assert_allclose(jnp.moveaxis(inside, 0, len(program.loops)), outside, rtol=1e-6)


TRANSFORMS = {
    "forward": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: jnp.sum(f(x))),
    "grad of checkpoint": lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x))),
    "vmap": lambda f: jax.vmap(f, in_axes=1),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@programs
def test_the_lowered_text_is_the_same_without_the_sows(program, transform):
    x = jnp.ones((SIZE, SIZE)) if transform is TRANSFORMS["vmap"] else X

    def text(fn):
        def same_name(x):
            return transform(fn)(x)

        return jax.jit(same_name).lower(x).as_text()

    assert text(_sown(program)) == text(_plain(program))
