"""Slurm's accounting as job rows: `sacct --parsable2` in columns, at the speed of pyarrow, and `jobcomp/filetxt` by
line.

Steps of a job are counted and left out. Values that are mostly the same (states, exit codes, resources) are decoded
once for each distinct one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from fireflyer.analytics.reliability.log_lines import LATEST_NS, Clock, Rejected
from fireflyer.analytics.reliability.rows import ABSENT_EXIT, MAX_NAME, MAX_NODES_OF_A_JOB, STATES, JobRow
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["SACCT_COMMAND", "SacctColumns", "jobcomp_row"]

SACCT_COMMAND: Final = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --duplicates --parsable2 --starttime 2026-01-01 "
    "--format JobID,User,State,Submit,Start,End,NNodes,NodeList,AllocTRES,ExitCode,SubmitLine"
)
"""That writes what is read here."""
_NEEDED: Final = ("JobID", "State", "Start", "End", "NNodes")
_USED: Final = (*_NEEDED, "User", "Submit", "NodeList", "AllocTRES", "ExitCode", "SubmitLine")
MAX_COLUMNS: Final = 200
MAX_NODE_LIST: Final = 1 << 15
_EXIT: Final = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")
_GPUS: Final = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,8})")
_EXCLUDED: Final = re.compile(r"(?:--exclude(?:=| +)|(?:^| )-x *)([A-Za-z0-9_.,\[\]-]{1,4000})")
_NO_LINE_ENDS: Final = bytes.maketrans(b"\0\r", b"  ")
"""A carriage return alone would end a line for pyarrow."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


