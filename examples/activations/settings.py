"""Settings of a run that cannot be, and those that what is there was not made with."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Array


class SettingError(ValueError):
    """Settings that cannot be."""


# Of these the value says nothing to a user.
OTHER = {
    "texts": "other texts",
    "weights": "other weights",
    "store": "another store, or it has grown",
}


def check_same(where: Any, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """**Raises:** [`SettingError`][] if what is in a folder was made with other settings."""
    for name, value in now.items():
        if name not in before:
            other = f"another version, which did not note {name!r}"
        elif (was := before[name]) == value:
            continue
        else:
            other = OTHER.get(name, f"{name}={was}, and this is {name}={value}")
        raise SettingError(
            f"What is in {where} was made with {other}. Give the settings it was made with, or "
            "another folder by `--out`."
        )


def fingerprint(parts: Iterable[str | Array]) -> str:
    """16 hexadecimal digits, which are others if a text or array is, or where one ends."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            whole.update(hashlib.sha256(part.encode()).digest())
        else:
            whole.update(f"{part.dtype}{part.shape}".encode())
            whole.update(np.asarray(part))
    return whole.hexdigest()[:16]
