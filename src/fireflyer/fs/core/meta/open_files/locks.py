"""Advisory locks of clients: taking, waiting, finding out who is in the way.

What conflicts and what remains is decided by `in_the_way` and `changed`, over the locks of one inode as a value. The
two windows do not see each other. In RANGE (fcntl) the owner's new lock takes the place of its locks on those bytes:
what remains of them on either side stays, and neighbours of one kind become one. In WHOLE (flock) an owner has one
lock. Others conflict where ranges meet and one of the two is for writing.

All locks of an inode are one row, so a grant is a transaction like any other. A lock ends with its client's session:
who meets one of a session that is over takes it away, and the reaper does it for those that nobody meets.

*Waiting* is asking again. Who waits for a RANGE writes down for what, so that a circle of owners, each waiting for the
next, is found by the one that would close it: EDEADLK. (flock has no such error.) The row says until when it counts,
should the service die that waits. A wait ends after `wait_ns` with EAGAIN; clients that want to wait longer ask again.

*flock from READ to WRITE* lets the first one go before it waits or fails, as Linux does: two readers that both want to
write would otherwise wait for each other.
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import require_reach
from fireflyer.fs.core.meta.inodes.permissions import READ, WRITE, permits
from fireflyer.fs.core.meta.open_rows import (
    LOCKS_ROWS,
    WAIT_ROWS,
    WAITS,
    HeldLock,
    LocksRow,
    WaitRow,
    lives,
    locks_of,
    waits_of,
    writers_of,
)
from fireflyer.fs.core.meta.ports import NotAtOnce, Ports
from fireflyer.fs.core.meta.replies import keep
from fireflyer.fs.core.meta.tables import LOCKS, number_key, pair_key
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.ids import ClientId
from fireflyer.fs.schema.inodes import InodeId
from fireflyer.fs.schema.meta import END_OF_FILE, Answer, Done, ErrorReply, GetLock, Lock, LockKind, LockState, Window

__all__ = ["LOCK_PAUSE_NS", "MAX_LOCKS", "changed", "get_lock", "in_the_way", "lock", "release_all", "wait_and_lock"]

MAX_LOCKS: Final = 4096
"""Of one inode; ENOLCK."""
MAX_WALK: Final = 256
"""Owners looked at for a circle. A longer one is not found, and its waits end with their time."""
LOCK_PAUSE_NS: Final = 50_000_000
"""Until somebody who waits asks again, if nobody says earlier that a lock was let go; each time twice as long."""
MAX_LOCK_PAUSE_NS: Final = 400_000_000
WAIT_MARGIN_NS: Final = 1_000_000_000
"""Clocks of services differ by less."""


async def lock(request: Lock, context: Context) -> Done | ErrorReply:
    """Raises `NotAtOnce` where it has to be waited for, ENOLCK, EINVAL, ESTALE, EACCES."""
    wanted = await _checked(request, context)
    held = await _living(context, request.inode, wanted)
    if in_the_way(held, wanted):
        if request.wait_ns:
            raise NotAtOnce(request.inode, "another owner holds a conflicting lock")
        _let_go_first(context, request.inode, held, wanted)
        return ErrorReply(errno.EAGAIN, "another owner holds a conflicting lock")
    _take(context, request.inode, held, wanted)
    return Done()


async def get_lock(request: GetLock, context: Context) -> LockState:
    wanted = await _checked(request.lock, context)
    held = await locks_of(context, request.lock.inode)
    for one in in_the_way(held, wanted):
        if await lives(context.rows, one.client):
            found = Lock(request.lock.inode, one.window, one.owner, one.kind, one.start, one.end, 0, one.process)
            return LockState(found, one.client)
    return LockState()


async def wait_and_lock(request: Lock, ports: Ports) -> Answer:
    """EDEADLK besides."""
    until_ns = ports.now_ns() + request.wait_ns
    pause_ns = LOCK_PAUSE_NS
    while True:
        left_ns = max(0, until_ns - ports.now_ns())

        async def attempt(context: Context, left_ns: int = left_ns) -> Answer | None:
            return await _attempt(request, context, left_ns)

        answer = await ports.transact(attempt)
        if answer is not None:
            return answer
        await ports.pause(min(pause_ns, left_ns), request.inode)
        pause_ns = min(2 * pause_ns, MAX_LOCK_PAUSE_NS)


async def release_all(context: Context, inode: InodeId, client: ClientId) -> None:
    held = await locks_of(context, inode)
    _put(context, inode, tuple(one for one in held if one.client != client))


async def _attempt(request: Lock, context: Context, left_ns: int) -> Answer | None:
    """None: it waits."""
    wanted = await _checked(request, context)
    held = await _living(context, request.inode, wanted)
    key = pair_key(WAITS, context.requester.client, request.owner) + context.number.to_bytes(8, "big")
    blockers = in_the_way(held, wanted)
    answer: Answer = Done()
    if blockers and request.window is Window.RANGE and await _closes_cycle(context, wanted, blockers):
        answer = ErrorReply(errno.EDEADLK, "deadlock: the owner of the conflicting lock waits for a lock of this owner")
    elif blockers and left_ns:
        if request.window is Window.RANGE:
            until_ns = context.now_ns + left_ns + WAIT_MARGIN_NS
            if await context.rows.get(key) is None:  # else it is there since the first attempt
                context.rows.set(key, WAIT_ROWS.encode(WaitRow(request.inode, wanted, until_ns)))
        _let_go_first(context, request.inode, held, wanted)
        return None
    elif blockers:
        _let_go_first(context, request.inode, held, wanted)
        answer = ErrorReply(errno.EAGAIN, "another owner still holds a conflicting lock")
    else:
        _take(context, request.inode, held, wanted)
    context.rows.clear(key)
    keep(context.rows, context.requester.client, context.number, answer, context.digest)
    return answer


async def _checked(request: Lock, context: Context) -> HeldLock:
    if request.start >= request.end:
        raise file_error(errno.EINVAL, f"the range of bytes [{request.start}, {request.end}) is not valid")
    requester = context.requester
    if request.kind is not LockKind.NONE:
        inode = await context.inode(request.inode)
        if inode is None:
            raise file_error(errno.ESTALE)
        await require_reach(context, inode)
        allowed = permits(requester, inode, READ) or permits(requester, inode, WRITE)
        # It may have opened the file before its rights were taken.
        if not allowed and requester.client not in [client for client, _ in await writers_of(context, inode.id)]:
            raise file_error(errno.EACCES)
    start, end = (request.start, request.end) if request.window is Window.RANGE else (0, END_OF_FILE)
    return HeldLock(request.window, request.kind, start, end, requester.client, request.owner, request.process)


async def _living(context: Context, inode: InodeId, wanted: HeldLock) -> tuple[HeldLock, ...]:
    """What is held, without the locks in the way whose clients are no more."""
    held = await locks_of(context, inode)
    checked: dict[ClientId, bool] = {}
    for one in in_the_way(held, wanted):
        if one.client not in checked:
            checked[one.client] = await lives(context.rows, one.client)
    return tuple(one for one in held if checked.get(one.client, True))


def _take(context: Context, inode: InodeId, held: tuple[HeldLock, ...], wanted: HeldLock) -> None:
    after = changed(held, wanted)
    if len(after) > MAX_LOCKS and len(after) > len(held):
        raise file_error(errno.ENOLCK, f"inode {inode} has {MAX_LOCKS} locks, the maximum")
    _put(context, inode, after)


def _let_go_first(context: Context, inode: InodeId, held: tuple[HeldLock, ...], wanted: HeldLock) -> None:
    if wanted.window is Window.WHOLE:
        left = without_owner(held, Window.WHOLE, wanted.client, wanted.owner)
        if len(left) < len(held):
            _put(context, inode, left)


def _put(context: Context, inode: InodeId, held: tuple[HeldLock, ...]) -> None:
    key = number_key(LOCKS, inode)
    if held:
        context.rows.set(key, LOCKS_ROWS.encode(LocksRow(held)))
    else:
        context.rows.clear(key)


async def _closes_cycle(context: Context, wanted: HeldLock, blockers: list[HeldLock]) -> bool:
    """Whether one of those in the way waits, perhaps over others, for this owner."""
    me = (wanted.client, wanted.owner)
    seen: dict[tuple[ClientId, int], None] = {}
    ahead = [(one.client, one.owner) for one in blockers]
    while ahead and len(seen) < MAX_WALK:
        owner = ahead.pop()
        if owner in seen:
            continue
        seen[owner] = None
        for wait in await waits_of(context, *owner):
            if wait.until_ns < context.now_ns:
                continue
            held = await locks_of(context, wait.inode)
            ahead += [(one.client, one.owner) for one in in_the_way(held, wait.wanted)]
        if me in ahead:
            return True
    return False


# --- the locks of one inode, as a value ---


def _same_owner(one: HeldLock, other: HeldLock) -> bool:
    return one.client == other.client and one.owner == other.owner


def in_the_way(held: tuple[HeldLock, ...], wanted: HeldLock) -> list[HeldLock]:
    """Locks of others that `wanted` cannot be had beside, by start; none of a wish to unlock."""
    if wanted.kind is LockKind.NONE:
        return []
    return [
        one
        for one in held
        if one.window is wanted.window and not _same_owner(one, wanted)
        and one.start < wanted.end and wanted.start < one.end
        and LockKind.WRITE in (one.kind, wanted.kind)
    ]  # fmt: skip


def changed(held: tuple[HeldLock, ...], wanted: HeldLock) -> tuple[HeldLock, ...]:
    """With `wanted`, which nothing is in the way of; without what it unlocks where its kind is NONE."""
    others = [one for one in held if one.window is not wanted.window or not _same_owner(one, wanted)]
    own = [one for one in held if one.window is wanted.window and _same_owner(one, wanted)]
    left: list[HeldLock] = []
    if wanted.window is Window.RANGE:
        for one in own:
            if one.start < wanted.start:
                left.append(msgspec.structs.replace(one, end=min(one.end, wanted.start)))
            if one.end > wanted.end:
                left.append(msgspec.structs.replace(one, start=max(one.start, wanted.end)))
    if wanted.kind is not LockKind.NONE:
        left.append(wanted)
    return _ordered([*others, *_merged(left)])


def without_owner(held: tuple[HeldLock, ...], window: Window, client: int, owner: int) -> tuple[HeldLock, ...]:
    """After that owner has let all of a window go."""
    return tuple(one for one in held if one.window is not window or (one.client, one.owner) != (client, owner))


def _merged(own: list[HeldLock]) -> list[HeldLock]:
    """Locks of one owner that do not overlap."""
    result: list[HeldLock] = []
    for one in sorted(own, key=lambda lock: lock.start):
        last = result[-1] if result else None
        if last is not None and last.end == one.start and last.kind is one.kind:
            result[-1] = msgspec.structs.replace(one, start=last.start)
        else:
            result.append(one)
    return result


def _ordered(held: list[HeldLock]) -> tuple[HeldLock, ...]:
    return tuple(sorted(held, key=lambda one: (one.window, one.start, one.client, one.owner)))
