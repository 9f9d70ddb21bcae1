"""The limits inside a node come out of the flow simulator as they do of the formulas."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.base.units import GIB
from fireflyer.codesign.parallel import NodeModel, load_node
from fireflyer.netsim import simulate_paths
from fireflyer.planning import (
    NodeFlow,
    hfreduce_bandwidth,
    hfreduce_limits,
    kv_contention,
    node_fabric,
    pcie_bandwidth,
    ring_bandwidth,
    ring_pcie_bandwidth,
    simulate_flows,
)
from fireflyer.planning.node_flows import UNLIMITED
from fireflyer.topology.node_fabric import NodeFabric, Path, Wire
from fireflyer.topology.traffic import Transfer

NODE = load_node("pcie-a100")
PLAIN = msgspec.structs.replace(NODE, nvlink_gpus=1)


def with_only(node: NodeModel, limit: str) -> NodeModel:
    """A node of which nothing but one part limits."""
    wide = {f"{part}_bytes_per_s": UNLIMITED for part in ("host_memory", "nic", "bridge", "pcie") if part != limit}
    return msgspec.structs.replace(node, **wide)


@pytest.mark.parametrize(("limit", "published"), [("host_memory", 13.3), ("nic", 12.5), ("bridge", 9.4)])
def test_each_limit_of_hfreduce_is_the_paper_s(limit: str, published: float) -> None:
    found = hfreduce_bandwidth(with_only(PLAIN, limit))
    assert found.bytes_per_s == pytest.approx(getattr(hfreduce_limits(NODE), limit), rel=1e-6)
    assert round(found.bytes_per_s / 1e9, 1) == published
    full = {"host_memory": "memory0 and socket0", "nic": "nic0 to network", "bridge": "bridge0 and socket0"}
    assert found.binding == full[limit]


def test_copies_back_by_dma_and_pairs_have_the_limits_of_the_paper() -> None:
    dma = hfreduce_bandwidth(with_only(PLAIN, "host_memory"), copied_back_by_dma=True)
    assert round(dma.bytes_per_s / 1e9, 1) == 10.7
    for limit, published in (("host_memory", 20.0), ("bridge", 18.75)):
        found = hfreduce_bandwidth(with_only(NODE, limit), pairs=True)
        assert found.bytes_per_s / 1e9 == pytest.approx(published, rel=1e-6)
    whole = hfreduce_bandwidth(NODE, pairs=True)
    assert whole.bytes_per_s / 1e9 == pytest.approx(12.5, rel=1e-6), "the NIC binds; the paper measured over 10"


@pytest.mark.parametrize(
    ("memory", "nic", "bridge", "pairs"),
    list(itertools.product((100e9, 320e9), (5e9, 25e9, 50e9), (20e9, 37.5e9, 200e9), (False, True))),
)
def test_the_lowest_limit_binds_whatever_the_node_has(memory: float, nic: float, bridge: float, pairs: bool) -> None:
    node = msgspec.structs.replace(
        NODE, host_memory_bytes_per_s=memory, nic_bytes_per_s=nic, bridge_bytes_per_s=bridge, pcie_bytes_per_s=UNLIMITED
    )
    found = hfreduce_bandwidth(node, pairs=pairs)
    assert found.bytes_per_s == pytest.approx(hfreduce_limits(node, pairs=pairs).bandwidth, rel=1e-6)


def test_two_nics_send_as_much_as_one_of_twice_the_rate() -> None:
    bonded = msgspec.structs.replace(with_only(PLAIN, "nic"), nics=2, nic_bytes_per_s=12.5e9)
    assert hfreduce_bandwidth(bonded).bytes_per_s == pytest.approx(12.5e9, rel=1e-6)


@pytest.mark.parametrize("ranks", [16, 64, 1440])
def test_a_ring_is_as_slow_as_the_way_from_gpu_to_nic(ranks: int) -> None:
    """9 GiB/s between GPU and NIC: NCCL reaches 4.8 GB/s at most (IV-D2)."""
    found = ring_bandwidth(PLAIN, ranks)
    assert found.bytes_per_s == pytest.approx(ring_pcie_bandwidth(9 * GIB, ranks), rel=1e-6)
    assert 4.8 <= found.bytes_per_s / 1e9 < 5.0
    assert found.binding.endswith("as peers")


def test_with_relaxed_ordering_a_ring_is_as_slow_as_the_bridge_of_two_gpus() -> None:
    """What enters the first GPU of a bridge and what leaves the second share 37.5 GB/s: 18.75 are left for the ring,
    below 25 of the NIC and 27 of PCIe. 16/31 of that for 16 ranks."""
    relaxed = msgspec.structs.replace(PLAIN, relaxed_ordering=True)
    found = ring_bandwidth(relaxed, 16)
    assert found.bytes_per_s == pytest.approx(18.75e9 * 16 / 31, rel=1e-6)
    assert found.binding.startswith("bridge")
    assert ring_bandwidth(PLAIN, 16).bytes_per_s == pytest.approx(9 * GIB * 16 / 31, rel=1e-6)
    for pairs in (False, True):  # GPUs write to memory, not to each other
        assert hfreduce_bandwidth(relaxed, pairs=pairs) == hfreduce_bandwidth(PLAIN, pairs=pairs)


@pytest.mark.parametrize(
    ("of_gpus", "of_network", "crossing"),
    [
        # Of 8 copies a quarter is read by the processors of the other socket in each direction; so is a quarter of
        # each sum written and read (1 + 1 + 2), and half of 2 arrays goes from the other memory to the NIC of socket 0.
        ("near", "interleaved", 8 / 4 + 4 / 4 + 2 / 2),
        # IV-D1: copies are interleaved, so a quarter of them crosses when written, too. What the network receives is at
        # its NIC: half of the sum that arrived, and half of both reads for the copies back, go to the other socket.
        ("interleaved", "near", 8 / 4 + 8 / 4 + 1 / 2 + 2 / 2),
        # Half of the copies crosses when written; to socket 0 go both sends, and half of three reads.
        ("far", "far", 8 / 2 + 8 / 4 + 2 + 3 / 2),
    ],
)
def test_buffers_far_from_their_device_cross_between_sockets(of_gpus: str, of_network: str, crossing: float) -> None:
    node = msgspec.structs.replace(
        PLAIN, gpu_buffers=of_gpus, network_buffers=of_network, between_sockets_bytes_per_s=10e9
    )
    limits = hfreduce_limits(node)
    assert limits.between_sockets == pytest.approx(10e9 / crossing)
    assert limits.binding == "between_sockets"
    found = hfreduce_bandwidth(node)
    assert found.bytes_per_s == pytest.approx(10e9 / crossing, rel=1e-6)
    assert found.binding in ("socket0 to socket1", "socket1 to socket0")


def test_sums_at_the_nic_fill_the_memory_of_its_socket() -> None:
    """Half of 16 reads and writes of copies and all 8 others, at 160 GB/s: 10, not 13.3."""
    node = msgspec.structs.replace(PLAIN, gpu_buffers="interleaved", network_buffers="near")
    assert hfreduce_limits(node).host_memory == pytest.approx(160e9 / 16)
    only = with_only(node, "host_memory")
    found = hfreduce_bandwidth(only)
    assert found.bytes_per_s == pytest.approx(10e9, rel=1e-6)
    assert found.binding == "memory0 and socket0"


@pytest.mark.parametrize(("of_gpus", "of_network"), list(itertools.product(("near", "interleaved", "far"), repeat=2)))
def test_the_closed_form_has_the_limits_of_the_flows_wherever_buffers_are(of_gpus: str, of_network: str) -> None:
    for sockets, nics, pairs, dma in (
        (2, 1, False, False),
        (2, 2, True, False),
        (2, 1, True, True),
        (4, 2, False, True),
    ):
        node = msgspec.structs.replace(
            NODE, sockets=sockets, nics=nics, gpu_buffers=of_gpus, network_buffers=of_network, bridge_gpus=1,
            between_sockets_bytes_per_s=30e9, pcie_bytes_per_s=UNLIMITED, bridge_bytes_per_s=UNLIMITED,
        )  # fmt: skip
        for only in (node, msgspec.structs.replace(node, between_sockets_bytes_per_s=0.0)):
            found = hfreduce_bandwidth(only, pairs=pairs, copied_back_by_dma=dma)
            limits = hfreduce_limits(only, pairs=pairs, copied_back_by_dma=dma)
            assert found.bytes_per_s == pytest.approx(limits.bandwidth, rel=1e-6), (sockets, nics, pairs, dma)


SWITCHED = msgspec.structs.replace(
    PLAIN, nics=8, nic_bytes_per_s=25e9, bridge_gpus=2, bridge_bytes_per_s=55e9, switch_gpus=2,
    switch_bytes_per_s=25e9, switch_nics=True,
)  # fmt: skip
"""As a DGX of A100: 4 PCIe switches with 2 GPUs and 2 NICs each; uplinks and NICs of 25 GB/s, GPUs of 27."""


def rate(node: NodeModel, source: str, target: str) -> float:
    return 27e9 / simulate_flows(node_fabric(node), [NodeFlow((source,), (target,), 27e9)]).makespan_s


def test_devices_behind_one_pcie_switch_write_to_each_other_at_the_rate_of_pcie() -> None:
    assert rate(SWITCHED, "gpu0", "gpu1") == pytest.approx(27e9)
    assert rate(SWITCHED, "gpu0", "network") == pytest.approx(27e9), "two NICs of 25 GB/s at its switch"
    assert rate(SWITCHED, "network", "gpu7") == pytest.approx(27e9)
    assert rate(SWITCHED, "gpu0", "gpu2") == pytest.approx(9 * GIB), "through the socket, in order"
    relaxed = msgspec.structs.replace(SWITCHED, relaxed_ordering=True)
    assert rate(relaxed, "gpu0", "gpu2") == pytest.approx(25e9), "two uplinks"


def test_where_nics_are_above_the_switch_gpus_share_its_uplink() -> None:
    above = msgspec.structs.replace(SWITCHED, switch_nics=False)
    assert rate(above, "gpu0", "network") == pytest.approx(25e9), "the uplink; NICs at the host bridge"
    one = msgspec.structs.replace(above, nics=1)
    assert rate(one, "gpu0", "network") == pytest.approx(9 * GIB), "the NIC at the socket"
    for node, seconds in ((SWITCHED, 25 / 25), (above, 50 / 25)):
        sent = [NodeFlow((f"gpu{gpu}",), ("network",), 25e9) for gpu in (0, 1)]
        assert simulate_flows(node_fabric(node), sent).makespan_s == pytest.approx(seconds)
    far = msgspec.structs.replace(SWITCHED, nics=2)
    assert rate(far, "gpu0", "network") == pytest.approx(25e9), "one of two NICs, at its switch"
    assert rate(far, "gpu2", "network") == pytest.approx(9 * GIB), "no NIC at its switch"


def test_two_host_bridges_of_two_switches_carry_what_leaves_switches_alone() -> None:
    """GPUs behind one host bridge, not behind one switch: two uplinks, no socket."""
    node = msgspec.structs.replace(SWITCHED, bridge_gpus=4)
    fabric = node_fabric(node)
    assert rate(node, "gpu0", "gpu2") == pytest.approx(25e9)
    for target, names in (("gpu1", []), ("gpu2", ["switch0 to bridge0", "bridge0 to switch1"])):
        path = fabric.path(("gpu0",), (target,))
        assert [fabric.link_names[link] for link in path.links][1:-1] == names


def test_an_uplink_limits_hfreduce_by_its_gpus_and_nics() -> None:
    """2 GPUs copy up and down, 2 of 8 NICs send and receive 2 arrays: 2.5 of 25 GB/s."""
    limits = hfreduce_limits(SWITCHED)
    assert limits.switch == pytest.approx(10e9)
    assert limits.bridge == pytest.approx(55e9 / (2 * 2.5))
    assert limits.binding == "switch"
    found = hfreduce_bandwidth(SWITCHED)
    assert found.bytes_per_s == pytest.approx(10e9, rel=1e-6)
    assert "switch0" in found.binding
    above = hfreduce_limits(msgspec.structs.replace(SWITCHED, switch_nics=False))
    assert above.switch == pytest.approx(12.5e9), "GPUs alone"
    assert above.bridge == limits.bridge, "NICs at the bridges"


@pytest.mark.parametrize(("switch_gpus", "switch_nics"), [(0, False), (1, True), (2, False), (2, True), (4, True)])
def test_the_closed_form_has_the_limits_of_the_flows_wherever_nics_are(switch_gpus: int, switch_nics: bool) -> None:
    parts = {"switch": "switch", "bridge": "bridge", "host_memory": "memory", "nic": "network"}
    bound = set()
    for nics, pairs, dma in itertools.product((1, 2, 3, 8), (False, True), (False, True)):
        for uplink, bridge in ((8e9, 200e9), (31e9, 37.5e9), (31e9, 200e9)):
            node = msgspec.structs.replace(
                NODE, nics=nics, bridge_gpus=4, bridge_bytes_per_s=bridge, pcie_bytes_per_s=UNLIMITED,
                switch_gpus=switch_gpus, switch_bytes_per_s=uplink if switch_gpus else 0.0, switch_nics=switch_nics,
            )  # fmt: skip
            found = hfreduce_bandwidth(node, pairs=pairs, copied_back_by_dma=dma)
            limits = hfreduce_limits(node, pairs=pairs, copied_back_by_dma=dma)
            assert found.bytes_per_s == pytest.approx(limits.bandwidth, rel=1e-6), (nics, pairs, dma, uplink, bridge)
            assert parts[limits.binding] in found.binding
            bound.add(limits.binding)
    assert bound >= ({"switch", "bridge"} if switch_gpus == 2 else {"bridge"})


def test_a_ring_within_switches_is_as_slow_as_the_way_between_them() -> None:
    relaxed = msgspec.structs.replace(SWITCHED, relaxed_ordering=True)
    assert ring_bandwidth(SWITCHED, 16).bytes_per_s == pytest.approx(9 * GIB * 16 / 31, rel=1e-6)
    found = ring_bandwidth(relaxed, 16)
    assert found.bytes_per_s == pytest.approx(25e9 * 16 / 31, rel=1e-6)
    assert "switch" in found.binding


def test_a_kv_cache_takes_the_uplink_of_a_switch_and_experts_do_not() -> None:
    """Two GPUs share 25 GB/s for the cache; experts come from NICs below, 25 GB/s for each GPU, over a link of 27."""
    found = kv_contention(SWITCHED, 27e6, 50e6)
    assert found.cache_alone == pytest.approx(50e6 / 12.5e9)
    assert found.experts_alone == pytest.approx(27e6 / 25e9)
    assert found.experts_fair == pytest.approx(27e6 / 14.5e9), "27 less the 12.5 of the cache"
    above = kv_contention(msgspec.structs.replace(SWITCHED, switch_nics=False), 27e6, 50e6)
    assert above.experts_fair == pytest.approx(27e6 / 6.25e9), "a quarter of the uplink"


def test_a_kv_cache_in_the_other_socket_crosses_to_each_gpu() -> None:
    """200 MB to each of four GPUs, over 100 GB/s: 8 ms; 3.6 over PCIe from the near memory."""
    node = msgspec.structs.replace(H800, between_sockets_bytes_per_s=100e9)
    assert kv_contention(node, 50e6, 200e6).cache_alone == pytest.approx(200e6 / 55e9)
    far = msgspec.structs.replace(node, gpu_buffers="far")
    assert kv_contention(far, 50e6, 200e6).cache_alone == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"sockets": 0}, "sockets is 0; use 1 to 64"),
        ({"sockets": 1, "gpu_buffers": "far"}, 'gpu_buffers is "far", and a node of 1 socket'),
        ({"between_sockets_bytes_per_s": -1.0}, "between_sockets_bytes_per_s is -1.0"),
        ({"ordered_peer_bytes_per_s": float("nan")}, "ordered_peer_bytes_per_s is nan"),
        ({"switch_gpus": -1}, "switch_gpus is -1"),
        ({"switch_gpus": 2}, "switch_bytes_per_s is 0.0; give the rate of an uplink above 0"),
        ({"switch_bytes_per_s": 25e9}, "need PCIe switches; give switch_gpus"),
        ({"switch_nics": True}, "need PCIe switches; give switch_gpus"),
    ],
)
def test_places_and_rates_that_no_node_has_are_refused(figures: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        msgspec.structs.replace(NODE, **figures).check()


H800 = msgspec.structs.replace(
    NODE, nics=8, nic_bytes_per_s=50e9, pcie_bytes_per_s=55e9, bridge_gpus=1, bridge_bytes_per_s=110e9,
    host_memory_bytes_per_s=600e9, nvlink_gpus=8,
)  # fmt: skip


def test_a_kv_cache_halves_the_rate_of_experts_unless_these_are_preferred() -> None:
    """Each GPU has its own NIC behind its own PCIe link, which both share."""
    found = kv_contention(H800, 50e6, 200e6, expert_weight=15)
    assert found.experts_alone == pytest.approx(0.001)
    assert found.cache_alone == pytest.approx(200e6 / 55e9)
    assert found.experts_fair == pytest.approx(50e6 / 27.5e9), "a fair half of 55 GB/s"
    assert found.slowdown == pytest.approx(1.818, abs=1e-3)
    assert found.experts_preferred == pytest.approx(0.001), "15/16 of the link is more than its NIC gives"
    assert found.cache_fair == pytest.approx(found.cache_preferred), "the link is full either way"


def test_an_nvswitch_gives_each_gpu_its_whole_port_and_no_more() -> None:
    fabric = node_fabric(H800)
    port, size = H800.nvlink_bytes_per_s, 1e9
    around = [NodeFlow((f"gpu{gpu}",), (f"gpu{(gpu + 1) % 8}",), size) for gpu in range(8)]
    assert simulate_flows(fabric, around).makespan_s == pytest.approx(size / port)
    fan_out = [NodeFlow(("gpu0",), (f"gpu{gpu}",), size) for gpu in range(1, 8)]
    fan_in = [NodeFlow((f"gpu{gpu}",), ("gpu0",), size) for gpu in range(1, 8)]
    assert simulate_flows(fabric, fan_out).makespan_s == pytest.approx(7 * size / port)
    assert simulate_flows(fabric, fan_out + fan_in).makespan_s == pytest.approx(7 * size / port), "both ways at once"


def test_gpus_behind_one_bridge_send_over_nvlink_alone() -> None:
    for gpus in (2, 8):
        node = msgspec.structs.replace(NODE, nvlink_gpus=gpus, bridge_gpus=2)
        assert simulate_flows(node_fabric(node), [NodeFlow(("gpu0",), ("gpu1",), 1e9)]).makespan_s == pytest.approx(
            1e9 / node.nvlink_bytes_per_s
        )


def test_gpus_use_the_nic_at_their_own_bridge_and_bonds_all() -> None:
    own = simulate_flows(node_fabric(H800), [NodeFlow(("gpu0",), ("network",), 50e9)])
    assert own.makespan_s == pytest.approx(1.0)
    bonded = msgspec.structs.replace(H800, nics=16, pcie_bytes_per_s=UNLIMITED)
    both = simulate_flows(node_fabric(bonded), [NodeFlow(("gpu0",), ("network",), 50e9)])
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
        node_fabric(msgspec.structs.replace(NODE, sockets=3))
    with pytest.raises(UsageError, match="2 GPUs of a host bridge do not divide into PCIe switches of 4"):
        hfreduce_limits(msgspec.structs.replace(NODE, switch_gpus=4, switch_bytes_per_s=25e9))
    with pytest.raises(UsageError, match="does not leave a node of 8 GPUs"):
        ring_bandwidth(NODE, 8)
    with pytest.raises(UsageError, match="gpu9 is no end of transfers"):
        node_fabric(NODE).path(("gpu9",), ("gpu0",))
    apart = NodeFabric(name="apart", devices=("a", "b"), host=(), wires=(Wire(a="a", b="c", bytes_per_s=1.0),))
    with pytest.raises(UsageError, match="no way leads from a to b"):
        apart.path(("a",), ("b",))
    with pytest.raises(UsageError, match="use numbers above 0"):
        kv_contention(NODE, 0, 1)
    one = Transfer(id=0, source=0, target=1, nbytes=1)
    with pytest.raises(UsageError, match="each is a finite number above 0"):
        simulate_paths([0.0], [one], [Path((0,), (1.0,))])
    with pytest.raises(UsageError, match="links beyond the 1"):
        simulate_paths([1.0], [one], [Path((1,), (1.0,))])
    with pytest.raises(UsageError, match="give each its own"):
        simulate_paths([1.0], [one], [])


@pytest.mark.parametrize("node", [NODE, H800, SWITCHED])
def test_all_bytes_leave_the_source_and_arrive_at_the_target(node: NodeModel) -> None:
    fabric = node_fabric(msgspec.structs.replace(node, ordered_peer_bytes_per_s=9 * GIB))
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
