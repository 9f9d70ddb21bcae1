"""The survivors of a group form the next one, whoever dies, stands still or comes late, at every step."""

from __future__ import annotations

import pytest
from tests.support.campaigns.seeds import more_seeds
from tests.support.collectives.reform_world import GRACE_NS, POLICY, ReformWorld

from fireflyer.base.errors import Timeout, UsageError
from fireflyer.base.units import SECOND
from fireflyer.collectives.bootstrap.membership import (
    AnnounceAndWait,
    Generation,
    GenerationOpened,
    GenerationRead,
    JoinRequest,
    JoinRequestWritten,
    Membership,
    MemberSlot,
    Policy,
    ReadGeneration,
    Rejected,
    WriteJoinRequest,
)
from fireflyer.collectives.planning.plan import make_plan

NODES = [0, 0, 1, 1]
SEEDS = range(30)


def test_all_that_are_left_form_the_next_group() -> None:
    world = ReformWorld(1, NODES, die_at={"p1": 0})
    world.run()
    world.check_end()
    formed = world.processes["p0"].formed
    assert formed is not None
    assert [(slot.previous_rank, slot.node) for slot in formed.slots] == [(0, 0), (2, 1), (3, 1)]
    assert formed.plan.node_of_rank == (0, 1, 1)
    assert "rank 1 did not call reform" in formed.reason


@pytest.mark.parametrize("victim", ["p0", "p2", "p3"])
def test_a_survivor_that_dies_at_any_step_holds_the_others_up_only_for_a_while(victim: str) -> None:
    """p1 has failed; while the others re-form, another one dies, before, in and after its decision."""
    lives = 0
    for step in range(100):
        world = ReformWorld(step, NODES, die_at={"p1": 0, victim: step})
        world.run()
        world.check_end()
        if all(one.alive for name, one in world.processes.items() if name != "p1"):
            break
        lives += 1
        running = [one for one in world.processes.values() if one.running and one.alive]
        assert len(running) == 2
    assert lives > 20


def test_a_newcomer_that_dies_at_any_step_is_left_out() -> None:
    for step in range(30):
        world = ReformWorld(step, NODES[:2], die_at={"n": step})
        world.start("n", 1, delay_ns=SECOND // 4)
        world.run()
        world.check_end()
        assert world.processes["p0"].running
        assert world.processes["p1"].running


def chaos(seed: int, *, pause: float) -> ReformWorld:
    world = ReformWorld(seed, NODES, pause=pause)
    rng = world.world.fork_random("faults")
    for name in ("p0", "p1", "p2", "n0"):
        if rng.random() < 0.4:
            world.die_at[name] = rng.randrange(120)
    for number in range(rng.randrange(3)):
        world.start(f"n{number}", rng.randrange(3), delay_ns=rng.randrange(2 * SECOND))
    world.run()
    return world


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize("seeds", [SEEDS, *more_seeds(30, 130, blocks=1, wide=6000, seed_s=0.02)])
def test_any_deaths_and_pauses_end_in_one_group_of_the_living(seeds: range, pause: float) -> None:
    formed = 0
    for seed in seeds:
        world = chaos(seed, pause=pause)
        world.check_end()
        formed += sum(len(members) for members in world.formed.values())
    assert formed > 3 * len(seeds)


def test_the_same_seed_gives_the_same_history() -> None:
    one, other = chaos(7, pause=0.05), chaos(7, pause=0.05)
    assert one.world.trace.to_bytes() == other.world.trace.to_bytes()
    assert one.decided == other.decided


def test_without_enough_ranks_the_wait_ends_in_a_line_that_says_who_is_missing() -> None:
    world = ReformWorld(3, NODES, die_at={"p1": 0, "p2": 0}, policy=Policy(3, None, GRACE_NS))
    world.run()
    assert world.decided == {}
    for name in ("p0", "p3"):
        error = world.processes[name].error
        assert isinstance(error, Timeout)
        assert "rank 1, 2 did not call reform; 2 ranks have, at least 3 are needed" in str(error)


def test_with_too_few_survivors_a_newcomer_fills_the_gap() -> None:
    world = ReformWorld(3, NODES, die_at={"p1": 0}, policy=Policy(4, None, GRACE_NS))
    world.start("n", 1, delay_ns=2 * SECOND)
    world.run()
    world.check_end()
    assert len(world.formed[1]) == 4


def test_a_late_member_is_told_to_join_and_comes_back_as_a_newcomer() -> None:
    world = ReformWorld(5, [0])
    world.nodes.append(0)
    late = world.start("late", 0, 1, delay_ns=SECOND)
    world.run()
    world.check_end()
    assert late.running
    assert late.formed is not None
    assert [slot.previous_rank for slot in late.formed.slots] == [0, -1]
    (refusal,) = late.refusals
    assert "generation 1 was formed without this process, which was rank 1" in refusal
    assert "call Communicator.join" in refusal


def test_a_newcomer_that_missed_a_generation_waits_for_the_one_after() -> None:
    me = JoinRequest("me", -1, 7, 0)
    machine = Membership(me, generation=3, world_size=0, policy=POLICY, plan_of=make_plan, deadline_ns=SECOND)
    assert machine.begin(0) == AnnounceAndWait(3, 7, SECOND)
    assert machine.handle(0, GenerationOpened(True)) == WriteJoinRequest(3, me)
    assert machine.handle(0, JoinRequestWritten(me)) == ReadGeneration(3, SECOND, False)
    formed = Generation(3, (MemberSlot("other", 0, -1, 0),), make_plan([0]), "")
    assert machine.handle(1, GenerationRead(formed)) == AnnounceAndWait(4, 7, SECOND - 1)
    late = machine.handle(SECOND, GenerationOpened(False))
    assert isinstance(late, Rejected)
    assert "did not admit this process within 1.0 s" in str(late.error)


def test_of_two_processes_with_one_identity_one_is_refused() -> None:
    world = ReformWorld(6, [0, 0])
    world.start("copy", 0, 1, uid="another")
    world.run()
    ends = [world.processes[name] for name in ("p1", "copy")]
    assert sorted(one.running for one in ends) == [False, True]
    refused = next(one for one in ends if not one.running)
    assert isinstance(refused.error, UsageError)
    assert "another process has already joined as rank-1" in str(refused.error)


def test_who_leaves_is_not_waited_for() -> None:
    world = ReformWorld(7, NODES, leavers=frozenset({"p0"}), policy=Policy(1, None, 9 * SECOND))
    world.run()
    world.check_end()
    assert world.processes["p0"].left
    assert world.formed[1] == {"p1", "p2", "p3"}


def test_of_too_many_the_last_are_left_out() -> None:
    world = ReformWorld(8, NODES, policy=Policy(1, 3, GRACE_NS))
    world.run()
    assert world.formed[1] == {"p0", "p1", "p2"}
    (refusal,) = world.processes["p3"].refusals
    assert "a group has at most 3 ranks" in refusal
