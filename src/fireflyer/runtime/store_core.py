"""The rendezvous table, without IO: a bounded map of keys to values, and who waits for which keys.

`LocalStore` and `StoreService` both keep one of these. Values of `add` are decimal digits, so that a counter can be
read with `get` like any other value. A waiter is a number that its owner chooses; `set`, `set_if_missing` and `add` say
which waiters have become ready, in the order in which they began to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fireflyer.base.errors import Busy, UsageError
from fireflyer.base.units import MIB

__all__ = [
    "ENTRY_OVERHEAD_BYTES",
    "MAX_KEYS_PER_WAIT",
    "MAX_KEY_BYTES",
    "MAX_LISTING_BYTES",
    "MAX_TOTAL_BYTES",
    "MAX_VALUE_BYTES",
    "MAX_WAITERS",
    "StoreTable",
]

MAX_KEY_BYTES: Final = 512
MAX_VALUE_BYTES: Final = 4 * MIB
MAX_TOTAL_BYTES: Final = 256 * MIB
MAX_WAITERS: Final = 65536
MAX_KEYS_PER_WAIT: Final = 16384
MAX_LISTING_BYTES: Final = 8 * MIB
ENTRY_OVERHEAD_BYTES: Final = 128
"""Counted for each key beside its bytes, so that many tiny entries are bounded as well."""


@dataclass(slots=True)
class _Waiter:
    missing: dict[str, None] = field(default_factory=dict)


class StoreTable:
    """See the module's text. Not thread-safe. Raises `UsageError` over a size limit, `Busy` when it is full."""

    def __init__(self, *, max_total_bytes: int = MAX_TOTAL_BYTES, max_waiters: int = MAX_WAITERS) -> None:
        self._values: dict[str, bytes] = {}
        self._waiters: dict[int, _Waiter] = {}
        self._waiting_for: dict[str, dict[int, None]] = {}
        self._total_bytes = 0
        self._max_total_bytes = max_total_bytes
        self._max_waiters = max_waiters

    def set(self, key: str, value: bytes) -> list[int]:
        """Creates or replaces; returns the waiters that are ready now."""
        check_key(key)
        if len(value) > MAX_VALUE_BYTES:
            raise UsageError(f"store value of {key!r} has {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed")
        old = self._values.get(key)
        grown = self._total_bytes + _cost(key, value) - (0 if old is None else _cost(key, old))
        if grown > self._max_total_bytes:
            raise Busy(f"the store is full ({self._max_total_bytes} bytes); delete old keys before setting {key!r}")
        self._total_bytes = grown
        self._values[key] = value
        return [] if old is not None else self._wake(key)

    def set_if_missing(self, key: str, value: bytes) -> tuple[bytes, list[int]]:
        """What the key holds now, which is `value` only if there was nothing before; the waiters that are ready now."""
        old = self.get(key)
        return (value, self.set(key, value)) if old is None else (old, [])

    def get(self, key: str) -> bytes | None:
        check_key(key)
        return self._values.get(key)

    def get_first(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of the first of `keys`: one at least, and as many as `MAX_LISTING_BYTES` hold."""
        found: list[bytes | None] = []
        size = 0
        for key in keys:
            value = self.get(key)
            size += ENTRY_OVERHEAD_BYTES + len(value or b"")
            if found and size > MAX_LISTING_BYTES:
                break
            found.append(value)
        return found

    def add(self, key: str, amount: int) -> tuple[int, list[int]]:
        """The counter's new value (a missing key counts from 0) and the waiters that are ready now."""
        old = self.get(key)
        try:
            total = (0 if old is None else int(old)) + amount
        except ValueError:
            raise UsageError(f"store key {key!r} does not hold a number, so nothing can be added to it") from None
        if not -(1 << 63) <= total < 1 << 63:
            raise UsageError(f"adding {amount} to store key {key!r} overflows 64 bits")
        return total, self.set(key, b"%d" % total)

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that do not exist, in their order."""
        return [key for key in keys if self.get(key) is None]

    def wait(self, waiter: int, keys: list[str]) -> bool:
        """True if all of `keys` exist now. Otherwise `waiter` is noted until they do, or until `forget(waiter)`."""
        if len(keys) > MAX_KEYS_PER_WAIT:
            raise UsageError(f"waiting for {len(keys)} keys at once, at most {MAX_KEYS_PER_WAIT} are allowed")
        missing = dict.fromkeys(self.missing(keys))
        if not missing:
            return True
        if len(self._waiters) >= self._max_waiters:
            raise Busy(f"{self._max_waiters} callers wait for store keys already")
        self._waiters[waiter] = _Waiter(missing)
        for key in missing:
            self._waiting_for.setdefault(key, {})[waiter] = None
        return False

    def forget(self, waiter: int) -> None:
        """No effect when the waiter is not (or no longer) waiting."""
        noted = self._waiters.pop(waiter, None)
        for key in noted.missing if noted else ():
            waiting = self._waiting_for[key]
            del waiting[waiter]
            if not waiting:
                del self._waiting_for[key]

    def keys(self, prefix: str) -> list[str]:
        """Sorted. Raises `UsageError` when the answer would be longer than `MAX_LISTING_BYTES`."""
        found = sorted(key for key in self._values if key.startswith(prefix))
        if sum(len(key.encode()) + 8 for key in found) > MAX_LISTING_BYTES:
            raise UsageError(f"{len(found)} store keys begin with {prefix!r}, too many to list; use a longer prefix")
        return found

    def delete_prefix(self, prefix: str) -> int:
        """How many keys were deleted."""
        found = [key for key in self._values if key.startswith(prefix)]
        for key in found:
            self._total_bytes -= _cost(key, self._values.pop(key))
        return len(found)

    def _wake(self, key: str) -> list[int]:
        ready = []
        for number in self._waiting_for.pop(key, {}):
            waiter = self._waiters[number]
            del waiter.missing[key]
            if not waiter.missing:
                del self._waiters[number]
                ready.append(number)
        return ready


def check_key(key: str) -> None:
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise UsageError(f"store key {key[:40]!r} must have 1 to {MAX_KEY_BYTES} bytes")


def _cost(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + ENTRY_OVERHEAD_BYTES
