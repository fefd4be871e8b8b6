import textwrap

import jax
import pytest


def pytest_terminal_summary(terminalreporter):
    from .calls import EXCLUDED, NOT_BATCHED
    from .test_zoo import CALLS

    ran = {
        report.nodeid.rpartition("[")[2].rpartition("]")[0].rpartition("-")[2]
        for report in terminalreporter.getreports("passed")
        if "zoo" in report.nodeid and "[" in report.nodeid
    }
    if not ran:
        return
    terminalreporter.section("zoo")
    terminalreporter.write_line(f"{len(ran)} of {len(CALLS)} functions")
    for reason, names in EXCLUDED.items():
        terminalreporter.write_line(f"left out, since {reason}:")
        terminalreporter.write_line(textwrap.indent(textwrap.fill(names, 90), "    "))
    terminalreporter.write_line("left out under `vmap`:")
    for name, reason in NOT_BATCHED.items():
        terminalreporter.write_line(f"    {name}, since {reason}")


@pytest.fixture(autouse=True)
def as_by_default():
    """The functions of others, under the promotion rules that these were written for."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
