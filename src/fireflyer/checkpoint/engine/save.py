"""One save in flight: the thread that performs what the save machine asks for, and the handle that tells its end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from fireflyer.base.errors import Aborted, FireflyerError, InvariantViolation, Timeout, error_from_wire, error_to_wire
from fireflyer.base.events import CheckpointReport
from fireflyer.base.ports import Clock, Disk
from fireflyer.base.units import SECOND, format_duration
from fireflyer.checkpoint.core.effects import (
    Await,
    Begin,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Forget,
    KeyReceived,
    Publish,
    TakeSnapshot,
)
from fireflyer.checkpoint.core.manager import SaveMachine
from fireflyer.checkpoint.engine.directory import OpenFiles
from fireflyer.checkpoint.engine.image import ImageCopies, Share
from fireflyer.checkpoint.engine.performing import perform
from fireflyer.checkpoint.engine.steps import GIVEN_UP, run_steps
from fireflyer.runtime.driver import BlockingDriver
from fireflyer.runtime.store import Store

__all__ = ["BackgroundSave", "SaveHandle"]

_log = logging.getLogger(__name__)
_SLICE_NS = SECOND
"""A wait for another rank looks this often whether the save was given up."""


class SaveHandle:
    """Handle of one save: whether it is done, and how it went. Safe to use from any thread."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.skipped = False
        """True: nothing was saved, because an earlier save was still in flight."""
        self._ended = threading.Event()
        self._name: str | None = None
        self._error: FireflyerError | None = None
        self._copies: ImageCopies | None = None

    def before_update(self) -> None:
        """Call this before tensors change that were given to `CheckpointManager.save` as `deferred`, in the thread
        that changes them: its current streams wait for the copies; the call itself does not. May be called again."""
        if self._copies is not None:
            self._copies.before_update()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_ns: int | None = None) -> None:
        """Raises `Timeout`."""
        if not self._ended.wait(None if timeout_ns is None else timeout_ns / SECOND):
            raise Timeout(f"the save of step {self.step} did not end within {format_duration(timeout_ns or 0)}")

    def error(self) -> FireflyerError | None:
        """Waits for the end, then says what went wrong."""
        self.wait()
        return self._error

    def result(self, timeout_ns: int | None = None) -> str | None:
        """The name of the committed checkpoint, None for a skipped one. Raises what went wrong, and `Timeout`."""
        self.wait(timeout_ns)
        if self._error is not None:
            raise self._error
        return self._name

    def copies_began(self, copies: ImageCopies | None) -> None:
        self._copies = copies

    def skip(self) -> None:
        self.skipped = True
        self._ended.set()

    def finish(self, name: str | None, error: FireflyerError | None) -> None:
        if not self._ended.is_set():
            self._name, self._error = name, error
            self._ended.set()


class _TimedCopies:
    """The copies of a snapshot, and when they had ended."""

    def __init__(self, copies: ImageCopies, clock: Clock) -> None:
        self._copies, self._clock = copies, clock
        self.ended_ns: int | None = None

    def before_update(self) -> None:
        self._copies.before_update()

    def wait(self) -> None:
        self._copies.wait()
        if self.ended_ns is None:
            self.ended_ns = self._clock.now_ns()


