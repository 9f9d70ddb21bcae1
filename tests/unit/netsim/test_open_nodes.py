"""Nodes opened up: what goes from one plane to another takes NVLink, and has its rate."""

from __future__ import annotations

import numpy as np
import pytest

from fireflyer.base.errors import UsageError
from fireflyer.netsim import LinkFailure, Links, NetworkRun, Routing, Settings, simulate
from fireflyer.topology.fabrics import (
    Fabric,
    NodeGroup,
    multi_plane,
    open_nodes,
    planes_of,
    rail_optimised,
    two_layer_tree,
)
from fireflyer.topology.traffic import Transfer

PLANES, NODES = 4, 8
LINK = 50e9
NBYTES = 50_000_000  # a millisecond on a link


def network(nvlink_bytes_per_s: float, pcie_bytes_per_s: float | None = None) -> Fabric:
    groups = [NodeGroup(kind="gpu", count=NODES, ports=PLANES)]
    whole = multi_plane(groups, planes=PLANES, radix=16, gbit_per_s=400)
    return open_nodes(whole, ["gpu"], nvlink_bytes_per_s=nvlink_bytes_per_s, pcie_bytes_per_s=pcie_bytes_per_s)


def sent(fabric: Fabric, shift: int, *, lost: int | None = None) -> NetworkRun:
    """Each GPU sends to the one of the next node in the plane `shift` further."""
    transfers = [
        Transfer(
            id=node * PLANES + gpu,
            source=node * PLANES + gpu,
            target=(node + 1) % NODES * PLANES + (gpu + shift) % PLANES,
            nbytes=NBYTES,
        )
        for node in range(NODES)
        for gpu in range(PLANES)
    ]
    failures = [] if lost is None else [LinkFailure(link=link) for link in nic_links(fabric, lost)]
    return simulate(fabric, transfers, Settings(routing="adaptive"), failures=failures)


def nic_links(fabric: Fabric, plane: int) -> list[int]:
    """From NICs to the switches of a plane."""
    links, switches = Links(fabric), set(planes_of(fabric)[plane])
    below = (vertex for vertex in range(fabric.nodes + fabric.switches) if vertex not in switches)
    return [hop.link for vertex in below for hop in links.hops[vertex] if hop.to in switches]


def layer_bytes(fabric: Fabric, run: NetworkRun, below: str, above: str) -> float:
    ends = Links(fabric).ends
    pairs = [{fabric.layer_of(low), fabric.layer_of(high)} == {below, above} for low, high in ends]
    return float(run.link_bytes[np.array(pairs)].sum())


def test_ranks_of_one_plane_need_no_nvlink() -> None:
    fabric = network(1e9)
    run = sent(fabric, 0)
    assert run.makespan_s == pytest.approx(NBYTES / LINK)
    assert layer_bytes(fabric, run, "gpu", "nvswitch") == 0
    assert layer_bytes(fabric, run, "nic", "leaf") == pytest.approx(2 * NODES * PLANES * NBYTES)


@pytest.mark.parametrize("shift", [1, 3])
def test_between_planes_all_bytes_cross_nvlink_once(shift: int) -> None:
    fabric = network(400e9)
    run = sent(fabric, shift)
    assert run.makespan_s == pytest.approx(NBYTES / LINK)
    crossed = layer_bytes(fabric, run, "gpu", "nvswitch") + layer_bytes(fabric, run, "nvswitch", "nic")
    assert crossed == pytest.approx(2 * NODES * PLANES * NBYTES), "to the NVSwitch and from it"


def test_a_slow_nvlink_limits_what_goes_between_planes() -> None:
    # half of the bytes cross at the sender, half at the receiver: each NVLink direction carries half of a transfer
    assert sent(network(LINK / 4), 1).makespan_s == pytest.approx(2 * NBYTES / LINK)


def test_pcie_limits_a_gpu_and_its_own_nic() -> None:
    assert sent(network(400e9, LINK / 2), 0).makespan_s == pytest.approx(2 * NBYTES / LINK)


def test_gpus_of_a_lost_plane_send_over_the_nics_of_the_others() -> None:
    run = sent(network(400e9), 0, lost=1)
    assert run.cut_off == ()
    assert run.makespan_s > NBYTES / LINK * PLANES / (PLANES - 1) * 0.99
    assert len(planes_of(network(400e9))) == PLANES


def rails(nodes: int) -> Fabric:
    """Four GPUs of a node, each with a NIC at the leaf switches of its rail, each of which has 8 nodes."""
    groups = [NodeGroup(kind="gpu", count=nodes, ports=PLANES)]
    return open_nodes(rail_optimised(groups, rails=PLANES, radix=16, gbit_per_s=400), ["gpu"], nvlink_bytes_per_s=400e9)


