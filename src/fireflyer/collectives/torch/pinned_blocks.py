"""Pinned host memory for tensors that are copied as a whole, before an operation and after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from fireflyer.base.errors import FireflyerError, Timeout, UsageError
from fireflyer.base.units import KIB, MIB
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.collectives.devices.engine import Host, InFlightOperation
from fireflyer.collectives.devices.pieces import Move

__all__ = ["MAX_KEPT_BYTES", "Block", "Blocks", "WholeWork", "all_of", "bytes_in", "bytes_of", "end_of"]

MAX_KEPT_BYTES: Final = 256 * MIB
"""Pinned memory that is kept for whole copies; what goes beyond is pinned for one operation."""
SMALLEST_BLOCK_BYTES: Final = 64 * KIB


class Block:
    """Host memory for a whole array; `capacity` bytes, of which the first are in use."""

    def __init__(self, memory: HostMemory, whole: Any, capacity: int) -> None:
        self.memory = memory
        self.whole = whole
        self.capacity = capacity
        self.size = capacity
        self.busy: CopyEvent | None = None

    @property
    def array(self) -> Any:
        return self.whole[: self.size]

    @property
    def tensor(self) -> Any:
        return self.memory.tensor[: self.size]


class Blocks:
    """Pinned blocks of powers of two, kept for the next operation."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._free: list[Block] = []

    def take(self, size_bytes: int, place: CopyEngine) -> Block:
        capacity = max(SMALLEST_BLOCK_BYTES, 1 << max(0, size_bytes - 1).bit_length())
        with self._lock:
            found = next((block for block in self._free if block.capacity == capacity), None)
            if found is not None:
                self._free.remove(found)
        if found is None:
            array = self._host.empty(capacity, "u8")
            found = Block(place.pin(array), array, capacity)
        if found.busy is not None:
            found.busy.wait()
        found.size, found.busy = size_bytes, None
        return found

    def give(self, block: Block, busy: CopyEvent | None) -> None:
        """`busy`: the last copy from it."""
        block.busy = busy
        with self._lock:
            kept = sum(other.capacity for other in self._free)
            if kept + block.capacity <= MAX_KEPT_BYTES:
                self._free.append(block)
                return
        if busy is not None:
            busy.wait()
        block.memory.release()

    def clear(self) -> None:
        with self._lock:
            blocks, self._free = self._free, []
        for block in blocks:
            if block.busy is not None:
                block.busy.wait()
            block.memory.release()


class WholeWork:
    """Operations on blocks; who waits first starts the copies to the device."""

    def __init__(
        self,
        running: Sequence[InFlightOperation],
        place: CopyEngine,
        blocks: Blocks,
        source_block: Block | None,
        target_block: Block | None,
        target: torch.Tensor | None,
        moves: Sequence[Move],
        called: CopyEvent,
    ) -> None:
        """`moves`: from `target_block` to `target`, when all of `running` are done."""
        self.place = place
        self._moves = moves
        self._running = running
        self._blocks = blocks
        self._source_block = source_block
        self._target_block = target_block
        self._target = target
        self._point = called
        self._lock = threading.Lock()
        self._finished = False

    def wait(self, timeout_ns: int | None = None) -> None:
        """As `DeviceWork.wait`."""
        deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        try:
            for running in self._running:
                running.wait(None if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns()))
        except Timeout:
            raise  # it goes on
        except FireflyerError:
            end_of(self._running)
            with self._lock:
                self._give_back(None)
            raise
        with self._lock:
            if not self._finished:
                self._finish()
                return
        self.place.follow([self._point])  # another thread has started the copies

    @property
    def source(self) -> int:
        """As `Work.source`."""
        return int(getattr(self._running[0], "source", -1))

    def _finish(self) -> None:
        if self._target_block is not None and self._target is not None:
            self.place.follow([self._point])
            # in the order of what the calling thread gives to the device, which thus sees the result
            self._point = self.place.put(self._target_block.tensor, bytes_of(self._target), self._moves)
        self._give_back(self._point)
        self._finished = True

    def _give_back(self, busy: CopyEvent | None) -> None:
        if self._source_block is not None:
            self._blocks.give(self._source_block, None)
        if self._target_block is not None:
            self._blocks.give(self._target_block, busy)
        self._source_block = self._target_block = self._target = None

    def done(self) -> bool:
        return all(running.done() for running in self._running)


def end_of(running: Sequence[InFlightOperation]) -> None:
    """Returns when all have ended, well or not: then their memory is free."""
    for one in running:
        with suppress(FireflyerError):
            one.wait()


def bytes_of(tensor: Any) -> Any:
    """The bytes of a tensor as a flat one. Raises `UsageError` if it has gaps."""
    if not tensor.is_contiguous():
        raise UsageError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


def bytes_in(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def all_of(tensor: Any) -> tuple[Move, ...]:
    size = bytes_in(tensor)
    return (Move(0, 0, size),) if size else ()
