import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import harvest
from harvest import PlantError, SelectError, attribute, per_example, reap, sow, sweep, zero
from tests.experiments import X, by_hand, same, sown
from tests.helpers import SIZE, scan

F = sown(scan)

# ---------------------------------------------------------------------------------------- grids

AXES = {"z": [0.5, 2.0, -1.0], "at": [1, 3], "a": [0.0, 1.0, 2.0, 3.0]}


@pytest.mark.parametrize("names", list(itertools.permutations(AXES)))
def test_axes_are_in_the_order_in_which_they_are_given(names):
    edit = lambda h, row: h.at[row["at"]].set(row["z"]) + row["a"]
    axes = {name: AXES[name] for name in names}
    grid = harvest.grid(**{name: jnp.asarray(items) for name, items in axes.items()})
    got = sweep(F, "h", edit, grid, batch_size=7)(X)["h"]
    same(got, by_hand(scan, (3,), X, edit, axes=axes))


@pytest.mark.parametrize("batch_size", range(1, 7))
def test_any_number_of_rows_runs_at_once(batch_size):
    rows = jnp.linspace(-1, 1, 5)
    got = sweep(F, "h", lambda h, row: h * row, rows, batch_size=batch_size)(X)["h"]
    same(got, by_hand(scan, (3,), X, lambda h, row: h * row["k"], axes={"k": list(rows)}))


def rows(at, to):
    return {"at": jnp.asarray(at), "to": [jnp.asarray(to)]}


