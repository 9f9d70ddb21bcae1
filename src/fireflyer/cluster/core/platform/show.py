"""What the leader shows: made from committed rows, from what it has heard, and from the scheduler's reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from fireflyer.base.errors import NotFound
from fireflyer.base.units import format_duration
from fireflyer.cluster.core.health.records import OUT, Hold, NodeHealth, RepairState, part_key
from fireflyer.cluster.core.platform.accusations import accusations_of, accused_of
from fireflyer.cluster.core.platform.engine import Engine
from fireflyer.cluster.core.platform.health_figures import HealthFigures, health_figures
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.accounts import run_account, waiting_account
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.quota import limits_in_use, quota_of
from fireflyer.cluster.core.platform.slurm.engine import SlurmEngine
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import Account, NodeRow, RunRow, RunState, TaskRow
from fireflyer.cluster.core.platform.submissions import highest_priority
from fireflyer.cluster.core.platform.views import (
    ClusterView,
    HealthView,
    LimitUse,
    NodeView,
    QuotaView,
    Reserved,
    RunView,
    TaskView,
    UserView,
    Why,
)
from fireflyer.cluster.core.scheduler.forecast import Forecast
from fireflyer.cluster.core.scheduler.model import Decision, Start, Wait
from fireflyer.cluster.core.slurm.output import SlurmNode
from fireflyer.cluster.core.slurm.request import node_of
from fireflyer.cluster.schema.tasks import FINISHED, TaskSpec, TaskState

__all__ = ["Show"]

MAX_NAMED = 8
"""Tasks that a forecast names."""

_UNCHECKED: Final = "a run failed on it: its checks must answer before the next one"
_DOUBTED: Final = "replicas of a run differed there: its validation must answer before the next run"
_SLURM_STATES: Final = {"allocated": "busy", "mixed": "busy", "completing": "leaving", "down": "lost"}
"""In our words, where we have one."""


class Show:
    def __init__(
        self, ledger: Ledger, heard: Heard, engine: Engine, settings: Settings, slurm: SlurmEngine | None
    ) -> None:
        self._ledger, self._heard, self._engine, self._settings = ledger, heard, engine, settings
        self._slurm = slurm

    # --- tasks ---

    def row(self, task: int) -> TaskRow:
        row = self._ledger.tasks.committed.get(task)
        if row is None:
            raise NotFound(f"there is no task {task}, or it ended long ago")
        return row

    def _run_of(self, row: TaskRow) -> RunRow | None:
        """The one that is not over."""
        run = self._ledger.runs.committed.get((row.id, row.runs - 1))
        return run if run is not None and run.state is not RunState.OVER else None

    def _account(self, row: TaskRow, time_ns: int) -> Account:
        run = self._run_of(row)
        if row.state is FINISHED:
            return row.account
        if run is None or run.state is RunState.ENDED:
            return waiting_account(row, max(time_ns, row.counted_ns))
        return run_account(row, run, max(time_ns, row.counted_ns))

    def task(self, row: TaskRow, time_ns: int, *, with_spec: bool = False) -> TaskView:
        submission = self._ledger.submissions.committed[row.submission]
        spec, run, account = submission.spec, self._run_of(row), self._account(row, time_ns)
        return TaskView(
            id=row.id,
            name=row.name,
            user=row.user,
            group=row.group,
            state=row.state,
            priority=row.priority,
            node_group=spec.node_group,
            least_nodes=spec.least_nodes,
            most_nodes=spec.most_nodes,
            array_index=row.array_index,
            array_of=submission.id if row.array_index is not None else None,
            submitted_ns=row.submitted_ns,
            since_ns=row.since_ns,
            ended_ns=row.ended_ns,
            runs=row.runs,
            requeues=row.requeues,
            held=row.held,
            nodes=run.nodes if run is not None else (),
            whole_life=row.whole_life,
            outcome=row.outcome,
            cause=row.cause,
            exit_code=row.exit_code,
            reason=row.reason,
            account=account,
            ettr=account.productive_ns / account.total_ns if account.productive_ns else None,
            spec=spec if with_spec else None,
        )

    def tasks(
        self, time_ns: int, *, user: str, states: tuple[TaskState, ...], name: str, before: int | None, limit: int
    ) -> Iterator[TaskView]:
        """The newest first."""
        for task in sorted(self._ledger.tasks.committed, reverse=True):
            row = self._ledger.tasks.committed[task]
            if limit <= 0:
                return
            if before is not None and task >= before:
                continue
            if (user and row.user != user) or (states and row.state not in states) or (name and row.name != name):
                continue
            limit -= 1
            yield self.task(row, time_ns)

    def runs(self, row: TaskRow) -> Iterator[RunView]:
        for number in range(row.runs):
            run = self._ledger.runs.committed.get((row.id, number))
            if run is not None:
                yield self._run(run)

    def _run(self, run: RunRow) -> RunView:
        status = self._heard.status(run.nodes[0], run.token)
        ended = run.ended
        return RunView(
            task=run.task,
            number=run.number,
            token=run.token,
            state=run.state.value,
            nodes=run.nodes,
            scheduled_ns=run.scheduled_ns,
            started_ns=run.started_ns,
            ended_ns=run.ended_ns,
            over_ns=run.over_ns,
            leaving=run.wanted != "run",
            leave_reason=run.wish_reason,
            reason=run.reason,
            cause=ended.cause if ended is not None else None,
            exit_code=ended.exit_code if ended is not None else None,
            end_reason=ended.reason if ended is not None else "",
            step=status.step if status is not None else None,
        )

    # --- reasons ---

    def why(self, row: TaskRow, time_ns: int) -> Why:
        """Always one line."""
        run = self._run_of(row)
        if row.state is FINISHED:
            outcome = row.outcome.value if row.outcome is not None else "ended"
            return Why(f"it has {outcome}" + (f": {row.reason}" if row.reason else ""))
        if run is not None:
            return Why(self._why_runs(row, run, time_ns))
        why = msgspec.structs.replace(
            self.words(self._engine.why(row.id, time_ns)), before=self._engine.before(row.id, time_ns)
        )
        last = self._ledger.runs.committed.get((row.id, row.runs - 1))
        if time_ns < row.not_before_ns and last is not None and last.ended is not None and last.ended.reason:
            return msgspec.structs.replace(why, text=f"{why.text}; {last.ended.reason}")
        return why

    def words(self, decision: Decision | None) -> Why:
        match decision:
            case Wait(reason=reason, earliest_ns=earliest_ns):
                return Why(reason, earliest_ns)
            case Start(nodes=nodes, reason=reason):
                return Why(f"it can start now, on {', '.join(nodes[:8])}: {reason}", nodes=nodes)
            case _:
                return Why("it is being started")

    def _why_runs(self, row: TaskRow, run: RunRow, time_ns: int) -> str:
        where = ", ".join(run.nodes[:8]) + (f" and {len(run.nodes) - 8} more" if len(run.nodes) > 8 else "")
        since = format_duration(max(0, time_ns - row.since_ns))
        if run.state is RunState.ENDED or run.wanted != "run":
            left = ", ".join([name for name in run.nodes if self._has(run, name)][:8])
            lives = f"; processes may live on {left}" if left else ""
            return f"run {run.number} is leaving ({run.wish_reason}) for {since}{lives}"
        if run.state is RunState.SCHEDULED:
            return f"run {run.number} has {where} for {since} and prepares to start: {run.reason}{self._doing(run)}"
        return f"run {run.number} runs on {where} for {since}: {run.reason}{self._crossing(run)}"

    def _doing(self, run: RunRow) -> str:
        """What its nodes say that the start waits for."""
        said = [(name, self._heard.status(name, run.token)) for name in run.nodes]
        busy = [f"{status.doing} on {name}" for name, status in said if status is not None and status.doing]
        more = f" and {len(busy) - 4} more nodes" if len(busy) > 4 else ""
        return f"; {', '.join(busy[:4])}{more}" if busy else ""

    def _crossing(self, run: RunRow) -> str:
        rows = map(self._ledger.nodes.committed.get, run.nodes)
        zones = len({row.zone for row in rows if row is not None})
        if zones <= 1:
            return ""
        return (
            f"; it lies in {zones} zones: collectives of Fire-Flyer cross between two of them by one pair of nodes, "
            "those of other libraries by several"
        )

    def _has(self, run: RunRow, node: str) -> bool:
        place = self._ledger.places.committed.get(node)
        return place is not None and (place.task, place.run) == (run.task, run.number)

    def would_start(self, user: str, group: str, spec: TaskSpec, time_ns: int) -> Why:
        row = TaskRow(
            id=self._ledger.state.next_task,
            submission=0,
            name=spec.name,
            user=user,
            group=group,
            state=TaskState.QUEUED,
            priority=spec.priority,
            submitted_ns=time_ns,
            queued_ns=time_ns,
            since_ns=time_ns,
            counted_ns=time_ns,
        )
        found = self._engine.would_start(row, spec, time_ns)
        if isinstance(found, Wait):
            return self.words(found)
        return self.words(found.first) if isinstance(found.first, Start) else _foretold(found, time_ns)

    # --- nodes, users, the cluster ---

    def reservations(self, time_ns: int) -> dict[str, list[Reserved]]:
        """Of each node that has some, those that are not over."""
        found: dict[str, list[Reserved]] = {}
        for one in sorted(self._ledger.config.reservations, key=lambda one: (one.begin_ns, one.name)):
            if one.until_ns > time_ns:
                view = Reserved(
                    name=one.name, begin_ns=one.begin_ns, until_ns=one.until_ns, maintenance=one.maintenance
                )
                for name in one.nodes:
                    found.setdefault(name, []).append(view)
        return found

    def slurm_node(self, node: SlurmNode) -> NodeView:
        """What Slurm says, and the run that has it through a job."""
        run = next((run for run in map(self._run_on, self._slots_on(node.name)) if run is not None), None)
        return NodeView(
            name=node.name,
            zone="",
            leaf="",
            group="default",
            labels=(),
            state=_SLURM_STATES.get(node.state, node.state) if node.answers else "lost",
            drain_reason=node.reason,
            task=run.task if run is not None else None,
            run=run.number if run is not None else None,
            silent_ns=None,
            inventory=None,
        )

    def _slots_on(self, node: str) -> Iterator[str]:
        return (name for name in self._ledger.places.committed if node_of(name)[0] == node)

    def _run_on(self, name: str) -> RunRow | None:
        place = self._ledger.places.committed.get(name)
        return self._ledger.runs.committed[place.task, place.run] if place is not None else None

    def one_node(self, name: str, time_ns: int, now_ns: int) -> NodeView:
        """Raises `NotFound`."""
        slurm = self._slurm.nodes.get(name) if self._slurm is not None else None
        if slurm is not None:
            return self.slurm_node(slurm)
        row = self._ledger.nodes.committed.get(name)
        if row is None:
            raise NotFound(f"there is no node {name}")
        view = self.node(row, now_ns, self.reservations(time_ns))
        health, known = view.health, self._health_row(name)
        if health is not None and known is not None:
            health = msgspec.structs.replace(health, ticket=self._ledger.tickets.committed.get(known.ticket))
        return msgspec.structs.replace(view, accusations=accusations_of(self._ledger, name), health=health)

    def _health_row(self, name: str) -> NodeHealth | None:
        """None also while the node is not checked."""
        node = self._ledger.nodes.committed.get(name)
        checked = node is not None and self._settings.checking.order_of(node.group) is not None
        return self._ledger.health.committed.get(name) if checked else None

    def _health(self, name: str) -> HealthView | None:
        row = self._health_row(name)
        if row is None:
            return None
        part = self._ledger.parts.committed.get(part_key(name, row.fault)) if row.fault is not None else None
        return HealthView(
            state=row.state.value,
            since_ns=row.since_ns,
            reason=row.reason or _unchecked_words(row),
            hold=row.hold.value,
            until_ns=row.until_ns if row.state in (RepairState.TESTING, RepairState.PROBATION) else None,
            faults=len(part.faults_ns) if part is not None else 0,
            policy=self._settings.checking.now.policy.version,
            warnings=tuple(one.text for one in row.warned),
        )

    def health_states(self) -> dict[str, int]:
        """How many nodes are in each state of repair; those that the breaker holds are counted as `held`, too."""
        rows = [row for name in self._ledger.health.committed if (row := self._health_row(name)) is not None]
        found = Counter(row.state.value for row in rows)
        found["held"] = sum(1 for row in rows if row.hold is Hold.BREAKER)
        found["healthy"] += len(self._ledger.nodes.committed) - len(rows)
        return {**dict.fromkeys((state.value for state in RepairState), 0), **found}

    def health_figures(self) -> HealthFigures:
        rows, tickets = self._ledger.health.committed, self._ledger.tickets.committed
        return health_figures(rows.values(), tickets.values())

    def node(self, row: NodeRow, now_ns: int, reserved: dict[str, list[Reserved]]) -> NodeView:
        place = self._ledger.places.committed.get(row.name)
        run = self._ledger.runs.committed[place.task, place.run] if place is not None else None
        return NodeView(
            name=row.name,
            zone=row.zone,
            leaf=row.leaf,
            group=row.group,
            labels=row.labels,
            state=self._state(row, run, now_ns),
            drain_reason=row.drain_reason,
            task=run.task if run is not None else None,
            run=run.number if run is not None else None,
            silent_ns=self._heard.silent_ns(row.name, now_ns) if self._heard.ever(row.name) else None,
            inventory=row.inventory,
            reserved=tuple(reserved.get(row.name, ())),
            accused=accused_of(self._ledger, row.name),
            health=self._health(row.name),
        )

    def _state(self, row: NodeRow, run: RunRow | None, now_ns: int) -> str:
        if not self._heard.is_up(row.name, now_ns, self._settings.lost_ns):
            return "lost"
        health = self._health_row(row.name)
        if row.drained or (health is not None and health.state in OUT):
            return "drained" if run is None else "draining"
        if health is not None and not health.takes_tasks:
            return "suspect"
        if run is None:
            return "idle"
        return "leaving" if run.wanted != "run" else "busy"

    def node_states(self, now_ns: int) -> dict[str, int]:
        """How many nodes are in each state; Slurm may have more states."""
        found = dict.fromkeys(("idle", "busy", "leaving", "suspect", "draining", "drained", "lost"), 0)
        if self._slurm is not None:
            return found | Counter(self.slurm_node(node).state for node in self._slurm.nodes.values())
        rows = self._ledger.nodes.committed.items()
        return found | Counter(self._state(row, self._run_on(name), now_ns) for name, row in rows)

    def agents_heard(self, now_ns: int) -> int:
        lost_ns = self._settings.lost_ns
        return sum(1 for name in self._ledger.nodes.committed if self._heard.is_up(name, now_ns, lost_ns))

    def nodes(self, time_ns: int, now_ns: int, *, after: str, limit: int) -> Iterator[NodeView]:
        if self._slurm is not None:
            slurm = sorted(name for name in self._slurm.nodes if name > after)
            return (self.slurm_node(self._slurm.nodes[name]) for name in slurm[:limit])
        reserved = self.reservations(time_ns)
        names = sorted(name for name in self._ledger.nodes.committed if name > after)
        return (self.node(self._ledger.nodes.committed[name], now_ns, reserved) for name in names[:limit])

    def users(self) -> Iterator[UserView]:
        usage, shares = self._engine.usage(), self._ledger.config.shares
        nodes: dict[str, int] = {}
        for place in self._ledger.places.committed.values():
            user = self._ledger.tasks.committed[place.task].user
            nodes[user] = nodes.get(user, 0) + 1
        unfinished: dict[str, int] = {}
        for row in self._ledger.tasks.committed.values():
            if row.state is not FINISHED:
                unfinished[row.user] = unfinished.get(row.user, 0) + 1
        for user in sorted({**usage, **shares, **nodes, **unfinished}):
            yield UserView(
                user=user,
                unfinished=unfinished.get(user, 0),
                nodes=nodes.get(user, 0),
                node_seconds=usage.get(user, 0.0),
                share=shares.get(user, 0.0),
                highest_priority=highest_priority(self._ledger.config, user),
            )

    def quota(self, user: str, group: str) -> QuotaView:
        return quota_of(self._ledger, self._engine.usage(), user, group)

    def limits(self) -> Iterator[LimitUse]:
        return limits_in_use(self._ledger)

    def cluster(self, time_ns: int, now_ns: int) -> ClusterView:
        state = self._ledger.state
        tasks: dict[str, int] = {one.value: 0 for one in TaskState}
        for row in self._ledger.tasks.committed.values():
            tasks[row.state.value] += 1
        return ClusterView(
            cluster=state.cluster,
            term=self._ledger.term,
            time_ns=time_ns,
            nodes=len(self._ledger.nodes),
            healthy=self.agents_heard(now_ns),
            busy=len(self._ledger.places),
            tasks=tasks,
            utilisation=state.allocated_ns / state.healthy_ns if state.healthy_ns else None,
            goodput=state.productive_ns / state.healthy_ns if state.healthy_ns else None,
            changes=state.changes,
            outbox_first=state.outbox_first,
            outbox_next=state.outbox_next,
            config=self._ledger.config,
        )


def _foretold(found: Forecast, time_ns: int) -> Why:
    """Of a task that would not start at once."""
    waits = found.first.reason
    if found.start_ns is not None:
        when = format_duration(found.start_ns - time_ns)
        words = f"in {when} at the latest, if runs end when they declared and nothing is submitted that comes first"
        return Why(f"{words}; now: {waits}", found.start_ns)
    if found.undeclared:
        more = f" and {len(found.undeclared) - MAX_NAMED} more" if len(found.undeclared) > MAX_NAMED else ""
        tasks = f"{', '.join(map(str, found.undeclared[:MAX_NAMED]))}{more}"
        return Why(f"when is not known: tasks that run declared no --time ({tasks}); now: {waits}")
    if found.all_seen:
        return Why(f"not with the nodes, limits and reservations as they are; now: {waits}")
    when = format_duration(found.until_ns - time_ns)
    return Why(f"not before {when} from now, if no run ends before it declared; now: {waits}")


def _unchecked_words(row: NodeHealth) -> str:
    if row.unchecked is None:
        return ""
    return _DOUBTED if row.doubted else _UNCHECKED
