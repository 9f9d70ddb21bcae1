r"""Keys, ranges of keys, and the limits of the key-value engine.

Keys are ordered as bytes, shorter first: `b"a" < b"a\0" < b"b"`. A range is half-open, `begin <= key < end`; without
an end it goes on to the last key that there is (a prefix of 0xff bytes has no end that could be written).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB, SECOND

__all__ = [
    "ATTEMPT_LIMIT_NS",
    "ENTRY_OVERHEAD_BYTES",
    "EVERYTHING",
    "MAX_ENTRIES",
    "MAX_KEY_BYTES",
    "MAX_PAGE_BYTES",
    "MAX_PAGE_ITEMS",
    "MAX_TRANSACTION_BYTES",
    "MAX_VALUE_BYTES",
    "Item",
    "KeyRange",
    "Page",
    "checked_key",
    "checked_range",
    "checked_value",
    "key_after",
    "prefix_range",
    "shown",
]

MAX_KEY_BYTES: Final = 500
"""Both LMDB (511) and PostgreSQL (2704) can hold it in a node of their trees, with room for what we add."""
MAX_VALUE_BYTES: Final = MIB
MAX_TRANSACTION_BYTES: Final = 16 * MIB
"""Keys and values written, and keys of conflicts, each with `ENTRY_OVERHEAD_BYTES`."""
MAX_ENTRIES: Final = 100_000
"""Keys and ranges that one transaction writes, and that it conflicts with."""
ENTRY_OVERHEAD_BYTES: Final = 32
MAX_PAGE_ITEMS: Final = 10_000
MAX_PAGE_BYTES: Final = 16 * MIB
ATTEMPT_LIMIT_NS: Final = 5 * SECOND
"""How long one attempt of a transaction may stay open: it keeps old versions alive."""
_SHOWN: Final = 40

Item = tuple[bytes, bytes]
"""Key and value."""


class KeyRange(NamedTuple):
    """`begin <= key < end`, or `begin <= key` where `end` is None."""

    begin: bytes
    end: bytes | None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.begin <= key and (self.end is None or key < self.end)

    @property
    def empty(self) -> bool:
        return self.end is not None and self.begin >= self.end

    def overlaps(self, other: KeyRange) -> bool:
        return (self.end is None or other.begin < self.end) and (other.end is None or self.begin < other.end)


EVERYTHING: Final = KeyRange(b"", None)


class Page(NamedTuple):
    """Part of a range, in the order that was asked for."""

    items: list[Item]
    more: bool
    """A limit stopped it: there may be more behind the last item. If False, there is none."""


def key_after(key: bytes) -> bytes:
    """The least key above `key`."""
    return key + b"\0"


def prefix_range(prefix: bytes) -> KeyRange:
    """All keys that begin with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    return KeyRange(prefix, stem[:-1] + bytes([stem[-1] + 1]) if stem else None)


def shown(key: bytes) -> str:
    """A key for people, cut where it is long."""
    return repr(key) if len(key) <= _SHOWN else f"{key[:_SHOWN]!r}... ({len(key)} bytes)"


def checked_key(key: bytes) -> bytes:
    """Raises `UsageError`."""
    if not isinstance(key, bytes):
        raise UsageError(f"key of type {type(key).__name__}: keys must be bytes")
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise UsageError(f"key {shown(key)} has {len(key)} bytes; 1 to {MAX_KEY_BYTES} are allowed")
    return key


def checked_value(key: bytes, value: bytes) -> bytes:
    """Raises `UsageError`."""
    if not isinstance(value, bytes):
        raise UsageError(f"value of {shown(key)} of type {type(value).__name__}: values must be bytes")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(f"value of {shown(key)} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")
    return value


def checked_range(begin: bytes, end: bytes | None) -> KeyRange:
    """Bounds may be one byte longer than keys (`key_after`). A range that ends before it begins is empty.
    Raises `UsageError`."""
    for bound in (begin, end):
        if bound is not None and not isinstance(bound, bytes):
            raise UsageError(f"bound of a range of type {type(bound).__name__}: bounds are bytes, or None for no end")
        if bound is not None and len(bound) > MAX_KEY_BYTES + 1:
            raise UsageError(f"bound {shown(bound)} has {len(bound)} bytes; at most {MAX_KEY_BYTES + 1} are allowed")
    return KeyRange(begin, end)
