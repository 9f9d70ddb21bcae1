"""The checks of the whole demonstration: facts in which all is well pass, every planted difference is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.support.jobs.whole_facts import PLAN, good_facts

from fireflyer.base.events import CheckpointReport, JobEvent, Logged, ResumeReport, StepReport
from fireflyer.recipes.testbed.facts import StorageSample, TaskFacts
from fireflyer.recipes.whole.checks import judge
from fireflyer.recipes.whole.facts import Facts, Fault, Operation

GOOD = good_facts()
change = msgspec.structs.replace


def failed(facts: Facts) -> dict[str, str]:
    return {check.name: check.text for check in judge(PLAN, facts) if not check.good}


def with_task(name: str, alter: Callable[[TaskFacts], TaskFacts], facts: Facts = GOOD) -> Facts:
    return change(facts, tasks=tuple(alter(task) if task.name == name else task for task in facts.tasks))


def with_fault(kind: str, **values: Any) -> Facts:
    return change(GOOD, faults=tuple(change(one, **values) if one.kind == kind else one for one in GOOD.faults))


def with_events(name: str, alter: Callable[[JobEvent], JobEvent | None], *, run: int | None = None) -> Facts:
    """In the logs of all runs of a task, or of one; without events that become None."""

    def altered(task: TaskFacts) -> TaskFacts:
        runs = []
        for one in task.runs:
            log = [(entry.at_ns, alter(entry.event)) for entry in one.log]
            kept = tuple(Logged(at_ns, event) for at_ns, event in log if event is not None)
            runs.append(change(one, log=kept) if run in (None, one.number) else one)
        return change(task, runs=tuple(runs))

    return with_task(name, altered)


def with_step(name: str, step: int, rank: int, loss: float | None, *, attempt: int = 0, run: int = 0) -> Facts:
    def alter(event: JobEvent) -> JobEvent:
        meant = isinstance(event, StepReport) and (event.step, event.rank, event.attempt) == (step, rank, attempt)
        return change(event, loss=loss) if meant else event

    return with_events(name, alter, run=run)


def test_every_check_holds_where_all_is_well() -> None:
    assert failed(GOOD) == {}
    assert len(judge(PLAN, GOOD)) == 10


# --- losses ---


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("task", "step", "attempt", "run"),
    [("first", 1, 0, 0), ("first", 35, 0, 0), ("first", 35, 1, 0), ("first", 60, 1, 0), ("second", 26, 0, 1),
     ("second", 25, 0, 0), ("urgent", 20, 0, 0)],
)  # fmt: skip
@pytest.mark.parametrize("towards", [-math.inf, math.inf])
def test_a_loss_that_is_off_by_one_bit_is_found(
    task: str, step: int, attempt: int, run: int, rank: int, towards: float
) -> None:
    """Also of a step that was done twice."""
    off = math.nextafter(GOOD.references[task].losses[step], towards)
    problems = failed(with_step(task, step, rank, off, attempt=attempt, run=run))
    assert set(problems) == {"losses"}
    assert f"task {task}: rank {rank}, step {step}" in problems["losses"]


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_nobody_knows_is_found(loss: float | None) -> None:
    assert "losses" in failed(with_step("urgent", 3, 1, loss))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("task", ["first", "second", "urgent"])
def test_a_step_that_a_rank_did_not_report_is_found(task: str, rank: int) -> None:
    def alter(event: JobEvent) -> JobEvent | None:
        return None if isinstance(event, StepReport) and (event.step, event.rank) == (7, rank) else event

    assert f"rank {rank} reported no loss of step 7" in failed(with_events(task, alter))["losses"]


def test_a_reference_without_a_step_with_another_loss_or_that_does_not_fall_is_found() -> None:
    losses = GOOD.references["first"].losses

    def with_losses(found: dict[int, float]) -> dict[str, str]:
        return failed(
            change(GOOD, references={**GOOD.references, "first": change(GOOD.references["first"], losses=found)})
        )

    assert "losses" in with_losses({step: loss for step, loss in losses.items() if step != 60})
    assert "losses" in with_losses({**losses, 61: 1.0})
    assert "losses" in with_losses({**losses, 30: math.nextafter(losses[30], 0)})
    assert "did not fall" in with_losses({**losses, 60: losses[1]})["losses"]
    assert "losses" in failed(change(GOOD, references={}))


def test_a_loss_that_is_not_finite_is_found_where_both_runs_have_it() -> None:
    reference = GOOD.references["urgent"]
    references = {**GOOD.references, "urgent": change(reference, losses={**reference.losses, 7: math.inf})}

    def diverged(event: JobEvent) -> JobEvent:
        return change(event, loss=math.inf) if isinstance(event, StepReport) and event.step == 7 else event

    facts = change(with_events("urgent", diverged), references=references)
    assert failed(facts) == {"losses": "the undisturbed run of urgent has a loss that is not finite"}


def test_a_rank_that_a_task_does_not_have_is_found() -> None:
    def with_another_rank(task: TaskFacts) -> TaskFacts:
        run = task.runs[-1]
        of_rank = [entry for entry in run.log if isinstance(entry.event, StepReport) and entry.event.rank == 1]
        more = tuple(change(entry, event=change(entry.event, rank=2)) for entry in of_rank)
        return change(task, runs=(*task.runs[:-1], change(run, log=(*run.log, *more))))

    assert failed(with_task("urgent", with_another_rank)) == {"losses": "task urgent has a rank 2"}


def test_zeros_of_different_sign_differ() -> None:
    references = {**GOOD.references, "urgent": change(GOOD.references["urgent"], losses={
        **GOOD.references["urgent"].losses, 20: 0.0})}  # fmt: skip
    for loss, good in ((0.0, True), (-0.0, False)):
        facts = change(with_step("urgent", 20, 0, loss), references=references)
        facts = change(facts, tasks=tuple(facts.tasks))
        text = failed(facts)["losses"] if failed(facts) else ""
        assert ("rank 0, step 20" in text) is not good


# --- where tasks went on ---


def test_a_start_from_an_older_checkpoint_is_found() -> None:
    def older(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and event.attempt == 1
        return change(event, step=20, checkpoint="step-00000020") if meant else event

    assert "went on from step 20, the newest checkpoint was of step 30" in failed(with_events("first", older))["starts"]


def test_ranks_that_went_on_from_different_checkpoints_are_found() -> None:
    def apart(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and (event.attempt, event.rank) == (1, 1)
        return change(event, step=20, checkpoint="step-00000020") if meant else event

    assert "different checkpoints" in failed(with_events("first", apart))["starts"]


def test_a_name_that_is_no_checkpoint_of_the_step_is_found() -> None:
    def renamed(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and event.step == 30
        return change(event, checkpoint="step-00000020") if meant else event

    assert "no checkpoint of it" in failed(with_events("first", renamed))["starts"]


def test_a_failed_checkpoint_need_not_be_gone_on_from() -> None:
    def broken(event: JobEvent) -> JobEvent:
        return change(event, error="disk full") if isinstance(event, CheckpointReport) and event.step == 25 else event

    assert "starts" not in failed(with_events("second", broken))


# --- tasks and the course ---


@pytest.mark.parametrize(
    "values", [{"state": "running"}, {"outcome": "failed"}, {"user": "eve"}, {"account": {"queue_ns": 1}}]
)
def test_a_task_that_did_not_end_well_is_found(values: dict[str, Any]) -> None:
    assert "tasks" in failed(with_task("second", lambda task: change(task, **values)))


def test_a_task_that_is_missing_is_found() -> None:
    found = failed(change(GOOD, tasks=GOOD.tasks[:2]))
    assert {"tasks", "losses", "interruption"} <= set(found)


@pytest.mark.parametrize("kind", ["storage", "node", "urgent"])
def test_a_disturbance_that_did_not_take_place_is_found(kind: str) -> None:
    assert "course" in failed(change(GOOD, faults=tuple(one for one in GOOD.faults if one.kind != kind)))


def test_what_kept_the_demonstration_from_going_on_is_told() -> None:
    assert failed(change(GOOD, trouble=("waited for ever",))) == {"course": "waited for ever"}


# --- storage ---


@pytest.mark.parametrize("values", [{"killed": 0}, {"failed_ns": None}, {"over_ns": None}, {"whole_ns": None}])
def test_a_storage_node_that_did_not_die_or_come_back_is_found(values: dict[str, Any]) -> None:
    assert "storage node" in failed(with_fault("storage", **values))


@pytest.mark.parametrize("values", [{"alive": (1, 2)}, {"whole": 5}, {"chains": 0, "whole": 0, "serving": 0}])
def test_a_file_system_that_is_not_whole_at_the_end_is_found(values: dict[str, Any]) -> None:
    last: StorageSample = change(GOOD.storage[-1], **values)
    assert set(failed(change(GOOD, storage=(*GOOD.storage[:-1], last)))) == {"storage node"}


def test_a_chain_that_nobody_served_is_found() -> None:
    facts = change(GOOD, storage=(change(GOOD.storage[0], serving=5), *GOOD.storage[1:]))
    assert "no replica that serves" in failed(facts)["storage node"]


@pytest.mark.parametrize("kind", ["write", "read"])
def test_an_operation_that_failed_or_gave_other_bytes_is_found(kind: str) -> None:
    def broken(one: Operation) -> Operation:
        return change(one, error="/traffic/1 does not hold what was written last")

    at = next(number for number, one in enumerate(GOOD.operations) if one.kind == kind)
    operations = [broken(one) if number == at else one for number, one in enumerate(GOOD.operations)]
    assert set(failed(change(GOOD, operations=tuple(operations)))) == {"storage traffic"}


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("after_s", [8, 11])
def test_traffic_that_stood_still_is_found(kind: str, after_s: int) -> None:
    """While the node was away, or ever after."""
    until_s = 10 if after_s == 8 else 99
    left = [one for one in GOOD.operations if one.kind != kind or not after_s * 10**9 < one.end_ns < until_s * 10**9]
    assert set(failed(change(GOOD, operations=tuple(left)))) == {"storage traffic"}


# --- the compute node ---


@pytest.mark.parametrize("values", [{"killed": 1}, {"over_ns": None}, {"task": "nobody's"}])
def test_a_compute_node_that_did_not_die_or_come_back_is_found(values: dict[str, Any]) -> None:
    assert "compute node" in failed(with_fault("node", **values))


def test_a_kill_after_which_nothing_started_again_is_found() -> None:
    fault = next(one for one in GOOD.faults if one.kind == "node")
    late: Fault = change(fault, at_ns=GOOD.end_ns)
    facts = change(GOOD, faults=tuple(late if one is fault else one for one in GOOD.faults))
    assert "did not start again" in failed(facts)["compute node"]


def test_a_task_that_began_anew_after_the_kill_is_found() -> None:
    def anew(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and event.attempt == 1
        return change(event, step=0, checkpoint=None) if meant else event

    found = failed(with_events("first", anew))
    assert found["compute node"] == "task first began at step 0 again, not from a checkpoint"


# --- the interruption ---


def test_an_urgent_task_that_interrupted_nobody_is_found() -> None:
    def unharmed(task: TaskFacts) -> TaskFacts:
        return change(task, runs=tuple(change(run, cause="interrupted") for run in task.runs))

    assert set(failed(with_task("second", unharmed))) == {"interruption"}


def test_an_interrupted_task_of_the_same_priority_does_not_count() -> None:
    assert "interruption" in failed(with_task("second", lambda task: change(task, priority=30)))


def test_steps_that_were_lost_by_the_interruption_are_found() -> None:
    def earlier(event: JobEvent) -> JobEvent:
        meant = isinstance(event, ResumeReport) and event.step == 25
        return change(event, step=20, checkpoint="step-00000020") if meant else event

    assert "steps were lost" in failed(with_events("second", earlier, run=1))["interruption"]


def test_an_interrupted_task_that_never_ran_again_is_found() -> None:
    assert (
        "did not run again"
        in failed(with_task("second", lambda task: change(task, runs=task.runs[:1])))["interruption"]
    )


@pytest.mark.parametrize("values", [{"nodes": ("agent-1", "agent-2")}, {"scheduled_ns": 0}])
def test_an_urgent_task_with_other_nodes_or_too_soon_is_found(values: dict[str, Any]) -> None:
    def moved(task: TaskFacts) -> TaskFacts:
        return change(task, runs=(change(task.runs[0], **values),))

    assert set(failed(with_task("urgent", moved))) == {"interruption"}


# --- checkpoints ---


@pytest.mark.parametrize("task", ["first", "second", "urgent"])
def test_a_last_checkpoint_that_differs_or_lacks_a_shard_is_found(task: str) -> None:
    names = sorted(GOOD.shards[task])

    def with_shards(shards: dict[str, str]) -> dict[str, str]:
        return failed(change(GOOD, shards={**GOOD.shards, task: shards}))

    assert with_shards({**GOOD.shards[task], names[1]: "c" * 64}) == {
        "checkpoints": f"{names[1]} of the last checkpoint of {task} differs"
    }
    assert set(with_shards({names[0]: GOOD.shards[task][names[0]]})) == {"checkpoints"}
    assert set(with_shards({})) == {"checkpoints"}
    assert set(with_shards({**GOOD.shards[task], "shard-9": "d" * 64})) == {"checkpoints"}


def test_two_runs_without_shards_prove_nothing() -> None:
    references = {**GOOD.references, "first": change(GOOD.references["first"], shards={})}
    assert "checkpoints" in failed(change(GOOD, references=references, shards={**GOOD.shards, "first": {}}))


# --- files ---


def test_a_file_that_differs_is_missing_or_has_no_twin_is_found() -> None:
    other = change(GOOD.stored[1], digest="f" * 64)
    assert failed(change(GOOD, stored=(GOOD.stored[0], other, GOOD.stored[2]))) == {
        "files": "/traffic/1 differs from its twin"
    }
    shorter = change(GOOD.stored[1], bytes=1)
    assert "differs" in failed(change(GOOD, stored=(GOOD.stored[0], shorter, GOOD.stored[2])))["files"]
    assert failed(change(GOOD, stored=GOOD.stored[1:])) == {"files": "/traffic/0 is not in the file system"}
    assert failed(change(GOOD, twins=GOOD.twins[1:])) == {"files": "/traffic/0 is in the file system and has no twin"}
    assert failed(change(GOOD, stored=(), twins=())) == {"files": "no file was written"}
