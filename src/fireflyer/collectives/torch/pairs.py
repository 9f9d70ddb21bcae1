"""Allreduce of GPUs that are bridged in pairs (NVLink): they add up between themselves, and each moves half.

    1. Each of a pair shows the other the half that is not its own; each adds the other's to its own (a GPU kernel, the
       only one in all of this): its half is now the sum of two.
    2. Each sums its half with those of the same position in all other pairs through host memory, as any tensor on a
       device: over a communicator of their own, the *lane*. So half as many bytes go down, are added, and come up.
    3. Each shows the other its finished half.

What is shown is copied into an *outbox*, memory of the device that the partner has mapped (CUDA IPC): nobody ever
reaches into tensors of another process, so one that dies or is late harms nothing. An outbox has two places for each
direction, used in turn; a barrier of the pair says "mine is shown, and I have read what you showed before". Arrays go
through in pieces of the size of two places. Steps 1 and 3 have a thread each, so pieces are in all three steps at once.

A sum in float16 or bfloat16 is rounded twice here: in the pair, and in the lane. float8 has no sums on GPUs and goes
the ordinary way, as all other operations do.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import torch

from fireflyer.base.errors import PeerFailed, UsageError
from fireflyer.base.units import MIB
from fireflyer.collectives.communicator import Communicator
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent
from fireflyer.collectives.devices.engine import DeviceWork, InFlightOperation, Outcome

__all__ = ["OUTBOX_BYTES", "Half", "IpcBuffers", "PairGroups", "PairedSums", "halves"]

OUTBOX_BYTES: Final = 16 * MIB
"""Of one place."""
PAIRED: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
)


_INTEGER_OPS: Final = ("sum", "min", "max", "product")
_PAIRED_OPS: Final = (*_INTEGER_OPS, "mean")


class Half(NamedTuple):
    """Elements of one piece: this rank's are [`begin`, `end`), the partner's [`other_begin`, `other_end`)."""

    begin: int
    end: int
    other_begin: int
    other_end: int


def halves(elements: int, place_elements: int, *, first: bool) -> list[Half]:
    """How an array is cut; the two of a pair see the same pieces from two sides. At least one, also of nothing."""
    found = []
    for start in range(0, elements, 2 * place_elements) if elements else (0,):
        stop = min(elements, start + 2 * place_elements)
        middle = start + (stop - start + 1) // 2
        lower, upper = (start, middle), (middle, stop)
        found.append(Half(*lower, *upper) if first else Half(*upper, *lower))
    return found


class IpcBuffers(NamedTuple):
    """Flat tensors of uint8 on the device, of four places each: two for showing inputs, two for results."""

    own: torch.Tensor
    partners: torch.Tensor

    def place(self, step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.own.numel() // 4
        at = (2 * step + number % 2) * size
        return self.own[at : at + size], self.partners[at : at + size]


class PairGroups(NamedTuple):
    """The communicators of a rank with a partner, and which ranks of the world are in them."""

    lane: Any
    """A `DeviceCommunicator` of the ranks in the same position of all pairs."""
    lane_ranks: tuple[int, ...]
    before: Communicator
    """Of the pair, for step 1."""
    after: Communicator
    """Of the pair, for step 3."""
    pair: tuple[int, int]


class _Sum(Outcome):
    def __init__(self, place: CopyEngine, flat: torch.Tensor, op: str, pieces: list[Half]) -> None:
        super().__init__("allreduce of pairs", place)
        self.flat: torch.Tensor | None = flat
        self.op = op
        self.pieces = pieces

    def cut(self, half: Half) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of a piece, and the partner's."""
        assert self.flat is not None  # noqa: S101 - it is there until the job has ended
        return self.flat[half.begin : half.end], self.flat[half.other_begin : half.other_end]


class _Piece(NamedTuple):
    job: _Sum
    half: Half
    last: bool
    running: InFlightOperation | None


