"""What the gang machine does with a suspension, each told as a short story of events."""

from __future__ import annotations

import pytest
from tests.unit.cluster.test_gang_decisions import Story, ends, of

from fireflyer.base.events import AttemptFailed, AttemptStarted, JobFinished, RankExited, Suspended, SuspendRequested
from fireflyer.base.suspension import NEVER, SUSPENDED_EXIT_CODE
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.gang import Phase
from fireflyer.cluster.core.messages import (
    AskPoints,
    AttemptPrepared,
    Log,
    NameHorizon,
    PointsCollected,
    RankEnded,
    RanksGone,
    StartRanks,
    StopRanks,
    StopRequested,
    SupervisorGone,
    SupervisorLost,
    SupervisorUp,
    SuspendAsked,
    WatchdogSet,
)
from fireflyer.cluster.schema.wire import Points, RankEnd

GRACE_NS = 60 * SECOND


def points(node: int, *values: int, attempt: int = 0) -> PointsCollected:
    return PointsCollected(node, 1, Points(attempt, values))


def left(node: int) -> RanksGone:
    return RanksGone(
        node,
        1,
        0,
        tuple(RankEnd(0, rank, SUSPENDED_EXIT_CODE, False, suspended=True) for rank in (2 * node, 2 * node + 1)),
    )


def over(story: Story) -> Story:
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.gang.phase is Phase.FINISHED
    return story


def suspending() -> Story:
    story = Story(max_restarts=1).running()
    story.tell(SuspendAsked(), points(0, 7, 8), points(1, 7, 7))
    return story


def test_the_horizon_is_one_above_the_highest_point_and_named_when_all_nodes_have_answered() -> None:
    story = Story().running()
    assert of(story.tell(SuspendAsked()), AskPoints) == [AskPoints(0, 1, 0), AskPoints(1, 1, 0)]
    assert story.tell(points(0, 7, 8), points(0, 7, 8), points(1, 99, 99, attempt=3)) == []
    assert story.tell(points(1, 6, NEVER)) == [NameHorizon(0, 1, 0, 9), NameHorizon(1, 1, 0, 9)]
    assert story.tell(points(1, 6, NEVER)) == [], "an answer that comes twice"


def test_a_job_whose_ranks_have_left_is_suspended() -> None:
    story = suspending()
    story.tell(left(0), left(1))
    finish = over(story).finish()
    assert (finish.exit_code, finish.suspended, finish.culprit) == (SUSPENDED_EXIT_CODE, True, None)
    assert story.logged(Suspended) == [Suspended(0, horizon=9, ended_ranks=0)]
    assert story.logged(AttemptFailed) == []
    assert story.logged(JobFinished) == [JobFinished(SUSPENDED_EXIT_CODE, "suspended")]


def test_a_job_that_comes_to_its_end_first_has_succeeded() -> None:
    story = suspending()
    story.tell(RanksGone(0, 1, 0, ends(0, 0, 0)), RanksGone(1, 1, 0, ends(1, 0, 0)))
    assert over(story).finish().exit_code == 0


def test_the_points_of_ranks_that_have_ended_count_also_if_their_node_answers_after_that() -> None:
    story = Story().running()
    story.tell(SuspendAsked(), points(0, 5, 5))
    assert story.tell(RanksGone(1, 1, 0, ends(1, 0, 0))) == [Log(RankExited(2, 0, 0)), Log(RankExited(3, 0, 0))]
    assert story.tell(points(1, 9, NEVER)) == [NameHorizon(0, 1, 0, 10)]


def test_a_node_whose_ranks_had_ended_before_is_asked_too() -> None:
    story = Story().running()
    story.tell(RanksGone(1, 1, 0, ends(1, 0, 0)))
    assert of(story.tell(SuspendAsked()), AskPoints) == [AskPoints(0, 1, 0), AskPoints(1, 1, 0)]
    story.tell(points(0, 5, 5))
    assert story.tell(points(1, 9, 9)) == [NameHorizon(0, 1, 0, 10)]


def test_ranks_that_are_overdue_are_stopped_and_the_job_is_suspended() -> None:
    story = suspending()
    assert of(story.wait(GRACE_NS - SECOND), StopRanks) == []
    assert [(stop.node, stop.stop.signal, stop.stop.settle_ns) for stop in of(story.wait(2 * SECOND), StopRanks)] == [
        (0, 15, 0),
        (1, 15, 0),
    ]
    story.tell(RanksGone(0, 1, 0, ends(0, 143, 137, told=True)), RanksGone(1, 1, 0, ends(1, 143, 0, told=True)))
    finish = over(story).finish()
    assert (finish.exit_code, finish.suspended) == (SUSPENDED_EXIT_CODE, True)
    assert finish.reason == "suspended; 4 of 4 ranks did not leave by themselves and were stopped"
    assert story.logged(Suspended) == [Suspended(0, horizon=None, ended_ranks=4)]


def test_ranks_that_never_asked_are_stopped_soon_after_the_others_have_left() -> None:
    story = Story().running()
    story.tell(SuspendAsked(), points(0, 7, NEVER), points(1, NEVER, NEVER))
    story.tell(RankEnded(0, 1, RankEnd(0, 0, SUSPENDED_EXIT_CODE, False, suspended=True)))
    assert of(story.wait(4 * SECOND), StopRanks) == []
    assert len(of(story.wait(2 * SECOND), StopRanks)) == 2


def test_a_rank_that_had_asked_is_waited_for_when_another_has_left() -> None:
    story = suspending()
    story.tell(RankEnded(0, 1, RankEnd(0, 0, SUSPENDED_EXIT_CODE, False, suspended=True)))
    assert of(story.wait(GRACE_NS - SECOND), StopRanks) == []


