"""An operation under way, the errors with which one ends, and what to do where there is no room for another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from fireflyer.base.errors import Aborted, Busy, DataCorruption, FireflyerError, PeerFailed, Timeout, UsageError
from fireflyer.base.units import MS, format_duration
from fireflyer.collectives.codes import FailureKind
from fireflyer.native import NativeWork

__all__ = ["ROOM_PAUSE_S", "Work", "when_there_is_room"]

ROOM_PAUSE_S: Final = 0.001
"""Until an operation is started again for which the communicator had no room: nobody tells when there is some."""
_SIGNAL_CHECK_NS: Final = 100 * MS
_T = TypeVar("_T")


def when_there_is_room(start: Callable[[], _T]) -> _T:
    """Starts the next operation of the group, in its turn, also where too many are pending.

    For callers who cannot leave it out when they are told `Busy`: others may have had room for it. What is pending
    ends, well or not, unless it is a message that the caller itself is to answer.
    """
    while True:
        try:
            return start()
        except Busy:
            time.sleep(ROOM_PAUSE_S)


class Work:
    """An operation, under way or done. Keeps its arrays alive."""

    def __init__(
        self,
        native: NativeWork | None,
        name: str,
        owner: object,
        failed: Callable[[tuple[int, int, int, str]], str] | None = None,
    ) -> None:
        """`native` None: it is done, and well. `failed` is told of a failure before it is raised, and says how far
        the operation came, if that is known."""
        self._native = native
        self._name = name
        self._owner = owner
        self._failed = failed

    def wait(self, timeout_ns: int | None = None) -> None:
        """Returns when the array holds the result. Raises what the operation failed with; `Timeout` when it is still
        running after `timeout_ns`: it goes on, and may be waited for again."""
        if self._native is None:
            return
        deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        while True:
            left_ns = _SIGNAL_CHECK_NS if deadline_ns is None else deadline_ns - time.monotonic_ns()
            if self._native.wait(max(0, min(left_ns, _SIGNAL_CHECK_NS))):
                break
            if left_ns <= 0:
                waited = format_duration(timeout_ns or 0)
                raise Timeout(f"{self._name} has not completed within {waited}; it is still pending")
        error = self.error()
        if error is not None:
            raise error

    @property
    def source(self) -> int:
        """Rank that sent, of a `recv` that is done; -1 for other operations."""
        return -1 if self._native is None else self._native.source()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._native is None or self._native.done()

    def error(self) -> FireflyerError | None:
        """Failure; None while it runs and after success."""
        if self._native is None:
            return None
        failure = self._native.failure()
        kind, culprit, _, text = failure
        if kind == FailureKind.NONE:
            return None
        if kind == FailureKind.MISMATCH:  # of this message alone
            return UsageError(text)
        came = self._failed(failure) if self._failed is not None else ""
        if came and kind != FailureKind.USAGE:  # calls that do not fit moved nothing
            text = f"{text}; {came}"
        message = f"{text}; this communicator cannot be used any more; create another, or call reform"
        if kind == FailureKind.USAGE:
            return UsageError(message)
        if kind == FailureKind.ABORTED:
            return Aborted(message)
        if kind == FailureKind.DATA_CORRUPTION:
            return DataCorruption(message)
        return PeerFailed(message, rank=culprit)
