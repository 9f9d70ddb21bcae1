"""The live view: what it says of a job, and what it does to a terminal."""

from __future__ import annotations

import io
import re
import threading
from typing import TextIO

import pytest
from rich.console import Console
from tests.support.jobs.job_logs import Break, JobScript, example_log, make_log

from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    AttemptStarted,
    CheckpointReport,
    JobEvent,
    JobFinished,
    JobStarted,
    Logged,
    NodeLost,
    RankExited,
    ResumeReport,
    SaturationReport,
    SkippedCheckpoint,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.units import SECOND
from fireflyer.cli.jobs.progress import WINDOW_STEPS, JobProgress
from fireflyer.cli.jobs.view import QUEUE_ITEMS, JobView, PlainPrinter, TerminalPrinter, printer_for, tame
from fireflyer.cluster.schema.job import RankLine

DEADLINE_S = 30.0


def line(text: str, *, rank: int = 0, cut: bool = False) -> RankLine:
    return RankLine(rank, 0, 0, "stdout", text, cut)


def told(log: list[Logged]) -> tuple[JobProgress, list[str]]:
    progress = JobProgress()
    return progress, [notice for entry in log for notice in progress.feed(entry)]


def test_the_status_follows_the_steps() -> None:
    progress, _ = told(example_log()[:-1])
    assert progress.status() == (
        "step 120 · loss 2.1174 · 16,140 tokens/s · allreduce ≥ 1.0 GB/s (3% of the step) · saved step 120 · attempt 1"
    )


def test_before_the_job_has_started_there_is_nothing_to_say() -> None:
    assert JobProgress().status() == ""
    progress, _ = told(example_log()[:1])
    assert progress.status() == "starting"


def test_notices_tell_the_failure_once() -> None:
    _, notices = told(example_log())
    assert notices == [
        "job demo: 2 nodes x 2 ranks",
        "training from the start",
        "injecting a fault: kill-node=1, at step 71",
        "node 1 lost: its supervisor was killed by signal 9",
        "attempt 0 failed: node 1 lost; restarting",
        "attempt 1 starts",
        "resuming from step 60 (step-00000060)",
        "job ended after 42.3 s: all ranks exited with 0",
    ]


def test_ranks_that_leave_are_not_told_as_failures() -> None:
    progress, _ = told([Logged(0, JobStarted("j", (), 1, 2, 1, 0.0)), Logged(1, AttemptStarted(0))])
    entries: list[JobEvent] = [
        SuspendRequested(0),
        RankExited(1, 0, 85),
        RankExited(0, 0, 1, "rank 0 exited with code 1"),
        Suspended(0, 7),
    ]
    assert [line for event in entries for line in progress.feed(Logged(2, event))] == [
        "suspending: the ranks save and leave",
        "attempt 0 suspended at 7",
    ]
    assert progress.status() == "suspending"


def test_a_script_that_reports_nothing_runs_once_it_has_printed_and_ends_without_a_second_word() -> None:
    progress, _ = told([Logged(0, JobStarted("j", (), 1, 1, 1, 0.0)), Logged(1, AttemptStarted(0))])
    assert progress.status() == "starting"
    progress.printed(0)
    assert progress.status() == "running"
    progress.feed(Logged(2, AttemptFailed(0, "x", True)))
    progress.feed(Logged(3, AttemptStarted(1)))
    progress.printed(0)
    assert progress.status() == "restarting · attempt 1"
    progress.printed(1)
    assert progress.status() == "running · attempt 1"
    progress.feed(Logged(4, JobFinished(0, "done")))
    assert progress.status() == ""


def test_what_a_rank_prints_on_its_way_back_is_no_progress() -> None:
    progress, _ = told([entry for entry in example_log() if isinstance(entry.event, JobStarted | StepReport)][:20])
    progress.feed(Logged(0, AttemptStarted(1)))
    progress.printed(1)
    assert progress.status().startswith("restarting · step")


def test_ranks_that_fall_with_the_first_are_not_told_one_by_one() -> None:
    _, notices = told([Logged(0, RankExited(rank, 0, 143)) for rank in range(100)])
    assert notices == ["rank 0 exited with code 143"]
    _, notices = told([Logged(0, NodeLost(1, 0, "silent")), Logged(1, RankExited(0, 0, 143))])
    assert notices == ["node 1 lost: silent"]


def test_what_was_saved_is_what_can_be_resumed_from() -> None:
    progress, notices = told(
        [
            Logged(0, JobStarted("j", (), 1, 1, 1, 0.0)),
            Logged(1, AttemptStarted(0)),
            Logged(2, CheckpointReport(0, 0, 40, 1, 0, 0)),
            Logged(3, CheckpointReport(0, 0, 60, 1, 0, 0, "no space\nleft")),
            Logged(4, AttemptFailed(0, "x", True)),
            Logged(5, AttemptStarted(1)),
            Logged(6, ResumeReport(0, 1, 20, "step-20", (SkippedCheckpoint("step-40", "bad checksum"),))),
        ]
    )
    assert progress.saved_step == 20
    assert progress.status() == "step 20 · saved step 20 · attempt 1"
    assert "checkpoint of step 60 failed: no space left; training goes on" in notices
    assert notices[-2:] == ["skipped checkpoint step-40: bad checksum", "resuming from step 20 (step-20)"]


