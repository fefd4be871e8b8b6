"""The error family.

Every message says what was got, what was wanted and what to do, and names the user's own line.
"""

import difflib
import os
import warnings
from collections.abc import Mapping

import jax

from . import _compat


class HarvestError(Exception):
    """Base class of all errors that harvest raises.

    !!! Example

        ```python
        import harvest

        try:
            harvest.reap(lambda x: harvest.sow(x, name="logits"), "logit")(1.0)
        except harvest.HarvestError as error:
            assert "did you mean 'logits'" in str(error)
        ```
    """

    def __str__(self) -> str:
        # `KeyError` prints the repr of its argument, which would hide line breaks.
        return str(self.args[0]) if self.args else ""


class SowError(HarvestError, TypeError):
    """A value or a name that cannot be sown.

    !!! Example

        ```python
        import harvest

        try:
            harvest.sow(1.0, name="a/b")
        except harvest.SowError as error:
            assert "harvest.scope" in str(error)
        ```
    """


class SelectError(HarvestError, TypeError):
    """A `select` (or a key of `plants`) of the wrong type.

    !!! Example

        ```python
        import harvest

        try:
            harvest.reap(lambda x: harvest.sow(x, name="h"), select=3)
        except harvest.SelectError as error:
            assert "glob" in str(error)
        ```
    """


class UnknownSiteError(HarvestError, KeyError):
    """A key or glob that no site of the program matches.

    !!! Example

        ```python
        import harvest

        try:
            harvest.plant(lambda x: harvest.sow(x, name="h"), {"g": 0.0})(1.0)
        except harvest.UnknownSiteError as error:
            assert "'g'" in str(error)
        ```
    """


class DuplicateSiteError(HarvestError, ValueError):
    """In `mode="strict"`, a key that was sown more than once.

    !!! Example

        ```python
        import harvest

        def f(x):
            return harvest.sow(harvest.sow(x, name="h") + 1, name="h")

        try:
            harvest.reap(f)(1.0)
        except harvest.DuplicateSiteError as error:
            assert 'mode="append"' in str(error)
        assert len(harvest.reap(f, mode="append")(1.0)["h"]) == 2
        ```
    """


class PlantError(HarvestError, ValueError):
    """A planted value or edit that does not fit its site.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        try:
            harvest.plant(lambda x: harvest.sow(x, name="h"), {"h": jnp.zeros(7)})(jnp.ones(3))
        except harvest.PlantError as error:
            assert "f32[7]" in str(error) and "f32[3]" in str(error)
        ```
    """


class ShardingError(HarvestError, ValueError):
    """A `PartitionSpec` that is missing, or does not fit.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        mesh = jax.make_mesh((1,), ("data",))
        try:
            harvest.filter_shard_map(jnp.sin, mesh, P("model"), P("model"))(jnp.ones(3))
        except harvest.ShardingError as error:
            assert "no axis 'model'" in str(error)
        ```
    """


class SiteTypeError(HarvestError, TypeError):
    """A site that is not of the type that [`harvest.check_types`][] was given for it.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp
        from jaxtyping import Array, Float

        f = lambda x: harvest.sow(x, name="h")
        try:
            harvest.check_types(f, {"h": Float[Array, "n n"]})(jnp.ones((2, 3)))
        except harvest.SiteTypeError as error:
            assert "'h'" in str(error) and "f32[2,3]" in str(error)
        ```
    """


class GradError(HarvestError, TypeError):
    """A function, or arguments of it, that cannot be differentiated.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        try:
            harvest.grad(lambda x: harvest.sow(x, name="h"))(jnp.ones(3))
        except harvest.GradError as error:
            assert "f32[3]" in str(error) and "scalar" in str(error)
        ```
    """


class UnsupportedError(HarvestError, NotImplementedError):
    """A wanted site inside a structure that cannot be opened, or a callable that cannot be traced.

    !!! Example

        ```python
        import harvest
        import jax

        def f(x):
            return jax.lax.while_loop(lambda x: x < 3, lambda x: harvest.sow(x + 1, name="h"), x)

        try:
            harvest.reap(f)(0.0)
        except harvest.UnsupportedError as error:
            assert "harvest.folds.last()" in str(error)
        ```
    """


class ProcessError(HarvestError, RuntimeError):
    """Processes that are about to run different programs.

    !!! Example

        ```python
        import harvest
        import jax.numpy as jnp

        step = harvest.debug.assert_same_program(jnp.sin, timeout=30)
        try:
            step(1.0)
        except harvest.ProcessError as error:  # on every process, or on none
            print(error)
        ```
    """


class HarvestWarning(UserWarning):
    """Something that is allowed but probably a mistake, such as a plant that feeds nothing.

    !!! Example

        ```python
        import warnings

        import harvest

        def f(x):
            harvest.sow(x, name="h")  # bare: the result is not used
            return x

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            harvest.plant(f, {"h": harvest.zero()})(1.0)
        assert caught[0].category is harvest.HarvestWarning
        ```
    """


def warn(message: str) -> None:
    """Warn at the user's line."""
    skipped = (*_compat.NOT_THE_USER, os.path.dirname(jax.__file__) + os.sep)
    warnings.warn(message, HarvestWarning, skip_file_prefixes=skipped)


def nearest(key: str, sources: Mapping[str, str | None], what: str = "sites") -> str:
    """A hint for a key that was not found: the likely ones, or else what there is.

    `sources` has the keys there are, and where each is sown.
    """
    keys = sorted(sources)
    if not keys:
        hint = " (what `perturb` names is a site of a backward pass, as in `jax.grad(f)`)"
        return "there are none" + (hint if what == "sites" else "")
    name = key.rpartition("/")[2]
    scoped = [k for k in keys if k.rpartition("/")[2] == name and k != key]
    if len(scoped) > 1 and key == name and not any(c in key for c in "*?"):
        return f"'**/{key}' matches {len(scoped)} {what}, as {_located(scoped[0], sources)}"
    if close := scoped[:3] or difflib.get_close_matches(key, keys, n=3, cutoff=0.5):
        return "did you mean " + " or ".join(_located(k, sources) for k in close) + "?"
    listed = ", ".join(_located(k, sources) for k in keys[:12])
    return f"there are {listed}" + (f" and {len(keys) - 12} more" if len(keys) > 12 else "")


def _located(key: str, sources: Mapping[str, str | None]) -> str:
    source = sources[key]
    named = repr(key) if key else "'' (the whole of it)"
    return named if source is None else f"{named} (sown at {source})"
