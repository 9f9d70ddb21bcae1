"""Performs what `core.runs` decides: records of runs, launchers, the lease file of the node.

The launcher of a run is started as guards are (`processes`), with the file of the lease. Its run directory is below the
agent's own, or, where it is another account's, below `accounts_dir`, which is root's: every part of the path is, so no
account can put another directory in its place. What the launcher leaves there is read as a stranger's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.errors import Aborted, FireflyerError, JobFailed, PermissionDenied, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.units import GIB, SECOND
from fireflyer.cluster.agent.account_files import read_account_file
from fireflyer.cluster.agent.accounts import Account, Accounts
from fireflyer.cluster.agent.guards import Guards
from fireflyer.cluster.agent.processes import LEASE_ENDED, DetachedProcesses, start_detached
from fireflyer.cluster.agent.records import AgentDirectory, GuardRecord, Leader
from fireflyer.cluster.agent.run_copies import Leaders, RunCopies
from fireflyer.cluster.agent.run_environments import RunEnvironments
from fireflyer.cluster.agent.start import Starting
from fireflyer.cluster.core.agent import End
from fireflyer.cluster.core.runs import (
    Begin,
    Changed,
    Effect,
    Event,
    ExecsLiving,
    GuardsLiving,
    KillLauncher,
    LauncherGone,
    LauncherUp,
    Left,
    OrdersHeard,
    RanksStarted,
    Refusal,
    Remember,
    Remembered,
    RememberLeader,
    Remove,
    Removed,
    RenewLease,
    RunRecord,
    RunsMachine,
    StartLauncher,
    StopGuards,
    SuspendLauncher,
    TerminateLauncher,
    Tick,
    WatchLauncher,
)
from fireflyer.cluster.objects.trees import remove_tree
from fireflyer.cluster.schema.runner import PROGRESS_NAME, RESULT_NAME, OpenedTicket, RunnerOrders, RunProgress
from fireflyer.cluster.schema.sync import EndedRun, LaunchOrder, Orders, RunOrder, RunStatus, Saving
from fireflyer.cluster.schema.tasks import Cause
from fireflyer.cluster.schema.tickets import open_launch
from fireflyer.runtime.clock import BootClock
from fireflyer.runtime.driver import InlineDriver
from fireflyer.runtime.processes.guarded import kill_marked

__all__ = ["DEFAULT_ACCOUNTS_DIR", "DEFAULT_LOGS_BYTES", "LedRun", "Runs"]

_log = logging.getLogger(__name__)
DEFAULT_ACCOUNTS_DIR: Final = "/var/lib/fireflyer/runs"
DEFAULT_LOGS_BYTES: Final = GIB
_COLLECT_NS: Final = 3600 * SECOND


class LedRun(NamedTuple):
    """A run whose launcher is or was on this node. `over`: nothing of it writes any more."""

    task: int
    run: int
    over: bool
    directory: str
    record: GuardRecord

    def file(self, name: str) -> str:
        """Of the agent's record."""
        return self.record.file(name)


