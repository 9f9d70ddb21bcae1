"""How a training script tells the launcher what it did."""

from __future__ import annotations

from typing import Self

from fireflyer.base.events import CheckpointReport, ResumeReport, StepReport
from fireflyer.base.launch import RankEnvironment

__all__ = ["Reporter"]


class Reporter:
    """Never blocks and never breaks the training: reports are queued (bounded) and sent by a thread of its own.

    Without a launcher it does nothing at all.
    """

    @classmethod
    def from_environment(cls, env: RankEnvironment) -> Self:
        raise NotImplementedError

    def step(self, report: StepReport) -> None: ...

    def resume(self, report: ResumeReport) -> None: ...

    def checkpoint(self, report: CheckpointReport) -> None: ...

    def close(self) -> None:
        """Sends what is queued, within a bound of a few seconds; then gives up."""
