"""What supervisors and ranks say to the launcher, and the commands that supervisors fetch from it.

All calls go to the launcher. A supervisor says `HELLO` first: from then on its connection stands for its node and
incarnation, whatever else it may claim. It fetches commands one by one with `NEXT`, which waits until there is one;
asking again after the same number gives the same command again, so a lost answer loses no command.
"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

from fireflyer.base.port_range import PortRange
from fireflyer.base.suspension import MAX_POINT, NEVER
from fireflyer.cluster.schema.job import MAX_RANKS
from fireflyer.runtime.rpc import Method

__all__ = [
    "CHECKED",
    "EXITED",
    "FETCH_FILES",
    "GONE",
    "HEARTBEAT",
    "HELLO",
    "KEEP_FILE",
    "LOG",
    "LOG_ERROR",
    "MAX_BATCH_BYTES",
    "MAX_BATCH_LINES",
    "MAX_ERROR_TEXT",
    "MAX_LINE_BYTES",
    "MAX_LOG_BYTES",
    "MAX_RUN_FILE_BYTES",
    "NEXT",
    "OUTPUT",
    "POINTS",
    "PORT",
    "RENEW",
    "STARTED",
    "Break",
    "Check",
    "Checked",
    "CollectPoints",
    "Command",
    "Done",
    "FindPort",
    "Gone",
    "Heartbeat",
    "LogBytes",
    "LogError",
    "Next",
    "NumberedCommand",
    "Output",
    "OutputLine",
    "Points",
    "PortFound",
    "RankEnd",
    "RankError",
    "RankToStart",
    "RunFile",
    "RunFiles",
    "SetHorizon",
    "ShutDown",
    "Start",
    "Started",
    "Stop",
    "SupervisorConfig",
    "SupervisorHello",
    "supervisor_command",
]

MAX_LINE_BYTES = 16 << 10
"""Longer lines are cut for display; the log file has all of them."""
MAX_BATCH_LINES = 1024
MAX_ERROR_TEXT = 400
"""Characters of one text of a `RankError`."""
MAX_BATCH_BYTES = 512 << 10
MAX_LOG_BYTES = 64 << 10
MAX_RUN_FILE_BYTES = 8 << 20

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]
_LOG_NAME = r"^attempt-[0-9]{1,9}/rank-[0-9]{1,9}\.(log|stacks|check\.log|stdout|stderr)$"
_ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor is told on its command line, as JSON."""

    launcher: str
    """`host:port` of the launcher's control service."""
    secret_file: str
    node: int
    incarnation: int
    heartbeat_ns: int
    logs_dir: str
    """Empty: what ranks print is sent to the launcher, which writes their logs."""
    run_dir: str = ""
    """Where it keeps files of the run that it does not share with the launcher."""
    lease_ns: int = 0
    """For how long the supervisor may run after it asked the launcher, which answered. 0: as long as its guard."""
    logs_bytes: int = 0
    """At most so much is kept in `logs_dir`. 0: all."""


def supervisor_command(config: SupervisorConfig) -> list[str]:
    """What a guard runs: the supervisor, with this Python."""
    return [sys.executable, "-P", "-m", "fireflyer.cluster.supervisor", msgspec.json.encode(config).decode()]


class SupervisorHello(msgspec.Struct, frozen=True):
    node: _Number
    incarnation: _Number
    pid: _Number


class Done(msgspec.Struct, frozen=True):
    """Nothing to say."""


class Heartbeat(msgspec.Struct, frozen=True):
    """The supervisor lives."""

    asks: bool = False
    """A rank of the attempt has come to a suspend point, see `base.suspension`."""


class RankToStart(msgspec.Struct, frozen=True):
    rank: int
    environment: dict[str, str]
    """To be added to the supervisor's own."""
    stdout_file: str = ""
    """A second file, besides the log, for this stream alone; empty: none."""
    stderr_file: str = ""


class Start(msgspec.Struct, frozen=True, tag="start"):
    attempt: int
    command: tuple[str, ...]
    ranks: tuple[RankToStart, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """`signal` to every rank that has not ended by itself within `settle_ns`, SIGKILL `grace_ns` later."""

    attempt: int
    signal: int
    settle_ns: int
    grace_ns: int
    stacks: bool = False
    """The ranks that are left hang: instead of the signal each Python process gets one by which it writes the stacks
    of its threads and ends."""


class Check(msgspec.Struct, frozen=True, tag="check"):
    """All ranks of the attempt are gone: run a program that looks at the node."""

    attempt: int
    command: tuple[str, ...]
    environment: dict[str, str]
    """To be added to the supervisor's own."""
    log: str
    """File that gets what it prints."""
    limit_ns: int


class ShutDown(msgspec.Struct, frozen=True, tag="shut_down"):
    pass


class FindPort(msgspec.Struct, frozen=True, tag="find_port"):
    """A port of this machine for MASTER_PORT: `port`, if it becomes free, or for 0 a free one, of the range `ports`
    where there is one."""

    attempt: int
    port: int
    ports: PortRange | None = None


class Break(msgspec.Struct, frozen=True, tag="break"):
    """A fault on purpose: SIGKILL to these ranks, and to the supervisor itself if it is told so."""

    ranks: tuple[int, ...]
    supervisor: bool = msgspec.field(name="agent")


class CollectPoints(msgspec.Struct, frozen=True, tag="collect_points"):
    """Ranks that come to a suspend point wait there from now on; say at which points the ranks are (`Points`)."""

    attempt: int


class SetHorizon(msgspec.Struct, frozen=True, tag="set_horizon"):
    """All ranks leave at this point."""

    attempt: int
    horizon: int


Command = Start | Stop | Check | ShutDown | FindPort | Break | CollectPoints | SetHorizon


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


class RankError(msgspec.Struct, frozen=True):
    """The exception that ended a rank, from its traceback or its error file."""

    type: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_TEXT)]
    """As Python prints it: `ValueError`, `json.decoder.JSONDecodeError`."""
    message: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_TEXT)] = ""
    """One line."""
    file: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_TEXT)] = ""
    """Of the innermost frame that is of no library; empty where it is not known."""
    line: _Number = 0


