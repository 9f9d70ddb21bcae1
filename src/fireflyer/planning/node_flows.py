"""Flows inside a node: HFReduce, a ring over PCIe, and a KV cache beside expert traffic, for the flow simulator. Pure.

`node_limits` has the limits in closed form. Here the same operations are transfers over the links of a node, so that
what shares a link is seen to share it, and traffic that no formula has can be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.netsim import NetworkRun, simulate_paths
from fireflyer.topology.node_fabric import NodeFabric, Path, Wire
from fireflyer.topology.traffic import Transfer

__all__ = [
    "Contention",
    "hfreduce_bandwidth",
    "kv_contention",
    "node_fabric",
    "ring_bandwidth",
    "simulate_flows",
]

UNLIMITED: Final = 1e15
"""Bytes per second of links that never limit."""
OTHER_LENGTH: Final = 2
"""Of all wires but those to an NVSwitch, so that GPUs behind one bridge use the switch alone."""
NETWORK: Final = "network"
BYTES: Final = 1 << 30
"""Of the array that is added; bandwidth does not depend on it."""


class Flow(NamedTuple):
    """Bytes that come from all sources and go to all targets in equal parts."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    nbytes: float
    lane: int = 0


def node_fabric(
    node: NodeModel,
    *,
    sockets: int = 2,
    peer_bytes_per_s: float | None = None,
    between_sockets_bytes_per_s: float = UNLIMITED,
) -> NodeFabric:
    """The links inside a node. GPUs are behind bridges of `bridge_gpus` each: each bridge is as loaded as the most
    loaded one. NICs are at bridges where there are as many, as with one NIC for each GPU, and at sockets otherwise.
    Memory is divided over sockets. NVLink joins two GPUs by a wire, and more by a switch, to which each has one port.
    `peer_bytes_per_s`: between a GPU and another device through a socket; 9 GiB/s on
    Rome processors (Fire-Flyer paper, IV-D2).

    Raises `UsageError` where GPUs do not divide into bridges and sockets.
    """
    bridges = node.gpus // node.bridge_gpus
    if sockets < 1 or node.gpus % node.bridge_gpus or bridges % sockets:
        raise UsageError(f"{node.gpus} GPUs behind bridges of {node.bridge_gpus} do not divide over {sockets} sockets")
    wires = [_wire(f"gpu{gpu}", f"bridge{gpu // node.bridge_gpus}", node.pcie_bytes_per_s) for gpu in range(node.gpus)]
    for bridge in range(bridges):
        above = f"socket{bridge * sockets // bridges}"
        wires.append(_wire(f"bridge{bridge}", above, node.bridge_bytes_per_s, shared=True))
    for socket in range(sockets):
        share = node.host_memory_bytes_per_s / sockets
        wires.append(_wire(f"memory{socket}", f"socket{socket}", share, shared=True))
        wires.append(_wire(f"cpu{socket}", f"socket{socket}", UNLIMITED))
        wires += [_wire(f"socket{other}", f"socket{socket}", between_sockets_bytes_per_s) for other in range(socket)]
    for nic in range(node.nics):
        at = f"bridge{nic * bridges // node.nics}" if node.nics >= bridges else f"socket{nic * sockets // node.nics}"
        wires.append(_wire(at, f"nic{nic}", UNLIMITED))
        wires.append(_wire(f"nic{nic}", NETWORK, node.nic_bytes_per_s))
    if node.nvlink_gpus == 2:
        wires += [_wire(f"gpu{gpu}", f"gpu{gpu + 1}", node.nvlink_bytes_per_s) for gpu in range(0, node.gpus, 2)]
    elif node.nvlink_gpus > 2:
        wires += [
            _wire(f"gpu{gpu}", f"nvswitch{gpu // node.nvlink_gpus}", node.nvlink_bytes_per_s, length=1)
            for gpu in range(node.gpus)
        ]
    return NodeFabric(
        name=node.name,
        devices=(*(f"gpu{gpu}" for gpu in range(node.gpus)), NETWORK),
        host=tuple(f"{kind}{socket}" for kind in ("memory", "cpu") for socket in range(sockets)),
        wires=tuple(wires),
        through=tuple(f"socket{socket}" for socket in range(sockets)),
        peer_bytes_per_s=peer_bytes_per_s,
    )


def _wire(a: str, b: str, bytes_per_s: float, *, shared: bool = False, length: int = OTHER_LENGTH) -> Wire:
    return Wire(a=a, b=b, bytes_per_s=bytes_per_s, shared=shared, length=length)


def simulate_flows(fabric: NodeFabric, flows: Sequence[Flow], lane_weights: tuple[float, ...] = (1.0,)) -> NetworkRun:
    """All at once to their end, at max-min fair rates. Raises `UsageError`."""
    numbers = {name: number for number, name in enumerate(fabric.devices + fabric.host)}
    paths: list[Path] = [fabric.path(one.sources, one.targets) for one in flows]
    transfers = [
        Transfer(
            id=place,
            source=numbers[one.sources[0]],
            target=numbers[one.targets[0]],
            nbytes=round(one.nbytes),
            lane=one.lane,
        )
        for place, one in enumerate(flows)
    ]
    return simulate_paths(fabric.capacities, transfers, paths, lane_weights=lane_weights)


