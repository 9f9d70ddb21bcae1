"""Which failures are followed by another attempt."""

from __future__ import annotations

import pytest

from fireflyer.base.events import CheckpointReport, StepReport
from fireflyer.cluster.core.blame import Failure, failure_of_end
from fireflyer.cluster.core.restarts import MAX_PORT_RETRIES, Decision, Restarts
from fireflyer.cluster.schema.wire import RankEnd, RankError

YES = Decision(True, "")


def ended(code: int = 1, *, rank: int = 0, **more: object) -> Failure:
    return failure_of_end(RankEnd(0, rank, code, False, **more), 0, nodes=1)  # type: ignore[arg-type]


def raised(kind: str = "ValueError", line: int = 41, *, message: str = "bad", rank: int = 0) -> Failure:
    return ended(rank=rank, error=RankError(kind, message, "train.py", line))


class Job:
    """Attempt after attempt of one job."""

    def __init__(self, max_restarts: int = 9) -> None:
        self.restarts = Restarts(max_restarts)
        self.attempt = 0

    def fails(self, failure: Failure, *, port_taken: bool = False) -> Decision:
        decision = self.restarts.decide(failure, attempt=self.attempt, port_taken=port_taken)
        self.attempt += 1
        if decision.restart:
            self.restarts.begin_attempt()
        return decision

    def steps(self, step: int) -> None:
        self.restarts.report(StepReport(0, self.attempt, step, 1, 1, None, 1))

    def saves(self, step: int, error: str | None = None) -> None:
        self.restarts.report(CheckpointReport(0, self.attempt, step, 1, 1, 1, error))


@pytest.mark.parametrize("failure", [raised(), ended(1), ended(3), ended(139)], ids=["error", "1", "3", "SIGSEGV"])
def test_the_same_failure_twice_without_progress_ends_the_job(failure: Failure) -> None:
    job = Job()
    assert job.fails(failure) == YES
    second = job.fails(failure)
    assert not second.restart
    assert second.why == (
        "not restarted: attempt 0 failed in the same way, and no newer step or checkpoint was reported"
    )


def test_another_rank_and_another_message_are_the_same_failure() -> None:
    job = Job()
    assert job.fails(raised(message="bad batch 17", rank=0)).restart
    assert not job.fails(raised(message="bad batch 18", rank=3)).restart


@pytest.mark.parametrize("other", [raised("KeyError"), raised(line=42), ended(1), ended(139)])
def test_another_type_line_or_exit_code_is_another_failure(other: Failure) -> None:
    job = Job()
    assert job.fails(raised()).restart
    assert job.fails(other).restart
    assert not job.fails(raised()).restart, "the first again, still without progress"


def test_a_newer_step_or_checkpoint_in_between_allows_another_restart() -> None:
    job = Job()
    job.steps(57)
    assert job.fails(raised()).restart
    job.steps(58)
    assert job.fails(raised()).restart
    job.steps(57)
    job.saves(50)
    assert job.fails(raised()).restart
    job.steps(58)
    job.saves(60, error="disk full")
    assert not job.fails(raised()).restart, "it came back to the step at which it failed, and saved nothing"


def test_a_report_that_comes_after_the_failure_is_no_progress_of_the_next_attempt() -> None:
    restarts = Restarts(9)
    assert restarts.decide(raised(), attempt=0, port_taken=False).restart
    restarts.report(StepReport(0, 0, 7, 1, 1, None, 1))
    restarts.begin_attempt()
    assert not restarts.decide(raised(), attempt=1, port_taken=False).restart


@pytest.mark.parametrize(
    "failure",
    [
        ended(137),
        ended(137, out_of_memory="cgroup limit 512 MiB"),
        raised("fireflyer.base.errors.PeerFailed"),
        Failure(1, None, 1, "node 1 was lost: killed", "infrastructure"),
    ],
    ids=["killed", "out of memory", "gave up on a peer", "lost node"],
)
def test_failures_of_the_infrastructure_are_restarted_until_the_budget_is_used_up(failure: Failure) -> None:
    assert failure.kind == "infrastructure"
    job = Job(max_restarts=3)
    assert [job.fails(failure) for _ in range(3)] == [YES] * 3
    assert job.fails(failure) == Decision(False, "all 3 restarts are used up (--max-restarts)")


def test_without_restarts_a_failure_of_the_infrastructure_says_what_would_help() -> None:
    assert Job(0).fails(ended(137)) == Decision(False, "not restarted (--max-restarts is 0)")
    assert Job(0).fails(raised()) == Decision(False, "")


def test_a_taken_port_is_no_failure_of_the_job_a_few_times() -> None:
    job = Job(1)
    assert [job.fails(ended(1), port_taken=True).restart for _ in range(MAX_PORT_RETRIES)] == [True] * MAX_PORT_RETRIES
    assert job.fails(ended(1), port_taken=True).restart
    assert not job.fails(ended(1), port_taken=True).restart


def test_kinds_of_failure() -> None:
    assert raised().kind == "user"
    assert {ended(code).kind for code in (1, 2, 139, 143, 126)} == {"unknown"}
