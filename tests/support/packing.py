"""What tests of packing share: inputs, an observer, and a pack with small shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from fireflyer.data import RecordSet
from fireflyer.data.packing import Encoding, Packed, PackOptions, pack

__all__ = ["LINES", "Watch", "content", "files", "jsonl", "parquet", "run"]

LINES: Final = [f"line {number} " * (number % 9) for number in range(120)]


class Watch:
    """Remembers what it is told, and calls `each` after every item."""

    def __init__(self, each: Any = None) -> None:
        self.total, self.bytes, self.records = 0, 0, 0
        self.problems: list[str] = []
        self._each = each

    def begun(self, total_bytes: int, done_bytes: int, records: int) -> None:
        self.total, self.bytes, self.records = total_bytes, done_bytes, records

    def advanced(self, source_bytes: int, records: int) -> None:
        self.bytes += source_bytes
        self.records += records
        if self._each is not None:
            self._each(self)

    def skipped(self, problem: str) -> None:
        self.problems.append(problem)


def jsonl(path: Path, values: list[Any]) -> str:
    path.write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))
    return str(path)


def run(source: str | list[str], target: Path, watch: Watch | None = None, **options: Any) -> Packed:
    encoding = options.pop("encoding", Encoding())
    named: dict[str, Any] = {"format": "jsonl", "field": "text", "shard_bytes": 4096}
    chosen = PackOptions(**named | options)
    sources = [source] if isinstance(source, str) else source
    return pack(sources, str(target), encoding, chosen, watch or Watch())


def content(target: Path) -> list[bytes]:
    with RecordSet(str(target)) as records:
        return [bytes(one) for one in records]


def files(target: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in target.iterdir()}


def parquet(path: Path, columns: dict[str, Any], rows: int = 7) -> str:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)
    return str(path)
