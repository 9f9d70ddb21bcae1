"""One end of an exec session: what may be sent, what may come, and what becomes of it.

    OPENING ──Started──> OPEN ──Exited──> OVER
       │                   │
       └──────Closed───────┴────────────> OVER        from the other end, from the manager, or said here

The client's end sends input, sizes and signals; the agent's end sends what the program writes, and its exit code as the
last of all. Data is sent within what the other end has granted: at the begin `WINDOW_BYTES`, then what it has taken. An
end that gets more than it granted, or a frame that the other end never sends, closes the session. Frames are neither
lost nor reordered (they are on streams), but the other end may vanish at any moment: the shell then says `lose`.

Everything is a method that returns the frames to be sent. No end waits for an answer, so nothing can be deadlocked: a
program that does not read only keeps the input from being granted.
"""

from __future__ import annotations

import enum

from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.execs import (
    MAX_DATA_BYTES,
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
)

__all__ = ["ExecEnd", "ExecPhase", "ExecSide"]

_GRANT_AT = WINDOW_BYTES // 4


class ExecSide(enum.Enum):
    CLIENT = "client"
    AGENT = "agent"


class ExecPhase(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    OVER = "over"


class ExecEnd:
    """`may_send` bytes of data may be sent now. When it is over, `exit_code` is that of the program, or `reason` says
    why there is none."""

    def __init__(self, side: ExecSide) -> None:
        self.side = side
        self.phase = ExecPhase.OPENING
        self.exit_code: int | None = None
        self.reason = ""
        self.may_send = WINDOW_BYTES
        self.unread = 0
        """Bytes that came and that were not taken."""
        self._taken = 0
        self._sent_eof: set[int] = set()
        self._got_eof: set[int] = set()

    @property
    def over(self) -> bool:
        return self.phase is ExecPhase.OVER

    # --- what this end says ---

    def send(self, stream: StreamNumber, data: bytes) -> list[Frame]:
        """`data` of at most `may_send` bytes. Nothing where the session is over."""
        if self.over or not data:
            return []
        if stream in self._sent_eof or not self._mine(stream):
            raise UsageError(f"stream {stream} is not to be written by the {self.side.value}, or has ended")
        if len(data) > self.may_send:
            raise UsageError(f"{len(data)} bytes are more than the other end takes now, {self.may_send}")
        self.may_send -= len(data)
        return [Data(stream, data[at : at + MAX_DATA_BYTES]) for at in range(0, len(data), MAX_DATA_BYTES)]

    def end_stream(self, stream: StreamNumber) -> list[Frame]:
        if self.over or stream in self._sent_eof:
            return []
        self._sent_eof.add(stream)
        return [Eof(stream)]

    def take(self, size_bytes: int) -> list[Frame]:
        """So many bytes that came have a place now: the other end may send as many more."""
        if size_bytes > self.unread:
            raise UsageError(f"{size_bytes} bytes were taken, and {self.unread} came")
        self.unread -= size_bytes
        self._taken += size_bytes
        if self.over or self._taken < _GRANT_AT:
            return []
        granted, self._taken = self._taken, 0
        return [Grant(granted)]

    def control(self, frame: Resize | Signal) -> list[Frame]:
        """Of the client."""
        return [] if self.over else [frame]

    def start(self) -> list[Frame]:
        """Of the agent: the program runs."""
        if self.phase is not ExecPhase.OPENING:
            return []
        self.phase = ExecPhase.OPEN
        return [Started()]

    def exit(self, code: int) -> list[Frame]:
        """Of the agent: all that the program wrote was sent."""
        if self.over:
            return []
        self.phase, self.exit_code = ExecPhase.OVER, min(max(code, 0), 255)
        return [Exited(self.exit_code)]

    def close(self, reason: str) -> list[Frame]:
        if self.over:
            return []
        self.phase, self.reason = ExecPhase.OVER, _line(reason)
        return [Closed(self.reason)]

    def lose(self, reason: str) -> None:
        """The other end cannot be reached any more."""
        self.close(reason)

    # --- what comes ---

    def hear(self, frame: Frame) -> list[Frame]:
        """The caller does what the frame says where `over` is not true afterwards (data, sizes, signals); frames that
        are returned are to be sent. Frames after the end are dropped."""
        if self.over:
            return []
        refused = self._refusal(frame)
        if refused:
            return self.close(f"the other end does not keep the protocol: {refused}")
        match frame:
            case Data(_, data):
                self.unread += len(data)
            case Eof(stream):
                self._got_eof.add(stream)
            case Grant(size_bytes):
                self.may_send += size_bytes
            case Started():
                self.phase = ExecPhase.OPEN
            case Exited(code):
                self.phase, self.exit_code = ExecPhase.OVER, code
            case Closed(reason):
                self.phase, self.reason = ExecPhase.OVER, _line(reason)
            case _:
                pass
        return []

    def _refusal(self, frame: Frame) -> str:
        """Why the other end may not send this now; empty: it may."""
        if self.side is ExecSide.CLIENT and isinstance(frame, Resize | Signal):
            return "a client gets no sizes and signals"
        if self.side is ExecSide.AGENT and isinstance(frame, Started | Exited):
            return "an agent is not told that a program runs"
        match frame:
            case Data(stream) | Eof(stream) if self._mine(stream) or stream in self._got_eof:
                return f"stream {stream} is not written from there, or has ended"
            case Data(_, data) if self.unread + self._taken + len(data) > WINDOW_BYTES:
                return f"more than {WINDOW_BYTES} bytes came that were not granted"
            case Grant(size_bytes) if self.may_send + size_bytes > WINDOW_BYTES:
                return "more was granted than was sent"
            case Started() if self.phase is ExecPhase.OPEN:
                return "it started twice"
        return ""

    def _mine(self, stream: int) -> bool:
        """Whether this end writes it."""
        return (stream == 0) == (self.side is ExecSide.CLIENT)


def _line(text: str) -> str:
    """One line of a bounded length, without control characters: it is shown on terminals."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:1000]
