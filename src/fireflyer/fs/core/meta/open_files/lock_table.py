"""Advisory locks of one inode, as a value: what is in the way of a lock, and what is held after it.

The two windows do not see each other. In RANGE (fcntl) the owner's new lock takes the place of its locks on those
bytes: what remains of them on either side stays, and neighbours of one kind become one. In WHOLE (flock) an owner has
one lock. Others conflict where ranges meet and one of the two is for writing.
"""

from __future__ import annotations

import msgspec

from fireflyer.fs.core.meta.open_rows import HeldLock
from fireflyer.fs.schema.meta import LockKind, Window

__all__ = ["changed", "in_the_way", "without_owner"]


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
