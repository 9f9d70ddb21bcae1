"""Sends the logs of the runs whose launchers are on this node to the managers, while they are written and after.

The agent does that and not the launcher: its process ends with the run, has not the machine's credential, and may have
been killed. What is sent is asked from the store at each start, so an agent that was killed goes on where it was. That
all of a run is there is written down (`logs-sent` in its record); the directory of a run goes by the rule for runs
that were forgotten (`core.runs.KEEP_NS`), whether its logs were sent or not.

The log of the launcher is closed when all others are, so that readers know by it that a run is complete.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Final

from fireflyer.base.errors import FireflyerError, NotFound, Unreachable
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.run_logs import LauncherLog, RunLogFiles
from fireflyer.cluster.agent.runs import LedRun, Runs
from fireflyer.cluster.core.objects.log_shipper import LogShipper
from fireflyer.cluster.objects import ship_logs
from fireflyer.cluster.schema.logs import APPEND_LOG, END_LOG, AppendLog, EndLog, LogAnswer, LogChunk, LogEnd
from fireflyer.identity.private_files import write_private_file
from fireflyer.runtime.rpc import RpcClient

__all__ = ["LogShipping"]

_log = logging.getLogger(__name__)
_CALL_NS: Final = 30 * SECOND
_CALLS: Final = 2
"""Of all runs at a time: a connection has four, and one of them is held by the manager."""
_SENT_NAME: Final = "logs-sent"


class LogShipping:
    """Lives in the loop of the agent. `close` at the end."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._leader: RpcClient | None = None
        self._calls = asyncio.Semaphore(_CALLS)
        self._ended: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def leader_is(self, client: RpcClient | None) -> None:
        """The connection to the manager that leads; None: there is none."""
        self._leader = client

    def look(self) -> None:
        """Runs have come, ended, or were removed."""
        led = self._runs.led()
        for token in [token for token in self._tasks if token not in led]:
            self._tasks.pop(token).cancel()
        for token in [token for token in self._ended if token not in led]:
            del self._ended[token]
        for token, run in led.items():
            self._follow(token, run)

    def _follow(self, token: str, run: LedRun) -> None:
        ended = self._ended.get(token)
        if ended is None:
            ended = self._ended[token] = asyncio.Event()
            if run.task and not os.path.exists(run.file(_SENT_NAME)):
                task = asyncio.get_running_loop().create_task(self._ship(token, run, ended))
                self._tasks[token] = task
        if run.over:
            ended.set()

    async def sent(self) -> None:
        """Until all logs of runs that are over have been sent."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ship(self, token: str, run: LedRun, ended: asyncio.Event) -> None:
        send = partial(self._send, token, run)
        others_sent = asyncio.Event()

        async def ship_others() -> None:
            await ship_logs(RunLogFiles(run.directory), send, ended)
            others_sent.set()

        launcher = LogShipper(requests=1)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(ship_others())
                group.create_task(ship_logs(LauncherLog(run.file("log")), send, others_sent, shipper=launcher))
        except* NotFound as errors:
            _log.warning("logs of a run are not sent token=%s reason=%s", token, errors.exceptions[0])
        try:
            write_private_file(run.file(_SENT_NAME), b"")
        except FireflyerError as error:  # the next agent asks the store
            _log.warning("it is not written down that logs were sent token=%s reason=%s", token, error)

    async def _send(self, token: str, run: LedRun, message: LogChunk | LogEnd) -> LogAnswer:
        async with self._calls:
            leader = self._leader
            if leader is None:
                raise Unreachable("no manager is reached")
            if isinstance(message, LogChunk):
                append = AppendLog(task=run.task, run=run.run, run_token=token, chunk=message)
                return await leader.call(APPEND_LOG, append, _CALL_NS)
            end = EndLog(task=run.task, run=run.run, run_token=token, end=message)
            return await leader.call(END_LOG, end, _CALL_NS)
