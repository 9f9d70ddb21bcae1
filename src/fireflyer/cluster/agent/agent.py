"""The agent of a node.

It holds one connection to the launcher and ends when that is lost: its guard then kills what it started. Four tasks
share it: heartbeats, fetching commands, telling what happened to ranks (in order, one call at a time), and sending what
they printed.

When the last rank of an attempt has ended, whatever they left behind on the node is killed, their pipes are read to the
end and the lines delivered; only then does the agent tell that the attempt is gone from here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from fireflyer.base.errors import FireflyerError, Unreachable
from fireflyer.base.units import SECOND
from fireflyer.cluster.agent.log_writer import LogWriter
from fireflyer.cluster.agent.output import Outbox
from fireflyer.cluster.agent.rank import RankProcess
from fireflyer.cluster.schema.wire import (
    EXITED,
    GONE,
    HEARTBEAT,
    HELLO,
    LOG_ERROR,
    NEXT,
    OUTPUT,
    STARTED,
    AgentConfig,
    AgentHello,
    Command,
    Done,
    Exited,
    Gone,
    LogError,
    Next,
    ShutDown,
    Start,
    Started,
    Stop,
)
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.processes.guarded import become_subreaper, descendants, reap_orphans
from fireflyer.runtime.rpc import Method, NodeCredential, RpcClient

__all__ = ["run_agent"]

_log = logging.getLogger(__name__)
CONNECT_NS = 20 * SECOND
CALL_NS = 24 * 3600 * SECOND
"""A launcher that is alive may be stopped (Ctrl-Z) for long; one that is dead is told by its connection."""
PIPES_S = 2.0
"""After the last process is gone its pipes are at their end; waiting longer would be waiting for nothing."""
SWEEP_S = 5.0


async def run_agent(config: AgentConfig) -> int:
    """Serves one launcher until told to shut down (0) or until it is lost (1)."""
    become_subreaper()
    credential = NodeCredential(load_secret(config.secret_file), f"agent {config.node}.{config.incarnation}")
    client = await RpcClient.connect(config.launcher, credential, CONNECT_NS)
    agent = Agent(config, client)
    try:
        return await agent.run()
    finally:
        agent.close()
        await client.close()


class Agent:
    def __init__(self, config: AgentConfig, client: RpcClient) -> None:
        self._config = config
        self._client = client
        self._ranks: dict[int, RankProcess] = {}
        self._attempt = -1
        self._holding_up: list[str] = []
        self._outbox = Outbox(full=lambda: self._pause("launcher"), free=lambda: self._resume("launcher"))
        self._writer = LogWriter(
            full=lambda: self._pause("disk"), free=lambda: self._resume("disk"), on_log_error=self._on_log_error
        )
        self._news: asyncio.Queue[tuple[Method[Any, Any], Any]] = asyncio.Queue()
        self._cleaning: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        config = self._config
        await self._client.call(HELLO, AgentHello(config.node, config.incarnation, os.getpid()), CALL_NS)
        commands = asyncio.create_task(self._obey())
        others = [
            asyncio.create_task(self._heartbeat()),
            asyncio.create_task(self._tell()),
            asyncio.create_task(self._outbox.send_all(self._send_output)),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._fail()),
        ]
        try:
            done, _ = await asyncio.wait([commands, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    _log.error("agent ends on an error node=%d reason=%s", config.node, error)
                    return 1
            return 0
        finally:
            for task in (commands, *others):
                task.cancel()
            await asyncio.wait([commands, *others])

    def close(self) -> None:
        self.kill()
        self._writer.stop()

    def kill(self) -> None:
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)

    # -- the four tasks --------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            await self._client.notify(HEARTBEAT, Done())
            reap_orphans(lambda pid: any(rank.pid == pid for rank in self._ranks.values()))
            await asyncio.sleep(self._config.heartbeat_ns / SECOND)

    async def _tell(self) -> None:
        while True:
            method, news = await self._news.get()
            await self._client.call(method, news, CALL_NS)

    async def _watch(self) -> None:
        raise await self._client.wait_lost()

    async def _fail(self) -> None:
        await self._failed

    async def _send_output(self, output: Any) -> None:
        await self._client.call(OUTPUT, output, CALL_NS)

    async def _obey(self) -> None:
        after = 0
        while True:
            answer = await self._client.call(NEXT, Next(after), CALL_NS)
            after = answer.number
            if isinstance(answer.command, ShutDown):
                await self._outbox.drained()
                return
            if answer.command is not None:
                await self._perform(answer.command)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def _perform(self, command: Command) -> None:
        if isinstance(command, Start):
            await self._start(command)
        elif isinstance(command, Stop) and command.attempt == self._attempt and self._running():
            self._stop(command)  # a timer set when all have ended would strike the next attempt

    async def _start(self, command: Start) -> None:
        if self._running():
            raise Unreachable(f"told to start attempt {command.attempt} while attempt {self._attempt} is running")
        self._attempt = command.attempt
        self._ranks = {plan.rank: self._new_rank(command.attempt, plan.rank) for plan in command.ranks}
        for plan in command.ranks:
            await asyncio.sleep(0)  # hundreds take seconds to start, in which heartbeats must go out
            rank = self._ranks[plan.rank]
            rank.start(command.command, plan, self._log_path(command.attempt, plan.rank))
            if rank.pid:
                self._news.put_nowait((STARTED, Started(command.attempt, plan.rank, rank.pid)))
            if self._holding_up:
                rank.pause()

    def _running(self) -> bool:
        return any(rank.end is None for rank in self._ranks.values())

    def _new_rank(self, attempt: int, rank: int) -> RankProcess:
        return RankProcess(
            attempt,
            rank,
            writer=self._writer,
            on_line=self._outbox.put,
            on_log_error=self._on_log_error,
            on_exit=self._on_exit,
        )

    def _log_path(self, attempt: int, rank: int) -> str:
        return f"{self._config.logs_dir}/attempt-{attempt}/rank-{rank}.log"

    def _stop(self, command: Stop) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        if command.settle_ns > 0:
            loop = asyncio.get_running_loop()
            self._stopping = loop.call_later(command.settle_ns / SECOND, self._end_ranks, command)
        else:
            self._end_ranks(command)

    def _end_ranks(self, command: Stop) -> None:
        for rank in self._ranks.values():
            rank.signal(command.signal)
        self._stopping = asyncio.get_running_loop().call_later(command.grace_ns / SECOND, self.kill)

    # -- what ranks do ---------------------------------------------------------------------------------------------

    def _on_log_error(self, reason: str) -> None:
        self._news.put_nowait((LOG_ERROR, LogError(reason[:1000])))

    def _on_exit(self, end: Exited) -> None:
        self._news.put_nowait((EXITED, end))
        if not self._running():
            if self._stopping is not None:
                self._stopping.cancel()
                self._stopping = None
            self._cleaning = asyncio.get_running_loop().create_task(self._clean_up(list(self._ranks.values())))
            self._cleaning.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _clean_up(self, ranks: list[RankProcess]) -> None:
        for _ in range(2):  # in one look a process that changes its parent meanwhile can be missed
            await _until(lambda: not _kill_descendants(), SWEEP_S)
        reap_orphans(_nobody)
        try:
            async with asyncio.timeout(None if self._holding_up else PIPES_S):
                for rank in ranks:
                    await rank.closed()
        except TimeoutError:
            _log.warning("another process keeps a rank's output open, not logged any more node=%d", self._config.node)
        for rank in ranks:
            rank.close()
        await self._outbox.drained()
        await self._writer.drained()
        ends = tuple(rank.end for rank in ranks if rank.end is not None)
        self._news.put_nowait((GONE, Gone(ends[0].attempt, ends)))

    def _pause(self, why: str) -> None:
        self._holding_up.append(why)
        for rank in self._ranks.values():
            rank.pause()

    def _resume(self, why: str) -> None:
        self._holding_up.remove(why)
        if not self._holding_up:
            for rank in self._ranks.values():
                rank.resume()


def _nobody(_pid: int) -> bool:
    return False


def _kill_descendants() -> bool:
    """Whether there were any."""
    pids = descendants(os.getpid())
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    reap_orphans(_nobody)
    return bool(pids)


async def _until(condition: Callable[[], bool], limit_s: float) -> None:
    pause_s = 0.002
    try:
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
    except TimeoutError:
        raise FireflyerError(f"processes of the attempt still exist {limit_s:g} s after SIGKILL") from None