def test_what_fails_when_another_rank_has_left_fails_because_of_that() -> None:
    for first in (0, 1):
        story = Story(max_restarts=0).running()
        story.tell(SuspendAsked(), points(0, 7, NEVER), points(1, NEVER, NEVER))
        news = [
            RankEnded(0, 1, RankEnd(0, 0, SUSPENDED_EXIT_CODE, False, suspended=True)),
            RankEnded(1, 1, RankEnd(0, 2, 1, False)),
        ]
        story.tell(news[first])
        story.wait(SECOND)
        story.tell(news[1 - first])
        story.wait(6 * SECOND)
        story.tell(RanksGone(0, 1, 0, (RankEnd(0, 1, 143, True),)), RanksGone(1, 1, 0, (RankEnd(0, 3, 143, True),)))
        assert over(story).finish().suspended


@pytest.mark.parametrize(("max_restarts", "code"), [(0, 7), (1, SUSPENDED_EXIT_CODE)])
def test_a_rank_that_fails_before_any_has_left_is_judged_and_not_started_again(max_restarts: int, code: int) -> None:
    story = Story(max_restarts=max_restarts).running()
    story.tell(SuspendAsked(), RankEnded(1, 1, RankEnd(0, 3, 7, False)))
    story.tell(RanksGone(0, 1, 0, ends(0, 143, 143, told=True)), RanksGone(1, 1, 0, ends(1, 143, 7, told=True)))
    finish = over(story).finish()
    assert finish.exit_code == code
    assert "rank 3 (node 1) exited with code 7" in finish.reason
    assert [event.restarting for event in story.logged(AttemptFailed)] == [False]


def test_a_node_that_is_lost_before_any_rank_has_left_suspends_a_job_that_may_restart() -> None:
    story = Story(max_restarts=1).running()
    story.tell(SuspendAsked(), points(0, 7, 7), SupervisorLost(1, 1, "killed"))
    story.tell(SupervisorGone(1, 1, ""), RanksGone(0, 1, 0, ends(0, 143, 143, told=True)), SupervisorGone(0, 1, ""))
    assert story.finish().suspended
    assert "node 1 was lost" in story.finish().reason


def test_a_job_that_is_starting_is_suspended_at_once() -> None:
    story = Story()
    story.tell(SupervisorUp(0, 1), SuspendAsked())
    assert over(story).finish().suspended
    assert story.logged(Suspended) == [Suspended(0)]
    assert of(story.effects, StartRanks) == []


def test_a_job_that_is_about_to_restart_is_suspended_instead() -> None:
    story = Story(max_restarts=3).running()
    story.tell(RankEnded(1, 1, RankEnd(0, 3, 7, False)))
    story.tell(RanksGone(0, 1, 0, ends(0, 143, 143, told=True)), RanksGone(1, 1, 0, ends(1, 143, 7, told=True)))
    assert story.gang.phase is Phase.PAUSING
    story.tell(SuspendAsked())
    assert over(story).finish().suspended
    assert len(story.logged(AttemptStarted)) == 1


def test_ctrl_c_during_a_suspension_stops_the_job() -> None:
    story = suspending()
    assert len(of(story.tell(StopRequested(2)), StopRanks)) == 2
    story.tell(RanksGone(0, 1, 0, ends(0, 130, 130, told=True)), RanksGone(1, 1, 0, ends(1, 130, 130, told=True)))
    assert (over(story).finish().exit_code, story.finish().suspended) == (130, False)


def test_a_second_request_changes_nothing_and_a_stopped_job_is_not_suspended() -> None:
    story = suspending()
    assert story.tell(SuspendAsked()) == []
    stopped = Story().running()
    stopped.tell(StopRequested(2), SuspendAsked())
    assert stopped.logged(SuspendRequested) == []


def test_a_launcher_that_slept_gives_the_ranks_their_grace_back() -> None:
    story = suspending()
    story.now_ns += 10 * GRACE_NS
    assert of(story.wait(GRACE_NS - SECOND), StopRanks) == []


def test_a_rank_that_left_without_having_been_asked_suspends_the_job() -> None:
    story = Story().running()
    effects = story.tell(RankEnded(0, 1, RankEnd(0, 1, SUSPENDED_EXIT_CODE, False, suspended=True)))
    assert story.logged(SuspendRequested) == [SuspendRequested(0, rank=1)]
    assert of(effects, AskPoints) == [AskPoints(0, 1, 0), AskPoints(1, 1, 0)]


def test_the_exit_code_85_of_a_rank_that_did_not_leave_is_a_failure_with_exit_code_1() -> None:
    story = Story(max_restarts=0).running()
    story.tell(RanksGone(0, 1, 0, ends(0, 85, 143)), RanksGone(1, 1, 0, ends(1, 143, 143, told=True)))
    assert (over(story).finish().exit_code, story.finish().suspended) == (1, False)


def test_a_suspension_that_is_ordered_for_a_time_comes_then() -> None:
    story = Story(suspend_after_ns=3 * SECOND).running()
    assert of(story.wait(2 * SECOND), AskPoints) == []
    assert len(of(story.wait(2 * SECOND), AskPoints)) == 2


def test_a_rank_sets_the_time_of_the_watchdog() -> None:
    story = Story(max_restarts=0).running()
    story.wait(10 * SECOND)
    story.tell(WatchdogSet(5 * SECOND))
    assert of(story.wait(4 * SECOND), StopRanks) == []
    assert len(of(story.wait(2 * SECOND), StopRanks)) == 2


def test_an_attempt_that_is_prepared_too_late_starts_no_ranks() -> None:
    story = Story()
    story.tell(SupervisorUp(0, 1), SupervisorUp(1, 1), SuspendAsked(), AttemptPrepared(0))
    assert of(story.effects, StartRanks) == []
    assert over(story).finish().suspended
