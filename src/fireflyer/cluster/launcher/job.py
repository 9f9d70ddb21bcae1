"""One job as the launcher's process sees it: feeds the gang machine and performs its effects.

Events are handled one at a time, in the order in which they came, and the effects of one before the next is looked at;
an effect that fails at once (the event log cannot be written) becomes an event behind those that wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

from fireflyer.base.errors import FireflyerError, InvariantViolation, UsageError
from fireflyer.base.events import AttemptFailed, AttemptStarted, JobEvent, Logged, Suspended
from fireflyer.base.launch import STDERR, STDOUT, RankEnvironment
from fireflyer.base.node_counters import MAX_PEERS, PEERS_NAME
from fireflyer.base.rank_layout import RankLayout
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.blame import Failure
from fireflyer.cluster.core.gang import TICK_NS, Gang
from fireflyer.cluster.core.messages import (
    AskPoints,
    AttemptPrepared,
    Begin,
    CheckNode,
    Effect,
    Event,
    Finish,
    Inject,
    KillNode,
    Log,
    NameHorizon,
    PrepareAttempt,
    PrepareFailed,
    ShutDownSupervisor,
    StartRanks,
    StartSupervisor,
    StopRanks,
    StopRequested,
    StorageFailed,
    SupervisorGone,
    SupervisorLost,
    SuspendAsked,
    Tick,
)
from fireflyer.cluster.launcher.checks import command_of
from fireflyer.cluster.launcher.collected import CollectedFiles, CollectedLogs
from fireflyer.cluster.launcher.control import ControlService
from fireflyer.cluster.launcher.event_log import EventLog
from fireflyer.cluster.launcher.machines import Machine
from fireflyer.cluster.launcher.places import Places
from fireflyer.cluster.launcher.whole_life import WholeLife
from fireflyer.cluster.schema.job import Fault, JobSpec, RankLine, safe_name
from fireflyer.cluster.schema.wire import (
    Break,
    Check,
    CollectPoints,
    Command,
    FindPort,
    PortFound,
    RankToStart,
    SetHorizon,
    ShutDown,
    Start,
    SupervisorConfig,
)
from fireflyer.runtime.address import Address
from fireflyer.runtime.clock import MonotonicClock
from fireflyer.runtime.driver import InlineDriver
from fireflyer.runtime.processes.guarded import child_environment
from fireflyer.runtime.store import StoreService

__all__ = ["SECRET_NAME", "Job"]

_log = logging.getLogger(__name__)
SECRET_NAME = "node-secret"  # noqa: S105
_STREAM_NAME = re.compile(r"attempt-([0-9]+)/rank-([0-9]+)\.(stdout|stderr)")
_LAYOUTS_KEPT = 8
_T = TypeVar("_T")


class Job:
    """Made by `run_job`, which owns what is given to it."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        logs_dir: str,
        secret_file: str,
        log: EventLog,
        places: Places,
        on_entry: Callable[[Logged], None],
        on_line: Callable[[RankLine], None],
        on_asks: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.gang = Gang(spec)
        self.logs = CollectedLogs(
            self._log_path,
            on_error=lambda reason: self.feed(StorageFailed(reason)),
            logs_dir=logs_dir,
            most_bytes=spec.logs_bytes,
        )
        self.control = ControlService(
            feed=self.feed,
            on_line=_harmless(on_line),
            on_port=self._on_port,
            on_asks=on_asks,
            local_rank=self._local_rank,
            logs=self.logs,
            files=CollectedFiles(log.directory),
        )
        self.whole_life = WholeLife(log.directory, spec.whole_life_state, self.feed)
        self.nodes = places.make_nodes(self.feed, self.control.was_up)
        self._machines = places.machines
        self._logs_dir = logs_dir
        self._secret_file = secret_file
        self._event_log = log
        self._on_entry = _harmless(on_entry)
        self._clock = MonotonicClock()
        self._started_ns = self._clock.now_ns()
        self._driver: InlineDriver[Event, Effect] = InlineDriver(self.gang, self._perform)
        self._control_port = 0
        self._store: StoreService | None = None
        self._port = 0
        self._layouts: dict[int, RankLayout] = {}
        """By attempt, of the last ones: what their ranks have printed may come later."""
        self._stream_id = places.job_token[:8]
        self._tasks: set[asyncio.Task[None]] = set()
        self._finish: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    async def run(self, port: int, store: StoreService) -> Finish:
        """The whole job, from the first supervisor's start to the end of the last. `port`: of the control service."""
        self._control_port, self._store = port, store
        ticker = asyncio.get_running_loop().create_task(self._tick())
        try:
            self.feed(Begin(time.time()))
            return await self._finish
        finally:
            for task in (ticker, *self._tasks):
                task.cancel()
            await asyncio.wait([ticker, *self._tasks])
            await self.logs.close()

    def stop(self, number: int) -> None:
        """A signal has come."""
        self.feed(StopRequested(number))

    def suspend(self) -> None:
        """The ranks are to save and to leave."""
        self.feed(SuspendAsked())

    def feed(self, event: Event) -> None:
        try:
            self._driver.feed(event)
        except Exception as error:
            _log.exception("internal error in the launcher")
            if not self._finish.done():
                bug = InvariantViolation(f"internal error in the launcher: {type(error).__name__}: {error}")
                self._finish.set_exception(bug)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_NS / SECOND)
            self.feed(Tick())

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Log(event):
                self._write(event)
            case StartSupervisor(node, incarnation, host):
                self._start_supervisor(node, incarnation, host)
            case KillNode(node, incarnation):
                self.control.revoke(node, incarnation)
                self.nodes.kill(node, incarnation)
            case PrepareAttempt(attempt):
                self._prepare(attempt)
            case Inject(fault):
                self._inject(fault)
            case Finish():
                if not self._finish.done():
                    self._finish.set_result(effect)
            case _:
                self._tell(effect.node, effect.incarnation, self._command(effect))

    def _command(
        self, effect: StartRanks | StopRanks | AskPoints | NameHorizon | CheckNode | ShutDownSupervisor
    ) -> Command:
        """What its supervisor is told."""
        match effect:
            case StartRanks(node, _, attempt):
                return self._start_command(node, attempt)
            case StopRanks(stop=stop):
                return stop
            case AskPoints(attempt=attempt):
                return CollectPoints(attempt)
            case NameHorizon(attempt=attempt, horizon=horizon):
                return SetHorizon(attempt, horizon)
            case CheckNode(attempt=attempt, failure=failure):
                return self._check_command(attempt, failure)
            case ShutDownSupervisor():
                return ShutDown()

    def _start_supervisor(self, node: int, incarnation: int, host: int) -> None:
        machine = self._machines.get(host)
        if machine is None:
            self.feed(SupervisorGone(node, incarnation, f"{self.spec.hosts[host]} has not joined"))
            return
        self.control.expect(node, incarnation)
        self.nodes.start(machine, self._supervisor_config(machine, node, incarnation))

    def _write(self, event: JobEvent) -> None:
        entry = Logged(self._clock.now_ns() - self._started_ns, event)
        try:
            self._event_log.append(entry)
        except FireflyerError as error:
            self._driver.feed(StorageFailed(str(error)))
        if isinstance(event, AttemptStarted | AttemptFailed | Suspended):
            self._spawn(self._sync())
        self._on_entry(entry)

    async def _sync(self) -> None:
        try:
            await asyncio.to_thread(self._event_log.sync)
        except FireflyerError as error:
            self.feed(StorageFailed(str(error)))

    def _prepare(self, attempt: int) -> None:
        """No rank is alive now, so whatever is in the store is of the past. The port is to be free where rank 0 is."""
        self.control.forget_reporters()
        if self._store is not None:
            self._store.delete_prefix("")
        self._port = 0
        self._layouts[attempt] = self.gang.layout
        self._layouts.pop(attempt - _LAYOUTS_KEPT, None)
        self._tell(0, self.gang.nodes[0].incarnation, FindPort(attempt, self.spec.master_port, self.spec.ports))

    def _on_port(self, found: PortFound) -> None:
        if found.attempt == self.gang.attempt and found.port:
            self._port = found.port
            self.feed(AttemptPrepared(found.attempt))
        else:
            self.feed(PrepareFailed(found.attempt, found.reason))

    def _tell(self, node: int, incarnation: int, command: Command) -> None:
        member = self.control.member(node, incarnation)
        if member is None:
            self.feed(SupervisorLost(node, incarnation, "it already counts as lost"))
        else:
            member.tell(command)

    def _inject(self, fault: Fault) -> None:
        """Breaks what the fault says, without a word to the gang."""
        layout = self.gang.layout
        whole = fault.kind == "kill-node"
        if fault.target >= (layout.nodes if whole else layout.world_size):
            return  # of a job that has begun smaller than it may be
        node = fault.target if whole else layout.node_of(fault.target)
        ranks = tuple(layout.ranks(node)) if whole else (fault.target,)
        member = self.control.current(node)
        if member is not None:
            member.tell(Break(ranks, whole))

    def _supervisor_config(self, machine: Machine, node: int, incarnation: int) -> SupervisorConfig:
        timeouts = self.spec.timeouts
        return SupervisorConfig(
            launcher=self._control_address(machine),
            secret_file=self._secret_of(machine),
            node=node,
            incarnation=incarnation,
            heartbeat_ns=timeouts.heartbeat_ns,
            logs_dir=self._logs_dir if machine.shared else "",
            run_dir=machine.directory,
            lease_ns=timeouts.lease_ns if self.spec.hosts else 0,
            logs_bytes=self.spec.logs_bytes if machine.shared else 0,
        )

    def _control_address(self, machine: Machine) -> str:
        return str(Address(machine.launcher, self._control_port))

    def _secret_of(self, machine: Machine) -> str:
        return self._secret_file if machine.shared else os.path.join(machine.directory, SECRET_NAME)

    def _start_command(self, node: int, attempt: int) -> Start:
        shared = self._machines[self.gang.nodes[node].host].shared
        ranks = tuple(
            RankToStart(
                rank,
                self._rank_environment(node, local, attempt),
                self._stream_file(node, local, attempt, STDOUT, shared),
                self._stream_file(node, local, attempt, STDERR, shared),
            )
            for local, rank in enumerate(self.gang.layout.ranks(node))
        )
        return Start(attempt, command_of(self.spec), ranks)

    def _check_command(self, attempt: int, failure: Failure) -> Check:
        directory = f"{self._logs_dir}/attempt-{attempt}"
        environment = {
            **self.spec.env,
            "FF_RUN_DIR": os.path.abspath(self.spec.run_dir),
            "FF_FAILURE_ATTEMPT": str(attempt),
            "FF_FAILURE_NODE": str(failure.node),
            "FF_FAILURE_RANK": str(failure.rank),
            "FF_FAILURE_EXIT_CODE": str(failure.exit_code),
            "FF_FAILURE_KIND": failure.kind,
            "FF_FAILURE_REASON": failure.reason,
            "FF_FAILURE_LOG": f"{directory}/rank-{failure.rank}.log",
        }
        own = self.gang.nodes[failure.node].host
        others = [node.host for node in self.gang.members if node.host != own]
        peers = [self.spec.listeners.get(self.spec.hosts[host], "") for host in others[:MAX_PEERS] if self.spec.hosts]
        if any(peers):
            environment[PEERS_NAME] = ",".join(filter(None, peers))
        log = f"{directory}/rank-{failure.rank}.check.log"
        return Check(attempt, self.spec.on_failure, environment, log, self.spec.on_failure_limit_ns)

    def _stream_file(self, node: int, local_rank: int, attempt: int, stream: int, shared: bool) -> str:
        """torchrun's layout; each of its agents has a directory of its own. A machine that does not share the directory
        sends the stream under a name, see `_log_path`."""
        spec = self.spec
        if not spec.stream_dir or not spec.stream_files[local_rank] & stream:
            return ""
        name = "stdout.log" if stream == STDOUT else "stderr.log"
        if not shared:
            rank = self._layouts[attempt].ranks(node)[local_rank]
            return f"attempt-{attempt}/rank-{rank}.{name.removesuffix('.log')}"
        supervisor = f"{safe_name(spec.name)}_{self._stream_id}" + (f"_node{node}" if node else "")
        return f"{os.path.abspath(spec.stream_dir)}/{supervisor}/attempt_{attempt}/{local_rank}/{name}"

    def _log_path(self, name: str) -> str:
        """The file for what a machine sends under a name, as `LogBytes` checks it. Raises `UsageError`."""
        match = _STREAM_NAME.fullmatch(name)
        if match is None:
            return f"{self._logs_dir}/{name}"
        attempt, rank = int(match[1]), int(match[2])
        layout = self._layouts.get(attempt)
        path = ""
        if layout is not None and rank < layout.world_size:
            stream = STDOUT if match[3] == "stdout" else STDERR
            path = self._stream_file(layout.node_of(rank), layout.local_rank(rank), attempt, stream, shared=True)
        if not path:
            raise UsageError(f"no file was asked for {name}")
        return path

    def _local_rank(self, attempt: int, rank: int) -> int:
        """0 for a rank that the attempt does not have: another supervisor's word is not trusted so far."""
        layout = self._layouts.get(attempt)
        return layout.local_rank(rank) if layout is not None and 0 <= rank < layout.world_size else 0

    def _rank_environment(self, node: int, local_rank: int, attempt: int) -> dict[str, str]:
        spec = self.spec
        layout = self.gang.layout
        rank = layout.ranks(node)[local_rank]
        machine = self._machines[self.gang.nodes[node].host]
        env = RankEnvironment(
            rank=rank,
            world_size=layout.world_size,
            local_rank=local_rank,
            local_world_size=layout.counts[node],
            node=node,
            nodes=layout.nodes,
            node_ranks="" if layout.even else str(layout),
            min_nodes=spec.least_nodes if spec.elastic else None,
            max_nodes=spec.nodes if spec.elastic else None,
            master_addr=self._machines[self.gang.nodes[0].host].address,
            master_port=self._port,
            attempt=attempt,
            max_restarts=spec.max_restarts,
            job=spec.name,
            role=spec.role,
            error_file=f"{self._logs_dir}/attempt-{attempt}/rank-{rank}.error.json",
            control=self._control_address(machine),
            secret_file=self._secret_of(machine),
            run_dir=machine.directory,
            suspend_grace_ns=spec.suspend_grace_ns,
            tune=spec.tune,
            transport=spec.transport,
            address=machine.addresses if machine.chosen else None,
            host=machine.name if spec.remote.name_hosts else None,
            ports=spec.ports,
        )
        return {**self._defaults(machine, layout.counts[node]), **spec.env, **env.to_mapping()}

    def _defaults(self, machine: Machine, ranks: int) -> dict[str, str]:
        """What torchrun sets where the user did not, on a machine with so many ranks; and the interface that was
        chosen, for gloo and NCCL."""
        inherited = child_environment({})
        values = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        values["PYTHONFAULTHANDLER"] = "1"  # a signal then shows the stacks of a process that hangs or crashes
        if ranks > 1:
            values["OMP_NUM_THREADS"] = "1"
        if machine.interface:
            values["GLOO_SOCKET_IFNAME"] = machine.interfaces
            values["NCCL_SOCKET_IFNAME"] = f"={machine.interfaces}"  # else each name that begins so
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
