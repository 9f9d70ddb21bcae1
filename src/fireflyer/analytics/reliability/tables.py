"""The two tables as Parquet files in a directory, written with pyarrow and read with DuckDB (`fireflyer[reliability]`).

Each source that is imported gives one file, `jobs-DIGEST.parquet` or `events-DIGEST.parquet`, named by what the source
contained: importing it again replaces the file. Rows that other files have are left out. A file is complete or not
there. An import that also changes older files writes all of them beside their places, then their names into
`replacing.json`, then puts them in place: whoever opens the tables after a kill finishes that, so no row is lost or
counted twice. An import holds the lock of its directory: what a second one wrote meanwhile would count twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from fireflyer.analytics.reliability.arrow_values import array_of
from fireflyer.analytics.reliability.node_names import name_events_as_jobs
from fireflyer.analytics.reliability.overlaps import NEXT, leave_events_once, leave_jobs_once, note_known
from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.base.errors import Busy, FireflyerError, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["MEMORY_LIMIT", "Kind", "TableWriter", "import_lock", "open_tables", "table_names", "table_schema"]

Kind = Literal["jobs", "events"]
_KINDS: Final[tuple[Kind, ...]] = ("jobs", "events")
MEMORY_LIMIT: Final = "2500MiB"
"""Of DuckDB; what needs more goes through files beside the tables."""
_BATCH_ROWS: Final = 1 << 14
_GROUP_ROWS: Final = 1 << 17
_GROUP_BYTES: Final = 64 << 20
_INTEGERS: Final = (
    "time_ns", "nodes", "gpus", "submit_ns", "start_ns", "end_ns", "exit_code", "signal", "unsaved_ns", "overhead_ns",
    "known_ns",
)  # fmt: skip
_NAME: Final = re.compile(r"(?:jobs|events)-[0-9a-f]{16}\.parquet")
_REPLACING: Final = "replacing.json"
_MAX_REPLACING: Final = 16 << 20
_LOCK: Final = "import.lock"
_POLL_S: Final = 0.05


@contextlib.contextmanager
def import_lock(directory: str) -> Iterator[None]:
    """Makes the directory, and holds its lock while imports write there. Raises `Busy` where another import does."""
    path = os.path.join(directory, _LOCK)
    try:
        os.makedirs(directory, exist_ok=True)
        # a file: NFS locks only what is open for writing
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise translate_os_error(error, f"lock {path}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another `ff reliability import` writes into {directory}; run this one after its end") from None
        except OSError as error:
            raise translate_os_error(error, f"lock {path}") from error
        yield
    finally:
        os.close(fd)


def _required(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            "the tables of failures need pyarrow and duckdb, which are not installed; run: pip install "
            "'fireflyer[reliability]'"
        ) from error


def table_schema(kind: Kind) -> Any:
    """Of the Parquet files, as a `pyarrow.Schema`."""
    pyarrow = _required("pyarrow")
    fields = JobRow._fields if kind == "jobs" else EventRow._fields
    types = {**dict.fromkeys(_INTEGERS, pyarrow.int64()), "user_made": pyarrow.bool_()}
    return pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in fields])


class TableWriter:
    """Rows into one file of a directory, which appears with `finish`. Memory: one group of rows. Whoever shares the
    directory with other imports holds its `import_lock`."""

    def __init__(self, directory: str, kind: Kind) -> None:
        self._parquet = _required("pyarrow.parquet")
        self._pyarrow = _required("pyarrow")
        self._directory, self._kind, self._schema = directory, kind, table_schema(kind)
        self._partial = os.path.join(directory, f"{kind}-{os.getpid()}.partial")
        self._waiting: list[tuple[Any, ...]] = []
        self._waiting_names = 0
        """Bytes of node lists in these."""
        self._tables: list[Any] = []
        self.rows = 0
        self.known = 0
        """Rows that other tables of the directory have, left out; known after `finish`."""
        try:
            os.makedirs(directory, exist_ok=True)
            _finish_replacing(directory)
            self._file = self._parquet.ParquetWriter(self._partial, self._schema, compression="zstd")
        except OSError as error:
            raise translate_os_error(error, f"write {self._partial}") from error

    def add(self, row: EventRow | JobRow) -> None:
        self._waiting.append(row)
        self._waiting_names += len(row.node_list) if isinstance(row, JobRow) else 0
        if len(self._waiting) >= _BATCH_ROWS or self._waiting_names >= _GROUP_BYTES:
            self._flush()

    def add_table(self, table: Any) -> None:
        """Rows of a `pyarrow.Table` with the columns of the table, the last of which may be missing."""
        self._flush()
        for field in list(self._schema)[table.num_columns :]:
            table = table.append_column(field, array_of([None] * table.num_rows, field.type))
        self._keep(table.cast(self._schema))

    def finish(self, digest: str, *, known_ns: int | None = None) -> str:
        """The path of the complete file; a file without rows is written, too, and says that the source had none.
        `known_ns`: the last time that the source tells of, until which attempts without an end are known to have
        run."""
        self._flush()
        self._write()
        path = os.path.join(self._directory, f"{self._kind}-{digest[:16]}.parquet")
        try:
            self._file.close()
            others = [one for one in _files_of(self._directory, self._kind) if one != path]
            changed = self._leave_once(others, known_ns)
            if changed:
                os.replace(self._partial, path + NEXT)
                _replace(self._directory, [path, *changed])
            else:
                os.replace(self._partial, path)
        except OSError as error:
            self.discard()
            raise translate_os_error(error, f"write {path}") from error
        return path

    def _leave_once(self, others: Sequence[str], known_ns: int | None) -> list[str]:
        """Paths of the others that have another content after this import."""
        if not self.rows:
            return []
        for path in others:
            _check_schema(path, self._schema)
        with _connected(self._directory) as connection:
            if known_ns is not None:
                note_known(connection, self._partial, known_ns)
            leave = leave_jobs_once if self._kind == "jobs" else leave_events_once
            changed = leave(connection, self._partial, others)
        left = int(self._parquet.read_metadata(self._partial).num_rows)
        self.rows, self.known = left, self.rows - left
        return changed

    def discard(self) -> None:
        """Nothing of it stays. May be called at any time."""
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)

    def _flush(self) -> None:
        if self._waiting:
            columns = [list(column) for column in zip(*self._waiting, strict=True)]
            self._waiting.clear()
            self._waiting_names = 0
            arrays = [array_of(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
            self._keep(self._pyarrow.Table.from_arrays(arrays, schema=self._schema))

    def _keep(self, table: Any) -> None:
        """Written in groups of so many rows that queries read them fast."""
        self._tables.append(table)
        self.rows += table.num_rows
        if sum(one.num_rows for one in self._tables) >= _GROUP_ROWS or sum(map(_bytes, self._tables)) >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._tables:
            return
        table = self._pyarrow.concat_tables(self._tables)
        self._tables.clear()
        try:
            self._file.write_table(table)
        except OSError as error:
            self.discard()
            raise translate_os_error(error, f"write {self._partial}") from error


def _replace(directory: str, paths: Sequence[str]) -> None:
    """Puts what is beside these files into their places: all of it, or nothing."""
    names = [os.path.basename(path) for path in paths]
    partial = os.path.join(directory, f"{_REPLACING}.partial")
    with open(partial, "w", encoding="ascii") as file:
        json.dump(names, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, os.path.join(directory, _REPLACING))
    _finish_replacing(directory)


def _finish_replacing(directory: str) -> None:
    """What a kill has left undone. Without the list of names nothing was to be replaced yet."""
    path = os.path.join(directory, _REPLACING)
    try:
        with open(path, encoding="ascii") as file:
            names = json.loads(file.read(_MAX_REPLACING))
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UsageError(f"{path} is damaged; remove the directory and import its sources again") from error
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise UsageError(f"{path} is damaged; remove the directory and import its sources again")
    for name in names:
        place = os.path.join(directory, name)
        with contextlib.suppress(FileNotFoundError):  # it is in place
            os.replace(place + NEXT, place)
    os.unlink(path)


def _finish_what_was_killed(directory: str) -> None:
    """As `_finish_replacing`, for a reader: an import that is alive does so itself, in a moment."""
    while os.path.exists(os.path.join(directory, _REPLACING)):
        try:
            with import_lock(directory):
                _finish_replacing(directory)
        except Busy:
            time.sleep(_POLL_S)


def _bytes(table: Any) -> int:
    return int(table.nbytes)


@contextlib.contextmanager
def open_tables(directory: str) -> Iterator[Any]:
    """A DuckDB connection with the views `jobs` and `events` over the directory's files, events with the names that
    jobs have for their nodes. Errors of DuckDB inside become
    `UsageError`. Raises `NotFound` where there is no table, and `UsageError` where a file is damaged or has other
    columns."""
    _required("duckdb")
    try:
        _finish_what_was_killed(directory)
    except OSError as error:
        raise translate_os_error(error, f"finish the import of {directory}") from error
    files = {kind: _files_of(directory, kind) for kind in _KINDS}
    if not any(files.values()):
        raise NotFound(f"{directory} has no table of failures; make one with: ff reliability import {directory} …")
    with _connected(directory) as connection:
        connection.execute("SET preserve_insertion_order = false")
        for kind, paths in files.items():
            _view(connection, kind, paths)
        name_events_as_jobs(connection)
        yield connection


@contextlib.contextmanager
def _connected(directory: str) -> Iterator[Any]:
    duckdb = _required("duckdb")
    with duckdb.connect(":memory:") as connection:
        try:
            connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
            connection.execute("SET autoinstall_known_extensions = false")
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute("SET temp_directory = ?", [os.path.join(directory, "spill")])
            yield connection
        except duckdb.Error as error:
            said = str(error).split("\n", 1)[0][:300]
            raise UsageError(f"the tables in {directory} cannot be read: {said}") from error


def table_names(directory: str) -> list[str]:
    """Of all files that are complete; none where there is no such directory."""
    try:
        return sorted(name for name in os.listdir(directory) if _NAME.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files_of(directory: str, kind: Kind) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise translate_os_error(error, f"read {directory}") from error
    return [os.path.join(directory, name) for name in names if name.startswith(kind) and _NAME.fullmatch(name)]


def _view(connection: Any, kind: Kind, paths: Sequence[str]) -> None:
    schema = table_schema(kind)
    for path in paths:
        _check_schema(path, schema)
    if not paths:
        connection.register(f"no_{kind}", schema.empty_table())
        # A table, no view: cursors of the connection do not see what is registered with it.
        connection.execute(f"CREATE TABLE {kind} AS SELECT * FROM no_{kind}")
        return
    connection.read_parquet(list(paths)).create_view(kind)


def _check_schema(path: str, schema: Any) -> None:
    parquet = _required("pyarrow.parquet")
    try:
        found = parquet.read_schema(path)
    except FireflyerError:
        raise
    except Exception as error:
        raise UsageError(f"{path} is damaged; remove it and import its source again") from error
    if (found.names, found.types) != (schema.names, schema.types):
        raise UsageError(f"{path} was written by another version; remove it and import its source again")
