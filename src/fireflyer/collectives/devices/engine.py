"""Operations of a communicator on memory of a device, in host memory while the next piece is on its way.

Two threads carry out what `stages` decides, for all devices of a rank:

    to the host     starts copies while there are slots, waits for the first one to end, starts its operation
    to the device   waits for the operation that was started first, starts its copy

Native threads of the communicator compute meanwhile. A `Job` is *ended* when its last copy to the device was started:
then the device itself can wait for it, and the host need not. Until then the job keeps its arrays alive.

*One order.* The communicator runs operations in the order in which they are started, which must be the same on all
ranks. Those of jobs are started later than they were called, so every other operation on the same communicator must
`drain` first: wait until all operations of earlier jobs were started.

*Room.* A communicator takes a bounded number of pending operations, and how many are pending differs between ranks. Who
calls an operation is told `Busy`; a job that was called has its place in the order, and waits for room.

*Failure.* A job with an error takes part no more, but it is ended only when its copies have: then its arrays may go. An
error that is not the communicator's own (a device that fails) aborts it, since the other ranks would wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from fireflyer.base.errors import Aborted, Busy, FireflyerError, InvariantViolation, Timeout, UsageError
from fireflyer.base.units import MIB, format_duration
from fireflyer.collectives.devices.copies import CopyEngine, CopyEvent, HostMemory
from fireflyer.collectives.devices.pieces import Piece
from fireflyer.collectives.devices.stages import Stages, Step
from fireflyer.collectives.work import ROOM_PAUSE_S

__all__ = ["SLOTS", "SLOT_BYTES", "DeviceEngine", "DeviceWork", "Host", "InFlightOperation", "Job", "Outcome"]

SLOT_BYTES: Final = 8 * MIB
SLOTS: Final = 4
"""One on its way to the host, one being summed, one on its way to the device, and one so that none waits for another's
end."""


class InFlightOperation(Protocol):
    """An operation of the communicator under way."""

    def wait(self, timeout_ns: int | None = None) -> None: ...

    def done(self) -> bool: ...


class Host(Protocol):
    """What the engine needs of a communicator."""

    @property
    def rank(self) -> int: ...

    def empty(self, shape: int, dtype: str) -> Any: ...

    def abort(self, reason: str) -> None: ...


class Outcome:
    """How an operation ends that was called on the device `place` at `called`."""

    def __init__(self, name: str, place: CopyEngine) -> None:
        self.name = name
        self.place = place
        self.called = place.here()
        self.point = self.called
        """Reached when the last copy to the device has ended."""
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def end(self) -> None:
        """All of it was started; what failed is over, too."""
        self.settle()
        self.ended.set()

    def settle(self) -> None:
        """Waits for the device, if it failed."""
        if self.error is not None:
            try:
                self.point.wait()
            except Exception as error:  # a broken device ends no copies; what broke first is what is told
                self.error.add_note(f"then: {error}")


class Job(Outcome):
    """One operation. `run(slot, piece)` starts it on a piece, `slot` being a NumPy array of uint8."""

    def __init__(
        self,
        name: str,
        place: CopyEngine,
        pieces: Sequence[Piece],
        run: Callable[[Any, Piece], InFlightOperation],
        *,
        source: Any,
        target: Any,
    ) -> None:
        """`source` and `target` are flat arrays of uint8 on the device. The job starts after `place.here()`."""
        super().__init__(name, place)
        self.pieces = pieces
        self.run = run
        self.source = source
        self.target = target

    def end(self) -> None:
        # threads that idle keep the last job, but neither its arrays nor the communicator that is in its `run`
        self.run = _refuse
        self.settle()
        self.source = self.target = None
        self.ended.set()


def _refuse(_slot: Any, _piece: Piece) -> InFlightOperation:
    raise InvariantViolation("a chunk of an operation that has ended was submitted")


class DeviceWork:
    """A job, as the caller sees it. `place` is where its result is."""

    def __init__(self, job: Outcome) -> None:
        self._job = job
        self.place = job.place

    def wait(self, timeout_ns: int | None = None) -> None:
        """Returns when what the caller gives to the device from now on sees the result. The host waits for the last
        sum, but not for the device. Raises what the operation failed with, `Timeout` after `timeout_ns`: it goes on."""
        if not self._job.ended.wait(None if timeout_ns is None else timeout_ns / 1e9):
            waited = format_duration(timeout_ns or 0)
            raise Timeout(f"{self._job.name} has not completed within {waited}; it is still pending")
        if self._job.error is not None:
            raise self._job.error
        self.place.follow([self._job.point])

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._job.ended.is_set()


class DeviceEngine:
    """Of one communicator; see the module. `watch(stage, number, begun_ns, ended_ns)` is told of every step."""

    def __init__(
        self,
        host: Host,
        place: CopyEngine,
        *,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        watch: Callable[[str, int, int, int], None] | None = None,
    ) -> None:
        """`place` pins the memory of the slots, which lies in the arena."""
        self._host = weakref.ref(host)  # the threads keep the engine alive, but nobody else
        self._rank = host.rank
        self._watch = watch
        self._array = host.empty(slots * slot_bytes, "u8")
        self._memory: HostMemory = place.pin(self._array)
        ranges = [slice(slot * slot_bytes, (slot + 1) * slot_bytes) for slot in range(slots)]
        self._arrays = [self._array[part] for part in ranges]
        self._tensors = [self._memory.tensor[part] for part in ranges]
        self._changed = threading.Condition()
        self._stages: Stages[Job] = Stages(slots)
        self._stopped = False
        self._arrived: list[CopyEvent | None] = [None] * slots
        self._running: list[InFlightOperation | None] = [None] * slots
        self._device_copies: list[CopyEvent | None] = [None] * slots
        """The copy to the device that used each slot last."""
        self._threads = [
            threading.Thread(target=run, name=f"{run.__name__.strip('_')} of rank {host.rank}", daemon=True)
            for run in (self._copying_to_host, self._copying_to_device)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, job: Job) -> DeviceWork:
        """Raises `UsageError` after `close`."""
        with self._changed:
            if self._stopped:
                raise UsageError("the communicator is closed; create a new one")
            self._stages.add(job, len(job.pieces))
            self._changed.notify_all()
        return DeviceWork(job)

    def drain(self) -> None:
        """Returns when all operations of earlier jobs were started."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._stages.all_submitted)

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        with self._changed:
            return self._stages.idle

    def close(self) -> None:
        """Waits for the end of all jobs, and of all copies. May be called again."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._stages.idle)
        self.drop()

    def drop(self) -> None:
        """As `close`, but jobs that have not ended fail. The communicator must have ended its operations."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for running in (running for running in self._running if running is not None):
            with suppress(FireflyerError):
                running.wait()
        while (step := self._next_of_any()) is not None:
            step.job.fail(Aborted(f"{step.job.name} was pending when its communicator was dropped"))
            if step.last:
                step.job.end()
        for point in (point for point in (*self._arrived, *self._device_copies) if point is not None):
            point.wait()
        self._arrived = [None] * len(self._arrived)
        self._device_copies = [None] * len(self._device_copies)
        self._memory.release()

    def _next_of_any(self) -> Step[Job] | None:
        """Lets all pieces that are left pass the stages, one after the other."""
        with self._changed:
            if self._stages.next_to_host() is not None:
                self._stages.copy_to_host()
            elif self._stages.next_to_submit() is not None:
                self._stages.submit()
            step = self._stages.next_to_device()
            if step is not None:
                self._stages.copy_to_device()
            elif not self._stages.idle:
                return self._next_of_any()
        return step

    # --- the threads ---

    def _copying_to_host(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._stopped
                        or self._stages.next_to_host() is not None
                        or self._stages.next_to_submit() is not None
                    )
                )
                if self._stopped:
                    return
                copy, submit = self._stages.next_to_host(), self._stages.next_to_submit()
            if copy is not None:
                self._guarded(copy, self._copy_to_host)
                passed = self._stages.copy_to_host
            elif submit is not None:
                self._guarded(submit, self._submit)
                passed = self._stages.submit
            else:
                continue
            with self._changed:
                passed()
                self._changed.notify_all()

    def _copying_to_device(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._stages.next_to_device() is not None)
                step = self._stages.next_to_device()
                if self._stopped or step is None:
                    return
            self._guarded(step, self._copy_to_device)
            if step.last:
                step.job.end()
            with self._changed:
                self._stages.copy_to_device()
                self._changed.notify_all()

    def _guarded(self, step: Step[Job], action: Callable[[Step[Job]], None]) -> None:
        begun_ns = time.perf_counter_ns()
        try:
            action(step)
        except FireflyerError as error:
            step.job.fail(error)
        except Exception as error:  # of the device; without this rank the others cannot go on
            step.job.fail(error)
            host = self._host()
            if host is not None:
                host.abort(f"{step.job.name} failed on the device of rank {self._rank}: {error}")
        if self._watch is not None:
            self._watch(action.__name__.strip("_"), step.number, begun_ns, time.perf_counter_ns())

    def _copy_to_host(self, step: Step[Job]) -> None:
        job, slot = step.job, step.slot
        piece, before = job.pieces[step.piece], self._device_copies[slot]
        self._arrived[slot] = before  # without a copy to the host it is the host that must wait for the slot
        if job.error is None and piece.device_to_host:
            after = [point for point in (job.called if step.piece == 0 else None, before) if point is not None]
            self._arrived[slot] = job.place.device_to_host(job.source, self._tensors[slot], piece.device_to_host, after)

    def _submit(self, step: Step[Job]) -> None:
        job, slot = step.job, step.slot
        self._running[slot] = None
        arrived = self._arrived[slot]
        if arrived is not None:
            arrived.wait()
        self._running[slot] = self._started(job, slot, job.pieces[step.piece])

    def _started(self, job: Job, slot: int, piece: Piece) -> InFlightOperation | None:
        """None if the job has failed, or will in `drop`. Other ranks may have had room for the piece where this one has
        not yet: it is never left out, or all later operations of the ranks would be one apart."""
        while job.error is None:
            try:
                return job.run(self._arrays[slot], piece)
            except Busy:
                with self._changed:
                    if self._changed.wait_for(lambda: self._stopped, ROOM_PAUSE_S):
                        return None
        return None

    def _copy_to_device(self, step: Step[Job]) -> None:
        job, slot = step.job, step.slot
        running, moves = self._running[slot], job.pieces[step.piece].host_to_device
        self._running[slot] = None
        if running is None:
            return
        running.wait()
        if moves and job.error is None:
            job.point = job.place.host_to_device(self._tensors[slot], job.target, moves, [job.called])
            self._device_copies[slot] = job.point