def hfreduce_bandwidth(fabric: NodeFabric, *, pairs: bool = False, copied_back_by_dma: bool = False) -> float:
    """Bytes per second of the algorithm: of the array of one GPU over the time, in a long pipeline, where everything
    happens at once. The flows are those of `host_memory_operations`."""
    gpus = [name for name in fabric.devices if name != NETWORK]
    leaders = gpus[::2] if pairs else gpus
    memory = tuple(name for name in fabric.host if name.startswith("memory"))
    cpu = tuple(name for name in fabric.host if name.startswith("cpu"))
    network = (NETWORK,)
    flows = []
    if pairs:
        ends = list(zip(gpus[1::2], leaders, strict=True))
        flows += [Flow((one,), (other,), BYTES) for pair in ends for one, other in (pair, pair[::-1])]
    for leader in leaders:
        flows += [Flow((leader,), _near(fabric, leader, memory), BYTES), Flow(memory, cpu, BYTES)]
        if copied_back_by_dma:
            flows.append(Flow(_near(fabric, leader, memory), (leader,), BYTES))
        else:
            flows.append(Flow(_near(fabric, leader, cpu), (leader,), BYTES))
    flows.append(Flow(cpu, memory, BYTES))
    flows += 2 * [Flow(memory, network, BYTES), Flow(network, memory, BYTES)]
    flows.append(Flow(memory, cpu, BYTES))
    if not copied_back_by_dma:  # once for each half of the GPUs
        flows += 2 * [Flow(memory, cpu, BYTES)]
    return BYTES / simulate_flows(fabric, flows).makespan_s


def _near(fabric: NodeFabric, device: str, candidates: tuple[str, ...]) -> tuple[str, ...]:
    """Those over the fewest links."""
    counts = {name: len(fabric.path((device,), (name,)).links) for name in candidates}
    least = min(counts.values())
    return tuple(name for name in candidates if counts[name] == least)


def ring_bandwidth(fabric: NodeFabric, ranks: int) -> float:
    """Bytes per second of the algorithm of a ring of `ranks` GPUs in many nodes like this one, in the order of their
    numbers: as `ring_pcie_bandwidth`, each moves (2n - 1)/n times the array to the next. Raises `UsageError`."""
    gpus = [name for name in fabric.devices if name != NETWORK]
    if ranks < 2 * len(gpus):
        raise UsageError(f"a ring of {ranks} ranks does not leave a node of {len(gpus)} GPUs; use {2 * len(gpus)}")
    moved = BYTES * (2 * ranks - 1) / ranks
    around = [NETWORK, *gpus, NETWORK]
    flows = [Flow((one,), (other,), moved) for one, other in pairwise(around)]
    return BYTES / simulate_flows(fabric, flows).makespan_s


class Contention(NamedTuple):
    """Seconds until the tokens of experts and the blocks of a KV cache have arrived in all GPUs of a node."""

    experts_alone: float
    cache_alone: float
    experts_fair: float
    cache_fair: float
    experts_preferred: float
    cache_preferred: float
    """Both at once, with the weight of experts."""

    @property
    def slowdown(self) -> float:
        """Of experts, where the KV cache comes at the same time and nothing is preferred."""
        return self.experts_fair / self.experts_alone


def kv_contention(
    fabric: NodeFabric, expert_bytes: float, cache_bytes: float, *, expert_weight: float = 15.0
) -> Contention:
    """Of a GPU that gets `expert_bytes` from the network and `cache_bytes` from host memory, all GPUs alike: both come
    over its PCIe link (DeepSeek-V3 paper, 4.5). `expert_weight`: of a traffic class for experts, which today's GPUs do
    not offer; that of the cache is 1. Raises `UsageError`."""
    if not (expert_bytes > 0 and cache_bytes > 0 and expert_weight > 0):
        raise UsageError(f"{expert_bytes} and {cache_bytes} bytes, weight {expert_weight}; use numbers above 0")
    gpus = [name for name in fabric.devices if name != NETWORK]
    memory = tuple(name for name in fabric.host if name.startswith("memory"))
    experts = [Flow((NETWORK,), (gpu,), expert_bytes, 0) for gpu in gpus]
    cache = [Flow(_near(fabric, gpu, memory), (gpu,), cache_bytes, 1) for gpu in gpus]

    def last_s(flows: list[Flow], weight: float) -> list[float]:
        ends = simulate_flows(fabric, flows, (weight, 1.0)).finish_s
        return [float(ends[[one.lane == lane for one in flows]].max(initial=0.0)) for lane in (0, 1)]

    fair, preferred = last_s(experts + cache, 1.0), last_s(experts + cache, expert_weight)
    return Contention(last_s(experts, 1.0)[0], last_s(cache, 1.0)[1], fair[0], fair[1], preferred[0], preferred[1])
