"""The cells of a rank and of its node: who goes on, who waits, who leaves; and what a rank may write there."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.suspension import (
    CELLS,
    MAX_POINT,
    NEVER,
    Answer,
    NodeCells,
    RankCells,
    horizon_of,
)

POINT = 1


def pair() -> tuple[NodeCells, RankCells, list[int]]:
    memory = [0] * CELLS
    return NodeCells([memory]), RankCells(memory), memory


def test_a_rank_goes_on_while_nobody_asks() -> None:
    node, rank, _ = pair()
    assert [rank.enter() for _ in range(3)] == [Answer.GO_ON] * 3
    assert node.points(exact=True) == (3,)


def test_a_rank_waits_until_the_horizon_is_known() -> None:
    node, rank, _ = pair()
    rank.enter()
    node.hold()
    assert rank.enter() is Answer.WAIT
    node.set_horizon(3)
    assert rank.look() is Answer.GO_ON
    assert rank.enter() is Answer.LEAVE
    assert rank.enter() is Answer.LEAVE, "and at each point after it"


def test_ranks_that_give_steps_leave_at_the_first_that_they_ask_at_and_is_no_lower() -> None:
    node, rank, _ = pair()
    rank.enter(10)
    node.hold()
    node.set_horizon(horizon_of(node.points(exact=True)))
    assert rank.enter(10) is Answer.GO_ON, "the answer for a step stays"
    assert rank.enter(20) is Answer.LEAVE


def test_ranks_that_have_come_to_no_point_leave_at_their_first() -> None:
    node, rank, _ = pair()
    node.hold()
    assert node.points(exact=True) == (NEVER,)
    node.set_horizon(horizon_of(node.points(exact=False)))
    assert rank.enter(0) is Answer.LEAVE


def test_a_released_rank_goes_on() -> None:
    node, rank, _ = pair()
    node.hold()
    assert rank.enter() is Answer.WAIT
    node.release()
    node.set_horizon(1)
    assert rank.look() is Answer.GO_ON, "a horizon that comes too late changes nothing"


def test_without_a_barrier_a_point_counts_as_one_higher() -> None:
    node, rank, _ = pair()
    rank.enter()
    assert node.points(exact=False) == (2,)


def test_what_a_rank_writes_by_itself_is_kept_in_bounds() -> None:
    node, _, memory = pair()
    for written, read in ((-(1 << 63), NEVER), (-2, NEVER), ((1 << 63) - 1, MAX_POINT)):
        memory[POINT] = written
        assert node.points(exact=True) == node.points(exact=False) == (read,)


def test_the_first_process_that_asks_stands_for_the_rank() -> None:
    _, rank, memory = pair()
    assert rank.claim(11)
    assert not RankCells(memory).claim(12)
    assert rank.claim(11)


@dataclass
class Buffer(list[int]):
    """What a rank writes reaches `memory` when it is flushed."""

    memory: list[int] = field(default_factory=lambda: [0] * CELLS)
    writes: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return self.writes.get(index, self.memory[index])

    def __setitem__(self, index: int, value: int) -> None:  # type: ignore[override]
        self.writes[index] = value

    def flush(self) -> None:
        for index, value in self.writes.items():
            self.memory[index] = value
        self.writes.clear()


@given(st.lists(st.one_of(st.integers(0, 2), st.tuples(st.just("flush"), st.integers(0, 2))), max_size=30), st.data())
def test_no_rank_goes_on_at_the_horizon_whatever_the_order(
    actions: list[int | tuple[str, int]], data: st.DataObject
) -> None:
    """Three ranks on two nodes, with store buffers; each node is held, passes a barrier, and reads when it likes."""
    buffers = [Buffer() for _ in range(3)]
    ranks = [RankCells(buffer) for buffer in buffers]
    nodes = {0: NodeCells([buffers[0].memory]), 1: NodeCells([buffers[1].memory, buffers[2].memory])}
    held = {node: data.draw(st.integers(0, len(actions)), label=f"node {node} is held at") for node in nodes}
    read = {node: data.draw(st.integers(held[node], len(actions)), label=f"node {node} reads at") for node in nodes}
    went_on: list[int] = []
    points: list[int] = []
    waits = [False] * 3

    def at(place: int) -> None:
        for number, node in nodes.items():
            if held[number] == place:
                node.hold()
            if read[number] == place:
                for buffer in buffers[:1] if number == 0 else buffers[1:]:
                    buffer.flush()
                points.extend(node.points(exact=True))

    for place, action in enumerate(actions):
        at(place)
        if isinstance(action, tuple):
            buffers[action[1]].flush()
        elif not waits[action]:
            answer = ranks[action].enter()
            waits[action] = answer is Answer.WAIT
            went_on += [ranks[action]._point] if answer is Answer.GO_ON else []
    at(len(actions))
    horizon = horizon_of(points)
    assert all(point < horizon for point in went_on)
    for node in nodes.values():
        node.set_horizon(horizon)
    for rank, waiting in zip(ranks, waits, strict=True):
        answer = rank.look() if waiting else Answer.GO_ON
        while answer is Answer.GO_ON:
            answer = rank.enter()
        assert answer is Answer.LEAVE
        assert rank._point == max(horizon, 1), "all leave at one point"
