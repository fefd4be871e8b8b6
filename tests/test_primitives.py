"""The canary: every primitive that JAX has is one that somebody has looked at.

A new release may bring primitives that hold functions in a form that harvest does not look into,
where sows would be missed. CONTRIBUTING says what to do when this fails.
"""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from harvest import _rule

HERE = pathlib.Path(__file__).parent

KERNEL = "a kernel: its functions work on references, a block at a time"
REDUCTION = "how often it calls its function is for the compiler to say"
SOLVER = "how often it calls its functions depends on what they compute"
CALLS = "evaluates a jaxpr, and no public function could build it again with other outputs"
GPU = "schedules kernels on a GPU"
DERIVED = "made by JAX when it differentiates, and gone once it has"

# Primitives that hold functions and have no rule, and why: a wanted site inside is an error.
REFUSED = {
    "call_hi_primitive_linearized": DERIVED,
    "cudnn_fusion": GPU,
    "custom_fusion": KERNEL,
    "custom_jvp_call_jaxpr": "not used any more",
    "custom_lin": DERIVED,
    "custom_linear_solve": SOLVER,
    "custom_partitioning": CALLS,
    **{
        f"dot_product_attention_{kind}{wrapper}": GPU
        for kind in ("bwd", "fp8_bwd", "fp8_fwd", "fwd")
        for wrapper in ("", "_wrapper")
    },
    "emit_pipeline": KERNEL,
    "fused_call": GPU,
    "linear_call": "a sow inside is an error at once",
    "mpmd_map": KERNEL,
    "noinline": "holds a Python function, which is traced to look for sites",
    "pallas_call": KERNEL,
    "parallel_loop": KERNEL,
    "pipeline_body": KERNEL,
    "program_order": CALLS,
    "reduce": REDUCTION,
    "reduce_window": REDUCTION,
    "run_scoped": KERNEL,
    "run_state": "works on references; has no public function",
    "scatter": REDUCTION,
    "scatter-add": REDUCTION,
    "scatter-max": REDUCTION,
    "scatter-min": REDUCTION,
    "scatter-mul": REDUCTION,
    "scatter-sub": REDUCTION,
    "select_and_scatter": REDUCTION,
    "thunky.async_start": GPU,
    "thunky.call_jax": GPU,
    "thunky.call_thunky_nested": GPU,
    "thunky.collective_group": GPU,
    "thunky.cond": GPU,
    "thunky.while": GPU,
    "vprim": "the batched form of a primitive of Equinox",
}

# `HiPrim`s of JAX that hold functions: they are what they expand to.
EXPANDED = {
    "CustomJVPTraced",
    "CustomRoot",
    "CustomVJPTraced",
    "Fusible",
    "OptRemat",
    "Scan3",
    "_RootLinearMap",
}

MESSAGE = """jax {version} has primitives that harvest does not know: {unknown}

For each, say what it is, as "When a new JAX is released" in CONTRIBUTING explains: add a rule, a
reason in `REFUSED` or (a `HiPrim`) a name in `EXPANDED` of {here}, or, if it holds no function of
the user's, a line in {data}."""


def live():
    run = [sys.executable, "-P", str(HERE / "live_primitives.py")]
    return set(json.loads(subprocess.run(run, check=True, capture_output=True).stdout))


def first_order():
    """Primitives without functions of the user's, in releases of JAX that we have seen."""
    return (HERE / "data" / "primitives.txt").read_text().split()


def check(there):
    unknown = sorted(there - set(first_order()) - set(_rule._RULES) - set(REFUSED) - EXPANDED)
    if unknown:
        data, here = "tests/data/primitives.txt", f"tests/{pathlib.Path(__file__).name}"
        message = MESSAGE.format(version=jax.__version__, unknown=unknown, here=here, data=data)
        pytest.fail(message, pytrace=False)


def test_every_primitive_is_known():
    there = live()
    assert {"scan", "jit", "sin", "noinline", "CustomRoot", "pallas_call"} <= there
    check(there)


def test_a_new_primitive_fails_with_what_to_do():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)\['new_call'\].*add a rule"):
        check({"scan", "sin", "new_call"})


def test_the_lists_are_in_order_and_disjoint():
    names = first_order()
    assert names == sorted(set(names))
    assert not set(names) & (set(REFUSED) | set(_rule._RULES) | EXPANDED)
    assert not set(REFUSED) & (set(_rule._RULES) | EXPANDED)
