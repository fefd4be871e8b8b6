"""Whatever goes wrong keeps its type, says where, and leaves nothing behind."""

import gc
import pathlib
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import capture, chain, plant, reap, scope, sites, sow

X = np.array([0.5, 1.0, 2.0], np.float32)


class Mine(Exception):
    """Not among those that JAX or harvest know."""


class Faulty:
    """Raises at its first call, works at later ones."""

    def __init__(self, error=None):
        self.error, self.calls = error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 1:
            raise self.error or Mine("mine")
        return args[0]


def faulty(fn):
    """Calls `fn` on what it has sown; in a scope, which must be left."""

    def program(x):
        with scope("s"):
            h = sow(jnp.sin(x), name="h")
            return 2 * fn(h)

    return program


TRANSFORMS = {  # and what each gives for `faulty`
    "reap": (lambda fn: lambda x: reap(fn)(x)["s/h"], np.sin),
    "capture": (lambda fn: lambda x: capture(fn)(x)[0], lambda x: 2 * np.sin(x)),
    "plant": (lambda fn: plant(fn, {"s/h": X}), lambda x: 2 * X),
    "sites": (lambda fn: lambda x: sites(fn)(x)[0].nbytes, lambda x: 12),
}
STRUCTURES = {
    "straight": lambda fn: fn,
    "jit": lambda fn: lambda x: jax.jit(fn)(x),
    "scan": lambda fn: lambda x: lax.scan(lambda c, _: (c, fn(x)), 0, length=1)[1][0],
    "cond": lambda fn: lambda x: lax.cond(x[0] > 0, fn, fn, x),
    "checkpoint": jax.checkpoint,
}
AMBIENT = {"eager": lambda fn: fn, "jit": jax.jit, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_error_keeps_its_type_and_gets_a_note(transform, structure):
    fn = STRUCTURES[structure](faulty(Faulty()))
    fn.__qualname__ = "my_model"
    transformed, wanted = TRANSFORMS[transform]
    with pytest.raises(Mine, match=r"^mine") as caught:
        transformed(fn)(X)
    note = f"harvest: raised while `{transform}` traced `my_model`"
    assert [n for n in caught.value.__notes__ if "harvest" in n] == [note]
    assert "return 2 * fn(h)" in "".join(traceback.format_exception(caught.value))
    if structure != "scan":
        np.testing.assert_allclose(transformed(fn)(X), wanted(X), rtol=1e-6)


ERRORS = [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, StopIteration]


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("transform", ["reap", "capture", "plant"])
def test_after_an_error_the_next_call_works(transform, error, ambient):
    fn = faulty(Faulty(error("no matter")))
    transformed, wanted = TRANSFORMS[transform]
    call = AMBIENT[ambient](lambda x: transformed(fn)(x))
    with pytest.raises(error, match=r"^no matter"):
        call(X)
    with jax.checking_leaks():
        np.testing.assert_allclose(call(X), wanted(X), rtol=1e-6)
    assert list(reap(lambda x: sow(x, name="h"))(X)) == ["h"]  # in no scope


class Module(eqx.Module):
    faulty: Faulty = eqx.field(static=True)

    def __call__(self, h):
        return self.faulty(h)


EDITS = {
    "callable": lambda faulty: faulty,
    "function": lambda faulty: lambda h: faulty(h),
    "module": Module,
    "chain": lambda faulty: chain(lambda h: h, faulty),
    "indexed": harvest.indexed,
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("edit", EDITS)
def test_an_error_in_an_edit(edit, structure):
    fn = STRUCTURES[structure](lambda x: 2 * sow(jnp.sin(x), name="h"))
    planted = plant(fn, {"h": EDITS[edit](Faulty())})
    with pytest.raises(Mine, match=r"^mine"):
        planted(X)
    np.testing.assert_allclose(planted(X), 2 * np.sin(X), rtol=1e-6)


def test_an_error_in_an_edit_names_the_site():
    with pytest.raises(Mine, match=r"(?s)^mine\nharvest: .*'s/h'.*test_faults\.py:\d+"):
        plant(faulty(jnp.sin), {"s/h": Faulty()})(X)


@pytest.mark.parametrize("ambient", AMBIENT)
def test_an_error_in_a_predicate(ambient):
    fn = lambda x: sow(2 * x, name="h")
    predicate = Faulty()
    call = AMBIENT[ambient](lambda x: reap(fn, predicate)(x))
    with pytest.raises(Mine, match=r"^mine"):
        call(X)
    np.testing.assert_array_equal(call(X)["h"], 2 * X)
    predicate = Faulty()
    call = AMBIENT[ambient](plant(fn, {predicate: harvest.zero()}))
    with pytest.raises(Mine, match=r"^mine"):
        call(X)
    np.testing.assert_array_equal(call(X), 0 * X)


@pytest.mark.parametrize("plants", [{"typo": X}, {"h": X[:2]}, {"h": X.astype(int)}, {"h": (X,)}])
def test_an_error_of_ours_is_followed_by_success(plants):
    runs = Faulty(error=Mine)
    runs.calls = 1
    fn = lambda x: runs(sow(2 * x, name="h"))
    with pytest.raises(harvest.HarvestError, match=r"typo|wanted|tuple"):
        plant(fn, plants)(X)
    np.testing.assert_array_equal(plant(fn, {"h": X})(X), X)
    assert runs.calls == 2  # one trace: errors come after it, and do not drop it


def test_an_error_of_ours_has_no_frames_of_ours():
    with pytest.raises(harvest.UnknownSiteError, match="'typo' matches no site") as caught:
        reap(lambda x: sow(x, name="h"), "typo")(X)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert all("/jax/" not in frame.f_code.co_filename for frame in frames)
    ours = str(pathlib.Path(harvest.__file__).parent)
    (frame,) = [frame for frame in frames if frame.f_code.co_filename.startswith(ours)]
    assert frame.f_locals["__tracebackhide__"]  # for pytest and IPython the last one is the user's
    assert caught.value.__cause__ is None


def test_an_error_of_ours_in_the_function_is_named_once():
    def fn(x):
        return plant(lambda x: sow(x, name="h"), {"typo": x})(x)

    with pytest.raises(harvest.UnknownSiteError, match="'typo' matches no site") as caught:
        capture(fn)(X)
    assert not [n for n in getattr(caught.value, "__notes__", []) if "harvest" in n]


def test_a_failed_trace_does_not_keep_the_function():
    def call():
        fn = faulty(lambda h: Faulty()(h))
        with pytest.raises(Mine, match=r"^mine"):
            reap(fn)(X)
        return weakref.ref(fn)

    # JAX itself keeps the arrays of a trace that failed.
    refs = [call() for _ in range(5)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_an_error_in_one_thread_is_none_in_another():
    fn = faulty(Faulty())

    def call(size):
        try:
            return reap(fn)(np.ones(size, np.float32))["s/h"]
        except Mine as error:
            return error

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(call, [3] * 16 + [4] * 16))
    values = [value for value in results if not isinstance(value, Mine)]
    assert len(values) == 31
    for value in values:
        np.testing.assert_allclose(value, np.sin(np.ones(value.size)), rtol=1e-6)


def test_leaked_tracers_are_found_by_jax():
    leaked = []

    def fn(x):
        leaked.append(sow(x, name="h"))
        return x

    reap(fn)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="escape"):
        leaked[0] + 1


def test_concretization_errors_are_those_of_jax():
    fn = lambda x: sow(x, name="h") if x > 0 else x
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"(?s)traced array.*`reap`"):
        reap(fn)(1.0)
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"(?s)`capture` traced"):
        capture(lambda x: sow(jnp.arange(x), name="h"))(np.int32(3))
