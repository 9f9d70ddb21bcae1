"""Handles that have to be closed at the service, though nobody waits for it any more.

    close failed without an answer ──> `UnansweredClose` ──┐
                                                   ├─ every few seconds ──> Close ──answered, whatever it says──> gone
    open given up, perhaps done    ──> `UnconfirmedOpen` ──┘

A handle that nobody closes keeps its file from ever being collected, and what was not reported stays unknown, for as
long as the session lives: months, for a mount. A session that ends closes all of them.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass

from fireflyer.base.errors import FireflyerError
from fireflyer.fs.client.files.open_inode import OpenInode
from fireflyer.fs.client.files.port import Port
from fireflyer.fs.schema.errors import FileError
from fireflyer.fs.schema.inodes import FileDetails, Inode
from fireflyer.fs.schema.meta import Actor, Close, Found, PathRef, Stat

__all__ = ["OrphanedHandles", "UnansweredClose", "UnconfirmedOpen"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class UnansweredClose:
    """Of a file that was written. The body stays, and with it what is not reported."""

    body: OpenInode
    handle: int
    actor: Actor | None


@dataclass(slots=True, eq=False)
class UnconfirmedOpen:
    """An open for writing whose answer nobody has waited for."""

    place: PathRef
    follow: bool
    handle: int
    actor: Actor | None
    inode: Inode | None = None
    """Where the answer came later."""


class OrphanedHandles:
    def __init__(self, port: Port) -> None:
        self._port = port
        self._waiting: dict[UnansweredClose | UnconfirmedOpen, None] = {}

    def add(self, one: UnansweredClose | UnconfirmedOpen) -> None:
        self._waiting[one] = None

    def keeps(self, body: OpenInode) -> bool:
        return any(isinstance(one, UnansweredClose) and one.body is body for one in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        """The session is over, and with it all handles."""
        self._waiting.clear()

    async def retry_all(self) -> list[OpenInode]:
        """Bodies that nothing waits for any more. Whatever gets no answer comes last the next time."""
        over: list[OpenInode] = []
        for one in list(self._waiting):
            if one not in self._waiting or (isinstance(one, UnansweredClose) and one.body.in_flight):
                continue
            try:
                await (_close(one) if isinstance(one, UnansweredClose) else self._find_and_close(one))
            except FileError as error:  # an answer: the handle is not open any more
                _log.info("orphaned handle closed handle=%d answer=%s", one.handle, error)
            except FireflyerError as error:
                _log.info("orphaned handle not closed yet handle=%d reason=%s", one.handle, error)
                if self._waiting.pop(one, self) is None:
                    self._waiting[one] = None
                break
            self._waiting.pop(one, None)
            if isinstance(one, UnansweredClose) and not self.keeps(one.body):
                over.append(one.body)
        return over

    async def _find_and_close(self, one: UnconfirmedOpen) -> None:
        inode = one.inode
        if inode is None:
            try:
                answer = await self._port.call(Stat(one.place, one.follow), one.actor)
            except FileError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    _log.warning("cannot find out whether an unanswered open succeeded reason=%s", error)
                raise
            inode = answer.inode if isinstance(answer, Found) else None
        if inode is not None and isinstance(inode.body, FileDetails):
            await self._port.call(Close(inode.id, one.handle, 0, inode.body.cut, False), one.actor)


async def _close(one: UnansweredClose) -> None:
    await one.body.report(one.handle, closing=True, actor=one.actor)
