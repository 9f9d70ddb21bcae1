"""The health machine under any order of faults, flaps, forgeries, hung tools, runs and people."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.health import Floor, fault, passes

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding, is_certain, is_fault
from fireflyer.cluster.core.health.messages import Moved, Requeue
from fireflyer.cluster.core.health.records import MAX_FLAPS, MAX_WARNED, OUT, Hold, RepairState
from fireflyer.cluster.core.health.remedies import Remedy

NODES = tuple(f"n{number}" for number in range(6))
_checks = st.sampled_from(("gpu_xid", "infiniband", "mount", "disk_space", "clock"))
_events = st.builds(
    Finding,
    check=_checks,
    severity=st.sampled_from(("ok", "warn", "low", "high")),
    part=st.sampled_from(("", "gpu:0", "gpu:1")),
    serial=st.sampled_from(("", "s1", "s2")),
    cause=st.sampled_from(("", "xid_79", "xid_119", "xid_74")),
    seen_ns=st.just(0),
    at_once=st.booleans(),
    once=st.booleans(),
    could_not_run=st.booleans(),
    user_made=st.booleans(),
)
_node = st.sampled_from(NODES)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("says"), _node, st.lists(_events, max_size=3).map(tuple)),
        st.tuples(st.just("breaks"), _node, _events.map(lambda event: msgspec.structs.replace(event, once=False))),
        st.tuples(st.just("happens"), _node, _events),
        st.tuples(st.just("mends"), _node, _checks),
        st.tuples(st.just("runs"), _node, st.booleans()),
        st.tuples(st.just("hangs"), _node, st.booleans()),
        st.tuples(st.just("fails"), _node, st.none()),
        st.tuples(st.just("passes"), _node, st.sampled_from((SECOND, 30 * SECOND, 1200 * SECOND))),
        st.tuples(st.just("repairs"), _node, st.sampled_from(Remedy)),
        st.tuples(st.just("returns"), _node, st.none()),
    ),
    max_size=40,
)


def step(floor: Floor, what: str, node: str, value: object) -> None:
    match what, value:
        case "says", tuple(events):
            floor.says(node, *events)
        case "breaks", Finding() as event:
            floor.breaks(node, event)
        case "happens", Finding() as event:
            floor.happens(node, event)
        case "mends", check:
            floor.broken.pop((node, str(check)), None)
        case "runs", bool(runs):
            # Nothing new is given to a node that takes no task.
            if runs and floor.record(node).takes_tasks:
                floor.busy.add(node)
            elif not runs:
                floor.busy.discard(node)
        case "hangs", bool(hangs):
            (floor.hung.add if hangs else floor.hung.discard)(node)
        case "fails", None:
            floor.busy.discard(node)
            floor.run_failed(node)
        case "passes", int(span_ns):
            floor.pass_time(span_ns, step_ns=max(SECOND, span_ns // 20))
        case "repairs", Remedy() as remedy:
            floor.repair(node, remedy)
        case _:
            floor.ask_return(node)


def owes(events: object, state: RepairState) -> bool:
    """One of these must take a node out that is in this state, whatever its checks say after it."""
    some = events if isinstance(events, tuple) else (events,)
    return state not in OUT and any(
        isinstance(event, Finding) and event.once and is_fault(event) and is_certain(event) for event in some
    )


def check_owed(floor: Floor, before: int, owed: set[str]) -> None:
    """Nodes of which an event was said that no probe repeats: each is out, or held until it is."""
    for effect in floor.effects[before:]:
        if isinstance(effect, Moved) and effect.state in OUT:
            owed.discard(effect.node)
    owed -= {node for node in owed if floor.hold(node) is Hold.LEAF}
    assert not {node for node in owed if floor.record(node).takes_tasks}, "an event is forgotten"
    assert all(floor.hold(node) is Hold.BREAKER for node in owed), "an event is neither acted on nor held"


def check_effects(floor: Floor, before: int, known: dict[str, RepairState]) -> None:
    for effect in floor.effects[before:]:
        match effect:
            case Moved(node, state, _):
                came = known.get(node, RepairState.HEALTHY)
                if state is RepairState.PROBATION:
                    assert came in (RepairState.TESTING, RepairState.SUSPECT), "nobody returns without a test"
                if state is RepairState.TESTING:
                    assert came in OUT or came is RepairState.SUSPECT
                known[node] = state
            case Requeue(node, _):
                fault_ = floor.record(node).fault
                assert fault_ is None or not fault_.user_made, "evidence of users requeues nothing"


@given(_steps, st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_happens_the_rules_hold(steps: list[tuple[str, str, object]], in_leaf: bool) -> None:
    floor = Floor(*NODES, breaker_share=0.34, required=("gpu_xid",))
    if in_leaf:
        floor.leaves.update(dict.fromkeys(NODES[:4], "leaf"))
    known: dict[str, RepairState] = {}
    owed: set[str] = set()
    for what, node, value in steps:
        before, state = len(floor.effects), floor.state(node)
        if what in ("says", "happens") and owes(
            msgspec.structs.replace(value, once=True) if isinstance(value, Finding) else value, state
        ):
            owed.add(node)
        try:
            step(floor, what, node, value)
        except UsageError:
            assert what in ("repairs", "returns"), "people alone are refused"
        check_effects(floor, before, known)
        check_owed(floor, before, owed)
        drained = [row for _, row in floor.health.rows() if row.state in OUT and not row.taken]
        assert len(drained) <= 2, "the breaker"
        for name, row in floor.health.rows():
            assert (row.state is RepairState.SUSPECT) or row.hold is Hold.NONE
            assert row.takes_tasks or row.fault is not None or row.unchecked is not None
            waited_ns = floor.now_ns - row.unchecked.at_ns if row.unchecked is not None else 0
            assert waited_ns <= floor.policy.probe_limit_ns, "it waits no longer for its checks"
            assert row.state is not RepairState.TESTING or name not in floor.busy, "no run is tested beside"
            assert not row.test_asked or name in floor.busy or what != "passes", "it is tested when it is empty"
            assert len(row.flaps) <= MAX_FLAPS
            assert len(row.warned) <= MAX_WARNED
            ticket = floor.tickets.get(row.ticket)
            if row.state in OUT:
                assert ticket is not None, "each node that is out has a ticket"
                assert (ticket.node, ticket.closed_ns) == (name, None)
        open_tickets = [ticket for _, ticket in floor.tickets.rows() if ticket.closed_ns is None]
        assert all(floor.record(ticket.node).ticket == ticket.id for ticket in open_tickets), "none is left open"


@given(st.lists(st.tuples(_node, _checks), max_size=30))
@settings(max_examples=50, deadline=None)
def test_no_node_whose_checks_pass_when_they_are_repeated_is_drained(said: list[tuple[str, str]]) -> None:
    floor = Floor(*NODES, flaps=1000)
    for node, check in said:
        floor.says(node, fault(check), passes("gpu"))
        floor.pass_time(15 * SECOND)
    assert not any(isinstance(effect, Moved) and effect.state in OUT for effect in floor.effects)
    assert not floor.requeued()


@given(st.lists(st.tuples(_node, st.booleans()), min_size=1, max_size=6, unique_by=lambda one: one[0]))
@settings(max_examples=50, deadline=None)
def test_each_node_that_is_bad_gets_no_task_within_seconds_and_is_out_or_held(bad: list[tuple[str, bool]]) -> None:
    floor = Floor(*NODES, breaker_share=0.34)
    for node, at_once in bad:
        floor.breaks(node, fault("gpu_xid", at_once=at_once))
    floor.pass_time(15 * SECOND)
    out = [node for node, _ in bad if floor.state(node) in OUT]
    held = [node for node, _ in bad if floor.hold(node) is Hold.BREAKER]
    assert len(out) == min(2, len(bad))
    assert sorted(out + held) == sorted(node for node, _ in bad)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=6, max_size=6),
    st.sampled_from((SECOND, 40 * SECOND, 1200 * SECOND)),
)
@settings(max_examples=50, deadline=None)
def test_no_node_that_is_held_is_taken_out_for_a_fault_that_is_over(
    nodes: list[tuple[bool, bool, bool]], span_ns: int
) -> None:
    floor = Floor(*NODES, breaker_share=0.34)
    over = [node for node, (_, _, is_over) in zip(NODES, nodes, strict=True) if is_over]
    for node, (at_once, busy, _) in zip(NODES, nodes, strict=True):
        if busy:
            floor.busy.add(node)
        floor.breaks(node, fault("mounts", at_once=at_once))
        floor.pass_time(15 * SECOND)
    out = [node for node in NODES if floor.state(node) in OUT]
    for node in over:
        floor.broken.pop((node, "mounts"))
    requeued = len(floor.requeued())
    for _ in range(4):
        floor.busy -= set(floor.requeued())
        for node in NODES:
            if floor.state(node) in OUT:
                floor.broken.pop((node, "mounts"), None)
                floor.ask_return(node)
        floor.pass_time(span_ns, step_ns=max(SECOND, span_ns // 40))
    drained = {effect.node for effect in floor.effects if isinstance(effect, Moved) and effect.state in OUT}
    assert not drained - set(out) & set(over), "it was over before there was room"
    assert not set(floor.requeued()[requeued:]) & set(over)
