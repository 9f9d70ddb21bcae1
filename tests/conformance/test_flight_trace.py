"""PyTorch's own flight-recorder analyser reads our dumps, and comes to the right conclusion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support.collectives.flight_dumps import START_WALL_NS, Call, World, dump_with, dumps_of, message
from tests.support.patience import allowed_s

from fireflyer.base.units import SECOND
from fireflyer.collectives.flight import Dump, write_dump
from fireflyer.collectives.flight.trace import trace_of

pytest.importorskip("torch")

CALLS: list[Call] = [
    ("allreduce", "bf16", "sum", 1000, -1),
    ("reduce", "f32", "max", 10, 2),
    ("broadcast", "u8", "", 77, 1),
    ("barrier", "f32", "", 0, -1),
    ("reduce_scatter", "f64", "mean", 5, -1),
    ("allgather", "f8e4m3", "", 5, -1),
    ("all_to_all", "i64", "", 6, -1),
    ("gather", "i8", "", 7, 0),
    ("scatter", "f16", "", 8, 0),
    ("allreduce", "i32", "min", 9, -1),
]


def analysed(directory: Path, *worlds: tuple[str, list[Dump]]) -> dict[str, str]:
    """What the stock analyser prints about each set of dumps. One process, as importing torch takes seconds."""
    places = []
    for name, dumps in worlds:
        paths = [write_dump(str(directory / name), dump) for dump in dumps]
        places.append(os.path.dirname(paths[0]))
    code = (
        "import sys\n"
        "from torch.distributed.flight_recorder.fr_trace import main\n"
        "for place in sys.argv[1:]:\n"
        "    print('====', flush=True, file=sys.stderr)\n"
        "    main([place, '--allow-incomplete-ranks'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *places], capture_output=True, text=True, timeout=allowed_s(120), check=False
    )
    assert done.returncode == 0, done.stderr
    parts = done.stderr.split("====\n")[1:]
    return {name: part for (name, _), part in zip(worlds, parts, strict=True)}


def exchanged(state: str) -> list[Dump]:
    return [
        dump_with(2, 3, [message("send", 0, state="done"), message("recv", 0, state="done")]),
        dump_with(0, 3, [message("recv", 2, state=state), message("send", 2, state="done")]),
        dump_with(1, 3, []),
    ]


def test_the_stock_analyser_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    wrapped = World([0, 0, 1], CALLS * 3, "absent", rank=0, at=25, capacity=12)
    said = analysed(
        tmp_path,
        ("well", dumps_of(World([0, 0, 1], CALLS))),
        ("messages", exchanged("done")),
        ("absent", dumps_of(World([0, 0, 1], CALLS, "absent", rank=1, at=4, raised=True))),
        ("wrapped", dumps_of(wrapped)),
        ("other", dumps_of(World([0, 0, 1], CALLS, "other", rank=2, at=0))),
        ("late", late(dumps_of(World([0, 0, 1], CALLS, "absent", rank=1, at=4, raised=True)))),
    )
    for name in ("well", "messages"):
        assert "issing" not in said[name]
        assert "error" not in said[name]
        assert "mismatch" not in said[name].lower()
    assert "sequence number: 4" in said["absent"]
    assert "missing ranks: {1}" in said["absent"]
    assert "gloo:reduce_scatter" in said["absent"]
    assert "sequence number: 25" in said["wrapped"]
    assert "missing ranks: {0}" in said["wrapped"]
    assert "Culprit rank 2" in said["other"]
    assert "missing ranks: {1}" in said["late"]


def late(dumps: list[Dump]) -> list[Dump]:
    """Rank 1 calls after all when the group has failed, and is refused."""
    ended = dumps[0].snapshot.records[4]
    record = msgspec.structs.replace(ended, submitted_ns=ended.finished_ns + SECOND, started_ns=0)
    snapshot = msgspec.structs.replace(dumps[1].snapshot, records=(*dumps[1].snapshot.records, record))
    return [dumps[0], msgspec.structs.replace(dumps[1], snapshot=snapshot), dumps[2]]


def test_times_and_sizes_are_those_of_the_dump() -> None:
    dump = dumps_of(World([0, 0, 1], CALLS))[2]
    trace = trace_of(dump)
    assert trace["version"] == "2.10"
    reduce_scatter = trace["entries"][4]
    assert (reduce_scatter["input_sizes"], reduce_scatter["output_sizes"]) == ([[15]], [[5]])
    assert reduce_scatter["input_dtypes"] == ["Double"]
    assert 0 < reduce_scatter["time_created_ns"] - START_WALL_NS < SECOND
    assert reduce_scatter["state"] == "completed"
    assert trace["pg_status"][dump.group]["last_completed_collective"] == len(CALLS) - 1
