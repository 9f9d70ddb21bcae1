"""The limits inside a node come out of the flow simulator as they do of the formulas."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB
from fireflyer.cli.train.plan import read_node
from fireflyer.codesign.parallel import NodeModel
from fireflyer.netsim import simulate_paths
from fireflyer.planning import hfreduce_limits, ring_pcie_bandwidth
from fireflyer.planning.node_flows import (
    UNLIMITED,
    Flow,
    hfreduce_bandwidth,
    kv_contention,
    node_fabric,
    ring_bandwidth,
    simulate_flows,
)
from fireflyer.planning.node_limits import pcie_bandwidth
from fireflyer.topology.node_fabric import NodeFabric, Path, Wire
from fireflyer.topology.traffic import Transfer

NODE = read_node("pcie-a100")
PLAIN = msgspec.structs.replace(NODE, nvlink_gpus=1)


def with_only(node: NodeModel, limit: str) -> NodeModel:
    """A node of which nothing but one part limits."""
    wide = {f"{part}_bytes_per_s": UNLIMITED for part in ("host_memory", "nic", "bridge", "pcie") if part != limit}
    return msgspec.structs.replace(node, **wide)


@pytest.mark.parametrize(("limit", "published"), [("host_memory", 13.3), ("nic", 12.5), ("bridge", 9.4)])
def test_each_limit_of_hfreduce_is_the_paper_s(limit: str, published: float) -> None:
    found = hfreduce_bandwidth(node_fabric(with_only(PLAIN, limit)))
    assert found == pytest.approx(getattr(hfreduce_limits(NODE), limit), rel=1e-6)
    assert round(found / 1e9, 1) == published


def test_copies_back_by_dma_and_pairs_have_the_limits_of_the_paper() -> None:
    dma = hfreduce_bandwidth(node_fabric(with_only(PLAIN, "host_memory")), copied_back_by_dma=True)
    assert round(dma / 1e9, 1) == 10.7
    for limit, published in (("host_memory", 20.0), ("bridge", 18.75)):
        found = hfreduce_bandwidth(node_fabric(with_only(NODE, limit)), pairs=True)
        assert found / 1e9 == pytest.approx(published, rel=1e-6)
    whole = hfreduce_bandwidth(node_fabric(NODE), pairs=True)
    assert whole / 1e9 == pytest.approx(12.5, rel=1e-6), "the NIC binds; the paper measured over 10"


@pytest.mark.parametrize(
    ("memory", "nic", "bridge", "pairs"),
    list(itertools.product((100e9, 320e9), (5e9, 25e9, 50e9), (20e9, 37.5e9, 200e9), (False, True))),
)
def test_the_lowest_limit_binds_whatever_the_node_has(memory: float, nic: float, bridge: float, pairs: bool) -> None:
    node = msgspec.structs.replace(
        NODE, host_memory_bytes_per_s=memory, nic_bytes_per_s=nic, bridge_bytes_per_s=bridge, pcie_bytes_per_s=UNLIMITED
    )
    found = hfreduce_bandwidth(node_fabric(node), pairs=pairs)
    assert found == pytest.approx(hfreduce_limits(node, pairs=pairs).bandwidth, rel=1e-6)


def test_two_nics_send_as_much_as_one_of_twice_the_rate() -> None:
    bonded = msgspec.structs.replace(with_only(PLAIN, "nic"), nics=2, nic_bytes_per_s=12.5e9)
    assert hfreduce_bandwidth(node_fabric(bonded)) == pytest.approx(12.5e9, rel=1e-6)


@pytest.mark.parametrize("ranks", [16, 64, 1440])
def test_a_ring_is_as_slow_as_the_way_from_gpu_to_nic(ranks: int) -> None:
    """9 GiB/s between GPU and NIC: NCCL reaches 4.8 GB/s at most (IV-D2)."""
    found = ring_bandwidth(node_fabric(PLAIN, peer_bytes_per_s=9 * GIB), ranks)
    assert found == pytest.approx(ring_pcie_bandwidth(9 * GIB, ranks), rel=1e-6)
    assert 4.8 <= found / 1e9 < 5.0


def test_a_slow_link_between_sockets_slows_what_crosses_it() -> None:
    slow = node_fabric(PLAIN, between_sockets_bytes_per_s=10e9)
    assert hfreduce_bandwidth(slow) < 0.5 * hfreduce_bandwidth(node_fabric(PLAIN))


H800 = msgspec.structs.replace(
    NODE, nics=8, nic_bytes_per_s=50e9, pcie_bytes_per_s=55e9, bridge_gpus=1, bridge_bytes_per_s=110e9,
    host_memory_bytes_per_s=600e9, nvlink_gpus=8,
)  # fmt: skip


def test_a_kv_cache_halves_the_rate_of_experts_unless_these_are_preferred() -> None:
    """Each GPU has its own NIC behind its own PCIe link, which both share."""
    found = kv_contention(node_fabric(H800), 50e6, 200e6, expert_weight=15)
    assert found.experts_alone == pytest.approx(0.001)
    assert found.cache_alone == pytest.approx(200e6 / 55e9)
    assert found.experts_fair == pytest.approx(50e6 / 27.5e9), "a fair half of 55 GB/s"
    assert found.slowdown == pytest.approx(1.818, abs=1e-3)
    assert found.experts_preferred == pytest.approx(0.001), "15/16 of the link is more than its NIC gives"
    assert found.cache_fair == pytest.approx(found.cache_preferred), "the link is full either way"


def test_an_nvswitch_gives_each_gpu_its_whole_port_and_no_more() -> None:
    fabric = node_fabric(H800)
    port, size = H800.nvlink_bytes_per_s, 1e9
    around = [Flow((f"gpu{gpu}",), (f"gpu{(gpu + 1) % 8}",), size) for gpu in range(8)]
    assert simulate_flows(fabric, around).makespan_s == pytest.approx(size / port)
    fan_out = [Flow(("gpu0",), (f"gpu{gpu}",), size) for gpu in range(1, 8)]
    fan_in = [Flow((f"gpu{gpu}",), ("gpu0",), size) for gpu in range(1, 8)]
    assert simulate_flows(fabric, fan_out).makespan_s == pytest.approx(7 * size / port)
    assert simulate_flows(fabric, fan_out + fan_in).makespan_s == pytest.approx(7 * size / port), "both ways at once"


def test_gpus_behind_one_bridge_send_over_nvlink_alone() -> None:
    for gpus in (2, 8):
        node = msgspec.structs.replace(NODE, nvlink_gpus=gpus, bridge_gpus=2)
        assert simulate_flows(node_fabric(node), [Flow(("gpu0",), ("gpu1",), 1e9)]).makespan_s == pytest.approx(
            1e9 / node.nvlink_bytes_per_s
        )


def test_gpus_use_the_nic_at_their_own_bridge_and_bonds_all() -> None:
    own = simulate_flows(node_fabric(H800), [Flow(("gpu0",), ("network",), 50e9)])
    assert own.makespan_s == pytest.approx(1.0)
    bonded = msgspec.structs.replace(H800, nics=16, pcie_bytes_per_s=UNLIMITED)
    both = simulate_flows(node_fabric(bonded), [Flow(("gpu0",), ("network",), 50e9)])
    assert both.makespan_s == pytest.approx(0.5), "two NICs at the bridge"


def test_lanes_of_a_node_need_the_memory_that_the_paper_says() -> None:
    """6.2: saturating 160 lanes of PCIe 5.0 demands over 640 GB/s."""
    assert pcie_bandwidth(160, 5) == 640e9
    assert pcie_bandwidth(160, 5, coding=True) == pytest.approx(630.15e9, rel=1e-4)
    assert pcie_bandwidth(16, 4, coding=True) > 27e9, "measured at one GPU (Fire-Flyer paper, IV-D3)"
    with pytest.raises(UsageError, match="generation 1 to 6"):
        pcie_bandwidth(16, 7)


def test_nodes_and_paths_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="do not divide over 3 sockets"):
        node_fabric(NODE, sockets=3)
    with pytest.raises(UsageError, match="does not leave a node of 8 GPUs"):
        ring_bandwidth(node_fabric(NODE), 8)
    with pytest.raises(UsageError, match="gpu9 is no end of transfers"):
        node_fabric(NODE).path(("gpu9",), ("gpu0",))
    apart = NodeFabric(name="apart", devices=("a", "b"), host=(), wires=(Wire(a="a", b="c", bytes_per_s=1.0),))
    with pytest.raises(UsageError, match="no way leads from a to b"):
        apart.path(("a",), ("b",))
    with pytest.raises(UsageError, match="use numbers above 0"):
        kv_contention(node_fabric(NODE), 0, 1)
    one = Transfer(id=0, source=0, target=1, nbytes=1)
    with pytest.raises(UsageError, match="each is a finite number above 0"):
        simulate_paths([0.0], [one], [Path((0,), (1.0,))])
    with pytest.raises(UsageError, match="links beyond the 1"):
        simulate_paths([1.0], [one], [Path((1,), (1.0,))])
    with pytest.raises(UsageError, match="give each its own"):
        simulate_paths([1.0], [one], [])


@pytest.mark.parametrize("node", [NODE, H800])
def test_all_bytes_leave_the_source_and_arrive_at_the_target(node: NodeModel) -> None:
    fabric = node_fabric(node, peer_bytes_per_s=9 * GIB)
    ends = [
        pair
        for wire in fabric.wires
        for pair in (
            ((wire.a, wire.b, wire.shared),) if wire.shared else ((wire.a, wire.b, False), (wire.b, wire.a, False))
        )
    ]
    names = fabric.devices + fabric.host
    for source, target in itertools.permutations(names, 2):
        path = fabric.path((source,), (target,))
        used = dict(zip(path.links, path.weights, strict=True))
        left = sum(used.get(link, 0) for link, (a, b, both) in enumerate(ends) if source == a or (both and source == b))
        came = sum(used.get(link, 0) for link, (a, b, both) in enumerate(ends) if target == b or (both and target == a))
        assert (left, came) == pytest.approx((1, 1)), (source, target)


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_a_shared_wire_has_one_rate_for_both_directions(engine: str) -> None:
    wires = (Wire(a="a", b="m", bytes_per_s=10.0, shared=True), Wire(a="m", b="b", bytes_per_s=100.0))
    fabric = NodeFabric(name="pair", devices=("a", "b"), host=(), wires=wires)
    there, back = fabric.path(("a",), ("b",)), fabric.path(("b",), ("a",))
    transfers = [Transfer(id=0, source=0, target=1, nbytes=50), Transfer(id=1, source=1, target=0, nbytes=50)]
    run = simulate_paths(fabric.capacities, transfers, [there, back], engine=engine)  # type: ignore[arg-type]
    assert run.finish_s.tolist() == pytest.approx([10.0, 10.0])
