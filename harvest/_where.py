"""Which equations of a program `sow_eqns` is about, and what they are called."""

import dataclasses
import operator
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr

from . import _compat
from ._annotations import is_annotation
from ._equation import Around, Equation, Node, Reader
from ._errors import SelectError, UnknownSiteError, UnsupportedError, nearest
from ._filters import has_type
from ._globs import glob
from ._predicate import Predicate

# What a shorthand may begin with.
KINDS = ("primitive", "jit", "checkpoint_name", "scope")


class Sown(NamedTuple):
    """What is sown of the outputs of an equation."""

    name: str
    outs: tuple[int, ...]  # which of them


class Choice(NamedTuple):
    """What is sown of an equation, and in each of the jaxprs inside of it."""

    sown: tuple[Sown, ...]
    inside: "tuple[Choices | None, ...]"


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """What is sown in a jaxpr: for each of its equations that is no marker, or None.

    Equal ones are the same object: compared by value, jaxprs that are called twice, which call
    others twice, would take forever.
    """

    items: tuple[Choice | None, ...]

    @staticmethod
    def of(items: tuple[Choice | None, ...]) -> "Choices | None":
        return _INTERNED.setdefault(items, Choices(items)) if any(items) else None


_INTERNED: MutableMapping[Any, Choices] = weakref.WeakValueDictionary()


# What of an equation is meant: names (None for its own), and which outputs.
Match = Callable[[Node], Iterator[tuple[str | None, tuple[int, ...]]]]


