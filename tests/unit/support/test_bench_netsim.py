"""The benchmark of the flow simulator runs, and what it simulates is what it says."""

from __future__ import annotations

from bench.netsim.suite import run
from bench.netsim.workload import allreduce, storage_reads
from bench.report import Options

from fireflyer.base.units import MIB


def test_the_smallest_scale_has_a_result_of_each_case() -> None:
    suite = run(Options("tiny", (), 1))
    assert [(one.case, one.metric) for one in suite.results] == [
        ("cluster/128-gpus/allreduce-and-reads", "time_s"),
        ("cluster/128-gpus/allreduce-and-reads", "peak_memory_bytes"),
        ("random/64-flows/to-the-end", "time_s"),
    ]


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
