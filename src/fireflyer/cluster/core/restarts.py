"""Whether a failed attempt is followed by another one.

The kind of the failure decides (`blame.failure_of_end`):

- *infrastructure* (a lost node, SIGKILL from outside, memory that ran out, a rank that hangs): restart.
- *user* (an exception) and *unknown* (any other exit code or signal): restart once. When the same failure comes a
  second time and no newer step was reported and no newer checkpoint was committed in between, it will come again: the
  job ends. The same: exception type, file and line; without an exception the exit code.

In any case there are at most `max_restarts` restarts. A MASTER_PORT that a stranger had taken is nobody's failure:
such a restart is not counted, `MAX_PORT_RETRIES` times.

Steps count from the job's beginning, so a job that resumes from a checkpoint and fails at the step at which it failed
before has made no progress, though it reported steps again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fireflyer.base.events import CheckpointReport, Report, StepReport
from fireflyer.cluster.core.blame import Failure

__all__ = ["MAX_PORT_RETRIES", "Decision", "Restarts"]

MAX_PORT_RETRIES = 3
MAX_REMEMBERED = 256
"""Different failures that are compared with; a job with more forgets the oldest."""


class Decision(msgspec.Struct, frozen=True):
    restart: bool
    why: str
    """Why there is no restart, to be read behind the reason of the failure; empty where nothing is to be said."""


@dataclass(slots=True)
class Restarts:
    """The budget of one job and what it has learned from earlier attempts."""

    max_restarts: int
    used: int = 0
    _port_retries: int = 0
    _step: int = 0
    _saved_step: int = 0
    _pending: tuple[str, int] | None = None
    _seen: dict[str, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    """Of each failure: the attempt in which it was seen last, and the progress of the job then."""

    def report(self, report: Report) -> None:
        """A report of the current attempt."""
        if isinstance(report, StepReport):
            self._step = max(self._step, report.step)
        elif isinstance(report, CheckpointReport) and report.error is None:
            self._saved_step = max(self._saved_step, report.step)

    def begin_attempt(self) -> None:
        """All ranks of the attempt before are gone, and none of its reports can come any more."""
        if self._pending is not None:
            identity, attempt = self._pending
            self._seen[identity] = (attempt, (self._step, self._saved_step))
            if len(self._seen) > MAX_REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self._pending = None

    def decide(self, failure: Failure | None, *, attempt: int, port_taken: bool) -> Decision:
        """Takes one restart from the budget where it allows one. `failure` None: nobody is to blame."""
        if port_taken and self._port_retries < MAX_PORT_RETRIES:
            self._port_retries += 1
            return Decision(True, "")
        if self.used >= self.max_restarts:
            return Decision(False, self._why_used_up(failure))
        if failure is not None and failure.kind != "infrastructure" and failure.identity:
            seen = self._seen.pop(failure.identity, None)  # put in again behind the others
            if seen is not None and seen[1] == (self._step, self._saved_step):
                return Decision(False, _why_the_same(seen[0]))
            self._pending = failure.identity, attempt
        self.used += 1
        return Decision(True, "")

    def _why_used_up(self, failure: Failure | None) -> str:
        if self.max_restarts:
            return f"all {self.max_restarts} restarts are used up (--max-restarts)"
        if failure is not None and failure.kind == "infrastructure":
            return "not restarted (--max-restarts is 0)"
        return ""


def _why_the_same(attempt: int) -> str:
    return f"not restarted: attempt {attempt} failed in the same way, and no newer step or checkpoint was reported"
