"""The repair of one node of Slurm, by the rules of the platform (`core.health.repair`): pure.

    drained by ff ──> no job is left ──> RESET, REBOOT, FIELD_DIAGNOSIS, RMA ──> recorded, or another boot ──> TESTING
                                  └───────────── the remedy is a test ────────────────────────────────────────┘
    TESTING ──> its checks pass ──> PROBATION, one hour ──> RETURNED: the ticket is closed
        └────── a fault ──> the next remedy, of the same ticket      └── a fault ──> drained, of the same ticket

Who is drained, and when checks have passed, is decided by `drains`; here is what stays between. The node knows itself
alone: tickets are numbered on it, and parts are those that it had. Who takes a node back with `scontrol` ends its
repair, not its ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.base.health_event import HealthEvent
from fireflyer.cluster.core.health.findings import finding_of
from fireflyer.cluster.core.health.messages import Effect
from fireflyer.cluster.core.health.policy import HealthPolicy
from fireflyer.cluster.core.health.records import (
    OUT,
    TAKES_TASKS,
    MemoryRows,
    NodeHealth,
    PartHistory,
    RepairState,
    RepairTicket,
    part_key,
)
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.health.repair import BY_MACHINE, Repairs

__all__ = ["WAITS_FOR_PEOPLE", "NodeRepair", "RepairRecord"]

MAX_TICKETS: Final = 64
MAX_PARTS: Final = 256
WAITS_FOR_PEOPLE: Final = (RepairState.RESET, RepairState.REBOOT, RepairState.FIELD_DIAGNOSIS, RepairState.RMA)
_POLICY: Final = HealthPolicy(back_off_ns=0)
"""How long a node stays out that was drained before is a matter of `drains`, which counts the drains of the node."""


class RepairRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node remembers of its repairs."""

    health: NodeHealth | None = None
    tickets: Annotated[tuple[RepairTicket, ...], msgspec.Meta(max_length=MAX_TICKETS)] = ()
    """Ascending; the newest are kept."""
    parts: Annotated[tuple[PartHistory, ...], msgspec.Meta(max_length=MAX_PARTS)] = ()
    boot: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Start of the node, when its remedy became due."""


class _Book:
    """`Records` of a node."""

    def __init__(self, record: RepairRecord) -> None:
        self.health: MemoryRows[str, NodeHealth] = MemoryRows(
            {record.health.name: record.health} if record.health else {}
        )
        self.tickets: MemoryRows[int, RepairTicket] = MemoryRows({one.id: one for one in record.tickets})
        self.parts: MemoryRows[str, PartHistory] = MemoryRows({one.key: one for one in record.parts})


class _Alone:
    """`Fleet` of one node. Slurm says whether jobs are on it before anything is asked."""

    def count(self) -> int:
        return 1

    def leaf_of(self, _node: str, /) -> str:
        return ""

    def group_of(self, _node: str, /) -> str:
        return ""

    def is_busy(self, _node: str, /) -> bool:
        return False


class NodeRepair:
    def __init__(self, node: str, record: RepairRecord) -> None:
        self._node, self._boot = node, record.boot
        self._book = _Book(record)
        self._effects: list[Effect] = []
        self._repairs = Repairs(_POLICY, self._book, _Alone(), self._effects)

    @property
    def health(self) -> NodeHealth:
        return self._book.health.get(self._node) or NodeHealth(name=self._node)

    @property
    def ticket(self) -> RepairTicket | None:
        """Of the repair that is not settled yet."""
        return self._book.tickets.get(self.health.ticket)

    @property
    def record(self) -> RepairRecord:
        """To be kept."""
        tickets = sorted((row for _, row in self._book.tickets.rows()), key=lambda row: row.id)
        parts = sorted((row for _, row in self._book.parts.rows()), key=lambda row: row.faults_ns[-1:])
        known = self._book.health.get(self._node)
        return RepairRecord(known, tuple(tickets[-MAX_TICKETS:]), tuple(parts[-MAX_PARTS:]), self._boot)

    def faults(self) -> int:
        """Of the part that is at fault, which are remembered."""
        fault = self.health.fault
        known = self._book.parts.get(part_key(self._node, fault)) if fault is not None else None
        return len(known.faults_ns) if known is not None else 0

    @property
    def last_fault_ns(self) -> int:
        """Of any part that is remembered; -1: none."""
        return max((at_ns for _, row in self._book.parts.rows() for at_ns in row.faults_ns), default=-1)

    # --- what happens ---

    def drained(self, fault: HealthEvent, boot: str, now_ns: int, beside: Sequence[HealthEvent] = ()) -> None:
        """The node is drained by us, and has this fault now, its worst, and others `beside` it. `boot`: its start; one
        of before a remedy was due is not that remedy."""
        before = self.health
        if before.state in TAKES_TASKS:
            self._repairs.drain(before, finding_of(fault), now_ns)
        elif before.state is RepairState.TESTING:
            self._repairs.test_failed(before, finding_of(fault), now_ns)
        else:
            beside = (fault, *beside)
        for one in beside:
            self._repairs.further_fault(self.health, finding_of(one), now_ns)
        if (self.health.state, self.health.fault) != (before.state, before.fault):
            self._boot = boot

    def idle(self, boot: str, now_ns: int, *, passes: bool) -> None:
        """The node is drained by us, and no job is on it. `passes`: no check finds a fault. A remedy that is a test
        begins with that: one that finds the same state again would say nothing new."""
        before = self.health.state
        if before is RepairState.DRAINED:
            if passes or self._repairs.remedy(self.health, now_ns) is not Remedy.TEST:
                self._repairs.vacated(self.health, now_ns)
        elif before is RepairState.REBOOT and boot and self._boot and boot != self._boot:
            self._repairs.repaired(self.health, Remedy.REBOOT, "the node was started again", BY_MACHINE, now_ns)
        if self.health.state is not before or not self._boot:
            self._boot = boot

    @property
    def remedy_due(self) -> str:
        """That a person has to do, or a reboot; empty: none."""
        state = self.health.state
        return state.value if state in WAITS_FOR_PEOPLE else ""

    def waits_for(self) -> str:
        """What has to be done before checks that pass let the node serve; empty: nothing."""
        state = self.health.state
        if state not in WAITS_FOR_PEOPLE:
            return ""
        word = state.value.replace(" ", "-")
        return f"{state.value} is due, ticket {self.health.ticket}: do it, then `ff health slurm repair {word}` on it"

    def returned(self, now_ns: int, *, by: str = "") -> None:
        """The node serves again. `by`: a person has said that it was validated; empty: its checks let it."""
        record = self.health
        if record.state in TAKES_TASKS:
            return
        if by:
            record = self._repairs.asked(record, by, "return", "validated", now_ns)
        self._repairs.return_to_service(record, "its checks pass", now_ns)

    def serving(self, now_ns: int) -> None:
        """Slurm gives the node to jobs, or another one than we has drained it."""
        record = self.health
        if record.state in OUT:
            self._repairs.note(record, "slurm", "return", "not drained by ff any more", now_ns)
            self._repairs.return_to_service(record, "taken back in Slurm", now_ns)
        elif record.state is RepairState.PROBATION and now_ns >= record.until_ns:
            self._repairs.settle(record, now_ns)

    def repaired(self, remedy: Remedy, words: str, by: str, now_ns: int) -> None:
        """A person has done this. Raises `UsageError` for a node that we have not drained."""
        if self.health.state not in OUT:
            raise UsageError(f"node {self._node} is {self.health.state.value}: ff has not drained it for a fault")
        self._repairs.repaired(self.health, remedy, words, by, now_ns)
