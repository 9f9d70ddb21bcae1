"""Which piece of which operation may do its next step: a ring of slots with three places in it. Pure.

All pieces of all operations form one sequence, in the order of the calls. Piece i lives in slot i % slots, and passes
three stages, each of which takes pieces in the order of the sequence:

    lower    its copy down is started: when the copy up of piece i - slots, which used the slot, *was started*
    submit   its operation is started: when its copy down has ended
    lift     its copy up is started: when its operation has ended

Copies that use a slot one after the other are ordered on the device, so nobody waits for the end of a copy up. Since
operations are submitted in the order of the sequence, which is that of the calls, all ranks submit alike.

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
    """A place never overtakes the one before it: lifted <= submitted <= lowered <= lifted + slots."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise InvariantViolation(f"{slots} slots; there must be one at least")
        self.slots = slots
        self.lifted = self.submitted = self.lowered = 0
        self._added = 0
        self._waiting: deque[tuple[J, int, int]] = deque()  # job, next piece, pieces
        self._in_ring: deque[Step[J]] = deque()  # from `lifted` to `lowered`

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
        return self.lifted == self._added

    def to_lower(self) -> Step[J] | None:
        """The piece whose copy down may be started; None: there is none, or no slot."""
        if not self._waiting or self.lowered - self.lifted >= self.slots:
            return None
        job, piece, pieces = self._waiting[0]
        return Step(job, piece, self.lowered % self.slots, self.lowered, piece == pieces - 1)

    def to_submit(self) -> Step[J] | None:
        """The piece whose copy down was started first, and whose operation was not."""
        return self._in_ring[self.submitted - self.lifted] if self.submitted < self.lowered else None

    def to_lift(self) -> Step[J] | None:
        """The piece whose operation was started first, and whose copy up was not."""
        return self._in_ring[0] if self.lifted < self.submitted else None

    def lower(self) -> None:
        """The copy down of `to_lower` was started."""
        step = self.to_lower()
        if step is None:
            raise InvariantViolation("no piece may be copied down now")
        job, piece, pieces = self._waiting.popleft()
        if not step.last:
            self._waiting.appendleft((job, piece + 1, pieces))
        self._in_ring.append(step)
        self.lowered += 1

    def submit(self) -> None:
        """The operation of `to_submit` was started."""
        if self.to_submit() is None:
            raise InvariantViolation("no piece may be submitted now")
        self.submitted += 1

    def lift(self) -> None:
        """The copy up of `to_lift` was started."""
        if self.to_lift() is None:
            raise InvariantViolation("no piece may be copied up now")
        self._in_ring.popleft()
        self.lifted += 1
