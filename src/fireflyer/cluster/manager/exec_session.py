"""One exec session as the manager has it: two lanes of frames, each with a bound, between a client and an agent."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from fireflyer.cluster.core.exec_deadlines import ExecTimes
from fireflyer.cluster.schema.execs import WINDOW_BYTES, Closed, Data, ExecOrder, Exited, Frame

__all__ = ["ManagedExec"]

_FRAME_BYTES: Final = 64
"""What a frame counts beside its data."""
_MOST_FRAMES: Final = 200
_BATCH_BYTES: Final = 128 << 10


class _Lane:
    """Frames one way. Who puts waits while more than a window is there: an end that keeps the protocol never does."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self.closed = False

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def put_last(self, frame: Frame) -> None:
        """Nothing comes after it."""
        if not self.closed:
            self.closed = True
            self._frames.append(frame)
            self._change()

    async def put(self, frame: Frame) -> None:
        while self._bytes >= WINDOW_BYTES and not self.closed:
            await self._changed.wait()
        if not self.closed:
            self._frames.append(frame)
            self._bytes += _size(frame)
            self._change()

    async def drained(self) -> None:
        """Until less than half of a window is there."""
        while self._bytes >= WINDOW_BYTES // 2 and not self.closed:
            await self._changed.wait()

    async def get(self) -> tuple[Frame, ...]:
        """At least one; nothing where the last one was got."""
        while not self._frames:
            if self.closed:
                return ()
            await self._changed.wait()
        got: list[Frame] = []
        size = 0
        while self._frames and size < _BATCH_BYTES and len(got) < _MOST_FRAMES:
            frame = self._frames.popleft()
            got.append(frame)
            size += _size(frame)
        self._bytes -= sum(_size(frame) for frame in got if not isinstance(frame, Closed | Exited))
        self._change()
        return tuple(got)


def _size(frame: Frame) -> int:
    return _FRAME_BYTES + (len(frame.data) if isinstance(frame, Data) else 0)


class ManagedExec:
    """`reason` is empty while it goes on."""

    def __init__(
        self, order: ExecOrder, *, node: str, task: int, user: str, token_id: str, ends_task: bool, times: ExecTimes
    ) -> None:
        self.order = order
        self.node = node
        self.task = task
        self.user = user
        """Who asked, which may be an administrator."""
        self.token_id = token_id
        self.ends_task = ends_task
        self.times = times
        self.reason = ""
        self.exit_code: int | None = None
        self.connection: int | None = None
        """Of the agent."""
        self.to_agent, self.to_client = _Lane(), _Lane()
        self.over = asyncio.Event()

    def close(self, reason: str) -> None:
        """Both ends are told, if they hear it."""
        if self.reason:
            return
        self.reason = reason
        self.to_agent.put_last(Closed(reason))
        self.to_client.put_last(Closed(reason))
        self.over.set()

    async def from_client(self, frame: Frame, now_ns: int) -> None:
        if isinstance(frame, Closed):
            self.close(f"its client ended it: {frame.reason}")
            return
        if isinstance(frame, Data):
            self.times.data_ns = now_ns
        await self.to_agent.put(frame)

    async def from_agent(self, frames: tuple[Frame, ...], now_ns: int) -> None:
        """Returns when there is place for more: the agent waits as long."""
        for frame in frames:
            if isinstance(frame, Data):
                self.times.data_ns = now_ns
            if isinstance(frame, Closed | Exited):
                self._ended_there(frame)
                return
            await self.to_client.put(frame)
        await self.to_client.drained()

    def _ended_there(self, frame: Closed | Exited) -> None:
        """What came before it is still sent to the client."""
        if self.reason:
            return
        self.exit_code = frame.code if isinstance(frame, Exited) else None
        self.reason = f"exit code {frame.code}" if isinstance(frame, Exited) else frame.reason
        self.to_client.put_last(frame)
        self.to_agent.put_last(Closed("it is over"))
        self.over.set()
