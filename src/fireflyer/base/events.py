"""The step-report protocol and the job's event log.

Ranks *report* (what they did, how long it took on their own clock); the launcher *logs* (what it saw, on its clock).
Everything that is later said about a job (progress line, report, ETTR, goodput) is computed from this log and from
nothing else. The log is a file of JSON lines, one `Logged` each; durations and instants are nanoseconds.

A record that a newer version wrote is read with unknown fields ignored; unknown `type`s are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec

from fireflyer.base.decoding import DECODE_ERRORS, json_decoder
from fireflyer.base.errors import DataCorruption

__all__ = [
    "MAX_SUSPECTS",
    "AttemptFailed",
    "AttemptSized",
    "AttemptStarted",
    "CheckpointReport",
    "CorruptionReport",
    "FailureKind",
    "FaultInjected",
    "JobEvent",
    "JobFinished",
    "JobStarted",
    "Logged",
    "NodeChecked",
    "NodeLost",
    "NodeVerdict",
    "PeerFailureReport",
    "RankExited",
    "Report",
    "ResumeReport",
    "SaturationReport",
    "SkippedCheckpoint",
    "StepReport",
    "SuspendRequested",
    "Suspended",
    "decode_log",
    "encode_log_line",
]


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """One optimizer step of one rank."""

    rank: int
    attempt: int
    step: int
    """1 for the first step of the job; a resumed attempt reports steps again that were lost."""
    samples: int
    """Samples of this rank in this step."""
    tokens: int
    loss: float | None
    """Mean over the whole batch (all ranks) where the rank knows it, else None. Exact: floats travel as float64."""
    productive_ns: int
    """Time spent on this step (data, forward, backward, optimizer), without checkpoint stalls."""
    checkpoint_ns: int = 0
    """Time that checkpointing held this step up (snapshot; the background write does not count)."""
    allreduce_bytes: int = 0
    allreduce_ns: int = 0
    """Time during which at least one allreduce of this rank was in flight."""


class SkippedCheckpoint(msgspec.Struct, frozen=True):
    name: str
    reason: str


class ResumeReport(msgspec.Struct, frozen=True, tag="resume"):
    """Sent once by each rank when its state is ready and training is about to begin."""

    rank: int
    attempt: int
    step: int
    """Steps already done: 0 for a fresh start."""
    checkpoint: str | None
    passed_over: tuple[SkippedCheckpoint, ...] = ()
    load_ns: int = 0


class CheckpointReport(msgspec.Struct, frozen=True, tag="checkpoint"):
    """A checkpoint has been committed, or has failed (training goes on)."""

    rank: int
    attempt: int
    step: int
    bytes: int
    stall_ns: int
    write_ns: int
    error: str | None = None


class PeerFailureReport(msgspec.Struct, frozen=True, tag="peer_failure"):
    """A collective told this rank that another one failed it: died, hung, or never came. Sent before the rank gives up,
    so that the launcher can blame the one that held the others up and not the first that would wait no longer."""

    rank: int
    attempt: int
    peer: int
    reason: str


class SaturationReport(msgspec.Struct, frozen=True, tag="saturation"):
    """Results of fp8 sums did not fit their type. Sent when a rank notices it first, and with the last counts when its
    group is closed; counts are those since the group was made."""

    rank: int
    attempt: int
    group: str
    saturated: int
    """Values that this rank rounded and that did not fit; over all ranks each value of a result counts once."""
    values: int
    """Of all fp8 sums of the group, whoever rounded them."""


MAX_SUSPECTS: Final = 64


class CorruptionReport(msgspec.Struct, frozen=True, tag="corruption"):
    """Replicas of the training state differ. Each rank that compared them sends the same before it gives up."""

    rank: int
    attempt: int
    step: int
    suspects: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SUSPECTS)]
    """Ranks; the first `MAX_SUSPECTS`."""
    decided: bool
    """A majority of the replicas agrees: only then do suspects say which node is at fault."""
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


Report = StepReport | ResumeReport | CheckpointReport | PeerFailureReport | SaturationReport | CorruptionReport


class JobStarted(msgspec.Struct, frozen=True, tag="job_started"):
    job: str
    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    max_restarts: int
    wall_time_s: float
    """Seconds since the epoch, for people only."""
    min_nodes: int = 0
    """An attempt may have fewer than `nodes`, but not fewer than these. 0: all have `nodes`."""
    node_ranks: tuple[int, ...] = ()
    """Of the largest attempt: how many ranks each node has, or where only a rank writes the log, their sum. Empty:
    `ranks_per_node`, which else is the largest."""

    @property
    def world_size(self) -> int:
        """Ranks of the largest attempt."""
        return sum(self.node_ranks) or self.nodes * self.ranks_per_node


class AttemptStarted(msgspec.Struct, frozen=True, tag="attempt_started"):
    attempt: int


class AttemptSized(msgspec.Struct, frozen=True, tag="attempt_sized"):
    """Of a job on several hosts: this attempt has so many nodes, on these hosts, in the order of their numbers."""

    attempt: int
    nodes: int
    hosts: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Hosts that have failed too often to be used in this job again."""
    node_ranks: tuple[int, ...] = ()
    """How many ranks each node has. Empty: as many as `JobStarted` says of all."""


