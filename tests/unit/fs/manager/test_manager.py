"""The cluster manager without a network: one machine, one store, and the questions put to it one by one."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fs.manager_sim.store import rows_in, store_of
from tests.support.kvstore.engines import at_once

from fireflyer.base.errors import DataCorruption, StaleVersion
from fireflyer.base.units import MS, SECOND
from fireflyer.fs.core.manager import admin
from fireflyer.fs.core.manager.admin import MAX_CHAINS, MAX_NODES, STATUS_TARGETS
from fireflyer.fs.core.manager.state_machine import (
    MAX_PENDING,
    MAX_PENDING_PER_USER,
    Effect,
    Event,
    LogDecision,
    Manager,
    Reply,
    RequestReceived,
    Settings,
    Tick,
)
from fireflyer.fs.core.routing import apply_delta
from fireflyer.fs.core.rows import CHAINS, LEASE_KEY, NODES, STATE_KEY
from fireflyer.fs.schema.manager import (
    AddChains,
    AddNode,
    AddTable,
    AddTargets,
    Answer,
    ChangeMembers,
    Condition,
    Done,
    Drain,
    GetRouting,
    GetStatus,
    Heartbeat,
    HeartbeatAnswer,
    ManagerError,
    NewChain,
    NodeStatus,
    NotPrimary,
    Override,
    OverrideWarning,
    Register,
    Registered,
    Request,
    RetireNode,
    RetireTargets,
    RoutingAnswer,
    StaleIncarnation,
    Status,
    Superseded,
    TargetReport,
    TargetStatus,
)
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.fs.schema.sessions import OpenSession
from fireflyer.kvstore import MemoryEngine, MemoryStore, SteppedTiming
from fireflyer.kvstore.core.fenced import Failed, Outcome, OutcomeUnknown, Transact
from fireflyer.kvstore.fenced_driver import transact_on
from fireflyer.runtime.framing import DEFAULT_MAX_FRAME_BYTES

TIMEOUT_NS = 6 * SECOND


class Desk:
    """A manager that is primary at once. Transactions are carried out when `settle` is called, in order."""

    def __init__(self, store: MemoryStore | None = None, *, name: str = "a") -> None:
        self.store = store or MemoryStore()
        self.engine = MemoryEngine(self.store, waits=SteppedTiming(lambda: self.now_ns, lambda _bound: 0))
        self.manager = Manager(Settings(name, f"{name}:1", TIMEOUT_NS, 2 * SECOND))
        self.now_ns = 0
        self.orders: list[Transact] = []
        self.answers: dict[int, Answer] = {}
        self.notes: list[str] = []
        self.asked = 0

    @property
    def rows(self) -> dict[bytes, bytes]:
        return rows_in(self.store)

    def feed(self, event: Event) -> None:
        effects: list[Effect] = self.manager.handle(self.now_ns, event)
        for effect in effects:
            if isinstance(effect, Transact):
                self.orders.append(effect)
            elif isinstance(effect, Reply):
                assert effect.request_id not in self.answers, "answered twice"
                self.answers[effect.request_id] = effect.answer
            else:
                assert isinstance(effect, LogDecision)
                self.notes.append(effect.text)

    def settle(self) -> None:
        while self.orders:
            self.feed(self.carry_out(self.orders.pop(0)))

    def carry_out(self, order: Transact) -> Outcome:
        return at_once(lambda: transact_on(self.engine, order, lease_key=LEASE_KEY, timeout_ns=SECOND))

    def pass_time(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.now_ns += 200 * MS
            self.feed(Tick())
            self.settle()

    def begin(self) -> Desk:
        self.pass_time(SECOND)
        assert self.manager.may_act(self.now_ns)
        return self

    def put(self, request: Request, user: str = "", *, trusted: bool = True) -> int:
        self.asked += 1
        self.feed(RequestReceived(self.asked, request, user, trusted))
        return self.asked

    def ask(self, request: Request, user: str = "", *, trusted: bool = True) -> Answer:
        number = self.put(request, user, trusted=trusted)
        self.settle()
        return self.answers[number]

    def refused(self, request: Request) -> str:
        answer = self.ask(request)
        assert isinstance(answer, ManagerError), answer
        return f"{answer.code}: {answer.message}"

    def chain(self, number: int = 1) -> Chain:
        answer = self.ask(GetRouting())
        assert isinstance(answer, RoutingAnswer)
        assert answer.routing is not None
        return next(one for one in answer.routing.chains if one.id == number)

    def states(self) -> str:
        return " ".join(f"{one.target}={one.state}" for one in self.chain().members)


def register(node: int, nonce: str = "x", previous: int = 0, machine: str = "") -> Register:
    return Register(node, nonce, previous, f"n{node}:1", machine or f"machine {node}", "boot")


def cluster() -> Desk:
    """Nodes 1 and 2 with targets 11, 12 in chain 1; both registered and heard."""
    desk = Desk().begin()
    for node in (1, 2):
        desk.ask(AddNode(node))
        desk.ask(AddTargets(node, (10 + node,)))
        assert desk.ask(register(node)) == Registered(1, TIMEOUT_NS)
    assert desk.ask(AddChains((NewChain(1, (11, 12)),))) == Done("1 chain added")
    return desk


def beat(desk: Desk, node: int, sequence: int, condition: Condition = Condition.ONLINE, **fields: int) -> Answer:
    version = fields.get("version", desk.chain().version)
    clean, capacity_bytes = bool(fields.get("clean", 1)), fields.get("capacity_bytes", 0)
    report = TargetReport(10 + node, condition, version, clean, fields.get("used_bytes", 0), capacity_bytes)
    return desk.ask(Heartbeat(node, fields.get("incarnation", 1), sequence, fields.get("known", 0), (report,)))


def alone(desk: Desk, duration_ns: int, node: int = 1, first: int = 100) -> None:
    """Time passes, and only this node is heard."""
    for step in range(duration_ns // SECOND):
        desk.pass_time(SECOND)
        beat(desk, node, first + step)


# --- primary or not ---


def test_a_candidate_names_the_primary() -> None:
    desk = cluster()
    other = Desk(desk.store, name="b")
    other.feed(Tick())
    other.settle()
    assert other.ask(GetStatus()) == NotPrimary("a:1")
    assert other.ask(Heartbeat(1, 1, 1)) == NotPrimary("a:1")


def test_a_primary_whose_lease_is_over_answers_nobody() -> None:
    desk = cluster()
    assert isinstance(beat(desk, 1, 1), HeartbeatAnswer)
    desk.now_ns += 2 * SECOND
    number = desk.put(Heartbeat(1, 1, 2))
    assert desk.answers[number] == NotPrimary("a:1")


def test_the_next_primary_knows_what_the_last_one_committed_and_declares_nobody_dead_for_t() -> None:
    first = cluster()
    second = Desk(first.store, name="b")
    second.pass_time(5 * SECOND)
    assert second.manager.may_act(second.now_ns)
    assert second.chain() == first.chain()
    number = first.put(AddNode(9))
    first.settle()
    assert first.answers[number] == NotPrimary("b:1")
    assert first.manager.term == 0
    second.pass_time(2 * SECOND)
    assert second.states() == "11=serving 12=serving"
    second.pass_time(5 * SECOND)
    assert second.states() == "11=lastsrv 12=lastsrv"


def test_damaged_rows_end_the_manager_before_it_is_primary() -> None:
    rows = cluster().rows
    for key in (STATE_KEY, NODES.key(1), CHAINS.key(1)):
        for value in (b"", b"\x02", rows[key][:-1], rows[NODES.key(2)]):
            broken = Desk(store_of({**rows, key: value}), name="b")
            with pytest.raises(DataCorruption, match="restore the store"):
                broken.pass_time(5 * SECOND)


def test_a_primary_that_stood_still_does_not_blame_the_nodes() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    beat(desk, 2, 1)
    desk.now_ns += 60 * SECOND
    desk.pass_time(2 * SECOND)
    assert desk.states() == "11=serving 12=serving"
    desk.pass_time(6 * SECOND)
    assert desk.states() == "11=lastsrv 12=lastsrv"


def leaves(desk: Desk, node: int, sequence: int, changed_in: int) -> None:
    version = desk.chain().version
    report = TargetReport(10 + node, Condition.GONE, version, chain=1, changed_in=changed_in)
    desk.ask(Heartbeat(node, 1, sequence, 0, (report,)))
    desk.settle()


@pytest.mark.parametrize(
    ("changed_in", "states"), [(1, "12=lastsrv 11=lastsrv"), (2, "12=lastsrv 11=offline"), (0, "12=lastsrv 11=offline")]
)
def test_after_an_orderly_end_all_may_come_back_that_have_missed_nothing(changed_in: int, states: str) -> None:
    """One after the other, with time between, and whoever is primary when the last one leaves."""
    first = cluster()
    beat(first, 1, 1)
    beat(first, 2, 1)
    leaves(first, 1, 2, changed_in=1)
    assert first.states() == "12=serving 11=offline"
    beat(first, 2, 2)  # told
    desk = Desk(first.store, name="b")
    desk.pass_time(5 * SECOND)
    leaves(desk, 2, 3, changed_in=changed_in)
    assert desk.states() == states


def test_who_was_begun_to_be_synced_may_not_come_back_alone() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    beat(desk, 2, 1)
    leaves(desk, 1, 2, changed_in=1)
    beat(desk, 1, 3)
    assert desk.states() == "12=serving 11=syncing"
    beat(desk, 2, 2)
    leaves(desk, 2, 3, changed_in=1)
    assert desk.states() == "12=lastsrv 11=waiting"


# --- registration ---


def test_a_registration_may_come_twice_and_a_straggler_of_a_dead_process_changes_nothing() -> None:
    desk = cluster()
    assert desk.ask(register(1)) == Registered(1, TIMEOUT_NS)
    assert desk.ask(register(1, "y")) == StaleIncarnation(1)
    assert desk.ask(register(1, "y", 1)) == Registered(2, TIMEOUT_NS)
    assert desk.ask(register(1)) == StaleIncarnation(2)
    assert desk.ask(register(1, "y", 1)) == Registered(2, TIMEOUT_NS)
    assert beat(desk, 1, 9) == Superseded(2)


def test_a_process_that_starts_again_has_lost_its_roles_in_the_same_transaction() -> None:
    desk = cluster()
    desk.put(register(1, "y", 1))
    (order,) = desk.orders
    assert [key for key, _ in order.write if key.startswith(CHAINS.prefix)] == [CHAINS.key(1)]
    desk.settle()
    assert desk.states() == "12=serving 11=offline"


def test_another_machine_waits_until_the_node_has_been_silent_for_t() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    moved = register(1, "y", 1, machine="another")
    assert desk.refused(moved).startswith("busy: node 1 is alive on another machine")
    alone(desk, 5 * SECOND, node=2)
    assert desk.refused(moved).startswith("busy")
    alone(desk, 2 * SECOND, node=2, first=200)
    assert desk.ask(moved) == Registered(2, TIMEOUT_NS)


def test_an_unknown_node_is_told_to_be_added_and_an_unknown_process_to_register() -> None:
    desk = cluster()
    assert desk.refused(register(7)).startswith("not_found: there is no node 7")
    for heartbeat in (Heartbeat(7, 1, 1), Heartbeat(1, 0, 1), Heartbeat(1, 2, 1)):
        assert "register" in desk.refused(heartbeat)


# --- heartbeats ---


def test_an_answer_brings_what_changed_since_the_routing_that_is_known() -> None:
    desk = cluster()
    full = beat(desk, 1, 1)
    assert isinstance(full, HeartbeatAnswer)
    assert full.routing is not None
    known = apply_delta(Routing(0), full.routing)
    assert [node.id for node in known.nodes] == [1, 2]
    unchanged = beat(desk, 1, 2, known=known.version)
    assert unchanged == HeartbeatAnswer(2, None, key_ids=(1,))
    desk.ask(register(2, "y", 1))
    changed = beat(desk, 1, 3, known=known.version)
    assert isinstance(changed, HeartbeatAnswer)
    assert changed.routing is not None
    assert changed.routing.base == known.version
    assert [node.incarnation for node in changed.routing.nodes] == [2]
    following = apply_delta(known, changed.routing)
    assert following.nodes[0] == known.nodes[0]
    assert apply_delta(following, full.routing) is following
    with pytest.raises(StaleVersion, match="get the routing again"):
        apply_delta(Routing(1), changed.routing)


def test_older_heartbeats_are_not_looked_at() -> None:
    desk = cluster()
    beat(desk, 1, 5)
    assert "came after 5" in desk.refused(Heartbeat(1, 1, 5))
    assert "came after 5" in desk.refused(Heartbeat(1, 1, 4))


@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_node_about_which_it_is_being_decided_gets_no_answer(in_doubt: bool) -> None:
    """Nor while nobody knows whether it has been decided: an answer would open its fence again."""
    desk = cluster()
    beat(desk, 1, 1)
    beat(desk, 2, 1)
    alone(desk, 5 * SECOND, node=1)
    desk.now_ns += 900 * MS
    desk.feed(Tick())
    desk.settle()
    beat(desk, 1, 300)
    desk.now_ns += 200 * MS
    desk.feed(Tick())
    taking = [order for order in desk.orders if order.expect]
    assert len(taking) == 1, "the role of node 2 is being taken"
    if in_doubt:
        desk.orders.remove(taking[0])
        desk.feed(OutcomeUnknown(taking[0].number, "the connection broke"))
    late = desk.put(Heartbeat(2, 1, 2))
    assert isinstance(desk.answers[late], ManagerError)
    other = desk.put(Heartbeat(1, 1, 301))
    assert isinstance(desk.answers[other], HeartbeatAnswer)
    desk.pass_time(SECOND // 2)
    assert isinstance(beat(desk, 2, 3), HeartbeatAnswer)
    assert desk.states().startswith("11=serving 12=")


def test_reports_of_others_targets_are_not_believed() -> None:
    desk = cluster()
    report = TargetReport(12, Condition.GONE, desk.chain().version)
    desk.ask(Heartbeat(1, 1, 1, 0, (report,)))
    assert desk.states() == "11=serving 12=serving"


def test_a_target_that_says_that_it_is_gone_leaves_and_comes_back_through_resync() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    beat(desk, 2, 1, Condition.GONE)
    assert desk.states() == "11=serving 12=offline"
    beat(desk, 2, 2)
    assert desk.states() == "11=serving 12=syncing"
    beat(desk, 2, 3, Condition.UP_TO_DATE, version=desk.chain().version - 1)
    assert desk.states() == "11=serving 12=syncing"
    beat(desk, 2, 4, Condition.UP_TO_DATE)
    assert desk.states() == "11=serving 12=serving"
    assert any("chain 1 version 2: target 12 serving -> offline (gone)" in note for note in desk.notes)


# --- transactions that do not come back ---


def unsettled(desk: Desk) -> tuple[int, Transact]:
    number = desk.put(AddNode(5))
    (order,) = desk.orders
    desk.orders.clear()
    return number, order


def test_a_failed_transaction_leaves_no_trace() -> None:
    desk = cluster()
    number, order = unsettled(desk)
    desk.feed(Failed(order.number, "the disk is full"))
    answer = desk.answers[number]
    assert isinstance(answer, ManagerError)
    assert "did not commit the change (the disk is full)" in answer.message
    status = desk.ask(GetStatus())
    assert isinstance(status, Status)
    assert [node.id for node in status.nodes] == [1, 2]
    desk.pass_time(SECOND)
    assert desk.ask(AddNode(5)) == Done("node 5 is added; its storage process can register now")


@pytest.mark.parametrize("came_through", [False, True])
@pytest.mark.parametrize("failures", [0, 2])
def test_a_transaction_of_unknown_outcome_is_asked_again_until_it_is_known(came_through: bool, failures: int) -> None:
    desk = cluster()
    number, order = unsettled(desk)
    if came_through:
        desk.carry_out(order)
    desk.feed(OutcomeUnknown(order.number, "the connection broke"))
    assert number not in desk.answers
    for _ in range(failures):
        desk.now_ns += 200 * MS
        desk.feed(Tick())
        again = next(one for one in desk.orders if one.write == order.write)
        assert again.expect == order.expect
        desk.orders.clear()
        desk.feed(Failed(again.number, "too many conflicts"))
        assert number not in desk.answers
    desk.now_ns += 200 * MS
    desk.feed(Tick())
    desk.settle()
    assert desk.answers[number] == Done("node 5 is added; its storage process can register now")
    assert desk.ask(AddNode(5)) == Done("node 5 existed already; nothing was changed")


def test_rows_that_somebody_else_changed_are_loaded_again() -> None:
    desk = cluster()
    number = desk.put(AddNode(5))
    desk.carry_out(Transact(0, write=((STATE_KEY, None),)))
    desk.settle()
    assert isinstance(desk.answers[number], NotPrimary)
    assert any("another process changed the rows" in note for note in desk.notes)
    desk.pass_time(SECOND)
    assert desk.manager.may_act(desk.now_ns)


def test_requests_beyond_the_bound_are_refused() -> None:
    desk = cluster()
    first = desk.put(AddNode(100))
    numbers = [desk.put(AddNode(1000 + place)) for place in range(MAX_PENDING + 1)]
    answer = desk.answers[numbers[-1]]
    assert isinstance(answer, ManagerError)
    assert answer.code == "busy"
    desk.settle()
    assert desk.answers[first] == Done("node 100 is added; its storage process can register now")
    assert all(isinstance(desk.answers[number], Done) for number in numbers[:-1])


def test_one_user_does_not_fill_the_queue_for_the_others() -> None:
    desk = cluster()
    desk.put(AddNode(100))  # under way: what follows waits
    greedy = [
        desk.put(OpenSession(f"mount {place}"), "greedy", trusted=False) for place in range(MAX_PENDING_PER_USER + 1)
    ]
    refused = desk.answers[greedy[-1]]
    assert isinstance(refused, ManagerError)
    assert f"{MAX_PENDING_PER_USER} requests of greedy are waiting" in refused.message
    others = [desk.put(OpenSession("mount"), "other", trusted=False), desk.put(AddNode(101))]
    desk.settle()
    assert all(not isinstance(desk.answers[number], ManagerError) for number in (*greedy[:-1], *others))
    again = desk.ask(OpenSession("again"), "greedy", trusted=False)
    assert not isinstance(again, ManagerError), "what was answered does not count"


# --- administrators ---


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (AddTargets(9, (1,)), "there is no node 9"),
        (AddTargets(1, (12,)), "target 12 belongs to node 2"),
        (AddTargets(1, tuple(range(1000, 1300))), "would have 301 targets"),
        (AddChains((NewChain(2, (11,)),)), "target 11 cannot be used for new chain 2: it was in a chain before"),
        (AddChains((NewChain(1, (11,)),)), "chain 1 exists already with other targets"),
        (AddChains((NewChain(2, (99,)),)), "there is no target 99"),
        (AddTable(1, (1, 7)), "chain table 1 names chain 7, which does not exist"),
        (ChangeMembers(1, remove=11), "target 11 is serving in chain 1"),
        (ChangeMembers(7), "there is no chain 7"),
        (RetireTargets((11,)), "target 11 is in chain 1"),
        (RetireNode(1), "node 1 still has 1 target (target 11, …); retire them first"),
        (Drain((99,)), "there is no target 99"),
        (Override(1, 11), "chain 1 is available"),
        (Override(1, 99), "target 99 is not in chain 1"),
    ],
)
def test_what_must_not_be_is_refused_and_leaves_no_trace(request_: Request, message: str) -> None:
    desk = cluster()
    before = dict(desk.rows)
    assert message in desk.refused(request_)
    assert desk.rows == before


def test_two_targets_of_one_node_never_meet_in_a_chain() -> None:
    desk = cluster()
    desk.ask(AddTargets(1, (21, 31)))
    desk.ask(AddTargets(2, (22,)))
    assert "two targets on one node" in desk.refused(AddChains((NewChain(2, (21, 31)),)))
    assert desk.ask(AddChains((NewChain(2, (22,)),))) == Done("1 chain added")
    assert "two targets on one node" in desk.refused(ChangeMembers(1, add=21))


def test_a_target_that_was_in_a_chain_is_synced_before_it_serves_in_another_place() -> None:
    desk = cluster()
    desk.ask(AddNode(3))
    desk.ask(AddTargets(3, (13,)))
    assert desk.ask(register(3)) == Registered(1, TIMEOUT_NS)
    assert desk.ask(ChangeMembers(1, add=13)) == Done("chain 1 has 3 targets")
    assert desk.states() == "11=serving 12=serving 13=offline"
    beat(desk, 3, 1)
    assert desk.states() == "11=serving 12=serving 13=syncing"
    assert "was in a chain" in desk.refused(AddChains((NewChain(2, (13,)),)))


def test_an_override_says_since_when_updates_may_be_missing() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    beat(desk, 2, 1, Condition.GONE)
    assert desk.states() == "11=serving 12=offline"
    beat(desk, 1, 2)  # from now on it may acknowledge alone
    alone(desk, 8 * SECOND, node=2)
    assert desk.states() == "11=lastsrv 12=waiting"
    beat(desk, 2, 300)
    warning = desk.ask(Override(1, 12))
    assert isinstance(warning, OverrideWarning)
    assert (
        "all writes acknowledged since it left the chain (it served until version 1, the chain until" in warning.warning
    )
    assert "Complete replicas: target 11 on node 1, silent for" in warning.warning
    assert isinstance(desk.ask(Override(1, 12, warning.confirm - 1)), OverrideWarning)
    assert isinstance(desk.ask(Override(1, 12, warning.confirm)), Done)
    assert desk.states() == "12=serving 11=offline"


@pytest.mark.parametrize(
    ("used_bytes", "said"),
    [
        ((0, 0), "All targets of chain 1 are empty: its data are lost. If target 12 "),
        ((70, 0), "Target 12 is empty; its directory may have been replaced. If target 12 "),
        ((0, 70), "If target 12 serves chain 1 now, writes that it acknowledged shortly before it failed"),
    ],
)
def test_an_override_says_when_directories_were_made_anew(used_bytes: tuple[int, int], said: str) -> None:
    desk = cluster()
    desk.pass_time(8 * SECOND)
    assert desk.states() == "11=lastsrv 12=lastsrv"
    for step in range(3):
        for node in (1, 2):
            beat(desk, node, 300 + step, clean=0, used_bytes=used_bytes[node - 1], capacity_bytes=100)
    assert desk.states() == "12=lastsrv 11=waiting"
    warning = desk.ask(Override(1, 12))
    assert isinstance(warning, OverrideWarning)
    assert warning.warning.startswith(said), (warning.warning, desk.states())


def test_who_was_not_heard_by_a_new_manager_is_not_called_silent() -> None:
    desk = cluster()
    beat(desk, 1, 1)
    status = desk.ask(GetStatus())
    assert isinstance(status, Status)
    assert [(one.alive, one.heard) for one in status.nodes] == [(True, True), (False, False)]
    desk.pass_time(8 * SECOND)
    status = desk.ask(GetStatus())
    assert isinstance(status, Status)
    assert [(one.alive, one.heard) for one in status.nodes] == [(False, True), (False, True)]


def test_a_status_comes_in_pages_that_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = cluster()
    desk.ask(AddTargets(1, tuple(range(20, 25))))
    whole = desk.ask(GetStatus())
    assert isinstance(whole, Status)
    assert whole.more_after == 0
    monkeypatch.setattr(admin, "STATUS_TARGETS", 3)
    pages: list[Status] = []
    while not pages or pages[-1].more_after:
        answer = desk.ask(GetStatus(pages[-1].more_after if pages else 0))
        assert isinstance(answer, Status)
        pages.append(answer)
    assert [len(page.targets) for page in pages] == [3, 3, 1]
    assert [bool(page.nodes or page.chains) for page in pages] == [True, False, False]
    targets = tuple(target for page in pages for target in page.targets)
    assert msgspec.structs.replace(pages[0], targets=targets, more_after=0) == whole


def test_the_largest_first_page_of_a_status_is_one_frame() -> None:
    longest = (1 << 63) - 1
    report = TargetReport(longest, Condition.UP_TO_DATE, longest, False, longest, longest, (1 << 32) - 1, longest)
    target = TargetStatus(longest, (1 << 32) - 1, (1 << 32) - 1, True, report, True, True)
    node = NodeStatus((1 << 32) - 1, "x" * 64, longest, longest, False, "m" * 100, False)
    members = tuple(Member(longest, (1 << 32) - 1, TargetState.SERVING) for _ in range(2))
    chain = Chain((1 << 32) - 1, longest, members)
    size = sum(
        len(msgspec.msgpack.encode(one)) * count
        for one, count in ((target, STATUS_TARGETS), (node, MAX_NODES), (chain, MAX_CHAINS))
    )
    assert size < 0.9 * DEFAULT_MAX_FRAME_BYTES


def test_retiring_is_the_end_of_adding() -> None:
    desk = Desk().begin()
    before = {key: value for key, value in desk.rows.items() if not key.startswith(b"FMle")}
    desk.ask(AddNode(1))
    desk.ask(AddTargets(1, (11, 12)))
    assert desk.ask(RetireTargets((11, 12, 13))) == Done("2 targets retired")
    assert desk.ask(RetireNode(1)) == Done("node 1 retired")
    assert desk.ask(RetireNode(1)) == Done("there is no node 1; nothing was changed")
    assert sorted(before) == sorted(key for key in desk.rows if not key.startswith(b"FMle"))


@given(st.binary(max_size=64), st.sampled_from([NODES.key(1), CHAINS.key(1), STATE_KEY]))
def test_any_bytes_for_a_row_are_a_row_or_damage(value: bytes, key: bytes) -> None:
    desk = Desk(store_of({key: value}), name="b")
    with contextlib.suppress(DataCorruption):
        desk.pass_time(SECOND)
