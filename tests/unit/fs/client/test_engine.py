"""How threads drive the coroutines of files: several at once, and what the garbage collector begins."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fireflyer.base.errors import Timeout, UsageError
from fireflyer.fs.client.files.engine import ThreadPort
from fireflyer.fs.client.futures import ClientFuture


class _Ring:
    """What is `due` comes one by one, when it is waited for."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    @property
    def under_way(self) -> int:
        return len(self.due)

    def send(self) -> None: ...

    def until_ready(self, _: int) -> None: ...

    def take(self, *_: int) -> None:
        if self.due:
            self.due.pop(0)()


@pytest.fixture
def engine() -> Iterator[ThreadPort]:
    ring: Any = _Ring()
    background: Any = SimpleNamespace(say=lambda call: ring.due.append(call), is_here=False)
    meta: Any = SimpleNamespace(on_lost=[])
    made = ThreadPort(ring, background, meta)

    async def nothing() -> None: ...

    made.start(nothing)
    yield made
    made.close()


def later(engine: ThreadPort, result: Any, *, remote: bool = False) -> ClientFuture[Any]:
    ring: Any = engine.ring
    future: ClientFuture[Any] = ClientFuture(engine.wait)
    future.remote = remote
    error = isinstance(result, BaseException)
    ring.due.append(lambda: future.fail(result) if error else future.finish(result))
    return future


def test_several_go_on_as_what_they_wait_for_comes(engine: ThreadPort) -> None:
    done: list[Any] = []

    async def one(name: str, *waits: Any, remote: bool = False) -> None:
        for what in waits:
            came = await later(engine, what, remote=remote)
            done.append((name, came))

    async def all_() -> list[BaseException | None]:
        return await engine.together(
            [one("a", 1, 2, 3), one("b", 4, Timeout("late")), one("c", 5, remote=True), one("d")]
        )

    ends = engine.run(all_())
    assert [type(end) for end in ends] == [type(None), Timeout, type(None), type(None)]
    assert sorted(done) == [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert done != sorted(done)


def test_what_is_interrupted_ends_all_of_them(engine: ThreadPort) -> None:
    ended: list[str] = []

    async def one(name: str, *, breaks: bool) -> None:
        try:
            await later(engine, KeyboardInterrupt() if breaks else 0)
        finally:
            ended.append(name)

    async def all_() -> None:
        await engine.together([one("a", breaks=False), one("b", breaks=True), one("c", breaks=False)])

    with pytest.raises(KeyboardInterrupt):
        engine.run(all_())
    assert sorted(ended) == ["a", "b", "c"]


def test_what_is_begun_in_the_middle_of_a_call_is_done_when_it_has_ended(engine: ThreadPort) -> None:
    done: list[str] = []

    async def say(word: str) -> None:
        await later(engine, None)
        done.append(word)

    async def work() -> None:
        with pytest.raises(UsageError, match="inside another call"):
            engine.run(say("never"))
        assert engine.busy_here
        engine.later(say("second"))
        engine.later(say("third"))
        await say("first")
        raise Timeout("late")

    with pytest.raises(Timeout):
        engine.run(work())
    assert done == ["first", "second", "third"]
    assert not engine.busy_here


def test_what_was_left_is_done_in_its_order_whatever_other_threads_call(engine: ThreadPort) -> None:
    """The bytes of a file before its close; another thread comes while they are on their way."""
    done: list[str] = []
    came = threading.Event()
    ring: Any = engine.ring
    bytes_arrive: ClientFuture[Any] = ClientFuture(engine.wait)

    async def write() -> None:
        await bytes_arrive
        done.append("bytes")

    async def close() -> None:
        done.append("close")

    async def nothing() -> None: ...

    async def work() -> None:
        engine.later(write())
        engine.later(close())

    def other() -> None:
        engine.run(nothing())
        came.set()
        with engine._mutex:
            ring.due.append(lambda: bytes_arrive.finish(None))

    thread = threading.Thread(target=other)
    starts = iter([thread.start])  # the thread of the engine waits, too

    def waits(_: int) -> None:
        if (start := next(starts, None)) is not None:
            start()
        came.wait(0.01)

    ring.until_ready = waits
    bytes_arrive.remote = True
    engine.run(work())
    thread.join()
    assert done == ["bytes", "close"]


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_begun_while_a_thread_waits_does_not_wait_for_itself(engine: ThreadPort, remote: bool) -> None:
    """The garbage collector closes a file in the thread that leads."""
    ring: Any = engine.ring
    busy: list[bool] = []
    done: list[str] = []

    async def say(word: str) -> None:
        await later(engine, None)
        done.append(word)

    def collects(*_: int) -> None:
        if threading.current_thread() is threading.main_thread() and not busy:
            busy.append(engine.busy_here)
            engine.later(say("second"))

    async def work() -> None:
        ring.until_ready = collects
        await later(engine, None, remote=remote)
        await say("first")

    def takes(*_: int) -> None:
        collects()
        _Ring.take(ring)

    ring.take = takes
    engine.run(work())
    assert busy == [True]
    assert done == ["first", "second"]
    assert not engine.busy_here


def test_the_thread_that_speaks_with_the_services_waits_for_no_file(engine: ThreadPort) -> None:
    """The garbage collector closes a file there: what that waits for would come from this very thread."""
    background: Any = engine._background
    done: list[str] = []

    async def say(word: str) -> None:
        done.append(word)

    background.is_here = True
    assert engine.busy_here
    with pytest.raises(UsageError, match="inside another call"):
        engine.run(say("never"))
    engine.later(say("first"))
    background.is_here = False
    engine.run(say("second"))
    assert done == ["first", "second"]


def test_what_comes_too_late_is_not_begun(engine: ThreadPort) -> None:
    """Nor is it complained of."""

    async def say() -> None: ...

    early, late = say(), say()
    engine.later(early)
    engine.close()
    engine.later(late)
    assert inspect.getcoroutinestate(early) == inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


@pytest.mark.parametrize("too_late", [False, True])
def test_bytes_that_are_not_written_because_the_file_system_is_closed_are_an_error_in_the_log(
    engine: ThreadPort, too_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def write() -> None: ...

    if too_late:
        engine.close()
    engine.later(write(), file="/a/b", size=17)
    engine.close()
    (line,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "17 bytes written to /a/b are lost" in line.getMessage()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), Timeout("no answer")])
@pytest.mark.parametrize("size", [0, 5])
def test_what_deferred_work_raises_is_told_to_its_file_and_not_to_the_call_that_does_it(
    engine: ThreadPort, error: Exception, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Exception] = []

    async def write() -> None:
        await later(engine, error)

    async def call() -> str:
        engine.later(write(), file="/a/b", size=size, failed=told.append)
        return "its own result"

    assert engine.run(call()) == "its own result"
    assert told == [error]
    (line,) = [one for one in caplog.records if "/a/b" in one.getMessage()]
    assert line.levelname == ("WARNING" if isinstance(error, Timeout) and not size else "ERROR")


def test_the_end_of_a_session_is_heard_in_the_thread_that_drives(engine: ThreadPort) -> None:
    heard: list[tuple[int, int]] = []
    engine.on_lost(lambda session: heard.append((session, threading.get_ident())))
    meta: Any = engine.meta

    async def work() -> None:
        teller = threading.Thread(target=lambda: [tell(7) for tell in meta.on_lost])
        teller.start()
        teller.join()
        assert not heard
        await later(engine, None)

    engine.run(work())
    assert heard == [(7, threading.get_ident())]
