"""The laws, on programs that are made at random: see `generated`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

import harvest
from harvest import (
    DuplicateSiteError,
    PlantError,
    UnknownSiteError,
    UnsupportedError,
    capture,
    folds,
    plant,
    reap,
)

from .generated import kept
from .generated.compare import TOLERANCE, check, operations
from .generated.edits import Half, Planted, other_values, without
from .generated.nudges import check_gradient, differentiable, gradients
from .generated.programs import Body, Custom, Remat, Sites, State, Vmap, initial, nodes, run
from .generated.reference import Reference, in_loop, last, plain, sites, values
from .generated.strategies import programs, seeds

pytestmark = pytest.mark.filterwarnings("ignore:.* changes nothing", "ignore:.* is zero")
some = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=max(20, settings().max_examples // 5),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Sown(Sites):
    def sow(self, node, path, value, state):
        return harvest.sow(value, name=node.name)

    def scope(self, name):
        return harvest.scope(name)


def program(body: Body, kind: type[Sites] = Sown) -> Callable[[State], State]:
    return lambda state: run(body, state, kind())


def loss(body: Body, kind: Callable[[], Sites] = Sown) -> Callable[[Any, State], Any]:
    def of(v: Any, state: State) -> Any:
        out = run(body, {**state, "v": v}, kind())
        return jnp.sum(out["v"]) + jnp.sum(out["h"].astype(jnp.float32))

    return of


def same(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            np.testing.assert_allclose(plain(a), plain(b), **TOLERANCE)


def unlabelled(tree: Any) -> Any:
    """Without strings, which no function of JAX returns."""
    return jax.tree.map(lambda leaf: None if isinstance(leaf, str) else leaf, tree)


def check_all(collected: Any, wanted: Any, reference: Reference) -> None:
    check_counts(collected, wanted)
    for key, found in wanted.items():
        for number, site in enumerate(found):
            check(collected[key][number], values(site, reference), f"{key} {number}")


def check_counts(collected: Any, wanted: Any) -> None:
    counts = lambda found: {key: len(values) for key, values in found.items()}
    assert counts(collected) == counts(wanted)


def in_call_order(collected: Any, wanted: Any, reference: Reference) -> Any:
    """With the occurrences of each key in the order of the reference.

    Differentiation evaluates what does not depend on its arguments before what does.
    """
    check_counts(collected, wanted)
    ordered = {}
    for key, found in wanted.items():
        left = list(collected[key])
        ordered[key] = []
        for number, site in enumerate(found):
            errors = []
            for got in left:
                try:
                    check(got, values(site, reference), f"{key} {number}")
                except (AssertionError, ValueError, TypeError) as error:
                    errors.append(error)
                else:
                    ordered[key].append(got)
                    left = [other for other in left if other is not got]
                    break
            else:
                raise errors[0]
    return ordered


def as_planted(collected: Any, wanted: Any, reference: Reference) -> Any:
    """Without what differentiation moved out of a loop: where it is planted, it is in the loop."""
    return {
        key: tuple(
            got if _has_all_axes(got, site, reference) else None
            for got, site in zip(collected[key], found, strict=True)
        )
        for key, found in wanted.items()
    }


def _has_all_axes(collected: Any, site: Any, reference: Reference) -> bool:
    if not any(leaf.hoisted for leaf in site.leaves):
        return True
    full = jax.tree.leaves(values(site, reference))
    shapes = [np.shape(x) for x in full if isinstance(x, np.ndarray)]
    arrays = [x for x in jax.tree.leaves(collected) if not isinstance(x, str)]
    return shapes == [plain(x).shape for x in arrays]


@some
@given(programs(), seeds)
@example(kept.HOISTED, 2)
@example(kept.HOISTED_WITH_CALLS, 2)
def test_values_and_round_trip(body, seed):
    f, state = program(body), initial(seed)
    out, collected = capture(f)(state)
    reference, wanted = Reference(body, state), sites(body)
    same(out, reference.out)
    check_all(collected, wanted, reference)
    plants = as_planted(collected, wanted, reference)
    same(plant(f, plants, mode="append")(state), reference.out)
    if all(len(found) == 1 for found in wanted.values()):
        reaped = reap(f)(state)
        same(reaped, {key: found for key, (found,) in collected.items()})
        if all(value is not None for found in plants.values() for value in found):
            same(plant(f, reaped)(state), reference.out)
    else:
        with pytest.raises(DuplicateSiteError, match=r"is sown \d times"):
            reap(f)(state)


@some
@given(programs(), seeds, st.sets(st.integers(0, 4)))
@example(kept.HOISTED, 2, set())
@example(kept.HOISTED_BESIDE, 1, {3, 4})
def test_other_values_are_planted(body, seed, left_alone):
    f, state = program(body), initial(seed)
    collected = as_planted(capture(f)(state)[1], sites(body), Reference(body, state))
    plants = without(other_values(collected), left_alone)
    reference = Reference(body, state, Planted(body, plants))
    planted = plant(f, plants, mode="append")
    same(planted(state), reference.out)
    # What is planted is collected, and the rest as it is then.
    check_all(capture(planted)(state)[1], sites(body), reference)


@some
@given(programs(dynamic=True), seeds)
def test_edits(body, seed):
    f, state = program(body), initial(seed)
    edited = plant(f, {"**": Half.of_value}, mode="append")(state)
    same(edited, Reference(body, state, Half()).out)


@some
@given(programs(), seeds)
def test_gradients(body, seed):
    state = initial(seed)
    sown, unsown = loss(body), loss(body, Sites)
    wanted = jax.grad(unsown)(state["v"], state)
    captured = capture(sown)
    same(jax.grad(captured, has_aux=True)(state["v"], state)[0], wanted)
    gradient, collected = capture(jax.grad(sown))(state["v"], state)
    same(gradient, wanted)
    reference, found = Reference(body, state), sites(body, hoisted=True)
    collected = in_call_order(collected, found, reference)
    # `jax.checkpoint` evaluates a site twice, so that occurrences cannot be told apart.
    repeated = any(isinstance(node, Remat) for node, _ in nodes(body)) and any(
        len(occurrences) > 1 for occurrences in found.values()
    )
    if not repeated:
        plants = as_planted(collected, found, reference)
        same(plant(jax.grad(sown), plants, mode="append")(state["v"], state), wanted)


@some
@given(programs(), seeds)
def test_gradients_at_sites(body, seed):
    state, wanted = initial(seed), differentiable(body)
    assume(wanted)
    of_state = lambda kind: lambda state: loss(body, kind)(state["v"], state)
    got = harvest.grad(of_state(Sown), list(wanted), mode="append")(state)
    by_hand = gradients(body, wanted, lambda sites: loss(body, lambda: sites)(state["v"], state))
    assert set(got) == set(wanted)
    for key, found in wanted.items():
        for number, site in enumerate(found):
            check_gradient(got[key][number], site, by_hand, f"{key} {number}")


@some
@given(programs(), seeds, st.sampled_from([0, 1]))
def test_transforms_commute(body, seed, axis):
    f, state = program(body), initial(seed)
    inside = jax.jit(lambda state: unlabelled(capture(f)(state)))(state)
    same(inside, unlabelled(capture(jax.jit(f))(state)))
    # Under `vmap`, against the reference, and with the axes in the order of that.
    batched = (Vmap(body, 2, axis),)
    g = program(batched)
    check_all(capture(g)(state)[1], sites(batched), Reference(batched, state))
    lanes = jnp.outer(1 - 0.25 * jnp.arange(2.0), state["v"])
    _, inside = jax.vmap(lambda v: unlabelled(capture(f)({**state, "v": v})))(lanes)
    _, outside = capture(jax.vmap(lambda v: f({**state, "v": v})))(lanes)
    for key, found in sites(body).items():
        for number, site in enumerate(found):
            for lane in range(2):
                of_lane = values(site, Reference(body, {**state, "v": lanes[lane]}))
                got = jax.tree.map(lambda leaf, lane=lane: leaf[lane], inside[key][number])
                check(got, unlabelled(of_lane), f"{key} {number} of lane {lane}")
    assert set(inside) == set(outside)


@some
@given(programs(dynamic=True), seeds)
@example(kept.INLINED, 5)
@example(kept.INLINED_IN_VMAP, 5)
def test_free_when_off(body, seed):
    state = initial(seed)

    def text(kind: type[Sites], transform: Callable) -> str:
        of = lambda v, state: run(body, {**state, "v": v}, kind())
        return jax.jit(transform(of)).lower(state["v"], state).as_text()

    def differentiated(of: Callable) -> Callable:
        def loss(v: Any, state: State) -> Any:
            out = of(v, state)
            return jnp.sum(out["v"]), out

        return jax.grad(loss, has_aux=True)

    def mapped(of: Callable) -> Callable:
        return lambda v, state: jax.vmap(lambda v: of(v, state))(jnp.stack([v, 2 * v]))

    transforms = [lambda of: of, mapped]
    if not any(in_loop(site) for found in sites(body).values() for site in found):
        transforms += [differentiated, lambda of: differentiated(jax.checkpoint(of))]
    for transform in transforms:
        try:
            wanted = text(Sites, transform)
        except ValueError as error:  # a `while` that holds nothing
            assert "Reverse-mode differentiation does not work" in str(error)
            continue
        got = text(Sown, transform)
        if got != wanted:
            # Of programs with hi primitives, JAX inlines custom rules before it removes dead code.
            assert any(isinstance(node, Custom) for node, _ in nodes(body))
            assert operations(got) <= operations(wanted)


@some
@given(programs(), seeds, st.sampled_from(["a", "**/a", "s/*", "**/t/**", "?", "**"]))
def test_selections(body, seed, glob):
    f, state = program(body), initial(seed)
    patterns = {
        "a": lambda key: key == "a",
        "**/a": lambda key: f"/{key}".endswith("/a"),
        "s/*": lambda key: key.startswith("s/") and key.count("/") == 1,
        "**/t/**": lambda key: "t" in key.split("/")[:-1],
        "?": lambda key: len(key) == 1,
        "**": lambda key: True,
    }
    wanted = {key: found for key, found in sites(body).items() if patterns[glob](key)}
    if not wanted:
        with pytest.raises(UnknownSiteError, match=r"matches nothing|no site"):
            capture(f, glob)(state)
        return
    out, collected = capture(f, glob)(state)
    reference = Reference(body, state)
    same(out, reference.out)
    check_all(collected, wanted, reference)
    others = [key for key in sites(body) if key not in wanted]
    if others:  # they are left to another transform
        _, rest = capture(lambda s: capture(f, glob)(s), others)(state)
        check_all(rest, {key: sites(body)[key] for key in others}, reference)


@some
@given(programs(dynamic=True), seeds)
def test_dynamic_loops(body, seed):
    f, state = program(body), initial(seed)
    wanted = sites(body)
    dynamic = [key for key, found in wanted.items() if any(map(in_loop, found))]
    assume(dynamic)
    with pytest.raises(UnsupportedError, match="`while_loop`"):
        capture(f)(state)
    fields = lambda site: {leaf.node.field for leaf in site.leaves}
    foldable = [key for key in wanted if all(len(fields(site)) == 1 for site in wanted[key])]
    assume(foldable)
    out, collected = capture(f, {key: folds.last() for key in foldable})(state)
    reference = Reference(body, state)
    same(out, reference.out)
    for key in foldable:
        for number, (got, site) in enumerate(zip(collected[key], wanted[key], strict=True)):
            check(got, last(site, reference), f"last {key} {number}")


@some
@given(programs(), seeds)
def test_wrong_plants(body, seed):
    f, state = program(body), initial(seed)
    collected = capture(f)(state)[1]
    key, (first, *rest) = next(iter(collected.items()))
    append = lambda plants: plant(f, plants, mode="append")(state)
    with pytest.raises(UnknownSiteError, match=f"'{key}x'.*nearest|'{key}x'"):
        append({key + "x": (first, *rest)})
    with pytest.raises(PlantError, match=f"{key!r}"):
        append({key: (first, *rest, None)})
    array = isinstance(first, jax.Array) and not jnp.issubdtype(first.dtype, jax.dtypes.prng_key)
    if array:
        with pytest.raises(PlantError, match=f"{key!r}"):
            append({key: (first[None], *rest)})
        with pytest.raises(PlantError, match=f"{key!r}"):
            append({key: (first.astype(jnp.complex64), *rest)})
    with pytest.raises(PlantError, match=f"{key!r}"):
        append({key: ((first, first), *rest)})
