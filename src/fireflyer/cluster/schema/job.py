"""What is asked of the launcher, what it hands back, and a line that a rank printed."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND

__all__ = [
    "MAX_NODES",
    "MAX_RANKS",
    "Culprit",
    "Fault",
    "JobResult",
    "JobSpec",
    "RankLine",
    "Timeouts",
    "parse_fault",
]

MAX_NODES = 1024
MAX_RANKS = 16384

_FAULT = re.compile(r"(kill-node|kill-rank)=([0-9]{1,6})@([0-9]{1,12})(s?)")


class Fault(msgspec.Struct, frozen=True):
    """Something that the launcher is to break in the first attempt: when any rank reports `step` or a later one, or
    `after_s` seconds after the ranks were started, for scripts that report nothing.

    `kill-node`: the node's agent and all its ranks are killed with SIGKILL. `kill-rank`: one rank is.
    """

    kind: Literal["kill-node", "kill-rank"]
    target: int
    step: int | None
    after_s: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}={self.target}@{self.step if self.after_s is None else f'{self.after_s}s'}"


def parse_fault(text: str) -> Fault:
    """`kill-node=1@60` or `kill-rank=3@20s`: what, which one, at which step or time. Raises `UsageError`."""
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--inject {text!r} is not understood; write it like kill-node=1@60 (when step 60 is reported) or "
            "kill-rank=3@20s (20 seconds after the start)"
        )
    when, kind = int(match[3]), {"kind": match[1], "target": int(match[2])}
    return msgspec.convert({**kind, "step": None, "after_s": when} if match[4] else {**kind, "step": when}, Fault)


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All in nanoseconds."""

    heartbeat_ns: int = 300 * MS
    """An agent shows that it is alive this often."""
    node_lost_ns: int = 1500 * MS
    """A node whose agent was silent for so long is lost."""
    agent_start_ns: int = 60 * SECOND
    settle_ns: int = 500 * MS
    """After a failure, ranks that are left have so long to end by themselves, with a word on why and a dump of their
    collectives, which notice a death within 100 ms. Whoever still runs then is asked to end."""
    stop_grace_ns: int = 10 * SECOND
    """Between the polite signal and SIGKILL."""
    kill_ns: int = 10 * SECOND
    """A node whose processes outlive SIGKILL for so long ends the job: nothing may be started beside them."""
    blame_ns: int = 300 * MS
    """After the first failure, wait so long for the failure that may have caused it before naming the culprit."""
    backoff_ns: int = 200 * MS
    """Pause before a restart; doubles with every attempt that made no progress, up to `backoff_max_ns`."""
    backoff_max_ns: int = 10 * SECOND


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job: `nodes * ranks_per_node` processes of the same command."""

    script: str
    """A Python file, the name of a module, or the path of a program, as `kind` says."""
    args: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    run_dir: str
    """Directory of this run: event log, rank logs, node secret (mode 0700). Made if absent; must not hold a run."""
    nodes: int = 1
    ranks_per_node: int = 1
    max_restarts: int = 0
    name: str = "job"
    """The ranks see it as TORCHELASTIC_RUN_ID."""
    env: dict[str, str] = {}
    """Added to the environment of every rank."""
    master_port: int = 0
    """0: a free port for each attempt."""
    omp_num_threads: int | None = None
    """None: leave OMP_NUM_THREADS alone where the user set it, else 1 where a node has more than one rank."""
    devices: Literal["auto", "cpu", "gpu"] = "auto"
    """What a rank occupies. auto: a GPU where the machine has one, else a core."""
    topology: bytes = b""
    """What was declared about the network, as JSON, for the ranks' collectives; empty: nothing."""
    tune: bool = False
    """The ranks measure the network before they plan their collectives."""
    transport: Literal["tcp", "ucx", "auto"] | None = None
    """What their collectives use between nodes. None: what the environment says, else TCP."""
    inject: tuple[Fault, ...] = ()
    timeouts: Timeouts = Timeouts()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


class Culprit(msgspec.Struct, frozen=True):
    """Who ended the last failed attempt. `rank` is None where a whole node was lost."""

    attempt: int
    node: int
    rank: int | None
    exit_code: int
    reason: str


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    """0: every rank ended with 0. Else that of the culprit, or 128 + n when signal n stopped the job."""
    reason: str
    """One line."""
    attempts: int
    """How many were started."""
    culprit: Culprit | None
    run_dir: str
    events_path: str
    logs_dir: str
    """`attempt-0/rank-3.log` and so on beneath it: stdout and stderr together, complete."""
    reports_dropped: int = 0
    """Step reports that ranks could not deliver in time."""
    faults_left: tuple[Fault, ...] = ()
    """What was to be injected and never was: the first attempt ended before."""


class RankLine(msgspec.Struct, frozen=True):
    """One line that a rank printed, for display. The complete bytes are in the rank's log file."""

    rank: int
    node: int
    attempt: int
    stream: Literal["stdout", "stderr"]
    text: str
    """Without its end of line; bytes that are not UTF-8 are replaced; may hold terminal control sequences."""
    cut: bool = False
    """The line was longer than the bound and this is only its beginning."""
