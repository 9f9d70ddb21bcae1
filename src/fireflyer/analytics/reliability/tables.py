"""The two tables as Parquet files in a directory, written with pyarrow and read with DuckDB (`fireflyer[reliability]`).

Each source that is imported gives one file, `jobs-DIGEST.parquet` or `events-DIGEST.parquet`, named by what the source
contained: importing it again replaces the file. A file is complete or not there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from fireflyer.analytics.reliability.rows import EventRow, JobRow
from fireflyer.base.errors import FireflyerError, NotFound, UsageError
from fireflyer.base.os_errors import translate_os_error

__all__ = ["MEMORY_LIMIT", "Kind", "TableWriter", "open_tables", "table_schema"]

Kind = Literal["jobs", "events"]
MEMORY_LIMIT: Final = "2500MiB"
"""Of DuckDB; what needs more goes through files beside the tables."""
_BATCH_ROWS: Final = 1 << 16
_INTEGERS: Final = ("time_ns", "nodes", "gpus", "submit_ns", "start_ns", "end_ns", "exit_code", "signal")
_NAME: Final = re.compile(r"(?:jobs|events)-[0-9a-f]{16}\.parquet")


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
    """Rows into one file of a directory, which appears with `finish`. Memory: one batch of rows."""

    def __init__(self, directory: str, kind: Kind) -> None:
        self._parquet = _required("pyarrow.parquet")
        self._pyarrow = _required("pyarrow")
        self._directory, self._kind, self._schema = directory, kind, table_schema(kind)
        self._partial = os.path.join(directory, f"{kind}-{os.getpid()}.partial")
        self._waiting: list[tuple[Any, ...]] = []
        self.rows = 0
        try:
            os.makedirs(directory, exist_ok=True)
            self._file = self._parquet.ParquetWriter(self._partial, self._schema, compression="zstd")
        except OSError as error:
            raise translate_os_error(error, f"write {self._partial}") from error

    def add(self, row: EventRow | JobRow) -> None:
        self._waiting.append(row)
        if len(self._waiting) >= _BATCH_ROWS:
            self._flush()

    def add_table(self, table: Any) -> None:
        """Rows of a `pyarrow.Table` with these columns."""
        self._flush()
        self._write(table.cast(self._schema))

    def finish(self, digest: str) -> str:
        """The path of the complete file; a file without rows is written, too, and says that the source had none."""
        self._flush()
        path = os.path.join(self._directory, f"{self._kind}-{digest[:16]}.parquet")
        try:
            self._file.close()
            os.replace(self._partial, path)
        except OSError as error:
            self.discard()
            raise translate_os_error(error, f"write {path}") from error
        return path

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
            arrays = [
                self._pyarrow.array(values, type=field.type)
                for values, field in zip(columns, self._schema, strict=True)
            ]
            self._write(self._pyarrow.Table.from_arrays(arrays, schema=self._schema))

    def _write(self, table: Any) -> None:
        try:
            self._file.write_table(table)
        except OSError as error:
            self.discard()
            raise translate_os_error(error, f"write {self._partial}") from error
        self.rows += table.num_rows


@contextlib.contextmanager
def open_tables(directory: str) -> Iterator[Any]:
    """A DuckDB connection with the views `jobs` and `events` over the directory's files; an attempt of a job that two
    sources have counts once, the one that has ended first. Errors of DuckDB inside become `UsageError`. Raises
    `NotFound` where there is no table, and `UsageError` where a file is damaged or has other columns."""
    duckdb = _required("duckdb")
    files = _files(directory)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(duckdb.connect(":memory:"))
        try:
            connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
            connection.execute("SET autoinstall_known_extensions = false")
            connection.execute("SET preserve_insertion_order = false")
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute("SET temp_directory = ?", [os.path.join(directory, "spill")])
            for kind in ("jobs", "events"):
                _view(connection, kind, [path for path in files if os.path.basename(path).startswith(kind)])
            yield connection
        except duckdb.Error as error:
            said = str(error).split("\n", 1)[0][:300]
            raise UsageError(f"the tables in {directory} cannot be read: {said}") from error


def _files(directory: str) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise translate_os_error(error, f"read {directory}") from error
    found = [os.path.join(directory, name) for name in names if _NAME.fullmatch(name)]
    if not found:
        raise NotFound(f"{directory} has no table of failures; make one with: ff reliability import {directory} …")
    return found


def _view(connection: Any, kind: Kind, paths: Sequence[str]) -> None:
    schema = table_schema(kind)
    for path in paths:
        _check_schema(path, schema)
    if not paths:
        connection.register(f"no_{kind}", schema.empty_table())
        # A table, no view: cursors of the connection do not see what is registered with it.
        connection.execute(f"CREATE TABLE {kind} AS SELECT * FROM no_{kind}")
        return
    connection.read_parquet(list(paths)).create_view(f"all_{kind}")
    once = f"SELECT * FROM all_{kind}"
    if kind == "jobs" and len(paths) > 1:
        once += " QUALIFY row_number() OVER (PARTITION BY job, start_ns, submit_ns ORDER BY end_ns NULLS LAST) = 1"
    connection.execute(f"CREATE VIEW {kind} AS {once}")


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
