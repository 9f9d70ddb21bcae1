"""What tables have already: each event and each attempt of a job stays in one table, however often it is imported.

Files that have grown, and exports whose times overlap, say again what others said, also joined to one file. An event is
the same where all of it is. An attempt of a job is the same by its source (both kinds of Slurm's accounting are one),
its number, its user where both say one, its submission and its start; of two the one that says more of its end stays,
of two that have ended the first, and of two that have not the one that is known to have run for longer.

Nothing is replaced here: what is left of a file is written beside it, and `tables` puts all in place at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

from fireflyer.analytics.reliability.rows import EventRow

__all__ = ["NEXT", "leave_events_once", "leave_jobs_once", "note_known"]

NEXT: Final = ".next"
"""After the path of a file: what is to take its place."""

_PROGRESS: Final = "if({0}.end_ns IS NOT NULL, 2, if({0}.start_ns IS NOT NULL, 1, 0))"


def note_known(connection: Any, new: str, known_ns: int) -> None:
    """Says of attempts of the file `new` that have no end until when they are known to have run."""
    without = "start_ns IS NOT NULL AND end_ns IS NULL AND known_ns IS NULL"
    connection.read_parquet(new).create_view("noted")
    if _one(connection, f"SELECT count(*) FROM noted WHERE {without}"):
        known = f"if({without}, CAST({known_ns} AS BIGINT), known_ns)"
        _write(connection, new, f"SELECT * REPLACE ({known} AS known_ns) FROM noted")
        os.replace(new + NEXT, new)


def leave_events_once(connection: Any, new: str, others: Sequence[str]) -> list[str]:
    """Takes out of the file `new` what it says twice and what the files `others` have. No other file changes."""
    columns = ", ".join(f'"{name}"' for name in EventRow._fields)
    connection.read_parquet(new).create_view("new")
    if _one(connection, f"SELECT count(*) > count(DISTINCT hash({columns})) FROM new"):
        _write(connection, new, f"SELECT DISTINCT {columns} FROM new")
        os.replace(new + NEXT, new)
        connection.read_parquet(new).create_view("new", replace=True)
    if not others:
        return []
    connection.read_parquet(list(others)).create_view("old")
    connection.execute(
        f"""
        CREATE TABLE known AS
        SELECT DISTINCT {columns} FROM (SELECT DISTINCT * FROM new) JOIN old USING ({columns})
        WHERE time_ns BETWEEN (SELECT min(time_ns) FROM new) AND (SELECT max(time_ns) FROM new)
        """
    )
    if _one(connection, "SELECT count(*) FROM known"):
        _write(connection, new, f"SELECT {columns} FROM new ANTI JOIN known USING ({columns})")
        os.replace(new + NEXT, new)
    return []


def leave_jobs_once(connection: Any, new: str, others: Sequence[str]) -> list[str]:
    """Takes attempts out of the file `new` that it says twice or that the files `others` have. Where `new` knows one
    better, the other file without it is written to its path and `NEXT`. Returns the paths of these other files."""
    connection.read_parquet(new, file_row_number=True).create_view("new")
    _leave_once_in_one(connection, new)
    if not others:
        return []
    connection.read_parquet(list(others), file_row_number=True, filename=True).create_view("old")
    old, later = _PROGRESS.format("old"), _PROGRESS.format("new")
    connection.execute(
        f"""
        CREATE TABLE twice AS
        SELECT new.file_row_number AS new_row, old.filename AS file, old.file_row_number AS old_row,
               {old} > {later} OR ({old} = {later} AND CASE {old} WHEN 2 THEN old.end_ns <= new.end_ns
                 WHEN 1 THEN coalesce(old.known_ns, 0) >= coalesce(new.known_ns, 0) ELSE true END) AS old_stays
        FROM old JOIN new ON old.job = new.job AND coalesce(old.submit_ns, -1) = coalesce(new.submit_ns, -1)
             AND old.source IS NOT DISTINCT FROM new.source
        WHERE (old.start_ns IS NOT DISTINCT FROM new.start_ns OR {old} = 0 OR {later} = 0)
          AND (old."user" = new."user" OR '' IN (old."user", new."user"))
        """
    )
    changed = [file for (file,) in connection.execute("SELECT DISTINCT file FROM twice WHERE NOT old_stays").fetchall()]
    for file in changed:
        connection.read_parquet(file, file_row_number=True).create_view("one", replace=True)
        path = file.replace("'", "''")
        left = f"SELECT old_row AS file_row_number FROM twice WHERE file = '{path}' AND NOT old_stays"
        _write(connection, file, _without("one", left))
    if _one(connection, "SELECT count(*) FROM twice WHERE old_stays"):
        _write(connection, new, _without("new", "SELECT new_row AS file_row_number FROM twice WHERE old_stays"))
        os.replace(new + NEXT, new)
    return changed


def _leave_once_in_one(connection: Any, new: str) -> None:
    """Of an attempt that one file has several times the row that says most of its end."""
    progress = _PROGRESS.format("new")
    connection.execute(
        f"""
        CREATE TABLE again AS
        WITH several AS (
          SELECT job, "user", submit_ns FROM new GROUP BY ALL HAVING count(*) > 1
        ), rated AS (
          SELECT new.file_row_number, {progress} AS progress,
                 max({progress}) OVER (PARTITION BY new.job, new."user", new.submit_ns) AS most,
                 row_number() OVER (
                   PARTITION BY new.job, new."user", new.submit_ns, new.start_ns
                   ORDER BY {progress} DESC, new.end_ns, new.file_row_number
                 ) AS place
          FROM new JOIN several ON new.job = several.job AND new."user" = several."user"
               AND new.submit_ns IS NOT DISTINCT FROM several.submit_ns
        )
        SELECT file_row_number FROM rated WHERE place > 1 OR (progress = 0 AND most > 0)
        """
    )
    if _one(connection, "SELECT count(*) FROM again"):
        _write(connection, new, _without("new", "SELECT file_row_number FROM again"))
        os.replace(new + NEXT, new)
        connection.read_parquet(new, file_row_number=True).create_view("new", replace=True)


def _without(rows: str, left: str) -> str:
    return f"SELECT * EXCLUDE (file_row_number) FROM {rows} ANTI JOIN ({left}) USING (file_row_number)"


def _one(connection: Any, query: str) -> int:
    return int(connection.execute(query).fetchall()[0][0])


def _write(connection: Any, path: str, rows: str) -> None:
    """Beside the file, where it is not looked at."""
    following = f"{path}{NEXT}"
    quoted = following.replace("'", "''")
    try:
        connection.execute(f"COPY ({rows}) TO '{quoted}' (FORMAT parquet, COMPRESSION zstd)")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(following)
        raise
