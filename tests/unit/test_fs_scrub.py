"""What the scrub of a target reads when."""

from __future__ import annotations

import select
from pathlib import Path

from fireflyer.base.units import MIB
from fireflyer.fs.schema.ids import ChunkId
from fireflyer.fs.service.storage_scrub import Scrub
from fireflyer.fs.service.target_engine import TargetEngine
from fireflyer.native import ChunkNode


def test_doubts_without_end_do_not_keep_the_rest_from_being_read(tmp_path: Path) -> None:
    node = ChunkNode(io_threads=1, job_threads=1, buffer_bytes=MIB)
    try:
        engine = TargetEngine(node.open_target(7, str(tmp_path)), 7)
        scrub = Scrub(engine, bytes_per_s=MIB, rest_ns=0)
        for now_ns in range(6):
            scrub.doubt(ChunkId(1, now_ns))
            scrub.doubt(ChunkId(2, now_ns))
            scrub.tick(now_ns)
            assert select.select([node.event_fd], [], [], 20)[0]
            ((_, _, job, last, count),) = node.take(10)
            scrub.verified(now_ns, job, last, count)
        assert scrub.passes == 3
    finally:
        node.close()