class BackgroundSave:
    """Drives one `SaveMachine`: the snapshot in the caller's thread, the rest in one of its own. `take` copies this
    rank's share."""

    def __init__(
        self,
        machine: SaveMachine,
        handle: SaveHandle,
        *,
        disk: Disk,
        store: Store | None,
        root: str,
        clock: Clock,
        start_ns: int,
        report: Callable[[CheckpointReport], None],
        take: Callable[[], Share],
    ) -> None:
        self._machine = machine
        self._handle = handle
        self._disk = disk
        self._store = store
        self._root = root
        self._clock = clock
        self._start_ns = start_ns
        self._report = report
        self._take = take
        self._driver: BlockingDriver[Event, Effect] = BlockingDriver(machine, self._perform, now_ns=clock.now_ns)
        self._stall_ns = 0
        self._copies: _TimedCopies | None = None
        self.committed = False
        self.error: FireflyerError | None = None
        """Set when the save has ended."""
        self.ended_ns = start_ns
        """When it had tidied up."""
        self._share: Share | None = None
        self._files = OpenFiles() if machine.settings.world_size == 1 else None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{machine.step}", daemon=True)

    def start(self) -> None:
        """Takes the snapshot, then returns; a snapshot that fails is reported like a failed write. What devices copy is
        on its way then: the thread waits for it before it writes."""
        self._driver.post(Begin())
        self._driver.step()
        self._stall_ns = self._clock.now_ns() - self._start_ns
        self._thread.start()

    @property
    def sequence(self) -> int:
        return self._machine.sequence

    @property
    def step(self) -> int:
        return self._machine.step

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def held_up_until_ns(self) -> int:
        """Until when it may have held training up: where devices copy, until they had; what of that training has not
        waited for is not known. Of a save that was committed."""
        copied_ns = None if self._copies is None else self._copies.ended_ns
        return self._start_ns + self._stall_ns if copied_ns is None else copied_ns

    def join(self, timeout_ns: int | None = None) -> None:
        self._thread.join(None if timeout_ns is None else timeout_ns / SECOND)

    def give_up(self) -> None:
        """Stops writing and waiting as soon as the operation at hand is over. What rank 0 has not committed then never
        will be, and is removed at the next start."""
        self._given_up.set()

    def give_up_and_join(self) -> None:
        """Not for rank 0, which tidies up."""
        self.give_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._driver.run()
        except Exception as error:
            _log.exception("checkpoint save failed on an internal error step=%d", self._machine.step)
            self._finish(Finish(None, 0, Failed(*error_to_wire(error))))
        finally:
            self._end_copies()
            if self._files is not None:
                self._files.close()
            self.ended_ns = self._clock.now_ns()
        for text in self._machine.notes:
            _log.warning("checkpoint step=%d note=%s", self._machine.step, text)

    def _end_copies(self) -> None:
        """The next snapshot uses the same image. A save that has not come to write it waits here."""
        if self._share is not None and self._share.copies is not None:
            with contextlib.suppress(Exception):  # has been reported if the image was to be read
                self._share.copies.wait()

    def _perform(self, effect: Effect) -> Event:
        try:
            match effect:
                case Publish(key, payload):
                    self._the_store().set(key, payload)
                    return Done()
                case Await(key, timeout_ns):
                    return KeyReceived(self._await(key, timeout_ns))
                case Forget(prefix):
                    self._the_store().delete_prefix(prefix)
                    return Done()
                case Finish():
                    self._finish(effect)
                    return Done()
                case TakeSnapshot():
                    self._take_share()
                    return Done()
            steps = perform(effect, self._disk, self._root, self._share, files=self._files)
            return run_steps(steps, self._given_up.is_set)
        except Exception as error:
            return Failed(*error_to_wire(error))

    def _take_share(self) -> None:
        share = self._take()
        if share.copies is not None:
            self._copies = _TimedCopies(share.copies, self._clock)
            share = msgspec.structs.replace(share, copies=self._copies)
        self._share = share
        self._handle.copies_began(share.copies)

    def _the_store(self) -> Store:
        if self._store is None:
            raise InvariantViolation("a save of a single rank asked for the store")
        return self._store

    def _await(self, key: str, timeout_ns: int) -> bytes:
        deadline_ns = self._clock.now_ns() + timeout_ns
        while True:
            left_ns = deadline_ns - self._clock.now_ns()
            given_up = self._given_up.is_set()  # asked first: what was said before a newer save began is to be heard
            try:
                return self._the_store().get(key, max(1, min(left_ns, _SLICE_NS)))
            except Timeout:
                if left_ns <= _SLICE_NS:
                    waited = format_duration(timeout_ns)
                    raise Timeout(f"{key} was not set within {waited}: a rank has ended, or its disk hangs") from None
            if given_up:
                raise Aborted(GIVEN_UP)

    def _finish(self, effect: Finish) -> None:
        error = None if effect.error is None else error_from_wire(effect.error.code, effect.error.message)
        self.committed, self.error = error is None, error
        report = CheckpointReport(
            rank=self._machine.settings.rank,
            attempt=self._machine.settings.attempt,
            step=self._machine.step,
            bytes=len(self._share.image) - self._share.header_bytes if self._share is not None else 0,
            stall_ns=self._stall_ns,
            write_ns=self._clock.now_ns() - self._start_ns - self._stall_ns,
            error=None if error is None else error.message,
        )
        try:
            self._report(report)
        except Exception:
            _log.exception("on_event raised for the checkpoint of step %d", self._machine.step)
        self._handle.finish(effect.name, error)
