"""What a rank knew when things stopped: the dump of its flight recorder.

Pure: the structs, and bytes in and out. `files` writes and finds dumps, `trace` turns one into the format
of PyTorch's analyser, `explain` reads those of many ranks together.

A dump is one JSON object. Times are nanoseconds of the machine's monotonic clock, 0 where something has not happened;
`Snapshot.monotonic_ns` and `realtime_ns` are one instant on two clocks, which lays the dumps of several hosts side by
side as well as their wall clocks agree. A dump may come from a damaged disk or a hostile hand: everything in it is
bounded, and text holds no control characters, so it may be printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from fireflyer.base.decoding import DECODE_ERRORS, convert, decode_json
from fireflyer.base.errors import DataCorruption, UsageError
from fireflyer.native import FAILURE_KINDS

__all__ = [
    "FORMAT",
    "MAX_DUMP_BYTES",
    "Dump",
    "Fault",
    "LinkEnd",
    "PeerProgress",
    "Record",
    "Snapshot",
    "decode_dump",
    "encode_dump",
    "fault_from_native",
    "plan_digest",
    "snapshot_from_native",
]

FORMAT: Final = 1
MAX_DUMP_BYTES: Final = 32 << 20
MAX_RECORDS: Final = 1 << 16
MAX_SAMPLES: Final = 64
MAX_RANKS: Final = 1 << 16
MAX_LINKS: Final = 1 << 12

_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202f\u2066-\u2069]*\Z"
Word: TypeAlias = Annotated[str, Meta(max_length=64, pattern=_PRINTABLE)]
Line: TypeAlias = Annotated[str, Meta(max_length=1024, pattern=_PRINTABLE)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Signed: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
RankOrNone: TypeAlias = Annotated[int, Meta(ge=-1, lt=MAX_RANKS)]
State: TypeAlias = Literal["queued", "running", "done", "failed"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one rank."""

    id: Count
    """Counts everything that this rank recorded."""
    seq: Count
    """Of a collective: its number in the group. Of a message: its number among those of this pair and direction."""
    kind: Word
    """`allreduce` and so on; `send` and `recv` are messages."""
    dtype: Word
    op: Word = ""
    """`sum` and so on, of operations that reduce."""
    count: Count = 0
    """Elements, as in the call."""
    root: RankOrNone = -1
    peer: RankOrNone = -1
    """Of a message; -1 for a `recv` from any rank that has met no message."""
    tag: Signed = 0
    bytes: Count = 0
    path: Word = ""
    """How the bytes travel: small, direct, vm, staged, pipeline, exchange; empty while that is undecided."""
    algorithm: Word = ""
    """Between nodes: of the plan's algorithms, the one that was chosen for this size."""
    state: State
    failure: Word = ""
    submitted_ns: Count
    started_ns: Count = 0
    finished_ns: Count = 0
    progress_ns: Count = 0
    chunks: Count = 0
    chunks_done: Count = 0
    """On one node: of those that this rank works on itself."""
    chunk_bytes: Count = 0
    saturated: Count = 0
    """Values that an fp8 type could not hold."""
    samples: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_SAMPLES)] = ()
    """(chunks done, when), ascending, evenly thinned."""

    @property
    def message(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def inside(self) -> bool:
        """Whether the rank took part in it, however it ended; one that only waits for its turn does not yet."""
        return self.started_ns > 0

    def call(self) -> str:
        """Call, without its number: `allreduce of 1000 f32 (max)`, `recv of 8 i64 from rank 3, tag 7`."""
        text = self.kind
        if self.kind == "all_to_all" and not self.count and self.bytes:
            text += f" of uneven parts of {self.dtype}"
        elif self.kind != "barrier":
            text += f" of {self.count} {self.dtype}"
        if self.op and self.op != "sum":
            text += f" ({self.op})"
        if self.root >= 0:
            text += f", root {self.root}"
        if self.message:
            peer = f"rank {self.peer}" if self.peer >= 0 else "any rank"
            text += f" {'from' if self.kind == 'recv' else 'to'} {peer}, tag {self.tag}"
        return text


class PeerProgress(msgspec.Struct, frozen=True):
    """Progress of another rank as the dumping rank knew it: from its node's memory or a neighbour's last heartbeat."""

    rank: Rank
    entered: Count
    """Collectives that it had begun."""
    finished: Count
    """Of these, that had ended; of a rank of another node, at least as many."""
    left: bool = False
    """It had closed its communicator."""
    seen_ns: Count = 0


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's end of a connection to another node at `at_ns`; a count of -1 is unknown."""

    rank: Rank
    """The other end: the leader of its node."""
    channel: Signed
    """-1 for the control connection; otherwise, with `socket`, which of the data connections, alike at both ends."""
    socket: Count = 0
    at_ns: Count
    sent: Count = 0
    """Bytes that the transport took."""
    sent_ns: Count = 0
    """When it took the last ones."""
    blocked_since_ns: Count = 0
    """Since when there have been bytes that it does not take; 0 where there are none."""
    unacknowledged: Signed = -1
    """Of those sent, bytes that the other system has not confirmed."""
    retransmits: Signed = -1
    """How often in a row these have been sent again in vain."""
    received: Count = 0
    """Bytes that were read."""
    awaiting_since_ns: Count = 0
    """Since when nothing has come although it is awaited; 0 where nothing is."""
    unread: Signed = -1
    """Bytes that have come and were not read."""
    frames_sent: Count = 0
    """Begun."""
    frames_received: Count = 0
    """Whole ones."""
    frames_announced: Count = 0
    """That the other end had begun, by its last heartbeat."""
    announced_ns: Count = 0
    """When that came."""
    broken: Line = ""
    """Why it is of no use any more."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a recorder at one instant."""

    records: Annotated[tuple[Record, ...], Meta(max_length=MAX_RECORDS)]
    """Ascending `id`; the last ones, and of older ones those that have not ended."""
    monotonic_ns: Count
    realtime_ns: Count
    submitted: Count
    """Collectives that were called for, including those that are no longer or were never recorded."""
    finished: Count
    """One more than the highest number of a collective that ended well."""
    dropped: Count = 0
    peer_progress: Annotated[tuple[PeerProgress, ...], Meta(max_length=MAX_RANKS)] = msgspec.field(
        default=(), name="sightings"
    )
    links: Annotated[tuple[LinkEnd, ...], Meta(max_length=MAX_LINKS)] = ()
    """Of a leader."""


class Fault(msgspec.Struct, frozen=True):
    """Failure of the operations of the group on this rank."""

    code: Word
    """Of the error class: `peer_failed`, `usage`, `aborted`, `data_corruption`."""
    rank: RankOrNone
    """Who is to blame; -1 where nobody in particular is."""
    seq: Count
    text: Line


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank leaves behind. `group` is the same on all ranks and on no other group of the job."""

    format: int = FORMAT
    group: Annotated[str, Meta(min_length=1, max_length=200, pattern=_PRINTABLE)]
    plan: Word
    """`plan_digest` of the group's plan."""
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    node: Count
    labels: dict[Rank, Line]
    """For people, of every rank that this one can name: `rank 3 (node 1, host n17)`."""
    timeout_ns: Count
    transport: Word = "tcp"
    """What carries data between nodes."""
    reason: Line
    """Why it was written."""
    fault: Fault | None = None
    snapshot: Snapshot

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not a rank of {self.world_size}")
        if len(self.labels) > self.world_size:
            raise ValueError(f"{len(self.labels)} labels are too many for {self.world_size} ranks")
        named = [one.rank for one in self.snapshot.peer_progress]
        named += [link.rank for link in self.snapshot.links]
        if self.fault is not None:
            named.append(self.fault.rank)
        for record in self.snapshot.records:
            named += (record.root, record.peer)
        if max(named, default=-1) >= self.world_size:
            raise ValueError(f"rank {max(named)} is not a rank of {self.world_size}")

    def wall_ns(self, monotonic_ns: int) -> int:
        """A time of this dump on the wall clock."""
        return monotonic_ns - self.snapshot.monotonic_ns + self.snapshot.realtime_ns


def snapshot_from_native(native: Mapping[str, Any]) -> Snapshot:
    """Make a snapshot from what `native.Recorder.snapshot()` returns."""
    return convert(native, Snapshot)


def plan_digest(plan: msgspec.Struct) -> str:
    """Tells plans apart: 16 hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:16]


def fault_from_native(failure: tuple[int, int, int, str]) -> Fault | None:
    """Fault of what `native.NativeWork.failure()` returns, (kind, culprit, seq, text); None where nothing failed."""
    kind, culprit, seq, text = failure
    if kind == 0:
        return None
    printable = "".join(character if character.isprintable() else " " for character in text)
    return Fault(FAILURE_KINDS[kind] if kind < len(FAILURE_KINDS) else "error", culprit, seq, printable[:1024])


def encode_dump(dump: Dump) -> bytes:
    """One line of JSON per record, for people who look into the file. The inverse of `decode_dump`."""
    return msgspec.json.format(msgspec.json.encode(dump), indent=1) + b"\n"


class _Head(msgspec.Struct):
    format: int


def decode_dump(data: bytes, *, name: str) -> Dump:
    """The dump in the file `name`. Raises `DataCorruption`; `UsageError` where it is of another format."""
    if len(data) > MAX_DUMP_BYTES:
        raise DataCorruption(f"{name} is longer than any dump ({MAX_DUMP_BYTES >> 20} MiB)")
    try:
        found = decode_json(data, _Head).format
        if found == FORMAT:
            return decode_json(data, Dump)
    except DECODE_ERRORS as error:
        raise DataCorruption(f"{name} is not a flight recorder dump, or is damaged: {error}") from None
    raise UsageError(f"{name} is of format {found}; this version reads format {FORMAT}")