class PairedSums:
    """Of one rank. `places`: three `CopyEngine` of its device, one for callers, one for each thread."""

    def __init__(
        self,
        circle: PairGroups,
        outboxes: IpcBuffers,
        places: tuple[CopyEngine, CopyEngine, CopyEngine],
        *,
        first: bool,
    ) -> None:
        """Takes over the communicators. `first`: this rank is the first of its pair."""
        self._circle = circle
        self._outboxes = outboxes
        self._place, self._place_before, self._place_after = places
        self._first = first
        self._numbers = [0, 0]
        self._read: list[CopyEvent | None] = [None, None]
        self._jobs: SimpleQueue[_Sum | None] = SimpleQueue()
        self._shown: SimpleQueue[_Piece | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"{name} of pair {circle.pair}", daemon=True)
            for run, name in ((self._reduce_all, "sums"), (self._return_all, "results"))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._end)

    def takes(self, tensor: torch.Tensor, op: str) -> bool:
        """Whether a tensor goes this way; the same on all ranks. Bits are not combined in two steps, and a mean of
        integers, whose remainder is lost, must not be."""
        return tensor.dtype in PAIRED and (op in _PAIRED_OPS if tensor.dtype.is_floating_point else op in _INTEGER_OPS)

    def allreduce(self, tensor: torch.Tensor, *, op: str, async_op: bool) -> DeviceWork:
        """In place. `tensor` is contiguous."""
        if self._closed:
            raise UsageError("the communicator is closed; create a new one")
        flat = tensor.detach().reshape(-1)
        for place in (self._place, self._place_before, self._place_after):
            place.guard([flat])
        pieces = halves(flat.numel(), self._outboxes.own.numel() // 4 // flat.element_size(), first=self._first)
        job = _Sum(self._place, flat, op, pieces)
        self._jobs.put(job)
        work = DeviceWork(job)
        if not async_op:
            work.wait()
        return work

    def abort(self, reason: str) -> None:
        for communicator in (self._circle.lane, self._circle.before, self._circle.after):
            communicator.abort(reason)

    def close(self) -> None:
        """Finishes what is pending, and closes the communicators. May be called again."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._end)
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for point in self._read:
            if point is not None:
                point.wait()
        for communicator in (self._circle.lane, self._circle.before, self._circle.after):
            communicator.close()

    def abandon(self) -> None:
        """In the child of a fork, where the threads do not exist."""
        self._closed = True
        atexit.unregister(self._end)

    def _end(self) -> None:
        """The interpreter ends; nobody waits for pending sums any more."""
        self.abort("the process ends")
        self.close()

    # --- the threads ---

    def _reduce_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            for number, half in enumerate(job.pieces):
                running = self._attempt(job, partial(self._reduce, job, half))
                self._shown.put(_Piece(job, half, number == len(job.pieces) - 1, running))
        self._shown.put(None)

    def _return_all(self) -> None:
        while (piece := self._shown.get()) is not None:
            job, half, running = piece.job, piece.half, piece.running
            if running is not None:
                self._attempt(job, partial(self._return, job, half, running))
            if piece.last:
                job.end()
                job.flat = None

    def _attempt(self, job: _Sum, action: Callable[[], Any]) -> Any:
        """None if the job has failed. What fails it makes the others fail, since they would wait for this rank."""
        if job.error is not None:
            return None
        try:
            with torch.inference_mode(job.flat is not None and job.flat.is_inference()):
                return action()
        except Exception as error:
            job.fail(error)
            rank = self._circle.pair[0 if self._first else 1]
            self.abort(f"rank {rank} failed: {error}")
            return None

    def _reduce(self, job: _Sum, half: Half) -> InFlightOperation:
        """Step 1, and the start of step 2."""
        place = self._place_before
        mine, other = job.cut(half)
        with place.aside():
            place.follow([job.called])
            shown = self._show(0, other, mine, self._circle.before, place)
            _add(mine, shown, job.op)
            self._read[0] = place.here()
            running: InFlightOperation = self._of_world(
                self._circle.lane_ranks, lambda: self._circle.lane.allreduce(mine, op=job.op, async_op=True)
            )
        return running

    def _return(self, job: _Sum, half: Half, running: InFlightOperation) -> None:
        """The end of step 2, and step 3."""
        place = self._place_after
        mine, other = job.cut(half)
        with place.aside():
            self._of_world(self._circle.lane_ranks, running.wait)
            shown = self._show(1, mine, other, self._circle.after, place)
            other.copy_(shown, non_blocking=True)
            job.point = self._read[1] = place.here()

    def _show(
        self, step: int, given: torch.Tensor, wanted: torch.Tensor, pair: Communicator, place: CopyEngine
    ) -> torch.Tensor:
        """Puts `given` into the own outbox; returns what the partner has put into its own, like `wanted`."""
        own, partners = self._outboxes.place(step, self._numbers[step])
        self._numbers[step] += 1
        given_bytes = given.view(torch.uint8)
        own[: given_bytes.numel()].copy_(given_bytes, non_blocking=True)
        place.here().wait()
        read = self._read[step]
        if read is not None:
            read.wait()
        self._of_world(self._circle.pair, pair.barrier)
        return partners[: wanted.numel() * wanted.element_size()].view(wanted.dtype)

    def _of_world(self, ranks: tuple[int, ...], action: Callable[[], Any]) -> Any:
        """Runs `action`, whose errors name ranks of a part of the world."""
        try:
            return action()
        except PeerFailed as error:
            rank = ranks[error.rank] if 0 <= error.rank < len(ranks) else -1
            raise PeerFailed(f"among ranks {_list(ranks)}, numbered from 0: {error}", rank=rank) from error


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _add(mine: torch.Tensor, shown: torch.Tensor, op: str) -> None:
    other = shown.to(mine.device, non_blocking=True)  # another GPU's is fetched first, by its copy engine
    if op == "sum":
        mine.add_(other)
    elif op == "mean":
        mine.mul_(0.5).add_(other, alpha=0.5)
    elif op == "product":
        mine.mul_(other)
    else:
        torch.minimum(mine, other, out=mine) if op == "min" else torch.maximum(mine, other, out=mine)