def check_where(where: Any) -> Any:
    """`where` itself, with sequences as tuples; a `SelectError` if it is something else."""
    if where is ...:
        return None
    if is_annotation(where) or isinstance(where, Predicate):
        return _of_outputs(where)
    is_predicate = callable(where) and not isinstance(where, type)
    if where is None or (isinstance(where, str) and where) or is_predicate:
        return where
    if isinstance(where, list | tuple | set | frozenset) and where:
        return tuple(map(check_where, where))
    raise SelectError(
        f"`sow_eqns` got `where={where!r}`; wanted the name of a primitive, 'jit:NAME', "
        "'checkpoint_name:NAME', a glob of named scopes, a predicate that takes a "
        "`harvest.Equation`, a jaxtyping annotation, a sequence of these, or None for all equations"
    )


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Whether a predicate over arrays holds for all outputs of an equation."""

    holds: Predicate

    def __call__(self, eqn: Equation) -> bool:
        return bool(eqn.outputs) and all(map(self._of_type, eqn.outputs))

    def _of_type(self, aval: Any) -> bool:
        if not _compat.is_array_type(aval):
            return False
        return self.holds(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding))

    def __repr__(self) -> str:
        return repr(self.holds)


def _of_outputs(where: Any) -> _Outputs:
    predicate = has_type(where) if is_annotation(where) else where
    if predicate.globs:
        raise SelectError(
            f"`sow_eqns` got {predicate!r}, which is for keys of sites, and equations have none "
            "yet; wanted the name of a primitive, 'jit:NAME', or a glob of named scopes"
        )
    return _Outputs(predicate)


def choose(jaxpr: Jaxpr, where: Any, name: str | None, source: str = "") -> Choices | None:
    """What is sown in a program that is at a line `source`; an error if nothing is."""
    reader = Reader()
    nodes = reader.nodes(jaxpr, Around(source=source))
    every = list(reader.every(nodes))
    known: dict[int, Choices | None] = {}
    wanted = where if isinstance(where, tuple) else (where,)
    matches = [_match(part, every) for part in wanted]

    def choices(nodes: tuple[Node, ...]) -> Choices | None:
        if id(nodes) not in known:
            known[id(nodes)] = Choices.of(tuple(map(choice, nodes)))
        return known[id(nodes)]

    def choice(node: Node) -> Choice | None:
        sown = {
            (own if name is None else name) or _own_name(node.equation): outs
            for match in reversed(matches)
            for own, outs in match(node)
        }
        inside = tuple(map(choices, node.inside))
        if not sown and not any(inside):
            return None
        return Choice(tuple(Sown(*item) for item in sown.items()), inside)

    for part, match in zip(wanted, matches, strict=True):
        if part is not None and not any(any(match(node)) for node in every):
            _raise_unmatched(part, reader, nodes, every)
    return choices(nodes)


def _own_name(equation: Equation) -> str:
    return equation.checkpoint_name or equation.jit or equation.primitive


def _match(where: Any, every: Sequence[Node]) -> Match:
    """The equations that one predicate or shorthand means."""
    if where is None:
        return lambda node: _if(True, node)
    if callable(where):
        return lambda node: _if(bool(node.outs) and _asked(where, node.equation), node)
    kind, _, rest = where.partition(":")
    if kind not in KINDS or not rest:
        is_primitive = any(node.equation.primitive == where for node in every)
        kind, rest = ("primitive" if is_primitive else "scope"), where
    if kind == "primitive":
        return lambda node: _if(node.equation.primitive == rest, node)
    is_meant = glob(rest)
    if kind == "scope":
        return lambda node: ((p, outs) for p, outs in node.leaving.items() if is_meant(p))
    own = operator.attrgetter(kind)
    return lambda node: _if(own(node.equation) is not None and is_meant(own(node.equation)), node)


def _if(is_meant: bool, node: Node) -> Iterator[tuple[None, tuple[int, ...]]]:
    if is_meant and node.outs:
        yield None, node.outs


def _asked(where: Callable[[Equation], Any], equation: Equation) -> bool:
    try:
        return bool(where(equation))
    except Exception as error:
        error.add_note(
            f"harvest: raised by the predicate of `sow_eqns` for `{equation.label}`, at "
            f"{equation.source}"
        )
        raise


def _raise_unmatched(where: Any, reader: Reader, nodes: Any, every: Sequence[Node]) -> None:
    predicate = f"`{where}`" if isinstance(where, _Outputs) else "the predicate"
    what = f"{predicate} holds for" if callable(where) else f"{where!r} matches"
    fused = []
    for node, inner in reader.closed(nodes):
        match, name = _match(where, [*every, *inner]), node.equation.primitive
        fused.append(f"`{name}`, at {node.equation.source}")
        if any(any(match(n)) for n in inner):
            raise UnsupportedError(
                f"`sow_eqns`: {what} equations inside of {fused[-1]}, and no others; "
                f"{_closed(node)}. Choose the equation itself ({name!r}), or compute what you "
                "need from its inputs"
            )
    there = _names(where, every)
    hint = nearest(where, there) if isinstance(where, str) else f"there are {', '.join(there)}"
    if isinstance(where, str) and ":" not in where and any(c in where for c in "*?"):
        hint += "; such a glob is of named scopes, and `...` means all equations"
    if fused:
        hint += f"; nothing inside of {fused[0]} is an equation of the program"
    raise UnknownSiteError(f"`sow_eqns`: {what} no equation; {hint if there else 'there are none'}")


def _closed(node: Node) -> str:
    if _compat.hi_prim(node.eqn) is not None:
        return "it is a `HiPrim`, which is one equation whatever it expands to"
    if node.equation.primitive == "while":
        return "they are in its predicate, in which nothing can be collected"
    return "it is compiled as a whole, so that there is nothing of them in the program"


def _names(where: Any, every: Sequence[Node]) -> dict[str, None]:
    """What a shorthand could have been."""
    kind = where.partition(":")[0] if isinstance(where, str) else ""
    names: dict[str, None] = {}
    for node in every:
        equation = node.equation
        if kind in ("jit", "checkpoint_name"):
            own = getattr(equation, kind)
            names.update({f"{kind}:{own}": None} if own else {})
        else:
            prefix = f"{kind}:" if kind in KINDS else ""
            scopes = [] if kind == "primitive" or not isinstance(where, str) else equation.leaves
            names.update({prefix + path: None for path in scopes})
            names.update({} if kind == "scope" else {prefix + equation.primitive: None})
    return names
