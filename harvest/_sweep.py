"""Whole grids of interventions in one compiled program: `sweep`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.hijax import HiPrim, instantiate_zeros

from . import _compat
from ._checks import fruitless
from ._errors import UnsupportedError
from ._experiments import Cells, Experiment, Experiments
from ._fit import known
from ._fork import Forks, Target
from ._interpreter import Replay
from ._lowered import lowered, raised
from ._progress import progress_bar, tick
from ._stage import Transformed, pack
from ._structure import Packed


def sweep(
    fn: Callable[..., Any],
    source: Any,
    edit: Any,
    grid: Any = None,
    *,
    batch_size: int = 32,
    progress: bool = False,
) -> Callable[..., Any]:
    """As `fn`, but run with one intervention after the other, in one compiled program.

    For every site in `source`, every iteration of the loops around it and every row of `grid`, `fn`
    runs with that one value edited and everything else as it is. As `get_act_patch_block_every` and
    its like in TransformerLens.

    No iteration or equation before the edited site is evaluated more than once: the runs share what
    comes before it, and start where they differ. In a `scan` of the layers (forward, without side
    effects, at the top level or under `jit`), a whole grid costs about half of a forward pass for
    each cell.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        def model(x):  # four layers, three positions
            layer = lambda x, w: (harvest.sow(jnp.tanh(x * w), name="resid"), None)
            return jax.lax.scan(layer, x, jnp.arange(1.0, 5.0))[0].sum()

        clean, corrupt = jnp.array([0.1, 0.2, 0.3]), jnp.array([0.1, -0.2, 0.3])
        patch = lambda resid, clean, row: resid.at[row["pos"]].set(clean[row["pos"]])
        source = harvest.reap(model, "resid")(clean)
        out = harvest.sweep(model, source, patch, harvest.grid(pos=jnp.arange(3)))(corrupt)
        assert out["resid"].shape == (4, 3)
        assert jnp.allclose(out["resid"][:, 1], model(clean))  # what was corrupted is put right
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `source`: which sites, and what an edit may need of another run: the dict that a
        [`harvest.reap`][] returned, whose values have the axes of the loops in front. Values of
        your own do as well, of any shape behind those axes: only the edit looks at them. Or a
        selection, if the edit needs no source.
    - `edit`: what is done to a value, called as `edit(value, source_value, row)`; without a dict as
        `source` there is no `source_value`, and without a grid no `row`. Value and source are those
        of one iteration, for one example of a batch, in one shard of a `shard_map`. An edit such as
        [`harvest.zero`][] does as well. For sites of different shapes it may be a mapping from
        selections to edits, of which the first that matches counts.
    - `grid`: the experiments at each site and iteration: `harvest.grid(...)`, the product of named
        axes, or a pytree of arrays with one leading axis. What differs for each example of a batch
        is wrapped in [`harvest.per_example`][]. `None` is one experiment.
    - `batch_size`: how many rows run at once, under `vmap` unless it is one. Memory grows with it;
        on a CPU, about 32 is fastest.
    - `progress`: whether to show a bar, by `tqdm`. Not inside of `jit` or another transform.

    **Returns:**

    A function of the arguments of `fn` that returns a dict `{key: results}`, in call order: what
    `fn` returns, each array with the axes of the loops in front, then those of the grid.

    Results have no reverse-mode derivative: use [`harvest.attribute`][], or `jax.vmap` of `plant`.
    For any other experiment (several sites in each run, windows of layers), the way is `jax.vmap`
    or `jax.lax.map` over `plant(fn, {key: harvest.at(index, edit)})` with a traced index. To plant,
    collect or differentiate in each run, transform `fn`: `sweep(plant(fn, ...), ...)`.

    **Raises:**

    - [`harvest.UnknownSiteError`][], [`harvest.DuplicateSiteError`][]: as [`harvest.plant`][].
    - [`harvest.PlantError`][]: an edit returns another tree, shape or dtype than that of the site;
        or a source has other loops.
    - [`harvest.UnsupportedError`][]: a site is in a `while_loop`; or in some branches of a `cond`
        only, or with different types, and in a loop in there, or with a source.
    """
    return Sweep(fn, source, edit, grid, batch_size, progress)


class Sweep(Experiments):
    _what = "sweep"
    _dynamic = (*Experiments._dynamic, "token")
    _static = (*Experiments._static, "progress")

    def __init__(self, fn, source, edit, grid, batch_size: int, progress: bool):
        super().__init__(fn, source, edit, grid, batch_size)
        self.progress = progress
        self.token = np.int32(0)  # of the bar

    def __call__(self, *args, **kwargs):
        if not self.progress:
            return super().__call__(*args, **kwargs)
        if _compat.tracing():
            return self._with(progress=False)(*args, **kwargs)
        with progress_bar() as token:
            with_bar = self._with(token=np.int32(token))
            return jax.block_until_ready(Transformed.__call__(with_bar, *args, **kwargs))

    def _inline(self, args, kwargs, trace):
        program = trace("sweep", self.fn, args, kwargs, planting=True)
        entries = program.walk.entries(program.jaxpr)
        experiments = self._experiments(entries)
        warnings = tuple(fruitless([e.entry for e in experiments], "sweeping"))
        cells = Cells(self.grid.shape, self.batch_size, self._tick(experiments))
        _, results = Forks(Replay(program.walk), cells).run(
            program.jaxpr,
            program.leaves,
            {e.position: Target(e.entry.key, e.edit) for e in experiments},
            (True,) * len(program.jaxpr.outvars),
            lambda outs: lowered(pack(program.result(outs))),
        )
        keys = [e.entry.key for e in experiments]
        return [(key, raised(_forward_only(results[key])).unflatten()) for key in keys], warnings

    def _takes_sum(self, entry):
        # In branches that do not have it there is nothing to edit.
        return self.source is None and all(loops == entry.loops for _, loops in entry.innermost())

    def _tick(self, experiments: Sequence[Experiment]) -> Callable[[int], None]:
        if not self.progress:
            return lambda count: None
        iterations = sum(math.prod(known(e.entry.loops)) for e in experiments)
        total = iterations * self.grid.size
        return lambda count: jax.debug.callback(tick, self.token, count, total)


class _ForwardOnly(HiPrim):
    """The identity, without a reverse mode."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, *args):
        return args[0]

    def jvp(self, primals, tangents):
        return self(*primals), self(*map(instantiate_zeros, tangents))

    def lin(self, nzs_in, *primals):
        return self(*primals), (), True

    def linearized(self, residuals, *tangents):
        return self(*map(instantiate_zeros, tangents))

    def vjp_fwd(self, nzs_in, *primals):
        return self(*primals), None, True

    def vjp_bwd_retval(self, res, outgrad):
        return self.transpose(outgrad)

    def transpose(self, out_ct, *maybe_accums):
        raise UnsupportedError(
            "the results of `sweep` have no reverse-mode derivative, since its runs start at "
            "iterations that are not known: use `harvest.attribute`, or `jax.vmap` over "
            "`harvest.plant(fn, {key: harvest.at(index, edit)})`"
        )

    def batch(self, axis_data, args, dims):
        return _ForwardOnly(jax.typeof(args[0]))(*args), dims[0]


def _forward_only(packed: Packed) -> Packed:
    def identity(leaf: Any) -> Any:
        differentiable = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return _ForwardOnly(jax.typeof(leaf))(leaf) if differentiable else leaf

    return Packed(jax.tree.map(identity, packed.leaves), packed.structure)
