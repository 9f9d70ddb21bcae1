"""What tables have already: each event and each attempt of a job stays in one table, however often it is imported.

Files that have grown, and exports whose times overlap, say again what others said. An event is the same where all of it
is; what one file says twice stays twice. An attempt of a job is the same by its number, its submission and its start;
of two the one that says more of its end stays, and of two that have ended the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

from fireflyer.analytics.reliability.rows import EventRow

__all__ = ["leave_events_once", "leave_jobs_once"]

_PROGRESS: Final = "if({0}.end_ns IS NOT NULL, 2, if({0}.start_ns IS NOT NULL, 1, 0))"


def leave_events_once(connection: Any, new: str, others: Sequence[str]) -> None:
    """Takes out of the file `new` what the files `others` have."""
    connection.read_parquet(new).create_view("new")
    connection.read_parquet(list(others)).create_view("old")
    columns = ", ".join(f'"{name}"' for name in EventRow._fields)
    connection.execute(
        f"""
        CREATE TABLE known AS
        SELECT DISTINCT {columns} FROM (SELECT DISTINCT * FROM new) JOIN old USING ({columns})
        WHERE time_ns BETWEEN (SELECT min(time_ns) FROM new) AND (SELECT max(time_ns) FROM new)
        """
    )
    if _count(connection, "known"):
        _rewrite(connection, new, f"SELECT {columns} FROM new ANTI JOIN known USING ({columns})")


def leave_jobs_once(connection: Any, new: str, others: Sequence[str]) -> None:
    """Takes attempts out of the file `new` that the files `others` have, and out of those what `new` knows better."""
    connection.read_parquet(new, file_row_number=True).create_view("new")
    connection.read_parquet(list(others), file_row_number=True, filename=True).create_view("old")
    old, later = _PROGRESS.format("old"), _PROGRESS.format("new")
    connection.execute(
        f"""
        CREATE TABLE twice AS
        SELECT new.file_row_number AS new_row, old.filename AS file, old.file_row_number AS old_row,
               {old} > {later} OR ({old} = {later} AND ({old} < 2 OR old.end_ns <= new.end_ns)) AS old_stays
        FROM old JOIN new ON old.job = new.job AND coalesce(old.submit_ns, -1) = coalesce(new.submit_ns, -1)
        WHERE old.start_ns IS NOT DISTINCT FROM new.start_ns OR {old} = 0 OR {later} = 0
        """
    )
    for (file,) in connection.execute("SELECT DISTINCT file FROM twice WHERE NOT old_stays").fetchall():
        connection.read_parquet(file, file_row_number=True).create_view("one", replace=True)
        path = file.replace("'", "''")
        left = f"SELECT old_row AS file_row_number FROM twice WHERE file = '{path}' AND NOT old_stays"
        _rewrite(connection, file, _without("one", left))
    if connection.execute("SELECT count(*) FROM twice WHERE old_stays").fetchall()[0][0]:
        _rewrite(connection, new, _without("new", "SELECT new_row AS file_row_number FROM twice WHERE old_stays"))


def _without(rows: str, left: str) -> str:
    return f"SELECT * EXCLUDE (file_row_number) FROM {rows} ANTI JOIN ({left}) USING (file_row_number)"


def _count(connection: Any, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])


def _rewrite(connection: Any, path: str, rows: str) -> None:
    partial = f"{path}.partial"
    quoted = partial.replace("'", "''")
    try:
        connection.execute(f"COPY ({rows}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)")
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)
