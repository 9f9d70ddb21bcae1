"""Flows inside a node: HFReduce, a ring over PCIe, and a KV cache beside expert traffic, for the flow simulator. Pure.

`node_limits` has the limits in closed form. Here the same operations are transfers over the links of a node, so that
what shares a link is seen to share it, and traffic that no formula has can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.netsim import NetworkRun, simulate_paths
from fireflyer.planning.node_buffers import buffer_sockets, gpu_sockets, nic_bridges, nic_sockets, nic_switches
from fireflyer.topology.node_fabric import NodeFabric, Path, Wire
from fireflyer.topology.traffic import Transfer

__all__ = [
    "Contention",
    "NodeBandwidth",
    "NodeFlow",
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


class NodeFlow(NamedTuple):
    """Bytes that come from all sources and go to all targets in equal parts."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    nbytes: float
    lane: int = 0
    over: str | None = None
    """A vertex on all ways: the NIC of a message."""


class NodeBandwidth(NamedTuple):
    """Bandwidth of an allreduce, and what limits it."""

    bytes_per_s: float
    """Bandwidth of the algorithm: bytes of the array of one GPU over the time."""
    binding: str
    """The link that is full first, as `NodeFabric.link_names` names it."""


def node_fabric(node: NodeModel) -> NodeFabric:
    """Graph of the links inside a node. GPUs are behind bridges of `bridge_gpus` each: each bridge is as loaded as the
    most loaded one; with `switch_gpus` behind PCIe switches below these. NICs are behind such switches with
    `switch_nics`, at bridges where there are as many, as with one NIC for each GPU, and at sockets otherwise. Memory is
    divided over sockets. NVLink joins two GPUs by a wire, and more by a switch, to which each has one port. Devices
    that write to each other through a socket reach `node.peer_bytes_per_s`.

    Raises `UsageError` where GPUs do not divide into bridges and sockets.
    """
    sockets = node.sockets
    of_gpus = gpu_sockets(node)
    wires = [_wire(f"gpu{gpu}", _above_gpu(node, gpu), node.pcie_bytes_per_s) for gpu in range(node.gpus)]
    wires += [
        _wire(_above_gpu(node, gpu), f"bridge{gpu // node.bridge_gpus}", node.switch_bytes_per_s)
        for gpu in (range(0, node.gpus, node.switch_gpus) if node.switch_gpus else ())
    ]
    for bridge in range(node.gpus // node.bridge_gpus):
        above = f"socket{of_gpus[bridge * node.bridge_gpus]}"
        wires.append(_wire(f"bridge{bridge}", above, node.bridge_bytes_per_s, shared=True))
    between = node.between_sockets_bytes_per_s or UNLIMITED
    for socket in range(sockets):
        share = node.host_memory_bytes_per_s / sockets
        wires.append(_wire(f"memory{socket}", f"socket{socket}", share, shared=True))
        wires.append(_wire(f"cpu{socket}", f"socket{socket}", UNLIMITED))
        wires += [_wire(f"socket{other}", f"socket{socket}", between) for other in range(socket)]
    for nic, above in enumerate(_above_nics(node)):
        wires.append(_wire(above, f"nic{nic}", UNLIMITED))
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
        peer_bytes_per_s=node.peer_bytes_per_s,
    )


def _above_gpu(node: NodeModel, gpu: int) -> str:
    return f"switch{gpu // node.switch_gpus}" if node.switch_gpus else f"bridge{gpu // node.bridge_gpus}"


def _above_nics(node: NodeModel) -> list[str]:
    for kind, places in (("switch", nic_switches(node)), ("bridge", nic_bridges(node))):
        if places is not None:
            return [f"{kind}{place}" for place in places]
    return [f"socket{socket}" for socket in nic_sockets(node)]


def _wire(a: str, b: str, bytes_per_s: float, *, shared: bool = False, length: int = OTHER_LENGTH) -> Wire:
    return Wire(a=a, b=b, bytes_per_s=bytes_per_s, shared=shared, length=length)


def simulate_flows(
    fabric: NodeFabric, flows: Sequence[NodeFlow], lane_weights: tuple[float, ...] = (1.0,), *, paced: bool = False
) -> NetworkRun:
    """Simulate flows between devices and memory of a node, all at once to their end, at max-min fair rates, or with
    rates that are as their bytes are (`paced`): those of a pipeline, of which no part gets ahead of the others.
    Vertices are named `gpu0`, `memory1`, `cpu0`, `nic0`, `network`; the run has seconds and bytes, its links in the
    order of `fabric.link_names`. Raises `UsageError`."""
    numbers = {name: number for number, name in enumerate(fabric.devices + fabric.host)}
    paths: list[Path] = [fabric.path(one.sources, one.targets, one.over) for one in flows]
    if paced:  # as many bytes of each, of which fewer are on the links
        most = max(one.nbytes for one in flows)
        shares = [one.nbytes / most for one in flows]
        paths = [
            Path(path.links, tuple(share * weight for weight in path.weights))
            for path, share in zip(paths, shares, strict=True)
        ]
        flows = [one._replace(nbytes=most) for one in flows]
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


