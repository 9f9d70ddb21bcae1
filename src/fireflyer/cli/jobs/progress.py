"""What a running job looks like: event log entries in, one status line and a few notices out. Pure.

Rates are taken over the last `WINDOW_STEPS` steps of the current attempt on the launcher's clock, so they say what the
job does now; the report says what it did on the whole.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from fireflyer.analytics.report import one_line
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    CheckpointReport,
    CorruptionReport,
    FaultInjected,
    JobFinished,
    JobStarted,
    Logged,
    NodeChecked,
    NodeLost,
    PeerFailureReport,
    RankExited,
    ResumeReport,
    SaturationReport,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.rank_layout import counts_text
from fireflyer.base.suspension import SUSPENDED_EXIT_CODE
from fireflyer.base.units import SECOND, format_duration, format_rate

__all__ = ["WINDOW_STEPS", "JobProgress"]

WINDOW_STEPS = 32
MOST_HOSTS = 8
"""That are named one by one."""
IDLE_NS = 10 * SECOND
"""A step that takes longer than this and than three of the last ones is worth a word."""
_IDLE_SHOWN_S = (10, 20, 30, 60, 120, 300, 600, 1200, 1800)

_SIZE_CHANGES = (
    "the number of ranks may change at a restart: with fireflyer.data.ResumableSampler each step keeps its global "
    "batch; torch's DistributedSampler divides anew, as under torchrun"
)


@dataclass(slots=True)
class _Recent:
    at_ns: int
    tokens: int = 0
    step_ns: int = 0
    allreduce_bytes: int = 0
    allreduce_ns: int = 0


@dataclass(slots=True)
class JobProgress:
    """The present state of one job; a `JobStarted` begins another."""

    phase: str = ""
    """Empty until the job has started."""
    attempt: int = 0
    step: int = 0
    loss: float | None = None
    saved_step: int | None = None
    suspended: Suspended | None = None
    """How the job was suspended, if it was."""
    _stepped_ns: int = 0
    """When the last step was reported that was new in its attempt."""
    _resumed: bool = False
    _blamed: bool = False
    _corrupted: bool = False
    _saturated: bool = False
    _suspending: bool = False
    _left: bool = False
    """A rank has left because of a suspension: how others end does not count."""
    _nodes: int = 0
    """Of the attempt before; at first as many as the job may have."""
    _hosts: tuple[str, ...] = ()
    """Of the attempt before, in the order of their nodes."""
    _left_out: tuple[str, ...] = ()
    _recent: OrderedDict[int, _Recent] = field(default_factory=OrderedDict)

    def feed(self, entry: Logged) -> list[str]:
        """Takes one entry; returns what is worth a line of its own now."""
        match entry.event:
            case StepReport() as report:
                self._stepped(entry.at_ns, report)
                return []
            case ResumeReport() as report:
                return self._resume(report)
            case CheckpointReport() as report:
                if report.error is not None:
                    return [f"checkpoint of step {report.step} failed: {one_line(report.error)}; training goes on"]
                self.saved_step = max(self.saved_step or 0, report.step)
                return []
            case SaturationReport() as report:
                if self._saturated:
                    return []
                self._saturated = True
                return [
                    f"fp8 overflow: {report.saturated:,} of {report.values:,} results of fp8 sums so far were too "
                    f"large and were clipped or made infinite (rank {report.rank} noticed first); scale the numbers "
                    "down before the sum, or sum them in bf16"
                ]
            case CorruptionReport() as report:
                if self._corrupted:
                    return []
                self._corrupted = True
                return [f"replicas differ: {one_line(report.reason)}"]
            case PeerFailureReport() as report:
                if self._blamed:
                    return []
                self._blamed, self.phase = True, "failing"
                return [f"rank {report.rank} failed because of rank {report.peer}: {one_line(report.reason)}"]
            case event:
                return self._happened(entry.at_ns, event)

    def _happened(
        self,
        at_ns: int,
        event: JobStarted
        | AttemptStarted
        | AttemptSized
        | NodeLost
        | RankExited
        | AttemptFailed
        | NodeChecked
        | FaultInjected
        | SuspendRequested
        | Suspended
        | JobFinished,
    ) -> list[str]:
        match event:
            case JobStarted():
                self._new_attempt(0)
                self.step, self.loss, self.saved_step = 0, None, None
                self._nodes = event.nodes
                nodes = f"{event.min_nodes} to {event.nodes}" if event.min_nodes else str(event.nodes)
                size = f"{_counted(nodes, 'node')} x {_counted(str(event.ranks_per_node), 'rank')}"
                if event.node_ranks:
                    size = f"{_counted(nodes, 'node')}, ranks: {counts_text(event.node_ranks)}"
                said = [f"job {one_line(event.job)}: {size}"]
                return [*said, _SIZE_CHANGES] if event.min_nodes else said
            case AttemptSized():
                return self._sized(event)
            case AttemptStarted():
                self._new_attempt(event.attempt)
                return [f"attempt {event.attempt} starts"] if event.attempt else []
            case FaultInjected():
                at = f", at step {event.step}" if event.step is not None else ""
                return [f"injecting a fault: {one_line(event.what)}{at}"]
            case NodeLost():
                self._blamed, self.phase = True, "failing"
                where = f" ({one_line(event.host)})" if event.host else ""
                return [f"node {event.node}{where} lost: {one_line(event.reason)}"]
            case SuspendRequested() | Suspended():
                return self._suspend(event)
            case RankExited():
                return self._exited(event)
            case NodeChecked():
                suspect = " is suspect" if event.verdict == "suspect" else ""
                return [f"node {event.node}{suspect}: {one_line(event.reason)}"]
            case AttemptFailed():
                self._blamed, self.phase = True, "restarting" if event.restarting else "stopping"
                what = "stopped" if event.stopped else "failed"
                then = "; restarting" if event.restarting else ""
                return [f"attempt {event.attempt} {what}: {one_line(event.reason)}{then}"]
            case JobFinished():
                self.phase = "finished"
                return [f"job ended after {format_duration(at_ns)}: {one_line(event.reason)}"]

    def _sized(self, event: AttemptSized) -> list[str]:
        left_out = [host for host in event.left_out if host not in self._left_out]
        said = [f"{one_line(host)} failed twice; this job does not use it any more" for host in left_out[:MOST_HOSTS]]
        if event.nodes != self._nodes:
            more = ", ..." if len(event.hosts) > MOST_HOSTS else ""
            hosts = ", ".join(map(one_line, event.hosts[:MOST_HOSTS])) + more
            nodes = "1 node" if event.nodes == 1 else f"{event.nodes} nodes"
            if event.node_ranks:
                nodes += f" (ranks: {counts_text(event.node_ranks)})"
            said.append(f"attempt {event.attempt} has {nodes}, not {self._nodes}: {hosts}")
        else:
            moved = [
                change for change in enumerate(zip(event.hosts, self._hosts, strict=False)) if len({*change[1]}) > 1
            ]
            said += [
                f"node {number} is on {one_line(now)} now, not on {one_line(before)}"
                for number, (now, before) in moved[:MOST_HOSTS]
            ]
        self._nodes, self._hosts, self._left_out = event.nodes, event.hosts, event.left_out
        return said

    def _suspend(self, event: SuspendRequested | Suspended) -> list[str]:
        if isinstance(event, Suspended):
            self.suspended = event
            at = f" at {event.horizon:,}" if event.horizon is not None else ""
            return [f"attempt {event.attempt} suspended{at}"]
        self._suspending, self.phase = True, "suspending"
        return ["suspending: the ranks save and leave" if event.rank is None else f"rank {event.rank} has left"]

    def _exited(self, event: RankExited) -> list[str]:
        self._left = self._left or (self._suspending and event.exit_code == SUSPENDED_EXIT_CODE)
        if event.exit_code == 0 or self._blamed or self._left:
            return []
        self._blamed, self.phase = True, "failing"
        return [one_line(event.reason) or f"rank {event.rank} exited with code {event.exit_code}"]

    def printed(self, attempt: int) -> None:
        """A rank of this attempt printed something: from a script that reports nothing this is all that is heard."""
        if attempt == self.attempt and self.phase in ("starting", "restarting") and not self.step:
            self.phase = "running"

    def _new_attempt(self, attempt: int) -> None:
        self.attempt, self.phase = attempt, "starting" if attempt == 0 else "restarting"
        self._resumed, self._blamed, self._suspending, self._left = False, False, False, False
        self._recent.clear()

    def _resume(self, report: ResumeReport) -> list[str]:
        if report.attempt != self.attempt or self._resumed:
            return []
        self._resumed, self.phase, self.step, self.loss = True, "training", report.step, None
        self.saved_step = report.step if report.checkpoint is not None else None
        passed = [f"skipped checkpoint {one_line(item.name)}: {one_line(item.reason)}" for item in report.passed_over]
        if report.checkpoint is None:
            return [*passed, "training from the start" if report.step == 0 else f"training from step {report.step}"]
        return [*passed, f"resuming from step {report.step} ({one_line(report.checkpoint)})"]

    def _stepped(self, at_ns: int, report: StepReport) -> None:
        if report.attempt != self.attempt:
            return
        if self.phase in ("starting", "restarting", "running"):
            self.phase = "training"
        if report.step >= self.step:
            self.step = report.step
            self.loss = report.loss if report.loss is not None else self.loss
        recent = self._recent.get(report.step)
        if recent is None:
            self._stepped_ns = at_ns
            recent = self._recent[report.step] = _Recent(at_ns)
            if len(self._recent) > WINDOW_STEPS:
                self._recent.popitem(last=False)
        recent.at_ns = at_ns
        recent.tokens += max(0, report.tokens)
        recent.step_ns += max(0, report.productive_ns)
        recent.allreduce_bytes += max(0, report.allreduce_bytes)
        recent.allreduce_ns += max(0, report.allreduce_ns)

    @property
    def tokens_per_s(self) -> float | None:
        """Over all ranks; None until two steps were reported."""
        recent = list(self._recent.values())
        if len(recent) < 2:
            return None
        span_ns = recent[-1].at_ns - recent[0].at_ns
        tokens = sum(item.tokens for item in recent[1:])
        return tokens * SECOND / span_ns if span_ns > 0 and tokens else None

    @property
    def allreduce_share(self) -> float | None:
        """Of the step time, while sums were in flight: beside the backward pass, and waiting for slower ranks."""
        total_ns = sum(item.allreduce_ns for item in self._recent.values())
        step_ns = sum(item.step_ns for item in self._recent.values())
        return min(1.0, total_ns / step_ns) if total_ns and step_ns else None

    @property
    def allreduce_bytes_per_s(self) -> float | None:
        """Algorithm bandwidth of a rank, at least: bytes of its tensors over the time they were in flight, which also
        covers waiting for slower ranks and computing beside the sums."""
        total_ns = sum(item.allreduce_ns for item in self._recent.values())
        total = sum(item.allreduce_bytes for item in self._recent.values())
        return total * SECOND / total_ns if total_ns and total else None

    def idle_ns(self, now_ns: int) -> int:
        """Since the last step, where that is unusually long; else 0."""
        if not self._recent or self.phase not in ("training", "failing"):
            return 0
        times = [item.at_ns for item in self._recent.values()]
        usual_ns = (times[-1] - times[0]) // (len(times) - 1) if len(times) > 1 else 0
        idle_ns = now_ns - self._stepped_ns
        return idle_ns if idle_ns >= max(IDLE_NS, 3 * usual_ns) else 0

    def status(self, now_ns: int = 0, *, live: bool = False) -> str:
        """One line, without end of line; empty until the job has started. `now_ns` is on the clock of the event log.

        `live`: for a line that is drawn again and again, with the time that the job has taken. Otherwise the line
        changes seldom when nothing happens: a file is not filled with it."""
        if not self.phase or (self.phase == "finished" and not self.step):
            return ""  # the end was told in a line of its own
        said = [] if self.step and self.phase == "training" else [self.phase]
        if self.step:
            said.append(f"step {self.step:,}")
        if self.loss is not None:
            said.append(f"loss {self.loss:.4f}")
        if self.tokens_per_s is not None:
            said.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.allreduce_bytes_per_s is not None:
            share = f" ({self.allreduce_share:.0%} of the step)" if self.allreduce_share is not None else ""
            said.append(f"allreduce ≥ {format_rate(self.allreduce_bytes_per_s)}{share}")
        if self.saved_step is not None:
            said.append(f"saved step {self.saved_step:,}")
        if idle_ns := self.idle_ns(now_ns):
            said.append(f"no step for {_seconds(idle_ns // SECOND if live else _coarse_s(idle_ns // SECOND))}")
        if self.attempt:
            said.append(f"attempt {self.attempt}")
        if live:
            said.append(_seconds(now_ns // SECOND))
        return " · ".join(said)


def _seconds(whole_s: int) -> str:
    return f"{whole_s} s" if whole_s < 60 else format_duration(whole_s * SECOND)


def _coarse_s(idle_s: int) -> int:
    if idle_s >= 3600:
        return idle_s // 3600 * 3600
    return max((shown for shown in _IDLE_SHOWN_S if shown <= idle_s), default=0)


def _counted(count: str, what: str) -> str:
    return f"{count} {what}" if count == "1" else f"{count} {what}s"
