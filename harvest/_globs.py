"""Globs on keys and paths: `*` and `?` stop at `/`, `**` crosses it, all else is literal."""

import functools
import re
from collections.abc import Callable, Mapping

from ._errors import UnknownSiteError, nearest


def glob(pattern: str) -> Callable[[str], bool]:
    """Whether a key matches a pattern.

    Between components, `**/` may also stand for nothing.
    """
    regex = _regex(pattern)
    return lambda key: regex.fullmatch(key) is not None


def check_glob(
    pattern: str, keys: Mapping[str, str | None], what: str, thing: str = "site"
) -> None:
    """Raise an `UnknownSiteError` if a pattern is no key, and matches none."""
    if pattern not in keys and not any(map(glob(pattern), keys)):
        kind = "glob" if any(c in pattern for c in "*?") else "key"
        raise UnknownSiteError(
            f"`{what}`: the {kind} {pattern!r} matches no {thing}; {nearest(pattern, keys)}"
        )


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"((?:(?<=/)|^)\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts), re.DOTALL)
