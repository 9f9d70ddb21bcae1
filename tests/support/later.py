"""A clock that a test plays: what waits for it is called when the test says so."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["FakeTimers"]


class FakeTimers:
    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._last = 0

    @property
    def delays_ns(self) -> list[int]:
        """Of those that wait."""
        return [delay_ns for delay_ns, _ in self._waiting.values()]

    def later(self, delay_ns: int, call: Callable[[], None]) -> Callable[[], None]:
        """As `fireflyer.fs.service.meta.group_commit.Later`."""
        self._last += 1
        number = self._last
        self._waiting[number] = (delay_ns, call)

        def call_off() -> None:
            self._waiting.pop(number, None)

        return call_off

    def fire(self) -> None:
        """All that wait now."""
        waiting, self._waiting = self._waiting, {}
        for _, call in waiting.values():
            call()
