"""Validations through Slurm: on idle nodes alone, withdrawn where a job was faster, submitted again where one was
preempted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.cluster.core.slurm.output import SlurmJob
from fireflyer.validators import slurm_jobs
from fireflyer.validators.cluster_tasks import Ended, Job
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import NodeReport, report_line
from fireflyer.validators.slurm_jobs import run_slurm_jobs

HOUR_NS = 3600 * SECOND


class FakeSlurm:
    """Slurm in one process: each time that it is asked for jobs, each job makes a step of its life."""

    def __init__(self, nodes: Sequence[str], **lives: list[str]) -> None:
        """`lives`: states of the jobs of a node, one a look; `DONE`: completed, with a report."""
        self.states = dict.fromkeys(nodes, "idle")
        self.lives = {node: iter(states) for node, states in lives.items()}
        self.submitted: list[tuple[str, ...]] = []
        self.cancelled: list[int] = []
        self._jobs: dict[int, tuple[str, str, Path, str]] = {}

    async def fleet(self, node: str = "") -> dict[str, FleetNode]:
        return {name: FleetNode(name=name, partitions=("p",), state=state) for name, state in self.states.items()}

    async def submit(self, arguments: Sequence[str], script: str, account: Account | None) -> int:
        options = dict(one.removeprefix("--").partition("=")[::2] for one in arguments)
        number = len(self.submitted) + 1
        self.submitted.append((options["nodelist"], script))
        self._jobs[number] = (options["job-name"], options["nodelist"], Path(options["output"]), "PENDING")
        self.states[options["nodelist"]] = "allocated"
        return number

    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]:
        found = []
        for number, (name, node, output, _) in self._jobs.items():
            if name not in names:
                continue
            state = next(self.lives[node]) if node in self.lives else "DONE"
            if state == "DONE":
                report = NodeReport(events=(), record=NodeRecord(node="x", model="m", seen_ns=1, figures={"x": 1.0}))
                output.write_text(f"a line of a library\n{report_line(report)}\n")
                state = "COMPLETED"
            if state not in ("PENDING", "RUNNING"):
                self.states[node] = "idle"
            found.append(SlurmJob(id=number, name=name, uid=0, state=state))
        return tuple(found)

    async def cancel(self, slurm_id: int, name: str) -> None:
        self.cancelled.append(slurm_id)
        self.states[self._jobs[slurm_id][1]] = "idle"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_jobs, "LOOK_S", 0.0)


def validated(slurm: FakeSlurm, outputs: Path, *nodes: str, limit_ns: int = HOUR_NS) -> Iterator[Ended[NodeReport]]:
    jobs = [Job((node,), "", ("node", "--time", "1s"), "/tmp", HOUR_NS) for node in nodes]
    said: list[str] = []
    return run_slurm_jobs(
        slurm, jobs, str(outputs), [], most_nodes=1, limit_ns=limit_ns, options=("--partition=idle",), say=said.append
    )


def test_each_idle_node_is_validated_by_a_job_that_has_it_alone(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"], a=["RUNNING", "DONE"])
    ended = list(validated(slurm, tmp_path, "a", "b"))
    assert [(one.job.nodes, one.report is not None) for one in ended] == [(("a",), True), (("b",), True)]
    assert [node for node, _ in slurm.submitted] == ["a", "b"]
    assert "-m fireflyer.validators.task node --time 1s" in slurm.submitted[0][1]
    assert list(tmp_path.iterdir()) == [], "its file is gone"


def test_the_job_is_of_the_lowest_priority_and_is_not_requeued(tmp_path: Path) -> None:
    job = Job(("gpu-7",), "", (), "/tmp", 90 * SECOND)
    assert slurm_jobs.job_arguments(job, "n", "/o", ("--qos=idle",)) == (
        "--parsable", "--job-name=n", "--nodes=1", "--nodelist=gpu-7", "--exclusive", "--no-requeue", "--nice=1000000",
        "--chdir=/", "--output=/o", "--time=2", "--qos=idle",
    )  # fmt: skip


def test_a_validation_that_is_preempted_begins_again_when_its_node_is_idle(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["RUNNING", "PREEMPTED", "RUNNING", "DONE"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert len(slurm.submitted) == 2


def test_one_that_waits_as_another_job_was_faster_is_withdrawn(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["PENDING"] * 15 + ["DONE"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert slurm.cancelled == [1]
    assert len(slurm.submitted) == 2


def test_one_that_is_interrupted_again_and_again_is_given_up(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["PREEMPTED"] * 9)
    (ended,) = validated(slurm, tmp_path, "a")
    assert (ended.report, ended.why_not) == (None, "other jobs have interrupted it again and again")
    assert len(slurm.submitted) == 5


def test_a_job_without_a_report_is_named_with_its_file(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["FAILED"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is None
    assert ended.why_not.startswith(f"job 1 is FAILED, and has written no report; see {tmp_path}/ff-validate-")


def test_a_report_that_the_file_system_shows_later_is_waited_for(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["COMPLETED", "COMPLETED", "DONE"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None


def test_nodes_that_are_busy_are_left_and_said(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"])
    slurm.states["a"] = "allocated"
    (ended,) = validated(slurm, tmp_path, "a", limit_ns=0)
    assert (slurm.submitted, ended.why_not) == ([], "its node was not idle in time; see --wait")


def test_who_is_interrupted_cancels_what_was_submitted(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"], a=["RUNNING"] * 9)
    validations = validated(slurm, tmp_path, "a", "b")
    slurm.lives["a"] = iter(["RUNNING", "DONE"])
    assert next(validations).report is not None
    validations.close()  # type: ignore[attr-defined]  # it is a generator
    assert slurm.cancelled == [2]
