"""A dump in the format that PyTorch's own flight-recorder analyser reads: a pickle of plain dictionaries, version 2.10.

Pure, and one way only: nothing here unpickles. `torchfrtrace DIRECTORY` matches the entries of all ranks by their
sequence numbers and says which ranks are missing. What it expects, beyond what the names of the fields say:

- it knows operations by `backend:name`, for a fixed list of backends; gloo's are those of collectives on CPUs;
- entries are lined up by `record_id`, so that of a collective is its number in the group (a ring may have lost some);
- a message concerns its two ranks only, so each ordered pair is a process group of its own, of ranks ascending;
- whoever has an entry took part, so what a rank called for after the group had failed gets none.

It does not know how far an operation came, nor the kind of reduction; `ff collectives explain` does.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

from fireflyer.collectives.flight.dump import Dump, Record

__all__ = ["TRACE_VERSION", "encode_trace", "trace_of"]

TRACE_VERSION: Final = "2.10"

_NAMES: Final = {"allreduce": "all_reduce", "allgather": "all_gather"}
_DTYPES: Final = {
    "f64": "Double",
    "f32": "Float",
    "f16": "Half",
    "bf16": "BFloat16",
    "f8e4m3": "Float8_e4m3fn",
    "f8e5m2": "Float8_e5m2",
    "i8": "Char",
    "i32": "Int",
    "i64": "Long",
    "u8": "Byte",
}
_GROWS_IN: Final = ("reduce_scatter", "scatter", "all_to_all")
_GROWS_OUT: Final = ("allgather", "gather", "all_to_all")


def encode_trace(dump: Dump) -> bytes:
    """What the analyser loads as the file of this rank."""
    return pickle.dumps(trace_of(dump), protocol=4)


def trace_of(dump: Dump) -> dict[str, Any]:
    entered = [record for record in dump.snapshot.records if record.inside or record.state != "failed"]
    collectives = sorted((r for r in entered if not r.message), key=lambda record: record.seq)
    messages = [record for record in entered if record.message]
    first = collectives[0].seq if collectives else dump.snapshot.submitted
    groups = {dump.group: {"name": dump.group, "desc": "collectives", "ranks": str(list(range(dump.world_size)))}}
    entries = [_entry(dump, record, dump.group, record.seq) for record in collectives]
    for record in messages:
        source, target = _ends(dump, record)
        name = f"{dump.group}:{source}->{target}"
        groups[name] = {"name": name, "desc": "messages", "ranks": str(sorted({source, target}))}
        entries.append(_entry(dump, record, name, first))
    return {
        "version": TRACE_VERSION,
        "rank": dump.rank,
        "host_name": dump.labels.get(dump.rank, f"rank {dump.rank}"),
        "entries": entries,
        "pg_config": groups,
        "pg_status": {
            dump.group: {
                "last_enqueued_collective": dump.snapshot.submitted - 1,
                "last_started_collective": max((r.seq for r in collectives if r.inside), default=-1),
                "last_completed_collective": dump.snapshot.finished - 1,
            }
        },
    }


def _ends(dump: Dump, record: Record) -> tuple[int, int]:
    return (record.peer, dump.rank) if record.kind == "recv" else (dump.rank, record.peer)


def _entry(dump: Dump, record: Record, group: str, record_id: int) -> dict[str, Any]:
    dtype = _DTYPES.get(record.dtype, record.dtype)
    sizes_in, sizes_out = _sizes(record, dump.world_size)
    running = "started" if record.inside else "scheduled"
    return {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": (group, "messages" if record.message else "collectives"),
        "collective_seq_id": record.seq,
        "p2p_seq_id": record.seq if record.message else 0,
        "op_id": record.id,
        "is_p2p": record.message,
        "profiling_name": f"gloo:{_name(dump, record)}",
        "time_created_ns": dump.wall_ns(record.submitted_ns),
        "time_discovered_started_ns": dump.wall_ns(record.started_ns) if record.started_ns else None,
        "time_discovered_completed_ns": dump.wall_ns(record.finished_ns) if record.finished_ns else None,
        "duration_ms": (record.finished_ns - record.started_ns) / 1e6 if record.state == "done" else None,
        "input_sizes": [sizes_in],
        "input_dtypes": [dtype],
        "output_sizes": [sizes_out],
        "output_dtypes": [dtype],
        "state": "completed" if record.state == "done" else running,
        "retired": record.state in ("done", "failed"),
        "timeout_ms": dump.timeout_ns // 1_000_000,
        "frames": [],
    }


def _name(dump: Dump, record: Record) -> str:
    if not record.message:
        return _NAMES.get(record.kind, record.kind)
    source, target = _ends(dump, record)
    members = sorted({source, target})
    here, there = members.index(source), members.index(target)
    return f"send {here}->{there}" if record.kind == "send" else f"recv {there}<-{here}"


def _sizes(record: Record, world_size: int) -> tuple[list[int], list[int]]:
    """Of the input and the output of this rank."""
    if record.kind == "barrier":
        return [], []
    if record.message:
        return [record.count], [record.count]
    grows_in = world_size if record.kind in _GROWS_IN else 1
    grows_out = world_size if record.kind in _GROWS_OUT else 1
    return [record.count * grows_in], [record.count * grows_out]
