"""Carries out commands in the draft: each checks first, then changes."""

from __future__ import annotations

import re

import msgspec

from fireflyer.base.errors import Busy, NotFound, PermissionDenied, UsageError
from fireflyer.base.units import counted, format_duration
from fireflyer.cluster.core.platform.access import check, is_operator
from fireflyer.cluster.core.platform.commands import (
    AddReservation,
    Command,
    DrainNode,
    LabelNode,
    MoveNode,
    RecordRepair,
    RemoveLimit,
    RemoveNode,
    RemoveReservation,
    ReportFault,
    ResumeNode,
    ResumeTask,
    ReturnNode,
    SetLimit,
    SetLimits,
    SetPolicy,
    SetPriority,
    SetPriorityBounds,
    SetShare,
    SetShares,
    StopTask,
    SuspendTask,
)
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Commanded, Done, Settings
from fireflyer.cluster.core.platform.node_health import NodesHealth, measured_words
from fireflyer.cluster.core.platform.store.history import CommandDone, NodeChange
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import ConfigRow, NodeRow, RunState, TaskRow, Wish, encode_row
from fireflyer.cluster.core.platform.submissions import highest_priority
from fireflyer.cluster.core.scheduler.model import Limit, LimitKind, Reservation
from fireflyer.cluster.schema.tasks import FINISHED, Cause, Outcome, TaskState

__all__ = ["Administration"]

