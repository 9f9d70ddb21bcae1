"""Which time the tables tell of, and until when an attempt without an end is known to have run.

An attempt that had not ended when its source was written may have ended the next minute: it is known to have run until
the last time of that source, and not until the last time that any table has.
"""

from __future__ import annotations

from typing import Any

from fireflyer.base.errors import UsageError

__all__ = ["table_span", "until_of"]


def until_of(connection: Any) -> str:
    """The expression over `jobs` that gives the end of an attempt, or until when it is known to have run: as its row
    says, else as long as the other rows of its source tell anything. Null where it never started."""
    sources = connection.execute(
        "SELECT DISTINCT coalesce(source, '') FROM jobs "
        "WHERE start_ns IS NOT NULL AND end_ns IS NULL AND known_ns IS NULL"
    ).fetchall()
    last = ""
    for (source,) in sources:
        ((last_ns,),) = connection.execute(
            """SELECT max(last) FROM (
                 SELECT max(greatest(start_ns, end_ns, known_ns)) AS last FROM jobs
                 WHERE coalesce(source, '') = $source
                 UNION ALL SELECT max(time_ns) FROM events WHERE source = $source)""",
            {"source": source},
        ).fetchall()
        quoted = source.replace("'", "''")
        last += f" WHEN '{quoted}' THEN {last_ns}"
    other = f"CASE coalesce(source, ''){last} END" if last else "NULL"
    return f"coalesce(end_ns, if(start_ns IS NULL, NULL, greatest(start_ns, coalesce(known_ns, {other}))))"


def table_span(connection: Any) -> tuple[int, int]:
    """The first and the last time of what jobs did and nodes reported. Raises `UsageError` where there is none."""
    ((begin_ns, end_ns),) = connection.execute(
        """SELECT min(first), max(last) FROM (
             SELECT min(start_ns) AS first, greatest(max(start_ns), max(end_ns), max(known_ns)) AS last FROM jobs
             UNION ALL SELECT min(time_ns), max(time_ns) FROM events)"""
    ).fetchall()
    if end_ns is None or begin_ns is None:
        raise UsageError("the tables are empty: no job has started, and no node has reported anything")
    return begin_ns, end_ns
