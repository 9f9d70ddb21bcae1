"""All that a manager has in memory while it leads: one term, one draft after the other.

begin      a draft at this instant
carry_out  a submission or a command
decide     what nodes said, deadlines, and the scheduler
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from fireflyer.cluster.core.platform.administration import Administration
from fireflyer.cluster.core.platform.engine import Engine
from fireflyer.cluster.core.platform.heard import Heard
from fireflyer.cluster.core.platform.life.progress import Progress
from fireflyer.cluster.core.platform.life.tasks import Tasks
from fireflyer.cluster.core.platform.messages import Audited, Commanded, Done, Result, Settings, Submitted, WebhookAsked
from fireflyer.cluster.core.platform.node_health import NodesHealth
from fireflyer.cluster.core.platform.orders import OrderBook
from fireflyer.cluster.core.platform.planner import Planner
from fireflyer.cluster.core.platform.show import Show
from fireflyer.cluster.core.platform.slurm.engine import SlurmEngine
from fireflyer.cluster.core.platform.slurm.messages import SlurmEvent, WatchedJob, Work
from fireflyer.cluster.core.platform.slurm.work import watched, work
from fireflyer.cluster.core.platform.store.history import ClusterTotals, CommandDone, NodeChange
from fireflyer.cluster.core.platform.store.ledger import Ledger
from fireflyer.cluster.core.platform.store.rows import NodeRow
from fireflyer.cluster.core.platform.submissions import submit
from fireflyer.cluster.core.platform.tally import Tally
from fireflyer.cluster.core.platform.totals import Totals
from fireflyer.cluster.schema.sync import Sync

__all__ = ["Leading"]

MAX_NODES_PER_DRAFT: Final = 2000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class Leading:
    def __init__(self, ledger: Ledger, settings: Settings, now_ns: int) -> None:
        self.ledger, self._settings = ledger, settings
        self.heard = Heard(now_ns)
        self.orders = OrderBook(ledger, self.heard, settings)
        self._tasks = Tasks(ledger, self.heard, settings)
        self.webhooks = self._tasks.webhooks
        self._progress = Progress(ledger, self.heard, self.orders, self._tasks, settings)
        self._health = NodesHealth(ledger, self._tasks, settings)
        self.orders.health_of = self._health.order_of
        self._administration = Administration(ledger, self.heard, self._tasks, self._health, settings)
        self.slurm: SlurmEngine | None = None
        if settings.slurm is not None:
            self.slurm = SlurmEngine(ledger, self.heard, self._tasks, self._progress, settings, settings.slurm)
            self.orders.leave_of = self.slurm.leave_of
        self._engine: Engine = self.slurm or Planner(ledger, self.heard, self._tasks, settings)
        self._engine.rebuild(ledger.time_ns(now_ns), now_ns)
        self._totals = Totals(ledger.state)
        self.show = Show(ledger, self.heard, self._engine, settings, self.slurm)
        self.tally = Tally()
        self.copied = 0
        self._since_ns = now_ns
        self._decided_ns: int | None = None
        self._dirty: dict[str, None] = {}
        self._in_draft: dict[str, None] = {}
        self._up: dict[str, None] = {}
        self._unheard: dict[str, None] = dict.fromkeys(ledger.nodes.committed)
        """Nodes that were known when this term began and were not heard in it."""
        self._totals_ns = 0
        """When they were put into the outbox last."""
        self._recorded_counts: tuple[int, int, int] | None = None
        self._ticked = True

    # --- what comes in ---

    def tick(self, now_ns: int, *, slept: bool) -> None:
        self._ticked = True
        if slept:
            self.heard.restart_clocks(now_ns)

    def hear(self, node: str, sync: Sync, now_ns: int) -> bool:
        """False for what is old, or of a node that is one too many."""
        if self.ledger.nodes.get(node) is None and (
            len(self.ledger.nodes) >= self._settings.max_nodes or not _NAME.fullmatch(node)
        ):
            return False
        ended_after_ns = self._settings.stop_after_ns + self._settings.stop_slack_ns
        before = self.heard.sync(node)
        if not self.heard.hear(node, sync, now_ns, ended_after_ns=ended_after_ns):
            return False
        nothing_new = before is not None and before.inventory == sync.inventory and not (before.runs or sync.runs)
        nothing_new = nothing_new and not sync.health
        if not nothing_new or node not in self._up:
            self._dirty[node] = None
        return True

    def hear_slurm(self, event: SlurmEvent) -> None:
        """Of no meaning to a manager whose engine is another."""
        if self.slurm is not None:
            self.slurm.hear(event)

    def slurm_jobs(self) -> tuple[WatchedJob, ...]:
        return watched(self.ledger) if self.slurm is not None else ()

    def slurm_work(self, now_ns: int) -> tuple[Work, ...]:
        settings = self._settings
        if self.slurm is None or settings.slurm is None:
            return ()
        return work(self.ledger, self.slurm, settings, settings.slurm, self.ledger.time_ns(now_ns))

    def unsettled(self, now_ns: int) -> str:
        """Why nothing is started or interrupted yet; empty once nodes have had the time to be heard by a new leader,
        and runs that a restored store does not know the time to end."""
        if self.ledger.time_ns(now_ns) < self.ledger.state.starts_after_ns:
            return "the store was restored from a backup, and runs that were started after it have time to end"
        if now_ns - self._since_ns >= self._settings.settle_ns:
            return ""
        heard = all(self.heard.ever(name) for name in self.ledger.nodes.committed)
        return "" if heard else "the manager has just begun and waits to hear from all nodes"

    # --- a draft ---

    def begin(self, now_ns: int) -> None:
        self._tasks.now_ns = self.ledger.time_ns(now_ns)

    def carry_out(self, asked: Submitted | Commanded | WebhookAsked | Audited, now_ns: int) -> Result:
        if isinstance(asked, WebhookAsked):
            number, text = self.webhooks.change(asked.change, asked.user, asked.roles, self._tasks.now_ns)
            name = type(asked.change).__name__
            self.ledger.record(CommandDone(self._tasks.now_ns, asked.user, name, str(number), text))
            return Done(text, number)
        if isinstance(asked, Audited):
            self.ledger.record(CommandDone(self._tasks.now_ns, asked.user, asked.what, asked.target, asked.text))
            self._tasks.notes.append(f"{asked.user}: {asked.what} {asked.target}: {asked.text}")
            return Done("")
        if isinstance(asked, Submitted):
            for spec in asked.specs:
                self.webhooks.check_notify(asked.user, spec.notify)
            return submit(self.ledger, self._tasks, self._settings, asked)
        return self._administration.apply(asked, now_ns)

    def decide(self, now_ns: int) -> None:
        time_ns = self._tasks.now_ns
        self.webhooks.apply(time_ns)
        for node in list(self._dirty)[:MAX_NODES_PER_DRAFT]:
            del self._dirty[node]
            self._in_draft[node] = None
            self._observe(node, now_ns)
        if self._ticked:
            self._ticked = False
            self._progress.sweep(now_ns)
            self._sweep_nodes(now_ns)
            self._health.sweep()
            self._engine.sample_usage(time_ns)
            self._record_totals(time_ns)
        if self._administration.settings_changed:
            self._administration.settings_changed = False
            self._engine.settings_changed(time_ns)
        if self.slurm is not None:
            self.slurm.follow(now_ns)
        self._health.runs_failed()
        for node in (
            *self._in_draft, *self._tasks.nodes, *self._tasks.gone, *self._administration.nodes, *self._health.nodes,
        ):  # fmt: skip
            self._engine.node(node, time_ns, now_ns)
        self._engine.told(time_ns)
        self._schedule(time_ns, now_ns)
        if self.copied > self.ledger.draft_state.outbox_first:
            self.ledger.clear_outbox(self.copied)
        self._totals.put(self.ledger)

    def _schedule(self, time_ns: int, now_ns: int) -> None:
        waited = self._decided_ns is None or now_ns - self._decided_ns >= self._settings.schedule_every_ns
        if waited and self._engine.is_due(time_ns) and not self.unsettled(now_ns):
            self._decided_ns = now_ns
            self._engine.decide(time_ns)

    def _observe(self, node: str, now_ns: int) -> None:
        sync = self.heard.sync(node)
        if sync is None:
            return
        row = self.ledger.nodes.get(node)
        if row is None:
            row = NodeRow(name=node, added_ns=self._tasks.now_ns)
        known = row.inventory
        rebooted = known is not None and known.boot_id != sync.inventory.boot_id
        if row.inventory != sync.inventory:
            self.ledger.nodes.put(node, msgspec.structs.replace(row, inventory=sync.inventory))
        if node not in self._up:
            self._mark(node, up=True)
        self._progress.observe(node, now_ns)
        self._health.observe(node, sync, rebooted=rebooted)

    def totals(self, time_ns: int) -> ClusterTotals:
        return self._totals.now(time_ns, self.ledger.draft_state.productive_ns)

    def _record_totals(self, time_ns: int) -> None:
        """Sooner where the number of nodes of some kind has changed."""
        counts, every_ns = self._totals.counts, self._settings.totals_every_ns
        if time_ns - self._totals_ns >= (every_ns if counts == self._recorded_counts else every_ns // 6):
            self._totals_ns, self._recorded_counts = time_ns, counts
            self.ledger.record(self.totals(time_ns))

    def _mark(self, node: str, *, up: bool) -> None:
        self._unheard.pop(node, None)
        if up:
            self._up[node] = None
        else:
            self._up.pop(node, None)
        state = "up" if up else "lost"
        self.ledger.record(NodeChange(self._tasks.now_ns, node, state))
        self.ledger.changed("node", node, state)
        if not up:
            self.webhooks.node_lost(node, self._tasks.now_ns)

    def _sweep_nodes(self, now_ns: int) -> None:
        """Nodes that have become silent; how many there are of which kind."""
        for node in list(self._up):
            if self.ledger.nodes.get(node) is None:
                del self._up[node]
            elif not self.heard.is_up(node, now_ns, self._settings.lost_ns):
                self._mark(node, up=False)
                self._in_draft[node] = None
        for node in list(self._unheard):
            if self.ledger.nodes.get(node) is None:
                del self._unheard[node]
            elif self.heard.silent_ns(node, now_ns) >= self._settings.lost_ns:
                self._mark(node, up=False)
        busy = sum(1 for node in self.ledger.places.committed if node in self._up)
        known, healthy = len(self.ledger.nodes), len(self._up)
        if self.slurm is not None:
            known, healthy = self.slurm.count_nodes()
        self._totals.pass_time(self._tasks.now_ns, known, healthy, busy)

    def changed_orders(self) -> list[str]:
        """Nodes whose orders are other ones, now that the draft is committed."""
        nodes = {**self._tasks.nodes, **self._in_draft, **self._health.nodes}
        for node in (*self._administration.nodes, *self._tasks.gone):
            if self.ledger.nodes.committed.get(node) is None:
                self.heard.forget(node)
                self.orders.forget(node)
                self._health.forget(node)
        self._health.committed()
        self._tasks.nodes.clear()
        self._tasks.gone.clear()
        self._in_draft.clear()
        self._administration.nodes.clear()
        return [node for node in nodes if self.heard.ever(node) and self.orders.refresh(node)]

    def followed_slurm(self) -> tuple[SlurmEvent, ...]:
        """What Slurm said that the committed draft was made of."""
        return self.slurm.committed() if self.slurm is not None else ()

    def taken_notes(self) -> list[str]:
        notes, self._tasks.notes = self._tasks.notes, []
        return notes

    def rollback(self, now_ns: int) -> None:
        """The draft never was: what it was made of is looked at again."""
        self.ledger.rollback()
        self.webhooks.rollback()
        self._dirty.update(self._in_draft)
        self._dirty.update(self._up)
        self._in_draft.clear()
        self._up.clear()
        self._totals, self._totals_ns = Totals(self.ledger.state), 0
        self._unheard = dict.fromkeys(self.ledger.nodes.committed)
        self._tasks.touched.clear()
        self._tasks.failed.clear()
        self._tasks.nodes.clear()
        self._tasks.gone.clear()
        self._tasks.notes.clear()
        self._administration.nodes.clear()
        self._health.rollback()
        self._ticked = True
        self._engine.rebuild(self.ledger.time_ns(now_ns), now_ns)