class Runs:
    """Made in an event loop; `begin` first. `on_change` is called when the manager is to be told at once; `key` gives
    `token_key` of the machine's credential."""

    def __init__(
        self,
        directory: AgentDirectory,
        guards: Guards,
        accounts: Accounts,
        *,
        key: Callable[[], bytes],
        on_change: Callable[[], None],
        leaders: Leaders,
        accounts_dir: str = DEFAULT_ACCOUNTS_DIR,
        logs_bytes: int = DEFAULT_LOGS_BYTES,
    ) -> None:
        """`logs_bytes`: at most so much of what its ranks print is kept of a run on the node of its launcher."""
        self._logs_bytes = logs_bytes
        self._directory = directory
        self._guards = guards
        self._accounts = accounts
        self._key = key
        self._on_change = on_change
        self._accounts_dir = accounts_dir
        self._clock = BootClock()
        self._machine = RunsMachine()
        self._driver: InlineDriver[Event, Effect] = InlineDriver(
            self._machine, self._perform, now_ns=self._clock.now_ns
        )
        self._processes = DetachedProcesses(
            lambda token: self.feed(LauncherUp(token)), self._on_gone, marks=lambda token: (_mark(token), token)
        )
        self._progress: dict[str, RunProgress] = {}
        self._stop_execs: Callable[[str], None] = lambda _: None
        root = directory.path if accounts.serves_own else accounts_dir
        self._loop = asyncio.get_running_loop()
        self._copies = RunCopies(
            os.path.join(root, "copies"),
            os.path.join(directory.path, "cache"),
            leaders,
            RunEnvironments(os.path.join(root, "environments")),
            self._on_doing,
        )
        self._collected_ns = 0  # long ago
        self._removals = ThreadPoolExecutor(1, "removals")
        """Directories may hold millions of files: the loop of the agent does not wait for them."""
        self._not_copied: dict[str, EndedRun] = {}
        """Runs whose launcher was not started for want of their directory."""

    def begin(self) -> None:
        """After `begin` of the guards."""
        leader = self._directory.leader()
        found = self._directory.found_runs()
        begin = Begin(found, leader.term, self._directory.lease_ends_ns(), leader.stop_after_ns)
        for one in found:
            self._copies.adopt(one.record.token)
        self.feed(begin)
        for token in sorted({guard.order.run_token for guard in self._guards.living()} - {""}):
            self.feed(GuardsLiving(token, self._guards.living_of(token)))

    def feed(self, event: Event) -> None:
        self._driver.feed(event)

    def heard(self, orders: Orders, asked_ns: int) -> None:
        self.feed(OrdersHeard(orders, asked_ns))
        living = {status.token for status in self._machine.statuses() if status.state != "gone"}
        for order in orders.runs:
            if order.snapshot and order.run_token in living and not self._is_stopped(order.run_token):
                self._copy(order)

    def _copy(self, order: RunOrder) -> None:
        try:
            account = self._accounts.of_user(order.user, "")
        except PermissionDenied:
            return  # its launcher and its ranks are refused for the same reason
        self._copies.begin(order.run_token, order.snapshot, account, order.environment)

    def _is_stopped(self, run_token: str) -> bool:
        refusal = self.refusal(run_token)
        return refusal is not None and not refusal.busy

    def copy_of(self, run_token: str) -> str:
        """The working directory of the run on this node. Raises `Busy` while it is copied, or why it was not."""
        return self._copies.find(run_token)

    def tick(self) -> None:
        for status in self._machine.statuses():
            if status.lead and status.state != "gone":
                self._look_at(status.token)
        self.feed(Tick())
        self._tidy_copies()

    def _on_doing(self, token: str) -> None:
        """In a thread. Users read it in the log of the launcher."""
        doing = self._copies.doing(token)
        with contextlib.suppress(OSError, FireflyerError, RuntimeError):  # a closed loop: the agent ends
            membership = self._directory.membership()
            if doing and membership is not None:
                with open(self._directory.run_record(token).file("log"), "a", encoding="utf-8") as log:
                    log.write(f"{doing} on node {membership.machine}\n")
            self._loop.call_soon_threadsafe(self._on_change)

    def _tidy_copies(self) -> None:
        if self._clock.now_ns() - self._collected_ns >= _COLLECT_NS:
            self._collected_ns = self._clock.now_ns()
            self._copies.collect()
        living = {status.token for status in self._machine.statuses() if status.state != "gone"}
        for token in self._copies.tokens:
            if token not in living:
                self._copies.remove(token)
            elif self._is_stopped(token):
                self._copies.stop(token)

    def guards_changed(self, run_token: str) -> None:
        self.feed(GuardsLiving(run_token, self._guards.living_of(run_token)))

    def on_stop(self, call: Callable[[str], None]) -> None:
        """`call` is told the runs of which nothing may live any more."""
        self._stop_execs = call

    def execs_changed(self, run_token: str, count: int) -> None:
        """So many exec sessions of the run have processes here."""
        self.feed(ExecsLiving(run_token, count))

    def exec_refusal(self, run_token: str) -> str:
        """Why no exec session of the run may begin; empty: it may."""
        return self._machine.exec_refusal(self._clock.now_ns(), run_token)

    def lives(self) -> bool:
        """Whether any run is here."""
        return any(status.state != "gone" for status in self._machine.statuses())

    async def kill_old_execs(self) -> None:
        """Of an agent that was killed together with its guards."""
        for status in self._machine.statuses():
            if status.state != "gone":
                await kill_marked(f"{status.token}.exec", self._uid_of(status.token))

    def refusal(self, run_token: str) -> Refusal | None:
        """Why no guard of the run may be started by ticket."""
        return self._machine.refusal(self._clock.now_ns(), run_token)

    def statuses(self) -> tuple[RunStatus, ...]:
        return tuple(self._told(status) for status in self._machine.statuses())

    def _told(self, status: RunStatus) -> RunStatus:
        progress = self._progress.get(status.token)
        if progress is not None:
            saving = _saving(progress, self._clock.now_ns()) if status.state == "running" else None
            status = msgspec.structs.replace(status, step=progress.step, saving=saving)
        elif status.state == "starting":
            status = msgspec.structs.replace(status, doing=self._copies.doing(status.token))
        return status

    @property
    def heard_version(self) -> tuple[int, int]:
        """Term and version of the orders that were followed last."""
        return self._machine.term, self._machine.version

    def end_all(self) -> None:
        """The machine belongs to the platform no more."""
        self.feed(Left())

    def led(self) -> dict[str, LedRun]:
        """By token."""
        return {
            record.token: LedRun(
                record.task,
                record.run,
                record.over,
                self._run_dir(record.token),
                self._directory.run_record(record.token),
            )
            for record in self._machine.led()
        }

    @property
    def over(self) -> bool:
        """Nothing of any run lives here."""
        return self._machine.over()

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def close(self) -> None:
        """Launchers live on."""
        self._processes.close()
        self._copies.close()
        self._removals.shutdown(wait=False, cancel_futures=True)

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartLauncher(record, order):
                self._start(record, order)
            case WatchLauncher(token):
                self._processes.watch(token, self._directory.run_record(token), uid=self._uid_of(token))
            case SuspendLauncher() | TerminateLauncher() | KillLauncher():
                self._press(effect)
            case StopGuards(token):
                self._stop_execs(token)
                self._guards.stop_of(token)
            case Remember(record):
                self._write(record)
            case Remove(token):
                self._remove(token)
            case RenewLease(ends_ns):
                self._renew(ends_ns)
            case RememberLeader(term, managers, stop_after_ns):
                self._directory.write_leader(Leader(term=term, managers=managers, stop_after_ns=stop_after_ns))
            case Changed():
                self._on_change()

    def _press(self, effect: SuspendLauncher | TerminateLauncher | KillLauncher) -> None:
        token = effect.token
        match effect:
            case SuspendLauncher():
                _log.info("run is told to suspend token=%s", token)
                self._processes.signal(token, signal.SIGUSR1)
            case TerminateLauncher():
                _log.info("run is told to stop token=%s", token)
                self._processes.signal(token, signal.SIGCONT, signal.SIGUSR2)
            case KillLauncher():
                _log.warning("the launcher of a run does not end, and is killed token=%s", token)
                self._processes.kill(token, uid=self._uid_of(token))

    def _write(self, record: RunRecord) -> None:
        try:
            self._directory.write_run(record)
        except FireflyerError as error:
            _log.error("a run cannot be written down, and is tried again reason=%s", error)
        else:
            self._driver.feed(Remembered(record))

    def _remove(self, token: str) -> None:
        def remove() -> None:
            remove_tree(os.path.join(self._accounts_dir, token))
            self._directory.remove_run(token)

        def done(_: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop: the agent ends, and the next one removes it
                self._loop.call_soon_threadsafe(self.feed, Removed(token))

        self._removals.submit(remove).add_done_callback(done)

    def _renew(self, ends_ns: int) -> None:
        try:
            self._directory.write_lease(ends_ns)
        except FireflyerError as error:
            _log.error("the lease of runs cannot be written, and they end with it reason=%s", error)

    def _start(self, record: RunRecord, order: LaunchOrder) -> None:
        token = record.token
        guard = self._directory.run_record(token)
        try:
            self._directory.write_run(record)
            self._driver.feed(Remembered(record))
            account = self._accounts.of_user(order.user, order.account)
            orders = self._runner_orders(token, order, account)
        except FireflyerError as error:
            cause = Cause.PROGRAM if isinstance(error, PermissionDenied) else Cause.INFRASTRUCTURE
            ended = EndedRun(cause=cause, exit_code=1, reason=str(error)[:1000])
            self._driver.feed(LauncherGone(token, True, ended))
            return
        snapshot = order.spec.program.snapshot
        if snapshot:
            self._copies.begin(token, snapshot, account, order.spec.program.environment)

        def start() -> None:
            workdir = self._wait_for_copy(token, order.nodes[0].name) if snapshot else ""
            payload = msgspec.msgpack.encode(msgspec.structs.replace(orders, workdir=workdir))
            until = self._directory.lease_file
            starting = Starting(program="runner", payload=payload, account=account, until=until)
            start_detached(guard, starting, mark=_mark(token))

        self._processes.start(token, guard, start, uid=None if account is None else account.uid)

    def _wait_for_copy(self, token: str, node: str) -> str:
        """In a thread. A manifest or lock that is refused is the user's error; else other nodes may do better."""
        try:
            return self._copies.wait(token)
        except FireflyerError as error:
            cause = Cause.STOPPED if isinstance(error, Aborted) else Cause.INFRASTRUCTURE
            cause = Cause.PROGRAM if isinstance(error, UsageError | JobFailed) else cause
            reason = f"node {node} could not prepare the run: {' '.join(str(error).split())}"[:1000]
            bad = (node,) if cause is Cause.INFRASTRUCTURE else ()
            self._not_copied[token] = EndedRun(cause=cause, exit_code=1, reason=reason, bad_nodes=bad)
            raise

    def _runner_orders(self, token: str, order: LaunchOrder, account: Account | None) -> RunnerOrders:
        several = len(order.nodes) > 1
        opened = open_launch(order, self._key()) if several or order.token else None
        nodes = tuple(msgspec.structs.replace(node, ticket=b"") for node in order.nodes)
        tickets = opened.tickets if opened is not None and several else ()
        return RunnerOrders(
            run_token=token,
            order=msgspec.structs.replace(order, nodes=nodes, token=b"", tickets_nonce=b""),
            directory=self._make_directory(token, account),
            tickets=tuple(OpenedTicket(ticket.identity, ticket.key) for ticket in tickets),
            token="" if opened is None else opened.token,
            logs_bytes=self._logs_bytes,
        )

    # -- the run directory ---------------------------------------------------------------------------------------------

    def _make_directory(self, token: str, account: Account | None) -> str:
        path = self._run_dir(token) if account is None else os.path.join(self._accounts_dir, token)
        try:
            if account is None:
                os.makedirs(path, mode=0o700, exist_ok=True)
                return path
            os.makedirs(self._accounts_dir, mode=0o711, exist_ok=True)
            os.mkdir(path, 0o700)
            os.chown(path, account.uid, account.gid, follow_symlinks=False)
        except OSError as error:
            raise translate_os_error(error, f"make run directory {path}") from error
        return path

    def _run_dir(self, token: str) -> str:
        own = os.path.join(self._directory.run_record(token).file("job"))
        other = os.path.join(self._accounts_dir, token)
        return other if not os.path.isdir(own) and os.path.isdir(other) else own

    def _uid_of(self, token: str) -> int | None:
        """Of what the launcher started, where that is another account."""
        try:
            uid = os.lstat(self._run_dir(token)).st_uid
        except OSError:
            return None
        return None if uid == os.geteuid() else uid

    def _look_at(self, token: str) -> None:
        progress = read_account_file(self._run_dir(token), PROGRESS_NAME, RunProgress)
        if progress is not None:
            if token not in self._progress:
                self.feed(RanksStarted(token))
            self._progress[token] = progress

    def _on_gone(self, token: str, end: End) -> None:
        ended = self._not_copied.pop(token, None) or read_account_file(self._run_dir(token), RESULT_NAME, EndedRun)
        if ended is None and end.reason == LEASE_ENDED:
            ended = EndedRun(cause=Cause.INTERRUPTED, exit_code=137, reason="the lease of its node ended")
        self._progress.pop(token, None)
        began = self._directory.run_record(token).process() is not None
        if ended is None and not began:
            _log.error("the launcher of a run was not started token=%s reason=%s", token, end.reason)
        self.feed(LauncherGone(token, end.clean, ended, began))


def _saving(progress: RunProgress, now_ns: int) -> Saving:
    age_ns = max(0, now_ns - progress.saved_at_ns) if progress.saved_at_ns is not None else None
    return Saving(asks=progress.asks, age_ns=age_ns, save_ns=progress.save_ns, start_ns=progress.start_ns)


def _mark(token: str) -> str:
    """Of the processes of a launcher: not one that continues the token after a dot, as those of its ranks' guards do,
    which a launcher kills when it ends."""
    return f"{token}-launcher"
