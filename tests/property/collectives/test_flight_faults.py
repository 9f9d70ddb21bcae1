"""A random fault in a random schedule is found, by the records alone and with what the ranks raised."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from tests.support.collectives.flight_dumps import STEP_NS, Call, Trouble, World, dumps_of

from fireflyer.collectives.flight import explain

KINDS: list[Call] = [
    ("allreduce", "f32", "sum", 1000, -1),
    ("allreduce", "bf16", "max", 1 << 20, -1),
    ("broadcast", "f32", "", 77, 0),
    ("barrier", "f32", "", 0, -1),
    ("reduce_scatter", "f32", "mean", 4096, -1),
]


@st.composite
def worlds(draw: st.DrawFn, troubles: tuple[Trouble, ...]) -> World:
    size = draw(st.integers(3, 9))
    nodes = sorted(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    numbers = {node: index for index, node in enumerate(sorted(set(nodes)))}
    calls = draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=40))
    return World(
        nodes=[numbers[node] for node in nodes],
        calls=calls,
        trouble=draw(st.sampled_from(troubles)),
        rank=draw(st.integers(0, size - 1)),
        at=draw(st.integers(0, len(calls) - 1)),
        raised=draw(st.booleans()),
        capacity=draw(st.sampled_from([3, 20, 1024])),
        queued=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
        skew_ns=draw(st.sampled_from([0, STEP_NS])),
    )


@given(worlds(("absent", "gone", "stalled")))
def test_a_rank_that_holds_the_others_up_is_named(world: World) -> None:
    verdict = explain(dumps_of(world))
    assert [culprit.rank for culprit in verdict.culprits] == [world.rank]
    assert verdict.kind == world.trouble
    assert verdict.culprits[0].certain == (world.raised or world.trouble != "gone")
    assert verdict.culprits[0].label in verdict.summary


@given(worlds(("other",)))
def test_a_rank_that_calls_something_else_is_named(world: World) -> None:
    world.raised = False
    verdict = explain(dumps_of(world))
    assert verdict.kind == "mismatch"
    assert [culprit.rank for culprit in verdict.culprits] == [world.rank]
    assert f"#{world.at}" in verdict.summary


@given(worlds(("skip",)))
def test_a_rank_that_leaves_a_call_out_is_named(world: World) -> None:
    world.raised = False
    verdict = explain(dumps_of(world))
    assert [culprit.rank for culprit in verdict.culprits] == [world.rank]
    assert verdict.kind in ("mismatch", "absent")  # it shows where calls differ, or else at the end


@given(worlds(("none", "slow")))
def test_nobody_is_blamed_where_nothing_is_wrong(world: World) -> None:
    world.raised = False
    verdict = explain(dumps_of(world))
    assert (verdict.kind, verdict.culprits) == ("nothing", ())
    late = [each.rank for each in verdict.stragglers]
    enough = min(len(world.calls), world.capacity) >= 16 and max(world.nodes) == 0
    expected = [world.rank] if world.trouble == "slow" and enough else []
    assert late == expected or (late == [world.rank] and world.trouble == "slow")


@given(worlds(("absent", "gone", "stalled", "other", "none")), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_of_the_files(world: World, rng: random.Random) -> None:
    dumps = dumps_of(world)
    shuffled = list(dumps)
    rng.shuffle(shuffled)
    assert explain(shuffled) == explain(dumps)


@given(worlds(("absent", "gone", "stalled", "other", "skip")), st.data())
def test_missing_dumps_never_turn_an_innocent_rank_that_dumped_into_a_culprit(
    world: World, data: st.DataObject
) -> None:
    world.raised = False
    ranks = range(len(world.nodes))
    world.lost = set(data.draw(st.lists(st.sampled_from(ranks), max_size=len(ranks) // 2)))
    dumps = dumps_of(world)
    verdict = explain(dumps)
    innocent = {dump.rank for dump in dumps} - {world.rank}
    accused = {culprit.rank for culprit in verdict.culprits if culprit.certain}
    if world.trouble in ("absent", "gone", "stalled") and verdict.decided:
        assert not accused & innocent
