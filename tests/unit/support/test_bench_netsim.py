"""The benchmark of the flow simulator runs, and what it simulates is what it says."""

from __future__ import annotations

import pytest
from bench.collectives.contenders import node_list
from bench.netsim.calibration import (
    CALIBRATED_ON,
    LARGE,
    LAYOUTS,
    SIZES,
    SMALL,
    SUMS_ON,
    Calibration,
    Errors,
    calibrate,
    simulated_s,
)
from bench.netsim.suite import run
from bench.netsim.workload import allreduce, storage_reads
from bench.report import Options

from fireflyer.base.units import MIB
from fireflyer.collectives.planning.routing import default_plan


def test_the_smallest_scale_has_a_result_of_each_case() -> None:
    results = list(run(Options("tiny", ("cluster", "random", "adaptive"), 1)))
    assert [(one.case, one.metric) for one in results] == [
        ("cluster/128-gpus/allreduce-and-reads", "time_s"),
        ("cluster/128-gpus/allreduce-and-reads", "peak_memory_bytes"),
        ("random/64-flows/to-the-end", "time_s"),
        ("adaptive/200-transfers/16-nodes", "processor_s"),
        ("adaptive/200-transfers-at-once/16-nodes", "processor_s"),
    ]


@pytest.mark.slow
def test_predictions_stand_beside_those_of_the_cost_model() -> None:
    """On real ranks; what the errors are depends on the machine."""
    results = list(run(Options("tiny", ("prediction",), 1)))
    assert [(one.case, one.metric) for one in results] == [
        ("prediction/allreduce/2x1", "median_error_share"),
        ("prediction/allreduce/2x1", "worst_error_share"),
        ("prediction/allreduce/all", "median_error_share"),
        ("prediction/allreduce/all", "worst_error_share"),
    ]
    assert all(set(one.peers) == {"cost model of collectives"} for one in results)


def test_a_calibration_finds_the_rates_that_measured_times_came_from() -> None:
    true = Calibration(3e9, 40e-6, 20e-6, 8e9, 2)
    plan, sums = (default_plan(node_list(layout)) for layout in (CALIBRATED_ON, SUMS_ON))
    small_s, large_s = (simulated_s(plan, size, true) for size in (SMALL, LARGE))
    sums_s = [simulated_s(sums, size, true) for size in (SMALL, LARGE)]
    found = calibrate(plan, small_s, large_s, sums, sums_s, 2)
    assert found == pytest.approx(true, rel=1e-2)
    other = default_plan(node_list("2x4"))
    assert simulated_s(other, 8 * MIB, found) == pytest.approx(simulated_s(other, 8 * MIB, true), rel=1e-2)


def test_the_worst_error_counts_predictions_that_are_too_short_as_those_that_are_too_long() -> None:
    assert Errors([1.1, 0.9, 2.0]).worst == Errors([1.1, 0.9, 0.5]).worst == 1.0
    assert Errors([1.1, 0.8, 0.5]).median == pytest.approx(0.2)


def test_predictions_are_of_the_sizes_and_layouts_that_are_asked_for() -> None:
    assert LAYOUTS["full"] == ("2x1", "4x1", "8x1", "2x4")
    assert SIZES["full"] == tuple(MIB << power for power in range(9)), "1 to 256 MiB"


def test_what_is_predicted_is_not_what_is_calibrated_on() -> None:
    assert not {CALIBRATED_ON, SUMS_ON} & set(LAYOUTS["full"])
    assert not {SMALL, LARGE} & set(SIZES["full"])


def test_an_allreduce_of_1250_nodes_has_as_many_transfers_as_chunks_on_edges_of_two_trees() -> None:
    transfers = allreduce(1250)
    sent = [one for one in transfers if one.source != one.target]
    assert len(sent) == 2 * 2 * 47 * 1249
    assert sum(one.nbytes for one in sent) == 2 * 1249 * 186 * MIB
    across = {frozenset((one.source, one.target)) for one in sent if one.source % 2 != one.target % 2}
    assert len(across) == 1  # one pair of nodes talks across zones


def test_the_stripes_of_a_read_lie_on_different_servers() -> None:
    reads = storage_reads(16, 8, 128, 1000)
    assert len(reads) == 512
    assert all(len({one.source for one in reads[at : at + 4]}) == 4 for at in range(0, 512, 4))
