"""What has to be ended in the meta service: asked until it is answered, or the session is over."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from typing import Any

import pytest

from fireflyer.base.errors import FireflyerError, Timeout
from fireflyer.fs.client.files.unlock_retrier import UnlockRetrier
from fireflyer.fs.schema.errors import file_error
from fireflyer.fs.schema.meta import Actor, Answer, Close, Done, Request


class PlayedMeta:
    """Answers when there is no `error`; each request is under way for some turns."""

    def __init__(self) -> None:
        self.client = 1
        self.error: FireflyerError | None = Timeout("no answer in time")
        self.asked: list[int] = []
        self.under_way = self.most = 0
        self.again = asyncio.Event()
        """Somebody asked what was asked before."""

    async def call(self, request: Request, *, actor: Actor | None = None) -> Answer:
        assert isinstance(request, Close)
        if request.inode in self.asked:
            self.again.set()
        self.asked.append(request.inode)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        self.under_way -= 1
        if self.error is not None:
            raise self.error
        return Done()


def run(work: Coroutine[Any, Any, None]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(inside())


async def leave(unlock_retrier: UnlockRetrier, *inodes: int) -> None:
    for inode in inodes:
        with pytest.raises(Timeout):
            await unlock_retrier.end(Close(inode, 1, 0, 0, False), key=inode)


def test_what_was_not_answered_is_asked_until_it_is() -> None:
    async def test() -> None:
        meta = PlayedMeta()
        unlock_retrier = UnlockRetrier(meta)
        await leave(unlock_retrier, 5)
        await meta.again.wait()
        assert len(unlock_retrier) == 1
        meta.error = None
        await unlock_retrier.ended(5)
        assert len(unlock_retrier) == 0
        asked = len(meta.asked)
        await unlock_retrier.end(Close(6, 1, 0, 0, False), key=6)
        await unlock_retrier.ended(6)
        assert meta.asked[asked:] == [6]
        await unlock_retrier.close()

    run(test())


def test_one_asks_while_nobody_answers_and_then_many_at_once() -> None:
    async def test() -> None:
        meta = PlayedMeta()
        unlock_retrier = UnlockRetrier(meta)
        for inode in range(300):
            await leave(unlock_retrier, inode)
        assert meta.most <= 2  # the one that goes on, and the one that is new
        meta.error = None
        for inode in range(300):
            await unlock_retrier.ended(inode)
        assert meta.most == 64
        await unlock_retrier.close()

    run(test())


def test_a_session_that_is_over_has_ended_all_of_it() -> None:
    async def test() -> None:
        meta = PlayedMeta()
        unlock_retrier = UnlockRetrier(meta)
        await leave(unlock_retrier, 5, 6)
        meta.client = 2
        await unlock_retrier.ended(5)
        await unlock_retrier.ended(6)
        await unlock_retrier.close()

    run(test())


def test_a_refusal_is_an_answer() -> None:
    async def test() -> None:
        meta = PlayedMeta()
        unlock_retrier = UnlockRetrier(meta)
        await leave(unlock_retrier, 5)
        meta.error = file_error(errno.EBADF)
        await unlock_retrier.ended(5)
        await unlock_retrier.close()

    run(test())


def test_closing_leaves_the_rest_to_the_end_of_the_session() -> None:
    async def test() -> None:
        meta = PlayedMeta()
        unlock_retrier = UnlockRetrier(meta)
        await leave(unlock_retrier, 5, 6)
        waiting = asyncio.create_task(unlock_retrier.ended(6))
        await unlock_retrier.close()
        await waiting
        asked = len(meta.asked)
        await leave(unlock_retrier, 7)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(meta.asked) == asked + 1

    run(test())
