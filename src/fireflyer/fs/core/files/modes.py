"""What the modes of `open` and the flags of `os` ask of the service."""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.fs.schema.meta import OpenFlag

__all__ = ["flags_of", "is_append"]

# Of Linux on x86-64 and arm64, as `os` has them; numbers, because this is the same wherever it runs.
_ACCESS: Final = 0o3
_WRONLY: Final = 0o1
_RDWR: Final = 0o2
_CREAT: Final = 0o100
_EXCL: Final = 0o200
_TRUNC: Final = 0o1000
_APPEND: Final = 0o2000
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
        writes = mode & _ACCESS
        flags |= OpenFlag.WRITE if writes == _WRONLY else OpenFlag.READ
        flags |= OpenFlag.WRITE if writes == _RDWR else OpenFlag(0)
        flags |= OpenFlag.CREATE if mode & _CREAT else OpenFlag(0)
        flags |= OpenFlag.EXCLUSIVE if mode & _EXCL else OpenFlag(0)
        return flags | (OpenFlag.TRUNCATE if mode & _TRUNC else OpenFlag(0))
    first = [one for one in mode if one in _MODES]
    if len(first) != 1 or len(set(mode)) != len(mode) or set(mode) - set("rwxab+t") or {"b", "t"} <= set(mode):
        raise UsageError(f"mode {mode!r}: one of r, w, x and a, with + for both, and b or t")
    flags |= _MODES[first[0]]
    return flags | OpenFlag.READ | OpenFlag.WRITE if "+" in mode else flags


def is_append(mode: str | int) -> bool:
    return bool(mode & _APPEND) if isinstance(mode, int) else "a" in mode