class NodeLost(msgspec.Struct, frozen=True, tag="node_lost"):
    node: int
    attempt: int
    reason: str
    host: str = ""
    """Of a job on several hosts: which one it was on."""


FailureKind = Literal["user", "infrastructure", "unknown"]
"""user: an exception of the script. infrastructure: a lost node, SIGKILL from outside, memory that ran out, a rank that
hangs. unknown: any other exit code or signal."""


class RankExited(msgspec.Struct, frozen=True, tag="rank_exited"):
    rank: int
    attempt: int
    exit_code: int
    """As the shell says it: 128 + n for signal n."""
    reason: str = ""
    """How it failed, in one line; empty where it succeeded or had been asked to end."""


class AttemptFailed(msgspec.Struct, frozen=True, tag="attempt_failed"):
    """The gang is being stopped; `restarting` says whether another attempt follows."""

    attempt: int
    reason: str
    restarting: bool
    node: int | None = None
    """Who is to blame: this node, and where it was a single rank of it, `rank`. None where nobody is."""
    rank: int | None = None
    stopped: bool = False
    """It ended because somebody asked for it: nothing broke."""
    kind: FailureKind | None = None
    """None where nobody is to blame, and in logs of releases that did not tell."""


NodeVerdict = Literal["suspect", "sound", "unknown"]


class NodeChecked(msgspec.Struct, frozen=True, tag="node_checked"):
    """After a failure the program of `--on-failure` has looked at the node: suspect, its fault; sound, the script's;
    unknown, the check decided nothing."""

    node: int
    rank: int
    attempt: int
    verdict: NodeVerdict
    reason: str


class FaultInjected(msgspec.Struct, frozen=True, tag="fault_injected"):
    """The launcher was asked to break something (`--inject`)."""

    what: str
    attempt: int
    step: int | None
    """The last one reported; None where none was."""


class SuspendRequested(msgspec.Struct, frozen=True, tag="suspend_requested"):
    """The ranks are asked to save and to leave. From now on a rank that exits with `SUSPENDED_EXIT_CODE` has left, and
    has not failed."""

    attempt: int
    rank: int | None = None
    """That left without having been asked; None: the launcher was told to."""


class Suspended(msgspec.Struct, frozen=True, tag="suspended"):
    """The ranks are gone because of `SuspendRequested`; the job goes on from its last checkpoint when it is started
    again."""

    attempt: int
    horizon: int | None = None
    """The ranks left at their first point that is not below this one: the step, where they give it, else the number of
    the call. None: none has left by itself."""
    ended_ranks: int = 0
    """Ranks that did not leave by themselves."""


class JobFinished(msgspec.Struct, frozen=True, tag="job_finished"):
    exit_code: int
    reason: str


JobEvent = (
    StepReport
    | ResumeReport
    | CheckpointReport
    | PeerFailureReport
    | SaturationReport
    | CorruptionReport
    | JobStarted
    | AttemptStarted
    | AttemptSized
    | NodeLost
    | RankExited
    | AttemptFailed
    | NodeChecked
    | FaultInjected
    | SuspendRequested
    | Suspended
    | JobFinished
)


class Logged(msgspec.Struct, frozen=True):
    """`at_ns` is the launcher's monotonic clock since the job started."""

    at_ns: int
    event: JobEvent


_encoder = msgspec.json.Encoder()
_log_decoder = json_decoder(Logged)


def encode_log_line(entry: Logged) -> bytes:
    return _encoder.encode(entry) + b"\n"


def decode_log(lines: Iterable[bytes], *, name: str = "event log") -> list[Logged]:
    """All entries. A last line without its newline is what a crash leaves and is dropped; any other bad line raises
    `DataCorruption` with its number."""
    entries: list[Logged] = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            entries.append(_log_decoder.decode(line))
        except DECODE_ERRORS as error:
            raise DataCorruption(f"{name}, line {number}: {error}") from error
    return entries
