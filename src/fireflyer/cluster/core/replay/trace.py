"""A trace: which task was submitted when, by whom, and how much work it is. A CSV file with a header.

| column | what |
|---|---|
| `submit_s` | when it was submitted, seconds since the trace begins |
| `nodes` | its gang |
| `work_s` | how long it would run on these nodes if nothing interrupted it and nothing had to be saved |
| `user`, `group` | who submitted it; all the same where the column is missing |
| `priority` | as of a submission; 10 where it is missing |
| `time_s` | the declared limit of a run; empty where none was declared |

Columns come in any order. Times have at most three decimals.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MS, SECOND

__all__ = ["MAX_ROWS", "TraceTask", "read_trace", "write_trace"]

MAX_ROWS: Final = 5_000_000
MAX_NODES: Final = 1_000_000
MAX_LINE_CHARACTERS: Final = 4096
MAX_TIME_S: Final = 10 * 366 * 86400
LEAST_PRIORITY: Final = -1
MOST_PRIORITY: Final = 50

REQUIRED: Final = ("submit_s", "nodes", "work_s")
COLUMNS: Final = ("submit_s", "user", "group", "priority", "nodes", "work_s", "time_s")

_TIME = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,3}))?")
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class TraceTask(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    submit_ns: int
    nodes: int
    work_ns: int
    user: str = "user"
    group: str = "group"
    priority: int = 10
    time_ns: int | None = None


def write_trace(tasks: Iterable[TraceTask]) -> Iterator[str]:
    """Lines of the file, each with its end."""
    yield ",".join(COLUMNS) + "\n"
    for task in tasks:
        time = "" if task.time_ns is None else _seconds(task.time_ns)
        yield (
            f"{_seconds(task.submit_ns)},{task.user},{task.group},{task.priority},{task.nodes},"
            f"{_seconds(task.work_ns)},{time}\n"
        )


def read_trace(lines: Iterable[str]) -> tuple[TraceTask, ...]:
    """Tasks in the order of their submission; of one instant in the order of rows. Raises `UsageError`, which names
    the row and the column; the header is row 1."""
    rows = csv.reader(_bounded(lines), strict=True)
    number = 1
    found: list[TraceTask] = []
    try:
        header = next(rows, None)
        if header is None:
            raise UsageError(f"row 1: the trace is empty; its first row names the columns: {','.join(COLUMNS)}")
        columns = _columns(header)
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            if len(row) != len(header):
                raise UsageError(f"row {number}: {len(row)} fields, the header has {len(header)}")
            found.append(_task(row, columns, number))
    except csv.Error as error:
        raise UsageError(f"row {number + 1}: {error}; write the trace as plain comma-separated values") from error
    if not found:
        raise UsageError("row 2: the trace has no task; each row after the header is one")
    found.sort(key=lambda task: task.submit_ns)
    return tuple(found)


def _bounded(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if number > MAX_ROWS:
            raise UsageError(f"row {number}: a trace has at most {MAX_ROWS:,} rows; cut it into parts")
        if len(line) > MAX_LINE_CHARACTERS:
            raise UsageError(f"row {number}: longer than {MAX_LINE_CHARACTERS} characters; this is no trace")
        yield line


def _columns(header: Sequence[str]) -> dict[str, int]:
    columns = {name.strip().lower(): place for place, name in enumerate(header)}
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise UsageError(f"row 1: no column {missing[0]}; a trace needs {', '.join(REQUIRED)}")
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise UsageError(f"row 1: no column is named {unknown[0][:40]!r}; columns are {', '.join(COLUMNS)}")
    if len(columns) != len(header):
        raise UsageError("row 1: a column is named twice")
    return columns


def _task(row: Sequence[str], columns: dict[str, int], number: int) -> TraceTask:
    def field(column: str) -> str:
        return row[columns[column]].strip() if column in columns else ""

    return TraceTask(
        submit_ns=_time(field("submit_s"), "submit_s", number, least_ns=0),
        nodes=_whole(field("nodes"), "nodes", number, 1, MAX_NODES),
        work_ns=_time(field("work_s"), "work_s", number, least_ns=MS),
        user=_name(field("user"), "user", number),
        group=_name(field("group"), "group", number),
        priority=_whole(field("priority") or "10", "priority", number, LEAST_PRIORITY, MOST_PRIORITY),
        time_ns=_time(field("time_s"), "time_s", number, least_ns=MS) if field("time_s") else None,
    )


def _time(text: str, column: str, row: int, *, least_ns: int) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"row {row}: {column} {text[:40]!r} is no number of seconds, such as 3600 or 0.250")
    found = int(match[1]) * SECOND + int((match[2] or "").ljust(3, "0")) * MS
    if not least_ns <= found <= MAX_TIME_S * SECOND:
        raise UsageError(f"row {row}: {column} {text} is not between {_seconds(least_ns)} and {MAX_TIME_S}")
    return found


def _whole(text: str, column: str, row: int, least: int, most: int) -> int:
    if _WHOLE.fullmatch(text) is None or not least <= int(text) <= most:
        raise UsageError(f"row {row}: {column} {text[:40]!r} is no whole number between {least} and {most:,}")
    return int(text)


def _name(text: str, column: str, row: int) -> str:
    if not text:
        return column
    if _NAME.fullmatch(text) is None:
        raise UsageError(f"row {row}: {column} {text[:40]!r} is no name: letters, digits and ._@-, 64 at most")
    return text


def _seconds(ns: int) -> str:
    seconds, rest = divmod(ns, SECOND)
    return f"{seconds}.{rest // MS:03d}" if rest else str(seconds)
