"""Files of logs and accounting into the tables: read once, in bounded memory; what cannot be used is counted and told.

Every source is hostile until its rows are checked: lines and decompressed blocks have a limit, and a line that is no
line of its kind costs that line only.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from fireflyer.analytics.reliability.local_times import Clock
from fireflyer.analytics.reliability.log_lines import (
    MAX_LOG_LINE_BYTES,
    Rejected,
    has_local_time,
    health_row,
    journal_row,
    kernel_row,
)
from fireflyer.analytics.reliability.node_names import first_part
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.analytics.reliability.run_log import rows_of_run
from fireflyer.analytics.reliability.slurm import SacctColumns, jobcomp_row
from fireflyer.analytics.reliability.tables import Kind, TableWriter
from fireflyer.base.errors import UsageError
from fireflyer.base.events import Logged
from fireflyer.base.os_errors import translate_os_error

__all__ = ["Imported", "LineSource", "import_lines", "import_rows", "import_run", "import_sacct"]

LineSource = Literal["kernel-log", "journal", "health", "jobcomp"]
BLOCK_BYTES: Final = 4 << 20
_TOO_LONG: Final = f"longer than {MAX_LOG_LINE_BYTES >> 10} KiB"


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What one file gave."""

    source: str
    path: str
    lines: int
    jobs: int = 0
    events: int = 0
    steps: int = 0
    """Of Slurm's jobs, left out."""
    known: int = 0
    """Jobs and events that earlier imports gave, left out."""
    rejected: dict[str, int]
    """Lines that could not be used, by the reason."""
    cut: str = ""
    """Why the file ended early; empty: it did not."""
    local_times: int = 0
    """Times without a zone that were read as UTC, as nobody said their zone: of sacct each, else lines with them."""


class _LineKind(NamedTuple):
    row: Callable[[bytes, str, Clock], EventRow | JobRow | Rejected | None]
    jobs: bool
    is_local: Callable[[bytes], bool]
    """Whether a line that gave a row says no zone."""


_KINDS: Final[dict[LineSource, _LineKind]] = {
    "kernel-log": _LineKind(kernel_row, jobs=False, is_local=has_local_time),
    "journal": _LineKind(journal_row, jobs=False, is_local=lambda _line: False),
    "health": _LineKind(health_row, jobs=False, is_local=lambda _line: False),
    "jobcomp": _LineKind(lambda line, _node, clock: jobcomp_row(line, clock), jobs=True, is_local=lambda _line: True),
}
_UNNAMED: Final = "localhost"
"""What a node calls itself until it knows its name."""


_File = gzip.GzipFile | io.BufferedReader