GRIDS = {  # a grid, its shape, and its rows
    "pytree": (rows([0, 2, 0], [1.0, -1.0, 3.0]), (3,), [(0, 1.0), (2, -1.0), (0, 3.0)]),
    "one row": (rows([1], [2.0]), (1,), [(1, 2.0)]),
    "numpy": (jax.tree.map(np.asarray, rows([1, 3], [2.0, 0.0])), (2,), [(1, 2.0), (3, 0.0)]),
    "product": (
        harvest.grid(at=np.arange(3), to=[np.ones(2, np.float32)]),
        (3, 2),
        [(i, 1.0) for i in range(3) for _ in range(2)],
    ),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_grids(wrap, name):
    grid, shape, rows = GRIDS[name]
    got = wrap(sweep(F, "h", lambda h, row: h.at[row["at"]].set(row["to"][0]), grid))(X)["h"]
    by = lambda h, row: h.at[row["row"][0]].set(row["row"][1])
    wanted = by_hand(scan, (3,), X, by, axes={"row": rows})
    same(got, wanted.reshape(3, *shape, SIZE))


def test_an_axis_may_be_a_pytree():
    axis = {"from": jnp.asarray([0, 2]), "to": (jnp.asarray([1, 3]),)}
    swap = lambda h, row: h.at[row["axis"]["to"][0]].set(row["k"] * h[row["axis"]["from"]])
    got = sweep(F, "h", swap, harvest.grid(k=jnp.arange(2.0), axis=axis))(X)["h"]
    items = [{"from": 0, "to": (1,)}, {"from": 2, "to": (3,)}]
    same(got, by_hand(scan, (3,), X, swap, axes={"k": [0.0, 1.0], "axis": items}))


def test_without_a_grid_there_is_one_experiment():
    same(sweep(F, "h", jnp.negative)(X)["h"], by_hand(scan, (3,), X, jnp.negative))
    source = jnp.ones((3, SIZE))
    got = sweep(F, {"h": source}, jnp.subtract)(X)["h"]
    same(got, by_hand(scan, (3,), X, jnp.subtract, source))


def test_random_keys_may_be_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    noisy = lambda h, row: h + jax.random.normal(row["key"], h.shape)
    got = sweep(F, "h", noisy, harvest.grid(key=keys))(X)["h"]
    same(got, by_hand(scan, (3,), X, noisy, axes={"key": list(keys)}))


# -------------------------------------------------------------------------------------- batches

XS = jnp.linspace(-0.7, 0.9, 2 * SIZE).reshape(2, SIZE)
POSITIONS = jnp.asarray([[0, 1], [2, 2], [3, 0]])  # for three rows, in each example


def layers(x, k):
    return lax.scan(lambda x, i: (jnp.cos(sow(k * x, name="h")) + x, None), x, jnp.arange(3))[0]


def loop_outside(xs):
    layer = jax.vmap(lambda x: jnp.cos(sow(2 * x, name="h")) + x)
    return lax.scan(lambda xs, i: (layer(xs), None), xs, jnp.arange(3))[0]


one = functools.partial(layers, k=2.0)
BATCHED = {  # `one`, for all of XS
    "0": lambda xs: jax.vmap(one)(xs),
    "1": lambda xs: jax.vmap(one, in_axes=1, out_axes=1)(xs.T).T,
    "0 and None": lambda xs: jax.vmap(layers, in_axes=(0, None))(xs, 2.0),
    "1 and 0": lambda xs: jax.vmap(layers, in_axes=(1, 0))(xs.T, jnp.full(2, 2.0)),
    "in jit": lambda xs: jax.jit(jax.vmap(jax.jit(one)))(xs),
    "in a loop": loop_outside,
    "remat": lambda xs: jax.vmap(jax.checkpoint(one))(xs),
}


@pytest.mark.parametrize("name", BATCHED)
def test_batches_inside_are_batches_outside(name):
    fn = BATCHED[name]
    edit = lambda h, source, row: h.at[row["at"]].set(row["k"] * source[row["at"]])
    k = jnp.asarray([0.5, 2.0])
    grid = harvest.grid(at=per_example(POSITIONS), k=k)
    got = sweep(fn, reap(fn)(2 * XS), edit, grid, batch_size=4)(XS)["h"]
    assert got.shape == (3, 3, 2, 2, SIZE)  # layers, the grid, and what `fn` returns
    for b, x in enumerate(XS):
        grid = harvest.grid(at=POSITIONS[:, b], k=k)
        same(got[:, :, :, b], sweep(one, reap(one)(2 * x), edit, grid)(x)["h"])


@pytest.mark.parametrize("name", ["0", "1", "remat"])
def test_vmap_of_a_sweep(name):
    args = ("h", lambda h, row: h.at[row].set(0), jnp.arange(SIZE))
    got = sweep(BATCHED[name], *args)(XS)["h"]
    same(got, jax.vmap(sweep(one, *args), out_axes=2)(XS)["h"])


def test_batches_of_batches():
    xs = jnp.linspace(-1, 1, 6 * SIZE).reshape(2, 3, SIZE)
    f = lambda xs: jax.vmap(jax.vmap(one, in_axes=1), in_axes=2, out_axes=1)(xs.T)
    at = jnp.arange(12).reshape(2, 2, 3) % SIZE
    source = jnp.cos(jnp.arange(18 * SIZE)).reshape(3, 2, 3, SIZE)
    edit = lambda h, source, row: h.at[row["at"]].set(source[row["at"]])
    got = sweep(f, {"h": source}, edit, {"at": per_example(at)})(xs)["h"]
    for i, j in itertools.product(range(2), range(3)):
        mine = sweep(one, {"h": source[:, i, j]}, edit, {"at": at[:, i, j]})(xs[i, j])["h"]
        same(got[:, :, j, i], mine)


def test_leaves_that_are_the_same_for_all_examples():
    def f(x, k):
        h = sow({"x": x, "k": k}, name="h")
        return h["x"] * h["k"]

    batched = lambda xs: jax.vmap(f, in_axes=(0, None))(xs, jnp.float32(3))
    source = reap(batched)(2 * XS)
    assert source["h"]["k"].shape == ()
    edit = lambda h, source, row: {"x": source["x"] + row, "k": h["k"]}
    got = sweep(batched, source, edit, per_example(jnp.asarray([[1.0, 2.0]])))(XS)["h"]
    same(got[0], 3 * jnp.stack([2 * XS[0] + 1, 2 * XS[1] + 2]))


# ------------------------------------------------------------------------------ what is refused

ONE = "wanted arrays with a leading axis of one length, not empty"
REFUSED = [
    (lambda: harvest.grid(), "`grid` got no axes; wanted arrays, as in"),
    (lambda: harvest.grid(a=jnp.float32(1)), rf"the axis 'a' of a grid got f32\[\]; {ONE}"),
    (lambda: harvest.grid(a=jnp.arange(2), b=range(3)), f"the axis 'b' .* got a `range`; {ONE}"),
    (lambda: harvest.grid(a=[1, 2]), rf"the axis 'a' of a grid got i32\[\], i32\[\]; {ONE}"),
    (lambda: harvest.grid(a=jnp.zeros((0, 3))), rf"the axis 'a' of a grid got f32\[0,3\]; {ONE}"),
    (lambda: harvest.grid(a=None), f"the axis 'a' of a grid got nothing; {ONE}"),
    (lambda: sweep(F, "h", zero(), {}), f"a grid got nothing; {ONE}"),
    (lambda: sweep(F, "h", zero(), 3), rf"a grid got i32\[\]; {ONE}"),
    (lambda: sweep(F, "h", zero(), "rows"), f"a grid got a `str`; {ONE}"),
    (lambda: sweep(F, "h", zero(), {"a": X, "b": X[:2]}), rf"a grid got f32\[4\], f32\[2\]; {ONE}"),
    (lambda: attribute(F, "h", zero(), jnp.zeros(0)), rf"a grid got f32\[0\]; {ONE}"),
    (lambda: attribute(F, "h", zero(), np.array(["a"])), f"a grid got a `ndarray`; {ONE}"),
    (lambda: sweep(F, "h", zero(), X, batch_size=0), "`batch_size` got 0; wanted a positive int"),
    (lambda: attribute(F, "h", zero(), X, batch_size=-1), "`batch_size` got -1; wanted a positive"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=range(len(REFUSED)))
def test_grids_that_are_refused(make, message):
    with pytest.raises(SelectError, match=message):
        make()


@pytest.mark.parametrize("name", ["0", "1", "in a loop", "remat"])
@pytest.mark.parametrize("transform", [sweep, attribute])
def test_batch_axes_that_do_not_fit(transform, name):
    fn = lambda xs: jnp.sum(BATCHED[name](xs))
    edit = lambda h, row: h.at[row["at"]].set(0)
    wanted = r"; wanted the axes \(2,\) that `vmap` gives to the site in front, for the site 'h'"
    for shape in ((5, 7), (5,)):
        grid = {"at": per_example(jnp.zeros(shape, int))}
        with pytest.raises(PlantError, match=r"`per_example` got .* for one experiment" + wanted):
            transform(fn, "h", edit, grid)(XS)
    for source in (jnp.ones((3, SIZE)), {"mean": jnp.ones(3)}):
        with pytest.raises(PlantError, match=r"`source` got .* for one iteration" + wanted):
            transform(fn, {"h": source}, lambda h, source: h)(XS)
