"""What the account makes of the cases that a generator does not think of."""

from __future__ import annotations

from tests.support.jobs.job_logs import example_log

from fireflyer.analytics.accounting import account
from fireflyer.analytics.report import build_report
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
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
    SkippedCheckpoint,
    StepReport,
    Suspended,
    SuspendRequested,
)
from fireflyer.base.units import MS, SECOND

STARTED = JobStarted("j", ("train.py",), 1, 2, 3, 0.0)


def log_of(*entries: tuple[int, JobEvent]) -> list[Logged]:
    """Instants in milliseconds."""
    return [Logged(at_ms * MS, event) for at_ms, event in entries]


def step(
    rank: int, attempt: int, number: int, *, loss: float | None = None, ms: int = 100, stall: int = 0
) -> StepReport:
    return StepReport(rank, attempt, number, 1, 10, loss, ms * MS, stall * MS)


def resume(rank: int, attempt: int, number: int) -> ResumeReport:
    return ResumeReport(rank, attempt, number, None)


def test_the_example_tells_its_story() -> None:
    result = account(example_log())
    (failure,) = result.failures
    assert (failure.node, failure.rank, failure.injected) == (1, None, "kill-node=1")
    assert (failure.broken_step, failure.resumed_step, failure.lost_steps) == (71, 60, 10)
    assert failure.resumed_checkpoint == "step-00000060"
    assert failure.detection_ns == 700 * MS
    assert failure.restart_ns == 4 * SECOND
    assert [point.step for point in result.discarded] == list(range(61, 71))
    assert [(c.attempt, c.step) for c in result.checkpoints] == [(0, 20), (0, 40), (0, 60), (1, 80), (1, 100), (1, 120)]
    assert result.tokens == 120 * 4 * 1024
    assert (result.first_step, result.last_step, result.steps, result.exit_code) == (0, 120, 120, 0)


def test_time_in_flight_is_a_share_of_the_steps_of_all_ranks_and_attempts() -> None:
    log = example_log()
    reports = [entry.event for entry in log if isinstance(entry.event, StepReport)]
    job = account(log + log)
    assert job.rank_steps == len(reports)
    assert job.rank_step_ns == sum(report.productive_ns for report in reports)
    assert job.allreduce_ns == sum(report.allreduce_ns for report in reports)
    (row,) = [row for row in build_report(log).summary if row.label == "Allreduce"]
    assert f"in flight for {job.allreduce_ns / job.rank_step_ns:.0%} of the step time" in row.note
    assert row.value == "≥ 1.0 GB/s"
    assert row.note.endswith("while waiting for slower ranks; 8.0 MiB per step and rank")


def test_an_empty_log_is_a_job_of_no_length() -> None:
    result = account([])
    assert result.wall_ns == result.parts.total_ns == 0
    assert not result.reported
    assert result.exit_code is None


def test_a_script_that_reports_nothing_is_unknown_not_zero() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (10, AttemptStarted(0)),
            (5000, RankExited(1, 0, 1)),
            (5100, AttemptFailed(0, "rank 1 exited with 1", True)),
            (6000, AttemptStarted(1)),
            (9000, JobFinished(0, "done")),
        )
    )
    assert not result.reported
    assert result.parts.unknown_ns == 8000 * MS
    assert result.parts.restart_ns == 1000 * MS
    assert result.parts.productive_ns == 0
    assert result.failures[0].broken_step is None
    assert result.failures[0].rank == 1


def test_a_step_counts_when_every_reporting_rank_reported_it() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (1000, resume(0, 0, 0)),
            (1500, resume(1, 0, 0)),
            (1600, step(0, 0, 1)),
            (1600, step(1, 0, 1)),
            (1700, step(0, 0, 2, loss=3.0)),
            (1900, RankExited(1, 0, 137)),
            (2000, AttemptFailed(0, "rank 1 died", False)),
            (2100, JobFinished(137, "rank 1 died")),
        )
    )
    assert result.parts.startup_ns == 1500 * MS
    assert result.parts.productive_ns == 100 * MS
    assert result.parts.lost_ns == 300 * MS
    assert result.parts.other_ns == 200 * MS
    assert result.last_step == 1
    assert result.failures[0].broken_step == 2
    assert [point.step for point in result.discarded] == [2]


