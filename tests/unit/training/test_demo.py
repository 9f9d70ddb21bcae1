"""The judge of the demonstration: equal runs pass, every difference makes it fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import pytest
from tests.support.jobs.job_logs import Break, JobScript, make_log

from fireflyer.analytics import LossPoint
from fireflyer.base.events import CheckpointReport, JobEvent, Logged, ResumeReport, StepReport
from fireflyer.recipes.demo import DemoSpec, compare_curves, judge

SPEC = DemoSpec(directory="")
RESUMED, KILLED = 60, 70
UNDISTURBED = make_log(JobScript(steps=SPEC.steps, checkpoint_every=SPEC.checkpoint_every))[0]
DISTURBED = make_log(
    JobScript(steps=SPEC.steps, checkpoint_every=SPEC.checkpoint_every, breaks=(Break(after_step=KILLED),))
)[0]
LAST_RANK = SPEC.nodes * SPEC.ranks_per_node - 1


def changed(log: Sequence[Logged], change: Callable[[JobEvent], JobEvent | None]) -> list[Logged]:
    """Without the events that `change` makes None."""
    found = [(entry.at_ns, change(entry.event)) for entry in log]
    return [Logged(at_ns, event) for at_ns, event in found if event is not None]


def with_loss(
    log: Sequence[Logged], step: int, loss: float | None, *, attempt: int | None = None, rank: int | None = None
) -> list[Logged]:
    """Of all attempts and ranks that are not named."""

    def change(event: JobEvent) -> JobEvent:
        if not isinstance(event, StepReport) or event.step != step:
            return event
        if attempt not in (None, event.attempt) or rank not in (None, event.rank):
            return event
        return msgspec.structs.replace(event, loss=loss)

    return changed(log, change)


def loss_at(log: Sequence[Logged], step: int) -> float:
    losses = (entry.event.loss for entry in log if isinstance(entry.event, StepReport) and entry.event.step == step)
    return next(loss for loss in losses if loss is not None)


def without_steps(log: Sequence[Logged], first: int, last: int) -> list[Logged]:
    return changed(log, lambda event: None if isinstance(event, StepReport) and first <= event.step <= last else event)


def resumed_from(log: Sequence[Logged], step: int, name: str | None, *, rank: int | None = None) -> list[Logged]:
    """What the second attempt said; of all ranks, or of one."""

    def change(event: JobEvent) -> JobEvent:
        if not isinstance(event, ResumeReport) or event.attempt == 0 or rank not in (None, event.rank):
            return event
        return msgspec.structs.replace(event, step=step, checkpoint=name)

    return changed(log, change)


def problems(disturbed: Sequence[Logged], undisturbed: Sequence[Logged] = UNDISTURBED) -> list[str]:
    facts, found = judge(SPEC, undisturbed, disturbed)
    assert bool(found) or "loss curve" in dict(facts)
    return found


def test_equal_runs_pass() -> None:
    facts, found = judge(SPEC, UNDISTURBED, DISTURBED)
    assert found == []
    assert dict(facts) == {
        "node killed": "node 1 (its supervisor and its ranks) at step 71",
        "resumed from": "step 60 (step-00000060)",
        "loss curve": "steps 61 to 120 are bitwise those of the undisturbed run with the same seed",
    }


@pytest.mark.parametrize("towards", [-math.inf, math.inf])
@pytest.mark.parametrize(
    ("step", "attempt"), [(1, 0), (RESUMED, 0), (RESUMED + 1, 0), (KILLED, 0), (RESUMED + 1, 1), (SPEC.steps, 1)]
)
@pytest.mark.parametrize("rank", [None, 0, LAST_RANK])
def test_one_loss_that_is_off_by_one_ulp_is_found(step: int, attempt: int, rank: int | None, towards: float) -> None:
    """Also of a step that was thrown away and computed again, and of one rank alone."""
    off = math.nextafter(loss_at(DISTURBED, step), towards)
    (problem, *_) = problems(with_loss(DISTURBED, step, off, attempt=attempt, rank=rank))
    assert problem.endswith(f" at step {step}")


def test_a_loss_of_another_sign_of_zero_is_found() -> None:
    def both(mine: float, theirs: float) -> list[str]:
        return problems(with_loss(DISTURBED, SPEC.steps, mine), with_loss(UNDISTURBED, SPEC.steps, theirs))

    assert both(0.0, 0.0) == []
    assert both(-0.0, 0.0)


@pytest.mark.parametrize("step", [1, RESUMED, RESUMED + 1, SPEC.steps])
def test_a_missing_step_is_found_in_either_run(step: int) -> None:
    shorter = without_steps(DISTURBED, step, step), without_steps(UNDISTURBED, step, step)
    assert problems(shorter[0])
    assert problems(DISTURBED, shorter[1])
    assert problems(*shorter), "two curves that both lack a step prove nothing for it"


@pytest.mark.parametrize("step", [RESUMED, SPEC.steps])
def test_a_step_whose_loss_nobody_knows_is_found(step: int) -> None:
    assert problems(with_loss(DISTURBED, step, None), with_loss(UNDISTURBED, step, None))


@pytest.mark.parametrize("last", [RESUMED, KILLED, SPEC.steps - 1])
def test_a_curve_that_is_cut_short_is_found_in_either_run(last: int) -> None:
    shorter = without_steps(DISTURBED, last + 1, SPEC.steps), without_steps(UNDISTURBED, last + 1, SPEC.steps)
    assert problems(shorter[0])
    assert problems(DISTURBED, shorter[1])
    assert problems(*shorter)


@pytest.mark.parametrize("run", ["undisturbed", "disturbed"])
@pytest.mark.parametrize("rank", [0, LAST_RANK])
def test_a_step_that_is_reported_again_with_another_loss_is_found(run: str, rank: int) -> None:
    logs = {"undisturbed": UNDISTURBED, "disturbed": DISTURBED}
    log = logs[run]
    index, again = next(
        (index, entry.event)
        for index, entry in enumerate(log)
        if isinstance(entry.event, StepReport) and entry.event.step == 100 and entry.event.rank == rank
    )
    repeated = [*log[: index + 1], Logged(log[index].at_ns + 1, again), *log[index + 1 :]]
    assert problems(**(logs | {run: repeated})) == []
    other = msgspec.structs.replace(again, loss=loss_at(log, 100) * (1 + 1e-15))
    assert other.loss != again.loss
    repeated[index + 1] = Logged(log[index].at_ns + 1, other)
    (problem,) = problems(**(logs | {run: repeated}))
    assert problem == (
        f"a loss of the {run} run is not that of the undisturbed curve: "
        f"rank {rank} in attempt {again.attempt} at step 100"
    )


@pytest.mark.parametrize("step", [1, RESUMED, RESUMED + 1, SPEC.steps])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_found_though_both_runs_have_it(step: int, loss: float) -> None:
    assert problems(with_loss(DISTURBED, step, loss), with_loss(UNDISTURBED, step, loss))


def test_an_attempt_that_started_from_an_older_checkpoint_than_was_committed_is_found() -> None:
    """Though its losses are right: it computed steps again that were saved."""
    older = make_log(JobScript(steps=SPEC.steps, checkpoint_every=40, breaks=(Break(after_step=KILLED),)))[0]
    assert problems(older) == [], "a save of step 60 may have been under way when the node was killed"
    at = next(index for index, entry in enumerate(older) if getattr(entry.event, "step", 0) > RESUMED)
    older.insert(at, Logged(older[at].at_ns, CheckpointReport(0, 0, RESUMED, 1000, 0, 0, error="no space")))
    assert problems(older) == []
    older.insert(at, Logged(older[at].at_ns, CheckpointReport(LAST_RANK, 0, RESUMED, 1000, 0, 0)))
    assert problems(older) == ["the job resumed from step 40 although the checkpoint of step 60 was committed"]


def test_an_attempt_that_started_from_another_checkpoint_than_it_says_is_found() -> None:
    for name in ("step-00000040", ".tmp-step-00000060-00000-000003", "60", None):
        assert problems(resumed_from(DISTURBED, 60, name)) == [
            f"the job resumed at step 60 from {name}, which is not a checkpoint of that step"
        ]
    assert problems(resumed_from(DISTURBED, 60, "step-00000060.2")) == [], "saved again after the first was damaged"


def test_an_attempt_that_started_from_a_checkpoint_of_another_run_is_found() -> None:
    ahead = problems(resumed_from(DISTURBED, 80, "step-00000080"))
    assert "the loss curve before the failure differs, first at step 71" in ahead
    assert problems(resumed_from(DISTURBED, 0, None))[0].startswith("the job restarted at step 0")


@pytest.mark.parametrize("rank", [0, LAST_RANK])
def test_ranks_that_resumed_from_different_checkpoints_are_found(rank: int) -> None:
    assert "ranks of one attempt resumed from different checkpoints" in problems(
        resumed_from(DISTURBED, 40, "step-00000040", rank=rank)
    )


def test_a_job_that_was_never_killed_or_never_resumed_proves_nothing() -> None:
    said = ["the node was not killed, or the job did not resume from a checkpoint after it"]
    assert problems(UNDISTURBED) == said
    first = changed(DISTURBED, lambda event: None if getattr(event, "attempt", 0) else event)
    assert problems(first) == said


def test_an_undisturbed_run_that_was_restarted_is_found() -> None:
    """Though its losses are right: what was killed by nobody has a defect."""
    crash = Break(after_step=KILLED, injected=False)
    restarted = make_log(JobScript(steps=SPEC.steps, checkpoint_every=SPEC.checkpoint_every, breaks=(crash,)))[0]
    (problem,) = problems(DISTURBED, restarted)
    assert problem.startswith("the undisturbed run was restarted: ")


@pytest.mark.parametrize("rank", [0, LAST_RANK])
@pytest.mark.parametrize("kind", [StepReport, ResumeReport])
def test_a_rank_that_reports_nothing_is_found_in_either_run(rank: int, kind: type) -> None:
    def silence(event: JobEvent) -> JobEvent | None:
        return None if isinstance(event, kind) and getattr(event, "rank", None) == rank else event

    for job, found in (
        ("disturbed", problems(changed(DISTURBED, silence))),
        ("undisturbed", problems(DISTURBED, changed(UNDISTURBED, silence))),
    ):
        assert f"rank {rank} of the {job} run reported no start or no loss of step {SPEC.steps}" in found


def test_a_loss_that_does_not_fall_is_a_problem() -> None:
    higher = loss_at(UNDISTURBED, 1)
    runs = [with_loss(log, SPEC.steps, higher) for log in (DISTURBED, UNDISTURBED)]
    assert problems(*runs) == ["the loss did not fall"]


def curve(*losses: float) -> list[LossPoint]:
    return [LossPoint(step, loss, 0) for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("ours", "reference", "compared", "difference"),
    [
        (curve(3.0, 2.0, 1.0), curve(3.0, 2.0, 1.0), 3, None),
        (curve(3.0, 2.0, math.nextafter(1.0, 2.0)), curve(3.0, 2.0, 1.0), 2, 3),
        (curve(3.0, 2.0), curve(3.0, 2.0, 1.0), 2, 3),
        (curve(3.0, 2.0, 1.0), curve(3.0, 2.0), 2, 3),
        (curve(3.0, math.nan, 1.0), curve(3.0, math.nan, 1.0), 1, 2),
        ([*curve(3.0, 2.0, 1.0), LossPoint(2, 2.5, 1)], curve(3.0, 2.0, 1.0), 1, 2),
        ([LossPoint(2, 2.5, 0), *curve(3.0, 2.0, 1.0)], curve(3.0, 2.0, 1.0), 1, 2),
        ([*curve(3.0, 2.0, 1.0), LossPoint(2, 2.0, 1)], curve(3.0, 2.0, 1.0), 3, None),
        ([], [], 0, 1),
    ],
)
def test_curves_are_compared_step_by_step(
    ours: list[LossPoint], reference: list[LossPoint], compared: int, difference: int | None
) -> None:
    found = compare_curves(ours, reference, first=1, last=3)
    assert (found.compared, found.first_difference) == (compared, difference)
    assert found.equal == (difference is None)


def test_of_no_steps_nothing_is_equal() -> None:
    assert not compare_curves(curve(1.0), curve(1.0), first=2, last=1).equal
