"""What filters the leaves of a pytree, and selects sites, with one meaning in both."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import AnnotationError

from ._annotations import afresh, first_line, is_annotation, is_instance, is_of_trees, name_of
from ._errors import SelectError
from ._globs import check_glob
from ._observed import Observed, StandIn, leaves_of, observe
from ._site import Site


class Subject(NamedTuple):
    """What a predicate is asked about: a leaf of a pytree, or of the type of a site."""

    leaf: Any
    observed: Observed | None  # None if the leaf is no array
    whole: Any  # of which it is a leaf, for a site
    key: str | None  # None if it is not known where the leaf is


class Predicate:
    """What [`harvest.has_type`][], [`harvest.has_spec`][] and their like return.

    It filters the leaves of a pytree, as Equinox's filter functions do, and selects sites: those
    all of whose leaves it holds for. Predicates combine by `&`, `|` and `~`, also with jaxtyping
    annotations.

    !!! Example

        ```python
        import equinox as eqx
        import harvest
        import jax
        import jax.numpy as jnp
        from jaxtyping import Array, Float

        model = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
        not_vectors = harvest.has_type(Float[Array, "..."]) & ~harvest.has_type(Float[Array, "n"])
        trained, frozen = eqx.partition(model, not_vectors)
        assert trained.layers[0].weight is not None and trained.layers[0].bias is None

        f = lambda x: harvest.sow(jnp.outer(harvest.sow(x, name="x"), x), name="xx")
        assert list(harvest.reap(f, not_vectors)(jnp.ones(3))) == ["xx"]
        ```
    """

    @property
    def globs(self) -> tuple[str, ...]:
        """The patterns of the [`harvest.by_key`][]s in it."""
        return ()

    def __call__(self, x: Any) -> bool:
        """Whether it holds: for a leaf, or for all leaves of a [`harvest.Site`][]."""
        if not isinstance(x, Site):
            return self.holds(Subject(x, observe(x), x, None))
        leaves = list(leaves_of(x))
        whole = jax.tree.unflatten(jax.tree.structure(x.aval), [as_value(*leaf) for leaf in leaves])
        subjects = [Subject(*leaf, whole, x.key) for leaf in leaves]
        return all(map(self.holds, subjects or [Subject(whole, None, whole, x.key)]))

    def filter_spec(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
        """For which leaves of a pytree it holds: a filter that knows where each leaf is.

        A [`harvest.by_key`][] needs that, since `eqx.filter` calls a filter with the leaf only.

        !!! Example

            ```python
            import equinox as eqx
            import harvest
            import jax

            model = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
            first = harvest.by_key("layers/0/*").filter_spec(model)
            assert first.layers[0].weight and not first.layers[1].weight
            trained, frozen = eqx.partition(model, first)
            ```

        **Arguments:**

        - `tree`: any pytree. The key of a leaf is its path, joined by `/`: `layers/0/weight`.
        - `is_leaf`: as for `jax.tree.map`.

        **Returns:**

        A pytree of bools, of the structure of `tree`.

        **Raises:**

        - [`harvest.UnknownSiteError`][]: a glob of a `by_key` matches no leaf.
        """
        paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
        keys = {path_key(path): None for path, _ in paths}
        for pattern in self.globs:
            check_glob(pattern, keys, "by_key", "leaf")
        held = [self.holds(Subject(leaf, observe(leaf), leaf, path_key(p))) for p, leaf in paths]
        return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), held)

    def holds(self, subject: Subject) -> bool:
        raise NotImplementedError

    def __and__(self, other: Any) -> "Predicate":
        return _Both(self, as_predicate(other))

    def __rand__(self, other: Any) -> "Predicate":
        return _Both(as_predicate(other), self)

    def __or__(self, other: Any) -> "Predicate":
        return _Either(self, as_predicate(other))

    def __ror__(self, other: Any) -> "Predicate":
        return _Either(as_predicate(other), self)

    def __invert__(self) -> "Predicate":
        return _Not(self)


def as_predicate(x: Any) -> Predicate:
    if isinstance(x, Predicate):
        return x
    if is_annotation(x):
        return HasType(x)
    raise SelectError(
        f"a predicate can be combined with another one or with a jaxtyping annotation, not with "
        f"{x!r} of type `{type(x).__name__}`; for keys there is `harvest.by_key`"
    )


def path_key(path: Any) -> str:
    """Where a leaf of a pytree is, as a key."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class HasType(Predicate):
    annotation: Any

    def holds(self, subject):
        value = as_value(subject.leaf, subject.observed)
        whole = value if subject.whole is subject.leaf else subject.whole
        candidates = [whole] if is_of_trees(self.annotation) else [subject.leaf, value, whole]
        try:
            return any(map(self._fits, candidates))
        except AnnotationError as error:
            raise SelectError(
                f"{self} cannot be checked: {first_line(error)}. The names of dimensions have "
                "to be bound within one leaf"
            ) from None

    def _fits(self, x: Any) -> bool:
        with afresh():
            return is_instance(x, self.annotation)

    def __repr__(self) -> str:
        return f"has_type({name_of(self.annotation)})"


@dataclasses.dataclass(frozen=True)
class _Two(Predicate):
    left: Predicate
    right: Predicate

    @property
    def globs(self):
        return self.left.globs + self.right.globs


class _Both(_Two):
    def holds(self, subject):
        return self.left.holds(subject) and self.right.holds(subject)

    def __repr__(self) -> str:
        return f"({self.left} & {self.right})"


class _Either(_Two):
    def holds(self, subject):
        return self.left.holds(subject) or self.right.holds(subject)

    def __repr__(self) -> str:
        return f"({self.left} | {self.right})"


@dataclasses.dataclass(frozen=True)
class _Not(Predicate):
    inner: Predicate

    @property
    def globs(self):
        return self.inner.globs

    def holds(self, subject):
        return not self.inner.holds(subject)

    def __repr__(self) -> str:
        return f"~{self.inner}"


def as_value(leaf: Any, observed: Observed | None) -> Any:
    """What `isinstance` can take for the value that a type is of."""
    return leaf if observed is None else StandIn(observed)
