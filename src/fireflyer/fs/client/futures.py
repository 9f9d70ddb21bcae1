"""Something that was begun and will end: the same for coroutines of an event loop and for threads that block.

The logic of files (`client.files.open_file`, `client.files.asyncio_files`) is coroutines that await nothing but
futures. How one waits for one is the business of who drives them: in an event loop a future, in a thread a turn of
the ring. Between two futures a coroutine is alone: nothing else of the same client runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["ClientFuture", "WaitFor"]

T = TypeVar("T")
WaitFor: TypeAlias = "Callable[[ClientFuture[Any]], Generator[Any, None, None]]"
"""Ends when the future has."""


class ClientFuture(Generic[T]):
    """Awaited by any number, any time: each gets the result, or its error."""

    __slots__ = ("_error", "_give_up", "_then", "_value", "_waits", "done", "remote")

    def __init__(self, waits: WaitFor) -> None:
        self.done = False
        self.remote = False
        """It is ended by another thread's work."""
        self._waits = waits
        self._value: Any = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        self._give_up: Callable[[], None] | None = None

    @property
    def value(self) -> T:
        """Of one that has ended without an error."""
        value: T = self._value
        return value

    @property
    def error(self) -> BaseException | None:
        return self._error

    def finish(self, value: T) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def then(self, call: Callable[[], None]) -> None:
        """When it has ended; at once if it has."""
        if self.done:
            call()
        else:
            self._then.append(call)

    def on_give_up(self, call: Callable[[], None]) -> None:
        self._give_up = call

    def give_up(self) -> None:
        """Nobody waits for it any more; its memory is not touched any more."""
        if not self.done and self._give_up is not None:
            self._give_up()

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self.done:
            return
        self.done, self._value, self._error = True, value, error
        then, self._then = self._then, []
        for call in then:
            call()

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            yield from self._waits(self)
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value
