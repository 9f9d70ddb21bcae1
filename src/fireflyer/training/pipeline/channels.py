"""Messages of one rank of a pipeline, over a communicator: posted, taken by the pass that needs them, sent.

The size of a message need not be known before: shapes may differ between micro-batches. A receive takes a *frame*, as
many bytes as the longest message of its channel (peer, boundary, kind) had before this step; both ranks know it, since
both have seen these messages. A shorter message is sent with what the frame has beyond it; of a longer one the rest
follows as a second message. So from the second step on a message is one operation wherever shapes repeat, and nothing
about shapes is agreed on before.

Sends are not waited for, but for their memory: at most `MAX_PENDING_SENDS` at once. Each message has a tag of its own,
so that messages may come in any order.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple, Protocol

import torch

from fireflyer.base.errors import PeerFailed
from fireflyer.base.units import KIB
from fireflyer.codesign.schedule.execution import Message
from fireflyer.collectives.work import when_there_is_room
from fireflyer.training.communication import Work
from fireflyer.training.pipeline.messages import (
    HEADER_BYTES,
    Bytes,
    Layout,
    Outgoing,
    empty_bytes,
    layout_of,
    read_header,
    unpack,
)
from fireflyer.training.pipeline.phases import Gradients
from fireflyer.training.pipeline.programs import Key, key_of

__all__ = ["FIRST_FRAME_BYTES", "MAX_PENDING_SENDS", "Channels", "PipelineCommunicator", "tags_of"]

FIRST_FRAME_BYTES: Final = 64 * KIB
"""Of a channel that has had no message."""
MAX_PENDING_SENDS: Final = 64
_MAX_FREE: Final = 16
"""Send buffers that are kept for later messages."""
_GRANULE_BYTES: Final = 4 * KIB


class PipelineCommunicator(Protocol):
    """Interface that a pipeline needs; `fireflyer.collectives.Communicator` has it. `send` and `recv` take
    contiguous arrays in CPU memory and return a `Work`; see there."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def send(self, array: Any, *, to: int, tag: int = 0, async_op: bool = False) -> Work: ...

    def recv(self, array: Any, *, source: int | None, tag: int = 0, async_op: bool = False) -> Work: ...

    def abort(self, reason: str) -> None: ...


class _Posted(NamedTuple):
    message: Message
    memory: Bytes
    work: Work


class _Sent(NamedTuple):
    message: Message
    buffer: Outgoing
    works: tuple[Work, ...]


class _Here(NamedTuple):
    """A message as errors of this rank name it, made into text for them alone."""

    rank: int
    message: Message

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.message}"


_Channel = tuple[int, bool, int]


