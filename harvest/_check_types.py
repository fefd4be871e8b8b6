"""Types of sites, checked while a program is traced: `check_types`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import AnnotationError

from ._annotations import (
    afresh,
    bindings,
    binds,
    first_line,
    is_annotation,
    is_instance,
    is_of_trees,
    name_of,
    why_not,
)
from ._checks import numbered
from ._entry import Entry
from ._errors import SelectError, SiteTypeError
from ._interpreter import Replay
from ._observed import StandIn, leaves_of
from ._plan import resolve
from ._select import check_chosen, check_found, check_select, is_static, matches
from ._site import Site, site_of
from ._stage import Transformed, trace_afresh
from ._types import short


def check_types(fn: Callable[..., Any], types: Mapping[Any, Any]) -> Callable[..., Any]:
    """As `fn`, but the types of what it sows are checked while it is traced.

    Names of dimensions mean the same at all sites of the program. It costs nothing when the program
    runs: what is compiled is the program of `fn`.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp
        from jaxtyping import Array, Float

        def f(x):
            h = harvest.sow(jnp.tanh(x), name="h")
            return harvest.sow(h[:-1], name="out")

        types = {"h": Float[Array, "time d"], "out": Float[Array, "time d"]}
        try:
            harvest.check_types(f, types)(jnp.ones((5, 3)))
        except harvest.SiteTypeError as error:
            assert "'out'" in str(error) and "time=5 (by 'h', sown at" in str(error)

        types["out"] = Float[Array, "time-1 d"]
        assert harvest.check_types(f, types)(jnp.ones((5, 3))).shape == (4, 3)
        ```

    **Arguments:**

    - `fn`: as for [`harvest.reap`][].
    - `types`: a mapping from keys, globs, predicates or sequences of these to jaxtyping annotations
        or [`harvest.Sharded`][]. All that match a site are checked. What is checked is the type as
        sown: of one iteration, of one example of a batch, and of one shard. Of a pytree, that of
        each leaf, or of the whole by `PyTree[...]`.

    **Returns:**

    A function of the arguments of `fn` that returns its result. What it sows can still be
    collected and planted.

    **Raises:**

    - [`harvest.SiteTypeError`][]: a site is of another type. The message has its line, and what
        the names of dimensions are bound to, and by which sites.
    - [`harvest.UnknownSiteError`][]: a key or glob matches no site.
    - [`harvest.SelectError`][]: what is to be a selection or an annotation is none.
    """
    return CheckTypes(fn, types)


class CheckTypes(Transformed):
    _static = ("select", "annotations")

    def __init__(self, fn: Callable[..., Any], types: Mapping[Any, Any]):
        super().__init__(fn, "check_types")
        if not isinstance(types, Mapping):
            raise SelectError(
                f"`check_types` got {types!r} of type `{type(types).__name__}`; wanted a mapping "
                "from keys or globs to annotations"
            )
        for annotation in types.values():
            if not is_annotation(annotation):
                raise SelectError(
                    f"`check_types` got {annotation!r}; wanted a jaxtyping annotation, as "
                    "`Float[Array, 'batch d']`"
                )
        self.select = tuple(check_select(key, "check_types") for key in types)
        self.annotations = tuple(types.values())

    def _resolved(self, args, kwargs, trace):
        if is_static(self.select) or trace is trace_afresh:
            return self
        program = trace("check_types", self.fn, args, kwargs)
        entries = program.walk.entries(program.jaxpr)
        select = tuple(resolve(s, entries, True, "check_types", needed=True) for s in self.select)
        return self._with(select=select)

    def _inline(self, args, kwargs, trace):
        program = trace("check_types", self.fn, args, kwargs)
        entries = program.walk.entries(program.jaxpr)
        _check(list(self._rows(entries)))
        outs = Replay(program.walk).unchanged(program.jaxpr, program.leaves)
        return program.result(outs), ()

    def _rows(self, entries: Sequence[Entry]):
        """What is to be checked, in call order."""
        rows = list(numbered(entries, readable=True))
        keys = {site.key: site.source for _, _, site in rows}
        check_found(self.select, keys, "check_types")
        wanted: list[list[Any]] = [[] for _ in rows]  # the annotations of each site
        for select, annotation in zip(self.select, self.annotations, strict=True):
            mine = [n for n, (_, _, site) in enumerate(rows) if matches(select, site, keys)]
            check_chosen(select, mine, keys, "check_types")
            for n in mine:
                wanted[n].append(annotation)
        for (_, entry, site), annotations in zip(rows, wanted, strict=True):
            for annotation in annotations:
                # In the branches of a `cond` it may be of several types.
                for inner, _ in entry.innermost():
                    yield Row(site.key, site_of(inner, site.occurrence), annotation)


class Row(NamedTuple):
    """A site that is to be of a type."""

    key: str
    site: Site
    annotation: Any

    @binds
    def why_not(self) -> str:
        """Why it is not, by the names that are bound so far; if it is, it binds more."""
        leaves = [x if o is None else StandIn(o) for x, o in leaves_of(self.site)]
        whole = jax.tree.unflatten(jax.tree.structure(self.site.aval), leaves)
        if is_of_trees(self.annotation) or is_instance(whole, self.annotation) or not leaves:
            return why_not(whole, self.annotation)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.site.aval)]
        for path, leaf in zip(paths, leaves, strict=True):
            if why := why_not(leaf, self.annotation):
                return f"at {jax.tree_util.keystr(path)}, {why}" if path else why
        return ""

    def describe(self) -> str:
        types = ", ".join(map(short, jax.tree.leaves(self.site.aval))) or "nothing"
        return f"the site {self.key!r} (sown at {self.site.source}) is {types}"


@binds
def _check(rows: Sequence[Row]) -> None:
    """Raise if a site is not of its type.

    One whose names are bound by later sites only, such as `n+1`, is checked after those.
    """
    done: list[Row] = []
    with afresh():
        while rows:
            later: list[tuple[Row, str]] = []
            for row in rows:
                try:
                    why = row.why_not()
                except AnnotationError as error:
                    later.append((row, first_line(error)))
                    continue
                if why:
                    raise _mismatch(row, why, done)
                done.append(row)
            if len(later) == len(rows):
                raise _mismatch(*later[0], done)
            rows = [row for row, _ in later]


def _mismatch(row: Row, why: str, done: Sequence[Row]) -> SiteTypeError:
    wanted = f"wanted {name_of(row.annotation)}"
    bound = ", ".join(_bound(done))
    return SiteTypeError(
        f"`check_types`: {row.describe()}; {wanted}: {why}" + (f"; there {bound}" if bound else "")
    )


@binds
def _bound(done: Sequence[Row]) -> list[str]:
    """What names are bound to, and by which sites."""
    by: dict[str, Row] = {}
    with afresh():
        for row in done:
            row.why_not()
            for binding in bindings():
                by.setdefault(binding, row)
    return [f"{b} (by {row.key!r}, sown at {row.site.source})" for b, row in by.items()]
