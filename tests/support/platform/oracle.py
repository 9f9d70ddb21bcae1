"""What must never be, checked at each commit, at each start of a process, and every second."""

from __future__ import annotations

from tests.support.platform.hosts import Grounds, Host, LauncherLike, RanksLike
from tests.support.platform.managers import SETTINGS, ManagerHost
from tests.support.platform.rules import Maintenance, check_limits, check_order, check_reservations, may_leave_early
from tests.support.platform.starvation import Starvation
from tests.support.platform.store import SimStore
from tests.support.platform.tables import MemoryTables

from fireflyer.cluster.core.platform.messages import LEASE_KEY, Changed
from fireflyer.cluster.core.platform.store.history import (
    ClusterTotals,
    CommandDone,
    HistoryRow,
    NodeChange,
    RunChange,
    TaskChange,
    decode_history,
)
from fireflyer.cluster.core.platform.store.rows import (
    CONFIG_KEY,
    NODES,
    OUTBOX_PREFIX,
    PLACES,
    RUNS,
    STATE_KEY,
    SUBMISSIONS,
    TASKS,
    ClusterRow,
    ConfigRow,
    PlaceRow,
    RunRow,
    RunState,
    TaskRow,
    Wish,
    decode_row,
)
from fireflyer.cluster.schema.sync import EndedRun, Orders, RunStatus
from fireflyer.cluster.schema.tasks import FINISHED, Outcome, TaskSpec, TaskState
from fireflyer.kvstore.core.fenced import Transact
from fireflyer.sim import World

__all__ = ["PlatformOracle"]

PART_NS = SETTINGS.stop_after_ns + SETTINGS.stop_slack_ns
"""For so long at most a gang may run in part."""


