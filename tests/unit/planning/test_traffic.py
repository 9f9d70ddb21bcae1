"""Traffic of storage and pipelines on a fabric: what it sends, and the rates that the links of nodes allow."""

from __future__ import annotations

from collections import Counter

import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import MIB
from fireflyer.codesign.schedule import MessageBytes, build_schedule, compile_schedule, uniform_costs
from fireflyer.netsim import Settings, simulate
from fireflyer.netsim.routing import flow_key
from fireflyer.planning import StorageLoad, nodes_of_kind, replica_traffic, storage_traffic
from fireflyer.topology.fabrics import NodeGroup, two_layer_tree
from fireflyer.topology.traffic import check_transfers

CLIENTS, STORAGE = 24, 8
FABRIC = two_layer_tree(
    [NodeGroup(kind="gpu", count=CLIENTS), NodeGroup(kind="storage", count=STORAGE)], radix=8, gbit_per_s=200
)
SIZE = 32 * MIB


def rate_of(load: StorageLoad) -> float:
    """Bytes per second that all clients get together, over that of the links of all storage nodes."""
    found = storage_traffic(FABRIC, range(CLIENTS), load)
    check_transfers(found, FABRIC.nodes)
    last_s = simulate(FABRIC, found, Settings(routing="adaptive")).makespan_s
    return CLIENTS * load.nbytes / last_s / (STORAGE * FABRIC.link_bytes_per_s)


def test_reads_fill_the_links_of_all_storage_nodes() -> None:
    assert 0.85 < rate_of(StorageLoad(access="read", nbytes=SIZE)) <= 1.0


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_byte_that_is_written_enters_as_many_storage_nodes_as_it_has_replicas(replicas: int) -> None:
    load = StorageLoad(access="write", nbytes=SIZE, replicas=replicas)
    assert 0.8 / replicas < rate_of(load) <= 1 / replicas
    entering = Counter[int]()
    for one in storage_traffic(FABRIC, range(CLIENTS), load):
        entering[one.target] += one.nbytes
    assert sum(entering.values()) == replicas * CLIENTS * SIZE
    assert set(entering) == set(nodes_of_kind(FABRIC, "storage"))


def test_storage_and_training_share_a_network_in_lanes() -> None:
    reads = storage_traffic(FABRIC, [0], StorageLoad(access="read", nbytes=SIZE), lane=1, first_id=7)
    assert {one.lane for one in reads} == {1}
    assert reads[0].id == 7


def test_fabrics_without_or_with_too_few_storage_nodes_are_refused() -> None:
    bare = two_layer_tree([NodeGroup(kind="gpu", count=4)], radix=8, gbit_per_s=200)
    with pytest.raises(UsageError, match='no nodes of kind "storage"; it has gpu'):
        storage_traffic(bare, [0], StorageLoad(access="read", nbytes=1))
    few = two_layer_tree([NodeGroup(kind="gpu", count=4), NodeGroup(kind="storage", count=2)], radix=8, gbit_per_s=200)
    with pytest.raises(UsageError, match="3 replicas need 3 nodes"):
        storage_traffic(few, [0], StorageLoad(access="write", nbytes=1))
    with pytest.raises(UsageError, match="use smaller files"):
        storage_traffic(FABRIC, [0], StorageLoad(access="read", nbytes=1 << 50))


def test_replicas_of_a_pipeline_send_as_many_times_the_bytes_over_the_same_nics() -> None:
    program = compile_schedule(build_schedule("1f1b", 4, 8))
    costs = uniform_costs(program.schedule.placement, forward=0.001, backward=0.002, weights=0.001)
    sizes = MessageBytes((MIB,) * 3, (MIB,) * 3)
    one, eight = (replica_traffic(program, costs, sizes, (0, 7, 14, 21), replicas) for replicas in (1, 8))
    check_transfers(eight, FABRIC.nodes)
    assert sum(each.nbytes for each in eight) == 8 * sum(each.nbytes for each in one) == 8 * 3 * 2 * 8 * MIB
    connections = {(each.source, each.target, each.connection) for each in eight if each.nbytes}
    assert len(connections) == 8 * 3 * 2, "each replica has its own, in both directions of each boundary"
    assert len({flow_key(each) for each in eight if each.nbytes}) == len(connections)
    settings = Settings(routing="adaptive")
    assert simulate(FABRIC, eight, settings).makespan_s > simulate(FABRIC, one, settings).makespan_s
