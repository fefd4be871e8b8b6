import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import harvest
from harvest import UnsupportedError, _progress, grid, scale, sweep
from tests.experiments import X, sown
from tests.helpers import PROGRAMS, scan

F = sown(scan)


class Bar:
    """What is used of `tqdm.tqdm`."""

    made: list["Bar"] = []

    def __init__(self, total, unit):
        self.total, self.n, self.closed = total, 0, False
        Bar.made.append(self)

    def update(self, count):
        assert not self.closed and 0 <= count
        self.n += count
        assert self.n <= self.total

    def close(self):
        self.closed = True


@pytest.fixture
def bars(monkeypatch):
    auto = types.SimpleNamespace(tqdm=Bar)
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(auto=auto))
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    monkeypatch.setattr(Bar, "made", [])
    yield Bar.made
    assert _progress._bars == {}


def two_sites(x, site):
    return scan(site(x, None, "a"), lambda h, step: site(h, step, "b"))


RUNS = [  # what is swept, and how many iterations of sites there are
    (F, "h", 3),
    (sown(PROGRAMS["plain"].fn), "h", 1),
    (sown(PROGRAMS["scan_of_scan"].fn), "h", 6),
    (sown(lambda x, site: scan(x, site, reverse=True)), "h", 3),
    (sown(two_sites), ("a", "b"), 4),
]


@pytest.mark.parametrize("fn, select, iterations", RUNS)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_the_bar_reaches_its_total(bars, fn, select, iterations, batch_size):
    edit = lambda h, row: h * row
    run = lambda **options: sweep(fn, select, edit, jnp.arange(5.0), **options)(X)
    got = run(batch_size=batch_size, progress=True)
    (bar,) = bars
    assert (bar.n, bar.total, bar.closed) == (5 * iterations, 5 * iterations, True)
    for key, out in run().items():
        np.testing.assert_allclose(got[key], out, rtol=1e-6)
    assert len(bars) == 1


def test_every_call_has_a_bar_and_none_retraces(bars):
    traces = []

    def f(x):
        traces.append(1)
        return F(x)

    for number in range(1, 4):
        sweep(f, "h", scale(jnp.float32(2)), X, progress=True)(X)
        assert [bar.n for bar in bars] == [12] * number
    assert traces == [1]


def test_calls_in_threads_have_bars_of_their_own(bars):
    barrier = threading.Barrier(2)

    def run(rows):
        barrier.wait()
        return sweep(F, "h", lambda h, row: h * row, jnp.arange(rows), progress=True)(X)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [4.0, 7.0]))
    assert sorted((bar.n, bar.total) for bar in bars) == [(12, 12), (21, 21)]


def test_there_is_no_bar_inside_of_a_transform(bars):
    f = sweep(F, "h", scale(2.0), progress=True)
    for transformed in (jax.jit(f), jax.vmap(f, axis_size=2, in_axes=None), harvest.reap(f, ())):
        transformed(X)
    assert bars == []
    assert "callback" not in jax.jit(f).lower(X).as_text()


def test_no_bar_is_left_when_tracing_fails(bars):
    def edit(h):
        raise RuntimeError("of the edit")

    with pytest.raises(RuntimeError, match="of the edit"):
        sweep(F, "h", edit, progress=True)(X)
    assert bars == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_bar_is_left_when_a_run_fails(bars):
    def fail(h):
        if h[0] > 100:
            raise RuntimeError("of the edit")
        return np.asarray(h)

    edit = lambda h, row: jax.pure_callback(fail, h, h + row, vmap_method="sequential")
    with pytest.raises(jax.errors.JaxRuntimeError, match="of the edit"):
        sweep(F, "h", edit, jnp.asarray([0.0, 1000.0]), batch_size=1, progress=True)(X)
    (bar,) = bars
    assert bar.closed and bar.n < bar.total


def test_without_tqdm_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(UnsupportedError, match="`progress=True` needs tqdm: `pip install tqdm`"):
        sweep(F, "h", scale(2.0), progress=True)(X)
    assert _progress._bars == {}


def test_the_total_of_a_grid_of_named_axes(bars):
    named = grid(k=jnp.arange(2.0), j=jnp.arange(3.0))
    got = sweep(F, "h", lambda h, row: h * row["k"] + row["j"], named, progress=True)(X)["h"]
    (bar,) = bars
    assert (bar.n, bar.total) == (18, 18) and got.shape[:3] == (3, 2, 3)
