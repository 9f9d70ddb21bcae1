"""The flight recorder: what the ranks of a group did last, dumped when they fail, and who held them up.

`native.Recorder` (C++) keeps a ring of operations on every rank; a `Dump` of it is written by `write_dump` and read
back by `find_dumps` and `read_dumps`; `explain` turns the dumps of many ranks into a `Verdict`. Only `files` does IO.
"""

from fireflyer.collectives.flight.dump import (
    Dump,
    Fault,
    LinkEnd,
    PeerProgress,
    Record,
    Snapshot,
    decode_dump,
    encode_dump,
    fault_from_native,
    plan_digest,
    snapshot_from_native,
)
from fireflyer.collectives.flight.explain import Culprit, RankRow, Verdict, explain
from fireflyer.collectives.flight.files import dump_path, find_dumps, read_dumps, write_dump
from fireflyer.collectives.flight.links import StoppedLink
from fireflyer.collectives.flight.recorder import FlightRecorder

__all__ = [
    "Culprit",
    "Dump",
    "Fault",
    "FlightRecorder",
    "LinkEnd",
    "PeerProgress",
    "RankRow",
    "Record",
    "Snapshot",
    "StoppedLink",
    "Verdict",
    "decode_dump",
    "dump_path",
    "encode_dump",
    "explain",
    "fault_from_native",
    "find_dumps",
    "plan_digest",
    "read_dumps",
    "snapshot_from_native",
    "write_dump",
]
