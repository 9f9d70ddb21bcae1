"""Whatever is lost, repeated, late or started again: what is read is what was written, up to the quota."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.objects.log_world import CHUNK_BYTES, RUN, LogWorld

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.core.objects import log_shipper, log_stream
from fireflyer.cluster.core.objects.log_shipper import Answered, Durable, Effect, Event, LogShipper, Send
from fireflyer.cluster.core.objects.log_stream import Append, StreamState, accept
from fireflyer.cluster.objects import log_store
from fireflyer.cluster.schema.logs import LogAnswer, LogChunk

SEEDS = 20
STEPS = 150


def world(seed: int, **options: Any) -> LogWorld:
    with tempfile.TemporaryDirectory(prefix="ff-logs-") as directory:
        found = LogWorld(Path(directory) / "logs", seed, **options)
        found.run(STEPS)
        check(found)
        return found


def check(found: LogWorld) -> None:
    infos = {info.stream: info for info in found.store.streams(RUN)}
    found.gaps = sum(len(info.gaps) for info in infos.values())
    kept = 0
    for stream, written in found.written.items():
        info, read = infos[stream], found.read(stream)
        lost = sum(gap.end - gap.begin for gap in info.gaps)
        kept += info.end - lost
        assert len(read) == info.end
        assert info.cut or info.end == len(written)
        assert found.finished[stream] == info.cut
        for gap in info.gaps:
            read = read[: gap.begin] + written[gap.begin : gap.end] + read[gap.end :]
        assert read == written[: info.end]
        assert found.local_bytes is not None or not info.gaps
    assert kept <= found.max_run_bytes
    assert kept == found.max_run_bytes or not any(info.cut for info in infos.values())
    assert found.most_requests <= 2


@pytest.mark.parametrize("block", range(4))
def test_what_is_read_is_what_was_written(block: int) -> None:
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        world(seed)


def test_a_run_over_its_quota_is_cut_there_and_says_so() -> None:
    assert any(world(seed, max_run_bytes=1500).finished.values() for seed in range(SEEDS // 2))


def test_bytes_that_the_node_has_no_more_are_gaps() -> None:
    assert sum(world(seed, local_bytes=100).gaps for seed in range(SEEDS // 2))


def _always_appends(state: StreamState, chunk: LogChunk, room_bytes: int) -> Append:
    """A repetition is not noticed."""
    if chunk.offset < state.end:
        chunk = LogChunk(chunk.stream, state.end, chunk.data)
    return accept(state, chunk, room_bytes)


def _takes_gaps(state: StreamState, chunk: LogChunk, room_bytes: int) -> Append:
    """A chunk after one that was lost is taken in its place."""
    return accept(state, LogChunk(chunk.stream, min(chunk.offset, state.end), chunk.data), room_bytes)


def _no_quota(state: StreamState, chunk: LogChunk, room_bytes: int) -> Append:
    return accept(state, chunk, 1 << 30)


def _cut_unsaid(state: StreamState, chunk: LogChunk, room_bytes: int) -> Append:
    change = accept(state, chunk, room_bytes)
    return change._replace(state=change.state._replace(cut=False))


class NeverGoesBack(LogShipper):
    """A store that has forgotten bytes is not believed."""

    def _answered(self, event: Answered, effects: list[Effect]) -> None:
        log = self._logs.get(event.stream)
        if log is not None and log.next_offset is not None:
            answer = event.answer
            event = Answered(
                event.stream,
                event.number,
                LogAnswer(max(answer.end, log.next_offset), answer.durable, answer.cut, answer.closed),
            )
        super()._answered(event, effects)


class LostUnsaid(LogShipper):
    """Bytes that the node does not have are passed over in silence, by another offset."""

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        effects = super().handle(now_ns, event)
        return [
            Send(one.stream, one.number, one.offset, one.length, 0) if isinstance(one, Send) else one for one in effects
        ]


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (_always_appends, {}),
        (_takes_gaps, {}),
        (_no_quota, {"max_run_bytes": 1500}),
        (_cut_unsaid, {"max_run_bytes": 1500}),
        (NeverGoesBack, {}),
        (LostUnsaid, {"local_bytes": 100}),
    ],
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], options: dict[str, Any]
) -> None:
    if isinstance(fault, type):
        options = {**options, "shipper": fault}
    else:
        monkeypatch.setattr(log_store, "accept", fault)
    monkeypatch.setattr("tests.support.objects.log_world.MAX_CALM_STEPS", 2000)
    for seed in itertools.islice(itertools.count(), 40):
        try:
            world(seed, **options)
        except (AssertionError, FireflyerError, KeyError):
            return
    pytest.fail("not found in 40 seeds")


def test_only_what_is_durable_may_be_forgotten() -> None:
    """And a store that was started again has it."""
    for seed in range(5):
        with tempfile.TemporaryDirectory(prefix="ff-logs-") as directory:
            found = LogWorld(Path(directory) / "logs", seed)
            for _ in range(STEPS):
                found.step()
                found.store_dies()
                for info in found.store.streams(RUN) if found.store.runs() else ():
                    assert info.end >= found.forgettable[info.stream]


def test_requests_and_bytes_per_second_are_bounded() -> None:
    shipper = LogShipper(rate_bytes_per_s=10 * CHUNK_BYTES, requests=3, chunk_bytes=CHUNK_BYTES)
    waiting: list[Send] = []
    sent_bytes = 0

    def feed(now_ns: int, event: Event) -> None:
        nonlocal sent_bytes
        for effect in shipper.handle(now_ns, event):
            if isinstance(effect, Send):
                waiting.append(effect)
                sent_bytes += effect.length
        assert len(waiting) <= 3

    for number in range(5):
        feed(0, log_shipper.Grew(f"rank-{number}", 1000 * CHUNK_BYTES))
    for millisecond in range(0, 10_000, 10):
        while waiting:
            one = waiting.pop(0)
            feed(millisecond * 1_000_000, Answered(one.stream, one.number, LogAnswer(one.offset + one.length, 0)))
            if sent_bytes > 10 * CHUNK_BYTES * (millisecond / 1000 + 1):
                pytest.fail(f"{sent_bytes} bytes in {millisecond} ms")
        feed(millisecond * 1_000_000, log_shipper.Tick())
    assert sent_bytes >= 10 * CHUNK_BYTES * 9.5


def test_durable_is_said_once_for_each_end() -> None:
    shipper = LogShipper()
    (probe,) = shipper.handle(0, log_shipper.Grew("a", 10))
    assert probe == Send("a", 1, 0, 0)
    durable, send = shipper.handle(0, Answered("a", 1, LogAnswer(5, 5)))
    assert durable == Durable("a", 5)
    assert send == Send("a", 2, 5, 5)
    assert shipper.handle(0, Answered("a", 1, LogAnswer(0, 0))) == [], "an answer that is late changes nothing"
    assert shipper.handle(0, Answered("a", 2, LogAnswer(10, 5))) == []
    assert log_stream.ends(StreamState(end=9), 10).closed is False
