"""One manager that leads, a store that commits at once, and nodes that say what a test says: for tests of rules."""

from __future__ import annotations

import msgspec
from tests.support.platform.store import carried_out

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import MS, SECOND
from fireflyer.cluster.core.platform.commands import Command
from fireflyer.cluster.core.platform.machine import PlatformMachine
from fireflyer.cluster.core.platform.messages import (
    Answer,
    Changed,
    Commanded,
    Effect,
    Event,
    OrdersChanged,
    Result,
    Settings,
    Submission,
    Submitted,
    Synced,
    Tick,
)
from fireflyer.cluster.core.platform.webhooks import Deliver
from fireflyer.cluster.schema.sync import EndedRun, HealthReport, Inventory, Orders, RunStatus, Sync
from fireflyer.cluster.schema.tasks import Program, RunParts, TaskSpec, TaskState
from fireflyer.kvstore.core.fenced import Failed, Outcome, Transact

__all__ = ["CLUSTER", "WALL_NS", "Desk", "ended", "spec"]

CLUSTER = "5eed" * 8
WALL_NS = 1_700_000_000 * SECOND
INVENTORY = Inventory(
    address="10.0.0.1", port=7000, version="1", boot_id="b", hostname="h", cores=64, memory_bytes=1 << 38
)


def spec(name: str = "train", **fields: object) -> TaskSpec:
    return msgspec.structs.replace(TaskSpec(name=name, program=Program(script="train.py")), **fields)


def ended(cause: object, **fields: object) -> EndedRun:
    return msgspec.convert(
        {"cause": cause, "exit_code": 0, "parts": RunParts(), **fields}, EndedRun, from_attributes=True
    )


class Desk:
    """Time stands still unless a test lets it pass."""

    def __init__(self, *nodes: str, rows: dict[bytes, bytes] | None = None, holder: str = "m0", **settings: object):
        self.rows: dict[bytes, bytes] = {} if rows is None else rows
        self.now_ns = SECOND
        self.fail_next: list[str] = []
        """Why transactions that write fail, one after the other."""
        self.changes: list[Changed] = []
        self.deliveries: list[Deliver] = []
        self.orders_changed: list[str] = []
        self.results: dict[int, Result] = {}
        self._calls = 0
        self._sequences: dict[str, int] = {}
        self.statuses: dict[str, dict[str, RunStatus]] = {}
        self.reports: dict[str, list[HealthReport]] = {}
        """Of the checks of a node, that the manager has not taken yet."""
        self.report_numbers: dict[str, int] = {}
        base = Settings(holder=holder, address=f"{holder}:1", cluster=CLUSTER, settle_ns=0, schedule_every_ns=0)
        self.settings = msgspec.structs.replace(base, **settings)
        self.machine = PlatformMachine(self.settings)
        for _ in range(200):
            self.pass_time(500 * MS)
            if self.machine.may_act(self.now_ns):
                break
        assert self.machine.may_act(self.now_ns)
        for node in nodes:
            self.say(node)

    # --- events ---

    def handle(self, event: Event) -> None:
        todo: list[Event] = [event]
        while todo:
            for effect in self.machine.handle(self.now_ns, todo.pop(0)):
                outcome = self._perform(effect)
                if outcome is not None:
                    todo.append(outcome)

    def _perform(self, effect: Effect) -> Outcome | None:
        match effect:
            case Transact(write=write) if self.fail_next and write:
                return Failed(effect.number, self.fail_next.pop(0))
            case Transact():
                return carried_out(self.rows, effect)
            case Answer(call, result):
                assert call not in self.results, "answered twice"
                self.results[call] = result
            case Deliver():
                self.deliveries.append(effect)
            case Changed():
                self.changes.append(effect)
            case OrdersChanged(node):
                self.orders_changed.append(node)
            case _:
                pass
        return None

    def pass_time(self, duration_ns: int, *, hear: bool = True, step_ns: int = 500 * MS) -> None:
        """Ticks; nodes say what they said before, unless they are not to be heard."""
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + step_ns)
            if hear:
                for node in list(self._sequences):
                    self.say(node)
            self.handle(Tick(WALL_NS + self.now_ns))

    def submit(self, *specs: TaskSpec, user: str = "ann", **fields: object) -> Result:
        self._calls += 1
        asked = Submitted(call=self._calls, user=user, specs=specs)
        self.handle(msgspec.structs.replace(asked, **fields))
        return self.results[self._calls]

    def task(self, *specs: TaskSpec, user: str = "ann", **fields: object) -> int:
        """Submits one, and says which it is."""
        result = self.submit(*specs, user=user, **fields)
        assert isinstance(result, Submission), result
        return result.tasks[0]

    def command(self, command: Command, user: str = "ann", roles: tuple[str, ...] = ()) -> Result:
        self._calls += 1
        self.handle(Commanded(call=self._calls, user=user, roles=roles, command=command))
        return self.results[self._calls]

    # --- nodes ---

    def say(self, node: str, *runs: RunStatus, inventory: Inventory = INVENTORY) -> None:
        """The node lists these runs from now on, beside those that it listed before."""
        known = self.statuses.setdefault(node, {})
        known.update({run.token: run for run in runs})
        sequence = self._sequences[node] = self._sequences.get(node, 0) + 1
        orders = self.machine.orders_for(node, self.now_ns)
        for order in orders.runs if orders is not None else ():
            if order.wanted == "forget":
                known.pop(order.run_token, None)
        self.handle(
            Synced(
                node,
                Sync(
                    incarnation=1,
                    sequence=sequence,
                    heard=orders.version if orders is not None else 0,
                    term=orders.term if orders is not None else 0,
                    inventory=inventory,
                    runs=tuple(known.values()),
                    health=tuple(self._reports_left(node, orders)),
                ),
            )
        )

    def checks(self, node: str, *events: HealthEvent, probe: int = 0) -> None:
        """The checks of the node report this; it is said until the manager has taken it."""
        number = self.report_numbers[node] = self.report_numbers.get(node, 0) + 1
        lines = tuple(msgspec.json.encode(event) for event in events)
        self.reports.setdefault(node, []).append(HealthReport(number=number, probe=probe, lines=lines))
        self.say(node)

    def _reports_left(self, node: str, orders: Orders | None) -> list[HealthReport]:
        heard = orders.health.heard if orders is not None and orders.health is not None else None
        left = self.reports.setdefault(node, [])
        left[:] = [one for one in left if heard is None or one.number > heard.number]
        return left

    def orders(self, node: str) -> Orders:
        orders = self.machine.orders_for(node, self.now_ns)
        assert orders is not None
        return orders

    def token(self, task: int) -> str:
        """Of its last run."""
        return self.machine.runs(task, self.now_ns)[-1].token

    def nodes_of(self, task: int) -> tuple[str, ...]:
        return self.machine.task(task, self.now_ns).nodes

    def runs_on(self, task: int, *nodes: str) -> None:
        """The first node says that the run goes on."""
        self.say(nodes[0], RunStatus(token=self.token(task), state="running", lead=True))

    def gone(self, task: int, cause: object, **fields: object) -> None:
        """The launcher has ended like this, and nothing is left on any node."""
        nodes, token = self.nodes_of(task), self.token(task)
        self.say(nodes[0], RunStatus(token=token, state="gone", lead=True, ended=ended(cause, **fields)))
        for node in nodes[1:]:
            self.say(node, RunStatus(token=token, state="gone"))

    def state(self, task: int) -> TaskState:
        return self.machine.task(task, self.now_ns).state
