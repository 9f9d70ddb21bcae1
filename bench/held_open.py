"""Holds open what is opened with `async with`, between the steps of a generator that is not a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import uvloop

__all__ = ["held_open"]

_T = TypeVar("_T")


@contextlib.contextmanager
def held_open(opened: AbstractAsyncContextManager[_T]) -> Iterator[tuple[asyncio.Runner, _T]]:
    """What it gives, and the runner of its loop, which stands still while nothing is run there."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = contextlib.AsyncExitStack()
        try:
            yield runner, runner.run(stack.enter_async_context(opened))
        finally:
            runner.run(stack.aclose())
