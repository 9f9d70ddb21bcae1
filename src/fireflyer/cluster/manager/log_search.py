"""Searches what the ranks of a task printed, a page at a time."""

from __future__ import annotations

from typing import Final

from fireflyer.base.errors import UsageError
from fireflyer.cluster.core.objects.log_follow import LogPosition, parse_positions
from fireflyer.cluster.manager.logs import Logs, Reader
from fireflyer.cluster.schema.logs import FoundLine, FoundLines, RankLog, StreamView

__all__ = ["search_logs"]

MAX_LINES: Final = 200
"""Of a page."""
MAX_SEARCHED_LOGS: Final = 64
"""For a page; of each 64 MiB at most."""


async def search_logs(
    logs: Logs, reader: Reader, task: int, text: str, *, run: int | None, rank: int | None, after: str
) -> FoundLines:
    """Lines of runs, attempts and ranks in their order. `after`: `next` of the page before. Raises `UsageError`,
    `NotFound`, `PermissionDenied`, `Elsewhere`."""
    begins = parse_positions(after)
    if len(begins) > 1:
        raise UsageError("`after` is one position: `next` of the page before")
    begin = begins[0] if begins else LogPosition(0, 0, 0, 0)
    found: list[FoundLine] = []
    searched = 0
    for one in (await logs.of_task(reader, task)).runs:
        if run is not None and one.run != run:
            continue
        for log in _logs_of(one.streams, rank):
            at = LogPosition(one.run, log.attempt, log.rank, 0)
            if at[:3] < begin[:3]:
                continue
            if at[:3] == begin[:3]:
                at = begin
            if searched >= MAX_SEARCHED_LOGS or len(found) >= MAX_LINES:
                return FoundLines(tuple(found), str(at))
            searched += 1
            page = await logs.search(task, at, text, MAX_LINES - len(found))
            found += [
                FoundLine(run=at.run, attempt=at.attempt, rank=at.rank, offset=line.offset, line=line.line)
                for line in page.found
            ]
            if page.next_offset is not None:
                return FoundLines(tuple(found), str(at._replace(offset=page.next_offset)))
    return FoundLines(tuple(found), "")


def _logs_of(streams: tuple[StreamView, ...], rank: int | None) -> list[RankLog]:
    named = [RankLog(one.attempt, one.rank) for one in streams if one.attempt is not None and one.rank is not None]
    return sorted(log for log in named if rank is None or log.rank == rank)