def _bandwidth(fabric: NodeFabric, flows: Sequence[NodeFlow]) -> NodeBandwidth:
    run = simulate_flows(fabric, flows, paced=True)
    seconds = [sent / rate for sent, rate in zip(run.link_bytes.tolist(), fabric.capacities, strict=True)]
    return NodeBandwidth(BYTES / run.makespan_s, fabric.link_names[seconds.index(max(seconds))])


def hfreduce_bandwidth(node: NodeModel, *, pairs: bool = False, copied_back_by_dma: bool = False) -> NodeBandwidth:
    """Bandwidth of HFReduce in a long pipeline, where everything happens at once. The flows are those of
    `host_memory_operations`; `pairs` and `copied_back_by_dma` as there. Raises `UsageError` as `node_fabric`."""
    fabric = node_fabric(node)
    gpus = [name for name in fabric.devices if name != NETWORK]
    cpu = tuple(f"cpu{socket}" for socket in range(node.sockets))
    sockets = gpu_sockets(node)
    flows = []
    if pairs:
        ends = list(zip(gpus[1::2], gpus[::2], strict=True))
        flows += [NodeFlow((one,), (other,), BYTES) for pair in ends for one, other in (pair, pair[::-1])]
    results = [
        (f"nic{nic}", _memory(buffer_sockets(node.network_buffers, socket, node.sockets)))
        for nic, socket in enumerate(nic_sockets(node))
    ]
    part = BYTES / node.nics
    for leader, socket in list(zip(gpus, sockets, strict=True))[:: 2 if pairs else 1]:
        own = _memory(buffer_sockets(node.gpu_buffers, socket, node.sockets))
        flows += [NodeFlow((leader,), own, BYTES), NodeFlow(own, cpu, BYTES)]
        if copied_back_by_dma:
            flows += [NodeFlow(place, (leader,), part) for _, place in results]
        else:
            flows.append(NodeFlow((f"cpu{socket}",), (leader,), BYTES))
    for nic, place in results:
        flows += [NodeFlow(cpu, place, part), NodeFlow(place, cpu, part)]  # the sum, and what arrives to be added
        flows += 2 * [NodeFlow(place, (NETWORK,), part, over=nic), NodeFlow((NETWORK,), place, part, over=nic)]
        if not copied_back_by_dma:  # once for each half of the GPUs
            flows += 2 * [NodeFlow(place, cpu, part)]
    return _bandwidth(fabric, flows)


def _memory(sockets: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"memory{socket}" for socket in sockets)


def ring_bandwidth(node: NodeModel, ranks: int) -> NodeBandwidth:
    """Bandwidth of a ring of `ranks` GPUs in many nodes like this one, in the order of their numbers: as in
    `ring_pcie_bandwidth`, each moves (2n - 1)/n times the array to the next. Raises `UsageError`."""
    if ranks < 2 * node.gpus:
        raise UsageError(f"a ring of {ranks} ranks does not leave a node of {node.gpus} GPUs; use {2 * node.gpus}")
    moved = BYTES * (2 * ranks - 1) / ranks
    around = [NETWORK, *(f"gpu{gpu}" for gpu in range(node.gpus)), NETWORK]
    return _bandwidth(node_fabric(node), [NodeFlow((one,), (other,), moved) for one, other in pairwise(around)])


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
        """Times as long for experts, where the KV cache comes at the same time and nothing is preferred."""
        return self.experts_fair / self.experts_alone


def kv_contention(
    node: NodeModel, expert_bytes: float, cache_bytes: float, *, expert_weight: float = 15.0
) -> Contention:
    """Times of a GPU that gets `expert_bytes` from the network and `cache_bytes` from its host memory, all GPUs alike:
    both come over its PCIe link (DeepSeek-V3 paper, 4.5). `expert_weight`: of a traffic class for experts, which
    today's GPUs do not offer; that of the cache is 1. Raises `UsageError`."""
    if not (expert_bytes > 0 and cache_bytes > 0 and expert_weight > 0):
        raise UsageError(f"{expert_bytes} and {cache_bytes} bytes, weight {expert_weight}; use numbers above 0")
    fabric = node_fabric(node)
    experts = [NodeFlow((NETWORK,), (f"gpu{gpu}",), expert_bytes, 0) for gpu in range(node.gpus)]
    cache = [
        NodeFlow(_memory(buffer_sockets(node.gpu_buffers, socket, node.sockets)), (f"gpu{gpu}",), cache_bytes, 1)
        for gpu, socket in enumerate(gpu_sockets(node))
    ]

    def last_s(flows: list[NodeFlow], weight: float) -> list[float]:
        ends = simulate_flows(fabric, flows, (weight, 1.0)).finish_s
        return [float(ends[[one.lane == lane for one in flows]].max(initial=0.0)) for lane in (0, 1)]

    fair, preferred = last_s(experts + cache, 1.0), last_s(experts + cache, expert_weight)
    return Contention(last_s(experts, 1.0)[0], last_s(cache, 1.0)[1], fair[0], fair[1], preferred[0], preferred[1])
