"""Numbers of sown equations, which count on across calls of one jaxpr.

A jaxpr that is called twice is rewritten once, as it is compiled once. So its sites have the
numbers that they have in it, and the scope of each call says how many come before: scopes stay on
equations however JAX transforms a program.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ._compat import UserScope
from ._scopes import components


class Numbering:
    """What numbers that belong together share."""


@dataclasses.dataclass(frozen=True)
class Number:
    """How many sites of a name come before a site, in its jaxpr."""

    numbering: Numbering
    index: int


class Before(UserScope):
    """The scope of an equation with jaxprs inside: for each name, how many sites come before it."""

    numbering: Numbering
    counts: Mapping[str, int]

    __hash__ = object.__hash__  # its text says nothing

    def __new__(cls, numbering: Numbering, counts: Mapping[str, int]) -> "Before":
        self = super().__new__(cls, "sow_eqns")
        self.numbering, self.counts = numbering, counts
        return self

    def __eq__(self, other: object) -> bool:
        return self is other


def key_of(scope: Sequence[UserScope], name: str, number: Number | None) -> str:
    """The key of a site: its scopes, its name and, if it has one, its number."""
    path = [*components(s for s in scope if not isinstance(s, Before)), name]
    if number is not None:
        mine = (s for s in scope if isinstance(s, Before) and s.numbering is number.numbering)
        path.append(str(number.index + sum(s.counts.get(name, 0) for s in mine)))
    return "/".join(path)
