"""What a function takes and returns, and equations inside of it, are sown in all structures."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from harvest import Equation, capture, plant, sow, sow_eqns

from .arguments import CANDIDATES, Call, bound
from .calls import ARGUMENTS, EXCLUDED, NOT_BATCHED, of_libraries
from .functions import functions
from .generate import TABLE

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # of theirs
    "ignore:.* changes nothing",  # equations of theirs whose results nothing uses
)
LENGTH = 2  # of loops and of batches


class Structure(NamedTuple):
    around: Callable[[Callable], Callable]  # of a function of arrays
    primitives: tuple[str, ...]
    axes: tuple[bool, ...] = ()  # in front of values; whether also of those that are the same there


def _scan(fn):
    def looped(*arrays):
        step = lambda carry, _: (carry, fn(*carry))
        return lax.scan(step, arrays, length=LENGTH)[1]

    return looped


def _vmap(fn):
    def mapped(*arrays):
        return jax.vmap(fn)(*[jnp.stack([x] * LENGTH) for x in arrays])

    return mapped


STRUCTURES = {
    "jit": Structure(jax.jit, ("jit",)),
    "scan": Structure(_scan, ("scan",), (True,)),
    "vmap": Structure(_vmap, (), (False,)),
    "remat": Structure(jax.checkpoint, ("remat2",)),
}
ALL = Structure(
    lambda fn: jax.jit(_scan(_vmap(jax.checkpoint(fn)))), ("jit", "scan", "remat2"), (True, False)
)


def calls() -> dict[str, Call]:
    table, public = json.loads(TABLE.read_text()), functions()
    found = {
        name: bound(public[name], CANDIDATES[c]) for name, c in table.items() if name in public
    }
    named = {n: bound(public[n], *arguments) for n, arguments in ARGUMENTS.items() if n in public}
    return found | named | of_libraries()


CALLS = calls()
# Of several that are the same but for a name or a parameter, one is enough every time.
ALIKE = (
    "jax.lax.",
    "jax.numpy.fft.",
    "jax.numpy.linalg.",
    "jax.numpy.nan",
    "jax.scipy.signal.",
    "jax.scipy.special.",
    "jax.scipy.stats.",
)
often = pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith(ALIKE)])


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)  # of a `bool` of Python, too


def total(outs: Any) -> Any:
    floats = [jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(outs) if is_float(x)]
    return sum(floats, jnp.float32(0))


def with_gradient(fn: Callable, arrays: Any) -> Any:
    """What `fn` returns, and what is beside it; and the gradient of all floats in the former."""
    chosen = tuple(i for i, x in enumerate(arrays) if is_float(x))
    if chosen:

        def loss(*arrays):
            out, aux = fn(*arrays)
            return total(out), (out, aux)

        try:
            return jax.jit(jax.grad(loss, chosen, has_aux=True))(*arrays)
        except (TypeError, ValueError, NotImplementedError):
            pass  # JAX has no derivative of it
    return None, fn(*arrays)


def comparable(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x.astype(jnp.float32) if x.dtype == jnp.float16 else x)


def same(got: Any, wanted: Any, axes: tuple[bool, ...] = ()) -> None:
    """`got` has these axes in front of what is wanted, along which all is the same."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        found = [axis for axis in axes if axis or a.ndim == b.ndim + len(axes)]
        assert a.shape == (LENGTH,) * len(found) + b.shape
        a, b = comparable(a), comparable(b)
        np.testing.assert_allclose(a, np.broadcast_to(b, a.shape), rtol=2e-4, atol=2e-5)


class Equations(NamedTuple):
    """Those of one primitive in a program, not inside of others, and what they return."""

    primitive: str
    values: list[tuple[Any, ...]]

    def chosen(self, eqn: Equation) -> bool:
        return eqn.primitive == self.primitive and not eqn.inside


def halfway(fn: Callable, arrays: Any) -> Equations:
    """Equations of the primitive that comes in the middle."""
    closed = jax.make_jaxpr(fn)(*arrays)
    # A `HiPrim` goes by the name of its class.
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns if "_prim" not in eqn.params]
    if not names:
        return Equations("none", [])
    chosen = names[len(names) // 2]

    @jax.jit
    def values(*arrays):
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= dict(zip(closed.jaxpr.invars, arrays, strict=True))
        found = []
        for eqn in closed.jaxpr.eqns:
            invals = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
            outs = eqn.primitive.bind(*invals, **eqn.primitive.get_bind_params(eqn.params))
            outs = outs if eqn.primitive.multiple_results else [outs]
            known |= dict(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive.name == chosen:
                found.append(tuple(outs))
        return found

    return Equations(chosen, values(*arrays))


def check(call: Call, structure: Structure) -> None:
    fn, arrays = call
    outs, equations = jax.jit(fn)(*arrays), halfway(fn, arrays)
    inner = sow_eqns(fn, equations.chosen, "eqn") if equations.values else fn
    sown = lambda *arrays: sow(inner(*sow(arrays, name="in")), name="out")
    f, plain = structure.around(sown), structure.around(fn)
    gradient, (wanted, _) = with_gradient(lambda *arrays: (plain(*arrays), None), arrays)
    found, (out, collected) = with_gradient(capture(f), arrays)
    same(out, wanted)
    same(found, gradient)
    keys = ["in", *(f"eqn/{number}" for number in range(len(equations.values))), "out"]
    assert {key: len(values) for key, values in collected.items()} == dict.fromkeys(keys, 1)
    same(collected["in"][0], arrays, structure.axes)
    same(collected["out"][0], outs, structure.axes)
    for number, values in enumerate(equations.values):
        (found,) = collected[f"eqn/{number}"]
        same(found if isinstance(found, tuple) else (found,), values, structure.axes)
    same(plant(f, {key: value for key, (value,) in collected.items()})(*arrays), wanted)
    text = str(jax.make_jaxpr(capture(f))(*arrays))
    assert all(f" {name}[" in text for name in structure.primitives)


@often
def test_inside_of_all_structures(name):
    check(CALLS[name], ALL)


IN_EACH = [(s, n) for s in STRUCTURES for n in CALLS if s != "vmap" or n not in NOT_BATCHED]


@pytest.mark.slow
@pytest.mark.parametrize("structure, name", IN_EACH)
def test_inside_of_a_structure(structure, name):
    check(CALLS[name], STRUCTURES[structure])


def test_every_public_function_is_covered_or_excluded():
    excluded = {name for names in EXCLUDED.values() for name in names.split()}
    missing = [n for n in functions() if n not in CALLS and n.rpartition(".")[2] not in excluded]
    assert missing == []
    assert not [n for n in CALLS if n.startswith("jax.") and n not in functions()]
