"""What the pipeline needs of a device: copies between its memory and the host's that run beside everything else.

Copies to the host run one after the other, and so do copies to the device; nothing else is said about when they run.
Order between them, and with what the device computes, is made of *points*: a point is reached when the copy (or
everything that the caller has given to the device so far) has ended. The device lets a copy wait for points without
the host waiting.

`torch.cuda.CudaCopyEngine` is a GPU. The tests have another device, whose copies are made by threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fireflyer.collectives.devices.pieces import Move

__all__ = ["CopyEngine", "CopyEvent", "HostMemory"]


class CopyEvent(Protocol):
    def wait(self) -> None:
        """Blocks the calling thread until the point is reached, without using a processor."""


class HostMemory(Protocol):
    """Bytes of host memory that the device copies from and to without a detour (pinned)."""

    @property
    def tensor(self) -> Any:
        """Flat, of uint8."""

    def release(self) -> None:
        """Every copy must have ended. May be called again."""


class CopyEngine(Protocol):
    """Of one device. Tensors are flat, contiguous, of uint8. Methods may be called by any thread."""

    @property
    def devices(self) -> Sequence[Any]:
        """For `torch.futures.Future`: where results are, if torch itself keeps the order there."""

    def here(self) -> CopyEvent:
        """Reached when the device has done what the calling thread gave it up to now (its current stream)."""

    def follow(self, points: Sequence[CopyEvent]) -> None:
        """What the calling thread gives to the device from now on starts after these points."""

    def device_to_host(self, array: Any, slot: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        """Starts copying from `array` on the device to `slot` on the host, after `after`."""

    def host_to_device(self, slot: Any, array: Any, moves: Sequence[Move], after: Sequence[CopyEvent]) -> CopyEvent:
        """Starts copying from the host to the device."""

    def fetch(self, array: Any, slot: Any, moves: Sequence[Move]) -> CopyEvent:
        """Copies from `array` on the device to `slot` on the host, in the order of what the calling thread gives to the
        device. Returns when the copies have ended: the event is reached."""

    def put(self, slot: Any, array: Any, moves: Sequence[Move]) -> CopyEvent:
        """Starts copying from the host to the device, in the order of what the calling thread gives to the device."""

    def tensors_to_host(self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]) -> CopyEvent:
        """Starts copying tensors of any shape and layout to others of their shapes and types on the host, contiguous
        and in memory of `pin`, after `after`. The memory of the sources is not given to others before they are copied.
        If it raises, copies that it has started have ended."""

    def tensors_to_device(
        self, sources: Sequence[Any], targets: Sequence[Any], after: Sequence[CopyEvent]
    ) -> CopyEvent:
        """The other direction, with the same promises for the targets, which are contiguous too."""

    def aside(self) -> AbstractContextManager[object]:
        """Inside, what the calling thread gives to the device runs beside what it gave before and gives later."""

    def guard(self, tensors: Sequence[Any]) -> None:
        """The memory of these tensors is not given to others before what was started `aside` and until now is done."""

    def pin(self, array: Any) -> HostMemory:
        """Makes a NumPy array of uint8 memory for fast copies."""
