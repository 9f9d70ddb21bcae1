"""The two ends of an exec session, with frames between them that arrive when a seed lets them, until an end crashes."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.exec_session import ExecEnd, ExecPhase, ExecSide
from fireflyer.cluster.schema.execs import (
    MAX_DATA_BYTES,
    MAX_FRAME_BYTES,
    WINDOW_BYTES,
    Closed,
    Data,
    Eof,
    Exited,
    Frame,
    Grant,
    Resize,
    Signal,
    Started,
    StreamNumber,
    decode_frame,
    encode_frame,
)

STEPS: Final = 600


class World:
    """`written` and `read` of each stream, of a client, an agent and the frames between them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.client, self.agent = ExecEnd(ExecSide.CLIENT), ExecEnd(ExecSide.AGENT)
        self.to_agent: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.written: dict[int, bytes] = {0: b"", 1: b"", 2: b""}
        self.read: dict[int, bytes] = {0: b"", 1: b"", 2: b""}
        self.controls: list[Frame] = []
        self.heard: list[Frame] = []
        self.ended: set[int] = set()

    def put(self, end: ExecEnd, frames: list[Frame]) -> None:
        lane = self.to_agent if end is self.client else self.to_client
        for frame in frames:
            data = encode_frame(frame)
            assert len(data) <= MAX_FRAME_BYTES
            lane.append(data)

    def deliver(self, lane: deque[bytes], end: ExecEnd) -> None:
        if not lane:
            return
        frame = decode_frame(lane.popleft())
        was_over = end.over
        self.put(end, end.hear(frame))
        assert end.unread <= WINDOW_BYTES
        if was_over or (end.over and not isinstance(frame, Exited | Closed)):
            return
        if isinstance(frame, Data):
            self.read[frame.stream] += frame.data
        elif isinstance(frame, Resize | Signal):
            self.heard.append(frame)

    def write(self, end: ExecEnd, stream: StreamNumber) -> None:
        if stream in self.ended or end.over:
            return
        data = self.random.randbytes(min(end.may_send, self.random.choice((1, 100, MAX_DATA_BYTES, WINDOW_BYTES))))
        self.put(end, end.send(stream, data))
        self.written[stream] += data

    def step(self) -> None:
        match self.random.randrange(9):
            case 0 | 1:
                self.deliver(self.to_agent, self.agent)
            case 2 | 3:
                self.deliver(self.to_client, self.client)
            case 4:
                self.write(self.client, 0)
            case 5:
                self.write(self.agent, self.random.choice((1, 2)))
            case 6:
                end = self.random.choice((self.client, self.agent))
                self.put(end, end.take(self.random.randrange(end.unread + 1)))
            case 7:
                frame = self.random.choice((Resize(30, 100), Signal("INT")))
                self.put(self.client, self.client.control(frame))
                if not self.client.over:
                    self.controls.append(frame)
            case _:
                self.put(self.agent, self.agent.start())

    def drain(self) -> None:
        """All that is there is delivered and taken."""
        while self.to_agent or self.to_client or self.agent.unread or self.client.unread:
            self.deliver(self.to_agent, self.agent)
            self.deliver(self.to_client, self.client)
            for end in (self.client, self.agent):
                self.put(end, end.take(end.unread))

    def held_bytes(self, lane: deque[bytes]) -> int:
        return sum(len(frame.data) for frame in map(decode_frame, lane) if isinstance(frame, Data))


@given(st.integers(0, 1 << 32))
def test_what_is_written_arrives_once_and_in_order_before_the_exit_code(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
        assert world.client.unread + world.held_bytes(world.to_client) <= WINDOW_BYTES
        assert world.agent.unread + world.held_bytes(world.to_agent) <= WINDOW_BYTES
    world.put(world.agent, world.agent.start())
    world.drain()
    assert world.heard == world.controls, "none is behind data that nobody takes"
    assert world.client.phase is ExecPhase.OPEN
    for sender, receiver in ((world.client, world.agent), (world.agent, world.client)):
        assert sender.may_send + receiver._taken == WINDOW_BYTES, "what was taken was granted again, or will be"
        assert sender.may_send > 0
    world.write(world.agent, 1)
    world.put(world.agent, [*world.agent.end_stream(1), *world.agent.end_stream(2), *world.agent.exit(7)])
    world.drain()
    assert world.read == world.written
    assert (world.client.exit_code, world.client.reason) == (7, "")


@given(st.integers(0, 1 << 32), st.integers(0, STEPS), st.booleans())
def test_an_end_whose_other_end_has_crashed_is_over_and_says_why(seed: int, steps: int, client_crashes: bool) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    left = world.agent if client_crashes else world.client
    lane = world.to_agent if client_crashes else world.to_client
    for _ in range(world.random.randrange(len(lane) + 1)):
        world.deliver(lane, left)
    left.lose("the other end is gone")
    assert left.over
    assert (left.exit_code, left.reason) == (None, "the other end is gone")
    for read, written in zip(world.read.values(), world.written.values(), strict=True):
        assert written.startswith(read)
    assert left.hear(Closed("late")) == []
    assert left.send(0 if left is world.client else 1, b"x") == []
    assert left.reason == "the other end is gone"


@pytest.mark.parametrize(
    ("side", "frames"),
    [
        (ExecSide.CLIENT, [Data(0, b"x")]),
        (ExecSide.CLIENT, [Resize(1, 1)]),
        (ExecSide.CLIENT, [Started(), Started()]),
        (ExecSide.CLIENT, [Grant(1)]),
        (ExecSide.CLIENT, [Eof(1), Data(1, b"x")]),
        (ExecSide.CLIENT, [Data(1, bytes(MAX_DATA_BYTES))] * (WINDOW_BYTES // MAX_DATA_BYTES + 1)),
        (ExecSide.AGENT, [Data(1, b"x")]),
        (ExecSide.AGENT, [Eof(2)]),
        (ExecSide.AGENT, [Exited(0)]),
        (ExecSide.AGENT, [Started()]),
        (ExecSide.AGENT, [Eof(0), Eof(0)]),
        (ExecSide.AGENT, [Data(0, bytes(MAX_DATA_BYTES))] * (WINDOW_BYTES // MAX_DATA_BYTES + 1)),
    ],
)
def test_an_end_that_does_not_keep_the_protocol_is_cut_off(side: ExecSide, frames: list[Frame]) -> None:
    end = ExecEnd(side)
    said = [answer for frame in frames for answer in end.hear(frame)]
    assert end.over
    assert "protocol" in end.reason
    assert said == [Closed(end.reason)]


def test_no_end_says_what_is_not_its_own_or_more_than_it_may() -> None:
    client = ExecEnd(ExecSide.CLIENT)
    for stream, data in ((1, b"x"), (0, bytes(WINDOW_BYTES + 1))):
        with pytest.raises(UsageError):
            client.send(stream, data)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        client.take(1)


def test_reasons_are_one_line_without_control_characters() -> None:
    client = ExecEnd(ExecSide.CLIENT)
    client.hear(Closed("a\x1b[31m b\nc"))
    assert client.reason == "a[31m b c"
