"""What a rule is, and the table of them: one rule for each primitive that holds jaxprs.

Reap, capture, plant and sites are different plans over the same rules. A rule says which sites
its primitive holds, and rebuilds the primitive with JAX's public combinator, threading planted
values into, and collected values out of, the jaxprs inside.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax.extend.core import JaxprEqn

from . import _compat
from ._entry import Entry

if TYPE_CHECKING:
    from ._interpreter import Inside
    from ._walk import Walk


@runtime_checkable
class Rule(Protocol):
    """How one primitive that holds jaxprs is opened.

    !!! Example

        ```python
        import harvest.internal as hi

        class Call:
            def entries(self, eqn, walk):
                return walk.entries(eqn.params["call_jaxpr"])

            def rebuild(self, eqn, invals, inside):
                return inside.run(eqn.params["call_jaxpr"], invals)

        assert isinstance(Call(), hi.Rule)
        ```

    Both methods see one equation. `entries` is called once for each equation before anything
    runs; `rebuild` only if something in it is read or planted.
    """

    def entries(self, eqn: JaxprEqn, walk: "Walk") -> Sequence[Entry]:
        """The sites the equation holds, in call order, as seen from outside it.

        Use `walk.entries(jaxpr)` for those of a jaxpr inside.
        """
        ...

    def rebuild(
        self, eqn: JaxprEqn, invals: list[Any], inside: "Inside"
    ) -> tuple[list[Any], list[Any]]:
        """Evaluate the equation; returns its outputs and what was read in it.

        `inside.run(jaxpr, args)` evaluates a jaxpr and returns its outputs, and one item for each
        entry to read. `inside.actions` says what is done at each entry. An output that is not live
        (`inside.live`) may be None.
        """
        ...


_RULES: dict[str, Rule] = {}
ON_NEW_RULE: list[Callable[[], None]] = []  # what was decided by the rules there were


def register_rule(*primitives: str) -> Callable[[type[Rule]], type[Rule]]:
    """Teach harvest to open a primitive.

    !!! Example

        ```python
        import harvest.internal as hi
        import jax

        @hi.register_rule("my_call")
        class MyCall:
            def entries(self, eqn, walk):
                return walk.entries(eqn.params["call_jaxpr"])

            def rebuild(self, eqn, invals, inside):
                return inside.run(eqn.params["call_jaxpr"], invals)
        ```

    **Arguments:**

    - `*primitives`: names of primitives (`eqn.primitive.name`), or of `HiPrim` classes.

    **Returns:**

    A decorator for a class without arguments that is a [`harvest.internal.Rule`][]. A later rule
    for the same primitive replaces the earlier one.
    """

    def decorator(rule: type[Rule]) -> type[Rule]:
        for name in primitives:
            _RULES[name] = rule()
        for forget in ON_NEW_RULE:
            forget()
        return rule

    return decorator


def rule_for(eqn: JaxprEqn) -> Rule | None:
    return _RULES.get(_compat.primitive_name(eqn)) or _RULES.get(eqn.primitive.name)
