"""What the scrub of a target reads when."""

from __future__ import annotations

import select
from pathlib import Path

from fireflyer.base.units import MIB, SECOND
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.service.storage.scrub import DOUBTED_BYTES_PER_S, MAX_DOUBTS_OF_ONE, Scrub
from fireflyer.fs.service.storage.target_engine import TargetEngine
from fireflyer.native import ChunkNode


def test_doubts_without_end_do_not_keep_the_rest_from_being_read(tmp_path: Path) -> None:
    node = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB)
    try:
        engine = TargetEngine(node.open_target(7, str(tmp_path)), 7)
        scrub = Scrub(engine, bytes_per_s=MIB, rest_ns=0)
        for now_ns in range(6):
            scrub.verify_soon(ChunkId(1, now_ns), "one")
            scrub.verify_soon(ChunkId(2, now_ns), "other")
            scrub.tick(now_ns)
            assert select.select([node.event_fd], [], [], 20)[0]
            ((_, _, job, last, count),) = node.take(10)
            scrub.verified(now_ns, job, last, count)
        assert scrub.passes == 3
    finally:
        node.close()


class _Engine:
    """Notes what shall be verified."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, int] | None, int]] = []

    def verify(self, after: tuple[int, int] | None, limit_bytes: int) -> int:
        self.asked.append((after, limit_bytes))
        return len(self.asked)


def test_one_reader_can_neither_fill_the_places_nor_take_the_disk() -> None:
    engine = _Engine()
    scrub = Scrub(engine, bytes_per_s=0, rest_ns=0)
    for index in range(1000):
        scrub.verify_soon(ChunkId(1, index + 1), "eager")
    scrub.verify_soon(ChunkId(2, 5), "other")
    now_ns, seconds = 0, MAX_DOUBTS_OF_ONE + 1
    for _ in range(100 * seconds):
        before = len(engine.asked)
        scrub.tick(now_ns)
        if len(engine.asked) > before:
            scrub.verified(now_ns, len(engine.asked), None, DOUBTED_BYTES_PER_S)
        now_ns += SECOND // 100
    assert engine.asked == [*(((1, index), 1) for index in range(MAX_DOUBTS_OF_ONE)), ((2, 4), 1)]
    assert scrub.verified_bytes == seconds * DOUBTED_BYTES_PER_S
