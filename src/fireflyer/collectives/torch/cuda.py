"""CUDA devices as the device pipeline sees them (`copies`): three side streams, and pinned memory of the arena.

Copies are `cudaMemcpyAsync` between contiguous bytes and pinned memory, which the copy engines do: there is no kernel
here. One stream copies to the host, one to the device, so both directions of the bus are used at once; the third,
`aside`, is where results are arranged when they do not lie in one piece, and where futures are completed.

Nothing here touches CUDA before the first tensor on a device is passed.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from fireflyer.base.units import US
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.collectives.devices.pieces import Move

__all__ = ["DEVICES", "CudaCopyEngine", "CudaCopyEvent", "PinnedMemory", "TimedCopy", "on_device"]

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of the process
_SPIN_NS: Final = 50 * US
"""A thread that waits for a short copy looks for so long before it sleeps: to be woken takes as long again."""


class CudaCopyEvent:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False) -> None:
        # `blocking`: a host thread that waits sleeps instead of polling
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]  # torch lacks annotations
        self.event.record(stream)

    def wait(self) -> None:
        # In the thread of another device CUDA would make a context on that one, which takes half a GiB of it.
        with torch.cuda.device(self.event.device):
            self.event.synchronize()

    def spin(self, limit_ns: int) -> None:
        """As `wait`, after it has polled for `limit_ns`."""
        end_ns = time.monotonic_ns() + limit_ns
        while not self.event.query():  # type: ignore[no-untyped-call]  # torch lacks annotations
            if time.monotonic_ns() >= end_ns:
                self.wait()
                return


class TimedCopy:
    """What a benchmark wants to know of a copy."""

    def __init__(self, direction: str, size_bytes: int, begun: CudaCopyEvent, ended: CudaCopyEvent) -> None:
        self.direction = direction
        self.size_bytes = size_bytes
        self.begun = begun
        self.ended = ended


class PinnedMemory:
    """A NumPy array of uint8 that CUDA copies from and to directly. Kept until `release`, or as long as this lives.

    Where CUDA may not pin it (a limit of the container), copies work, but one after the other: a warning says so.
    """

    def __init__(self, array: Any) -> None:
        self.tensor = torch.from_numpy(array)
        address, size_bytes = int(array.ctypes.data), int(array.nbytes)
        result = int(_runtime().cudaHostRegister(address, size_bytes, _PORTABLE))
        self.pinned = result == 0
        if not self.pinned:
            text = f"CUDA did not pin {size_bytes} bytes (error {result}), so copies will not run beside anything else"
            warnings.warn(f"{text}; raise the limit on locked memory (ulimit -l)", RuntimeWarning, stacklevel=2)
        # the array is an argument so that its memory does not go back to the arena while it is pinned
        self._finalizer = weakref.finalize(self, _unpin, address, array, self.pinned)
        self._finalizer.atexit = False  # the process takes its pins with it

    def release(self) -> None:
        self._finalizer()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch lacks annotations


def _unpin(address: int, _array: object, pinned: bool) -> None:
    if pinned:
        _runtime().cudaHostUnregister(address)


class CudaCopyEngine:
    """Of one device. With `timed` every copy is kept in `copies_made`, with events that can be compared."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        index: int | None = device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.devices = [self.device]
        self.copies_made: list[TimedCopy] = []
        self._timed = timed
        self._to_host = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch lacks annotations
        self._to_device = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch lacks annotations
        self._aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch lacks annotations

    def here(self) -> CopyEvent:
        return self._point(torch.cuda.current_stream(self.device))

    def follow(self, points: Sequence[CopyEvent]) -> None:
        _wait_for(torch.cuda.current_stream(self.device), points)

    def device_to_host(self, array: Any, slot: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        with torch.cuda.stream(self._to_host), torch.inference_mode(array.is_inference()):
            _wait_for(self._to_host, after)
            begun = self._point(self._to_host) if self._timed else None
            for at, to, size in moves:
                slot[to : to + size].copy_(array[at : at + size], non_blocking=True)
            return self._ended("down", self._to_host, moves, begun)

    def host_to_device(self, slot: Any, array: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        with torch.cuda.stream(self._to_device), torch.inference_mode(array.is_inference()):
            _wait_for(self._to_device, after)
            begun = self._point(self._to_device) if self._timed else None
            for to, at, size in moves:
                array[to : to + size].copy_(slot[at : at + size], non_blocking=True)
            return self._ended("up", self._to_device, moves, begun)

    def fetch(self, array: Any, slot: Any, moves: Sequence[Move]) -> CopyEvent:
        for at, to, size in moves:
            slot[to : to + size].copy_(array[at : at + size], non_blocking=True)
        copied = self._point(torch.cuda.current_stream(self.device))
        copied.spin(_SPIN_NS)
        return copied

    def put(self, slot: Any, array: Any, moves: Sequence[Move]) -> CopyEvent:
        stream = torch.cuda.current_stream(self.device)
        array.record_stream(stream)
        with torch.inference_mode(array.is_inference()):
            for to, at, size in moves:
                array[to : to + size].copy_(slot[at : at + size], non_blocking=True)
        return self._point(stream)

    def tensors_to_host(self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]) -> CopyEvent:
        return self._copy_tensors(self._to_host, sources, targets, sources, after)

    def tensors_to_device(
        self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]
    ) -> CopyEvent:
        return self._copy_tensors(self._to_device, sources, targets, targets, after)

    def _copy_tensors(
        self,
        stream: torch.cuda.Stream,
        sources: Sequence[Any],
        targets: Sequence[Any],
        guarded: Sequence[Any],
        after: Sequence[CopyEvent],
    ) -> CopyEvent:
        inference = any(target.is_inference() for target in targets)
        with torch.cuda.stream(stream), torch.inference_mode(inference), torch.no_grad():  # no_grad last: it is undone
            _wait_for(stream, after)
            try:
                for tensor in guarded:
                    tensor.record_stream(stream)
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
            except BaseException:
                stream.synchronize()
                raise
            return self._point(stream)

    def aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._aside)

    def guard(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            for stream in (self._to_host, self._to_device, self._aside):
                tensor.record_stream(stream)

    def pin(self, array: Any) -> HostMemory:
        with torch.cuda.device(self.device):
            return PinnedMemory(array)

    def _point(self, stream: torch.cuda.Stream) -> CudaCopyEvent:
        return CudaCopyEvent(stream, timed=self._timed)  # on the device of the stream, whichever is current

    def _ended(
        self, direction: str, stream: torch.cuda.Stream, moves: Sequence[Move], begun: CudaCopyEvent | None
    ) -> CudaCopyEvent:
        ended = self._point(stream)
        if begun is not None:
            self.copies_made.append(TimedCopy(direction, sum(move.size for move in moves), begun, ended))
        return ended


def _wait_for(stream: torch.cuda.Stream, points: Sequence[CopyEvent]) -> None:
    for point in points:
        if isinstance(point, CudaCopyEvent):
            stream.wait_event(point.event)
        else:
            point.wait()  # of a device of another kind


DEVICES: Final[dict[str, Callable[[torch.device], CopyEngine]]] = {"cuda": CudaCopyEngine}
"""How to copy from and to a type of device."""


def on_device(array: Any) -> bool:
    """Whether `array` is a tensor on a device of `DEVICES`."""
    return isinstance(array, torch.Tensor) and array.device.type in DEVICES
