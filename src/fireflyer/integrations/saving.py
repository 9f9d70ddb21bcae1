"""What the callbacks of all libraries share: when to save, what to report, and how to wait for the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.events import ResumeReport, StepReport
from fireflyer.base.units import SECOND
from fireflyer.checkpoint import CheckpointManager, Restored, SaveHandle, State
from fireflyer.checkpoint.core.schedule import periods_of
from fireflyer.runtime import MonotonicClock, read_environment
from fireflyer.runtime.reporter import Reporter

__all__ = ["Saving"]

ERROR_WAIT_NS = 5 * SECOND
"""After an exception a save that is in flight gets so long."""


class Saving:
    """The arguments are those of `fireflyer.checkpoint.TrainingLoop`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        period_steps: int | None = None,
        period: str | None = None,
        mttf: str | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self._directory, self._keep, self._keep_every, self._reporter = directory, keep, keep_every, reporter
        self._periods = periods_of(period_steps, period, mttf)
        self._clock = MonotonicClock()
        self._env = read_environment()
        self._manager: CheckpointManager | None = None
        self._began_ns = 0
        self._pending: StepReport | None = None
        self._saved: tuple[int, SaveHandle] | None = None
        """The newest save that began. One that was skipped, as another was in flight, has written nothing."""

    @property
    def manager(self) -> CheckpointManager:
        if self._manager is None:
            raise UsageError("call the callback's own train or fit, which restores; not that of the trainer")
        return self._manager

    def open(self) -> Restored | None:
        """Restores the newest checkpoint. Collective."""
        if self._manager is not None:
            raise UsageError("the callback is in use; make another for a second training")
        start_ns = self._clock.now_ns()
        self._manager = CheckpointManager.from_environment(
            self._directory,
            env=self._env,
            period_steps=self._periods.steps,
            period_ns=self._periods.time_ns,
            mttf_ns=self._periods.mttf_ns,
            keep=self._keep,
            keep_every=self._keep_every,
            on_event=None if self._reporter is None else self._reporter.checkpoint,
        )
        restored = self._manager.restore()
        if self._reporter is not None:
            self._reporter.resume(
                ResumeReport(
                    self._manager.rank,
                    self._env.attempt,
                    restored.step if restored else 0,
                    restored.name if restored else None,
                    restored.passed_over if restored else (),
                    self._clock.now_ns() - start_ns,
                )
            )
        return restored

    def close(self, *, failed: bool) -> None:
        if self._manager is not None:
            self._manager.close(ERROR_WAIT_NS if failed else None)
            self._manager = None

    def step_begins(self) -> None:
        self.send_report()
        self._began_ns = self._clock.now_ns()

    def step_ends(self, step: int, samples: int, state: Callable[[], State], *, loss: float | None = None) -> None:
        """`state` is called where a checkpoint is due."""
        done_ns = self._clock.now_ns()
        if self.manager.due(step, done_ns):
            handle = self.manager.save(step, state())
            if not handle.skipped:
                self._saved = (step, handle)
        self._pending = StepReport(
            rank=self.manager.rank,
            attempt=self._env.attempt,
            step=step,
            samples=samples,
            tokens=0,
            loss=loss,
            productive_ns=done_ns - self._began_ns,
            checkpoint_ns=self._clock.now_ns() - done_ns,
        )

    def send_report(self, loss: float | None = None) -> None:
        """Of the last step; `loss` is what became known of it since."""
        report, self._pending = self._pending, None
        if report is not None and self._reporter is not None:
            self._reporter.step(report if loss is None else msgspec.structs.replace(report, loss=loss))

    def ends(self, step: int, state: Callable[[], State]) -> None:
        """Waits for a checkpoint of the last step. Raises what keeps it from being written."""
        self.send_report()
        self.manager.wait()
        if self._saved is not None and self._saved[0] == step:
            self._saved[1].result()
        elif step > 0:
            self.manager.save(step, state(), blocking=True).result()