class _Blocks:
    """Blocks of whole lines, without lines that are too long; the digest of all that was read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._hash = hashlib.blake2b(digest_size=8)
        self.too_long = 0
        self.cut = ""

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._opened() as file:
                yield from self._of(file)
        except OSError as error:
            raise translate_os_error(error, f"read {self._path}") from error

    def _opened(self) -> _File:
        if os.path.isdir(self._path):
            raise UsageError(f"{self._path} is a directory; give a file")
        if self._path.endswith(".gz"):
            return gzip.open(self._path, "rb")
        return open(self._path, "rb")

    def _read(self, file: _File) -> bytes:
        """At most `BLOCK_BYTES`; what an archive gives before it is damaged, too, which one large read would lose."""
        parts: list[bytes] = []
        left = 0 if self.cut else BLOCK_BYTES
        try:
            while left > 0 and (part := file.read1(left)):
                parts.append(part)
                left -= len(part)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            self.cut = f"it cannot be decompressed any further: {error}"
        block = b"".join(parts)
        self._hash.update(block)
        return block

    def _of(self, file: _File) -> Iterator[bytes]:
        rest, skipping = b"", False
        while block := self._read(file):
            if skipping:  # the rest of a line that is too long
                _, newline, block = block.partition(b"\n")
                skipping = not newline
            rest += block
            end = rest.rfind(b"\n") + 1
            if end:
                yield rest[:end]
                rest = rest[end:]
            if len(rest) > MAX_LOG_LINE_BYTES:
                rest, skipping = b"", True
                self.too_long += 1
        if rest and not self.cut:  # half of a line may say something else than the whole
            yield rest + b"\n"


def import_lines(
    source: LineSource, path: str, directory: str, *, node: str, clock: Clock, of_node: bool = False
) -> Imported:
    """One file of lines. `node`: whose it is, where its lines do not say; with `of_node` whatever they say. Raises
    `FireflyerError` where the file cannot be read or the table not be written, and with `of_node` where it has lines of
    several hosts; the table then stays as it was."""
    kind = _KINDS[source]
    default = "" if of_node else node
    hosts: dict[str, str] = {}
    last_ns, local_times = 0, 0
    writer = TableWriter(directory, "jobs" if kind.jobs else "events")
    blocks = _Blocks(path)
    rejected: Counter[str] = Counter()
    lines = 0
    try:
        for block in blocks:
            for line in block.splitlines():
                lines += 1
                row = kind.row(line, default, clock) if len(line) <= MAX_LOG_LINE_BYTES else Rejected(_TOO_LONG)
                if isinstance(row, Rejected):
                    rejected[row.reason] += bool(line.strip())
                elif row is not None:
                    local_times += clock.zone is None and kind.is_local(line)
                    if isinstance(row, JobRow):
                        last_ns = max(last_ns, row.submit_ns or 0, row.start_ns or 0, row.end_ns or 0)
                    elif of_node:
                        _note_host(hosts, row.node, node, path)
                        row = row._replace(node=node)
                    writer.add(row)
        writer.finish(_name(blocks.digest, source, node), known_ns=last_ns or None)
    except BaseException:
        writer.discard()
        raise
    if blocks.too_long:
        rejected[_TOO_LONG] += blocks.too_long
    counts = {"jobs": writer.rows} if kind.jobs else {"events": writer.rows}
    return Imported(
        source=source, path=path, lines=lines, **counts, known=writer.known, rejected=dict(+rejected), cut=blocks.cut,
        local_times=local_times,
    )  # fmt: skip


def _note_host(hosts: dict[str, str], host: str, node: str, path: str) -> None:
    """A node may have changed between its short and its long name. Raises `UsageError` for a second host."""
    if host not in ("", _UNNAMED):
        hosts.setdefault(first_part(host), host)
    if len(hosts) > 1:
        one, other = hosts.values()
        raise UsageError(f"{path} has lines of {one} and of {other}; give it without {node}=, or a file for each")


def import_sacct(path: str, directory: str, *, clock: Clock) -> Imported:
    """The output of `SACCT_COMMAND`. Raises as `import_lines`."""
    writer = TableWriter(directory, "jobs")
    blocks = _Blocks(path)
    columns: SacctColumns | None = None
    lines = 0
    try:
        for block in blocks:
            rows = block
            if columns is None:
                header, _, rows = block.partition(b"\n")
                columns = SacctColumns(header, clock, name=path)
            rows = _short_lines(rows, columns.rejected)
            lines += rows.count(b"\n")
            if not rows.isspace():
                writer.add_table(columns.read(rows))
        if columns is None:
            raise UsageError(f"{path}: {blocks.cut}" if blocks.cut else f"{path} is empty")
        writer.finish(_name(blocks.digest, "sacct", ""), known_ns=columns.last_ns)
    except BaseException:
        writer.discard()
        raise
    if blocks.too_long:
        columns.rejected[_TOO_LONG] += blocks.too_long
    return Imported(
        source="sacct", path=path, lines=lines, jobs=writer.rows, steps=columns.steps, known=writer.known,
        rejected=dict(+columns.rejected), cut=blocks.cut, local_times=columns.local_times,
    )  # fmt: skip


def import_run(path: str, log: list[Logged], directory: str, *, clock: Clock) -> Imported:
    """The event log of a run, decoded. Raises as `import_lines`."""
    jobs, events = rows_of_run(log, name=path, latest_ns=clock.latest_ns)
    written = [_write_rows("jobs", jobs, path, directory), _write_rows("events", events, path, directory)]
    return Imported(
        source="run", path=path, lines=len(log), jobs=written[0].rows, events=written[1].rows,
        known=sum(one.known for one in written), rejected={},
    )  # fmt: skip


def import_rows(
    source: str, path: str, kind: Kind, pages: Iterable[Sequence[JobRow | EventRow | Rejected]], directory: str
) -> Imported:
    """Rows that somebody else has read, page by page; `path`: for people. Raises as `import_lines`."""
    writer = TableWriter(directory, kind)
    digest = hashlib.blake2b(digest_size=8)
    rejected: Counter[str] = Counter()
    lines = 0
    try:
        for page in pages:
            lines += len(page)
            digest.update(msgspec.json.encode(page))
            for row in page:
                if isinstance(row, Rejected):
                    rejected[row.reason] += 1
                else:
                    writer.add(row)
        if lines:
            writer.finish(_name(digest.hexdigest(), source, path))
        else:
            writer.discard()  # what is asked for every hour would leave an empty table each time
    except BaseException:
        writer.discard()
        raise
    jobs, events = (writer.rows, 0) if kind == "jobs" else (0, writer.rows)
    return Imported(
        source=source, path=path, lines=lines, jobs=jobs, events=events, known=writer.known, rejected=dict(rejected)
    )


def _write_rows(kind: Kind, rows: Sequence[JobRow | EventRow], path: str, directory: str) -> TableWriter:
    writer = TableWriter(directory, kind)
    try:
        for row in rows:
            writer.add(row)
        content = msgspec.json.encode(rows)
        writer.finish(_name(hashlib.blake2b(content, digest_size=8).hexdigest(), "run", os.path.abspath(path)))
    except BaseException:
        writer.discard()
        raise
    return writer


def _short_lines(block: bytes, rejected: Counter[str]) -> bytes:
    """Without lines that are too long; nearly always the block as it is."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not _has_long_line(block):
        return block
    kept = [line for line in block.split(b"\n") if len(line) <= MAX_LOG_LINE_BYTES]
    rejected[_TOO_LONG] += block.count(b"\n") + 1 - len(kept)
    return b"\n".join(kept)


def _has_long_line(block: bytes) -> bool:
    """Looks at the end of a line once in `MAX_LOG_LINE_BYTES`."""
    begin = 0
    while len(block) - begin > MAX_LOG_LINE_BYTES:
        end = block.rfind(b"\n", begin, begin + MAX_LOG_LINE_BYTES + 1)
        if end < 0:
            return True
        begin = end + 1
    return False


def _name(digest: str, source: str, node: str) -> str:
    """The same content of another node is another table."""
    return hashlib.blake2b(f"{digest}\0{source}\0{node}".encode(), digest_size=8).hexdigest()
