"""Routes of the logs of tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import HeaderParameter, PathParameter, QueryParameter
from litestar.response import ServerSentEvent, ServerSentEventMessage

from fireflyer.cluster.core.objects.log_follow import LogFollower, LogPosition, parse_positions
from fireflyer.cluster.manager.log_search import search_logs
from fireflyer.cluster.manager.logs import Logs, Reader
from fireflyer.cluster.manager.web.routes import Who
from fireflyer.cluster.manager.web.sessions import Sessions
from fireflyer.cluster.manager.web.streams import while_valid
from fireflyer.cluster.schema.logs import MAX_CHUNK_BYTES, FoundLines, LogEvent, LogPiece, TaskLogs

__all__ = ["ROUTES"]

_MAX: int = 1 << 53
_Task = Annotated[int, PathParameter(ge=1, le=_MAX)]
_Run = Annotated[int, PathParameter(ge=0, le=_MAX)]
_Stream = Annotated[str, PathParameter(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
_Offset = Annotated[int, QueryParameter(ge=0, le=1 << 50)]
_Limit = Annotated[int, QueryParameter(ge=1, le=16 * MAX_CHUNK_BYTES)]
_Number = Annotated[int | None, QueryParameter(ge=0, le=_MAX)]
_Text = Annotated[str, QueryParameter(min_length=1, max_length=200)]
_After = Annotated[str, QueryParameter(max_length=80)]
_Wait = Annotated[bool, QueryParameter()]
_Heard = Annotated[str, HeaderParameter(name="last-event-id", max_length=60_000)]


@get("/tasks/{number:int}/logs")
async def task_logs(request: Who, logs: NamedDependency[Logs], number: _Task) -> TaskLogs:
    """Logs of the task's runs, and how long each is. For its user and operators."""
    return await logs.of_task(_reader(request), number)


@get("/tasks/{number:int}/logs/{run:int}/{stream:str}")
async def log_piece(
    request: Who,
    logs: NamedDependency[Logs],
    number: _Task,
    run: _Run,
    stream: _Stream,
    offset: _Offset = 0,
    limit: _Limit = MAX_CHUNK_BYTES,
) -> LogPiece:
    """A piece of one log, at most `limit` bytes from `offset` on. Go on at `next_offset`."""
    return await logs.piece(_reader(request), number, run, stream, offset, limit)


@get("/tasks/{number:int}/logs/search")
async def log_search(
    request: Who,
    logs: NamedDependency[Logs],
    number: _Task,
    text: _Text,
    run: _Number = None,
    rank: _Number = None,
    after: _After = "",
) -> FoundLines:
    """Lines of ranks that contain `text`, upper and lower case alike. Ask again with `after` until `next` is empty."""
    return await search_logs(logs, _reader(request), number, text, run=run, rank=rank, after=after)


@get("/tasks/{number:int}/logs/events")
async def log_events(
    request: Who,
    logs: NamedDependency[Logs],
    sessions: NamedDependency[Sessions],
    number: _Task,
    run: _Number = None,
    rank: _Number = None,
    wait: _Wait = True,
    heard: _Heard = "",
) -> ServerSentEvent:
    """Server-sent events with what the ranks print, run after run, until the task has finished (`wait` false: what is
    there now). `last-event-id`: the newest id of each rank, with commas between them, to go on there.
    They end when the token that asked is revoked or expires."""
    follower = LogFollower(run=run, rank=rank, follow=wait, after=parse_positions(heard))
    events = logs.follow(_reader(request), number, follower, wait=wait)
    return ServerSentEvent(_messages(while_valid(events, sessions, request.user)))


async def _messages(
    events: AsyncIterator[tuple[LogEvent, LogPosition | None] | None],
) -> AsyncIterator[ServerSentEventMessage]:
    yield ServerSentEventMessage(data=None, comment="fireflyer")
    async for found in events:
        if found is None:
            yield ServerSentEventMessage(data=None, comment="nothing new")
            continue
        event, position = found
        data = msgspec.json.encode(event).decode()
        yield ServerSentEventMessage(id=None if position is None else str(position), data=data)


def _reader(request: Who) -> Reader:
    return Reader(request.user.user, request.user.roles)


ROUTES: list[Any] = [task_logs, log_piece, log_search, log_events]
