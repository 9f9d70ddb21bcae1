"""What the modes of `open` and the flags of `os` ask of the service."""

from __future__ import annotations

import os
from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.fs.schema.meta import OpenFlag

__all__ = ["flags_of", "is_append"]

_FLAGS: Final = (
    (os.O_CREAT, OpenFlag.CREATE), (os.O_EXCL, OpenFlag.EXCLUSIVE), (os.O_TRUNC, OpenFlag.TRUNCATE),
    (os.O_DIRECTORY, OpenFlag.DIRECTORY),
)  # fmt: skip
_MODES: Final = {
    "r": OpenFlag.READ,
    "w": OpenFlag.WRITE | OpenFlag.CREATE | OpenFlag.TRUNCATE,
    "x": OpenFlag.WRITE | OpenFlag.CREATE | OpenFlag.EXCLUSIVE,
    "a": OpenFlag.WRITE | OpenFlag.CREATE,
}


def flags_of(mode: str | int, *, follow: bool = True) -> OpenFlag:
    """Raises `UsageError` for what the builtin `open` refuses."""
    flags = OpenFlag.FOLLOW if follow else OpenFlag(0)
    if isinstance(mode, int):
        flags = OpenFlag(0) if mode & os.O_NOFOLLOW else flags
        writes = mode & os.O_ACCMODE
        flags |= OpenFlag(0) if writes == os.O_WRONLY else OpenFlag.READ
        flags |= OpenFlag(0) if writes == os.O_RDONLY else OpenFlag.WRITE
        for theirs, ours in _FLAGS:
            flags |= ours if mode & theirs else OpenFlag(0)
        return flags
    first = [one for one in mode if one in _MODES]
    if len(first) != 1 or len(set(mode)) != len(mode) or set(mode) - set("rwxab+t") or {"b", "t"} <= set(mode):
        raise UsageError(f"mode {mode!r} is not valid; give one of r, w, x, a, optionally with +, and b or t")
    flags |= _MODES[first[0]]
    return flags | OpenFlag.READ | OpenFlag.WRITE if "+" in mode else flags


def is_append(mode: str | int) -> bool:
    return bool(mode & os.O_APPEND) if isinstance(mode, int) else "a" in mode
