"""Which piece of which operation may do its next step: a ring of slots with three places in it. Pure.

All pieces of all operations form one sequence, in the order of the calls. Piece i lives in slot i % slots, and passes
three stages, each of which takes pieces in the order of the sequence:

    copy_to_host     its copy to the host is started: when the copy to the device of piece i - slots, which used the
                     slot, *was started*
    submit           its operation is started: when its copy to the host has ended
    copy_to_device   its copy to the device is started: when its operation has ended

Copies that use a slot one after the other are ordered on the device, so nobody waits for the end of a copy to the
device. Since operations are submitted in the order of the sequence, which is that of the calls, all ranks submit
alike.

A job that failed keeps its place: its pieces pass the stages, but whoever executes them does nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

from fireflyer.base.errors import InvariantViolation

__all__ = ["Stages", "Step"]

J = TypeVar("J")


class Step(NamedTuple, Generic[J]):
    """Piece `piece` of `job`, in `slot`. `number` counts all pieces; `last`: it is the job's last one."""

    job: J
    piece: int
    slot: int
    number: int
    last: bool


class Stages(Generic[J]):
    """A place never overtakes the one before it:
    copied_to_device <= submitted <= copied_to_host <= copied_to_device + slots."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise InvariantViolation(f"{slots} slots; there must be one at least")
        self.slots = slots
        self.copied_to_device = self.submitted = self.copied_to_host = 0
        self._added = 0
        self._waiting: deque[tuple[J, int, int]] = deque()  # job, next piece, pieces
        self._in_ring: deque[Step[J]] = deque()  # from `copied_to_device` to `copied_to_host`

    def add(self, job: J, pieces: int) -> None:
        if pieces < 1:
            raise InvariantViolation("a job has one piece at least")
        self._waiting.append((job, 0, pieces))
        self._added += pieces

    @property
    def all_submitted(self) -> bool:
        return self.submitted == self._added

    @property
    def idle(self) -> bool:
        return self.copied_to_device == self._added

    def next_to_host(self) -> Step[J] | None:
        """The piece whose copy to the host may be started; None: there is none, or no slot."""
        if not self._waiting or self.copied_to_host - self.copied_to_device >= self.slots:
            return None
        job, piece, pieces = self._waiting[0]
        return Step(job, piece, self.copied_to_host % self.slots, self.copied_to_host, piece == pieces - 1)

    def next_to_submit(self) -> Step[J] | None:
        """The piece whose copy to the host was started first, and whose operation was not."""
        return self._in_ring[self.submitted - self.copied_to_device] if self.submitted < self.copied_to_host else None

    def next_to_device(self) -> Step[J] | None:
        """The piece whose operation was started first, and whose copy to the device was not."""
        return self._in_ring[0] if self.copied_to_device < self.submitted else None

    def copy_to_host(self) -> None:
        """The copy of `next_to_host` was started."""
        step = self.next_to_host()
        if step is None:
            raise InvariantViolation("no piece may be copied to the host now")
        job, piece, pieces = self._waiting.popleft()
        if not step.last:
            self._waiting.appendleft((job, piece + 1, pieces))
        self._in_ring.append(step)
        self.copied_to_host += 1

    def submit(self) -> None:
        """The operation of `next_to_submit` was started."""
        if self.next_to_submit() is None:
            raise InvariantViolation("no piece may be submitted now")
        self.submitted += 1

    def copy_to_device(self) -> None:
        """The copy of `next_to_device` was started."""
        if self.next_to_device() is None:
            raise InvariantViolation("no piece may be copied to the device now")
        self._in_ring.popleft()
        self.copied_to_device += 1