class SacctColumns:
    """Reads blocks of whole lines; the first line of the file names the columns."""

    def __init__(self, header: bytes, clock: Clock, *, name: str) -> None:
        names = header.decode(errors="replace").rstrip("\r\n").split("|")
        missing = [one for one in _NEEDED if one not in names]
        if missing or len(names) > MAX_COLUMNS or len(set(names)) != len(names):
            what = f"has no column {missing[0]}" if missing else "names columns twice, or too many"
            raise UsageError(f"{name} {what}; write it with: {SACCT_COMMAND}")
        self._names, self._clock = names, clock
        self._used = [one for one in _USED if one in names]
        self.steps = 0
        self.rejected: Counter[str] = Counter()

    def read(self, block: bytes) -> Any:
        """Job rows of the block as a `pyarrow.Table`; what it leaves out is in `steps` and `rejected`."""
        clean = block.translate(_NO_LINE_ENDS)
        if not clean.isascii():
            clean = clean.decode(errors="replace").encode()
        return self._checked(self._columns(self._parsed(clean)))

    def _columns(self, table: Any) -> Any:
        import pyarrow
        import pyarrow.compute as pc

        whole = table.filter(pc.invert(pc.match_substring(table["JobID"], ".")))
        self.steps += table.num_rows - whole.num_rows
        text = pyarrow.string()
        absent = pyarrow.chunked_array([pyarrow.array([""] * whole.num_rows, type=text)])

        def column(name: str) -> Any:
            return whole[name] if name in whole.column_names else absent

        exits = column("ExitCode")
        return pyarrow.table({
            "job": whole["JobID"],
            "user": column("User"),
            "state": _decoded(whole["State"], _state, text),
            "nodes": _decoded(whole["NNodes"], _count, pyarrow.int64()),
            "gpus": _decoded(column("AllocTRES"), _gpus, pyarrow.int64()),
            "submit_ns": self._times(column("Submit")),
            "start_ns": self._times(whole["Start"]),
            "end_ns": self._times(whole["End"]),
            "exit_code": _decoded(exits, lambda value: _exit(value)[0], pyarrow.int64()),
            "signal": _decoded(exits, lambda value: _exit(value)[1], pyarrow.int64()),
            "node_list": column("NodeList"),
            "excluded": _decoded(column("SubmitLine"), _excluded, text),
        })  # fmt: skip

    def _checked(self, rows: Any) -> Any:
        """Without rows that make no sense; each is counted by the first reason that it gives."""
        import pyarrow.compute as pc

        reasons: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("its job has no number", lambda: pc.and_(pc.greater(pc.utf8_length(rows["job"]), 0),
                                                      pc.less_equal(pc.utf8_length(rows["job"]), MAX_NAME))),
            ("its state is not known", lambda: pc.is_valid(rows["state"])),
            ("its number of nodes is none", lambda: pc.is_valid(rows["nodes"])),
            ("its node list is too long", lambda: pc.less_equal(pc.binary_length(rows["node_list"]), MAX_NODE_LIST)),
            ("it ends before it starts", lambda: pc.fill_null(pc.less_equal(rows["start_ns"], rows["end_ns"]), True)),
            ("it ended without having started", lambda: pc.or_(pc.is_valid(rows["start_ns"]),
                pc.invert(pc.is_in(rows["state"], _values(("COMPLETED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")))))),
        )  # fmt: skip
        for reason, holds in reasons:
            kept = rows.filter(holds())
            if kept.num_rows < rows.num_rows:
                self.rejected[reason] += rows.num_rows - kept.num_rows
                rows = kept
        return rows

    def _parsed(self, block: bytes) -> Any:
        """What pyarrow refuses as a whole is divided until the line that it cannot read is found."""
        import pyarrow

        before = self.rejected.copy()
        try:
            return self._read_csv(block)
        except pyarrow.ArrowInvalid:
            self.rejected = before
            lines = block.splitlines(keepends=True)
            if len(lines) <= 1:
                self.rejected["it cannot be read"] += 1
                return self._read_csv(b"")
            half = len(lines) // 2
            return pyarrow.concat_tables([self._parsed(b"".join(part)) for part in (lines[:half], lines[half:])])

    def _read_csv(self, block: bytes) -> Any:
        import pyarrow
        from pyarrow import csv

        if not block.strip():
            return pyarrow.table({name: pyarrow.array([], type=pyarrow.string()) for name in self._used})

        def invalid(_row: Any) -> str:
            self.rejected["it has another number of columns"] += 1
            return "skip"

        return csv.read_csv(
            pyarrow.BufferReader(block),
            read_options=csv.ReadOptions(column_names=self._names, use_threads=False, block_size=len(block) + 1),
            parse_options=csv.ParseOptions(
                delimiter="|", quote_char=False, escape_char=False, newlines_in_values=False,
                invalid_row_handler=invalid,
            ),
            convert_options=csv.ConvertOptions(
                include_columns=self._used, column_types=dict.fromkeys(self._used, pyarrow.string()),
                strings_can_be_null=False, check_utf8=False,
            ),
        )  # fmt: skip

    def _times(self, column: Any) -> Any:
        """Seconds since 1970, or local times, as nanoseconds; null for Unknown and None."""
        import pyarrow
        import pyarrow.compute as pc

        whole = pc.match_substring_regex(column, "^[0-9]{1,10}$")
        seconds = pc.if_else(whole, column, None).cast(pyarrow.int64())
        if seconds.null_count:
            local = pc.strptime(column, format="%Y-%m-%dT%H:%M:%S", unit="s", error_is_null=True).cast(pyarrow.int64())
            seconds = pc.coalesce(seconds, pc.subtract(local, self._clock.utc_offset_s))
        valid = pc.and_(pc.greater(seconds, 0), pc.less_equal(seconds, LATEST_NS // SECOND))
        return pc.multiply(pc.if_else(valid, seconds, None), SECOND)


def jobcomp_row(line: bytes, clock: Clock) -> JobRow | Rejected:
    """A line of `JobCompType=jobcomp/filetxt`."""
    text = line.decode(errors="replace").strip()
    parts = [part.split("=", 1) for part in re.split(r" (?=[A-Za-z]+=)", text) if "=" in part]
    fields = dict(reversed(parts))  # the first of a name: what users choose, as the name of a job, comes later
    state, nodes = _state(fields.get("JobState", "")), _count(fields.get("NodeCnt", ""))
    if not fields.get("JobId", "").isascii() or not fields.get("JobId") or len(fields["JobId"]) > MAX_NAME:
        return Rejected("its job has no number")
    if state is None:
        return Rejected("its state is not known")
    if nodes is None:
        return Rejected("its number of nodes is none")
    start, end = _local_ns(fields.get("StartTime", ""), clock), _local_ns(fields.get("EndTime", ""), clock)
    if start is not None and end is not None and end < start:
        return Rejected("it ends before it starts")
    if state == "PENDING" and start is not None:
        state = "REQUEUED"  # jobcomp writes the state that follows
    code, signal = _exit(fields.get("ExitCode", ""))
    node_list = fields.get("NodeList", "")
    if len(node_list) > MAX_NODE_LIST:
        return Rejected("its node list is too long")
    user = fields.get("UserId", "").partition("(")[0][:MAX_NAME]
    submit = _local_ns(fields.get("SubmitTime", ""), clock)
    return JobRow(
        fields["JobId"], user, state, nodes, _gpus(fields.get("Tres", "")), submit,
        start, end, code, signal, node_list, "",
    )  # fmt: skip


def _decoded(column: Any, decode: Callable[[str], Any], kind: Any) -> Any:
    """Each distinct value decoded once."""
    import pyarrow

    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pyarrow.ChunkedArray):  # a table's column, by its version
        encoded = encoded.combine_chunks()
    values = pyarrow.array([decode(value or "") for value in encoded.dictionary.to_pylist()], type=kind)
    return values.take(encoded.indices)


def _values(names: tuple[str, ...]) -> Any:
    import pyarrow

    return pyarrow.array(names)


def _state(text: str) -> str | None:
    """`CANCELLED by 1000` is CANCELLED; `NODE_FAIL+` as a narrow sacct writes it is not known."""
    word = text.split(" ", 1)[0]
    return word if word in STATES else None


def _count(text: str) -> int | None:
    return (
        int(text) if text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= MAX_NODES_OF_A_JOB else None
    )


def _gpus(text: str) -> int:
    match = _GPUS.search(text)
    return int(match[1]) if match is not None else 0


def _exit(text: str) -> tuple[int, int]:
    match = _EXIT.fullmatch(text)
    return (int(match[1]), int(match[2])) if match is not None else (ABSENT_EXIT, 0)


def _excluded(text: str) -> str:
    return ",".join(_EXCLUDED.findall(text))[:MAX_NODE_LIST] if "-" in text else ""


def _local_ns(text: str, clock: Clock) -> int | None:
    if _TIME.fullmatch(text) is None:
        return None
    try:
        at = datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None
    seconds = int(at.timestamp()) - clock.utc_offset_s
    return seconds * SECOND if 0 < seconds <= LATEST_NS // SECOND else None
