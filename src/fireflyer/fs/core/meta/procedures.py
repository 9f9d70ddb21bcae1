"""Requests that are more than one transaction: see `ports`, `open_files.truncate` and `locks`.

Each step is a transaction that looks first at what has been done: a service may die between any two, and the request
comes again to another one. The last step keeps the answer.
"""

from __future__ import annotations

import errno

from fireflyer.fs.core.meta import replies
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.dispatch import carry_out
from fireflyer.fs.core.meta.open_files import lengths, locks, truncate
from fireflyer.fs.core.meta.open_files.lengths import ChunkEnd
from fireflyer.fs.core.meta.open_rows import truncation_of
from fireflyer.fs.core.meta.ports import Answered, NotAtOnce, Ports
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import Answer, Close, Found, Lock, Opened, Report, Request, SetAttributes

__all__ = ["carry_out_long"]


async def carry_out_long(request: Request, ports: Ports) -> Answer:
    """For what `carry_out` has raised `NotAtOnce` for. May take long where a chain is not available: whoever calls it
    sets the bound and cancels it, and what it has begun is finished by `background_tasks.BackgroundTasks`. Raises
    `FileError`, errors of the chunk store and of the key-value store."""
    try:
        if isinstance(request, Lock):
            return await locks.wait_and_lock(request, ports)
        if isinstance(request, Report | Close | SetAttributes):
            return await _report(request, ports)
        return await _cut(request, ports)
    except Answered as known:
        return known.answer


async def _report(request: Report | Close | SetAttributes, ports: Ports) -> Answer:
    measured: ChunkEnd | None = None
    while True:

        async def attempt(context: Context, measured: ChunkEnd | None = measured) -> Answer:
            if isinstance(request, Close):
                return _kept(context, await lengths.close(request, context, measured))
            if isinstance(request, SetAttributes):
                return _kept(context, await lengths.set_attributes_of_written(request, context, measured))
            return _kept(context, await lengths.report(request, context, measured))

        try:
            return await ports.transact(attempt)
        except NotAtOnce as obstacle:
            measured = await truncate.measure(obstacle.inode, ports)


async def _cut(request: Request, ports: Ports) -> Answer:
    while True:

        async def attempt(context: Context) -> Answer | InodeId:
            """The inode where a cut was begun."""
            answer = await carry_out(request, context)
            if isinstance(answer, Found | Opened):
                row = await truncation_of(context, answer.inode.id)
                if row is not None and (row.client, row.number) == (context.requester.client, context.number):
                    if not context.number:
                        raise file_error(errno.EINVAL, "a request that truncates a file must be numbered")
                    return answer.inode.id
            return _kept(context, answer)

        try:
            answer = await ports.transact(attempt)
        except NotAtOnce as obstacle:
            await truncate.go_on(obstacle.inode, ports)
            continue
        if not isinstance(answer, int):
            return answer
        await truncate.go_on(answer, ports)


def _kept(context: Context, answer: Answer) -> Answer:
    if context.number:
        replies.keep(context.rows, context.requester.client, context.number, answer, context.digest)
    return answer