def test_a_script_where_only_rank_0_reports_steps_counts_them() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (1100, step(0, 0, 1)),
            (1200, step(0, 0, 2)),
            (1300, JobFinished(0, "")),
        )
    )
    assert result.parts.startup_ns == 1000 * MS
    assert result.parts.productive_ns == 200 * MS
    assert result.parts.other_ns == 100 * MS
    assert result.last_step == 2


def test_a_failure_before_the_first_step_and_a_restart_that_dies_are_startup_and_restart() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (700, NodeLost(0, 0, "gone")),
            (800, AttemptFailed(0, "node 0 lost", True)),
            (900, AttemptStarted(1)),
            (1200, RankExited(0, 1, 1)),
            (1200, AttemptFailed(1, "rank 0 exited with 1", True)),
            (1300, AttemptStarted(2)),
            (2000, resume(0, 2, 0)),
            (2000, resume(1, 2, 0)),
            (2100, step(0, 2, 1)),
            (2100, step(1, 2, 1)),
            (2100, JobFinished(0, "")),
        )
    )
    assert result.parts.startup_ns == 700 * MS
    assert result.parts.restart_ns == 1300 * MS
    assert result.parts.productive_ns == 100 * MS
    assert [failure.restart_ns for failure in result.failures] == [None, 800 * MS]
    assert [failure.broken_step for failure in result.failures] == [None, None]


def test_a_late_report_of_a_dead_attempt_counts_but_takes_no_time_from_the_next() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, resume(0, 0, 0)),
            (200, step(0, 0, 1)),
            (250, CheckpointReport(0, 0, 1, 5, 0, 0)),
            (300, AttemptFailed(0, "x", True)),
            (350, AttemptStarted(1)),
            (400, step(0, 0, 2)),
            (500, resume(0, 1, 2)),
            (600, step(0, 1, 3)),
            (600, JobFinished(0, "")),
        )
    )
    assert result.failures[0].broken_step == 3
    assert result.parts.restart_ns == 200 * MS
    assert result.parts.productive_ns == 300 * MS
    assert result.parts.lost_ns == 0


def test_steps_belong_to_the_attempt_whose_checkpoint_survived() -> None:
    """Attempt 1 starts from nothing and dies; attempt 2 finds attempt 0's checkpoint again."""
    entries: list[tuple[int, JobEvent]] = [(0, STARTED), (0, AttemptStarted(0)), (100, resume(0, 0, 0))]
    entries += [(100 + 100 * n, step(0, 0, n, loss=float(n))) for n in range(1, 6)]
    entries += [(650, AttemptFailed(0, "x", True)), (700, AttemptStarted(1)), (800, resume(0, 1, 0))]
    entries += [(800 + 100 * n, step(0, 1, n, loss=10.0 + n)) for n in range(1, 3)]
    entries += [(1050, AttemptFailed(1, "x", True)), (1100, AttemptStarted(2)), (1200, resume(0, 2, 4))]
    entries += [(1300, step(0, 2, 5, loss=25.0)), (1300, JobFinished(0, ""))]
    result = account(log_of(*entries))
    assert [(point.step, point.attempt) for point in result.losses] == [(1, 0), (2, 0), (3, 0), (4, 0), (5, 2)]
    assert [(point.step, point.attempt) for point in result.discarded] == [(5, 0), (1, 1), (2, 1)]
    assert result.parts.productive_ns == 500 * MS
    assert result.parts.lost_ns == 100 * MS + 50 * MS + 200 * MS + 50 * MS
    assert [failure.lost_steps for failure in result.failures] == [1, 2]


