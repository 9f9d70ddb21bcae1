"""Single decisions of the gang machine, each told as a short story of events."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest

from fireflyer.base.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointReport,
    FaultInjected,
    JobEvent,
    JobFinished,
    NodeLost,
    PeerFailureReport,
    Report,
    StepReport,
)
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.blame import Failure, blame, describe_end
from fireflyer.cluster.core.gang import TICK_NS, Gang, NodeState, Phase
from fireflyer.cluster.core.messages import (
    AttemptPrepared,
    Begin,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    PrepareAttempt,
    PrepareFailed,
    RankEnded,
    RankReported,
    RanksGone,
    RanksPrinted,
    ShutDownSupervisor,
    StartRanks,
    StartSupervisor,
    StopRanks,
    StopRequested,
    StorageFailed,
    SupervisorGone,
    SupervisorHeartbeat,
    SupervisorLost,
    SupervisorUp,
    Tick,
)
from fireflyer.cluster.schema.job import Fault, JobSpec, Timeouts, parse_fault
from fireflyer.cluster.schema.wire import RankEnd, RankError, Stop

T = TypeVar("T")
TIMEOUTS = Timeouts()


class Story:
    """Two nodes of two ranks. Supervisors of `beating` nodes beat with every tick."""

    def __init__(self, **changes: object) -> None:
        spec = JobSpec(script="x.py", run_dir="/run", nodes=2, ranks_per_node=2, max_restarts=1)
        self.gang = Gang(msgspec.structs.replace(spec, **changes))
        self.now_ns = 1000 * SECOND
        self.effects: list[Effect] = []
        self.beating = {0: 1, 1: 1}
        self.tell(Begin(0.0))

    def tell(self, *events: Event) -> list[Effect]:
        """Effects of these events."""
        new = [effect for event in events for effect in self.gang.handle(self.now_ns, event)]
        self.effects += new
        return new

    def wait(self, span_ns: int) -> list[Effect]:
        new: list[Effect] = []
        for _ in range(-(-span_ns // TICK_NS)):
            self.now_ns += TICK_NS
            for node, incarnation in self.beating.items():
                new += self.tell(SupervisorHeartbeat(node, incarnation))
            new += self.tell(Tick())
        return new

    def running(self) -> Story:
        self.tell(SupervisorUp(0, 1), SupervisorUp(1, 1), AttemptPrepared(0))
        assert self.gang.phase is Phase.RUNNING
        return self

    def logged(self, kind: type[T]) -> list[T]:
        events: list[JobEvent] = [effect.event for effect in self.effects if isinstance(effect, Log)]
        return [event for event in events if isinstance(event, kind)]

    def finish(self) -> Finish:
        (finish,) = of(self.effects, Finish)
        return finish


def of(effects: list[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def ends(node: int, *codes: int, attempt: int = 0, told: bool = False) -> tuple[RankEnd, ...]:
    return tuple(RankEnd(attempt, 2 * node + local, code, told) for local, code in enumerate(codes))


def gone(node: int, *codes: int, attempt: int = 0, told: bool = False) -> RanksGone:
    return RanksGone(node, 1, attempt, ends(node, *codes, attempt=attempt, told=told))


def step_report(rank: int, step: int, attempt: int = 0) -> StepReport:
    return StepReport(rank, attempt, step, 1, 1, 0.5, 1)


def test_ranks_start_when_every_supervisor_is_up_and_a_port_is_found() -> None:
    story = Story()
    assert of(story.effects, StartSupervisor) == [StartSupervisor(0, 1, 0), StartSupervisor(1, 1, 1)]
    assert story.tell(SupervisorUp(0, 1)) == []
    assert story.tell(SupervisorUp(1, 1)) == [PrepareAttempt(0)]
    assert story.tell(AttemptPrepared(0)) == [StartRanks(0, 1, 0), StartRanks(1, 1, 0)]


def test_success_is_when_every_rank_of_every_node_ended_with_zero() -> None:
    story = Story().running()
    story.tell(gone(0, 0, 0))
    story.wait(60 * SECOND)
    assert story.gang.phase is Phase.RUNNING
    assert of(story.tell(gone(1, 0, 0)), ShutDownSupervisor) == [ShutDownSupervisor(0, 1), ShutDownSupervisor(1, 1)]
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish() == Finish(0, "all ranks exited with code 0", None)
    assert story.logged(JobFinished) == [JobFinished(0, "all ranks exited with code 0")]


def test_the_loss_of_a_node_is_blamed_before_the_ranks_that_fail_of_it() -> None:
    story = Story().running()
    story.tell(RankEnded(0, 1, RankEnd(0, 0, 1, False)), RankEnded(0, 1, RankEnd(0, 1, 1, False)))
    story.wait(100 * MS)
    story.tell(SupervisorLost(1, 1, "killed"))
    story.wait(TIMEOUTS.blame_ns)
    (failed,) = story.logged(AttemptFailed)
    assert (failed.node, failed.rank, failed.reason) == (1, None, "node 1 was lost: killed")


def test_a_rank_that_was_told_to_stop_is_never_blamed() -> None:
    story = Story(max_restarts=0).running()
    story.tell(RankEnded(1, 1, RankEnd(0, 3, 7, False)))
    story.tell(gone(0, 137, 137, told=True), gone(1, 137, 7, told=True))
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish().exit_code == 7


def gave_up(rank: int, peer: int, attempt: int = 0) -> RankReported:
    return RankReported(PeerFailureReport(rank, attempt, peer, f"rank {peer} has not entered\nallreduce #7"))


def test_a_rank_that_hangs_is_blamed_and_not_the_first_that_gave_up_on_it() -> None:
    story = Story(max_restarts=0).running()
    story.tell(gave_up(1, 2), gave_up(0, 3), gave_up(2, 3), RankEnded(0, 1, RankEnd(0, 1, 5, False)))
    story.tell(gone(0, 5, 5), gone(1, 5, 137, told=True), SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    (failed,) = story.logged(AttemptFailed)
    assert (failed.node, failed.rank, failed.reason) == (1, 3, "rank 3 has not entered allreduce #7")
    finish = story.finish()
    assert (finish.exit_code, finish.culprit and finish.culprit.rank) == (5, 3), "the code is of the rank that ended"


def test_a_rank_that_raises_is_blamed_by_its_own_end_though_another_was_gone_before_it() -> None:
    story = Story(max_restarts=0).running()
    story.tell(gave_up(1, 2), RankEnded(0, 1, RankEnd(0, 1, 5, False)), RankEnded(1, 1, RankEnd(0, 2, 3, False)))
    story.wait(TIMEOUTS.blame_ns)
    (failed,) = story.logged(AttemptFailed)
    assert (failed.node, failed.rank, failed.reason) == (1, 2, "rank 2 (node 1) exited with code 3")


@pytest.mark.parametrize(
    "reports",
    [(), (gave_up(0, 3),), (gave_up(1, 1),), (gave_up(1, 9),), (gave_up(1, 3, attempt=1),)],
    ids=["nobody said anything", "another said it", "itself", "no such rank", "in another attempt"],
)
def test_a_rank_that_failed_without_naming_a_peer_is_blamed_itself(reports: tuple[RankReported, ...]) -> None:
    story = Story(max_restarts=0).running()
    story.tell(*reports, RankEnded(0, 1, RankEnd(0, 1, 5, False)))
    story.wait(TIMEOUTS.blame_ns)
    (failed,) = story.logged(AttemptFailed)
    assert (failed.rank, failed.reason) == (1, "rank 1 (node 0) exited with code 5")


def test_a_rank_that_was_killed_is_blamed_whatever_others_say() -> None:
    story = Story(max_restarts=0).running()
    story.tell(gave_up(0, 1), gave_up(2, 3), RankEnded(1, 1, RankEnd(0, 2, 1, False)))
    story.tell(RankEnded(1, 1, RankEnd(0, 3, 137, False)))
    story.wait(TIMEOUTS.blame_ns)
    (failed,) = story.logged(AttemptFailed)
    assert (failed.rank, failed.reason) == (3, "rank 3 (node 1) was killed by SIGKILL")


def test_failures_are_compared_by_what_can_cause_what() -> None:
    first, killed, lost = Failure(0, 0, 1, "a"), Failure(1, 2, 137, "b"), Failure(1, None, 1, "c")
    assert blame([first]) == first
    assert blame([first, killed]) == killed
    assert blame([first, killed, lost]) == lost
    assert blame([first, Failure(0, 1, 2, "d")]) == first


def test_ends_are_described_as_people_say_them() -> None:
    error = RankError("ValueError", "bad batch shape (3, 4)", "train.py", 41)
    assert describe_end(RankEnd(0, 3, 2, False), 1) == "rank 3 (node 1) exited with code 2"
    assert describe_end(RankEnd(0, 3, 139, False)) == "rank 3 was killed by SIGSEGV"
    assert describe_end(RankEnd(0, 3, 255, False), 1) == "rank 3 (node 1) exited with code 255"
    assert describe_end(RankEnd(0, 0, 126, False, "no fd"), 0) == "rank 0 (node 0) could not be started: no fd"
    assert describe_end(RankEnd(0, 2, 1, False, error=error)) == (
        "rank 2: ValueError: bad batch shape (3, 4), at train.py:41"
    )
    assert describe_end(RankEnd(0, 2, 1, False, error=RankError("KeyError"))) == "rank 2: KeyError"
    assert describe_end(RankEnd(0, 2, 137, False, out_of_memory="cgroup limit 512 MiB")) == (
        "rank 2 was killed: out of memory (cgroup limit 512 MiB)"
    )


def test_a_silent_supervisor_is_lost_in_less_than_two_seconds() -> None:
    story = Story().running()
    story.wait(SECOND)
    del story.beating[1]
    assert of(story.wait(TIMEOUTS.node_lost_ns + TICK_NS), KillNode) == [KillNode(1, 1)]
    assert "no heartbeat" in story.logged(NodeLost)[0].reason
    assert TIMEOUTS.node_lost_ns + 2 * TICK_NS < 2 * SECOND


def test_a_launcher_that_slept_does_not_blame_its_nodes() -> None:
    story = Story().running()
    story.wait(SECOND)
    story.now_ns += 3600 * SECOND
    story.tell(Tick())
    story.wait(SECOND)
    assert story.logged(NodeLost) == []
    del story.beating[0]
    assert of(story.wait(2 * SECOND), KillNode) == [KillNode(0, 1)]


def test_a_launcher_that_slept_gives_its_nodes_the_time_to_come_up() -> None:
    story = Story()
    story.wait(SECOND)
    story.now_ns += 3600 * SECOND
    assert of(story.tell(Tick()), KillNode) == []
    assert of(story.wait(TIMEOUTS.supervisor_start_ns), KillNode) == [KillNode(0, 1), KillNode(1, 1)]


def test_an_supervisor_that_cannot_start_is_not_started_over_and_over_before_the_restart() -> None:
    story = Story().running()
    story.tell(SupervisorLost(1, 1, "died"), gone(0, 143, 143, told=True))
    assert of(story.tell(SupervisorGone(1, 1, "")), StartSupervisor) == [StartSupervisor(1, 2, 1)]
    assert story.gang.phase is Phase.PAUSING
    assert of(story.tell(SupervisorGone(1, 2, "no descriptor left")), StartSupervisor) == []
    assert of(story.wait(TIMEOUTS.backoff_ns), StartSupervisor) == [StartSupervisor(1, 3, 1)]
    assert len(story.logged(AttemptStarted)) == 2


def test_a_lost_node_is_started_anew_only_when_nothing_is_left_on_it() -> None:
    story = Story().running()
    story.tell(SupervisorLost(1, 1, "died"), gone(0, 143, 143, told=True))
    del story.beating[1]
    assert of(story.wait(5 * SECOND), StartSupervisor) == []
    assert story.gang.states() == (NodeState.IDLE, NodeState.KILLING)
    assert of(story.tell(SupervisorGone(1, 1, "")), StartSupervisor) == [StartSupervisor(1, 2, 1)]
    assert of(story.wait(SECOND), StartSupervisor) == []
    story.beating[1] = 2
    started = of(story.tell(SupervisorUp(1, 2), AttemptPrepared(1)), StartRanks)
    assert started == [StartRanks(0, 1, 1), StartRanks(1, 2, 1)]
    assert [event.attempt for event in story.logged(AttemptStarted)] == [0, 1]


def test_messages_from_the_past_change_nothing() -> None:
    story = Story().running()
    story.tell(gone(0, 3, 3), gone(1, 143, 143, told=True))
    story.wait(SECOND)
    story.tell(AttemptPrepared(1))
    assert story.gang.phase is Phase.RUNNING
    before = story.gang.states()
    stale: list[Event] = [
        gone(0, 3, 3),
        RankEnded(1, 1, RankEnd(0, 2, 9, False)),
        AttemptPrepared(0),
        SupervisorGone(1, 0, "old"),
    ]
    assert story.tell(*stale, RankReported(step_report(0, 1, attempt=0)), SupervisorUp(0, 7), SupervisorUp(9, 1)) == []
    assert story.gang.states() == before


def test_reports_of_the_attempt_are_logged_and_others_are_not() -> None:
    story = Story().running()
    good: list[Report] = [step_report(3, 1), CheckpointReport(0, 0, 1, 10, 1, 1)]
    for report in (*good, step_report(4, 1), step_report(-1, 1), step_report(0, 1, attempt=1)):
        story.tell(RankReported(report))
    assert story.logged(StepReport) + story.logged(CheckpointReport) == good


def test_a_fault_is_injected_once_at_its_step_in_the_first_attempt() -> None:
    fault = Fault("kill-node", 1, 10)
    story = Story(inject=(fault,)).running()
    assert of(story.tell(RankReported(step_report(0, 9))), Inject) == []
    assert of(story.tell(RankReported(step_report(2, 11))), Inject) == [Inject(fault)]
    assert of(story.tell(RankReported(step_report(0, 12))), Inject) == []
    assert story.logged(FaultInjected) == [FaultInjected("kill-node=1", 0, 11)]


def test_a_fault_by_time_needs_no_report_and_strikes_once_after_the_ranks_were_started() -> None:
    fault = parse_fault("kill-rank=1@2s")
    story = Story(inject=(fault,)).running()
    assert of(story.wait(2 * SECOND - TICK_NS), Inject) == []
    assert list(story.gang.faults_left) == [fault]
    assert of(story.wait(TICK_NS), Inject) == [Inject(fault)]
    assert of(story.wait(SECOND), Inject) == []
    assert list(story.gang.faults_left) == []
    assert story.logged(FaultInjected) == [FaultInjected("kill-rank=1", 0, None)]


def test_a_fault_that_was_never_due_is_left_over() -> None:
    faults = (parse_fault("kill-node=1@60"), parse_fault("kill-rank=0@3600s"))
    story = Story(inject=faults).running()
    story.tell(gone(0, 0, 0), gone(1, 0, 0))
    assert story.gang.faults_left == faults


def test_a_signal_is_passed_on_and_decides_the_exit_code() -> None:
    story = Story().running()
    grace_ns = TIMEOUTS.stop_grace_ns
    assert of(story.tell(StopRequested(2)), StopRanks) == [
        StopRanks(node, 1, Stop(0, 2, 0, grace_ns)) for node in (0, 1)
    ]
    story.tell(gone(0, 0, 0, told=True), gone(1, 130, 0, told=True))
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish() == Finish(130, "stopped by SIGINT", None, 2)
    (failed,) = story.logged(AttemptFailed)
    assert (failed.stopped, failed.restarting, failed.node) == (True, False, None)


def test_after_a_failure_ranks_may_end_by_themselves_first() -> None:
    story = Story().running()
    settle_ns, grace_ns = TIMEOUTS.settle_ns, TIMEOUTS.stop_grace_ns
    (stop, _) = of(story.tell(RankEnded(1, 1, RankEnd(0, 3, 137, False))), StopRanks)
    assert stop == StopRanks(0, 1, Stop(0, 15, settle_ns, grace_ns))
    story.tell(gone(0, 1, 1), gone(1, 1, 137))
    (failed,) = story.logged(AttemptFailed)
    assert (failed.rank, failed.restarting) == (3, True)


@pytest.mark.parametrize(
    ("end", "reports", "stacks"),
    [
        (RankEnd(0, 1, 1, False), (gave_up(1, 3),), True),
        (RankEnd(0, 1, 1, False), (gave_up(0, 3),), False),
        (RankEnd(0, 1, 1, False, error=RankError("fireflyer.base.errors.PeerFailed", "rank 3")), (), True),
        (RankEnd(0, 1, 1, False, error=RankError("RuntimeError", "[gloo] Timed out waiting 1800000ms")), (), True),
        (RankEnd(0, 1, 1, False, error=RankError("ValueError", "bad")), (), False),
        (RankEnd(0, 1, 137, False), (), False),
    ],
    ids=["named a peer", "another did", "raised that a peer failed", "timed out", "an error of its own", "killed"],
)
def test_stacks_are_taken_of_ranks_that_others_waited_for(
    end: RankEnd, reports: tuple[RankReported, ...], stacks: bool
) -> None:
    story = Story().running()
    story.tell(*reports)
    stops = of(story.tell(RankEnded(0, 1, end)), StopRanks)
    assert [effect.stop.stacks for effect in stops] == [stacks, stacks]


def test_the_watchdog_takes_a_job_that_says_nothing_for_hung() -> None:
    story = Story(watchdog_ns=30 * SECOND, max_restarts=5).running()
    story.wait(20 * SECOND)
    story.tell(RanksPrinted())
    story.wait(20 * SECOND)
    story.tell(RankReported(step_report(0, 1)))
    assert of(story.wait(30 * SECOND - TICK_NS), StopRanks) == []
    assert [effect.stop.stacks for effect in of(story.wait(TICK_NS), StopRanks)] == [True, True]
    story.tell(gone(0, 134, 134, told=True), gone(1, 134, 143, told=True))
    (failed,) = story.logged(AttemptFailed)
    assert (failed.node, failed.rank, failed.kind, failed.restarting) == (None, None, "unknown", True)
    assert failed.reason == "no rank printed or reported anything for 30.0 s (--watchdog)"
    story.wait(SECOND)
    story.tell(AttemptPrepared(1))
    story.wait(30 * SECOND)
    story.tell(gone(0, 134, 134, attempt=1, told=True), gone(1, 134, 143, attempt=1, told=True))
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish().exit_code == 1
    assert story.finish().reason.endswith("no newer step or checkpoint was reported")


def test_the_watchdog_counts_no_time_in_which_the_launcher_slept() -> None:
    story = Story(watchdog_ns=30 * SECOND).running()
    story.wait(SECOND)
    story.now_ns += 3600 * SECOND
    story.tell(Tick())
    assert of(story.wait(20 * SECOND), StopRanks) == []


def test_nothing_is_waited_for_when_the_job_cannot_go_on() -> None:
    story = Story().running()
    (stop, _) = of(story.tell(StorageFailed("disk full")), StopRanks)
    assert stop.stop.settle_ns == 0


def test_a_second_signal_kills_at_once_but_not_the_same_one_twice() -> None:
    story = Story().running()
    story.tell(StopRequested(2))
    story.wait(TICK_NS)
    assert story.tell(StopRequested(2)) == []
    story.wait(SECOND)
    assert story.tell(StopRequested(15)) == [KillNode(0, 1), KillNode(1, 1)]


def test_a_signal_while_pausing_ends_the_job() -> None:
    story = Story().running()
    story.tell(gone(0, 1, 1), gone(1, 143, 143, told=True))
    assert story.gang.phase is Phase.PAUSING
    story.tell(StopRequested(15), SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish().exit_code == 128 + 15


def test_an_supervisor_that_is_too_slow_to_stop_is_killed() -> None:
    story = Story().running()
    story.tell(RankEnded(0, 1, RankEnd(0, 0, 1, False)), gone(0, 1, 143, told=True))
    stop_ns = TIMEOUTS.settle_ns + TIMEOUTS.stop_grace_ns
    assert of(story.wait(stop_ns + SECOND), KillNode) == []
    assert of(story.wait(2 * SECOND), KillNode) == [KillNode(1, 1)]


def test_an_supervisor_that_does_not_come_up_is_a_failure() -> None:
    story = Story(max_restarts=0)
    story.tell(SupervisorUp(0, 1))
    del story.beating[1]
    assert of(story.wait(TIMEOUTS.supervisor_start_ns), KillNode) == [KillNode(1, 1)]
    assert "did not start within 1 min 00 s" in story.logged(NodeLost)[0].reason


def test_processes_that_outlive_sigkill_end_the_job_and_are_named() -> None:
    story = Story(max_restarts=5).running()
    story.tell(SupervisorLost(1, 1, "died"), gone(0, 143, 143, told=True))
    story.wait(TIMEOUTS.kill_ns + SECOND)
    story.tell(SupervisorGone(0, 1, ""))
    assert story.finish().exit_code == 1
    assert "node 1 still has processes" in story.finish().reason


def test_pauses_double_without_progress_and_start_over_with_it() -> None:
    story = Story(max_restarts=10).running()
    pauses: list[int] = []
    for attempt in range(6):
        if attempt == 4:
            story.tell(RankReported(step_report(0, 1, attempt=attempt)))
        story.tell(gone(0, 137, 1, attempt=attempt), gone(1, 143, 143, attempt=attempt, told=True))
        start_ns = story.now_ns
        while story.gang.attempt == attempt:
            story.wait(TICK_NS)
        pauses.append((story.now_ns - start_ns) // MS)
        story.tell(AttemptPrepared(attempt + 1))
    assert pauses == [200, 400, 800, 1600, 200, 400]


def test_a_stranger_on_the_port_is_not_counted_but_only_a_few_times() -> None:
    story = Story(max_restarts=0).running()
    for attempt in range(4):
        assert story.gang.attempt == attempt
        taken = RanksGone(0, 1, attempt, ends(0, 1, 1, attempt=attempt), port_taken=True)
        story.tell(RankEnded(0, 1, RankEnd(attempt, 0, 1, False)), taken)
        story.tell(gone(1, 143, 143, attempt=attempt, told=True))
        story.wait(10 * SECOND)
        story.tell(AttemptPrepared(attempt + 1))
    assert [event.restarting for event in story.logged(AttemptFailed)] == [True, True, True, False]


def test_a_full_disk_or_a_port_that_stays_taken_is_not_tried_again() -> None:
    story = Story(max_restarts=5).running()
    story.tell(StorageFailed("write /run: no space left"))
    story.tell(gone(0, 143, 143, told=True), gone(1, 143, 143, told=True))
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish() == Finish(1, "write /run: no space left", None)
    story = Story(max_restarts=5)
    story.tell(SupervisorUp(0, 1), SupervisorUp(1, 1), PrepareFailed(0, "--master-port 1 was taken"))
    story.tell(SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish() == Finish(1, "--master-port 1 was taken", None)


def test_after_the_end_nothing_happens() -> None:
    story = Story()
    story.tell(StopRequested(2), SupervisorGone(0, 1, ""), SupervisorGone(1, 1, ""))
    assert story.finish().exit_code == 130
    assert story.tell(Tick(), SupervisorUp(0, 1), StopRequested(2)) == []
