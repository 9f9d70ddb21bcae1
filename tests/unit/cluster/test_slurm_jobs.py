"""What follows for the row of a job from what Slurm says, and how Slurm is asked for one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.core.platform.slurm.reasons import why_waits
from fireflyer.cluster.core.platform.slurm.reconcile import (
    FORGOTTEN,
    AskAgain,
    Found,
    Nothing,
    is_wanted,
    reconcile,
)
from fireflyer.cluster.core.platform.slurm.work import excluded
from fireflyer.cluster.core.platform.store.rows import JobRow, JobState, TaskRow
from fireflyer.cluster.core.slurm.output import Phase, SlurmJob
from fireflyer.cluster.core.slurm.request import JobOrders, JobRequest, arguments, node_of, script, slot_name
from fireflyer.cluster.schema.tasks import Program, TaskSpec, TaskState

ROW = JobRow(task=1, number=0, name="ff-1", asked_ns=5, term=1)
STATES = ("PENDING", "RUNNING", "COMPLETING", "COMPLETED", "PREEMPTED", "CANCELLED")
SUBMITTED_S = 1000


def job(number: int, state: str = "RUNNING", submit_s: int | None = None) -> SlurmJob:
    return SlurmJob(id=number, name="ff-1", uid=0, state=state, submit_s=submit_s)


def spec(**fields: Any) -> TaskSpec:
    return TaskSpec(name="train", program=Program(script="train.py"), **fields)


def task(**fields: Any) -> TaskRow:
    return TaskRow(
        id=1, submission=1, name="train", user="ada", state=TaskState.QUEUED, priority=10, submitted_ns=0, queued_ns=0,
        since_ns=0, counted_ns=0, **fields,
    )  # fmt: skip


def test_a_job_is_adopted_by_its_name_and_asked_for_again_only_after_its_pause() -> None:
    assert reconcile(ROW, [], 10**12) == Nothing()
    waits = msgspec.structs.replace(ROW, retry_ns=100)
    assert reconcile(waits, [], 99) == Nothing()
    assert reconcile(waits, [], 100) == AskAgain()
    assert reconcile(waits, [job(7, "PENDING")], 100) == Found(job(7, "PENDING"))


def test_of_two_jobs_of_one_name_the_one_that_runs_is_kept() -> None:
    assert reconcile(ROW, [job(7, "PENDING"), job(9)], 0) == Found(job(9), (7,))
    assert reconcile(ROW, [job(9, "PENDING"), job(7, "PENDING")], 0) == Found(job(7, "PENDING"), (9,))


def test_a_job_that_slurm_shows_no_more_has_ended() -> None:
    found = reconcile(msgspec.structs.replace(ROW, slurm_id=7, state=JobState.RUNNING), [], 0)
    assert isinstance(found, Found)
    assert (found.job.state, found.job.phase) == (FORGOTTEN, Phase.ENDED)


def test_a_job_with_the_number_of_one_that_slurmctld_lost_is_another_job() -> None:
    row = msgspec.structs.replace(ROW, slurm_id=7, submit_s=SUBMITTED_S, state=JobState.RUNNING)
    found = reconcile(row, [job(7, submit_s=SUBMITTED_S + 9)], 0)
    assert isinstance(found, Found)
    assert (found.job.state, found.surplus) == (FORGOTTEN, (7,))
    for same in (job(7, submit_s=SUBMITTED_S), job(7)):
        assert reconcile(row, [same], 0) == Found(same)


def test_of_two_jobs_that_have_ended_the_one_that_was_cancelled_counts_least() -> None:
    assert reconcile(ROW, [job(7, "CANCELLED"), job(9, "PREEMPTED")], 0) == Found(job(9, "PREEMPTED"))


@pytest.mark.parametrize(
    ("nodes", "run", "leave", "wanted"),
    [
        ((), None, None, True),  # it waited
        (("n1",), 0, None, True),  # all its agents had come up
        (("n1",), None, None, False),  # slurmd could not start it
        (("n1",), 0, 0, False),  # by the manager
        ((), None, 0, False),
    ],
)
def test_who_cancelled_a_job(nodes: tuple[str, ...], run: int | None, leave: int | None, wanted: bool) -> None:
    row = msgspec.structs.replace(ROW, slurm_id=7, run=run, leave=leave)
    cancelled = msgspec.structs.replace(job(7, "CANCELLED"), nodes=nodes)
    assert is_wanted(row, cancelled) is wanted
    assert is_wanted(msgspec.structs.replace(row, nodes=nodes), job(7, "CANCELLED")) is wanted
    for state in ("FAILED", "NODE_FAIL", "PREEMPTED", FORGOTTEN):
        assert not is_wanted(row, msgspec.structs.replace(cancelled, state=state))


def test_a_job_that_slurmctld_started_again_on_other_nodes_is_cancelled_by_a_slurmd() -> None:
    """It went on from a state in which the job still waited; one of the nodes had its number already."""
    row = msgspec.structs.replace(ROW, slurm_id=7, run=0, nodes=("n1", "n2"))
    cancelled = msgspec.structs.replace(job(7, "CANCELLED"), nodes=("n1", "n3"))
    assert not is_wanted(row, cancelled)
    assert is_wanted(row, msgspec.structs.replace(cancelled, nodes=("n2", "n1")))


@given(
    said=st.lists(
        st.builds(job, st.integers(1, 9), st.sampled_from(STATES), st.none() | st.integers(1000, 1002)),
        max_size=6,
        unique_by=lambda one: one.id,
    ),
    slurm_id=st.integers(0, 9),
    retry_ns=st.none() | st.integers(0, 100),
    now_ns=st.integers(0, 100),
    submit_s=st.none() | st.integers(1000, 1002),
)
def test_one_job_at_most_is_kept_and_none_is_asked_for_while_one_lives(
    said: list[SlurmJob], slurm_id: int, retry_ns: int | None, now_ns: int, submit_s: int | None
) -> None:
    row = msgspec.structs.replace(ROW, slurm_id=slurm_id, retry_ns=retry_ns, submit_s=submit_s)
    living = {one.id for one in said if one.phase is not Phase.ENDED}
    found = reconcile(row, said, now_ns)
    if isinstance(found, AskAgain):
        assert not said
        assert not slurm_id
    elif isinstance(found, Found):
        kept = {found.job.id} & living if found.job in said else set()
        assert kept | set(found.surplus) == living
        assert not kept & set(found.surplus)
        assert not slurm_id or found.job.id == slurm_id
        assert not slurm_id or submit_s is None or found.job.submit_s in (None, submit_s)
    else:
        assert not said
    assert reconcile(row, tuple(reversed(said)), now_ns) == found


def test_sbatch_is_asked_for_whole_nodes_once_and_under_its_name() -> None:
    given = arguments(
        JobRequest(
            name="ff-1", task=7, exclude=("n1", "n2"), options=("--qos=low",),
            spec=spec(least_nodes=2, most_nodes=4, labels=("gpu", "ib"), node_group="fast", time_ns=3600 * 10**9),
        )
    )  # fmt: skip
    assert {"--job-name=ff-1", "--nodes=2-4", "--exclusive", "--dependency=singleton", "--no-requeue"} < set(given)
    assert {"--partition=fast", "--constraint=gpu&ib", "--exclude=n1,n2", "--time=75"} < set(given)
    assert given[-1] == "--qos=low"


def test_the_script_gives_its_orders_to_the_agents_and_shows_them_to_nobody(tmp_path: Path) -> None:
    orders = JobOrders(token="it's $HOME `id`", managers=("a:1",), job="t1-0")
    text = script(("/opt/a python",), orders)
    (tmp_path / "srun").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "srun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    shown = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True, env=path)
    assert msgspec.json.decode(shown.stdout, type=JobOrders) == orders
    assert "'/opt/a python' -P -m fireflyer.cluster.agent.job" in text
    assert "id" not in repr(orders)


def test_nodes_on_which_a_task_failed_are_left_out_while_enough_remain() -> None:
    known = ("n1", "n2", "n3")
    failed = task(excluded=("n1.t1-0", "gone.t1-0"))
    assert excluded(spec(), failed, known) == ("n1",)
    assert excluded(spec(least_nodes=3, most_nodes=3), failed, known) == ()
    assert excluded(spec(only=("n1", "n2"), never=("n2", "unknown")), task(), known) == ("n2", "n3")


@pytest.mark.parametrize(
    ("name", "found"),
    [("n1.t12-3", ("n1", "t12-3")), ("n1.site.t1-0", ("n1.site", "t1-0")), ("n1", ("n1", "")),
     ("n1.t1", ("n1.t1", "")), ("n1.tx-0", ("n1.tx-0", "")), ("t1-0", ("t1-0", ""))],
)  # fmt: skip
def test_nodes_of_jobs_are_known_by_their_names(name: str, found: tuple[str, str]) -> None:
    assert node_of(name) == found
    if found[1]:
        assert slot_name(*found) == name


def test_why_a_task_waits() -> None:
    def why(row: JobRow | None, silent: str = "") -> str:
        return why_waits(task(not_before_ns=0), row, held="", silent=silent, time_ns=0)

    waits = msgspec.structs.replace(ROW, slurm_id=7, state=JobState.WAITING, slurm_reason="Resources")
    assert why(waits) == "Slurm job 7 waits: no nodes are free for it yet (Resources)"
    assert why(waits, "Slurm does not answer: x").endswith("; Slurm does not answer: x")
    assert "asked again: no such partition" in why(msgspec.structs.replace(ROW, refusal="no such partition"))
    assert why(None) == "it waits to be submitted to Slurm"