def test_a_checkpoint_proves_the_step_whose_last_report_was_lost() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, resume(0, 0, 0)),
            (100, resume(1, 0, 0)),
            (200, step(0, 0, 1)),
            (200, step(1, 0, 1)),
            (300, step(0, 0, 2)),
            (320, CheckpointReport(0, 0, 2, 5, 0, 0)),
            (400, AttemptFailed(0, "x", True)),
            (400, AttemptStarted(1)),
            (500, resume(0, 1, 2)),
            (500, resume(1, 1, 2)),
            (600, step(0, 1, 3)),
            (600, step(1, 1, 3)),
            (600, JobFinished(0, "")),
        )
    )
    assert result.failures[0].broken_step == 3
    assert result.failures[0].lost_steps == 0
    assert result.parts.productive_ns == 300 * MS


def test_a_job_that_the_user_stopped_has_not_failed() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, resume(0, 0, 0)),
            (200, step(0, 0, 1)),
            (290, RankExited(0, 0, 130)),
            (295, AttemptFailed(0, "stopped by SIGINT", False, stopped=True)),
            (300, JobFinished(130, "stopped by SIGINT")),
        )
    )
    assert result.failures == ()
    assert result.stopped
    assert result.parts.lost_ns == 0
    assert result.parts.other_ns == 100 * MS


def test_a_job_that_was_suspended_has_not_failed_whatever_its_last_ranks_ended_with() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, resume(0, 0, 0)),
            (200, step(0, 0, 1)),
            (210, SuspendRequested(0)),
            (290, RankExited(0, 0, 85)),
            (295, Suspended(0, horizon=1)),
            (300, JobFinished(85, "suspended")),
        )
    )
    assert result.failures == ()
    assert result.stopped
    assert result.suspended
    assert result.parts.lost_ns == 0


def test_the_launchers_verdict_names_the_culprit_not_the_first_who_fell() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, resume(0, 0, 0)),
            (300, RankExited(0, 0, 1)),
            (301, RankExited(1, 0, 137)),
            (600, AttemptFailed(0, "rank 1 was killed by SIGKILL", True, node=0, rank=1)),
        )
    )
    (failure,) = result.failures
    assert (failure.node, failure.rank, failure.noticed_ns) == (0, 1, 300 * MS)


def test_a_log_that_ends_at_a_lost_node_knows_the_failure() -> None:
    result = account(
        log_of((0, STARTED), (0, AttemptStarted(0)), (100, resume(0, 0, 0)), (300, NodeLost(0, 0, "silent")))
    )
    (failure,) = result.failures
    assert failure.reason == "node 0 lost: silent"
    assert failure.resumed_step is None
    assert result.parts.lost_ns == 200 * MS


def test_stalls_are_the_larger_of_what_steps_and_checkpoints_say_and_never_exceed_the_time() -> None:
    def stalled(report_stall: int, step_stall: int) -> int:
        result = account(
            log_of(
                (0, STARTED),
                (0, AttemptStarted(0)),
                (0, resume(0, 0, 0)),
                (100, step(0, 0, 1, ms=60, stall=step_stall)),
                (100, CheckpointReport(0, 0, 1, 5, report_stall * MS, 0)),
                (100, JobFinished(0, "")),
            )
        )
        assert result.parts.total_ns == 100 * MS
        return result.parts.checkpoint_ns // MS

    assert stalled(20, 0) == 20
    assert stalled(0, 30) == 30
    assert stalled(20, 30) == 30
    assert stalled(500, 0) == 100


def test_what_a_restart_passed_over_and_what_failed_to_be_saved_are_kept() -> None:
    passed = (SkippedCheckpoint("step-00000004", "shard 1 has a wrong checksum"),)
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (0, resume(0, 0, 0)),
            (10, step(0, 0, 1)),
            (11, CheckpointReport(0, 0, 1, 5, 0, 0, "no space left")),
            (12, FaultInjected("kill-rank=0", 0, 1)),
            (20, AttemptFailed(0, "x", True)),
            (21, AttemptStarted(1)),
            (22, ResumeReport(0, 1, 0, None, passed, 5)),
            (30, JobFinished(0, "")),
        )
    )
    assert result.failures[0].passed_over == passed
    assert result.failures[0].detection_ns == 8 * MS
    assert result.checkpoints[0].error == "no space left"


