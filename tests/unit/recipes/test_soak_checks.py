"""The checks of the soak: facts in which all is well pass, every planted difference is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.support.jobs.soak_facts import SOAK, good_soak

from fireflyer.base.events import Logged, StepReport
from fireflyer.base.units import SECOND
from fireflyer.recipes.soak.checks import judge
from fireflyer.recipes.soak.facts import SoakFacts
from fireflyer.recipes.soak.report import lost_steps, report_of
from fireflyer.recipes.testbed.facts import RunFacts, TaskFacts

GOOD = good_soak()
change = msgspec.structs.replace


def failed(facts: SoakFacts) -> dict[str, str]:
    return {check.name: check.text for check in judge(SOAK, facts) if not check.good}


def with_task(number: int, **values: Any) -> SoakFacts:
    return change(GOOD, tasks=tuple(change(one, **values) if one.task == number else one for one in GOOD.tasks))


def with_run(number: int, run: int, alter: Callable[[RunFacts], RunFacts]) -> SoakFacts:
    task = next(one for one in GOOD.tasks if one.task == number)
    return with_task(number, runs=tuple(alter(one) if one.number == run else one for one in task.runs))


def without_steps(run: RunFacts, rank: int, steps: range) -> RunFacts:
    def meant(entry: Logged) -> bool:
        return isinstance(entry.event, StepReport) and entry.event.rank == rank and entry.event.step in steps

    return change(run, log=tuple(entry for entry in run.log if not meant(entry)))


def test_every_check_holds_where_all_is_well() -> None:
    assert failed(GOOD) == {}
    assert len(judge(SOAK, GOOD)) == 10


# --- faults ---


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"reached": 0}, "fault 2, node-kill: it reached nothing"),
        ({"released_ns": None}, "fault 2, node-kill: it was not taken back"),
        ({"recovered_ns": None}, "fault 2, node-kill: not recovered from"),
        ({"recovered_ns": 500 * SECOND}, "120 s are allowed"),
    ],
)
def test_a_fault_that_was_not_recovered_from_is_found(values: dict[str, Any], said: str) -> None:
    faults = tuple(change(one, **values) if one.number == 2 else one for one in GOOD.faults)
    problems = failed(change(GOOD, faults=faults))
    assert set(problems) == {"faults"}
    assert said in problems["faults"]


def test_a_soak_without_faults_and_one_that_was_given_up_prove_nothing() -> None:
    assert failed(change(GOOD, faults=())) == {"faults": "there was no fault"}
    assert failed(change(GOOD, trouble=("waited 600 s",))) == {"faults": "waited 600 s"}


# --- tasks ---


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"state": "running", "outcome": ""}, "task task-0001 is running"),
        ({"outcome": "failed"}, "task task-0001 is finished failed"),
        ({"account": {"queue_ns": 1}}, "the parts of task task-0001 do not add up to its life"),
        ({"name": "task-0009"}, "task task-0001 was not submitted; task task-0009 was not submitted by the soak"),
    ],
)
def test_a_task_that_is_lost_or_ends_otherwise_is_found(values: dict[str, Any], said: str) -> None:
    assert said in failed(with_task(1, **values))["tasks"]


def test_a_task_that_is_there_twice_is_found() -> None:
    twice: TaskFacts = change(GOOD.tasks[1], task=3)
    assert failed(change(GOOD, tasks=(*GOOD.tasks, twice))) == {"tasks": "task task-0002 is there 2 times"}


# --- two runs at the same time ---


def test_a_run_that_gets_nodes_before_the_one_before_it_is_over_is_found() -> None:
    early = with_run(1, 1, lambda run: change(run, scheduled_ns=GOOD.tasks[0].runs[0].over_ns - 1))
    assert failed(early) == {"runs": "task task-0001: run 1 got nodes before run 0 was over"}


def test_a_run_that_trains_while_the_one_before_it_does_is_found() -> None:
    both = with_run(1, 1, lambda run: change(run, log_begins_ns=GOOD.tasks[0].runs[0].log_begins_ns))
    assert failed(both) == {"runs": "task task-0001: run 1 trained while run 0 did"}


def test_an_attempt_that_goes_on_while_the_next_one_trains_is_found() -> None:
    log = list(GOOD.tasks[1].runs[0].log)
    late = next(entry for entry in log if isinstance(entry.event, StepReport) and entry.event.attempt == 0)
    shuffled = (*(entry for entry in log if entry is not late), Logged(log[-1].at_ns, late.event))
    problems = failed(with_run(2, 0, lambda run: change(run, log=shuffled)))
    assert problems == {"runs": "task task-0002, run 0, rank 0: a step of attempt 0 after one of attempt 1"}


def test_a_step_that_is_done_twice_in_one_attempt_is_found() -> None:
    log = GOOD.tasks[1].runs[0].log
    twice = next(entry for entry in reversed(log) if isinstance(entry.event, StepReport))
    problems = failed(with_run(2, 0, lambda run: change(run, log=(*log, twice))))
    assert problems == {"runs": "task task-0002, run 0, rank 1: step 60 twice in attempt 1"}


# --- losses ---


def test_a_loss_that_is_off_by_one_bit_is_found() -> None:
    right = GOOD.references["task-0001"].losses[31]

    def alter(run: RunFacts) -> RunFacts:
        log = [
            Logged(entry.at_ns, change(entry.event, loss=math.nextafter(right, 0)))
            if isinstance(entry.event, StepReport) and (entry.event.step, entry.event.rank) == (31, 1)
            else entry
            for entry in run.log
        ]
        return change(run, log=tuple(log))

    for run in (0, 1):  # the step was done twice
        assert set(failed(with_run(1, run, alter))) == {"losses"}


def test_the_last_steps_of_a_log_may_die_with_its_launcher_as_far_as_the_next_run_went_on_behind_them() -> None:
    assert failed(with_run(1, 0, lambda run: without_steps(run, 0, range(31, 36)))) == {}
    assert failed(with_run(1, 0, lambda run: without_steps(run, 0, range(27, 36)))) == {}
    problems = failed(with_run(1, 0, lambda run: without_steps(run, 0, range(20, 25))))
    assert problems == {"losses": "task task-0001: rank 0 reported no loss of step 20"}
    problems = failed(with_run(1, 1, lambda run: without_steps(run, 1, range(40, 41))))
    assert problems == {"losses": "task task-0001: rank 1 reported no loss of step 40"}
    problems = failed(with_run(2, 0, lambda run: without_steps(run, 1, range(18, 21))))
    assert problems == {"losses": "task task-0002: rank 1 reported no loss of step 18"}


def test_another_shard_of_the_last_checkpoint_is_found() -> None:
    shards = {**GOOD.shards, "task-0002": {**GOOD.shards["task-0002"], "shard-00001-of-00002.safetensors": "c" * 64}}
    assert set(failed(change(GOOD, shards=shards))) == {"checkpoints"}


# --- files ---


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"wrong_reads": ("/soak/append/1: not what operation 4 wrote",)}, "writer append: /soak/append/1"),
        ({"stuck": "Write failed for 400 s"}, "writer append: Write failed for 400 s"),
        ({"acknowledged": 0}, "nothing was acknowledged"),
        ({"reads": 0}, "nothing was read back"),
    ],
)
def test_what_a_writer_did_not_get_is_found(values: dict[str, Any], said: str) -> None:
    problems = failed(change(GOOD, writers=(change(GOOD.writers[0], **values),)))
    assert set(problems) == {"writers"}
    assert said in problems["writers"]


def test_a_soak_without_writers_proves_nothing() -> None:
    assert failed(change(GOOD, writers=()))["writers"] == "there were no writers"


def test_an_acknowledged_file_that_is_lost_or_differs_and_one_that_came_back_are_found() -> None:
    assert failed(change(GOOD, stored=GOOD.stored[1:])) == {"files": "/soak/append/0 is not in the file system"}
    assert failed(change(GOOD, twins=GOOD.twins[1:])) == {
        "files": "/soak/append/0 is in the file system and has no twin"
    }
    short = (change(GOOD.stored[0], bytes=9), *GOOD.stored[1:])
    assert failed(change(GOOD, stored=short)) == {"files": "/soak/append/0 differs from its twin"}


@pytest.mark.parametrize("values", [{"alive": (1, 2)}, {"whole": 2}, {"chains": 0, "whole": 0}])
def test_storage_that_is_not_whole_at_the_end_is_found(values: dict[str, Any]) -> None:
    assert GOOD.storage is not None
    assert set(failed(change(GOOD, storage=change(GOOD.storage, **values)))) == {"storage"}
    assert set(failed(change(GOOD, storage=None))) == {"storage"}


@pytest.mark.parametrize("code", [1, None])
def test_what_fsck_finds_is_told(code: int | None) -> None:
    problems = failed(change(GOOD, fsck=("lost: /soak/append/1 (inode 7): no chunk",), fsck_code=code))
    assert "lost: /soak/append/1 (inode 7): no chunk" in problems["fsck"]


# --- report ---


def test_steps_that_were_done_again_are_put_down_to_the_fault_of_the_platform_before_them() -> None:
    assert lost_steps(GOOD) == {2: 5}


def test_the_table_has_a_row_for_each_kind_with_the_median_and_the_worst_recovery() -> None:
    report = report_of(GOOD, judge(SOAK, GOOD), took_ns=70 * SECOND)
    assert report.ok
    rows = {row.kind: row for row in report.kinds}
    assert set(rows) == {"storage-kill", "node-kill"}
    storage, node = rows["storage-kill"], rows["node-kill"]
    assert (storage.faults, storage.recovered, storage.median_s, storage.worst_s) == (2, 2, 1.5, 2.0)
    assert (storage.failed, storage.lost_steps) == (1, 0)
    assert (node.faults, node.worst_s, node.lost_steps) == (1, 9.0, 5)
    assert "3 faults in " in report.headline
    assert len(report.time_line) == 3
    assert "counted as failed" in report.time_line[2]


def test_a_fault_that_was_not_recovered_from_stands_in_table_and_time_line() -> None:
    facts = change(GOOD, faults=(change(GOOD.faults[0], recovered_ns=None),))
    report = report_of(facts, judge(SOAK, facts), took_ns=0)
    assert not report.ok
    assert (report.kinds[0].recovered, report.kinds[0].median_s) == (0, None)
    assert "NOT RECOVERED" in report.time_line[0]
