"""The runs of the platform on one node, as its agent sees them: compares orders with what runs. Pure.

A *run* is known from when the first order names it. On the node of its launcher (the *lead*) the agent starts that; on
every node it lets the launcher start guards by ticket (`refusal`), whose number it is told (`GuardsLiving`), and users
start exec sessions (`exec_refusal`, `ExecsLiving`), which are killed with the guards.

    (unknown) ──run + launch──> STARTING ──LauncherUp──> UP ──LauncherGone──> OVER
        │                                               │ suspend, stop, no manager: SIGUSR1, SIGTERM, kill
        └──run──> open: guards may be started           │
    stop, not in the orders, no manager, OVER ──────────┴──> stopped ──nothing lives, on disk──> gone ──> forgotten

Why no launcher is started twice: `StartLauncher` writes the record of the run before it starts, a known token is not
started, and records are read before the first order is followed. Why nothing starts after `gone` was reported: a
run is reported so only when it is stopped, that is on disk, and nothing of it lives; guards are started for open runs
alone. A token without a record is refused as well, so that removing an old record allows nothing.

Orders are state: following them twice changes nothing, and those of an older term, or of an older version of the same
term, are dropped. The largest term is on disk before the orders of that term are followed.

The lease of the node: it ends `stop_after_ns` after the agent *asked* the manager that answered. Every guard of a run
reads its end from a file (`RenewLease`) and kills what it guards when it is over, so it holds without the agent too;
the agent stops runs politely a little earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.run_messages import (
    Begin,
    Changed,
    Effect,
    Event,
    ExecsLiving,
    FoundRun,
    GuardsLiving,
    KillLauncher,
    LauncherGone,
    LauncherUp,
    Left,
    Living,
    OrdersHeard,
    RanksStarted,
    Remember,
    Remembered,
    RememberLeader,
    Remove,
    Removed,
    RenewLease,
    RunRecord,
    StartLauncher,
    StopGuards,
    SuspendLauncher,
    TerminateLauncher,
    Tick,
    WatchLauncher,
)
from fireflyer.cluster.schema.sync import MAX_RUNS, EndedRun, Orders, RunOrder, RunStatus
from fireflyer.cluster.schema.tasks import Cause

__all__ = [
    "KEEP_NS",
    "KILL_NS",
    "MAX_GUARDS_OF_RUN",
    "MAX_KEPT",
    "STOP_GRACE_NS",
    "SUSPEND_SLACK_NS",
    "Begin",
    "Changed",
    "Effect",
    "Event",
    "ExecsLiving",
    "FoundRun",
    "GuardsLiving",
    "KillLauncher",
    "Launcher",
    "LauncherGone",
    "LauncherUp",
    "Left",
    "OrdersHeard",
    "RanksStarted",
    "Refusal",
    "Remember",
    "RememberLeader",
    "Remembered",
    "Remove",
    "Removed",
    "RenewLease",
    "RunRecord",
    "RunsMachine",
    "StartLauncher",
    "StopGuards",
    "SuspendLauncher",
    "TerminateLauncher",
    "Tick",
    "WatchLauncher",
]

STOP_GRACE_NS: Final = 30 * SECOND
"""From SIGTERM to the launcher until it and the guards of the run are killed. Ranks are given 10 s by the launcher."""
SUSPEND_SLACK_NS: Final = 60 * SECOND
"""A launcher that was told to suspend ends by itself after its grace period; so much later it gets SIGTERM."""
KILL_NS: Final = 15 * SECOND
"""Between two kills of a launcher that does not end."""
KEEP_NS: Final = 72 * 3600 * SECOND
"""For so long the directory of a run is kept after the manager has forgotten it, with its logs."""
MAX_KEPT: Final = 256
_PATIENCE_NS: Final = {"terminate": STOP_GRACE_NS, "kill": KILL_NS}
MAX_GUARDS_OF_RUN: Final = 2
"""On one node: one, and the former one that is being killed."""


class Launcher(Enum):
    """Of a run, on this node."""

    NONE = "none"
    STARTING = "starting"
    UP = "up"
    OVER = "over"


class Refusal(msgspec.Struct, frozen=True):
    """Why no guard of a run may be started. `busy`: it may be asked for again soon."""

    reason: str
    busy: bool


@dataclass(slots=True)
class _Run:
    record: RunRecord
    launcher: Launcher
    since_ns: int
    """When it was last asked to leave, or became gone."""
    on_disk: bool = False
    """The record as it is now."""
    ranks_started: bool = False
    guards: int = 0
    execs: int = 0
    wanted: str = "run"
    """Of the launcher: run, suspend, terminate, kill; grows only."""
    orphaned: bool = False
    """It is stopped because no manager was heard."""
    forget: bool = False
    removing: bool = False

    @property
    def token(self) -> str:
        return self.record.token

    @property
    def lives(self) -> bool:
        return self.launcher in (Launcher.STARTING, Launcher.UP) or self.guards > 0 or self.execs > 0

    @property
    def gone(self) -> bool:
        return self.record.stopped and self.on_disk and not self.lives


class RunsMachine:
    """`handle` as the module says; `refusal` and `statuses` read only."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._now_ns = 0
        self._effects: list[Effect] = []
        self._told: tuple[RunStatus, ...] = ()
        self._managers: tuple[str, ...] = ()
        self._stop_after_ns = 0
        self.term = 0
        self.version = 0
        self.lease_ends_ns = 0

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        self._now_ns, self._effects = now_ns, []
        match event:
            case Begin():
                self._begin(event)
            case OrdersHeard(orders, asked_ns):
                self._on_orders(orders, asked_ns)
            case LauncherUp(token):
                self._on_up(token)
            case RanksStarted(token):
                if token in self._runs:
                    self._runs[token].ranks_started = True
            case LauncherGone():
                self._on_gone(event)
            case GuardsLiving() | ExecsLiving():
                self._on_living(event)
            case Remembered() | Removed():
                self._on_disk(event)
            case Left():
                self.lease_ends_ns = 0
                self._effects.append(RenewLease(0))
                self._on_tick()
            case Tick():
                self._on_tick()
        statuses = self.statuses()
        if statuses != self._told:
            self._told = statuses
            self._effects.append(Changed())
        return self._effects

    def refusal(self, now_ns: int, token: str) -> Refusal | None:
        """Why no guard of this run may be started by ticket; None: it may."""
        run = self._runs.get(token)
        if run is None:
            return Refusal("the manager has not told it of this run; ask again", busy=True)
        if run.record.stopped:
            return Refusal("the run was stopped there", busy=False)
        if now_ns >= self.lease_ends_ns:
            return Refusal("it has heard of no manager for too long; ask again", busy=True)
        if run.guards >= MAX_GUARDS_OF_RUN:
            return Refusal(f"{run.guards} guards of the run live there already; ask again", busy=True)
        return None

    def exec_refusal(self, now_ns: int, token: str) -> str:
        """Why no exec session of this run may begin; empty: it may."""
        run = self._runs.get(token)
        if run is None or not (run.guards or run.launcher is Launcher.UP):
            return "no rank of the run is on this node now; name another node, or try again"
        if run.record.stopped:
            return "the run is being stopped"
        if now_ns >= self.lease_ends_ns:
            return "the node has heard of no manager for too long; try again"
        return ""

    def statuses(self) -> tuple[RunStatus, ...]:
        """What a `Sync` says, those that live first."""
        told = [run for run in self._runs.values() if not run.record.forgotten]
        told.sort(key=lambda run: (run.gone, run.token))
        return tuple(_status(run) for run in told[:MAX_RUNS])

    def led(self) -> list[RunRecord]:
        """Runs whose launcher is or was on this node."""
        return [run.record for run in self._runs.values() if run.record.lead]

    def over(self) -> bool:
        """Nothing of any run lives."""
        return not any(run.lives for run in self._runs.values())

    # -- events --------------------------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> None:
        self.term, self.lease_ends_ns, self._stop_after_ns = event.term, event.lease_ends_ns, event.stop_after_ns
        for found in event.found:
            record = found.record
            watched = record.lead and not record.over
            launcher = Launcher.STARTING if watched else Launcher.OVER if record.lead else Launcher.NONE
            self._runs[record.token] = _Run(
                record, launcher, self._now_ns - found.age_ns, on_disk=True, ranks_started=True
            )
            if watched:
                self._runs[record.token].wanted = "terminate" if record.stopped else "run"
                self._effects.append(WatchLauncher(record.token))

    def _on_orders(self, orders: Orders, asked_ns: int) -> None:
        if (orders.term, orders.version) < (self.term, self.version):
            return
        if orders.term > self.term or orders.managers != self._managers or orders.stop_after_ns != self._stop_after_ns:
            self._effects.append(RememberLeader(orders.term, orders.managers, orders.stop_after_ns))
        self.term, self.version = orders.term, orders.version
        self._managers, self._stop_after_ns = orders.managers, orders.stop_after_ns
        if asked_ns + orders.stop_after_ns > self.lease_ends_ns:
            self.lease_ends_ns = asked_ns + orders.stop_after_ns
            self._effects.append(RenewLease(self.lease_ends_ns))
        if self._now_ns >= self.lease_ends_ns:
            return  # the answer was too long under way
        ordered = {order.run_token for order in orders.runs}
        for run in list(self._runs.values()):
            if run.token not in ordered and not run.record.forgotten:
                self._stop(run)
        for order in orders.runs:
            self._follow(order)

    def _follow(self, order: RunOrder) -> None:
        run = self._runs.get(order.run_token)
        match order.wanted:
            case "forget":
                if run is not None:
                    run.forget = True
                    self._stop(run)
                    self._forget(run)
            case "stop":
                self._stop(run or self._know(order))
            case "suspend" if run is None and order.launch is not None:
                ended = EndedRun(cause=Cause.SUSPENDED, exit_code=0, reason="it was suspended before it was started")
                self._change(self._know(order), lead=True, over=True, stopped=True, ended=ended)
            case _:
                self._open(run or self._know(order), order)

    def _know(self, order: RunOrder) -> _Run:
        run = _Run(RunRecord(token=order.run_token), Launcher.NONE, self._now_ns)
        self._runs[order.run_token] = run
        return run

    def _open(self, run: _Run, order: RunOrder) -> None:
        if run.record.stopped or run.record.forgotten:
            return
        if run.launcher is Launcher.NONE and order.launch is not None and order.wanted == "run":
            launch = order.launch
            run.record = msgspec.structs.replace(
                run.record, task=launch.task, run=launch.run, lead=True, grace_ns=launch.spec.grace_ns
            )
            run.launcher = Launcher.STARTING
            self._effects.append(StartLauncher(run.record, order.launch))
        elif run.launcher is Launcher.NONE and not run.on_disk:
            self._effects.append(Remember(run.record))
        elif order.wanted == "suspend" and run.wanted == "run" and run.record.lead:
            self._press(run, "suspend")

    def _on_up(self, token: str) -> None:
        run = self._runs.get(token)
        if run is not None and run.launcher is Launcher.STARTING:
            run.launcher = Launcher.UP
            if run.wanted != "run":
                self._press(run, run.wanted)

    def _on_gone(self, event: LauncherGone) -> None:
        run = self._runs.get(event.token)
        if run is None or run.launcher not in (Launcher.STARTING, Launcher.UP):
            return
        if not event.clean:
            run.launcher = Launcher.UP
            self._press(run, "kill")
            return
        run.launcher = Launcher.OVER
        ended = event.ended or _how_it_ended(run, event)
        if run.orphaned and ended is not None and ended.cause is Cause.STOPPED:
            ended = msgspec.structs.replace(ended, cause=Cause.INTERRUPTED, reason=_ORPHANED)
        self._change(run, over=True, stopped=True, ended=ended)
        if run.guards or run.execs:
            self._effects.append(StopGuards(run.token))
        self._forget(run)

    def _on_living(self, event: Living) -> None:
        if isinstance(event, GuardsLiving):
            self._on_guards(event.token, event.count)
        else:
            self._on_execs(event.token, event.count)

    def _on_guards(self, token: str, count: int) -> None:
        run = self._runs.get(token)
        if run is None:
            if not count:
                return
            run = _Run(RunRecord(token=token), Launcher.NONE, self._now_ns)
            self._runs[token] = run
            self._effects.append(Remember(run.record))
        run.guards = count
        if run.execs and not count and run.record.stopped and run.launcher is Launcher.NONE:
            self._effects.append(StopGuards(token))
        self._forget(run)

    def _on_execs(self, token: str, count: int) -> None:
        run = self._runs.get(token)
        if run is not None:
            run.execs = count
            self._forget(run)

    def _on_disk(self, event: Remembered | Removed) -> None:
        if isinstance(event, Removed):
            self._runs.pop(event.token, None)
            return
        run = self._runs.get(event.record.token)
        if run is not None and run.record == event.record:
            run.on_disk = True
            self._forget(run)

    def _on_tick(self) -> None:
        early_ns = min(STOP_GRACE_NS, self._stop_after_ns // 5)
        orphaned = self._now_ns >= self.lease_ends_ns - early_ns
        for run in list(self._runs.values()):
            if orphaned and not run.record.stopped:
                run.orphaned = True
                self._stop(run)
            if not run.on_disk and run.launcher is not Launcher.STARTING:
                self._effects.append(Remember(run.record))
            self._escalate(run)
        self._remove_old()

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _escalate(self, run: _Run) -> None:
        """What was asked to leave, and has not."""
        age_ns = self._now_ns - run.since_ns
        if run.launcher is Launcher.UP:
            if run.wanted == "suspend" and age_ns >= run.record.grace_ns + SUSPEND_SLACK_NS:
                self._press(run, "terminate")
            elif run.wanted != "suspend" and age_ns >= _PATIENCE_NS.get(run.wanted, age_ns + 1):
                self._press(run, "kill")
        no_time = age_ns >= STOP_GRACE_NS or self._now_ns >= self.lease_ends_ns
        no_ranks = run.launcher is Launcher.OVER or (run.launcher is Launcher.NONE and not run.guards)
        if (run.guards or run.execs) and run.record.stopped and (no_time or no_ranks):
            self._effects.append(StopGuards(run.token))

    def _stop(self, run: _Run) -> None:
        if run.record.stopped:
            return
        run.since_ns = self._now_ns
        self._change(run, stopped=True)
        if run.launcher in (Launcher.STARTING, Launcher.UP):
            self._press(run, "terminate")

    def _press(self, run: _Run, wanted: str) -> None:
        """The launcher is to leave."""
        run.wanted, run.since_ns = wanted, self._now_ns
        if run.launcher is not Launcher.UP:
            return
        match wanted:
            case "suspend":
                self._effects.append(SuspendLauncher(run.token))
            case "terminate":
                self._effects.append(TerminateLauncher(run.token))
            case _:
                self._effects.append(KillLauncher(run.token))

    def _change(
        self, run: _Run, *, stopped: bool, lead: bool | None = None, over: bool | None = None,
        ended: EndedRun | None = None,
    ) -> None:  # fmt: skip
        old = run.record
        run.record = msgspec.structs.replace(
            old,
            stopped=stopped,
            lead=old.lead if lead is None else lead,
            over=old.over if over is None else over,
            ended=ended or old.ended,
        )
        if run.record.lead and run.record.over:
            run.launcher = Launcher.OVER
        run.on_disk = False
        self._effects.append(Remember(run.record))

    def _forget(self, run: _Run) -> None:
        if run.forget and run.gone and not run.record.forgotten:
            run.record = msgspec.structs.replace(run.record, forgotten=True)
            run.on_disk, run.since_ns = False, self._now_ns
            self._effects.append(Remember(run.record))

    def _remove_old(self) -> None:
        kept = [run for run in self._runs.values() if run.record.forgotten and run.on_disk and not run.removing]
        kept.sort(key=lambda run: (run.since_ns, run.token))
        for at, run in enumerate(kept):
            if self._now_ns - run.since_ns >= KEEP_NS or at < len(kept) - MAX_KEPT:
                run.removing = True
                self._effects.append(Remove(run.token))


_ORPHANED: Final = "its agent heard of no manager for too long and stopped it"


def _how_it_ended(run: _Run, event: LauncherGone) -> EndedRun | None:
    """Of a launcher that wrote nothing."""
    if run.orphaned:
        return EndedRun(cause=Cause.INTERRUPTED, exit_code=143, reason=_ORPHANED)
    if not event.began:
        return EndedRun(cause=Cause.INTERRUPTED, exit_code=1, reason="its agent ended before it had started it")
    if run.record.stopped:
        return EndedRun(cause=Cause.STOPPED, exit_code=143, reason="it was stopped, and its launcher was killed")
    if run.wanted != "run":
        return EndedRun(cause=Cause.INTERRUPTED, exit_code=143, reason="it did not leave in time and was killed")
    return None


def _status(run: _Run) -> RunStatus:
    record = run.record
    if run.gone:
        return RunStatus(token=record.token, state="gone", lead=record.lead, ended=record.ended)
    up = run.launcher is Launcher.UP and run.ranks_started if record.lead else run.guards > 0
    return RunStatus(token=record.token, state="running" if up else "starting", lead=record.lead)
