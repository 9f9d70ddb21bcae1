"""Operations under way, as `torch.distributed` wants to see them, and how they end.

On a device `wait` makes the caller's stream wait for the result; all that is done with it before (copies to where it
belongs, the completion of a future) is given to the device aside, so that no other stream is held up.

`wait` waits in the calling thread. A future is made only for those who ask for one (DDP's reducer does): a `Completer`
waits in their stead and completes it.

Three traps decide the form of this module. DDP's C++ reducer takes the value of a future as tensors, and
`Future.set_exception` stores the exception as the *value*: it would be read as a tensor (SIGSEGV). So errors pass
through `then`, whose C++ side turns a raising callback into a failed future. An error raised by the call that *starts*
an operation leaves DDP in a broken state; so an operation that could not be started is a work that has failed. And an
object that C++ holds has no Python methods any more when Python has dropped it: it waits for ever (see `KEPT_WORKS` in
`torch_group`).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import CodeType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from fireflyer.base.errors import PeerFailed, Timeout
from fireflyer.base.units import format_duration
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent
from fireflyer.collectives.torch.completer import Completer, level_of_new_works
from fireflyer.collectives.torch.methods import not_traced

__all__ = ["GroupWork", "HfreduceError", "InFlightOperation", "Promise"]

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


@not_traced
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
        self.level = level_of_new_works()
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
        """Waits for the end, good or bad; False if it has not come within `limit_ns`. Raises nothing: an error that is
        not kept would end the completer's thread, and who waits for a future would wait for ever."""
        if self._ended:
            return True
        try:
            with nullcontext() if self._place is None else self._place.aside():
                return self._settle(limit_ns)
        except Exception as error:  # of a device
            self._end(error)
            return True

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
            if self._place is not None and error is None:
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
        """Who sent what was received; known when it is done."""
        return int(getattr(self._works[0], "source", -1)) if self._source < 0 and self._works else self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        asked_by = _asking_code()
        if self._is_half() and asked_by is None:
            return self._typed_future()
        if asked_by is not None and self._completer.runs_inline(asked_by):
            self.settle(self._limit_ns)
        with self._lock:
            if self._future is not None:
                return self._future
            promise = Promise([] if self._place is None else self._place.devices)
            self._future = promise.future
        self._completer.add(self, lambda: self._keep(promise))
        return self._future

    def _keep(self, promise: Promise) -> None:
        try:
            with nullcontext() if self._place is None else self._place.aside():
                promise.keep(self.error, self._outputs)
        except Exception as failure:  # of a device; DDP waits without limit for a future that nobody completes
            promise.keep(failure, None)

    def _typed_future(self) -> torch.futures.Future[Any]:
        """For torch's C++ hook FP16_COMPRESS, which takes a future whose value C++ knows as a list of tensors.

        A future that Python completes has an object of Python as its value; only what `fork` runs gets a type, and it
        runs at once. So this waits for the end: the buckets of that hook are summed one after the other.
        """
        self.settle(self._limit_ns)
        if self._error is not None:
            promise = Promise()
            promise.keep(self._error, None)
            return promise.future
        fork: Callable[[Callable[[], Any]], torch.futures.Future[Any]] = torch.jit.fork
        return fork(lambda: self._outputs)

    def _is_half(self) -> bool:
        match self._outputs:
            case [torch.Tensor(dtype=torch.float16)]:
                return True
        return False

    def give_up(self) -> None:
        """Ends it with an error if it has not ended: nothing will complete it any more."""
        if self.finished():
            self.settle(None)
        else:
            self._end(HfreduceError("its process group was destroyed before the operation completed"))

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
        # Methods written in C, so that an error has no Python frame: C++ would add a list of frames to its text.
        self.future: torch.futures.Future[Any] = self._first.then(torch._C.Future.value)  # noqa: SLF001

    def keep(self, error: BaseException | None, value: Any) -> None:
        if error is not None:
            failure = HfreduceError.of(error)
            self._first._set_unwrap_func(partial(_raise, type(failure), failure))  # noqa: SLF001
        self._first.set_result(value)


_raise: Final = ctypes.pythonapi.PyErr_SetObject
"""Raises the second argument, whose class is the first. C ignores the third, which is what the future holds."""
_raise.argtypes = [ctypes.py_object] * 3
_raise.restype = None


def _nothing() -> None:
    pass


def _asking_code() -> CodeType | None:
    """Of the caller of the caller, where that is a Python function that names `get_future`; None: it is C++."""
    try:
        code = sys._getframe(2).f_code  # noqa: SLF001 - the only way to a frame
    except ValueError:  # there is no Python frame in this thread
        return None
    return code if "get_future" in code.co_names else None
