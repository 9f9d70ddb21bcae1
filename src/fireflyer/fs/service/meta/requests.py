"""One request on its way: carried out in its commit queue, or by a procedure that takes several transactions.

    Asked ──queue─> answer, stored with it ──────────────────────────────────────────────> done
            └─NotAtOnce─> procedure: each step a `Step` in the same queue ─> answer ─────> done

A refusal is an answer: what the body wrote is dropped, the refusal is stored. What is not an answer (the store cannot
be reached, the session is over, somebody asks for what they may not) is not stored, so the request may come again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from fireflyer.base.errors import (
    Busy,
    FireflyerError,
    NoSpace,
    PermissionDenied,
    Timeout,
    TransientError,
    error_to_wire,
)
from fireflyer.fs.core.meta import procedures
from fireflyer.fs.core.meta.context import SYSTEM, Context, Requester
from fireflyer.fs.core.meta.dispatch import carry_out
from fireflyer.fs.core.meta.open_files.renew import renew
from fireflyer.fs.core.meta.ports import Answered, ChunkPort, NotAtOnce
from fireflyer.fs.core.meta.replies import (
    SESSION_EVICTED,
    SESSION_FORGOTTEN,
    SESSION_OVER,
    SessionEnded,
    SessionEvicted,
    SessionForgotten,
    admit,
    check_session,
    digest_of,
    store_answer,
)
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId, Kind
from fireflyer.fs.schema.meta import (
    Actor,
    Allocate,
    Answer,
    ClientHeartbeat,
    Close,
    ErrorReply,
    Lock,
    MakeNode,
    Open,
    OpenFlag,
    Reading,
    Remove,
    RemoveDirectory,
    RemoveTree,
    Rename,
    Renew,
    Report,
    Request,
    Reserve,
    Truncate,
)
from fireflyer.fs.service.meta.context import ServiceContext
from fireflyer.fs.service.meta.group_commit import CommitItem
from fireflyer.fs.service.meta.prefetch import prefetch
from fireflyer.kvstore import Savepoint, TransactionBatch

__all__ = [
    "LONG_S",
    "QueuedRequest",
    "RequestPorts",
    "Step",
    "carry_out_long",
    "commit_queue_key",
    "is_changing",
    "prefetch_all",
    "refusal",
]

_log = logging.getLogger(__name__)
T = TypeVar("T")
LONG_S: Final = 120.0
"""For a procedure; then its request may be sent again, and goes on."""
MAX_MESSAGE_CHARS: Final = 1000

_READING: Final = Reading.__args__
_OPEN_CHANGES: Final = OpenFlag.WRITE | OpenFlag.CREATE | OpenFlag.TRUNCATE
_MAKING_ROOM: Final = (Remove, RemoveDirectory, RemoveTree, Truncate, Close, Report, ClientHeartbeat)
"""Without `Close`, `Report` and `ClientHeartbeat` nothing that is removed could be collected."""
_OF_INODE: Final = (Report, Close, Reserve, Allocate, Lock)


def is_changing(request: Request) -> bool:
    """Whether it is numbered."""
    if type(request) is Open:
        return bool(request.flags & _OPEN_CHANGES)
    return type(request) not in _READING


def _makes_files(request: Request) -> bool:
    if type(request) is Open:
        return bool(request.flags & OpenFlag.CREATE)
    return type(request) is MakeNode and request.kind is Kind.FILE


def commit_queue_key(request: Request, client: ClientId) -> Hashable:
    """The same for requests that are likely to write the same directory or inode."""
    kind = type(request)
    if kind in _OF_INODE:
        return request.inode  # type: ignore[union-attr]
    if kind is ClientHeartbeat:
        return -client
    place = request.source if kind is Rename else request.place  # type: ignore[union-attr]
    cut = place.path.rfind(b"/")
    return place.base if cut < 0 else (place.base, place.path[:cut])


def refusal(error: BaseException) -> ErrorReply:
    """What the client is told."""
    if isinstance(error, FileError):
        return ErrorReply(error.errno or errno.EIO, error.message[:MAX_MESSAGE_CHARS], _code_of(error))
    if isinstance(error, NoSpace):
        return ErrorReply(errno.ENOSPC, error.message[:MAX_MESSAGE_CHARS], NoSpace.code)
    if isinstance(error, PermissionDenied):
        return ErrorReply(errno.EPERM, error.message[:MAX_MESSAGE_CHARS], PermissionDenied.code)
    code, message = error_to_wire(error)
    if isinstance(error, TransientError):
        return ErrorReply(0, message[:MAX_MESSAGE_CHARS], code)
    if isinstance(error, FireflyerError):
        _log.error("a request failed code=%s reason=%s", code, message)
    else:
        _log.error("a request failed unexpectedly", exc_info=error)
    return ErrorReply(errno.EIO, message[:MAX_MESSAGE_CHARS], code)


def _code_of(error: FileError) -> str:
    if isinstance(error, SessionForgotten):
        return SESSION_FORGOTTEN
    if isinstance(error, SessionEvicted):
        return SESSION_EVICTED
    return SESSION_OVER if isinstance(error, SessionEnded) else ""


class QueuedRequest(CommitItem):
    """`reply` is called once with its outcome: an answer, or an error. `user`: of whom the session must be; empty for a
    service."""

    __slots__ = ("_service_context", "digest", "done_below", "number", "reply", "request", "requester", "user")

    def __init__(
        self,
        service_context: ServiceContext,
        request: Request,
        number: int,
        done_below: int,
        requester: Requester,
        user: str,
        reply: Callable[[QueuedRequest, Any], None],
        actor: Actor | None = None,
    ) -> None:
        self._service_context = service_context
        self.request = request
        self.number = number
        """0: it changes nothing."""
        self.done_below = done_below
        self.requester = requester
        self.user = user
        self.reply = reply
        self.digest = digest_of(request, actor) if number else b""

    async def carry_out(self, rows: Savepoint) -> Answer:
        service_context, request, requester, number = self._service_context, self.request, self.requester, self.number
        if not number:
            if type(request) is Open or type(request) is Renew:
                await check_session(rows, requester.client, self.user)
            context = service_context.context(rows, requester)
            return await (renew(request, context) if type(request) is Renew else carry_out(request, context))
        stored = await admit(rows, requester.client, self.user, number, self.digest)
        if stored is not None:
            return stored
        if not service_context.cluster.chains and _makes_files(request):
            raise Busy(
                "the cluster has no chain table for files yet; an administrator makes one with `ff fs admin add-chains`"
            )
        answer: Answer
        try:
            answer = await carry_out(request, service_context.context(rows, requester, number, digest=self.digest))
        except FileError as error:
            rows.rollback()
            answer = refusal(error)
        await store_answer(rows, requester.client, number, self.done_below, answer, self.digest)
        return answer

    @property
    def frees_space(self) -> bool:
        request = self.request
        if type(request) is ClientHeartbeat and request.held and self.requester.by_path:
            return False
        return type(request) in _MAKING_ROOM

    @property
    def lazy(self) -> bool:
        return type(self.request) is Close and self.request.lazy

    def done(self, outcome: Any) -> None:
        self.reply(self, outcome)

    @property
    def queue_key(self) -> Hashable:
        return commit_queue_key(self.request, self.requester.client)


async def prefetch_all(transaction_batch: TransactionBatch, works: Sequence[CommitItem]) -> None:
    """For `CommitQueues` and `Reads` over a database."""
    await prefetch(
        transaction_batch,
        [(work.requester.client, work.number, work.request) for work in works if isinstance(work, QueuedRequest)],
    )


class Step(CommitItem, Generic[T]):
    """One transaction of a procedure, or of the service's own."""

    __slots__ = ("_asked", "_body", "_owner", "_service_context", "outcome")

    def __init__(
        self,
        service_context: ServiceContext,
        body: Callable[[Context], Awaitable[T]],
        *,
        asked: QueuedRequest | None = None,
        owner: ClientId = 0,
    ) -> None:
        self._service_context = service_context
        self._body = body
        self._asked = asked
        self._owner = owner
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    @property
    def frees_space(self) -> bool:
        return self._asked is None or self._asked.frees_space

    async def carry_out(self, rows: Savepoint) -> T:
        asked = self._asked
        if asked is None:
            return await self._body(self._service_context.context(rows, SYSTEM, 0, self._owner))
        if asked.number:
            stored = await admit(rows, asked.requester.client, asked.user, asked.number, asked.digest)
            if stored is not None:
                raise Answered(stored)
        return await self._body(
            self._service_context.context(rows, asked.requester, asked.number, self._owner, asked.digest)
        )

    def done(self, outcome: Any) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, BaseException):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class RequestPorts:
    """What a procedure works with: `core.meta.ports.Ports`. Without `asked`: of the service itself."""

    def __init__(self, service_context: ServiceContext, asked: QueuedRequest | None = None) -> None:
        self._service_context = service_context
        self._asked = asked

    @property
    def session(self) -> ClientId:
        return self._service_context.chunks.session

    @property
    def settle_ns(self) -> int:
        return self._service_context.settle_ns

    @property
    def chunks(self) -> ChunkPort:
        return self._service_context.chunks

    async def transact(self, body: Callable[[Context], Awaitable[T]]) -> T:
        asked = self._asked
        try:
            return await self._step(body)
        except SessionEnded:
            raise
        except FileError as error:
            if asked is None or not asked.number:
                raise
            answer = refusal(error)

        async def store(context: Context) -> None:
            client, number = asked.requester.client, asked.number
            await store_answer(context.rows, client, number, asked.done_below, answer, asked.digest)

        await self._step(store)
        raise Answered(answer)

    async def _step(self, body: Callable[[Context], Awaitable[T]]) -> T:
        owner = self._service_context.chunks.session if self._service_context.has_chunks else 0
        step = Step(self._service_context, body, asked=self._asked, owner=owner)
        self._service_context.commit_queues.put(0 if self._asked is None else self._asked.queue_key, step)
        return await step.outcome

    async def pause(self, delay_ns: int, inode: InodeId) -> None:
        await self._service_context.pause(delay_ns, inode)

    async def together(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        await asyncio.gather(*(one() for one in work))

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def claim(self, inode: InodeId) -> bool:
        if inode in self._service_context.claimed:
            return False
        self._service_context.claimed[inode] = None
        return True

    def release(self, inode: InodeId) -> None:
        self._service_context.claimed.pop(inode, None)
        if not self._service_context.in_doubt.get(inode):
            self._service_context.in_doubt.pop(inode, None)

    def inodes_in_doubt(self) -> Sequence[InodeId]:
        return list(self._service_context.in_doubt)

    def in_doubt(self, inode: InodeId) -> dict[Any, Any]:
        return self._service_context.in_doubt.setdefault(inode, {})


async def carry_out_long(service_context: ServiceContext, asked: QueuedRequest) -> Answer:
    """By a procedure. Raises what is no answer."""
    try:
        async with asyncio.timeout(LONG_S):
            return await procedures.carry_out_long(asked.request, RequestPorts(service_context, asked))
    except Answered as told:
        return told.answer
    except NotAtOnce as error:
        raise Busy(f"{error}: the meta service is not connected to the chunk store yet; try again") from error
    except TimeoutError as error:
        if isinstance(error, FireflyerError):
            raise
        raise Timeout(f"the request did not finish within {LONG_S:.0f} s; try again") from error
