"""Operations under way, as `torch.distributed` wants to see them, and how they end.

On a device `wait` makes the caller's stream wait for the result; all that is done with it before (copies to where it
belongs, the completion of a future) is given to the device aside, so that no other stream is held up.

`wait` waits in the calling thread. A future is made only for those who ask for one (DDP's reducer does): a `Completer`,
one thread for each process group, waits in their stead and completes it.

Three traps decide the form of this module. DDP's C++ reducer takes the value of a future as tensors, and
`Future.set_exception` stores the exception as the *value*: it would be read as a tensor (SIGSEGV). So errors pass
through `then`, whose C++ side turns a raising callback into a failed future. An error raised by the call that *starts*
an operation leaves DDP in a broken state; so an operation that could not be started is a work that has failed. And a
thread that is alive when the interpreter ends may abort the process, so threads are ended at exit.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from fireflyer.base.errors import PeerFailed, Timeout
from fireflyer.base.units import MS, format_duration
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent

__all__ = ["Completer", "GroupWork", "HfreduceError", "InFlightOperation", "Promise"]

_SLICE_NS: Final = 50 * MS
_SWEEP_NS: Final = 2 * MS
_MICROSECOND_NS: Final = 1000


class InFlightOperation(Protocol):
    """An operation of a communicator under way. One whose result is on a device has a `place`, its `CopyEngine`."""

    def wait(self, timeout_ns: int | None = None) -> None: ...

    def done(self) -> bool: ...


class HfreduceError(dist.DistBackendError):
    """A collective failed; the text says why and names the rank to blame, `rank` is its number in the group (or -1).

    A RuntimeError, since that is what users of torch.distributed expect. `__cause__` is our own error.
    """

    rank = -1

    @classmethod
    def of(cls, error: BaseException) -> HfreduceError:
        if isinstance(error, HfreduceError):
            return error
        new = cls(str(error))
        new.__cause__ = error
        if isinstance(error, PeerFailed):
            new.rank = error.rank
        return new


class GroupWork(dist.Work):
    """Operations that the user sees as one. `finish` runs once, when all have succeeded: it copies results to where
    they belong. `outputs` is what a future yields. With `error` it has failed already."""

    def __init__(
        self,
        completer: Completer,
        works: Sequence[InFlightOperation],
        outputs: Any,
        *,
        finish: Callable[[], None] | None = None,
        error: BaseException | None = None,
        ordered: bool = True,
        limit_ns: int | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self.ordered = ordered
        self._completer = completer
        self._works = works
        self._outputs = outputs
        self._finish = finish
        self._lock = threading.Lock()
        self._ended = False
        self._error = None if error is None else HfreduceError.of(error)
        self._limit_ns = limit_ns
        self._source = source
        self._place: CopyEngine | None = next(filter(None, (getattr(work, "place", None) for work in works)), None)
        self._point: CopyEvent | None = None
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises `HfreduceError`. A positive `timeout` that passes leaves the operation running."""
        given_ns = int(timeout / timedelta(microseconds=1)) * _MICROSECOND_NS
        limit_ns = given_ns if given_ns > 0 else self._limit_ns
        if not self.settle(limit_ns):
            waited = format_duration(limit_ns or 0)
            raise HfreduceError(f"the operation has not completed within {waited}; it is still pending")
        if self._error is not None:
            raise self._error
        if self._place is not None and self._point is not None:
            self._place.follow([self._point])
        return True

    def settle(self, limit_ns: int | None) -> bool:
        """Waits for the end, good or bad; False if it has not come within `limit_ns`."""
        with nullcontext() if self._place is None else self._place.aside():
            return self._settle(limit_ns)

    def _settle(self, limit_ns: int | None) -> bool:
        deadline_ns = None if limit_ns is None else time.monotonic_ns() + limit_ns
        try:
            for work in [] if self._ended else self._works:
                work.wait(None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns()))
        except Timeout:
            return False
        except Exception as error:  # of a device, too; it must reach those who wait, not end the completer's thread
            self._end(error)
        else:
            self._end(None)
        return True

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._ended:
                return
            if error is not None:
                self._error = HfreduceError.of(error)
            elif self._error is None and self._finish is not None:
                self._run_finish(self._finish)
            self._finish = None
            if self._place is not None:
                self._point = self._place.here()
            self._ended = True

    def _run_finish(self, finish: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                finish()
        except Exception as failure:  # it must reach those who wait, not end the completer's thread
            self._error = HfreduceError.of(failure)

    @property
    def error(self) -> HfreduceError | None:
        """What it failed with; None while it runs and after success."""
        return self._error

    def finished(self) -> bool:
        """Whether `settle` would return at once."""
        return self._ended or all(work.done() for work in self._works)

    def is_completed(self) -> bool:
        if not self.finished():
            return False
        self.settle(None)  # who sees this may read the result
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> HfreduceError | None:
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """The output tensors."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            promise = Promise([] if self._place is None else self._place.devices)
            self._future = promise.future
        self._completer.add(self, lambda: self._keep(promise))
        return self._future

    def _keep(self, promise: Promise) -> None:
        with nullcontext() if self._place is None else self._place.aside():
            promise.keep(self.error, self._outputs)

    def watch(self) -> None:
        """Sees to it that results are copied to where they belong though nobody should wait."""
        if self._finish is not None:
            self._completer.add(self, _nothing)


class Promise:
    """A `future` that may end in an error; see the module. `devices`: where its value may be, beside the CPU. Whoever
    waits for it there comes after what the thread that keeps it has given to them."""

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._first: torch.futures.Future[Any] = (
            torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()
        )
        self.future: torch.futures.Future[Any] = self._first.then(_unwrap)

    def keep(self, error: BaseException | None, value: Any) -> None:
        self._first.set_result((None if error is None else HfreduceError.of(error), value))


def _unwrap(done: torch.futures.Future[Any]) -> Any:
    error, outputs = done.value()
    if error is not None:
        raise error
    return outputs


def _nothing() -> None:
    pass


class Completer:
    """One thread that waits for works and then calls what was asked for. It starts with the first request.

    Ordered works end in the order of their start, so waiting for the first is enough; others are looked at in turns.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._requests: list[tuple[GroupWork, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None
        self._stopped = False
        _alive.add(self)

    def add(self, work: GroupWork, then: Callable[[], object]) -> None:
        """Calls `then` after the end of `work`: in this thread if it has ended, and never after `stop`."""
        if work.finished():
            work.settle(None)
            then()
            return
        with self._changed:
            if self._stopped:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._requests.append((work, then))
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread. What was not completed by then stays so."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._requests and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                requests = list(self._requests)
            mixed = any(not work.ordered for work, _ in requests)
            requests[0][0].settle(_SWEEP_NS if mixed else _SLICE_NS)
            self._complete([request for request in requests if request[0].finished()])

    def _complete(self, done: list[tuple[GroupWork, Callable[[], object]]]) -> None:
        for request in done:
            request[0].settle(None)
            request[1]()
        with self._changed:
            self._requests = [request for request in self._requests if request not in done]


_alive: weakref.WeakSet[Completer] = weakref.WeakSet()


def _stop_all() -> None:
    for completer in list(_alive):
        completer.stop()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_alive.clear)  # their threads do not exist there