def test_rates_are_of_the_last_steps_and_memory_is_bounded() -> None:
    progress = JobProgress()
    progress.feed(Logged(0, AttemptStarted(0)))
    for step in range(1, 1001):
        speed = 1 if step < 900 else 10
        progress.feed(Logged(step * SECOND, StepReport(0, 0, step, 1, 100 * speed, 1.0, SECOND)))
    assert progress.tokens_per_s == pytest.approx(1000)
    assert len(progress._recent) == WINDOW_STEPS


def test_a_second_job_starts_afresh() -> None:
    progress, _ = told(example_log())
    progress.feed(make_log(JobScript())[0][0])
    assert (progress.step, progress.loss, progress.saved_step, progress.attempt) == (0, None, None, 0)
    assert progress.status() == "starting"


@pytest.mark.parametrize(
    ("text", "tamed"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[2J\x1b[1;1Hhome", "home"),
        ("\x1b]0;title\x07rest", "rest"),
        ("\x1b]0;title without end", ""),
        ("\x1bPdevice control\x1b\\rest", "rest"),
        ("10%\r20%\r30%", "30%"),
        ("30%\r", "30%"),
        ("bell\x07 back\x08 \x9b31m \x7f", "bell back 31m "),
        ("lone \x1b", "lone "),
        ("\x1bcreset", "reset"),
        ("a\tb", "a       b"),
    ],
)
def test_a_rank_cannot_drive_the_terminal(text: str, tamed: str) -> None:
    assert tame(text) == tamed


def run_view(printer: PlainPrinter | TerminalPrinter, *, ranks_only: bool = False) -> None:
    with JobView(printer, ranks_only=ranks_only) as view:
        for entry in example_log():
            view.on_entry(entry)
        view.on_line(line("hello \x1b[2J[bold]world", rank=3))
        view.on_line(line("x" * 300, rank=1, cut=True))
        view.say("between the jobs")


def test_without_a_terminal_lines_are_passed_on_whole() -> None:
    out = io.StringIO()
    run_view(PlainPrinter(out))
    lines = out.getvalue().splitlines()
    assert "rank 3 | hello \x1b[2J[bold]world" in lines
    assert f"rank 1 | {'x' * 300} …" in lines
    assert "ff     | between the jobs" in lines
    assert "ff     | node 1 lost: its supervisor was killed by signal 9" in lines
    assert lines[-1].startswith("ff     | finished · step 120 · loss 2.1174")
    assert len([text for text in lines if "tokens/s" in text]) == 1


def test_quiet_prints_what_the_ranks_print_and_nothing_else() -> None:
    out = io.StringIO()
    run_view(PlainPrinter(out), ranks_only=True)
    assert out.getvalue().splitlines() == ["rank 3 | hello \x1b[2J[bold]world", f"rank 1 | {'x' * 300} …"]


def terminal(*, no_color: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=True,
        width=width,
        no_color=no_color,
        color_system="standard",
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    return console, out


def test_on_a_terminal_the_status_is_redrawn_below_the_lines_and_gone_at_the_end() -> None:
    console, out = terminal()
    run_view(TerminalPrinter(console))
    shown = out.getvalue()
    assert "hello [bold]world" in shown
    assert "\x1b[2J" not in shown
    assert f"{'x' * 300}\x1b[2m …" in shown, "a long line is left to the terminal to wrap"
    assert shown.endswith(("\x1b[2K", "\x1b[?25h")), "the status is erased and the cursor is back"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_no_color_leaves_no_colours() -> None:
    console, out = terminal(no_color=True)
    run_view(TerminalPrinter(console))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", out.getvalue())


def test_the_printer_fits_the_output() -> None:
    console, out = terminal()
    assert isinstance(printer_for(console, plain_out=out), TerminalPrinter)
    dumb = Console(file=out, force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(printer_for(dumb, plain_out=out), PlainPrinter)
    assert isinstance(printer_for(Console(file=out), plain_out=out), PlainPrinter)


class _Stuck(io.StringIO):
    """A pipe that nobody reads until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.reached = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.go.wait(DEADLINE_S)
        return super().write(text)


def test_a_reader_that_stops_never_holds_up_the_job_and_is_told_what_it_missed() -> None:
    out = _Stuck()
    with JobView(PlainPrinter(out)) as view:
        view.on_line(line("first"))
        assert out.reached.wait(DEADLINE_S)
        for number in range(QUEUE_ITEMS + 1000):
            view.on_line(line(f"line {number}"))
        out.go.set()
    assert re.search(r"ff     \| [\d,]+ lines came too fast to be shown", out.getvalue())


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_that_goes_away_does_not_end_the_job() -> None:
    out: TextIO = _Closed()
    with JobView(PlainPrinter(out)) as view:
        for number in range(QUEUE_ITEMS * 2):
            view.on_line(line(f"line {number}"))
        view.on_entry(Logged(0, JobFinished(0, "done")))


def test_the_truth_of_the_helpers_holds_for_a_script_with_two_failures() -> None:
    log = make_log(JobScript(breaks=(Break(after_step=30), Break(after_step=50, node=None))))[0]
    progress, notices = told(log)
    assert progress.attempt == 2
    assert [notice for notice in notices if notice.endswith("restarting")] == [
        "attempt 0 failed: node 1 lost; restarting",
        "attempt 1 failed: rank 0 exited with 1; restarting",
    ]


def stepping(steps: int, every_ns: int) -> JobProgress:
    progress = JobProgress()
    progress.feed(Logged(0, JobStarted("j", ("x.py",), 1, 1, 0, 0.0)))
    for step in range(1, steps + 1):
        progress.feed(Logged(step * every_ns, StepReport(0, 0, step, 1, 1, None, 1)))
    return progress


def test_a_step_that_does_not_come_is_told_with_the_time_since_the_last() -> None:
    progress = stepping(5, SECOND)
    assert "no step" not in progress.status(14 * SECOND)
    assert progress.status(17 * SECOND, live=True).endswith("step 5 · 1 tokens/s · no step for 12 s · 17 s")
    assert progress.status(95 * SECOND, live=True).endswith("no step for 1 min 30 s · 1 min 35 s")
    progress.feed(Logged(96 * SECOND, StepReport(0, 0, 6, 1, 1, None, 1)))
    assert "no step" not in progress.status(97 * SECOND)


def test_slow_steps_are_no_silence() -> None:
    progress = stepping(5, 60 * SECOND)
    assert "no step" not in progress.status(5 * 60 * SECOND + 170 * SECOND)
    assert "no step for 3 min" in progress.status(5 * 60 * SECOND + 181 * SECOND, live=True)


def test_in_a_file_the_line_changes_seldom_while_nothing_happens() -> None:
    progress = stepping(5, SECOND)
    shown = {progress.status(now_s * SECOND) for now_s in range(5, 7205)}
    assert len(shown) == 11


def test_sums_that_do_not_fit_are_told_once() -> None:
    progress = JobProgress()
    lines = [progress.feed(Logged(0, SaturationReport(rank, 0, "world", 1200, 50_000))) for rank in (3, 1)]
    noticed = (
        "fp8 overflow: 1,200 of 50,000 results of fp8 sums so far were too large and were clipped or made infinite "
        "(rank 3 noticed first); scale the numbers down before the sum, or sum them in bf16"
    )
    assert lines == [[noticed], []]


def test_hosts_are_named_when_a_node_is_lost_when_another_one_takes_its_place_and_when_one_is_left_out() -> None:
    hosts = ("a", "b"), ("a", "c"), ("a", "c"), ("a", "b")
    lost = "no heartbeat from its supervisor for 1.5 s"
    log: list[JobEvent] = [JobStarted("j", (), 2, 8, 3, 0.0), AttemptStarted(0), AttemptSized(0, 2, hosts[0])]
    log += [NodeLost(1, 0, lost, "b"), AttemptStarted(1), AttemptSized(1, 2, hosts[1])]
    log += [AttemptStarted(2), AttemptSized(2, 2, hosts[2]), AttemptStarted(3), AttemptSized(3, 2, hosts[3], ("c",))]
    _, notices = told([Logged(number, event) for number, event in enumerate(log)])
    assert notices == [
        "job j: 2 nodes x 8 ranks",
        f"node 1 (b) lost: {lost}",
        "attempt 1 starts",
        "node 1 is on c now, not on b",
        "attempt 2 starts",
        "attempt 3 starts",
        "c failed twice; this job does not use it any more",
        "node 1 is on b now, not on c",
    ]


def test_a_job_whose_size_may_change_says_so_at_the_start_and_when_it_does() -> None:
    log: list[JobEvent] = [JobStarted("j", (), 3, 8, 1, 0.0, 2), AttemptStarted(0), AttemptSized(0, 3, ("a", "b", "c"))]
    log += [AttemptStarted(1), AttemptSized(1, 2, ("a", "c")), AttemptStarted(2), AttemptSized(2, 2, ("a", "c"))]
    _, notices = told([Logged(number, event) for number, event in enumerate(log)])
    assert notices == [
        "job j: 2 to 3 nodes x 8 ranks",
        "the number of ranks may change at a restart: with fireflyer.data.ResumableSampler each step keeps its global "
        "batch; torch's DistributedSampler divides anew, as under torchrun",
        "attempt 1 starts",
        "attempt 1 has 2 nodes, not 3: a, c",
        "attempt 2 starts",
    ]