class Channels:
    def __init__(
        self, comm: PipelineCommunicator, micro_batches: int, max_message_bytes: int, device: torch.device | None
    ) -> None:
        """`device`: where tensors are wanted; None: where they come, in CPU memory."""
        self._comm = comm
        self._micro_batches = micro_batches
        self._limit_bytes = max_message_bytes
        self._device = device
        self._frames: dict[_Channel, int] = {}
        """As both ends of a channel have them in this step."""
        self._longest: dict[_Channel, int] = {}
        self._posted: dict[Key, _Posted] = {}
        self._sent: deque[_Sent] = deque()
        self._free: list[Outgoing] = []
        self.sent_bytes = 0
        """Since construction, with headers and what frames have beyond messages."""

    def post(self, message: Message) -> None:
        """Begins to receive; does not wait."""
        memory = empty_bytes(self._frame(_channel(message)))
        tag = self._tag(message)
        work = when_there_is_room(lambda: self._comm.recv(memory, source=message.peer, tag=tag, async_op=True))
        self._posted[key_of(message)] = _Posted(message, memory, work)

    def has(self, key: Key) -> bool:
        """Whether it was posted and not taken."""
        return key in self._posted

    def wait(self, key: Key) -> None:
        """Until a message that was posted is here. Raises `PeerFailed`."""
        message, _, work = self._posted[key]
        _wait(work, message)

    def take(self, key: Key) -> Gradients:
        """The tensors of a message that was waited for. Raises `DataCorruption`, `PeerFailed`."""
        message, memory, _ = self._posted.pop(key)
        layout = read_header(memory, key, self._limit_bytes, _Here(self._comm.rank, message))
        self._note(message, layout.size_bytes)
        frame = memory.size
        if layout.size_bytes > frame:
            whole = empty_bytes(layout.size_bytes)
            whole[:frame] = memory
            _wait(
                self._comm.recv(whole[frame:], source=message.peer, tag=self._tag(message) + 1, async_op=True), message
            )
            memory = whole
        return unpack(layout, memory, self._device)

    def send(self, message: Message, tensors: Gradients) -> None:
        """Begins to send; `tensors` may be changed afterwards. Raises `UsageError` where no message can hold them."""
        layout = layout_of(tensors, self._limit_bytes, _Here(self._comm.rank, message))
        key, tag, peer = key_of(message), self._tag(message), message.peer
        frame = self._frame(_channel(message))
        self._note(message, layout.size_bytes)
        self._collect(MAX_PENDING_SENDS - 1)
        buffer = self._buffer(max(frame, layout.size_bytes), layout)
        buffer.write(layout, key, tensors)
        memory = buffer.memory
        works = [self._start(memory[:frame], peer, tag)]
        if layout.size_bytes > frame:
            works.append(self._start(memory[frame : layout.size_bytes], peer, tag + 1))
        self.sent_bytes += max(frame, layout.size_bytes)
        self._sent.append(_Sent(message, buffer, tuple(works)))

    def end_step(self) -> None:
        """Waits for what was sent. Frames of the next step are as long as the longest message of their channel."""
        self._collect(0)
        for channel, size_bytes in self._longest.items():
            if size_bytes > self._frames.get(channel, 0):
                self._frames[channel] = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES

    def _start(self, part: Bytes, peer: int, tag: int) -> Work:
        """A communicator that has no room gets it when what is pending ends; that may need our own receives, which are
        posted, and the peer's, which do not depend on this send (see `programs`)."""
        return when_there_is_room(lambda: self._comm.send(part, to=peer, tag=tag, async_op=True))

    def _collect(self, most: int) -> None:
        """Takes back the memory of sends that have ended, and waits where more than `most` have not."""
        while self._sent and (len(self._sent) > most or all(work.done() for work in self._sent[0].works)):
            message, buffer, works = self._sent.popleft()
            for work in works:
                _wait(work, message)
            if len(self._free) < _MAX_FREE:
                self._free.append(buffer)

    def _buffer(self, size_bytes: int, layout: Layout) -> Outgoing:
        """The one that had the same layout, where there is one: nothing in it has to be made."""
        fitting = [index for index, buffer in enumerate(self._free) if buffer.memory.size >= size_bytes]
        if fitting:
            alike = (index for index in fitting if self._free[index].layout == layout)
            return self._free.pop(next(alike, fitting[0]))
        if len(self._free) == _MAX_FREE:
            self._free.pop(0)
        return Outgoing(size_bytes)

    def _frame(self, channel: _Channel) -> int:
        return self._frames.get(channel) or min(FIRST_FRAME_BYTES, max(self._limit_bytes, HEADER_BYTES))

    def _note(self, message: Message, size_bytes: int) -> None:
        channel = _channel(message)
        self._longest[channel] = max(size_bytes, self._longest.get(channel, 0))

    def _tag(self, message: Message) -> int:
        boundary = 2 * message.stage + message.gradient
        return 2 * (boundary * self._micro_batches + message.micro_batch)


def _channel(message: Message) -> _Channel:
    return message.peer, message.gradient, message.stage


def _wait(work: Work, message: Message) -> None:
    try:
        work.wait()
    except PeerFailed as error:
        raise PeerFailed(f"{message} did not complete: {error.message}", rank=error.rank) from error


def tags_of(stages: int, micro_batches: int) -> int:
    """Tags from this one on are free."""
    return 4 * stages * micro_batches
