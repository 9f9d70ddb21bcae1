"""The supervisor of a node.

It holds one connection to the launcher and ends when that is lost: its guard then kills what it started. Several tasks
share it: heartbeats, fetching commands, telling what happened to ranks (in order, one call at a time), and sending what
they printed.

When the last rank of an attempt has ended, whatever they left behind on the node is killed, their pipes are read to the
end and the lines delivered; only then does the supervisor tell that the attempt is gone from here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from fireflyer.base.errors import FireflyerError, Unreachable
from fireflyer.base.node_counters import NodeCounters
from fireflyer.base.suspension import NodeCells
from fireflyer.base.units import SECOND
from fireflyer.cluster.schema.wire import (
    CHECKED,
    EXITED,
    GONE,
    HEARTBEAT,
    HELLO,
    LOG_ERROR,
    NEXT,
    OUTPUT,
    POINTS,
    PORT,
    RENEW,
    STARTED,
    Break,
    Check,
    CollectPoints,
    Command,
    Done,
    FindPort,
    Gone,
    Heartbeat,
    LogError,
    Next,
    Points,
    PortFound,
    RankEnd,
    RankToStart,
    SetHorizon,
    ShutDown,
    Start,
    Started,
    Stop,
    SupervisorConfig,
    SupervisorHello,
)
from fireflyer.cluster.supervisor.lease import Lease
from fireflyer.cluster.supervisor.log_sender import LogSender
from fireflyer.cluster.supervisor.node_check import is_check, run_check
from fireflyer.cluster.supervisor.output import Outbox
from fireflyer.cluster.supervisor.rank import RankProcess
from fireflyer.cluster.supervisor.run_files import RunFileCopies
from fireflyer.identity.secrets import load_secret
from fireflyer.runtime.log_writer import LogLimit, LogWriter, RankLogs
from fireflyer.runtime.master_port import port_is_free, reserve_any_port, reserve_free_port, wait_for_port
from fireflyer.runtime.node_counters import read_counters
from fireflyer.runtime.port_search import reserve_port
from fireflyer.runtime.processes.guarded import become_subreaper, descendants, reap_orphans
from fireflyer.runtime.rpc import Method, NodeCredential, RpcClient
from fireflyer.runtime.suspension_memory import SharedCells, memory_barrier

__all__ = ["run_supervisor"]

_log = logging.getLogger(__name__)
CONNECT_NS = 20 * SECOND
CALL_NS = 24 * 3600 * SECOND
"""A launcher that is alive may be stopped (Ctrl-Z) for long; one that is dead is told by its connection."""
PIPES_S = 2.0
"""After the last process is gone its pipes are at their end; waiting longer would be waiting for nothing."""
SWEEP_S = 5.0
_KEEP_S = 1.0
"""How often new files of the run directory are looked for."""
_MAX_CHECK_LOG_BYTES = 1 << 20


async def run_supervisor(config: SupervisorConfig) -> int:
    """Serves one launcher until told to shut down (0) or until it is lost (1)."""
    become_subreaper()
    credential = NodeCredential(load_secret(config.secret_file), f"supervisor {config.node}.{config.incarnation}")
    client = await RpcClient.connect(config.launcher, credential, CONNECT_NS)
    lease = Lease(config.lease_ns)
    supervisor = Supervisor(config, client, lease)
    try:
        return await supervisor.run()
    finally:
        supervisor.close()
        await client.close()


class Supervisor:
    def __init__(self, config: SupervisorConfig, client: RpcClient, lease: Lease) -> None:
        self._config = config
        self._client = client
        self._lease = lease
        self._port = 0
        """A MASTER_PORT that was found free here."""
        self._reservation: socket.socket | None = None
        """Of that port."""
        self._ranks: dict[int, RankProcess] = {}
        self._attempt = -1
        self._memory: list[SharedCells] = []
        """Of each rank of the attempt, in their order."""
        self._cells = NodeCells(())
        self._holding_up: list[str] = []
        self._outbox = Outbox(full=lambda: self._pause("launcher"), free=lambda: self._resume("launcher"))
        self._writer: RankLogs = (
            LogWriter(
                full=lambda: self._pause("disk"),
                free=lambda: self._resume("disk"),
                on_log_error=self._on_log_error,
                limit=LogLimit(config.logs_dir, config.logs_bytes) if config.logs_bytes else None,
            )
            if config.logs_dir
            else LogSender(client, full=lambda: self._pause("log"), free=lambda: self._resume("log"))
        )
        self._news: asyncio.Queue[tuple[Method[Any, Any], Any]] = asyncio.Queue()
        self._counters: asyncio.Task[NodeCounters] | None = None
        """Of the node, as they were when the ranks of the attempt were started."""
        self._checking: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.TimerHandle | None = None
        self._finding: asyncio.Task[None] | None = None
        self._files = None if config.logs_dir else RunFileCopies(client, config.run_dir)

    async def run(self) -> int:
        config = self._config
        asked_ns = self._lease.now_ns()
        await self._client.call(HELLO, SupervisorHello(config.node, config.incarnation, os.getpid()), CALL_NS)
        self._lease.granted(asked_ns)
        commands = asyncio.create_task(self._obey())
        others = [
            asyncio.create_task(self._heartbeat()),
            asyncio.create_task(self._tell()),
            asyncio.create_task(self._outbox.send_all(self._send_output)),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._renew()),
            asyncio.create_task(self._keep_files()),
            asyncio.create_task(self._writer.run()),
            asyncio.create_task(self._fail()),
        ]
        try:
            done, _ = await asyncio.wait([commands, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    _log.error("supervisor ends on an error node=%d reason=%s", config.node, error)
                    return 1
            return 0
        finally:
            for task in (commands, *others):
                task.cancel()
            await asyncio.wait([commands, *others])

    def close(self) -> None:
        self.kill()
        self._give_port_up()
        self._close_memory()
        self._writer.stop()

    def kill(self) -> None:
        for rank in self._ranks.values():
            rank.signal(signal.SIGKILL)

    # -- the tasks -------------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            await self._client.notify(HEARTBEAT, Heartbeat(self._cells.asks()))
            reap_orphans(lambda pid: is_check(pid) or any(rank.pid == pid for rank in self._ranks.values()))
            await asyncio.sleep(self._config.heartbeat_ns / SECOND)

    async def _renew(self) -> None:
        """Asks in time for several tries; what is not answered is not granted, and the guard ends us. A launcher that
        refuses has given the node up."""
        lease = self._lease
        while lease.limited:
            await asyncio.sleep(lease.period_s)
            asked_ns = lease.now_ns()
            await self._client.call(RENEW, Done(), CALL_NS)
            lease.granted(asked_ns)
        await asyncio.Event().wait()

    async def _keep_files(self) -> None:
        """Beside the lease: a file may take long to send."""
        while self._files is not None:
            await self._files.keep()
            await asyncio.sleep(_KEEP_S)
        await asyncio.Event().wait()

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
        if self._files is not None:
            await self._files.fetch()
        while True:
            answer = await self._client.call(NEXT, Next(after), CALL_NS)
            after = answer.number
            if isinstance(answer.command, ShutDown):
                await self._outbox.drained()
                if self._files is not None:
                    await asyncio.to_thread(self._files.remove)
                return
            if answer.command is not None:
                await self._perform(answer.command)

    # -- commands ----------------------------------------------------------------------------------------------------

    async def _perform(self, command: Command) -> None:
        if isinstance(command, Start):
            await self._start(command)
        elif isinstance(command, Check):
            self._checking = asyncio.create_task(self._check(command))
            self._checking.add_done_callback(self._cleaned)
        elif isinstance(command, Stop) and command.attempt == self._attempt and self._running():
            self._stop(command)  # a timer set when all have ended would strike the next attempt
        elif isinstance(command, Break):
            self._break(command)
        elif isinstance(command, CollectPoints):
            await self._collect_points(command)
        elif isinstance(command, SetHorizon) and command.attempt == self._attempt:
            self._cells.set_horizon(command.horizon)
        elif isinstance(command, FindPort):
            self._finding = asyncio.get_running_loop().create_task(self._find_port(command))
            self._finding.add_done_callback(self._cleaned)

    async def _collect_points(self, command: CollectPoints) -> None:
        if command.attempt == self._attempt:
            self._cells.hold(time.monotonic_ns())
            exact = await asyncio.to_thread(memory_barrier)
            self._news.put_nowait((POINTS, Points(command.attempt, self._cells.points(exact=exact))))

    def _share_memory(self, ranks: int) -> None:
        """New cells for each rank of an attempt, which no process of an earlier one has."""
        self._close_memory()
        self._memory = [SharedCells.create() for _ in range(ranks)]
        self._cells = NodeCells([memory.cells for memory in self._memory])

    def _close_memory(self) -> None:
        self._cells = NodeCells(())
        for memory in self._memory:
            memory.close()
        self._memory = []

    def _break(self, command: Break) -> None:
        """As from outside: the ranks count as not told."""
        for number in command.ranks:
            rank = self._ranks.get(number)
            if rank is not None and rank.pid and rank.end is None:
                os.kill(rank.pid, signal.SIGKILL)
        if command.supervisor:
            os.kill(os.getpid(), signal.SIGKILL)

    async def _find_port(self, command: FindPort) -> None:
        self._port = 0
        self._give_port_up()
        try:
            if command.port == 0:
                if command.ports is None:
                    advice = "choose one with --master-port"
                    self._port, self._reservation = reserve_any_port(random.SystemRandom(), advice)
                else:
                    self._port, self._reservation = reserve_free_port(command.ports)
                found = PortFound(command.attempt, self._port)
            elif await self._wait_for_port(command):
                found = PortFound(command.attempt, command.port)
            else:
                reason = "was taken by another process; choose another one, or leave it out for a free one"
                found = PortFound(command.attempt, 0, f"--master-port {command.port} {reason}")
        except FireflyerError as error:
            found = PortFound(command.attempt, 0, str(error)[:1000])
        self._news.put_nowait((PORT, found))

    async def _wait_for_port(self, command: FindPort) -> bool:
        """Whether the port that the user gave is free. In a range it is reserved, lest another rank listens there."""
        free = await wait_for_port(command.port)
        if free and command.ports is not None:
            self._reservation = reserve_port(command.port)
            return self._reservation is not None
        return free

    def _give_port_up(self) -> None:
        if self._reservation is not None:
            self._reservation.close()
            self._reservation = None

    async def _check(self, command: Check) -> None:
        counters = await self._counters if self._counters is not None else None
        if self._files is None:
            answer = await run_check(command, counters)
        else:
            log = os.path.join(self._config.run_dir, os.path.basename(command.log))
            environment = {**command.environment, "FF_RUN_DIR": self._config.run_dir}
            answer = await run_check(msgspec.structs.replace(command, log=log, environment=environment), counters)
            name = f"attempt-{command.attempt}/{os.path.basename(command.log)}"
            self._writer.write(name, await asyncio.to_thread(_beginning, log))
            await self._writer.drained()
        if not self._running():  # one that ended too late, when the launcher had given it up
            _kill_descendants()
        self._news.put_nowait((CHECKED, answer))

    async def _start(self, command: Start) -> None:
        if self._running():
            raise Unreachable(f"told to start attempt {command.attempt} while attempt {self._attempt} is running")
        self._attempt = command.attempt
        self._counters = asyncio.create_task(asyncio.to_thread(read_counters))
        self._share_memory(len(command.ranks))
        self._ranks = {plan.rank: self._new_rank(command.attempt, plan.rank, n) for n, plan in enumerate(command.ranks)}
        for plan, memory in zip(command.ranks, self._memory, strict=True):
            await asyncio.sleep(0)  # hundreds take seconds to start, in which heartbeats must go out
            rank = self._ranks[plan.rank]
            rank.start(command.command, self._as_here(plan, memory), self._path(command.attempt, plan.rank, "log"))
            if rank.pid:
                self._news.put_nowait((STARTED, Started(command.attempt, plan.rank, rank.pid)))
            if self._holding_up:
                rank.pause()

    def _as_here(self, plan: RankToStart, memory: SharedCells) -> RankToStart:
        """The launcher does not know all paths and addresses that hold on this machine."""
        config = self._config
        here = {"FF_CONTROL": config.launcher, "FF_SECRET_FILE": config.secret_file, "FF_RUN_DIR": config.run_dir}
        here["FF_SUSPENSION"] = memory.path
        if self._files is not None:
            here["TORCHELASTIC_ERROR_FILE"] = f"{config.run_dir}/rank-{plan.rank}.error-{self._attempt}.json"
        return msgspec.structs.replace(plan, environment={**plan.environment, **here})

    def _running(self) -> bool:
        return any(rank.end is None for rank in self._ranks.values())

    def _new_rank(self, attempt: int, rank: int, local_rank: int) -> RankProcess:
        cells = self._cells
        return RankProcess(
            attempt,
            rank,
            writer=self._writer,
            on_line=self._outbox.put,
            on_log_error=self._on_log_error,
            on_exit=self._on_exit,
            has_left=lambda: cells.has_left(local_rank),
        )

    def _path(self, attempt: int, rank: int, kind: str) -> str:
        return f"{self._config.logs_dir}/attempt-{attempt}/rank-{rank}.{kind}"

    def _stop(self, command: Stop) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        if command.settle_ns > 0:
            loop = asyncio.get_running_loop()
            self._stopping = loop.call_later(command.settle_ns / SECOND, self._end_ranks, command)
        else:
            self._end_ranks(command)

    def _end_ranks(self, command: Stop) -> None:
        self._cells.release()
        for rank in self._ranks.values():
            taken = command.stacks and rank.take_stacks(self._path(command.attempt, rank.rank, "stacks"))
            if not taken:
                rank.signal(command.signal)
        self._stopping = asyncio.get_running_loop().call_later(command.grace_ns / SECOND, self.kill)

    # -- what ranks do ---------------------------------------------------------------------------------------------

    def _on_log_error(self, reason: str) -> None:
        self._news.put_nowait((LOG_ERROR, LogError(reason[:1000])))

    def _on_exit(self, end: RankEnd) -> None:
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
        reap_orphans(is_check)
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
        if self._files is not None:
            await self._files.keep()
        ends = tuple(rank.end for rank in ranks if rank.end is not None)
        self._news.put_nowait((GONE, Gone(ends[0].attempt, ends, self._is_port_taken(ends))))

    def _is_port_taken(self, ends: tuple[RankEnd, ...]) -> bool:
        """Rank 0 may have failed because somebody took its port; nothing of ours is left that could hold it."""
        failed = any(end.rank == 0 and end.exit_code and not end.told for end in ends)
        return failed and self._port > 0 and not port_is_free(self._port)

    def _pause(self, why: str) -> None:
        self._holding_up.append(why)
        for rank in self._ranks.values():
            rank.pause()

    def _resume(self, why: str) -> None:
        self._holding_up.remove(why)
        if not self._holding_up:
            for rank in self._ranks.values():
                rank.resume()


def _beginning(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_CHECK_LOG_BYTES)
    except OSError:
        return b""


def _kill_descendants() -> bool:
    """Whether there were any."""
    pids = descendants(os.getpid())
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    reap_orphans(is_check)
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
