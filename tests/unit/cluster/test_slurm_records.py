"""What is left of jobs after their end: lines of Slurm 22.05 (`scontrol`, `jobcomp/filetxt`: recorded; `sacct`: by its
source, which has the state of a cancelled job as `CANCELLED by 1004`), and what users could make of them."""

from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.cluster.core.slurm.output import SlurmJob, SlurmOutputError
from fireflyer.cluster.core.slurm.records import best, parse_jobcomp, parse_sacct, parse_shown

NAME = "ff-2a2ca1c8e0f1b2a3c4d5e6f7"
SHOWN = (
    f"JobId=1 JobName={NAME} UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=(null) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=7:0 RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A SubmitTime=1795700668 EligibleTime=1795700668 "
    "AccrueTime=1795700668 StartTime=1795700671 EndTime=1795700672 Deadline=N/A PreemptEligibleTime=1795700671 "
    "PreemptTime=None SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795700671 Scheduler=Main Partition=test "
    "AllocNode:Sid=a:34 ReqNodeList=(null) ExcNodeList=(null) NodeList=a,b BatchHost=a NumNodes=2 NumCPUs=2 NumTasks=2 "
    "CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 Command=(null) WorkDir=/ Comment=x JobState=RUNNING \n"
)
WAITED = SHOWN.replace("PreemptEligibleTime=1795700671 PreemptTime=None ", "").replace(" NodeList=a,b", " NodeList=")
JOBCOMP = (
    f"JobId=1 UserId=root(0) GroupId=root(0) Name={NAME} JobState=FAILED Partition=test TimeLimit=UNLIMITED "
    "StartTime=2026-11-26T13:44:31 EndTime=2026-11-26T13:44:32 NodeList=a,b NodeCnt=2 ProcCnt=2 WorkDir=/ "
    "ReservationName= Tres=cpu=2,mem=2M,node=2,billing=2 Account= QOS= WcKey= Cluster=unknown "
    "SubmitTime=2026-11-26T13:44:28 EligibleTime=2026-11-26T13:44:28 DerivedExitCode=0:0 ExitCode=7:0 \n"
)
SACCT = (
    f"1|FAILED|0|1795700668|1795700671|1795700672|7:0|a,b|{NAME}\n"
    f"1|CANCELLED by 1004|1004|1795600000|Unknown|1795600009|0:0|None assigned|{NAME}\n"
)
JOB = SlurmJob(id=1, name=NAME, uid=0, state="", submit_s=1795700668)


def utc(text: str) -> int | None:
    try:
        return int(datetime.datetime.fromisoformat(text + "+00:00").timestamp())
    except ValueError:
        return None


def test_all_sources_say_the_same_of_a_job_that_failed() -> None:
    shown = parse_shown(SHOWN, JOB)
    (noted,) = parse_jobcomp(JOBCOMP, [NAME], utc)
    accounted, _ = parse_sacct(SACCT, [NAME])
    wanted = SlurmJob(
        id=1, name=NAME, uid=0, state="FAILED", nodes=("a", "b"), submit_s=1795700668, start_s=1795700671,
        end_s=1795700672, exit_code=7, signal=0,
    )  # fmt: skip
    for found, source in ((shown, "scontrol"), (noted, "jobcomp"), (accounted, "sacct")):
        assert found == msgspec.structs.replace(wanted, source=source)


def test_a_job_that_was_cancelled_while_it_waited() -> None:
    _, found = parse_sacct(SACCT, [NAME])
    assert (found.state, found.cancelled_by, found.nodes, found.start_s) == ("CANCELLED", 1004, (), None)
    assert parse_shown(WAITED, JOB).nodes == ()


def test_a_job_that_slurm_had_waited_for_says_so_whatever_else_is_known() -> None:
    job = parse_shown(SHOWN.replace("PreemptTime=None", "PreemptTime=1795700672"), JOB)
    assert job.preempt_s == 1795700672
    assert best(JOB, [job, *parse_sacct(SACCT, [NAME])]).preempt_s == 1795700672
    assert parse_shown(SHOWN, JOB).preempt_s is None


@pytest.mark.parametrize(
    "text",
    ["", SHOWN.replace("JobId=1 ", "JobId=2 "), SHOWN.replace(NAME, "other"), SHOWN.replace("root(0) G", "ada(9) G"),
     SHOWN.replace("NodeList=a,b", "NodeList=n[1-99999999]"), SHOWN[:200], "slurm_load_jobs error: Invalid job id\n"],
)  # fmt: skip
def test_what_scontrol_says_of_another_job_counts_as_nothing(text: str) -> None:
    with pytest.raises(SlurmOutputError):
        parse_shown(text, JOB)


@pytest.mark.parametrize("text", [SACCT.replace(NAME, "other"), "1|x\n", SACCT.replace("7:0", "7"), "\x1b[31m\n"])
def test_what_sacct_says_in_another_form_counts_as_nothing(text: str) -> None:
    with pytest.raises(SlurmOutputError):
        parse_sacct(text, [NAME])


def test_a_name_with_a_line_of_its_own_makes_the_line_of_no_job() -> None:
    """Recorded with a name that holds a line of the file."""
    forged = JOBCOMP.replace("FAILED", "CANCELLED")
    evil = f"JobId=3 UserId=ada(1004) GroupId=ada(1004) Name=evil\n{forged} JobState=COMPLETED Partition=test \n"
    assert parse_jobcomp(evil + JOBCOMP, [NAME], utc) == ()
    assert parse_jobcomp(JOBCOMP + "x" * 2000 + JOBCOMP[:300] + "\n", [NAME], utc) == parse_jobcomp(
        JOBCOMP, [NAME], utc
    )


def test_the_best_source_counts_and_only_what_is_said_of_this_job() -> None:
    (noted,) = parse_jobcomp(JOBCOMP, [NAME], utc)
    records = [noted, *parse_sacct(SACCT, [NAME])]
    assert best(JOB, records).source == "sacct"
    assert best(JOB, [noted]).source == "jobcomp"
    shown = msgspec.structs.replace(JOB, state="PREEMPTED", end_s=5)
    assert best(shown, records).state == "PREEMPTED"  # as Slurm says now
    for other in ({"id": 2}, {"uid": 1}, {"submit_s": 1}, {"name": "ff-2"}, {"state": "RUNNING"}):
        job = msgspec.structs.replace(JOB, **other)
        assert best(job, records) is job


@given(st.text(max_size=300), st.sampled_from([SHOWN, SACCT, JOBCOMP]), st.integers(0, 400), st.integers(0, 400))
def test_any_text_is_read_or_refused(text: str, line: str, start: int, end: int) -> None:
    mixed = line[:start] + text + line[max(start, end) :]
    for said in parse_jobcomp(mixed, [NAME], utc):
        assert said.name == NAME
    for parse in (lambda: parse_sacct(mixed, [NAME]), lambda: [parse_shown(mixed, JOB)]):
        try:
            assert all(job.name == NAME for job in parse())
        except SlurmOutputError:
            pass
