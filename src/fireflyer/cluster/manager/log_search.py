"""Searches what the ranks of a task printed, a page at a time."""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.cluster.core.objects.log_follow import LogPosition, parse_positions
from fireflyer.cluster.manager.logs import Logs, Reader
from fireflyer.cluster.schema.logs import FoundLine, FoundLines, RankLog, StreamView, rank_log_of

__all__ = ["search_logs"]

MAX_LINES: Final = 200
"""Of a page."""
MAX_SEARCHED_BYTES: Final = 64 * MIB
MAX_SEARCHED_LOGS: Final = 256
"""For a page."""


async def search_logs(
    logs: Logs, reader: Reader, task: int, text: str, *, run: int | None, rank: int | None, after: str
) -> FoundLines:
    """Lines of runs, attempts and ranks in their order. `after`: `next` of the page before. Raises `UsageError`,
    `NotFound`, `PermissionDenied`, `Elsewhere`."""
    runs = range(logs.check_reader(reader, task))
    begins = parse_positions(after)
    if len(begins) > 1:
        raise UsageError("`after` is one position: `next` of the page before")
    begin = begins[0] if begins else LogPosition(0, 0, 0, 0)
    found: list[FoundLine] = []
    searched_logs = searched_bytes = 0
    for number in runs[begin.run :] if run is None else [run]:
        for log, end in _rank_logs(await logs.streams(task, number), rank):
            at = LogPosition(number, log.attempt, log.rank, 0)
            if at[:3] < begin[:3]:
                continue
            if at[:3] == begin[:3]:
                at = begin
            full = len(found) >= MAX_LINES or searched_logs >= MAX_SEARCHED_LOGS
            if full or searched_bytes >= MAX_SEARCHED_BYTES:
                return FoundLines(tuple(found), str(at))
            searched_logs += 1
            searched_bytes += max(0, end - at.offset)
            page = await logs.search(task, at, text, MAX_LINES - len(found))
            found += [
                FoundLine(run=at.run, attempt=at.attempt, rank=at.rank, offset=line.offset, line=line.line)
                for line in page.found
            ]
            if page.next_offset is not None:
                return FoundLines(tuple(found), str(at._replace(offset=page.next_offset)))
    return FoundLines(tuple(found), "")


def _rank_logs(streams: tuple[StreamView, ...], rank: int | None) -> list[tuple[RankLog, int]]:
    """With their ends."""
    named = [(log, one.end) for one in streams if (log := rank_log_of(one.name)) is not None]
    return sorted(one for one in named if rank is None or one[0].rank == rank)
