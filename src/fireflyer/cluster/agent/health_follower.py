"""Keeps the program running that prints health events as they happen, and gives what it prints, a batch a second.

It is read no faster than that, so a program that prints without end waits, and takes neither memory nor the managers'
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.cluster.agent.health_program import Child, refused
from fireflyer.cluster.core.health.rounds import Following, PrintedLines
from fireflyer.cluster.schema.sync import HealthOrder
from fireflyer.runtime.clock import BootClock

__all__ = ["HealthFollower"]

_log = logging.getLogger(__name__)
_SPACING_S: Final = 1.0
_READ_BYTES: Final = 64 << 10
_LAST_S: Final = 5.0
"""What it printed before it ended is taken for so long."""


class HealthFollower:
    """`run` until it is cancelled."""

    def __init__(self, on_lines: Callable[[tuple[bytes, ...]], None], *, any_program: bool, state: str) -> None:
        """`any_program` and `state`: as of `NodeChecks`."""
        self._on_lines = on_lines
        self._any_program = any_program
        self._state = state
        self._following = Following()
        self._clock = BootClock()
        self._other = asyncio.Event()
        """Another program is to follow."""
        self._told = ""

    def hear(self, order: HealthOrder | None) -> None:
        if self._following.hear(order):
            self._other.set()

    async def run(self) -> None:
        while True:
            self._other.clear()
            await self._until_due()
            if self._other.is_set():
                continue
            started_ns = self._clock.now_ns()
            await self._follow(self._following.program)
            if not self._other.is_set():
                self._following.ended(started_ns, self._clock.now_ns())

    async def _until_due(self) -> None:
        """Or until another program is to follow."""
        wait_s = self._following.wait_s(self._clock.now_ns())
        if wait_s == 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._other.wait()

    async def _follow(self, program: tuple[str, ...]) -> None:
        """Until the program ends, or another one is to follow. One that is refused counts as one that has ended: root
        may put it into its place at any time."""
        if not self._any_program and (words := refused(program)):
            self._tell(words)
            return
        try:
            child = Child(program, self._state, follows=True)
        except FireflyerError as error:
            self._tell(f"{program[0]} cannot be started: {error}")
            return
        reads = asyncio.ensure_future(self._read(child.reader))
        waits = [asyncio.ensure_future(event.wait()) for event in (child.ended, self._other)]
        try:
            await asyncio.wait([reads, *waits], return_when=asyncio.FIRST_COMPLETED)
            code = await child.end()
            await asyncio.wait([reads], timeout=_LAST_S)
        except asyncio.CancelledError:  # the agent ends
            child.end_now()
            raise
        finally:
            for task in (reads, *waits):
                task.cancel()
            await asyncio.wait([reads])  # it has let go of the pipe
            os.close(child.reader)
        if not self._other.is_set():
            self._tell(f"{program[0]} has ended (exit code {code}), and is started again")

    async def _read(self, pipe: int) -> None:
        lines = PrintedLines()
        while True:
            await _readable(pipe)
            data = os.read(pipe, _READ_BYTES)
            if not data:
                return
            lines.feed(data)
            while batch := lines.take():
                self._on_lines(batch)
                await asyncio.sleep(_SPACING_S)

    def _tell(self, failure: str) -> None:
        """Once."""
        if failure != self._told:
            _log.warning("what happens on this node is seen with the next round of checks reason=%s", failure)
        self._told = failure


async def _readable(pipe: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe)
