"""Exec sessions: a command in a run of a task, or a connection to a port of it, as its user reaches it from outside.

    client ──POST /tasks/N/exec──────────> manager that leads        ExecRequest, ExecAccepted
           ──WebSocket /execs/ID─────────>    │  one binary message for each `Frame`
                                              │
    agent of the node ──WAIT_EXECS (held)────>│  ExecOrder
                      ──RECEIVE_FRAMES (held)>│  frames of the client      on a connection of
                      ──SEND_FRAMES──────────>│  frames for the client     the session's own

Frames mean the same on both ways; `core.exec_session` says in which order they come. Either end sends data only as far
as the other has granted (`Grant`), so no end ever holds more than `WINDOW_BYTES`, and what is no data is never behind
data that nobody takes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from fireflyer.base.decoding import msgpack_decoder
from fireflyer.base.errors import UsageError
from fireflyer.cluster.schema.tasks import TaskId
from fireflyer.runtime.rpc import Method

__all__ = [
    "EXEC_HOLD_NS",
    "MAX_DATA_BYTES",
    "MAX_FRAME_BYTES",
    "RECEIVE_FRAMES",
    "SEND_FRAMES",
    "SIGNALS",
    "WAIT_EXECS",
    "WINDOW_BYTES",
    "Closed",
    "Data",
    "Eof",
    "ExecAccepted",
    "ExecId",
    "ExecOrder",
    "ExecOrders",
    "ExecProgram",
    "ExecRequest",
    "Exited",
    "Frame",
    "FramesHere",
    "FramesWanted",
    "Grant",
    "Port",
    "Resize",
    "Signal",
    "Started",
    "StreamNumber",
    "Taken",
    "WaitExecs",
    "decode_frame",
    "encode_frame",
]

WINDOW_BYTES: Final = 256 << 10
"""Of data that one end may send beyond what the other has taken."""
MAX_DATA_BYTES: Final = 32 << 10
MAX_FRAME_BYTES: Final = MAX_DATA_BYTES + 1024
EXEC_HOLD_NS: Final = 20_000_000_000
"""For so long a manager holds a call of an agent that has nothing to hear."""
SIGNALS: Final = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")
MAX_ARGUMENTS_BYTES: Final = 128 << 10

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
_Argument = Annotated[str, msgspec.Meta(max_length=32 << 10, pattern=r"^[^\0]*$")]
_Size = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=MAX_DATA_BYTES)]
_Line = Annotated[str, msgspec.Meta(max_length=1000)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
StreamNumber: TypeAlias = Literal[0, 1, 2]
ExecId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
"""Random, so that only who asked for the session knows it."""
_RunToken = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}$")]


class ExecProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A command beside a rank: its account, environment and working directory."""

    argv: Annotated[tuple[_Argument, ...], msgspec.Meta(max_length=1024)] = ()
    """Empty: the shell of the account."""
    terminal: bool = False
    """On a terminal of its own; its output and its errors are then one stream."""
    rows: _Size = 24
    columns: _Size = 80
    term: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._+-]{0,64}$")] = ""
    """Type of the user's terminal (TERM)."""

    def __post_init__(self) -> None:
        if sum(len(argument.encode(errors="replace")) for argument in self.argv) > MAX_ARGUMENTS_BYTES:
            raise UsageError(f"a command has at most {MAX_ARGUMENTS_BYTES} bytes; send the rest as its input")


class Port(msgspec.Struct, frozen=True):
    """One connection to a port of 127.0.0.1 on which a process of the run listens."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` or `node` says where; neither: at rank 0. Exactly one of `program` and `port`."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] | None = None
    node: _Name | None = None
    program: ExecProgram | None = None
    port: Port | None = None
    idle_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] | None = None
    """Ended when no data came or went for so long; None: as the manager has it."""
    ends_task: bool = False
    """The task ends with it: the shell of an interactive task."""

    def __post_init__(self) -> None:
        if (self.program is None) == (self.port is None):
            raise UsageError("an exec session has either a program or a port")
        if self.rank is not None and self.node is not None:
            raise UsageError("name the rank or the node, not both")


class ExecAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to `/execs/ID` at the same manager within seconds."""

    id: ExecId
    task: TaskId
    run: int
    node: str
    rank: int | None = None


# --- frames ---


class Data(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`stream` 0: input of the program; 1: its output; 2: its errors."""

    stream: StreamNumber
    data: _Bytes


class Eof(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nothing more comes of this stream."""

    stream: StreamNumber


class Grant(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """So many bytes of data may be sent beside those that were granted before."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_BYTES)]


class Resize(msgspec.Struct, frozen=True, array_like=True, tag=4):
    rows: _Size
    columns: _Size


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """To the program and what it started."""

    name: Literal["HUP", "INT", "QUIT", "TERM", "USR1", "USR2"]


class Started(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The program runs, or the port is connected."""


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The program has ended, and all that it wrote was sent before."""

    code: Annotated[int, msgspec.Meta(ge=0, le=255)]


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The session is over, and why; from either end, or from the manager between them."""

    reason: _Line


Frame: TypeAlias = Data | Eof | Grant | Resize | Signal | Started | Exited | Closed
_decoder = msgpack_decoder(Frame)
encode_frame = msgspec.msgpack.Encoder().encode


def decode_frame(data: bytes) -> Frame:
    """Raises `msgspec.DecodeError`."""
    frame: Frame = _decoder.decode(data)
    return frame


# --- between agents and managers ---


class WaitExecs(msgspec.Struct, frozen=True, kw_only=True):
    """From an agent that has a run; answered when there is a session for its node, or after `EXEC_HOLD_NS`."""

    incarnation: _Number


class ExecOrder(msgspec.Struct, frozen=True, kw_only=True):
    id: ExecId
    run_token: _RunToken
    user: Annotated[str, msgspec.Meta(max_length=80)]
    """Of the task, as whose account it runs."""
    account: Annotated[str, msgspec.Meta(max_length=80)] = ""
    """That the manager names for the user; empty: none."""
    rank: int | None = None
    """None: any that is on the node."""
    program: ExecProgram | None = None
    port: Port | None = None


class ExecOrders(msgspec.Struct, frozen=True):
    sessions: Annotated[tuple[ExecOrder, ...], msgspec.Meta(max_length=64)] = ()


class FramesWanted(msgspec.Struct, frozen=True):
    """From the agent; answered when there are some, or after `EXEC_HOLD_NS`."""

    id: ExecId


_Frames = Annotated[tuple[Frame, ...], msgspec.Meta(max_length=256)]


class FramesHere(msgspec.Struct, frozen=True):
    id: ExecId
    frames: _Frames = ()


class Taken(msgspec.Struct, frozen=True):
    """There is place for more."""


WAIT_EXECS = Method("platform.wait_execs", WaitExecs, ExecOrders)
RECEIVE_FRAMES = Method("platform.receive_frames", FramesWanted, FramesHere)
SEND_FRAMES = Method("platform.send_frames", FramesHere, Taken)
