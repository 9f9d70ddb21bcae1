"""Slurm's accounting as job rows: `sacct --parsable2` in columns, at the speed of pyarrow, and `jobcomp/filetxt` by
line.

Steps of a job are counted and left out. Values that are mostly the same (states, exit codes, resources) are decoded
once for each distinct one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from fireflyer.analytics.reliability.arrow_values import array_of, scalar_of
from fireflyer.analytics.reliability.local_times import EARLIEST_NS, Clock, offset_s, since_1970_ns
from fireflyer.analytics.reliability.log_lines import MAX_LOG_LINE_BYTES, Rejected, printable
from fireflyer.analytics.reliability.node_lists import count_nodes
from fireflyer.analytics.reliability.rows import ABSENT_EXIT, MAX_NAME, MAX_NODES_OF_A_JOB, STATES, JobRow
from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND

__all__ = ["SACCT_COMMAND", "SacctColumns", "jobcomp_row"]

SACCT_COMMAND: Final = (
    "SLURM_TIME_FORMAT=%s sacct --allusers --duplicates --parsable2 --starttime 2026-01-01 "
    "--format JobID,User,State,Submit,Start,End,NNodes,NodeList,AllocTRES,ExitCode,SubmitLine"
)
"""That writes what is read here."""
SOURCE: Final = "slurm"
_NEEDED: Final = ("JobID", "State", "Start", "End", "NNodes")
_USED: Final = (*_NEEDED, "User", "Submit", "NodeList", "AllocTRES", "ExitCode", "SubmitLine")
_HAVE_STARTED: Final = ("COMPLETED", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
"""States of jobs that ran."""
MAX_COLUMNS: Final = 200
MAX_NODE_LIST: Final = 1 << 15
_FREE_TEXT: Final = "SubmitLine"
"""As the last column it may contain what separates columns."""
_EXIT: Final = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")
_GPUS: Final = re.compile(r"(?:^|,)gres/gpu(:[^=,]{1,64})?=([0-9]{1,8})(?=,|$)")
_EXCLUDED: Final = re.compile(r"(?:--exclude(?:=| +)|(?:^| )-x *)([A-Za-z0-9_.,\[\]-]{1,4000})")
_CONTROL: Final = bytes(code for code in (*range(32), 127) if code != ord("\n"))
_NO_CONTROL: Final = bytes.maketrans(_CONTROL, b" " * len(_CONTROL))
"""A carriage return alone would end a line for pyarrow; others are what a terminal would obey."""
_NOT_ASCII_CONTROL: Final = re.compile("[\x80-\x9f\u2028-\u202e\u2066-\u2069]")
_OUT_OF_RANGE: Final = "its times are out of range, before 2000 or in the future"
_OTHER_NODES: Final = "its node list cannot be read, or has not as many nodes as it says"
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
        self.steps = self.local_times = 0
        """Of local times those that were read though nobody said their zone."""
        self.last_ns: int | None = None
        """The last time of all rows."""
        self.rejected: Counter[str] = Counter()

    def read(self, block: bytes) -> Any:
        """Job rows of the block as a `pyarrow.Table`; what it leaves out is in `steps` and `rejected`."""
        clean = block.translate(_NO_CONTROL)
        if not clean.isascii():
            clean = _NOT_ASCII_CONTROL.sub(" ", clean.decode(errors="replace")).encode()
        rows = self._checked(self._columns(self._parsed(clean)))
        self._note_times(rows)
        return rows

    def _note_times(self, rows: Any) -> None:
        import pyarrow.compute as pc

        last = [pc.max(rows[name]).as_py() for name in ("submit_ns", "start_ns", "end_ns")]
        self.last_ns = max((time_ns for time_ns in (*last, self.last_ns) if time_ns is not None), default=None)

    def _columns(self, table: Any) -> Any:
        import pyarrow
        import pyarrow.compute as pc

        whole = table.filter(pc.invert(pc.match_substring(table["JobID"], ".")))
        self.steps += table.num_rows - whole.num_rows
        text = pyarrow.string()

        def column(name: str) -> Any:
            if name in whole.column_names:
                return whole[name]
            return pyarrow.chunked_array([array_of([""] * whole.num_rows, text)])

        exits = column("ExitCode")
        start_ns = self._times(whole["Start"])
        return pyarrow.table({
            "job": whole["JobID"],
            "user": column("User"),
            "state": _decoded(whole["State"], _state, text),
            "nodes": _decoded(whole["NNodes"], _count, pyarrow.int64()),
            "gpus": _decoded(column("AllocTRES"), _gpus, pyarrow.int64()),
            "submit_ns": self._times(column("Submit")),
            "start_ns": start_ns,
            "end_ns": self._ends(whole["End"], start_ns),
            "exit_code": _decoded(exits, lambda value: _exit(value)[0], pyarrow.int64()),
            "signal": _decoded(exits, lambda value: _exit(value)[1], pyarrow.int64()),
            "node_list": column("NodeList"),
            "excluded": _decoded(column("SubmitLine"), _excluded, text),
            "unsaved_ns": array_of([None] * whole.num_rows, pyarrow.int64()),
            "overhead_ns": array_of([None] * whole.num_rows, pyarrow.int64()),
            "source": array_of([SOURCE] * whole.num_rows, text),
        })  # fmt: skip

    def _checked(self, rows: Any) -> Any:
        """Without rows that make no sense; each is counted by the first reason that it gives."""
        import pyarrow
        import pyarrow.compute as pc

        yes = scalar_of(True, pyarrow.bool_())

        def number(value: int) -> Any:
            return scalar_of(value, pyarrow.int64())

        def in_range(name: str) -> Any:
            late = pc.greater(rows[name], number(self._clock.latest_ns))
            return pc.fill_null(pc.invert(pc.or_(late, pc.less(rows[name], number(EARLIEST_NS)))), yes)

        reasons: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("its job has no number", lambda: pc.and_(pc.greater(pc.utf8_length(rows["job"]), number(0)),
                                                      pc.less_equal(pc.utf8_length(rows["job"]), number(MAX_NAME)))),
            ("its state is not known", lambda: pc.is_valid(rows["state"])),
            ("its number of nodes is none", lambda: pc.is_valid(rows["nodes"])),
            ("its node list is too long", lambda: pc.less_equal(pc.binary_length(rows["node_list"]),
                                                                number(MAX_NODE_LIST))),
            (_OTHER_NODES, lambda: _nodes_agree(rows)),
            (_OUT_OF_RANGE, lambda: pc.and_(in_range("submit_ns"), pc.and_(in_range("start_ns"), in_range("end_ns")))),
            ("it ends before it starts", lambda: pc.fill_null(pc.less_equal(rows["start_ns"], rows["end_ns"]), yes)),
            ("it ended without having started", lambda: pc.or_(pc.is_valid(rows["start_ns"]),
                pc.invert(pc.is_in(rows["state"], array_of(_HAVE_STARTED, pyarrow.string()))))),
        )  # fmt: skip
        for reason, holds in reasons:
            mask = holds()
            kept = pc.sum(mask).as_py() or 0
            if kept < rows.num_rows:
                self.rejected[reason] += rows.num_rows - kept
                rows = rows.filter(mask)
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

        if not block or block.isspace():
            return pyarrow.table({name: array_of([], pyarrow.string()) for name in self._used})

        joined: list[list[str]] = []

        def invalid(row: Any) -> str:
            if self._names[-1] == _FREE_TEXT and row.actual_columns > len(self._names):
                joined.append(row.text.split("|", len(self._names) - 1))
            else:
                self.rejected["it has another number of columns"] += 1
            return "skip"

        table = csv.read_csv(
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
        if not joined:
            return table
        columns = dict(zip(self._names, zip(*joined, strict=True), strict=True))
        return pyarrow.concat_tables([
            table, pyarrow.table({name: array_of(columns[name], pyarrow.string()) for name in self._used})
        ])  # fmt: skip

    def _ends(self, column: Any, start_ns: Any) -> Any:
        """An hour that a zone has twice is the second one where else the job had ended before it started."""
        import pyarrow
        import pyarrow.compute as pc

        ends = self._times(column)
        if self._clock.zone is None:
            return ends
        early = pc.fill_null(pc.less(ends, start_ns), scalar_of(False, pyarrow.bool_()))
        return pc.if_else(early, self._times(column, fold=1), ends) if pc.any(early).as_py() else ends

    def _times(self, column: Any, *, fold: int = 0) -> Any:
        """Seconds since 1970, or local times, as nanoseconds; null for Unknown and None."""
        import pyarrow
        import pyarrow.compute as pc

        whole = pc.match_substring_regex(column, "^[0-9]{1,10}$")
        number = pyarrow.int64()
        seconds = pc.if_else(whole, column, scalar_of(None, pyarrow.string())).cast(number)
        if seconds.null_count:
            local = pc.strptime(column, format="%Y-%m-%dT%H:%M:%S", unit="s", error_is_null=True).cast(number)
            if self._clock.zone is None:
                self.local_times += len(local) - local.null_count
            else:
                # offsets change at whole ten minutes: each of these is asked for once
                offsets = _decoded(pc.utf8_slice_codeunits(column, 0, 15), self._offset(fold), number)
                local = pc.subtract(local, offsets)
            seconds = pc.coalesce(seconds, local)
        known = pc.if_else(pc.greater(seconds, scalar_of(0, number)), seconds, scalar_of(None, number))
        most = self._clock.latest_ns // SECOND + 1  # of all that are out of range: others may overflow as nanoseconds
        bounded = pc.min_element_wise(known, scalar_of(most, number), skip_nulls=False)
        return pc.multiply(bounded, scalar_of(SECOND, number))

    def _offset(self, fold: int) -> Callable[[str], int]:
        def decode(text: str) -> int:
            try:
                return offset_s(datetime.fromisoformat(f"{text}0").replace(fold=fold), self._clock)
            except (ValueError, OverflowError):
                return 0

        return decode


_JOBCOMP_LATER: Final = ("JobState", "StartTime", "EndTime", "NodeList", "NodeCnt", "Tres", "SubmitTime", "ExitCode")
"""Come after the name of the job, which its user chose."""


def jobcomp_row(line: bytes, clock: Clock) -> JobRow | Rejected:
    """A line of `JobCompType=jobcomp/filetxt`."""
    text = printable(line.decode(errors="replace").strip(), MAX_LOG_LINE_BYTES)
    parts = [part.split("=", 1) for part in re.split(r" (?=[A-Za-z]+=)", text) if "=" in part]
    fields = dict(reversed(parts))  # the first of a name: JobId and UserId come before all that users choose
    if len({name for name, _ in parts if name in _JOBCOMP_LATER}) < sum(name in _JOBCOMP_LATER for name, _ in parts):
        return Rejected("it says the same twice: the name or the directory of a job may say what its state is")
    state, nodes = _state(fields.get("JobState", "")), _count(fields.get("NodeCnt", ""))
    if not fields.get("JobId", "").isascii() or not fields.get("JobId") or len(fields["JobId"]) > MAX_NAME:
        return Rejected("its job has no number")
    if state is None:
        return Rejected("its state is not known")
    if nodes is None:
        return Rejected("its number of nodes is none")
    start, end = _local_ns(fields.get("StartTime", ""), clock), _local_ns(fields.get("EndTime", ""), clock)
    if start is not None and end is not None and end < start:  # of an hour that the zone has twice the second
        end = _local_ns(fields["EndTime"], clock, fold=1)
    if start is not None and end is not None and end < start:
        return Rejected("it ends before it starts")
    if state == "PENDING" and start is not None:
        state = "REQUEUED"  # jobcomp writes the state that follows
    code, signal = _exit(fields.get("ExitCode", ""))
    node_list = fields.get("NodeList", "")
    if len(node_list) > MAX_NODE_LIST:
        return Rejected("its node list is too long")
    if _nodes_of(node_list) not in (0, nodes):
        return Rejected(_OTHER_NODES)
    user = printable(fields.get("UserId", "").partition("(")[0], MAX_NAME)
    submit = _local_ns(fields.get("SubmitTime", ""), clock)
    times = [time_ns for time_ns in (submit, start, end) if time_ns is not None]
    if not all(EARLIEST_NS <= time_ns <= clock.latest_ns for time_ns in times):
        return Rejected(_OUT_OF_RANGE)
    return JobRow(
        fields["JobId"], user, state, nodes, _gpus(fields.get("Tres", "")), submit,
        start, end, code, signal, node_list, "", source=SOURCE,
    )  # fmt: skip


def _decoded(column: Any, decode: Callable[[str], Any], kind: Any) -> Any:
    """Each distinct value decoded once."""
    import pyarrow

    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pyarrow.ChunkedArray):  # a table's column, by its version
        encoded = encoded.combine_chunks()
    values = array_of([decode(value or "") for value in encoded.dictionary.to_pylist()], kind)
    return values.take(encoded.indices)


def _nodes_agree(rows: Any) -> Any:
    import pyarrow
    import pyarrow.compute as pc

    named = _decoded(rows["node_list"], _nodes_of, pyarrow.int64())
    return pc.or_(pc.equal(named, scalar_of(0, pyarrow.int64())), pc.equal(named, rows["nodes"]))


def _state(text: str) -> str | None:
    """`CANCELLED by 1000` is CANCELLED; `NODE_FAIL+` as a narrow sacct writes it is not known."""
    word = text.split(" ", 1)[0]
    return word if word in STATES else None


def _count(text: str) -> int | None:
    return (
        int(text) if text.isascii() and text.isdigit() and len(text) <= 6 and int(text) <= MAX_NODES_OF_A_JOB else None
    )


def _gpus(text: str) -> int | None:
    """The total that Slurm counts, or where it counts by type only, the sum of all types; None without any text."""
    if not text:
        return None
    found = _GPUS.findall(text)
    total = next((count for kind, count in found if not kind), None)
    return int(total) if total is not None else sum(int(count) for _, count in found)


def _nodes_of(node_list: str) -> int:
    """-1 for what is no list of nodes."""
    try:
        return count_nodes(node_list)
    except UsageError:
        return -1


def _exit(text: str) -> tuple[int, int]:
    match = _EXIT.fullmatch(text)
    return (int(match[1]), int(match[2])) if match is not None else (ABSENT_EXIT, 0)


def _excluded(text: str) -> str:
    return ",".join(_EXCLUDED.findall(text))[:MAX_NODE_LIST] if "-" in text else ""


def _local_ns(text: str, clock: Clock, *, fold: int = 0) -> int | None:
    if _TIME.fullmatch(text) is None:
        return None
    try:
        time_ns = since_1970_ns(datetime.fromisoformat(text).replace(fold=fold), clock)
    except (ValueError, OverflowError):
        return None
    return time_ns if time_ns > 0 else None
