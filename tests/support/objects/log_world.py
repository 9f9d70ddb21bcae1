"""A shipper and a store, with a network between them that loses, repeats and delays; both are started again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.support.objects.memory import MemoryObjects

from fireflyer.base.errors import InvariantViolation
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.objects.log_shipper import (
    TICK_NS,
    Answered,
    Closed,
    Durable,
    End,
    Event,
    Failed,
    Finished,
    Grew,
    LogShipper,
    Send,
    Tick,
)
from fireflyer.cluster.objects import LogStore, RunKey
from fireflyer.cluster.schema.logs import LogAnswer, LogChunk, LogEnd

__all__ = ["LogWorld"]

RUN = RunKey(7, 0)
SEGMENT_BYTES = 200
CHUNK_BYTES = 64
MAX_CALM_STEPS = 100_000


class LogWorld:
    """`local_bytes`: of each log, the node has only so many last bytes. `calm`: nothing goes wrong any more."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        max_run_bytes: int = 1 << 30,
        local_bytes: int | None = None,
        shipper: Callable[..., LogShipper] = LogShipper,
        store: type[LogStore] = LogStore,
    ) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.max_run_bytes = max_run_bytes
        self.local_bytes = local_bytes
        self.shipper_class, self.store_class = shipper, store
        self.objects = MemoryObjects()
        self.now_ns = 0
        self.written = {f"rank-{number}": b"" for number in range(2)}
        self.forgettable = dict.fromkeys(self.written, 0)
        self.begins = dict.fromkeys(self.written, 0)
        self.ended = False
        self.calm = False
        self.finished: dict[str, bool] = {}
        self.on_the_way: list[Send | End] = []
        self.late: list[LogChunk | LogEnd] = []
        self.most_requests = 0
        self.gaps = 0
        self.start_store()
        self.start_shipper()

    def start_store(self) -> None:
        self.store = self.store_class(
            str(self.directory), self.objects, max_run_bytes=self.max_run_bytes, segment_bytes=SEGMENT_BYTES
        )

    def start_shipper(self) -> None:
        self.shipper = self.shipper_class(rate_bytes_per_s=64 << 10, requests=2, chunk_bytes=CHUNK_BYTES)
        self.on_the_way.clear()
        for stream in self.written:
            if stream not in self.finished:
                self.tell(stream)

    def tell(self, stream: str) -> None:
        end = len(self.written[stream])
        if self.local_bytes is not None and not self.calm:
            self.begins[stream] = max(self.begins[stream], end - self.local_bytes)
        self.feed(Grew(stream, end, self.begins[stream]))
        if self.ended:
            self.feed(Closed(stream))

    def feed(self, event: Event) -> None:
        for effect in self.shipper.handle(self.now_ns, event):
            if isinstance(effect, Send | End):
                self.on_the_way.append(effect)
            elif isinstance(effect, Durable):
                self.forgettable[effect.stream] = max(self.forgettable[effect.stream], effect.end)
            elif isinstance(effect, Finished):
                self.finished[effect.stream] = effect.cut
        self.most_requests = max(self.most_requests, len(self.on_the_way))

    def message(self, effect: Send | End) -> LogChunk | LogEnd:
        if isinstance(effect, End):
            return LogEnd(effect.stream, effect.end)
        data = self.written[effect.stream][effect.offset : effect.offset + effect.length]
        return LogChunk(effect.stream, effect.offset, data, effect.lost_bytes)

    def deliver(self, message: LogChunk | LogEnd) -> LogAnswer:
        return self.store.append(RUN, message) if isinstance(message, LogChunk) else self.store.close(RUN, message)

    def request(self) -> None:
        if not self.on_the_way:
            return
        effect = self.on_the_way.pop(self.random.randrange(len(self.on_the_way)))
        if isinstance(effect, Send) and effect.length and effect.offset < self.begins[effect.stream]:
            self.feed(Failed(effect.stream, effect.number))  # they went after the shipper had asked for them
            return
        message = self.message(effect)
        fate = 1.0 if self.calm else self.random.random()
        if fate < 0.15:  # lost
            self.feed(Failed(effect.stream, effect.number))
            return
        if fate < 0.25:  # given up, and there it is still
            self.late.append(message)
            self.feed(Failed(effect.stream, effect.number))
            return
        answer = self.deliver(message)
        if fate < 0.4:
            self.late.append(message)
        if fate < 0.5:  # the answer is lost
            self.feed(Failed(effect.stream, effect.number))
            return
        self.feed(Answered(effect.stream, effect.number, answer))

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.3 and not self.ended:
            stream = self.random.choice(list(self.written))
            count = self.random.choice([1, 5, 40, 300])
            self.written[stream] += self.random.randbytes(count)
            if stream not in self.finished:
                self.tell(stream)
        elif kind < 0.85:
            self.request()
        elif kind < 0.9 and self.late:
            self.deliver(self.late.pop(self.random.randrange(len(self.late))))
        elif kind < 0.92:
            self.start_shipper()
        elif kind < 0.95:
            self.store_dies()
        else:
            self.now_ns += TICK_NS * self.random.choice([1, 10, 100])
            self.feed(Tick())

    def store_dies(self) -> None:
        """With power: what was not durable is gone, or garbage."""
        for path in sorted(self.directory.rglob("open")):
            size = path.stat().st_size
            if size and self.random.random() < 0.5:
                os.truncate(path, self.random.randrange(size))
            elif size:
                data = bytearray(path.read_bytes())
                at = self.random.randrange(size)
                data[at:] = bytes(size - at)
                path.write_bytes(data)
        self.start_store()

    def run(self, steps: int) -> None:
        """Through `steps` with faults; then the run ends, and all is sent without."""
        for _ in range(steps):
            self.step()
        self.ended, self.calm = True, True
        for stream in self.written:
            if stream not in self.finished:
                self.tell(stream)
        for _ in range(MAX_CALM_STEPS):
            if len(self.finished) == len(self.written):
                return
            self.request()
            self.now_ns += SECOND
            self.feed(Tick())
        raise InvariantViolation("the logs were never sent")

    def read(self, stream: str) -> bytes:
        """What people read, with a dot for each byte that was lost."""
        data = bytearray()
        while True:
            page = self.store.read(RUN, stream, len(data), self.random.choice([1 << 20, 33]))
            data += b"." * (page.offset - len(data)) + page.data
            if page.closed or page.cut:
                return bytes(data)
            assert page.data or page.next_offset > page.offset, "a page says neither bytes nor an end"
