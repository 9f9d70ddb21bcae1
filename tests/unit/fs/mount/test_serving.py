"""What the kernel asks and the signals of who asks, in every order in which they may come: each is answered once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fireflyer.fs.mount import serving as serving_module
from fireflyer.fs.mount.serving import Serving, is_ending

pytestmark = pytest.mark.timeout(60)
_CALLER = (0, 0, os.getpid(), ())


class PlayedSession:
    """Hands on what it is told, as the native one does; `open` are those that were asked and not answered. Nobody
    reads."""

    read_limit_bytes = 0

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.open: set[int] = set()
        self.answers: dict[int, int] = {}
        self._answered: dict[int, asyncio.Future[int]] = {}
        self._events: list[tuple[Any, ...]] = []

    def start(self, threads: int) -> None:
        pass

    def read_memory(self, size: int) -> None:
        raise AssertionError

    @staticmethod
    def read_cost_bytes(size: int) -> int:
        raise AssertionError

    def ask(self, number: int, kind: str) -> tuple[Any, ...]:
        """It is known; its event, for `tell`."""
        self.open.add(number)
        self._answered[number] = asyncio.get_running_loop().create_future()
        return kind, number, 1, _CALLER, (0, 1, 0, 1) if kind == "flock" else (b"name",)

    async def answer(self, number: int) -> int:
        return await self._answered[number]

    def interrupt(self, number: int) -> None:
        self.tell(("interrupt", 0, 0, _CALLER, (number,)))

    def tell(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)
        os.eventfd_write(self.event_fd, 1)

    def take(self, limit: int) -> list[tuple[Any, ...]]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        taken, self._events = self._events[:limit], self._events[limit:]
        return taken

    def is_open(self, number: int) -> bool:
        return number in self.open

    def reply_error(self, number: int, error: int) -> None:
        if number not in self.open:
            raise ValueError(number)
        self.open.discard(number)
        self.answers[number] = error
        self._answered[number].set_result(error)


class Waiting:
    """What is asked of it waits for ever. A lock's attempt is waited for, and was not granted."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def lookup(self, *_: object) -> None:
        self.waits.set()
        await asyncio.Event().wait()

    def answered_ns(self, chain: int) -> int:
        raise AssertionError

    async def lock_whole(self, *_: object, wait: bool) -> None:
        assert wait
        await self.lookup()


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[tuple[Serving, PlayedSession, Waiting]]:
    session, operations = PlayedSession(), Waiting()
    serving = Serving(session, operations)  # type: ignore[arg-type]
    serving.start()
    try:
        yield serving, session, operations
    finally:
        await serving.close()
        os.close(session.event_fd)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_a_signal_behind_what_it_is_about_is_heard_in_whichever_turn_it_comes(turns: int) -> None:
    async def main() -> None:
        async with _serving() as (_, session, _):
            session.tell(session.ask(7, "flock"))
            await _turns(turns)
            session.interrupt(7)
            assert await session.answer(7) == errno.EINTR

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("another", [False, True])
def test_a_signal_before_what_it_is_about_is_heard_in_whichever_turn_that_comes(turns: int, another: bool) -> None:
    async def main() -> None:
        async with _serving() as (_, session, _):
            event = session.ask(7, "flock")
            session.interrupt(7)
            if another:
                session.tell(session.ask(8, "flock"))
            await _turns(turns)
            session.tell(event)
            assert await session.answer(7) == errno.EINTR
            assert session.open == ({8} if another else set())

    asyncio.run(main())


def test_a_signal_for_what_is_answered_is_nobodys() -> None:
    async def main() -> None:
        async with _serving() as (_, session, _):
            session.interrupt(7)
            session.tell(session.ask(8, "flock"))
            session.interrupt(8)
            assert await session.answer(8) == errno.EINTR
            assert session.answers == {8: errno.EINTR}

    asyncio.run(main())


def test_who_has_got_a_harmless_signal_is_heard_when_one_comes_that_ends_him(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ends, looks = False, asyncio.Semaphore(0)

        def ending(process: int) -> bool:
            assert process == os.getpid()
            looks.release()
            return ends

        monkeypatch.setattr(serving_module, "is_ending", ending)
        async with _serving() as (_, session, operations):
            session.tell(session.ask(7, "lookup"))
            await operations.waits.wait()
            session.interrupt(7)
            for _ in range(2):
                await looks.acquire()
            assert not session.answers  # programs do not expect EINTR there
            ends = True
            assert await session.answer(7) == errno.EINTR

    asyncio.run(main())


def test_at_the_end_locks_that_nobody_has_begun_to_ask_for_are_answered_too() -> None:
    async def main() -> None:
        async with _serving() as (serving, session, _):
            session.tell(session.ask(7, "flock"))
            await serving.drain()
            assert session.answers == {7: errno.ENOTCONN}

    asyncio.run(main())


_STOPPED = """
import signal, sys
# A shell that starts the tests in its background has them, and their children, ignore this.
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGABRT, lambda *_: None)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("number", "ends"),
    [(signal.SIGQUIT, True), (signal.SIGABRT, False), (signal.SIGUSR1, True), (signal.SIGWINCH, False), (0, False)],
)
def test_a_process_that_got_a_fatal_signal_is_ending_unless_it_catches_it(number: int, ends: bool) -> None:
    """It is stopped, so the signal stays pending, as it does in a call that waits."""
    with subprocess.Popen([sys.executable, "-c", _STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            os.kill(process.pid, number)
            assert is_ending(process.pid) is ends
        finally:
            process.kill()
    assert not is_ending(process.pid)
