"""The repair of a node of Slurm: remedies by the history of the part, one ticket until the end of the probation."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.health import fault

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.remedies import Remedy
from fireflyer.cluster.core.slurm.repair import MAX_TICKETS, NodeRepair, RepairRecord

HOUR = 3600 * SECOND
DAY = 24 * HOUR
LINK = fault("infiniband", cause="link_down", part="mlx5_0", serial="MT21", words="port 1 is down")
LOST = fault("gpu_xid", cause="xid_79", part="gpu:3", serial="1650", words="fell off the bus", once=True)


class Node:
    """Kept and read again after each round, as its shell does."""

    def __init__(self) -> None:
        self.kept = msgspec.json.encode(RepairRecord())
        self.now_ns = DAY
        self.boot = "first"

    @property
    def repair(self) -> NodeRepair:
        return NodeRepair("n7", msgspec.json.decode(self.kept, type=RepairRecord))

    def keep(self, repair: NodeRepair) -> None:
        self.kept = msgspec.json.encode(repair.record)
        self.now_ns += 300 * SECOND

    def fails(self, event: object = LINK, *, busy: bool = False) -> str:
        repair = self.repair
        repair.drained(event, self.boot, self.now_ns)  # type: ignore[arg-type]
        if not busy:
            repair.idle(self.boot, self.now_ns, passes=False)
        self.keep(repair)
        return repair.health.state.value

    def passes(self) -> str:
        """Of a node that is drained: it serves again where nothing is due."""
        repair = self.repair
        repair.idle(self.boot, self.now_ns, passes=True)
        if not repair.waits_for():
            repair.returned(self.now_ns)
        self.keep(repair)
        return repair.health.state.value

    def serves(self, later_ns: int = 0) -> str:
        repair = self.repair
        self.now_ns += later_ns
        repair.serving(self.now_ns)
        self.keep(repair)
        return repair.health.state.value

    def repaired(self, remedy: Remedy) -> None:
        repair = self.repair
        repair.repaired(remedy, "done", "ann", self.now_ns)
        self.keep(repair)


def test_a_first_fault_is_over_when_its_checks_pass_and_its_ticket_after_the_probation() -> None:
    node = Node()
    assert node.fails() == "drained"
    assert node.fails() == "drained", "a test that finds the same state again says nothing new"
    assert node.passes() == "probation"
    ticket = node.repair.ticket
    assert ticket is not None
    assert (ticket.id, ticket.fault.words, ticket.closed_ns) == (1, "port 1 is down", None)
    assert [action.what for action in ticket.actions] == ["drain", "return"]
    assert node.serves() == "probation"
    assert node.serves(HOUR) == "returned"
    (ticket,) = node.repair.record.tickets
    assert ticket.closed_ns is not None


def test_a_fault_during_the_probation_is_of_the_same_ticket_and_the_next_remedy_waits_for_a_person() -> None:
    node = Node()
    node.fails()
    node.passes()
    assert node.fails() == "reboot"
    assert node.passes() == "reboot", "what was to be done was not done"
    assert node.repair.waits_for() == "reboot is due, ticket 1: do it, then `ff health slurm repair reboot` on it"
    node.repaired(Remedy.REBOOT)
    assert node.passes() == "probation"
    ticket = node.repair.ticket
    assert ticket is not None
    assert [(action.by, action.what) for action in ticket.actions] == [
        ("health", "drain"), ("health", "return"), ("health", "drain"), ("ann", "reboot"), ("health", "return"),
    ]  # fmt: skip


def test_another_start_of_the_node_is_a_reboot_that_nobody_has_to_record() -> None:
    node = Node()
    assert node.fails(LOST, busy=True) == "drained", "a job is there still"
    assert node.fails(LOST) == "reboot"
    assert node.passes() == "reboot"
    node.boot = "second"
    assert node.passes() == "probation"


def test_a_test_that_fails_after_a_repair_makes_the_next_remedy_due() -> None:
    node = Node()
    node.fails(LOST)
    node.boot = "second"
    assert node.fails(LOST) == "testing"
    assert node.fails(LOST) == "field diagnosis"
    assert node.repair.faults() == 2
    assert "field-diagnosis" in node.repair.waits_for()


def test_a_start_of_before_the_reboot_was_due_is_not_that_reboot() -> None:
    node = Node()
    node.fails()
    node.passes()
    node.boot = "second"
    assert node.fails(busy=True) == "drained"
    node.passes()
    assert node.repair.waits_for().startswith("reboot is due")
    node.boot = "third"
    assert node.fails() == "testing"
    node.boot = "fourth"
    assert node.fails(LOST) == "reboot"
    assert node.fails(LOST) == "reboot", "the fourth start was before"
    node.boot = "fifth"
    assert node.passes() == "probation"


def test_a_worse_fault_of_another_part_decides_what_is_due_and_each_part_counts_once() -> None:
    low = msgspec.structs.replace(LINK, severity="low")
    node = Node()
    assert node.fails(low) == "drained"
    assert node.fails(LOST) == "reboot"
    assert node.fails(low) == "reboot"
    assert node.fails(LOST) == "reboot"
    assert node.repair.health.fault is not None
    assert node.repair.health.fault.cause == "xid_79"
    assert [len(part.faults_ns) for part in node.repair.record.parts] == [1, 1]
    other = msgspec.structs.replace(LOST, part="gpu:4", serial="1651")
    node.fails(other)
    assert len(node.repair.record.parts) == 3
    assert node.passes() == "reboot", "the state of the link is gone, what happened is not"


def test_history_is_of_the_part_and_an_exchanged_one_has_none() -> None:
    node = Node()
    node.fails(LOST)
    node.repaired(Remedy.RMA)
    node.passes()
    other = msgspec.structs.replace(LOST, serial="1651")
    assert node.fails(other) == "reboot"
    assert node.repair.faults() == 1
    node.repaired(Remedy.REBOOT)
    node.passes()
    assert node.serves(2 * HOUR) == "returned"
    assert node.fails(LOST) == "field diagnosis", "the old one is back in its slot"
    node.repaired(Remedy.FIELD_DIAGNOSIS)
    node.passes()
    node.serves(29 * DAY)
    assert node.fails(LOST) == "reboot", "faults of more than 28 days ago count no more"


def test_who_takes_the_node_back_in_slurm_ends_its_repair() -> None:
    node = Node()
    node.fails(LOST)
    assert node.serves() == "probation"
    ticket = node.repair.ticket
    assert ticket is not None
    assert (ticket.actions[-1].what, node.repair.health.reason[:19]) == ("return", "taken back in Slurm")


def test_a_person_who_has_validated_it_needs_no_remedy() -> None:
    node = Node()
    node.fails(LOST)
    repair = node.repair
    repair.returned(node.now_ns, by="ann")
    assert repair.health.state.value == "probation"
    assert repair.ticket is not None
    assert [(action.by, action.what) for action in repair.ticket.actions[-2:]] == [
        ("ann", "return"),
        ("health", "return"),
    ]


def test_a_repair_of_a_node_that_is_not_out_is_refused_and_tickets_are_bounded() -> None:
    node = Node()
    with pytest.raises(UsageError, match="node n7 is healthy: ff has not drained it"):
        node.repaired(Remedy.RESET)
    for number in range(MAX_TICKETS + 3):
        node.fails(msgspec.structs.replace(LINK, serial=f"MT{number}"))
        node.passes()
        node.serves(2 * HOUR)
    assert [ticket.id for ticket in node.repair.record.tickets] == list(range(4, MAX_TICKETS + 4))
