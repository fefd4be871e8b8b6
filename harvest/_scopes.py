"""What the scopes around a site put into its key."""

from collections.abc import Iterable

from ._compat import UserScope


class PartScope(UserScope):
    """The scope of a part of a model that `tap` chose, which has the path of the part.

    What it puts into a key depends on the parts that are running around it. JAX traces the body of
    a `jit` once, wherever it is called, so that this is found out when the key is read, and not
    when the scope is opened. A path of length 0 is that of the model itself.
    """

    __slots__ = ("path",)

    path: tuple[str, ...]

    def __new__(cls, label: str, path: tuple[str, ...]) -> "PartScope":
        self = super().__new__(cls, label)
        self.path = path
        return self


def components(scopes: Iterable[UserScope]) -> list[str]:
    """The components of a key, of the scopes around a site, outermost first.

    A part enters as its path in the model, whichever other parts it is called by: in the scope of
    `layers/3`, `layers/3/attn` adds `attn`, and `embed` takes the place of `layers/3`. Scopes of
    other kinds stay.
    """
    texts: list[tuple[str, ...]] = []
    around: list[tuple[tuple[str, ...], int]] = []  # paths of parts, and where their texts are
    for scope in scopes:
        if not isinstance(scope, PartScope):
            texts.append((scope,))
            continue
        if not scope.path:
            around = []  # another model
            continue
        while around and scope.path[: len(around[-1][0])] != around[-1][0]:
            texts[around.pop()[1]] = ()
        outer = around[-1][0] if around else ()
        around.append((scope.path, len(texts)))
        texts.append(scope.path[len(outer) :])
    return [component for text in texts for component in text]
