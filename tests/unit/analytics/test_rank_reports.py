"""The log of a run without a launcher: what each rank wrote by itself, put together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fireflyer.analytics.rank_reports import merge_rank_reports
from fireflyer.base.errors import DataCorruption
from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    JobEvent,
    JobFinished,
    JobStarted,
    Logged,
    PeerFailureReport,
    RankExited,
    ResumeReport,
    StepReport,
    decode_log,
)
from fireflyer.base.launch import RankEnvironment
from fireflyer.cli import main
from fireflyer.cli.output import read_events
from fireflyer.runtime.reporter import Reporter

RANKS = 2
S = 1_000_000_000


def step_of(rank: int, attempt: int, step: int) -> StepReport:
    return StepReport(rank, attempt, step, 4, 0, 1.0 / step, S // 2)


def started(rank: int, attempt: int, start_s: int, *events: JobEvent, end: int | None = 0) -> tuple[str, list[Logged]]:
    """The file of a rank that began at `start_s` and wrote one event a second."""
    all_events: list[JobEvent] = [JobStarted("job", ("t.py",), 1, RANKS, 3, float(start_s)), AttemptStarted(attempt)]
    all_events += [ResumeReport(rank, attempt, 0, None), *events]
    all_events += [] if end is None else [RankExited(rank, attempt, end)]
    entries = [Logged((start_s + number) * S, event) for number, event in enumerate(all_events)]
    return f"rank-{rank:05d}-{attempt:05d}-{start_s * S:020d}-77.jsonl", entries


def kinds(log: list[Logged]) -> list[str]:
    return [type(entry.event).__name__ for entry in log]


def of_kind(log: list[Logged], kind: type) -> list[JobEvent]:
    return [entry.event for entry in log if isinstance(entry.event, kind)]


def test_a_run_that_went_through_is_finished() -> None:
    log = merge_rank_reports(dict(started(rank, 0, 100, *(step_of(rank, 0, n) for n in (1, 2))) for rank in range(2)))
    assert kinds(log)[:2] == ["JobStarted", "AttemptStarted"]
    assert log[-1].event == JobFinished(0, "all ranks have ended")
    assert (log[0].at_ns, log[-1].at_ns) == (0, 5 * S)
    assert [entry.at_ns for entry in log] == sorted(entry.at_ns for entry in log)
    assert len(of_kind(log, StepReport)) == 4


def test_the_rank_that_was_killed_is_the_one_that_wrote_no_end() -> None:
    files = dict([started(0, 0, 100, step_of(0, 0, 1), end=1), started(1, 0, 101, step_of(1, 0, 1), end=None)])
    files |= dict(started(rank, 1, 200 + rank, step_of(rank, 1, 2)) for rank in range(2))
    log = merge_rank_reports(files)
    (failure,) = of_kind(log, AttemptFailed)
    assert failure == AttemptFailed(0, "rank 1 was killed: it reported no end", True, rank=1)
    assert of_kind(log, AttemptStarted) == [AttemptStarted(0), AttemptStarted(1)]
    assert isinstance(log[-1].event, JobFinished)


def test_whom_a_collective_named_is_blamed_before_those_that_wrote_nothing() -> None:
    told = PeerFailureReport(0, 0, 1, "rank 1 sent nothing")
    log = merge_rank_reports(dict([started(0, 0, 100, told, end=1), started(1, 0, 100, end=None)]))
    assert log[-1].event == JobFinished(1, "rank 1 failed the others, as rank 0 saw it")


def test_a_second_launch_in_the_same_directory_goes_on_with_the_count() -> None:
    files = dict(
        started(rank, 0, 100 + 100 * launch, end=None if launch < 2 else 0) for rank in (0, 1) for launch in range(3)
    )
    log = merge_rank_reports(files)
    assert of_kind(log, AttemptStarted) == [AttemptStarted(0), AttemptStarted(1), AttemptStarted(2)]
    resumed = [entry.event for entry in log if isinstance(entry.event, ResumeReport)]
    assert sorted(event.attempt for event in resumed) == [0, 0, 1, 1, 2, 2]


def test_a_run_that_goes_on_or_was_killed_whole_has_no_end() -> None:
    log = merge_rank_reports(dict(started(rank, 0, 100, end=None) for rank in range(2)))
    assert not of_kind(log, JobFinished)
    log = merge_rank_reports(dict([started(0, 0, 100)]))
    assert not of_kind(log, JobFinished), "one of two ranks has written that it ended"


def test_clocks_of_machines_that_differ_do_not_turn_time_back() -> None:
    files = dict([started(0, 0, 100, step_of(0, 0, 1)), started(1, 0, 90, step_of(1, 0, 1))])
    files |= dict([started(0, 1, 98), started(1, 1, 97)])
    times = [entry.at_ns for entry in merge_rank_reports(files)]
    assert times == sorted(times)
    assert times[0] == 0


def test_without_any_file_of_a_rank_the_error_is_clear() -> None:
    with pytest.raises(DataCorruption, match="no start of a job"):
        merge_rank_reports({"notes.jsonl": [Logged(0, AttemptStarted(0))]})


def test_a_rank_without_a_launcher_writes_its_own_file_and_ff_report_shows_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in range(RANKS):
        env = RankEnvironment(rank=rank, world_size=RANKS, local_rank=rank, local_world_size=RANKS)
        with Reporter.from_environment(env, run_dir="run") as reporter:
            reporter.resume(ResumeReport(rank, 0, 0, None))
            reporter.step(step_of(rank, 0, 1))
    log = read_events("run")
    assert isinstance(log[-1].event, JobFinished)
    assert log[-1].event.exit_code == 0
    assert main(["report", "run"]) == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_what_a_killed_rank_was_writing_is_left_out_and_a_failing_one_says_so(tmp_path: Path) -> None:
    env = RankEnvironment(run_dir=str(tmp_path))
    reporter = Reporter.from_environment(env)
    reporter.step(step_of(0, 0, 1))
    reporter.__exit__(KeyError, None, None)
    (path,) = (tmp_path / "reports").iterdir()
    whole = path.read_bytes()
    assert decode_log(whole.splitlines(keepends=True))[-1].event == RankExited(0, 0, 1)
    path.write_bytes(whole[:-5])
    assert kinds(read_events(str(tmp_path)))[-1] == "StepReport"


def test_a_directory_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with Reporter.from_environment(RankEnvironment(), run_dir=os.path.join(tmp_path, "file")) as reporter:
        reporter.step(step_of(0, 0, 1))
    assert "steps are not reported" in caplog.text
