"""A device without a GPU: memory of its own (any tensors), copied to and from by two threads that are in no hurry.

It is asynchronous as a GPU is: a copy is started and takes place later, in the order of its direction, after the points
that it was told to wait for. What a rank computes on the device is given to a `Stream`, a thread as well; the calling
thread has one, or none: then it follows points by waiting itself. `before(direction, number)` is called in the copying
thread before each copy; tests let it sleep, fail, or look.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch

from fireflyer.collectives.devices.copies import CopyEvent, HostMemory
from fireflyer.collectives.devices.pieces import Move

__all__ = ["Stream", "ThreadCopies", "ThreadPoint", "UnpinnedMemory"]

LIMIT_S = 60


class ThreadPoint:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        assert self.reached.wait(LIMIT_S), "a copy does not end"
        if self.error is not None:
            raise self.error


class UnpinnedMemory:
    def __init__(self, array: Any) -> None:
        self.tensor = torch.from_numpy(array)
        self.released = False

    def release(self) -> None:
        self.released = True


class Stream:
    """Does what it is given, in that order, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], ThreadPoint] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, action: Callable[[], None]) -> ThreadPoint:
        point = ThreadPoint()
        self._queue.put((action, point))
        return point

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            action, point = task
            try:
                action()
            except BaseException as error:
                point.error = error
            point.reached.set()


class ThreadCopies:
    """`made` lists what was copied: (direction, number, first byte of the slot's memory, bytes)."""

    def __init__(
        self, _device: object = None, *, before: Callable[[str, int], None] = lambda direction, number: None
    ) -> None:
        self.devices: list[Any] = []
        self.pinned: list[UnpinnedMemory] = []
        self.made: list[tuple[str, int]] = []
        self.under_way = 0
        self._before = before
        self._lock = threading.Lock()
        self._streams = {direction: Stream(f"copies {direction}") for direction in ("down", "up")}
        self._numbers = {"down": 0, "up": 0}
        self._current = threading.local()

    # --- Copies ---

    def here(self) -> CopyEvent:
        stream: Stream | None = getattr(self._current, "stream", None)
        if stream is not None:
            return stream.give(lambda: None)
        point = ThreadPoint()
        point.reached.set()
        return point

    def follow(self, points: Sequence[CopyEvent]) -> None:
        stream: Stream | None = getattr(self._current, "stream", None)
        for point in points:
            if stream is None:
                point.wait()
            else:
                stream.give(point.wait)

    def device_to_host(self, array: Any, slot: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy("down", [(slot[to : to + size], array[at : at + size]) for at, to, size in moves], after)

    def host_to_device(self, slot: Any, array: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy("up", [(array[to : to + size], slot[at : at + size]) for to, at, size in moves], after)

    def fetch(self, array: Any, slot: Any, moves: Sequence[Move]) -> CopyEvent:
        copied = self.device_to_host(array, slot, moves, [self.here()])
        copied.wait()
        return copied

    def put(self, slot: Any, array: Any, moves: Sequence[Move]) -> CopyEvent:
        copied = self.host_to_device(slot, array, moves, [self.here()])
        self.follow([copied])
        return copied

    def tensors_to_host(self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy("down", list(zip(targets, sources, strict=True)), after)

    def tensors_to_device(
        self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]
    ) -> CopyEvent:
        return self._copy("up", list(zip(targets, sources, strict=True)), after)

    def aside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def guard(self, tensors: Sequence[Any]) -> None:
        pass

    def pin(self, array: Any) -> HostMemory:
        self.pinned.append(UnpinnedMemory(array))
        return self.pinned[-1]

    # --- for tests ---

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """What the calling thread gives to the device inside goes to `stream`."""
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = None

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def _copy(self, direction: str, pairs: Sequence[tuple[Any, Any]], after: Sequence[CopyEvent]) -> CopyEvent:
        with self._lock:
            number = self._numbers[direction]
            self._numbers[direction] += 1
            self.under_way += 1
        waits = list(after)
        return self._streams[direction].give(lambda: self._take_place(direction, number, pairs, waits))

    def _take_place(
        self, direction: str, number: int, pairs: Sequence[tuple[Any, Any]], after: Sequence[CopyEvent]
    ) -> None:
        try:
            for point in after:
                point.wait()
            self._before(direction, number)
            for target, source in pairs:
                half = len(target) // 2 if target.ndim else 0  # as a copy that is seen half done
                with torch.inference_mode(target.is_inference()), torch.no_grad():
                    if not target.ndim:
                        target.copy_(source)
                        continue
                    target[:half].copy_(source[:half])
                    time.sleep(0)
                    target[half:].copy_(source[half:])
            self.made.append((direction, number))
        finally:
            with self._lock:
                self.under_way -= 1
