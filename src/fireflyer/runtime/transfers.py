"""Reads and writes in flight: blocking calls of one file in a few threads of its own.

The threads are daemons and know nothing but their queue: a process may end while a disk hangs, and a file that nobody
refers to any more is closed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from fireflyer.base.ports import Transfer

__all__ = ["MAX_THREADS", "TransferThreads"]

MAX_THREADS: Final = 4
"""Of one file. More calls wait until a thread is free."""


class _Call(Transfer):
    def __init__(self, operation: Callable[[], int]) -> None:
        self._operation: Callable[[], int] | None = operation
        self._done = threading.Event()
        self._result = 0
        self._error: BaseException | None = None

    def perform(self) -> None:
        operation, self._operation = self._operation, None
        try:
            if operation is not None:
                self._result = operation()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> int:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.perform()
        del call  # its memory may be given back now, not when the next call comes


class TransferThreads:
    """Not to be used by two threads at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, operation: Callable[[], int]) -> Transfer:
        """Calls begin in the order in which they are started."""
        call = _Call(operation)
        if len(self._threads) < MAX_THREADS:
            thread = threading.Thread(target=_work, args=(self._calls,), name=self._name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Returns when everything that was started has ended."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._calls.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # a file that is collected in the last call's thread
                thread.join()
