"""One job as the launcher's process sees it: feeds the gang machine and performs its effects.

Events are handled one at a time, in the order in which they came, and the effects of one before the next is looked at;
an effect that fails at once (the event log cannot be written) becomes an event behind those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeVar

from fireflyer.base.errors import FireflyerError, InvariantViolation
from fireflyer.base.events import AttemptFailed, AttemptStarted, JobEvent, Logged
from fireflyer.base.launch import RankEnvironment
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.gang import TICK_NS, Gang
from fireflyer.cluster.core.messages import (
    AgentLost,
    AttemptPrepared,
    Begin,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    PrepareAttempt,
    PrepareFailed,
    RanksGone,
    ShutDownAgent,
    StartAgent,
    StartRanks,
    StopRanks,
    StopRequested,
    StorageFailed,
    Tick,
)
from fireflyer.cluster.launcher.checks import command_of
from fireflyer.cluster.launcher.control import ControlService
from fireflyer.cluster.launcher.event_log import EventLog
from fireflyer.cluster.launcher.local_nodes import LocalNodes, inject
from fireflyer.cluster.launcher.master_port import choose_port, port_is_free, wait_for_port
from fireflyer.cluster.schema.job import JobSpec, RankLine
from fireflyer.cluster.schema.wire import AgentConfig, Command, RankToStart, ShutDown, Start, Stop
from fireflyer.runtime.clock import MonotonicClock
from fireflyer.runtime.processes.guarded import child_environment
from fireflyer.runtime.store import StoreService

__all__ = ["MASTER_ADDR", "Job"]

_log = logging.getLogger(__name__)
MASTER_ADDR = "127.0.0.1"
_T = TypeVar("_T")


class Job:
    """Made by `run_job`, which owns what is given to it."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        job_token: str,
        logs_dir: str,
        secret_file: str,
        log: EventLog,
        on_entry: Callable[[Logged], None],
        on_line: Callable[[RankLine], None],
    ) -> None:
        self.spec = spec
        self.gang = Gang(spec)
        self.control = ControlService(feed=self.feed, on_line=_harmless(on_line))
        self.nodes = LocalNodes(job_token=job_token, logs_dir=logs_dir, feed=self.feed)
        self._logs_dir = logs_dir
        self._secret_file = secret_file
        self._event_log = log
        self._on_entry = _harmless(on_entry)
        self._clock = MonotonicClock()
        self._started_ns = self._clock.now_ns()
        self._events: deque[Event] = deque()
        self._handling = False
        self._address = ""
        self._store: StoreService | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._finish: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    async def run(self, address: str, store: StoreService) -> Finish:
        """The whole job, from the first agent's start to the end of the last."""
        self._address, self._store = address, store
        ticker = asyncio.get_running_loop().create_task(self._tick())
        try:
            self.feed(Begin(time.time()))
            return await self._finish
        finally:
            for task in (ticker, *self._tasks):
                task.cancel()
            await asyncio.wait([ticker, *self._tasks])

    def stop(self, number: int) -> None:
        """A signal has come."""
        self.feed(StopRequested(number))

    def feed(self, event: Event) -> None:
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._look_at(self._events.popleft())
                for effect in self.gang.handle(self._clock.now_ns(), event):
                    self._perform(effect)
        except Exception as error:
            _log.exception("internal error in the launcher")
            if not self._finish.done():
                bug = InvariantViolation(f"internal error in the launcher: {type(error).__name__}: {error}")
                self._finish.set_exception(bug)
        finally:
            self._handling = False

    def _look_at(self, event: Event) -> Event:
        """Rank 0 may have failed because its port was taken; with its node quiet, whoever holds it is a stranger."""
        if isinstance(event, RanksGone) and event.node == 0 and self.spec.master_port == 0:
            failed = any(end.rank == 0 and end.exit_code and not end.told for end in event.ends)
            if failed and self._port and not port_is_free(self._port):
                return RanksGone(event.node, event.incarnation, event.attempt, event.ends, port_taken=True)
        return event

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_NS / SECOND)
            self.feed(Tick())

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Log(event):
                self._write(event)
            case StartAgent(node, incarnation):
                self.control.expect(node, incarnation)
                self.nodes.start(self._agent_config(node, incarnation))
            case KillNode(node, incarnation):
                self.nodes.kill(node, incarnation)
            case PrepareAttempt(attempt):
                self._spawn(self._prepare(attempt))
            case StartRanks(node, incarnation, attempt):
                self._tell(node, incarnation, self._start_command(node, attempt))
            case StopRanks(node, incarnation, attempt, number, settle_ns, grace_ns):
                self._tell(node, incarnation, Stop(attempt, number, settle_ns, grace_ns))
            case ShutDownAgent(node, incarnation):
                self._tell(node, incarnation, ShutDown())
            case Inject(fault):
                rank_pids = self._rank_pids()
                inject(fault, self.control.current(fault.target), rank_pids)
            case Finish():
                if not self._finish.done():
                    self._finish.set_result(effect)

    def _write(self, event: JobEvent) -> None:
        entry = Logged(self._clock.now_ns() - self._started_ns, event)
        try:
            self._event_log.append(entry)
        except FireflyerError as error:
            self._events.append(StorageFailed(str(error)))
        if isinstance(event, AttemptStarted | AttemptFailed):
            self._spawn(self._sync())
        self._on_entry(entry)

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self._event_log.sync)
        except FireflyerError as error:
            self.feed(StorageFailed(str(error)))

    async def _prepare(self, attempt: int) -> None:
        """No rank is alive now, so whatever is in the store is of the past."""
        self.control.forget_reporters()
        if self._store is not None:
            self._store.delete_prefix("")
        try:
            if self.spec.master_port == 0:
                self._port = choose_port(random.SystemRandom())
            elif await wait_for_port(self.spec.master_port):
                self._port = self.spec.master_port
            else:
                self.feed(
                    PrepareFailed(
                        attempt,
                        f"--master-port {self.spec.master_port} was taken by another process; "
                        "choose another one, or leave it out for a free one",
                    )
                )
                return
        except FireflyerError as error:
            self.feed(PrepareFailed(attempt, str(error)))
            return
        self.feed(AttemptPrepared(attempt))

    def _tell(self, node: int, incarnation: int, command: Command) -> None:
        member = self.control.member(node, incarnation)
        if member is None:
            self.feed(AgentLost(node, incarnation, "it already counts as lost"))
        else:
            member.tell(command)

    def _rank_pids(self) -> dict[int, int]:
        pids: dict[int, int] = {}
        for node in range(self.spec.nodes):
            member = self.control.current(node)
            if member is not None:
                pids |= member.rank_pids
        return pids

    def _agent_config(self, node: int, incarnation: int) -> AgentConfig:
        return AgentConfig(
            launcher=self._address,
            secret_file=self._secret_file,
            node=node,
            incarnation=incarnation,
            heartbeat_ns=self.spec.timeouts.heartbeat_ns,
            logs_dir=self._logs_dir,
        )

    def _start_command(self, node: int, attempt: int) -> Start:
        per_node = self.spec.ranks_per_node
        ranks = tuple(
            RankToStart(node * per_node + local, self._rank_environment(node, local, attempt))
            for local in range(per_node)
        )
        return Start(attempt, command_of(self.spec), ranks)

    def _rank_environment(self, node: int, local_rank: int, attempt: int) -> dict[str, str]:
        spec = self.spec
        env = RankEnvironment(
            rank=node * spec.ranks_per_node + local_rank,
            world_size=spec.world_size,
            local_rank=local_rank,
            local_world_size=spec.ranks_per_node,
            node=node,
            nodes=spec.nodes,
            master_addr=MASTER_ADDR,
            master_port=self._port,
            attempt=attempt,
            max_restarts=spec.max_restarts,
            job=spec.name,
            control=self._address,
            secret_file=self._secret_file,
            run_dir=os.path.abspath(spec.run_dir),
            tune=spec.tune,
            transport=spec.transport,
        )
        return {**self._defaults(), **spec.env, **env.to_mapping()}

    def _defaults(self) -> dict[str, str]:
        """What torchrun sets where the user did not."""
        inherited = child_environment({})
        values = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        if self.spec.ranks_per_node > 1:
            values["OMP_NUM_THREADS"] = "1"
        values = {name: value for name, value in values.items() if name not in inherited}
        if self.spec.omp_num_threads is not None:
            values["OMP_NUM_THREADS"] = str(self.spec.omp_num_threads)
        return values

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _harmless(callback: Callable[[_T], None]) -> Callable[[_T], None]:
    """A display that breaks does not break the job; it is told once."""
    broken = False

    def call(argument: _T) -> None:
        nonlocal broken
        try:
            callback(argument)
        except Exception:
            if not broken:
                _log.exception("a callback of run_job raised, the job goes on callback=%r", callback)
            broken = True

    return call
