"""Carries what a machine asks of managers, and brings the answers back.

The machine numbers what it asks, chooses whom, and decides by its own timers what to do when no answer comes. So
nothing is tried again here, and an error of the network is no answer: it is logged when it is another one than before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.units import SECOND
from fireflyer.fs.control.connections import ConnectionPool
from fireflyer.fs.core.chain.node_membership import ManagerReply, SendToManager
from fireflyer.fs.schema.manager import ManagerError
from fireflyer.runtime.rpc import Credential

__all__ = ["MAX_ASKED", "ControlClient"]

_log = logging.getLogger(__name__)
MAX_ASKED: Final = 64
"""Requests without an answer; with more, the oldest is given up."""
PATIENCE_NS: Final = 10 * SECOND
"""For an answer. A later one would help nobody: each heartbeat is newer than the one before."""


class ControlClient:
    """Client of one process. `on_reply` is called in the loop, once for each answer that comes."""

    def __init__(self, credential: Credential, on_reply: Callable[[ManagerReply], None]) -> None:
        self._lines = ConnectionPool(credential)
        self._on_told = on_reply
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._said = ""

    def ask(self, effect: SendToManager) -> None:
        """Sends it; returns at once."""
        if len(self._tasks) >= MAX_ASKED:
            self._tasks.pop(next(iter(self._tasks))).cancel()
        task = asyncio.get_running_loop().create_task(self._ask(effect))
        self._tasks[effect.number] = task
        task.add_done_callback(lambda done: self._done(effect.number, done))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._lines.close()

    async def _ask(self, effect: SendToManager) -> None:
        try:
            answer = await self._lines.call(effect.manager, effect.request, PATIENCE_NS)
        except FireflyerError as error:
            self._say(f"manager does not answer manager={effect.manager} reason={error}")
            return
        if isinstance(answer, ManagerError):
            self._say(
                f"manager refused the request manager={effect.manager} request={type(effect.request).__name__} "
                f"reason={answer.message}"
            )
        elif self._said:
            self._say("")
            _log.info("manager answers again manager=%s", effect.manager)
        self._on_told(ManagerReply(effect.number, answer))

    def _say(self, text: str) -> None:
        if text and text != self._said:
            _log.warning("%s", text)
        self._said = text

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("handling the answer of a manager failed", exc_info=error)
