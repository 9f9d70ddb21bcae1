"""What is removed where `Defaults.trash_s` is set moves here, and is removed when so many seconds have passed.

The trash of a quota tree is the directory `.trash` in its head (of what is in no area: in the root), and there one
directory for each user, that only this user may enter. What `rm` removed as `name` is `name~` and its inode number in
there: still in the same area, so it still counts, and any `mv` restores it. Removing it from there is for good.

Kept are files, links and so on whose last name goes, also those that a rename replaces, and whole trees that
`RemoveTree` removes; not empty directories. `.trash` is made when it is first needed. Another's directory or file of
that name is left alone: then the trash is `.trash.1`, and so on.

*When it leaves* is told by a clock of its own, a row (`trash_expiry`): a service whose wall clock is wrong empties
no trash, whether it removes or expires. The row is at most `MOST_STEP_NS` behind when something is removed, so that
is added.
"""

from __future__ import annotations

import errno
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.fs.core.meta import quota_trees
from fireflyer.fs.core.meta.context import Context
from fireflyer.fs.core.meta.inodes.directories import changed_directory, directory_details, is_in
from fireflyer.fs.core.meta.inodes.path_walk import look_up
from fireflyer.fs.core.meta.tables import (
    TRASH,
    TRASH_CLOCK_KEY,
    TRASH_CLOCK_ROWS,
    TRASH_ROWS,
    DentryRow,
    TrashRow,
    encode_entry,
    entry_key,
    pair_key,
)
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.inodes import MAX_NAME_BYTES, ROOT, DirectoryDetails, Inode, InodeId, Kind

__all__ = ["MOST_STEP_NS", "TRASH_NAME", "keep"]

TRASH_NAME: Final = b".trash"
MOST_STEP_NS: Final = 10 * SECOND
"""So much the clock of the trash goes on at once."""
_TRIES: Final = 100
"""Other names, where one is taken."""
_ALL_READ: Final = 0o755
_OWN: Final = 0o700


async def keep(context: Context, directory: Inode, name: bytes, inode: Inode) -> bool:
    """False where it is not to be kept: then nothing has changed. The caller takes the name out of `directory`; where
    that is the inode of the head, what is here in the store counts, so it is written before or read again after."""
    seconds = directory_details(directory).defaults.trash_s
    if not seconds or inode.links != 1 or (isinstance(inode.body, DirectoryDetails) and not inode.body.entries):
        return False
    trash = await _trash(context, directory.quota_tree or ROOT)
    if await is_in(context, directory, trash.id):
        return False
    await _add(context, await _own_trash(context, trash), name, inode, seconds)
    return True


async def _trash(context: Context, head_id: InodeId) -> Inode:
    head = await context.known(head_id)
    name = TRASH_NAME
    for number in range(1, _TRIES):
        entry = await look_up(context, head, name)
        if entry is None:
            return await _make(context, head, name, _ALL_READ, 0, 0)
        inode = await context.known(entry.id)
        if inode.kind is Kind.DIRECTORY and inode.uid == 0 and not inode.mode & 0o022:
            return inode
        name = b"%s.%d" % (TRASH_NAME, number)
    raise file_error(
        errno.EEXIST,
        f"no free name for a trash directory in the directory with inode {head_id}; rename its entries named .trash",
    )


async def _own_trash(context: Context, trash: Inode) -> Inode:
    requester = context.requester
    name = b"%d" % requester.uid
    entry = await look_up(context, trash, name)
    if entry is None:
        return await _make(context, trash, name, _OWN, requester.uid, requester.gid)
    inode = await context.known(entry.id)
    directory_details(inode)
    return inode


async def _make(context: Context, parent: Inode, name: bytes, mode: int, uid: int, gid: int) -> Inode:
    """Over the quota too: removing must always be possible."""
    await quota_trees.charge(context, parent.quota_tree, 0, 1, checked=False)
    now_ns = context.now_ns
    made = Inode(
        context.new_id(),
        Kind.DIRECTORY,
        mode,
        uid,
        gid,
        1,
        now_ns,
        now_ns,
        now_ns,
        parent.quota_tree,
        DirectoryDetails(parent.id, depth=directory_details(parent).depth + 1),
    )
    context.put(made)
    context.rows.set(entry_key(parent.id, name), encode_entry(DentryRow(made.id, Kind.DIRECTORY)))
    context.put(changed_directory(await context.known(parent.id), now_ns, 1, 1))
    return made


async def _add(context: Context, own: Inode, name: bytes, inode: Inode, seconds: int) -> None:
    body, now_ns, requester = inode.body, context.now_ns, context.requester
    kept_as = await _free_name(context, own, name, inode.id)
    context.rows.set(entry_key(own.id, kept_as), encode_entry(DentryRow(inode.id, inode.kind)))
    context.put(changed_directory(own, now_ns, 1, 1 if isinstance(body, DirectoryDetails) else 0))
    if isinstance(body, DirectoryDetails):
        body = msgspec.structs.replace(body, parent=own.id, depth=directory_details(own).depth + 1)
    context.put(msgspec.structs.replace(inode, ctime_ns=now_ns, body=body, home=own.id))
    row = TrashRow(inode.id, own.id, kept_as, requester.uid, requester.gid, requester.groups)
    context.rows.set(pair_key(TRASH, await _now_ns(context) + seconds * SECOND, inode.id), TRASH_ROWS.encode(row))


async def _now_ns(context: Context) -> int:
    """By the clock of the trash, which begins with the first service that leads."""
    value = await context.rows.get(TRASH_CLOCK_KEY)
    if value is None:
        return context.now_ns
    return TRASH_CLOCK_ROWS.decode(TRASH_CLOCK_KEY, value).now_ns + MOST_STEP_NS


async def _free_name(context: Context, own: Inode, name: bytes, inode_id: InodeId) -> bytes:
    for number in range(1, _TRIES):
        end = b"~%d" % inode_id if number == 1 else b"~%d~%d" % (inode_id, number)
        kept_as = name[: MAX_NAME_BYTES - len(end)] + end
        if await look_up(context, own, kept_as) is None:
            return kept_as
    raise file_error(errno.EEXIST, f"no free name for inode {inode_id} in the trash; empty the trash")
