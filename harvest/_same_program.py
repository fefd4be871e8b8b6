"""Whether all processes are about to run the same program: `debug.assert_same_program`."""

import collections
import functools
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from . import _compat, _types
from ._cache import name_of
from ._equation import Reader
from ._errors import ProcessError
from ._stage import Program, Transformed, trace_afresh, trace_cached

# What tells calls apart. All processes count the calls that they make.
_CALLS = itertools.count()

# What is said of a program, in the order in which a difference is looked for.
Description = Mapping[str, Sequence[str]]


def assert_same_program[**P, T](fn: Callable[P, T], *, timeout: int | float = 60) -> Callable[P, T]:
    """As `fn`, but first checks that all processes are about to run the same program.

    In a program on several processes (`jax.distributed`) a process that collects or plants
    something else than the others compiles another program, with other collectives, and then all of
    them wait for each other for ever. Here every process gets the same error instead. What is
    compared goes through JAX's coordination service, which needs no collectives.

    !!! Example

        ```python
        import harvest
        import jax
        import jax.numpy as jnp

        f = lambda x: harvest.sow(jnp.sin(x), name="h").sum()
        checked = harvest.debug.assert_same_program(harvest.reap(f, "h"))
        assert (checked(jnp.ones(3))["h"] == jnp.sin(1)).all()
        ```

    **Arguments:**

    - `fn`: what is going to be run: a transformed function, such as `reap(f, ...)`, or another one.
    - `timeout`: how long to wait for other processes, in seconds.

    **Returns:**

    A function like `fn`, which all processes have to call, as often as each other. It traces the
    program (once more, if `fn` is none of harvest's); what it exchanges with others is some
    kilobytes. With a single process it is `fn`.

    **Raises:**

    - [`harvest.ProcessError`][]: the programs differ, in what is collected or planted, in their
        arguments, or in their equations; or they cannot be traced on some process; or a process
        has not come here in time, since it runs something else, or has ended.
    """

    @functools.wraps(fn, updated=())
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.process_count() > 1:
            _check(fn, args, kwargs, timeout)
        return fn(*args, **kwargs)

    return checked


def _check(fn: Callable[..., Any], args: Any, kwargs: Any, timeout: int | float) -> None:
    call = next(_CALLS)
    error = None
    try:
        trace = trace_afresh if _compat.tracing() else trace_cached
        program = trace("debug.assert_same_program", fn, args, kwargs)
        mine: Description = described(fn, program)
    except Exception as raised:  # which the others have to know
        error, mine = raised, {"error": [f"{type(raised).__name__}: {raised}"]}
    message = difference(_exchanged(call, mine, timeout))
    if message is not None:
        raise ProcessError(f"`debug.assert_same_program`: {message}") from error
    if error is not None:
        raise error


def _exchanged(call: int, mine: Description, timeout: int | float) -> list[Description]:
    """What each process says of its program."""
    service, index = _compat.coordination_service(), jax.process_index()
    key = "harvest/same_program/{}/{}".format
    service.key_value_set(key(call, index), json.dumps(mine))
    if call > 1:  # whoever has come to the call before has read the one before that
        service.key_value_delete(key(call - 2, index))
    deadline, found, missing = time.monotonic() + timeout, [], []
    for other in range(jax.process_count()):
        left = max(deadline - time.monotonic(), 0.1)
        try:
            found.append(
                json.loads(service.blocking_key_value_get(key(call, other), int(1e3 * left)))
            )
        except _compat.RUNTIME_ERROR as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing.append(other)
    if missing:
        raise ProcessError(
            f"`debug.assert_same_program`: {_named(missing)} did not come to this call (number "
            f"{call + 1} of them) within {timeout:g} s; all processes have to make the same calls: "
            "look at what they do instead, or whether they have ended"
        )
    return found


def described(fn: Callable[..., Any], program: Program) -> dict[str, list[str]]:
    """What makes a program another one, in words that are the same on every process."""
    equations = collections.Counter(
        node.equation.label for node in Reader().every(Reader().nodes(program.jaxpr))
    )
    out = jax.tree.unflatten(program.out, list(map(_types.short, program.jaxpr.out_avals)))
    outputs = jax.tree_util.tree_leaves_with_path(out.unflatten())
    arguments = zip(program.names(), program.jaxpr.in_avals, strict=True)
    text = _without_addresses(str(program.jaxpr))
    return {
        "transforms": list(_transforms(fn)),
        "arguments": [f"{name}: {aval}" for name, aval in arguments],
        "results": [f"{jax.tree_util.keystr(path)}: {type}" for path, type in outputs],
        "equations": [f"{count} {name}" for name, count in sorted(equations.items())],
        "parameters of equations, or their order,": [
            hashlib.sha256(text.encode()).hexdigest()[:12]
        ],
    }


def _transforms(fn: Any) -> Iterator[str]:
    """The transforms of harvest around a function, outermost first, with their options."""
    while isinstance(fn, Transformed):
        options = ", ".join(f"{name}={getattr(fn, name)!r}" for name in fn._static)
        yield _without_addresses(f"{type(fn).__name__.lower()}({options})")
        fn = fn.fn
    yield name_of(fn)


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)


def difference(found: Sequence[Description]) -> str | None:
    """Where programs differ, process by process; None if they are alike.

    The same program may have been asked for in other words.
    """
    if all({**d, "transforms": None} == {**found[0], "transforms": None} for d in found):
        return None
    failed = {i: d["error"][0] for i, d in enumerate(found) if "error" in d}
    if failed:
        lines = [f"\n    process {i}: {error}" for i, error in failed.items()]
        return "the program cannot be traced on every process:" + "".join(lines)
    field = next(name for name in found[0] if len({tuple(d[name]) for d in found}) > 1)
    common = set.intersection(*(set(d[field]) for d in found))
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, description in enumerate(found):
        groups.setdefault(tuple(x for x in description[field] if x not in common), []).append(i)
    lines = [
        f"\n    {_named(where)}: {'; '.join(items) or 'the others only'}"
        for items, where in groups.items()
    ]
    return (
        f"processes are about to run different programs, and would wait for each other; their "
        f"{field} differ:{''.join(lines)}\nLet all of them collect and plant the same sites"
    )


def _named(processes: Sequence[int]) -> str:
    return f"process{'' if len(processes) == 1 else 'es'} {', '.join(map(str, processes))}"
