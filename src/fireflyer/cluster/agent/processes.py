"""Guards that nobody is a parent of: how they are started, found again by a later agent, watched and signalled.

A guard that this agent started and one that it adopted are watched alike: through a pidfd of the process that the guard
has named itself, compared with the time of its start and the boot. How it ended is in the file of its words; without
the word `clean` whatever carries the guard's mark is killed first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Final

from fireflyer.base.errors import Busy, FireflyerError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.cluster.agent.records import GuardRecord
from fireflyer.cluster.agent.start import Starting, starting_bytes
from fireflyer.cluster.core.agent import End
from fireflyer.runtime.processes.guarded import MARKER, kill_marked
from fireflyer.runtime.processes.identity import open_process

__all__ = ["LEASE_ENDED", "DetachedProcesses", "start_detached"]

_log = logging.getLogger(__name__)
_LOOK_S: Final = 0.05
_STARTER_S: Final = 60.0
LEASE_ENDED: Final = "its lease ended"


class DetachedProcesses:
    """Made in an event loop. `on_up` is called when a guard can be signalled, `on_gone` when it has ended."""

    def __init__(
        self,
        on_up: Callable[[str], None],
        on_gone: Callable[[str, End], None],
        *,
        marks: Callable[[str], tuple[str, ...]] = lambda token: (token,),
    ) -> None:
        """`marks`: of what is killed with the guard of this token (`FF_JOB_TOKEN`)."""
        self._on_up = on_up
        self._on_gone = on_gone
        self._marks = marks
        self._pidfds: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, token: str, record: GuardRecord, start: Callable[[], None], *, uid: int | None) -> None:
        """`start` runs in a thread and returns when the guard has left this process, or has failed to begin; it raises
        `FireflyerError` where nothing was started. `uid`: of what the guard starts, where that is another one."""
        self._run(token, self._start(token, record, start, uid))

    def watch(self, token: str, record: GuardRecord, *, uid: int | None) -> None:
        self._run(token, self._watch(token, record, uid))

    def signal(self, token: str, *numbers: int) -> None:
        """SIGCONT first where the guard may be stopped: one that is stopped hears nothing else."""
        fd = self._pidfds.get(token)
        if fd is None:
            return
        for number in numbers:
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                pass  # it has just ended

    def kill(self, token: str, *, uid: int | None) -> None:
        self.signal(token, signal.SIGKILL)
        self._run(token, self._sweep_only(token, uid))

    def close(self) -> None:
        """Guards live on."""
        for task in self._tasks:
            task.cancel()
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    # -- a guard's life ------------------------------------------------------------------------------------------------

    def _run(self, token: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                _log.error("guard is not watched any more token=%s", token, exc_info=error)
                reason = f"its agent failed: {type(error).__name__}: {error}"[:500]
                self._on_gone(token, End(clean=False, reason=reason))

        task.add_done_callback(done)

    async def _start(self, token: str, record: GuardRecord, start: Callable[[], None], uid: int | None) -> None:
        try:
            await asyncio.to_thread(start)
        except FireflyerError as error:
            if not await self._sweep(token, uid):
                raise
            self._conclude(token, End(clean=True, reason=f"its guard was not started: {error}"))
            return
        await self._watch(token, record, uid)

    async def _watch(self, token: str, record: GuardRecord, uid: int | None) -> None:
        process = await asyncio.to_thread(record.process)
        while process is None and await asyncio.to_thread(record.lives):
            await asyncio.sleep(_LOOK_S)
            process = await asyncio.to_thread(record.process)
        fd = None if process is None else open_process(process)
        if fd is not None:
            self._pidfds[token] = fd
            self._on_up(token)
            try:
                await _readable(fd)
            finally:
                if self._pidfds.pop(token, None) is not None:
                    os.close(fd)
        exit_code, expired, clean = await asyncio.to_thread(record.words)
        if not clean:
            clean = await self._sweep(token, uid)
        reason = LEASE_ENDED if expired else record.last_log_line() or "the process that guards its ranks ended"
        self._conclude(token, End(clean=clean, reason=reason, exit_code=exit_code))

    def _conclude(self, token: str, end: End) -> None:
        _log.info("guard ended token=%s clean=%s reason=%s", token, end.clean, end.reason)
        self._on_gone(token, end)

    async def _sweep_only(self, token: str, uid: int | None) -> None:
        await self._sweep(token, uid)

    async def _sweep(self, token: str, uid: int | None) -> bool:
        return all([await kill_marked(mark, uid) for mark in self._marks(token)])


def start_detached(record: GuardRecord, starting: Starting, *, mark: str) -> None:
    """Starts the guard whose directory `record` is. Raises `FireflyerError` where nothing was started."""
    lock = record.lock()
    if lock is None:
        raise Busy("a process of it lives already")
    try:
        with open(record.file("words"), "ab") as words, open(record.file("log"), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fireflyer.cluster.agent.start", record.file("process.json")],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=log,
                pass_fds=(lock,),
                cwd="/",
                env={**os.environ, MARKER: mark},
                start_new_session=True,
            )
        try:
            process.communicate(starting_bytes(starting), timeout=_STARTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    except OSError as error:
        raise translate_os_error(error, f"start a guard with {sys.executable}") from error
    finally:
        os.close(lock)


async def _readable(fd: int) -> None:
    """Of a pidfd: its process has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
