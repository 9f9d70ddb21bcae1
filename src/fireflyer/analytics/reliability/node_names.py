"""One name for a node: hosts call themselves gpu7.cluster.example in their logs, and Slurm calls them gpu7.

Where the name in a report is in no node list of a job and its first part is, or the other way round, the report is of
that node. A name that two nodes could mean, as gpu7.one and gpu7.two, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from fireflyer.analytics.reliability.node_lists import names_of
from fireflyer.analytics.reliability.rows import EventRow

__all__ = ["first_part", "name_events_as_jobs", "strangers"]

_LISTS: Final = "SELECT DISTINCT node_list FROM jobs WHERE start_ns IS NOT NULL AND node_list <> ''"


def first_part(name: str) -> str:
    """`gpu7` of `gpu7.cluster.example`; an address of numbers alone is no name and stays whole."""
    first, _, rest = name.partition(".")
    return first if rest and not first.isdigit() else name


def name_events_as_jobs(connection: Any) -> None:
    """Replaces the view `events` by one with the names that jobs have for nodes, where any differs."""
    long_events = {
        node for (node,) in connection.execute("SELECT DISTINCT node FROM events WHERE contains(node, '.')").fetchall()
    }
    long_listed = set(_names_in(connection, "contains(node_list, '.')"))
    named = _by_first_part(long_events - long_listed)
    in_events = _by_first_part(long_listed - long_events)
    if in_events:
        known = connection.execute(
            "SELECT DISTINCT node FROM events WHERE list_contains($short, node)", {"short": list(in_events)}
        )
        in_events = {short: in_events[short] for (short,) in known.fetchall()}
    if not named and not in_events:
        return
    listed = _found(connection, {*named, *in_events})
    pairs = [(long, short) for short, long in named.items() if short in listed]
    pairs += [(short, long) for short, long in in_events.items() if short not in listed]
    if not pairs:
        return
    columns = ", ".join("coalesce(named, node) AS node" if one == "node" else f'"{one}"' for one in EventRow._fields)
    connection.execute("CREATE TABLE node_names (node VARCHAR, named VARCHAR)")
    connection.executemany("INSERT INTO node_names VALUES (?, ?)", pairs)
    connection.execute("ALTER VIEW events RENAME TO events_as_imported")
    connection.execute(
        f"CREATE VIEW events AS SELECT {columns} FROM events_as_imported LEFT JOIN node_names USING (node)"
    )


def strangers(connection: Any) -> tuple[str, str] | None:
    """A node that reported and one that a job ran on, where no node did both though there are some of each."""
    nodes = {node for (node,) in connection.execute("SELECT DISTINCT node FROM events WHERE node <> ''").fetchall()}
    if not nodes:
        return None
    first = None
    for name in _names_in(connection, "true"):
        if name in nodes:
            return None
        first = first or name
    return None if first is None else (min(nodes), first)


def _by_first_part(names: Iterable[str]) -> dict[str, str]:
    """Those that no other name shares its first part with."""
    long = [name for name in names if first_part(name) != name]
    times = Counter(map(first_part, long))
    return {first_part(name): name for name in long if times[first_part(name)] == 1}


def _found(connection: Any, names: set[str]) -> set[str]:
    """Of the names those that jobs ran on."""
    found: set[str] = set()
    for name in _names_in(connection, "true"):
        if name in names:
            found.add(name)
            if len(found) == len(names):
                break
    return found


def _names_in(connection: Any, where: str) -> Iterable[str]:
    lists = connection.cursor().execute(f"{_LISTS} AND {where}")
    for (node_list,) in iter(lists.fetchone, None):
        yield from names_of(node_list)
