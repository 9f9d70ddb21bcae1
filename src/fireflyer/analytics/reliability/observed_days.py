"""How long each node of a fleet was there, from the days on which jobs and checks name it.

Nobody says when a node joined and left. Jobs that ran on it, and checks that found nothing severe, show that it was
there on a day; a node that they name every day from some day on has joined then. An idle node is named rarely, so a
silence counts as absence only where it is many times as long as any between two days that name the node. Faults and
failed jobs show that it was there, too, and their silence shows nothing: of tables that have faults alone all nodes
were there all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from fireflyer.analytics.reliability.failures import DAY_NS
from fireflyer.analytics.reliability.node_lists import names_of
from fireflyer.analytics.reliability.rows import FAILED_STATES

__all__ = ["MAX_FLEET", "fleet_days"]

MAX_FLEET: Final = 1_000_000
LEAST_DAYS: Final = 3
"""On which something sound names a node, for a silence to be judged."""
SILENCES: Final = 7
"""A node was not there where it was silent for more times as long as at its longest between two such days."""


class _Named(NamedTuple):
    """Days are counted from the begin of the window."""

    days: int
    """A bit for each day on which something sound names the node."""
    first: int
    last: int
    """On which anything does."""

    def joined(self, other: _Named | None) -> _Named:
        if other is None:
            return self
        return _Named(self.days | other.days, min(self.first, other.first), max(self.last, other.last))


def fleet_days(connection: Any, begin_ns: int, end_ns: int) -> dict[str, tuple[int, int] | None]:
    """Of every node that anything names from `begin_ns` on, the first and the last day of its time, counted from
    `begin_ns`; None: all of the time. Of more than `MAX_FLEET` nodes some are left out, and more than these are
    there. `prepare_failures` has made its tables."""
    named = _named_by_jobs(connection, begin_ns, end_ns)
    rows = connection.execute(
        f"""SELECT node, list(day) FILTER (sound), min(day), max(day)
            FROM (SELECT node, (time_ns - {begin_ns}) // {DAY_NS} AS day, bool_or(severity IN ('ok', 'warn')) AS sound
                  FROM events WHERE node <> '' AND time_ns >= {begin_ns} GROUP BY node, day)
            GROUP BY node LIMIT {MAX_FLEET + 1}"""
    ).fetchall()  # a name is no list here: names in a log are not expanded
    for node, days, first, last in rows:
        named[node] = _Named(_bits(days), first, last).joined(named.get(node))
    return {node: _time_of(one, (end_ns - begin_ns) // DAY_NS) for node, one in named.items()}


def _named_by_jobs(connection: Any, begin_ns: int, end_ns: int) -> dict[str, _Named]:
    lists = connection.cursor().execute(
        f"""
        WITH spans AS (
          SELECT DISTINCT node_list, state NOT IN {FAILED_STATES} AS sound,
                 greatest(start_ns - {begin_ns}, 0) // {DAY_NS} AS first_day,
                 (least(until_ns, {end_ns}) - {begin_ns}) // {DAY_NS} AS last_day
          FROM sized WHERE start_ns IS NOT NULL AND until_ns >= {begin_ns}
        ), each_day AS (
          SELECT node_list, sound, unnest(range(first_day, last_day + 1)) AS day FROM spans
        ), named AS (
          SELECT node_list, day, bool_or(sound) AS sound FROM each_day GROUP BY node_list, day
        )
        SELECT node_list, list(day) FILTER (sound), min(day), max(day) FROM named GROUP BY node_list
        """
    )
    named: dict[str, _Named] = {}
    for node_list, days, first, last in iter(lists.fetchone, None):
        one = _Named(_bits(days), first, last)
        for name in names_of(node_list):
            named[name] = one.joined(named.get(name))
        if len(named) > MAX_FLEET:
            break
    return named


def _bits(days: Sequence[int] | None) -> int:
    return sum(1 << day for day in days or ())


def _time_of(named: _Named, last_day: int) -> tuple[int, int] | None:
    days = named.days
    if days.bit_count() < LEAST_DAYS:
        return None
    lowest = (days & -days).bit_length() - 1
    longest = 1 + max(map(len, f"{days >> lowest:b}".split("1")))
    begin = named.first if named.first > SILENCES * longest else 0
    end = named.last if last_day - named.last > SILENCES * longest else last_day
    return None if (begin, end) == (0, last_day) else (begin, end)