class RankEnd(msgspec.Struct, frozen=True):
    """How a rank ended: from its supervisor to the launcher's machine."""

    attempt: _Number
    rank: _Number
    exit_code: _ExitCode
    """As the shell says it: 128 + n for signal n."""
    told: bool
    """It had been asked to stop: its end says nothing about who failed."""
    note: _Text = ""
    """Why it could not be started, when it could not."""
    error: RankError | None = None
    out_of_memory: _Text = ""
    """Not empty: the kernel killed it because memory ran out, and this says which: `cgroup limit 512 MiB`."""
    suspended: bool = False
    """It left by `go_suspend()`."""


class Gone(msgspec.Struct, frozen=True):
    """Nothing of the attempt is left on the node."""

    attempt: _Number
    ends: tuple[RankEnd, ...]
    port_taken: bool = False
    """MASTER_PORT, which this node's rank 0 was to serve, is held by somebody else."""


class Points(msgspec.Struct, frozen=True):
    """The highest suspend point at which each rank of the node may have gone on, in the order of the ranks."""

    attempt: _Number
    points: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=NEVER, le=MAX_POINT)], ...], msgspec.Meta(max_length=MAX_RANKS)
    ]


class PortFound(msgspec.Struct, frozen=True):
    attempt: _Number
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    """0: none."""
    reason: _Text = ""


class LogBytes(msgspec.Struct, frozen=True):
    """What goes at the end of a file of the logs directory, byte for byte: what a rank printed, its stacks. `stdout`
    and `stderr`: of that stream alone, for the file in --log-dir."""

    name: Annotated[str, msgspec.Meta(max_length=100, pattern=_LOG_NAME)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_LOG_BYTES)]


class RunFile(msgspec.Struct, frozen=True):
    """A small file of the run directory, for machines that do not share it: what ranks of a later attempt, or people,
    need of it. `name` is relative to that directory."""

    name: Annotated[
        str, msgspec.Meta(max_length=300, pattern="^(topology.json|(collectives|flight)/[A-Za-z0-9%._~-]+)$")
    ]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_RUN_FILE_BYTES)]


class RunFiles(msgspec.Struct, frozen=True):
    files: tuple[RunFile, ...]


class Checked(msgspec.Struct, frozen=True):
    """How the program of a `Check` ended."""

    attempt: _Number
    exit_code: _ExitCode
    timed_out: bool = False
    note: _Text = ""
    """Why it could not be started, when it could not."""
    limit_ns: _Number = 0
    """What it was given; as in `Check`."""
    words: _Text = ""
    """The last line that it printed."""


class LogError(msgspec.Struct, frozen=True):
    """The supervisor cannot write the logs."""

    reason: _Text


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    rank: _Number
    attempt: _Number
    stream: Literal["stdout", "stderr"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_LINE_BYTES)]
    cut: bool


class Output(msgspec.Struct, frozen=True):
    lines: Annotated[tuple[OutputLine, ...], msgspec.Meta(max_length=MAX_BATCH_LINES)]


HELLO = Method("cluster.agent_hello", SupervisorHello, Done)
NEXT = Method("cluster.agent_next", Next, NumberedCommand)
HEARTBEAT = Method("cluster.agent_beat", Heartbeat, Done)
STARTED = Method("cluster.rank_started", Started, Done)
EXITED = Method("cluster.rank_exited", RankEnd, Done)
GONE = Method("cluster.ranks_gone", Gone, Done)
CHECKED = Method("cluster.node_checked", Checked, Done)
LOG_ERROR = Method("cluster.trouble", LogError, Done)
OUTPUT = Method("cluster.output", Output, Done)
RENEW = Method("cluster.renew_lease", Done, Done)
LOG = Method("cluster.rank_log", LogBytes, Done)
FETCH_FILES = Method("cluster.fetch_run_files", Done, RunFiles)
KEEP_FILE = Method("cluster.keep_run_file", RunFile, Done)
POINTS = Method("cluster.suspend_points", Points, Done)
PORT = Method("cluster.port_found", PortFound, Done)
