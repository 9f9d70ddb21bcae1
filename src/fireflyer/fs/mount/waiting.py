"""Waiting for what must not be left in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["in_any_case", "in_thread"]

_T = TypeVar("_T")


async def in_any_case(work: Coroutine[Any, Any, _T]) -> _T:
    """Its result. Who is cancelled meanwhile goes on: what was before it (a lock was granted) is done, and told."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
        except BaseException:  # the result says it
            break
    return task.result()


async def in_thread(call: Callable[[], None]) -> None:
    """In one that nobody waits for at the end of the process, as the kernel may keep it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def work() -> None:
        error: BaseException | None = None
        try:
            call()
        except BaseException as failed:
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, error)

    def tell(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    threading.Thread(target=work, daemon=True, name="fuse-forget").start()
    await ended