def between_layers(fabric: Fabric, run: NetworkRun) -> dict[str, float]:
    """Bytes of one transfer, by the layers that they passed between."""
    pairs = (("gpu", "nvswitch"), ("nvswitch", "nic"), ("gpu", "nic"), ("nic", "leaf"), ("leaf", "spine"))
    return {"-".join(pair): layer_bytes(fabric, run, *pair) / NBYTES for pair in pairs}


@pytest.mark.parametrize("routing", ["static", "ecmp", "adaptive"])
def test_ranks_of_one_rail_stay_on_its_nics(routing: Routing) -> None:
    for nodes, spines in ((8, 0), (16, 2)):  # at the same leaf switch; at two of the rail
        fabric = rails(nodes)
        one = Transfer(id=0, source=2, target=(nodes - 1) * PLANES + 2, nbytes=NBYTES)
        run = simulate(fabric, [one], Settings(routing=routing))
        assert between_layers(fabric, run) == pytest.approx(
            {"gpu-nvswitch": 0, "nvswitch-nic": 0, "gpu-nic": 2, "nic-leaf": 2, "leaf-spine": spines}
        )


@pytest.mark.parametrize("routing", ["static", "ecmp", "adaptive"])
def test_ranks_of_two_rails_take_nvlink_and_no_spine_switch_where_their_nodes_meet_at_a_leaf(routing: Routing) -> None:
    fabric = rails(8)
    one = Transfer(id=0, source=0, target=7 * PLANES + 3, nbytes=NBYTES)
    run = simulate(fabric, [one], Settings(routing=routing))
    assert between_layers(fabric, run) == pytest.approx(
        {"gpu-nvswitch": 1, "nvswitch-nic": 1, "gpu-nic": 1, "nic-leaf": 2, "leaf-spine": 0}
    )
    ends = Links(fabric).ends
    first = fabric.first_of("nvswitch")
    sent = sum(run.link_bytes[link] for link, pair in enumerate(ends) if pair == (0, first))
    got = sum(run.link_bytes[link] for link, pair in enumerate(ends) if pair == (first + 7, one.target))
    assert sent + got == pytest.approx(NBYTES), "to the NIC of the target's rail, or over its own and NVLink there"
    if routing == "adaptive":
        assert sent == pytest.approx(got)


def test_ranks_of_two_rails_at_far_leaves_take_a_spine_switch_and_no_nvlink() -> None:
    """Spine switches join all rails, so that NVLink would save nothing."""
    fabric = rails(16)
    run = simulate(fabric, [Transfer(id=0, source=0, target=15 * PLANES + 3, nbytes=NBYTES)])
    assert between_layers(fabric, run) == pytest.approx(
        {"gpu-nvswitch": 0, "nvswitch-nic": 0, "gpu-nic": 2, "nic-leaf": 2, "leaf-spine": 2}
    )


def test_a_gpu_of_the_same_node_is_reached_without_the_network() -> None:
    fabric = network(100e9)
    run = simulate(fabric, [Transfer(id=0, source=0, target=3, nbytes=NBYTES)])
    assert run.makespan_s == pytest.approx(NBYTES / 100e9)
    assert layer_bytes(fabric, run, "nic", "leaf") == 0


def test_other_kinds_of_nodes_stay_as_they_are() -> None:
    groups = [NodeGroup(kind="gpu", count=4, ports=2), NodeGroup(kind="storage", count=3, ports=2)]
    whole = multi_plane(groups, planes=2, radix=8, gbit_per_s=400)
    fabric = open_nodes(whole, ["gpu"], nvlink_bytes_per_s=1e11)
    assert [(group.kind, group.count, group.ports) for group in fabric.groups] == [("gpu", 8, 1), ("storage", 3, 2)]
    assert fabric.links == whole.links + 8 + 8  # NVSwitches to NICs; NICs to leaf switches, which count as switches now
    storage, leaf = range(8, 11), fabric.first_of("leaf")
    ports = [cable for cable in fabric.cables if cable.a in storage]
    assert len(ports) == 6
    assert all(cable.b >= leaf for cable in ports)


@pytest.mark.parametrize(
    ("kinds", "rate", "words"),
    [
        (["cpu"], 1e9, "has no 'cpu' nodes with several ports"),
        (["gpu"], 0.0, "give a number above 0"),
    ],
)
def test_what_cannot_be_opened(kinds: list[str], rate: float, words: str) -> None:
    whole = multi_plane([NodeGroup(kind="gpu", count=4, ports=2)], planes=2, radix=8, gbit_per_s=400)
    with pytest.raises(UsageError, match=words):
        open_nodes(whole, kinds, nvlink_bytes_per_s=rate)
    single = two_layer_tree([NodeGroup(kind="gpu", count=4)], radix=8, gbit_per_s=400)
    with pytest.raises(UsageError, match="several ports"):
        open_nodes(single, ["gpu"], nvlink_bytes_per_s=1e9)
    opened = open_nodes(whole, ["gpu"], nvlink_bytes_per_s=1e9)
    with pytest.raises(UsageError, match="several ports"):
        open_nodes(opened, ["gpu"], nvlink_bytes_per_s=1e9)