MAX_CONFIG_BYTES = 900_000
MAX_RESERVATIONS = 1000
MAX_LIMITS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class Administration:
    def __init__(self, ledger: Ledger, heard: Heard, tasks: Tasks, health: NodesHealth, settings: Settings) -> None:
        self._ledger, self._heard, self._tasks, self._settings = ledger, heard, tasks, settings
        self._health = health
        self.nodes: dict[str, None] = {}
        """Of which the scheduler must know more."""
        self.settings_changed = False

    def apply(self, asked: Commanded, now_ns: int) -> Done:
        """`now_ns`: monotonic. Raises an error that says what to do instead."""
        command = asked.command
        owner = None
        if isinstance(command, StopTask | SuspendTask | ResumeTask | SetPriority):
            owner = self._task(command.task).user
        check(command, asked.user, asked.roles, owner)
        text, target = self._do(command, asked, now_ns)
        name = type(command).__name__
        self._ledger.record(CommandDone(self._tasks.now_ns, asked.user, name, target, text, asked.address))
        self._tasks.notes.append(f"{asked.user}: {text}")
        return Done(text)

    def _do(self, command: Command, asked: Commanded, now_ns: int) -> tuple[str, str]:
        match command:
            case StopTask(task, reason):
                return self._stop(self._unfinished(task), asked.user, reason), str(task)
            case SuspendTask(task):
                return self._suspend(self._unfinished(task)), str(task)
            case ResumeTask(task):
                return self._resume(self._unfinished(task)), str(task)
            case SetPriority(task, priority):
                return self._set_priority(self._unfinished(task), priority, asked), str(task)
            case DrainNode() | ResumeNode() | LabelNode() | MoveNode():
                return self._change_node(command), command.node
            case RemoveNode(node):
                text = self._remove_node(node, now_ns)
                self._health.removed(node, asked.user)
                return text, node
            case ReportFault(node, fault):
                said = self._health.reported(node, fault)
                if not said and (row := self._node(node)).drained:
                    said = f"node {node} is drained already: {row.drain_reason or 'no reason given'}"
                return said or self._change_node(DrainNode(node, measured_words(fault)[:400])), node
            case RecordRepair() | ReturnNode():
                return self._health.command(command, asked.user), command.node
            case _:
                return self._configure(command), "settings"

    # --- tasks ---

    def _task(self, task: int) -> TaskRow:
        row = self._ledger.tasks.get(task)
        if row is None:
            raise NotFound(f"there is no task {task}, or it ended long ago")
        return row

    def _unfinished(self, task: int) -> TaskRow:
        row = self._task(task)
        if row.state is FINISHED:
            outcome = row.outcome.value if row.outcome is not None else "unknown"
            raise UsageError(f"task {task} has finished ({outcome}); only a task that has not can be changed")
        return row

    def _stop(self, row: TaskRow, user: str, reason: str) -> str:
        words = f"{user} stopped it" + (f": {reason}" if reason else "")
        row = msgspec.structs.replace(row, stopping=row.stopping or words)
        self._tasks.put(row)
        key = self._ledger.index.open_run(row)
        run = self._ledger.runs.known(key) if key is not None else None
        if run is None or run.state is RunState.ENDED:
            self._tasks.finish(row, Outcome.STOPPED, row.stopping, cause=Cause.STOPPED)
            return f"task {row.id} is stopped"
        self._tasks.leave(run, "stop", Wish.USER_STOP, row.stopping)
        return f"task {row.id} is being stopped"

    def _suspend(self, row: TaskRow) -> str:
        if self._tasks.spec(row).kind == "interactive":
            raise UsageError(f"task {row.id} is interactive and cannot be suspended; stop it")
        if row.held:
            return f"task {row.id} is suspended already"
        row = msgspec.structs.replace(row, held=True)
        self._tasks.put(row)
        key = self._ledger.index.open_run(row)
        if key is not None:
            self._tasks.leave(self._ledger.runs.known(key), "suspend", Wish.USER_SUSPEND, "its user suspended it")
        elif row.state is TaskState.QUEUED:
            self._tasks.hold(row)
        return f"task {row.id} does not run until it is resumed"

    def _resume(self, row: TaskRow) -> str:
        if not row.held:
            return f"task {row.id} is not suspended by its user"
        row = msgspec.structs.replace(row, held=False)
        self._tasks.put(row)
        self._tasks.tell(row)
        return f"task {row.id} waits for nodes"

    def _set_priority(self, row: TaskRow, priority: int, asked: Commanded) -> str:
        highest = highest_priority(self._ledger.settings, row.user)
        if priority > highest and not is_operator(asked.roles):
            raise PermissionDenied(f"{row.user} may ask for priority {highest} at most, not {priority}")
        row = msgspec.structs.replace(row, priority=priority)
        self._tasks.put(row)
        self._tasks.tell(row)
        return f"task {row.id} has priority {priority}"

    # --- nodes ---

    def _node(self, name: str) -> NodeRow:
        row = self._ledger.nodes.get(name)
        if row is None:
            raise NotFound(f"there is no node {name}")
        return row

    def _change_node(self, command: DrainNode | ResumeNode | LabelNode | MoveNode) -> str:
        row, now_ns = self._node(command.node), self._tasks.now_ns
        text = ""
        match command:
            case DrainNode(name, reason):
                row = msgspec.structs.replace(row, drained=True, drain_reason=reason)
                self._ledger.record(NodeChange(now_ns, name, "drained", reason))
                text = f"node {name} gets no new run"
            case ResumeNode(name):
                row = msgspec.structs.replace(row, drained=False, drain_reason="", resumed_ns=now_ns)
                self._ledger.record(NodeChange(now_ns, name, "resumed"))
                text = f"node {name} gets runs again"
                checked = self._settings.checking.order_of(row.group) is not None
                health = self._ledger.health.get(name) if checked else None
                if health is not None and not health.takes_tasks:
                    text = f"nobody drains node {name} any more; its health does ({health.state.value}): ff node return"
            case LabelNode(name, labels):
                row = msgspec.structs.replace(row, labels=tuple(sorted(dict.fromkeys(labels))))
                text = f"node {name} has the labels {', '.join(row.labels) or '(none)'}"
            case MoveNode(name, zone, leaf, group):
                row = msgspec.structs.replace(row, zone=zone, leaf=leaf, group=group)
                text = f"node {name} is in group {group}, zone {zone or '(none)'}, leaf {leaf or '(none)'}"
        self._ledger.nodes.put(row.name, row)
        self.nodes[row.name] = None
        self._ledger.changed("node", row.name, "drained" if row.drained else "changed")
        return text

    def _remove_node(self, name: str, now_ns: int) -> str:
        self._node(name)
        place = self._ledger.places.get(name)
        if place is not None:
            raise Busy(f"node {name} has run {place.run} of task {place.task}; drain it and wait")
        if self._heard.is_up(name, now_ns, self._settings.lost_ns):
            limit = format_duration(self._settings.lost_ns)
            raise Busy(f"node {name} is heard; stop its agent first, and wait until nothing was heard for {limit}")
        self._ledger.nodes.put(name, None)
        self.nodes[name] = None
        self._ledger.record(NodeChange(self._tasks.now_ns, name, "removed"))
        self._ledger.changed("node", name, "removed")
        return f"node {name} is forgotten"

    # --- settings ---

    def _configure(self, command: Command) -> str:
        config = self._ledger.settings
        match command:
            case SetLimit() | RemoveLimit() | SetLimits():
                config, text = self._limited(config, command)
            case SetShare(user, nodes):
                shares = {name: share for name, share in config.shares.items() if name != user}
                if nodes is not None:
                    shares[user] = nodes
                config = msgspec.structs.replace(config, shares=shares)
                text = f"{user} has no share" if nodes is None else f"the share of {user} is {nodes:g} nodes"
            case SetShares(shares):
                if not all(0.0 <= share < 1e9 for share in shares.values()):
                    raise UsageError("a share is a number of nodes, from 0 on")
                config, text = msgspec.structs.replace(config, shares=shares), f"{len(shares)} shares are set"
            case SetPolicy(policy, guaranteed_ns):
                config = msgspec.structs.replace(config, policy=policy, guaranteed_ns=guaranteed_ns)
                text = "the policy is set"
            case SetPriorityBounds(bounds):
                config, text = msgspec.structs.replace(config, bounds=bounds), f"{len(bounds)} bounds are set"
            case AddReservation(reservation):
                self._check_reservation(reservation)
                rest = self._without(config, reservation.name)
                config = msgspec.structs.replace(config, reservations=(*rest, reservation))
                text = f"reservation {reservation.name} is set"
            case RemoveReservation(name):
                rest = self._without(config, name)
                if len(rest) == len(config.reservations):
                    raise NotFound(f"there is no reservation {name}")
                config, text = msgspec.structs.replace(config, reservations=rest), f"reservation {name} is removed"
            case _:
                raise UsageError(f"{type(command).__name__} is no setting")
        self._put_settings(config)
        return text

    def _limited(self, config: ConfigRow, command: SetLimit | RemoveLimit | SetLimits) -> tuple[ConfigRow, str]:
        limits = config.limits
        if isinstance(command, SetLimits):
            limits, text = command.limits, f"{len(command.limits)} limits are set"
        elif isinstance(command, SetLimit):
            limit = command.limit
            if (limit.kind is LimitKind.EACH) != (not limit.name):
                raise UsageError("a limit of a user or a group names it, and that of each user names nobody")
            limits = (*(one for one in limits if one.subject != limit.subject), limit)
            text = f"{limit.words} may use {counted(limit.nodes, 'node')} of {limit.node_group} at a time"
        else:
            asked = Limit(**{name: getattr(command, name) for name in command.__struct_fields__}, nodes=0)
            limits = tuple(one for one in limits if one.subject != asked.subject)
            if len(limits) == len(config.limits):
                raise NotFound(f"there is no limit for {asked.words} on {asked.node_group}; `ff quota --all` lists all")
            text = f"the limit for {asked.words} on {asked.node_group} is removed"
        if len(limits) > MAX_LIMITS:
            raise UsageError(f"there are {MAX_LIMITS} limits at most; remove one first")
        return msgspec.structs.replace(config, limits=limits), text

    def _check_reservation(self, reservation: Reservation) -> None:
        name = reservation.name
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a reservation; take letters, digits, '.', '_' and '-'")
        if reservation.begin_ns >= reservation.until_ns:
            raise UsageError(f"reservation {name} ends before it begins")
        if reservation.until_ns <= self._tasks.now_ns:
            raise UsageError(f"reservation {name} is over already; give an end that is still to come")
        if not reservation.nodes:
            raise UsageError(f"reservation {name} has no nodes; name one at least")
        for node in reservation.nodes:
            self._node(node)

    def _without(self, config: ConfigRow, name: str) -> tuple[Reservation, ...]:
        return tuple(one for one in config.reservations if one.name != name and one.until_ns > self._tasks.now_ns)

    def _put_settings(self, config: ConfigRow) -> None:
        size = len(encode_row(config))
        if size > MAX_CONFIG_BYTES or len(config.reservations) > MAX_RESERVATIONS:
            raise UsageError(f"all settings together are {size} bytes, at most {MAX_CONFIG_BYTES}; set fewer")
        self._ledger.put_settings(config)
        self.settings_changed = True
        self._ledger.changed("settings", "cluster", "changed")
