"""Logs of runs: what a node sends to the manager, and what the manager shows.

A log is bytes with offsets, one for each file: `attempt-1-rank-3` is what rank 3 printed in the first attempt of a run,
`launcher` the log of the run's launcher, `events` its event log, `node-0` what the supervisor of that node said.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, NamedTuple

import msgspec

from fireflyer.cluster.schema.tasks import Outcome, TaskId, TaskState
from fireflyer.runtime.rpc import Method

__all__ = [
    "APPEND_LOG",
    "END_LOG",
    "LAUNCHER",
    "MAX_CHUNK_BYTES",
    "STREAM_PATTERN",
    "AppendLog",
    "EndLog",
    "FoundLine",
    "FoundLines",
    "LogAnswer",
    "LogChunk",
    "LogEnd",
    "LogEvent",
    "LogPiece",
    "LogText",
    "LogsEnded",
    "LogsState",
    "RankLog",
    "RunLogs",
    "StreamName",
    "StreamView",
    "TaskLogs",
    "rank_log_of",
    "stream_of_rank",
]

MAX_CHUNK_BYTES: Final = 64 << 10
STREAM_PATTERN: Final = r"^[a-z][a-z0-9-]{0,62}\Z"
"""Also the name of a folder."""
LAUNCHER: Final = "launcher"
"""Of each run; it is closed last, so a run of which it is closed has all of its logs in the store."""
_RANK_STREAM: Final = re.compile(r"attempt-(0|[1-9][0-9]{0,8})-rank-(0|[1-9][0-9]{0,8})")

StreamName = Annotated[str, msgspec.Meta(pattern=STREAM_PATTERN)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_RunNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_RunToken = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,64}$")]


class RankLog(NamedTuple):
    attempt: int
    rank: int


def stream_of_rank(attempt: int, rank: int) -> str:
    return f"attempt-{attempt}-rank-{rank}"


def rank_log_of(stream: str) -> RankLog | None:
    """None for a log that is not the output of a rank."""
    match = _RANK_STREAM.fullmatch(stream)
    return None if match is None else RankLog(int(match[1]), int(match[2]))


# --- from nodes ---


class LogChunk(msgspec.Struct, frozen=True, array_like=True):
    """From a node. Without data it asks for the answer."""

    stream: StreamName
    offset: _Offset
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK_BYTES)] = b""
    lost_bytes: _Offset = 0
    """Directly before `offset`, that the node does not have any more."""


class LogEnd(msgspec.Struct, frozen=True, array_like=True):
    """From a node: nothing comes after `end`."""

    stream: StreamName
    end: _Offset


class LogAnswer(msgspec.Struct, frozen=True, array_like=True):
    end: int
    """The offset that the store waits for."""
    durable: int
    """What the node may forget: bytes before it."""
    cut: bool = False
    closed: bool = False


class AppendLog(msgspec.Struct, frozen=True, kw_only=True):
    """From the node of the run's launcher, and from no other. `NotFound`: nothing is taken of this run any more."""

    task: TaskId
    run: _RunNumber
    run_token: _RunToken
    chunk: LogChunk


class EndLog(msgspec.Struct, frozen=True, kw_only=True):
    task: TaskId
    run: _RunNumber
    run_token: _RunToken
    end: LogEnd


APPEND_LOG = Method("platform.append_log", AppendLog, LogAnswer)
END_LOG = Method("platform.end_log", EndLog, LogAnswer)


# --- for people ---


class StreamView(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt` and `rank` are None for a log that is not the output of a rank."""

    name: str
    attempt: int | None
    rank: int | None
    end: int
    """Bytes, those in gaps included."""
    gaps: tuple[tuple[int, int], ...]
    """Offsets of bytes that were lost: from, to."""
    cut: bool
    """The quota of the run was used up: nothing is kept after `end`."""
    closed: bool
    """Nothing more comes."""


class RunLogs(msgspec.Struct, frozen=True):
    run: int
    streams: tuple[StreamView, ...]


class TaskLogs(msgspec.Struct, frozen=True):
    """Runs that have logs, of the newest hundred."""

    task: int
    runs: tuple[RunLogs, ...]


class LogPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a log. `offset` is after the one that was asked for where bytes in between were lost. `cut` and
    `closed` are said with the last piece: nothing comes after it."""

    offset: int
    data: bytes
    """In base64."""
    next_offset: int
    cut: bool
    closed: bool


class FoundLine(msgspec.Struct, frozen=True, kw_only=True):
    run: int
    attempt: int
    rank: int
    offset: int
    line: str


class FoundLines(msgspec.Struct, frozen=True):
    """`next`: `after` of the next page; empty: all was searched."""

    lines: tuple[FoundLine, ...]
    next: str


class LogText(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="text"):
    """Whole lines of one rank, or what its log has at its end."""

    run: int
    attempt: int
    rank: int
    offset: int
    text: str
    lost_bytes: int = 0
    """Before `offset`: the node lost them."""
    cut: bool = False
    """The rest of this log was not kept."""


class LogsState(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="state"):
    """The task's state is another one now."""

    state: TaskState
    runs: int
    why: str


class LogsEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="what", tag="end"):
    """The last event: the task has finished, or no more was asked for. `complete` False: a node did not send the end
    of a log."""

    state: TaskState
    outcome: Outcome | None
    exit_code: int | None
    reason: str
    complete: bool = True


LogEvent = LogText | LogsState | LogsEnded