def test_reports_of_ranks_and_attempts_that_do_not_exist_are_ignored() -> None:
    honest = log_of((0, STARTED), (0, AttemptStarted(0)), (100, resume(0, 0, 0)), (200, step(0, 0, 1)))
    hostile = log_of((150, step(7, 0, 10**18)), (150, step(0, 9, 5)), (150, step(-1, 0, 5)), (160, step(0, 0, -5)))
    assert account(honest + hostile) == account(honest)


def test_of_two_attempts_that_did_a_step_the_newer_one_saved_it() -> None:
    """Attempt 0 did steps 1 to 5; attempt 1 did 3 to 4 again and died at once; attempt 2 resumed from step 4."""
    entries: list[tuple[int, JobEvent]] = [(0, STARTED), (0, AttemptStarted(0)), (100, resume(0, 0, 0))]
    entries += [(100 + 100 * n, step(0, 0, n, loss=float(n))) for n in range(1, 6)]
    entries += [(650, AttemptFailed(0, "x", True)), (700, AttemptStarted(1)), (800, resume(0, 1, 2))]
    entries += [(600 + 100 * n, step(0, 1, n, loss=10.0 + n)) for n in range(3, 5)]
    entries += [(1050, AttemptFailed(1, "x", True)), (1100, AttemptStarted(2)), (1200, resume(0, 2, 4))]
    entries += [(1300, step(0, 2, 5, loss=25.0)), (1300, JobFinished(0, ""))]
    result = account(log_of(*entries))
    assert [(point.step, point.attempt) for point in result.losses] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert [failure.lost_steps for failure in result.failures] == [3, 0]


def test_a_step_whose_report_was_lost_counts_as_long_as_the_average_one() -> None:
    entries: list[tuple[int, JobEvent]] = [(0, STARTED), (0, AttemptStarted(0)), (0, resume(0, 0, 0))]
    entries += [(100 * n, step(0, 0, n, ms=90)) for n in (1, 2, 4)]
    result = account(log_of(*entries, (400, JobFinished(0, ""))))
    assert result.parts.productive_ns == 4 * 90 * MS
    assert result.parts.other_ns == 40 * MS
    assert result.last_step == 4


def test_a_resume_report_that_comes_after_the_first_step_does_not_hide_it() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (100, step(0, 0, 1)),
            (200, step(0, 0, 2)),
            (900, resume(0, 0, 0)),
            (1000, JobFinished(0, "")),
        )
    )
    assert result.parts.startup_ns == 100 * MS
    assert result.parts.productive_ns == 100 * MS
    assert result.parts.other_ns == 800 * MS


def test_a_checkpoint_of_a_step_that_nobody_reported_proves_nothing() -> None:
    result = account(
        log_of(
            (0, STARTED),
            (0, AttemptStarted(0)),
            (0, resume(0, 0, 0)),
            (100, step(0, 0, 1)),
            (150, CheckpointReport(0, 0, 10**15, 5, 0, 0)),
            (200, JobFinished(0, "")),
        )
    )
    assert result.last_step == 1
    assert result.parts.productive_ns == 100 * MS


def test_steps_of_a_smaller_attempt_count_when_its_own_ranks_reported_them() -> None:
    result = account(
        log_of(
            (0, JobStarted("j", ("train.py",), 3, 1, 3, 0.0, 2)),
            (0, AttemptStarted(0)),
            (500, AttemptSized(0, 3, ("a", "b", "c"))),
            *((1000, step(rank, 0, 1)) for rank in range(3)),
            (2000, AttemptFailed(0, "node 2 was lost", True, node=2)),
            (3000, AttemptStarted(1)),
            (3500, AttemptSized(1, 2, ("a", "b"))),
            (3900, resume(0, 1, 1)),
            (3900, resume(1, 1, 1)),
            *((4000, step(rank, 1, 2, loss=2.0)) for rank in range(2)),
            (5000, JobFinished(0, "done")),
        )
    )
    assert (result.last_step, [point.step for point in result.losses]) == (2, [2])
