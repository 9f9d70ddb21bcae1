"""What agents and ranks say to the launcher, and the commands that agents fetch from it.

All calls go to the launcher. An agent says `HELLO` first: from then on its connection stands for its node and
incarnation, whatever else it may claim. It fetches commands one by one with `NEXT`, which waits until there is one;
asking again after the same number gives the same command again, so a lost answer loses no command.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fireflyer.runtime.rpc import Method

__all__ = [
    "EXITED",
    "GONE",
    "HEARTBEAT",
    "HELLO",
    "LOG_ERROR",
    "MAX_BATCH_BYTES",
    "MAX_BATCH_LINES",
    "MAX_LINE_BYTES",
    "NEXT",
    "OUTPUT",
    "STARTED",
    "AgentConfig",
    "AgentHello",
    "Command",
    "Done",
    "Exited",
    "Gone",
    "LogError",
    "Next",
    "NumberedCommand",
    "Output",
    "OutputLine",
    "RankToStart",
    "ShutDown",
    "Start",
    "Started",
    "Stop",
]

MAX_LINE_BYTES = 16 << 10
"""Longer lines are cut for display; the log file has all of them."""
MAX_BATCH_LINES = 1024
MAX_BATCH_BYTES = 512 << 10

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is told on its command line, as JSON."""

    launcher: str
    """`host:port` of the launcher's control service."""
    secret_file: str
    node: int
    incarnation: int
    heartbeat_ns: int
    logs_dir: str


class AgentHello(msgspec.Struct, frozen=True):
    node: _Number
    incarnation: _Number
    pid: _Number


class Done(msgspec.Struct, frozen=True):
    """Nothing to say."""


class RankToStart(msgspec.Struct, frozen=True):
    rank: int
    environment: dict[str, str]
    """To be added to the agent's own."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    attempt: int
    command: tuple[str, ...]
    ranks: tuple[RankToStart, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    attempt: int
    signal: int
    settle_ns: int
    grace_ns: int


class ShutDown(msgspec.Struct, frozen=True, tag="shut_down"):
    pass


Command = Start | Stop | ShutDown


class Next(msgspec.Struct, frozen=True):
    after: _Number
    """Number of the last command received, 0 for none."""


class NumberedCommand(msgspec.Struct, frozen=True):
    number: int
    command: Command | None
    """None: nothing yet, ask again."""


class Started(msgspec.Struct, frozen=True):
    attempt: _Number
    rank: _Number
    pid: _Number


class Exited(msgspec.Struct, frozen=True):
    attempt: _Number
    rank: _Number
    exit_code: _ExitCode
    told: bool
    note: _Text = ""


class Gone(msgspec.Struct, frozen=True):
    """Nothing of the attempt is left on the node."""

    attempt: _Number
    ends: tuple[Exited, ...]


class LogError(msgspec.Struct, frozen=True):
    """The agent cannot write the logs."""

    reason: _Text


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    rank: _Number
    attempt: _Number
    stream: Literal["stdout", "stderr"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)]
    cut: bool


class Output(msgspec.Struct, frozen=True):
    lines: Annotated[tuple[OutputLine, ...], msgspec.Meta(max_length=MAX_BATCH_LINES)]


HELLO = Method("cluster.agent_hello", AgentHello, Done)
NEXT = Method("cluster.agent_next", Next, NumberedCommand)
HEARTBEAT = Method("cluster.agent_beat", Done, Done)
STARTED = Method("cluster.rank_started", Started, Done)
EXITED = Method("cluster.rank_exited", Exited, Done)
GONE = Method("cluster.ranks_gone", Gone, Done)
LOG_ERROR = Method("cluster.trouble", LogError, Done)
OUTPUT = Method("cluster.output", Output, Done)
