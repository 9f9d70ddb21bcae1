"""What a rank does for its saves: agrees with the others on what is saved, takes the snapshot, and starts the save that
writes it; one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from fireflyer.base.errors import Fenced, FireflyerError, UsageError
from fireflyer.base.events import CheckpointReport
from fireflyer.base.ports import Clock, Disk
from fireflyer.base.units import SECOND
from fireflyer.checkpoint.agreement import AGREE_TIMEOUT_NS, Agreement
from fireflyer.checkpoint.copying import DeviceCopies
from fireflyer.checkpoint.core.manager import SaveMachine, Settings
from fireflyer.checkpoint.core.manifest import PlanRecord
from fireflyer.checkpoint.engine.image import Share
from fireflyer.checkpoint.engine.save import BackgroundSave, SaveHandle
from fireflyer.checkpoint.engine.steps import run_steps
from fireflyer.checkpoint.opening import become_writer, open_root, stored_plan
from fireflyer.checkpoint.saved import saved_now
from fireflyer.checkpoint.snapshot import Content, Layout, Snapshot, SnapshotBuffer, describe_state, plan_snapshot
from fireflyer.checkpoint.state import State
from fireflyer.runtime.store import Store

__all__ = ["Saving"]

_log = logging.getLogger(__name__)
_GIVING_UP_NS = SECOND
"""For the operation at hand of a save that is given up. It may hang; then nobody waits for it."""


class Saving:
    """`settings` are what saves begin with: what the directory says is added to them. `launch`: as fences of the
    directory have it."""

    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk,
        store: Store | None,
        clock: Clock,
        root: str,
        launch: str,
        agreement: Agreement,
        devices: DeviceCopies,
        on_event: Callable[[CheckpointReport], None] | None,
    ) -> None:
        self.settings = settings
        self.refused: tuple[str, ...] = ()
        """Names of checkpoints that the last restore has passed over."""
        self._disk, self._store, self._clock, self._root, self._launch = disk, store, clock, root, launch
        self._agreement, self._on_event = agreement, on_event
        self._buffer = SnapshotBuffer(devices)
        self._content: Content | None = None
        self._layout: Layout | None = None
        self._current: BackgroundSave | None = None
        self._sequence = 0
        self._forget_from = 1

    def open_directory(self, shown: str, *, will_save: bool) -> None:
        """Of rank 0; `shown` names the directory to people. Raises as the constructor of `CheckpointManager`."""
        plan = self.settings.job_plan
        steps = open_root(
            self._disk,
            self._root,
            plan,
            launch=self._launch,
            attempt=self.settings.attempt,
            tag=self.settings.writer,
            will_save=will_save,
        )
        opened = run_steps(steps)
        for note in opened.notes:
            _log.warning("checkpoint directory needs attention directory=%s reason=%s", shown, note)
        if opened.writer is not None:
            self._set(writer_directory=opened.writer.name, newest_step=opened.newest_step)
        if plan is None:
            self._set(job_plan=stored_plan(self._disk, self._root))

    def set_plans(self, plans: tuple[PlanRecord, ...]) -> None:
        """Which plans checkpoints record from now on."""
        self._set(plans=plans)

    def _set(self, **changes: Any) -> None:
        self.settings = msgspec.structs.replace(self.settings, **changes)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._current is not None and not self._current.ended

    def join(self, timeout_ns: int | None = None) -> bool:
        """Whether no save is in flight any more, after at most so long."""
        if self._current is not None:
            self._current.join(timeout_ns)
        return not self.busy

    def give_up(self) -> None:
        """The save in flight, if there is one."""
        if self._current is not None and self.busy:
            self._current.give_up()
            self._current.join(_GIVING_UP_NS)

    def reserve(self, state: State, *, blocking: bool) -> None:
        """As `CheckpointManager.reserve`."""
        if self.busy:
            raise UsageError("a save is in flight; call reserve before the first save")
        plan = self.plan(state, self.describe(state), AGREE_TIMEOUT_NS)
        if plan is None:
            return
        if blocking:
            copies = self._buffer.take(0, plan).copies
            if copies is not None:
                copies.wait()
        else:
            self._buffer.reserve_beside(plan)

    def describe(self, state: State) -> Content:
        """Raises `UsageError` for a state that cannot be stored."""
        self._content = describe_state(state.shared, state.own, state.of_rank_0, last=self._content)
        return self._content

    def plan(self, state: State, content: Content, timeout_ns: int) -> Snapshot | None:
        """What this rank is to copy; None where the save is skipped. Rank 0 decides. The others finish what they were
        at: rank 0 has, so theirs is committed or given up. Before a save that blocks rank 0 ends the one before, and
        removes what that has replaced: as long as a save may take."""
        self._sequence += 1
        fenced = self._current.error.message if self._current and isinstance(self._current.error, Fenced) else None
        begin = self._agreement.begin(str(self._sequence), content, timeout_ns, free=not self.busy, fenced=fenced)
        if begin is None:
            return None
        if self._current is not None and self.settings.world_size > 1:
            self._current.give_up_and_join()
        plan = plan_snapshot(
            self.settings.rank,
            self.settings.world_size,
            state.shared,
            state.own,
            content,
            begin.agreed,
            last=self._layout,
        )
        self._layout = plan.layout
        return plan

    def begin(
        self,
        step: int,
        plan: Snapshot,
        values: dict[str, Any],
        handle: SaveHandle,
        start_ns: int,
        deferred: Collection[str],
    ) -> BackgroundSave:
        """Takes the snapshot that `plan` says, and starts to write it. `start_ns`: when the save was asked for."""
        if self._current is not None and self._current.committed:
            self._forget_from = self._current.sequence
            if self.settings.newest_step is not None:
                self._set(newest_step=max(self.settings.newest_step, self._current.step))
        failure = self._become_writer() if self.settings.rank == 0 else None
        machine = SaveMachine(
            self.settings,
            step=step,
            sequence=self._sequence,
            values=values,
            refused=self.refused,
            forget_from=self._forget_from,
            saved=saved_now(),
        )

        def take() -> Share:
            if failure is not None:
                raise failure
            return self._buffer.take(step, plan, deferred=deferred)

        save = self._current = BackgroundSave(
            machine,
            handle,
            disk=self._disk,
            store=self._store,
            root=self._root,
            clock=self._clock,
            start_ns=start_ns,
            report=self._report,
            take=take,
        )
        save.start()
        return save

    def _become_writer(self) -> FireflyerError | None:
        """Where the directory could not be written at the start: perhaps it can now. Returns why not."""
        settings = self.settings
        if settings.writer_directory:
            return None
        steps = become_writer(
            self._disk, self._root, launch=self._launch, attempt=settings.attempt, tag=settings.writer
        )
        try:
            writer = run_steps(steps)
        except FireflyerError as error:
            return error
        self._set(writer_directory=writer.name)
        return None

    def _report(self, report: CheckpointReport) -> None:
        if report.error is None:
            _log.info("checkpoint committed step=%d bytes=%d write_ns=%d", report.step, report.bytes, report.write_ns)
        else:
            _log.warning("checkpoint failed, training goes on step=%d reason=%s", report.step, report.error)
        if self._on_event is not None:
            self._on_event(report)