class PlatformOracle:
    def __init__(self, world: World) -> None:
        self.world = world
        self.store: SimStore | None = None
        self.grounds: Grounds | None = None
        self.tasks: dict[int, TaskRow] = {}
        self.runs: dict[tuple[int, int], RunRow] = {}
        self.places: dict[str, PlaceRow] = {}
        self.config = ConfigRow()
        self.state: ClusterRow | None = None
        self.launched: dict[str, str] = {}
        self.acknowledged: dict[int, None] = {}
        self.specs: dict[int, TaskSpec] = {}
        """Of all tasks that ever were."""
        self.zones: dict[str, str] = {}
        """Of nodes."""
        self.maintenance = Maintenance()
        self.starvation = Starvation()
        self.change_numbers: dict[int, tuple[str, str, str]] = {}
        self.tables = MemoryTables()
        self.history: dict[int, HistoryRow] = {}
        """All rows that the outbox ever had."""
        self._part_since: dict[str, int] = {}
        self._gone: dict[tuple[str, str], EndedRun | None] = {}
        """What was said of runs that are gone."""
        self.preempted = 0
        self.takeovers = 0

    # --- commits ---

    def committed(self, order: Transact) -> None:
        self._settings(order)
        before = dict.fromkeys(self.runs)
        claims = {task: row.claim for task, row in self.tasks.items() if row.claim}
        for key, value in order.write:
            if key == LEASE_KEY:
                continue
            if key == STATE_KEY:
                self._state(key, value)
            elif key.startswith(OUTBOX_PREFIX):
                self._outbox(key, value)
            elif key.startswith(TASKS.prefix):
                self._task(key, value)
            elif key.startswith(RUNS.prefix):
                self._run(key, value)
            elif key.startswith(PLACES.prefix):
                self._place(key, value)
        self._check_rows()
        if self.state is not None:
            self.maintenance.put(self.config, self.state.time_ns)
        for number in self.runs.keys() - before.keys():
            self._check_start(self.runs[number], claimed=number[0] in claims)

    def _settings(self, order: Transact) -> None:
        """What decisions of the same transaction depend on."""
        for key, value in order.write:
            if key == CONFIG_KEY and value is not None:
                self.config = decode_row(key, value, ConfigRow)
            elif key.startswith(NODES.prefix) and value is not None:
                node = NODES.decode(key, value)
                self.zones[node.name] = node.zone
            elif key.startswith(SUBMISSIONS.prefix) and value is not None:
                submission = SUBMISSIONS.decode(key, value)
                tasks = range(submission.id, submission.id + submission.count)
                self.specs.update(dict.fromkeys(tasks, submission.spec))

    def _check_start(self, run: RunRow, *, claimed: bool) -> None:
        row = self.tasks[run.task]
        if not claimed:
            check_order(run, self.config, self.tasks, self.specs, self.zones)
        check_limits(row, self.config, self.tasks, self.places.values())
        check_reservations(run, row, self.specs[run.task], self.config.reservations)

    def _state(self, key: bytes, value: bytes | None) -> None:
        assert value is not None
        row = decode_row(key, value, ClusterRow)
        if self.state is not None:
            assert row.time_ns >= self.state.time_ns, "cluster time goes back"
            assert row.next_task >= self.state.next_task
            self.takeovers += row.term != self.state.term
        self.state = row

    def _outbox(self, key: bytes, value: bytes | None) -> None:
        number = int.from_bytes(key[len(OUTBOX_PREFIX) :], "big")
        if value is None:
            assert self._in_tables(number), f"row {number} of the outbox is cleared and not in the tables"
            return
        assert number == len(self.history), f"row {number} of the outbox comes after {len(self.history)} rows"
        self.history[number] = decode_history(key, value)

    def _in_tables(self, number: int) -> bool:
        row, tables, cluster = self.history[number], self.tables, SETTINGS.cluster
        match row:
            case TaskChange():
                found = tables.tasks.get(row.task.id)
                return found is not None and found["change"] >= number
            case RunChange():
                found = tables.runs.get((row.run.task, row.run.number))
                return found is not None and found["change"] >= number
            case NodeChange():
                return (cluster, number) in tables.node_states
            case ClusterTotals():
                return (cluster, number) in tables.totals
            case CommandDone():
                return f"{cluster}/{number:020}" in tables.audit

    def all_copied(self) -> bool:
        return self.state is not None and self.state.outbox_first == self.state.outbox_next

    def check_history(self) -> None:
        """The tables are what they would be had each row been copied once, in order, by one process."""
        once = MemoryTables()
        once.copy(SETTINGS.cluster, list(self.history.items()))
        for name, rows in once.contents().items():
            assert getattr(self.tables, name) == rows, f"rows of the table {name} are missing or doubled"
        for task, row in self.tasks.items():
            assert self.tables.parts_of(task) == row.account.total_ns, f"parts of task {task} do not add up to its life"

    def _task(self, key: bytes, value: bytes | None) -> None:
        task = int.from_bytes(key[len(TASKS.prefix) :], "big")
        if value is None:
            assert self.tasks.pop(task).state is FINISHED, f"task {task} is forgotten before it has ended"
            return
        row, old = TASKS.decode(key, value), self.tasks.get(task)
        assert row.account.total_ns == row.counted_ns - row.submitted_ns, f"the account of task {task} does not add up"
        assert all(getattr(row.account, name) >= 0 for name in row.account.__struct_fields__), row.account
        if old is not None:
            assert old.state is not FINISHED or row.state is FINISHED, f"task {task} lives again"
            assert row.submitted_ns == old.submitted_ns, f"task {task} loses its place"
            self._check_age(row, old)
        if row.state is FINISHED:
            assert row.ended_ns == row.counted_ns, f"the account of task {task} ends before its life"
            assert row.outcome is Outcome.SUCCEEDED or row.reason, f"task {task} ended without a reason"
            if row.outcome is Outcome.SUCCEEDED and self.grounds is not None:
                done_ns, work_ns = self.grounds.done_ns.get(task, 0), self.grounds.work_ns(task)
                assert done_ns >= work_ns, f"task {task} succeeded with {done_ns} of {work_ns} ns of its work"
            if row.stopping:
                assert row.outcome is not Outcome.FAILED, f"task {task} was stopped, and ended {row.outcome}"
        self.tasks[task] = row

    def _check_age(self, row: TaskRow, old: TaskRow) -> None:
        waits = (TaskState.QUEUED, TaskState.SUSPENDED)
        if row.state in waits and old.state not in waits:
            self.starvation.waits_again(row, old, self.runs[row.id, row.runs - 1])

    def _run(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            place = key[len(RUNS.prefix) :]
            del self.runs[int.from_bytes(place[:8], "big"), int.from_bytes(place[8:], "big")]
            return
        run = RUNS.decode(key, value)
        old = self.runs.get((run.task, run.number))
        assert run.reason, f"run {run.number} of task {run.task} was started without a reason"
        assert run.wanted == "run" or run.wish_reason, f"run {run.number} of {run.task} is to leave without a reason"
        interrupted = run.wish is Wish.INTERRUPT and (old is None or old.wish is not Wish.INTERRUPT)
        if interrupted and not run.backfilled:
            self.preempted += 1
            self._check_guarantee(run)
        if old is None:
            others = [other for other in self.runs.values() if other.task == run.task]
            assert all(other.state is RunState.OVER for other in others), f"task {run.task} has two runs"
            assert all(other.token != run.token for other in self.runs.values()), "a token is given twice"
            assert self.tasks[run.task].state is TaskState.SCHEDULED
        self.runs[run.task, run.number] = run

    def _check_guarantee(self, run: RunRow) -> None:
        """It is interrupted now."""
        assert run.wanted_ns is not None
        lasted_ns = run.wanted_ns - run.scheduled_ns
        row, spec = self.tasks[run.task], self.specs[run.task]
        early = may_leave_early(run, row, spec, self.config.reservations)
        guaranteed = early or lasted_ns >= self.config.guaranteed_ns
        assert guaranteed, f"task {run.task} is interrupted after {lasted_ns} ns"

    def _place(self, key: bytes, value: bytes | None) -> None:
        name = key[len(PLACES.prefix) :].decode()
        if value is None:
            del self.places[name]
            return
        self.places[name] = PLACES.decode(key, value)

    def _check_rows(self) -> None:
        for name, place in self.places.items():
            run = self.runs[place.task, place.run]
            assert name in run.nodes
            assert run.state is not RunState.OVER, f"{name} belongs to a run that is over"
        runs_of: dict[int, int] = {}
        for run in self.runs.values():
            if run.state is not RunState.OVER:
                runs_of[run.task] = runs_of.get(run.task, 0) + 1
        assert all(count == 1 for count in runs_of.values())
        for row in self.tasks.values():
            waits = row.state in (TaskState.QUEUED, TaskState.SUSPENDED)
            assert not waits or row.id not in runs_of, f"task {row.id} waits while a run of it lives"

    # --- orders and changes ---

    def ordered(self, node: str, orders: Orders) -> None:
        """Nothing leaves before it is committed."""
        for order in orders.runs:
            known = [run for run in self.runs.values() if run.token == order.run_token]
            if order.wanted in ("run", "suspend"):
                assert known, f"{node} is ordered a run that is in no row"
                assert node in known[0].nodes, f"{node} is ordered a run of other nodes"
            if order.wanted == "forget" and known:
                assert known[0].state is RunState.OVER, f"{node} is to forget a run that is not over"

    def told(self, manager: str, change: Changed) -> None:
        what = (change.what, change.name, change.state)
        known = self.change_numbers.setdefault(change.number, what)
        assert known == what, f"change {change.number} is {known} and {what}"

    def looked_at(self, manager: ManagerHost) -> None:
        machine, now_ns = manager.machine, manager.now_ns
        self._look_at_policy(machine.time_ns(now_ns))
        for view in machine.tasks(now_ns, limit=3):
            assert machine.why(view.id, now_ns).text, f"nobody knows why of task {view.id}"
            until_ns = view.ended_ns if view.ended_ns is not None else machine.time_ns(now_ns)
            assert view.account.total_ns == until_ns - view.submitted_ns, f"task {view.id}: the shown account is wrong"

    def _look_at_policy(self, time_ns: int) -> None:
        """`time_ns`: of the cluster."""
        assert self.grounds is not None
        self.maintenance.look(time_ns, self.config, self.specs, self.grounds)
        self.starvation.look(time_ns, self.config, self.tasks, self.specs, self.zones, self.places)

    # --- processes ---

    def started(self, ranks: RanksLike) -> None:
        """Ranks begin on a host, and live."""
        assert self.grounds is not None
        for other in self.grounds.living_ranks():
            if other is ranks:
                continue
            assert other.host is not ranks.host, f"{ranks.host.name} runs two gangs"
            same = other.launcher.token == ranks.launcher.token
            assert same or other.launcher.task != ranks.launcher.task, f"task {ranks.launcher.task} runs twice"
            assert not same or other.attempt == ranks.attempt, f"two attempts of a run of {ranks.launcher.task} live"

    def launch(self, host: Host, launcher: LauncherLike) -> None:
        assert launcher.token not in self.launched, f"run {launcher.token[:6]} is started twice"
        self.launched[launcher.token] = host.name
        row = self.tasks.get(launcher.task)
        assert row is not None, "a task that does not exist is started"
        run = self.runs[launcher.task, launcher.run]
        assert host.name == run.nodes[0]

    def said(self, host: Host, statuses: tuple[RunStatus, ...]) -> None:
        """By an agent, of the runs on its node."""
        for status in statuses:
            what = (host.name, status.token)
            if status.state == "gone":
                assert not host.lives(status.token), f"{host.name} says that a run is gone, and it lives"
                assert self._gone.setdefault(what, status.ended) == status.ended, "another end is told"
            else:
                assert what not in self._gone, f"a run is back on {host.name} after it was gone"

    def every_second(self) -> None:
        """No gang runs in part for long, in truth."""
        if self.grounds is None:
            return
        live: dict[str, list[RanksLike]] = {}
        for ranks in self.grounds.living_ranks():
            live.setdefault(ranks.launcher.token, []).append(ranks)
        for token, gang in live.items():
            launcher = gang[0].launcher
            if len(gang) == launcher.size and launcher.alive:
                self._part_since.pop(token, None)
                continue
            since_ns = self._part_since.setdefault(token, self.world.now_ns)
            late = self.world.now_ns - since_ns > PART_NS
            assert not late, f"{len(gang)} of {launcher.size} nodes run on for too long"
        for token in list(self._part_since):
            if token not in live:
                del self._part_since[token]

    def check_end(self) -> None:
        assert self.store is not None
        assert self.grounds is not None
        for task in self.acknowledged:
            assert task in self.tasks, f"task {task} is lost"
        for row in self.tasks.values():
            assert row.state is FINISHED, f"task {row.id} is {row.state.value} at the end"
        assert not self.places, f"nodes belong to runs at the end: {sorted(self.places)}"
        for run in self.runs.values():
            assert run.state is RunState.OVER, f"run {run.number} of task {run.task} is not over at the end"
        for host in self.grounds.hosts.values():
            known = [token for token, (record, _) in host.runs.items() if not record.forgotten]
            assert not known, f"{host.name} was not told to forget {sorted(known)}"
            marks = [process.mark for process in host.processes]
            assert not marks, f"processes live on {host.name} at the end: {marks}"
        assert self.all_copied(), "rows are left in the outbox"
        self.check_history()
        submissions = [key for key in self.store.rows if key.startswith(SUBMISSIONS.prefix)]
        assert len(submissions) <= len(self.tasks)
