"""The event log of a run as rows: each attempt a job row, each failure that names a node an event. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fireflyer.analytics.reliability.local_times import EARLIEST_NS, LATEST_NS
from fireflyer.analytics.reliability.log_lines import printable
from fireflyer.analytics.reliability.rows import ABSENT_EXIT, MAX_NAME, EventRow, JobRow
from fireflyer.base.errors import UsageError
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    CorruptionReport,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    Suspended,
)
from fireflyer.base.units import SECOND

__all__ = ["rows_of_run"]


class _Run:
    """One pass over the log; an attempt ends where it failed, was suspended or the job finished."""

    def __init__(self, started: JobStarted) -> None:
        self.job, self.begin_ns = printable(started.job, MAX_NAME), round(started.wall_time_s * SECOND)
        self.hosts: tuple[str, ...] = ()
        self.started = started
        self.first_ranks = started.node_ranks or (started.ranks_per_node,) * started.nodes
        self.nodes, self.node_ranks, self.ranks = started.nodes, self.first_ranks, started.world_size
        self.attempt_ns: int | None = None
        self.differed = False
        """Replicas did, in this attempt; each of their ranks tells it."""
        self.exit_code = ABSENT_EXIT
        self.jobs: list[JobRow] = []
        self.events: list[EventRow] = []

    def take(self, entry: Logged) -> None:
        now_ns, event = self.begin_ns + entry.at_ns, entry.event
        match event:
            case AttemptStarted():
                self.attempt_ns, self.exit_code, self.differed = now_ns, ABSENT_EXIT, False
            case AttemptSized():
                self._sized(event)
            case CorruptionReport() if not self.differed:
                self._differed(now_ns, event)
            case NodeLost():
                self._saw(now_ns, self._host(event.node, event.host), "node_lost", "high", event.reason)
            case RankExited() if event.exit_code:
                self.exit_code = event.exit_code if self.exit_code == ABSENT_EXIT else self.exit_code
            case AttemptFailed():
                self._failed(now_ns, event)
            case Suspended():
                self._ended(now_ns, "PREEMPTED")
            case JobFinished():
                self.exit_code = event.exit_code
                self._ended(now_ns, "COMPLETED" if event.exit_code == 0 else "FAILED")
            case _:
                pass

    def finish(self, last_ns: int) -> None:
        """After the last entry: an attempt that has not ended ran until then, whether it still does or the launcher has
        died."""
        if self.attempt_ns is not None:
            self.jobs.append(self._attempt("RUNNING", self.attempt_ns, None)._replace(known_ns=self.begin_ns + last_ns))

    def _sized(self, event: AttemptSized) -> None:
        self.hosts, self.nodes = event.hosts, event.nodes
        whole = event.nodes == self.started.nodes
        self.node_ranks = event.node_ranks or (
            self.first_ranks if whole else (self.started.ranks_per_node,) * event.nodes
        )
        self.ranks = sum(self.node_ranks)

    def _failed(self, now_ns: int, event: AttemptFailed) -> None:
        node = "" if event.node is None else self._host(event.node, "")
        if event.kind == "user":
            self._saw(now_ns, node, "program_error", "warn", event.reason, user_made=True)
        state = "CANCELLED" if event.stopped else "NODE_FAIL" if event.kind == "infrastructure" else "FAILED"
        self._ended(now_ns, state)

    def _differed(self, now_ns: int, event: CorruptionReport) -> None:
        """Of each node whose ranks differ from a majority; of none, where nothing says which is right."""
        self.differed = True
        nodes = {_node_of(rank, self.node_ranks) for rank in event.suspects} if event.decided else {None}
        for node in sorted(nodes, key=lambda number: -1 if number is None else number):
            name = "" if node is None else self._host(node, "")
            self._saw(now_ns, name, "corruption", "high", event.reason, user_made=True)

    def _ended(self, now_ns: int, state: str) -> None:
        if self.attempt_ns is None:
            return
        self.jobs.append(self._attempt(state, self.attempt_ns, now_ns))
        self.attempt_ns = None

    def _attempt(self, state: str, start_ns: int, end_ns: int | None) -> JobRow:
        signal = self.exit_code - 128 if 128 < self.exit_code < 192 else 0
        return JobRow(
            self.job, "", state, self.nodes, self.ranks, self.begin_ns, start_ns, end_ns, self.exit_code, signal,
            ",".join(self.hosts), "", source="run",
        )  # fmt: skip

    def _host(self, node: int, host: str) -> str:
        named = host or (self.hosts[node] if 0 <= node < len(self.hosts) else f"node-{node}")
        return printable(named, MAX_NAME)

    def _saw(self, now_ns: int, node: str, symptom: str, severity: str, words: str, *, user_made: bool = False) -> None:
        at = EventRow(
            now_ns, node, symptom, "", "high" if severity == "high" else "warn", "run", "", "", self.job, user_made,
            printable(words),
        )  # fmt: skip
        self.events.append(at)


def _node_of(rank: int, node_ranks: Sequence[int]) -> int | None:
    """None: there is no such rank."""
    first = 0
    for node, count in enumerate(node_ranks):
        if first <= rank < first + count:
            return node
        first += count
    return None


def rows_of_run(log: Sequence[Logged], *, name: str, latest_ns: int = LATEST_NS) -> tuple[list[JobRow], list[EventRow]]:
    """Raises `UsageError` where the log has no `JobStarted`, before which nothing has a time of day, and where a time
    is before 2000 or after `latest_ns`."""
    started = next((entry.event for entry in log if isinstance(entry.event, JobStarted)), None)
    if started is None:
        raise UsageError(f"{name}: the event log does not say when the job started")
    begin_s = started.wall_time_s
    last_ns = max(entry.at_ns for entry in log)
    if not (math.isfinite(begin_s) and begin_s * SECOND >= EARLIEST_NS and begin_s * SECOND + last_ns <= latest_ns):
        raise UsageError(f"{name}: the times of the event log are before 2000 or in the future: a clock was wrong")
    run = _Run(started)
    for entry in log:
        run.take(entry)
    run.finish(last_ns)
    return run.jobs, run.events
