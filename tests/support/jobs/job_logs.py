"""Event logs of jobs that never ran, with the account that is expected of them: for everything that reads a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    FaultInjected,
    JobEvent,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    ResumeReport,
    StepReport,
)
from fireflyer.base.units import MIB, MS, SECOND

__all__ = ["Break", "JobScript", "example_log", "make_log"]


@dataclass(frozen=True)
class Break:
    """The attempt dies `into_ns` after step `after_step` was done (its own count may not have begun: `after_step` equal
    to the step it resumed from), and the launcher notices `detection_ns` later. `before_ready`: dies while starting."""

    after_step: int
    into_ns: int = 40 * MS
    detection_ns: int = 700 * MS
    before_ready: bool = False
    node: int | None = 1
    injected: bool = True


@dataclass(frozen=True)
class JobScript:
    nodes: int = 2
    ranks_per_node: int = 2
    steps: int = 120
    checkpoint_every: int = 20
    step_ns: int = 250 * MS
    gap_ns: int = 3 * MS
    stall_ns: int = 12 * MS
    start_ns: int = 4 * SECOND
    tail_ns: int = 600 * MS
    breaks: tuple[Break, ...] = ()
    finish: bool = True
    resumes: bool = True
    job: str = "demo"


@dataclass
class _ExpectedAccount:
    startup_ns: int = 0
    productive_ns: int = 0
    lost_ns: int = 0
    restart_ns: int = 0
    checkpoint_ns: int = 0
    other_ns: int = 0


def loss_of(step: int) -> float:
    return 5.6 / (1 + 0.03 * step) + 0.9


class _Writer:
    def __init__(self, script: JobScript) -> None:
        self.script = script
        self.now_ns = 0
        self.entries: list[Logged] = []
        self.saved = 0

    @property
    def ranks(self) -> range:
        return range(self.script.nodes * self.script.ranks_per_node)

    def log(self, event: JobEvent, *, at_ns: int | None = None) -> None:
        self.entries.append(Logged(self.now_ns if at_ns is None else at_ns, event))

    def step(self, attempt: int, step: int) -> None:
        s = self.script
        stalled = step % s.checkpoint_every == 0
        stall_ns = s.stall_ns if stalled else 0
        self.now_ns += s.gap_ns + s.step_ns + stall_ns
        for rank in self.ranks:
            early_ns = (len(self.ranks) - 1 - rank) * 1000
            self.log(
                StepReport(
                    rank=rank,
                    attempt=attempt,
                    step=step,
                    samples=4,
                    tokens=1024,
                    loss=loss_of(step),
                    productive_ns=s.step_ns,
                    checkpoint_ns=stall_ns,
                    allreduce_bytes=8 * MIB,
                    allreduce_ns=8 * MS,
                ),
                at_ns=self.now_ns - early_ns,
            )
        if stalled:
            self.saved = step
            self.log(CheckpointReport(0, attempt, step, 24 * MIB, s.stall_ns, 90 * MS))


def make_log(script: JobScript) -> tuple[list[Logged], dict[str, int]]:
    """The log and the parts (by the names of `Parts`) that an exact account of it has."""
    w = _Writer(script)
    expected = _ExpectedAccount()
    w.log(
        JobStarted(
            script.job, ("train.py", "--steps", str(script.steps)), script.nodes, script.ranks_per_node, 3, 1.7e9
        )
    )
    kept_of_attempt: list[tuple[int, int]] = []
    pending = list(script.breaks)
    attempt = 0
    while True:
        w.log(AttemptStarted(attempt))
        began_ns = w.now_ns
        breaking = pending.pop(0) if pending else None
        w.now_ns += script.start_ns
        if breaking is not None and breaking.before_ready:
            _fail(w, breaking, attempt, step=0)
            _spend_start(expected, attempt, w.now_ns - began_ns)
            attempt += 1
            continue
        _spend_start(expected, attempt, script.start_ns)
        resumed = w.saved
        if script.resumes:
            for rank in w.ranks:
                name = f"step-{resumed:08d}" if resumed else None
                w.log(ResumeReport(rank, attempt, resumed, name, (), 200 * MS))
        last = script.steps if breaking is None else max(resumed, min(breaking.after_step, script.steps - 1))
        for step in range(resumed + 1, last + 1):
            w.step(attempt, step)
        kept_of_attempt.append((resumed, last))
        if breaking is None:
            break
        began_ns = w.now_ns
        w.now_ns += breaking.into_ns
        _fail(w, breaking, attempt, step=last + 1)
        expected.lost_ns += w.now_ns - began_ns
        attempt += 1
    if script.finish:
        w.now_ns += script.tail_ns
        expected.other_ns += script.tail_ns
        w.log(JobFinished(0, "all ranks exited with 0"))
    _spend_steps(expected, script, kept_of_attempt)
    return w.entries, {name: getattr(expected, name) for name in expected.__dataclass_fields__}


def _fail(w: _Writer, breaking: Break, attempt: int, *, step: int) -> None:
    if breaking.injected:
        w.log(
            FaultInjected(f"kill-node={breaking.node}" if breaking.node is not None else "kill-rank=0", attempt, step)
        )
    w.now_ns += breaking.detection_ns
    if breaking.node is not None:
        w.log(NodeLost(breaking.node, attempt, "its supervisor was killed by signal 9"))
    else:
        w.log(RankExited(0, attempt, 1))
    w.log(AttemptFailed(attempt, "node 1 lost" if breaking.node is not None else "rank 0 exited with 1", True))


def _spend_start(expected: _ExpectedAccount, attempt: int, spent_ns: int) -> None:
    if attempt == 0:
        expected.startup_ns += spent_ns
    else:
        expected.restart_ns += spent_ns


def _spend_steps(expected: _ExpectedAccount, s: JobScript, ranges: Sequence[tuple[int, int]]) -> None:
    for index, (first, last) in enumerate(ranges):
        floor = min((resumed for resumed, _ in ranges[index + 1 :]), default=last)
        for step in range(first + 1, last + 1):
            stall_ns = s.stall_ns if step % s.checkpoint_every == 0 else 0
            expected.checkpoint_ns += stall_ns
            if step <= floor:
                expected.productive_ns += s.step_ns
                expected.other_ns += s.gap_ns
            else:
                expected.lost_ns += s.step_ns + s.gap_ns


def example_log() -> list[Logged]:
    """A job of 120 steps on 2 x 2 ranks that lost node 1 in step 71 and resumed from step 60."""
    return make_log(JobScript(breaks=(Break(after_step=70),)))[0]
