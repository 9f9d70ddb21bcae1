"""The health machine under any order of faults, flaps, forgeries, hung tools, runs and people."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.health import Floor, fault, passes

from fireflyer.base.errors import UsageError
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.health.findings import Finding
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
    could_not_run=st.booleans(),
    user_made=st.booleans(),
)
_node = st.sampled_from(NODES)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("says"), _node, st.lists(_events, max_size=3).map(tuple)),
        st.tuples(st.just("breaks"), _node, _events),
        st.tuples(st.just("mends"), _node, _checks),
        st.tuples(st.just("runs"), _node, st.booleans()),
        st.tuples(st.just("hangs"), _node, st.booleans()),
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
        case "passes", int(span_ns):
            floor.pass_time(span_ns, step_ns=max(SECOND, span_ns // 20))
        case "repairs", Remedy() as remedy:
            floor.repair(node, remedy)
        case _:
            floor.ask_return(node)


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
    for what, node, value in steps:
        before = len(floor.effects)
        try:
            step(floor, what, node, value)
        except UsageError:
            assert what in ("repairs", "returns"), "people alone are refused"
        check_effects(floor, before, known)
        drained = [row for _, row in floor.health.rows() if row.state in OUT and not row.taken]
        assert len(drained) <= 2, "the breaker"
        for name, row in floor.health.rows():
            assert (row.state is RepairState.SUSPECT) or row.hold is Hold.NONE
            assert row.takes_tasks or row.fault is not None
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
