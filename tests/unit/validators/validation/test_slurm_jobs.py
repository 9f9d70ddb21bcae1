"""Validations through Slurm: on idle nodes alone, withdrawn where a job was faster, submitted again where one was
preempted."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fireflyer.base.errors import Busy, FireflyerError, NoSpace, PermanentError, Unreachable, UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.accounts import Account
from fireflyer.cluster.core.slurm.fleet import FleetNode
from fireflyer.cluster.core.slurm.output import SlurmJob
from fireflyer.validators import slurm_jobs
from fireflyer.validators.cluster_tasks import Ended, Job
from fireflyer.validators.core.validation.records import NodeRecord
from fireflyer.validators.core.validation.reports import NodeReport, report_line
from fireflyer.validators.slurm_job_files import JobFiles, cancel_left_jobs
from fireflyer.validators.slurm_jobs import check_outputs, reservations_of, run_slurm_jobs

HOUR_NS = 3600 * SECOND


class FakeSlurm:
    """Slurm in one process: each time that it is asked for jobs, each job makes a step of its life."""

    def __init__(self, nodes: Sequence[str], **lives: list[str]) -> None:
        """`lives`: states of the jobs of a node, one a look; `DONE`: completed, with a report."""
        self.states = dict.fromkeys(nodes, "idle")
        self.lives = {node: iter(states) for node, states in lives.items()}
        self.submitted: list[tuple[str, ...]] = []
        self.cancelled: list[int] = []
        self.errors: dict[str, list[FireflyerError | None]] = {}
        """What its next calls of this name raise, one after the other."""
        self.powered = True
        self.reason = ""
        """Of jobs that wait."""
        self.stays_idle = False
        """Nodes of jobs that wait are idle: no other job has them."""
        self.hidden = 0
        """Looks at which no job is shown."""
        self.places: list[os.stat_result] = []
        self._jobs: dict[int, tuple[str, str, Path, str]] = {}

    def _may_fail(self, call: str) -> None:
        error = self.errors[call].pop(0) if self.errors.get(call) else None
        if error is not None:
            raise error

    async def fleet(self, node: str = "") -> dict[str, FleetNode]:
        self._may_fail("fleet")
        return {
            name: FleetNode(name=name, partitions=("p",), state=state, powered=self.powered)
            for name, state in self.states.items()
        }

    async def submit(self, arguments: Sequence[str], script: str, account: Account | None) -> int:
        self._may_fail("submit")
        options = dict(one.removeprefix("--").partition("=")[::2] for one in arguments)
        number = len(self.submitted) + 1
        self.submitted.append((options["nodelist"], script))
        self._jobs[number] = (options["job-name"], options["nodelist"], Path(options["output"]), "PENDING")
        self.places.append(os.stat(Path(options["output"]).parent))
        self.states[options["nodelist"]] = "idle" if self.stays_idle else "allocated"
        self._may_fail("answer")
        return number

    async def jobs(self, names: Sequence[str]) -> tuple[SlurmJob, ...]:
        self._may_fail("jobs")
        self.hidden -= 1
        if self.hidden >= 0:
            return ()
        found = []
        for number, (name, node, output, _) in self._jobs.items():
            if name not in names:
                continue
            state = next(self.lives[node]) if node in self.lives else "DONE"
            if state == "DONE":
                report = NodeReport(events=(), record=NodeRecord(node="x", model="m", seen_ns=1, figures={"x": 1.0}))
                output.write_text(f"a line of a library\n{report_line(report)}\n")
                state = "COMPLETED"
            if state not in ("PENDING", "RUNNING", "SUSPENDED"):
                self.states[node] = "idle"
            found.append(SlurmJob(id=number, name=name, uid=os.geteuid(), state=state, reason=self.reason))
        return tuple(found)

    async def cancel(self, slurm_id: int, name: str) -> None:
        self._may_fail("cancel")
        self.cancelled.append(slurm_id)
        self.states[self._jobs[slurm_id][1]] = "idle"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_jobs, "LOOK_S", 0.0)


def validated(
    slurm: FakeSlurm,
    outputs: Path,
    *nodes: str,
    limit_ns: int = HOUR_NS,
    at_once: int = 1,
    options: tuple[str, ...] = ("--partition=idle",),
) -> Iterator[Ended[NodeReport]]:
    jobs = [Job((node,), "", ("node", "--time", "1s"), "/tmp", HOUR_NS) for node in nodes]
    said: list[str] = []
    return run_slurm_jobs(
        slurm,
        jobs,
        str(outputs),
        [],
        most_nodes=at_once,
        limit_ns=limit_ns,
        options=options,
        say=said.append,
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
        "--parsable", "--job-name=n", "--nodes=1", "--nodelist=gpu-7", "--exclusive", "--mem=0", "--no-requeue",
        "--nice=1000000", "--chdir=/", "--output=/o", "--time=2", "--qos=idle",
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


def test_a_job_on_an_idle_node_waits_for_its_turn_in_slurm_for_minutes(tmp_path: Path) -> None:
    """Where the scheduler that starts jobs of the lowest priority runs every few minutes."""
    slurm = FakeSlurm(["a"], a=["PENDING"] * 149 + ["DONE"])
    slurm.reason = "Priority"
    slurm.stays_idle = True
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert (slurm.cancelled, len(slurm.submitted)) == ([], 1)


def test_a_job_that_waited_long_has_all_the_time_for_its_file(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["PENDING"] * 14 + ["RUNNING"] + ["COMPLETED"] * 10 + ["DONE"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None


def test_idle_nodes_that_had_no_turn_are_told_what_to_do(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"], a=["RUNNING"] * 300 + ["DONE"])
    why = [one.why_not for one in validated(slurm, tmp_path, "a", "b", limit_ns=SECOND // 20)]
    assert "it had no turn in time; see --wait and --at-once" in why


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


@pytest.mark.parametrize("state", ["reserved", "maint", "draining", "drained", "down"])
def test_a_node_that_was_never_idle_is_told_with_its_state(tmp_path: Path, state: str) -> None:
    slurm = FakeSlurm(["a"])
    slurm.states["a"] = state
    (ended,) = validated(slurm, tmp_path, "a", limit_ns=SECOND // 20)
    assert (slurm.submitted, ended.why_not) == ([], f"its node was not idle in time ({state}); see --wait")


@pytest.mark.parametrize("state", ["reserved", "maint"])
def test_jobs_of_a_reservation_are_submitted_for_its_nodes_which_are_not_idle_otherwise(
    tmp_path: Path, state: str
) -> None:
    slurm = FakeSlurm(["a", "b"])
    slurm.states |= {"a": state, "b": "draining"}
    ended = list(validated(slurm, tmp_path, "a", "b", limit_ns=SECOND // 20, options=("--reservation=fans",)))
    assert [node for node, _ in slurm.submitted] == ["a"]
    assert sorted(reported(ended)) == [("a", True), ("b", False)]


@pytest.mark.parametrize(
    ("options", "reservations"),
    [
        (("--qos=idle", "--reservation=fans"), ("fans",)),
        (("--reserv=fans,disks",), ("fans", "disks")),
        (("--reservation", "fans", "--qos=idle"), ("fans",)),
        (("--reboot", "--requeue", "--re", "--qos=--reservation=fans"), ()),
    ],
)
def test_reservations_are_read_from_options_of_sbatch(options: tuple[str, ...], reservations: tuple[str, ...]) -> None:
    assert reservations_of(options) == reservations


@pytest.mark.parametrize("reason", ["AccountNotAllowed", "PartitionDown"])
def test_a_job_that_slurm_never_starts_is_told_with_its_reason(tmp_path: Path, reason: str) -> None:
    slurm = FakeSlurm(["a"], a=["PENDING"] * 100)
    slurm.reason = reason
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.why_not == f"Slurm did not start its job: {reason}"


def test_a_job_that_waits_for_others_is_said_to_be_interrupted_by_them(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["PENDING"] * 100)
    slurm.reason = "Priority"
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.why_not == "other jobs have interrupted it again and again"


def test_who_is_interrupted_cancels_what_was_submitted(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"], a=["RUNNING"] * 9)
    validations = validated(slurm, tmp_path, "a", "b")
    slurm.lives["a"] = iter(["RUNNING", "DONE"])
    assert next(validations).report is not None
    validations.close()  # type: ignore[attr-defined]  # it is a generator
    assert slurm.cancelled == [2]


# --- Slurm does not answer, or refuses ---

AWAY = Unreachable("slurmctld is away")


def reported(ended: Sequence[Ended[NodeReport]]) -> list[tuple[str, bool]]:
    return [(one.job.nodes[0], one.report is not None) for one in ended]


@pytest.mark.parametrize("call", ["submit", "answer"])
def test_one_that_cannot_be_submitted_keeps_no_other_from_its_end(tmp_path: Path, call: str) -> None:
    """`answer`: Slurm has the job, and the answer is lost."""
    slurm = FakeSlurm(["a", "b", "c"])
    slurm.errors[call] = [None, AWAY]
    ended = list(validated(slurm, tmp_path, "a", "b", "c", at_once=3))
    assert sorted(reported(ended)) == [("a", True), ("b", True), ("c", True)]
    assert sorted(node for node, _ in slurm.submitted) == ["a", "b", "c"], "each once"


def test_a_job_whose_answer_was_lost_is_cancelled_by_its_name(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"], b=["RUNNING"] * 9)
    slurm.errors["answer"] = [None, AWAY]
    validations = validated(slurm, tmp_path, "a", "b", at_once=2)
    assert reported([next(validations)]) == [("a", True)]
    validations.close()  # type: ignore[attr-defined]  # it is a generator
    assert slurm.cancelled == [2]
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_slurm_shows_late_is_found_and_no_second_one_is_submitted(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["RUNNING", "DONE"])
    slurm.errors["answer"] = [AWAY]
    slurm.hidden = 100
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert len(slurm.submitted) == 1


def test_a_job_that_slurm_does_not_show_in_ten_minutes_leaves_its_file_for_the_next_command(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["DONE", "RUNNING"])
    slurm.errors["answer"] = [AWAY]
    slurm.stays_idle = True
    slurm.hidden = 300
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert len(slurm.submitted) == 2
    assert [path.name.startswith("ff-validate-") for path in tmp_path.iterdir()] == [True]
    asyncio.run(cancel_left_jobs(slurm, str(tmp_path), lambda _: None))
    assert slurm.cancelled == [1]


@pytest.mark.parametrize("call", ["fleet", "cancel"])
def test_reports_that_were_read_are_not_lost_where_slurm_is_away_afterwards(tmp_path: Path, call: str) -> None:
    slurm = FakeSlurm(["a", "b"], b=["PENDING"] * 15 + ["DONE"], a=["RUNNING"] * 14 + ["DONE"])
    slurm.errors[call] = [AWAY] if call == "cancel" else [None] * 15 + [AWAY]
    ended = list(validated(slurm, tmp_path, "a", "b", at_once=2))
    assert sorted(reported(ended)) == [("a", True), ("b", True)]


def test_a_node_whose_job_slurm_refuses_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a", "b"])
    slurm.errors["submit"] = [PermanentError("sbatch: Requested node configuration is not available")]
    ended = list(validated(slurm, tmp_path, "a", "b"))
    assert reported(ended) == [("a", False), ("b", True)]
    assert ended[0].why_not.startswith("Slurm refuses its job: sbatch: Requested node")


def test_a_job_that_is_suspended_is_cancelled_and_begins_again(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"], a=["RUNNING", "SUSPENDED", "DONE"])
    (ended,) = validated(slurm, tmp_path, "a")
    assert ended.report is not None
    assert (slurm.cancelled, len(slurm.submitted)) == ([1], 2)


def test_a_node_that_is_switched_off_is_not_idle(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"])
    slurm.powered = False
    validations = validated(slurm, tmp_path, "a", limit_ns=SECOND // 20)
    assert reported(list(validations)) == [("a", False)]
    assert slurm.submitted == []


@pytest.mark.parametrize(
    ("error", "well"), [(Busy("open: too many open files"), True), (NoSpace("write: no space left"), False)]
)
def test_a_job_whose_file_cannot_be_made_waits_or_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: FireflyerError, well: bool
) -> None:
    errors, made = [error], JobFiles.new

    def new(files: JobFiles, name: str) -> str:
        if errors:
            raise errors.pop()
        return made(files, name)

    monkeypatch.setattr(JobFiles, "new", new)
    slurm = FakeSlurm(["a", "b"])
    ended = list(validated(slurm, tmp_path, "a", "b", at_once=2))
    assert sorted(reported(ended)) == [("a", well), ("b", True)]
    assert well or "no space left" in ended[0].why_not
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", ["cancel", "jobs"])
def test_a_job_that_could_not_be_cancelled_is_cancelled_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """`jobs`: its number is not known, and Slurm does not say it."""
    slurm = FakeSlurm(["a"], a=["RUNNING"] * 9)
    slurm.errors["answer"] = [AWAY] if lost == "jobs" else []

    def interrupts(_seconds: float) -> None:
        slurm.errors[lost] = [AWAY]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(slurm_jobs, "sleep", interrupts)
        with pytest.raises(KeyboardInterrupt):
            list(validated(slurm, tmp_path, "a"))
    assert slurm.cancelled == []
    asyncio.run(cancel_left_jobs(slurm, str(tmp_path), lambda _words: None))
    assert slurm.cancelled == [1]
    assert list(tmp_path.iterdir()) == []


# --- whose files ---


def test_files_of_jobs_are_in_a_directory_of_one_user(tmp_path: Path) -> None:
    slurm = FakeSlurm(["a"])
    list(validated(slurm, tmp_path, "a"))
    (place,) = slurm.places
    assert (stat.S_IMODE(place.st_mode), place.st_uid) == (0o700, os.geteuid())
    assert place.st_ino != tmp_path.stat().st_ino


@pytest.mark.parametrize(("mode", "wrong"), [(0o755, False), (0o1777, False), (0o775, True), (0o757, True)])
def test_a_directory_that_others_can_change_is_refused(tmp_path: Path, mode: int, wrong: bool) -> None:
    os.chmod(tmp_path, mode)
    if not wrong:
        check_outputs(str(tmp_path))
        return
    with pytest.raises(UsageError, match="can be changed by other users"):
        check_outputs(str(tmp_path))


def test_a_directory_in_one_that_others_can_change_is_refused_too(tmp_path: Path) -> None:
    own = tmp_path / "shared" / "own"
    own.mkdir(parents=True)
    own.chmod(0o700)
    own.parent.chmod(0o777)
    with pytest.raises(UsageError, match=r"can be changed by other users.*others than its owner may write .*shared "):
        check_outputs(str(own))
