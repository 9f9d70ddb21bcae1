"""What each node is told: all runs that it should have, made from the rows that are committed and from what it says.

    the node is the run's          wanted of the run; `launch` to the first node until its launcher is known to run
    it lists a run that is not its own:
        live                       stop
        gone, the run is not over  stop: tickets of it may still come
        gone, over or unknown      forget

A node's version grows whenever its orders change; each leader begins with 1 in its own term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.messages import Settings
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import PlaceRow, RunRow, RunState
from fireflyer.cluster.schema.sync import MAX_RUNS, HealthOrder, LaunchOrder, Orders, RunNode, RunOrder, Sync

__all__ = ["GONE", "OrderBook", "orders_of_retired"]


GONE: Final = 1
"""Exit code of an agent whose job has ended."""


def orders_of_retired(said: Sync, managers: tuple[str, ...]) -> Orders:
    """For the agent of a node whose job has ended, but which lives on, as where it could not be reached: it has no
    runs, and is to go. Any manager may say so: that the job has ended is committed."""
    return Orders(term=said.term, version=said.heard + 1, managers=managers, leave=GONE)


class OrderBook:
    """Versions of orders, of one term."""

    def __init__(self, ledger: Ledger, heard: Heard, settings: Settings) -> None:
        self._ledger, self._heard, self._settings = ledger, heard, settings
        self._orders: dict[str, Orders] = {}
        self.leave_of: Callable[[str], int | None] = lambda _: None
        """Of the engine: the exit code with which an agent is to go."""
        self.health_of: Callable[[str], HealthOrder | None] = lambda _: None
        self._since: dict[tuple[str, str], int] = {}
        """(node, run token) -> the first version that names it, as long as they do."""

    def refresh(self, node: str) -> bool:
        """Whether its orders are other ones than before."""
        known = self._orders.get(node)
        runs = tuple(self._runs(node))
        leave, health = self.leave_of(node), self.health_of(node)
        if known is not None and (known.runs, known.leave, known.health) == (runs, leave, health):
            return False
        version = known.version + 1 if known is not None else 1
        for run in known.runs if known is not None else ():
            if all(run.run_token != other.run_token for other in runs):
                self._since.pop((node, run.run_token), None)
        for run in runs:
            self._since.setdefault((node, run.run_token), version)
        self._orders[node] = Orders(
            term=self._ledger.term,
            version=version,
            runs=runs,
            stop_after_ns=self._settings.stop_after_ns,
            managers=self._settings.managers,
            leave=leave,
            health=health,
        )
        return True

    def of(self, node: str) -> Orders:
        if node not in self._orders:
            self.refresh(node)
        return self._orders[node]

    def has_followed(self, node: str, token: str) -> bool:
        """Whether what the node said last was said after it had heard orders that name the run."""
        sync, since = self._heard.sync(node), self._since.get((node, token))
        return sync is not None and since is not None and sync.term == self._ledger.term and sync.heard >= since

    def forget(self, node: str) -> None:
        self._orders.pop(node, None)

    # --- what they say ---

    def _runs(self, node: str) -> list[RunOrder]:
        place = self._ledger.places.committed.get(node)
        orders: list[RunOrder] = []
        if place is not None:
            orders.append(self._own(node, place))
        sync = self._heard.sync(node)
        for status in sync.runs if sync is not None else ():
            if any(order.run_token == status.token for order in orders):
                continue
            forget = status.state == "gone" and not self._is_open(status.token)
            orders.append(RunOrder(run_token=status.token, wanted="forget" if forget else "stop"))
        return orders[:MAX_RUNS]

    def _is_open(self, token: str) -> bool:
        """Also one whose end is only in the draft: it is over when that is committed."""
        key = self._ledger.index.tokens.get(token)
        if key is not None:
            return True
        return any(
            row.token == token and row.state is not RunState.OVER
            for run in self._ledger.runs.changes()
            if (row := self._ledger.runs.committed.get(run)) is not None
        )

    def _own(self, node: str, place: PlaceRow) -> RunOrder:
        run = self._ledger.runs.committed[place.task, place.run]
        lead = run.nodes[0] == node and run.state is RunState.SCHEDULED and run.wanted == "run"
        task = self._ledger.tasks.committed[run.task]
        program = self._ledger.submissions.committed[task.submission].spec.program
        return RunOrder(
            run_token=run.token,
            wanted=run.wanted,
            launch=self._launch(run) if lead else None,
            snapshot=program.snapshot,
            user=task.user if program.snapshot else "",
            environment=program.environment,
        )

    def _launch(self, run: RunRow) -> LaunchOrder:
        task = self._ledger.tasks.committed[run.task]
        return LaunchOrder(
            task=run.task,
            run=run.number,
            user=task.user,
            spec=self._ledger.submissions.committed[task.submission].spec,
            nodes=tuple(self._node(name) for name in run.nodes),
            whole_life=task.whole_life,
            array_index=task.array_index,
            node_check=self._settings.node_check,
            node_check_limit_ns=self._settings.node_check_limit_ns,
        )

    def _node(self, name: str) -> RunNode:
        row = self._ledger.nodes.committed.get(name)
        sync = self._heard.sync(name)
        inventory = sync.inventory if sync is not None else row.inventory if row is not None else None
        if row is None or inventory is None:
            return RunNode(name=name, address="", port=1)
        return RunNode(name=name, address=inventory.address, port=inventory.port, zone=row.zone, leaf=row.leaf)
