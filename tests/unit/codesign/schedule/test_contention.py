"""Pipelines whose ranks share the NIC of a node."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.codesign.schedule import (
    Layout,
    Policy,
    choose_layout,
    compiled,
    simulate,
    simulate_shared,
    uniform_costs,
)

PROGRAM = compiled("1f1b", 8, 32)
COSTS = uniform_costs(PROGRAM.schedule.placement, forward=1, backward=2, weights=1, send=0.1)


@pytest.mark.parametrize(
    ("layout", "policy", "slowdown"),
    [
        (Layout.LOCKSTEP, Policy.FAIR, 1.465),
        (Layout.OFFSET, Policy.FAIR, 1.064),
        (Layout.LOCKSTEP, Policy.FIFO, 1.064),
        (Layout.ROTATED, Policy.FAIR, 1.119),
        (Layout.ONE_NODE, Policy.FAIR, 1.000),
    ],
)
def test_8_replicas_on_one_nic_a_node_take_these_times(layout: Layout, policy: Policy, slowdown: float) -> None:
    sharing = simulate_shared(PROGRAM, COSTS, 8, layout, policy)
    assert round(sharing.slowdown, 3) == slowdown
    assert sharing.alone_s == 117


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize("policy", list(Policy))
def test_one_replica_takes_the_time_of_a_pipeline_that_has_its_nics_for_itself(name: str, policy: Policy) -> None:
    program = compiled(name, 4, 12)
    costs = uniform_costs(program.schedule.placement, forward=1, backward=2, weights=1, send=0.5, shares=(1, 2, 3, 2))
    alone = simulate(program, costs).total_s
    assert simulate_shared(program, costs, 1, policy=policy).total_s == pytest.approx(alone)


@pytest.mark.parametrize("replicas", [2, 5])
def test_a_fair_nic_in_lockstep_is_one_that_is_so_many_times_slower(replicas: int) -> None:
    slower = uniform_costs(PROGRAM.schedule.placement, forward=1, backward=2, weights=1, send=0.1 * replicas)
    expected = simulate(PROGRAM, slower).total_s
    assert simulate_shared(PROGRAM, COSTS, replicas).total_s == pytest.approx(expected)


def test_two_messages_share_a_nic_from_when_the_second_comes() -> None:
    """Replicas begin 4 apart (the longest message); each sends for 4, then the first gets the NIC for itself."""
    program = compiled("1f1b", 2, 1)
    costs = uniform_costs(program.schedule.placement, forward=1, backward=2, weights=1, send=4.0)
    # F 0..1, message 1..5, F and B 5..8, message 8..12, B 12..14; the second replica the same, 4 later.
    assert simulate_shared(program, costs, 2, Layout.OFFSET).total_s == pytest.approx(18.0)
    # Both messages at once: 1..9, F and B 9..12, messages 12..20, B 20..22.
    assert simulate_shared(program, costs, 2, Layout.LOCKSTEP).total_s == pytest.approx(22.0)
    # One after the other: the second 5..9; its gradient waits for no other, 12..16, B 16..18.
    assert simulate_shared(program, costs, 2, Layout.LOCKSTEP, Policy.FIFO).total_s == pytest.approx(18.0)


def test_the_layout_is_chosen_by_time_and_explained() -> None:
    choice = choose_layout(PROGRAM, COSTS, 8)
    assert choice.chosen.layout is Layout.OFFSET
    assert [one.layout for one in choice.all] == list(Layout)
    assert choice.reason == (
        "offset takes 1.06 of the time without messages (lockstep 1.46, rotated 1.12, one-node 1.00); replica d begins "
        "by d messages late, the last one by 0.7: messages do not meet at the NIC"
    )


def test_the_simplest_layout_is_chosen_where_messages_cost_nothing() -> None:
    free = uniform_costs(PROGRAM.schedule.placement, forward=1, backward=2, weights=1)
    choice = choose_layout(PROGRAM, free, 8)
    assert choice.chosen.layout is Layout.LOCKSTEP
    assert "another layout gains less than a thousandth" in choice.reason


def test_fewer_than_one_replica_is_refused() -> None:
    with pytest.raises(UsageError, match="0 replicas share a NIC; give at least 1"):
        simulate_shared(PROGRAM, COSTS, 0)
