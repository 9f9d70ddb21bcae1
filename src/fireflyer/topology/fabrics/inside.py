"""Nodes opened up: GPUs, each with a NIC, and an NVSwitch that joins them, in one graph with the network. Pure.

A node of a multi-plane network is one vertex with a port in each plane: whatever it sends may take any plane. In truth
each port is the NIC of one GPU, and what goes from a GPU in one plane to a GPU in another takes NVLink at one of its
ends (DeepSeek-V3 paper, 4.3 and 5.1): to the NIC of another GPU before the network, or to the GPU after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.topology.fabrics.graph import Cable, Fabric, Layer, LayerRate, NodeGroup

__all__ = ["INSIDE_LAYERS", "NIC_LAYER", "open_nodes"]

NVSWITCH_LAYER: Final = "nvswitch"
NIC_LAYER: Final = "nic"
INSIDE_LAYERS: Final = frozenset((NVSWITCH_LAYER, NIC_LAYER))
"""Of nodes, not of the network."""


def open_nodes(
    fabric: Fabric, kinds: Collection[str], *, nvlink_bytes_per_s: float, pcie_bytes_per_s: float | None = None
) -> Fabric:
    """The network with each node of these kinds as so many GPUs as it has ports, numbered by node and port: GPU g of
    node n is vertex n x ports + g of its kind. `nvlink_bytes_per_s`: of a GPU in one direction; `pcie_bytes_per_s`:
    between a GPU and its NIC, by default no limit. Raises `UsageError` for kinds of which there are no nodes, or which
    have one port, and for a network with layers of the same names."""
    for kind in kinds:
        ports = next((group.ports for group in fabric.groups if group.kind == kind), 0)
        if ports < 2:
            raise UsageError(f"{fabric.name} has no {kind!r} nodes with several ports, whose GPUs NVLink could join")
    taken = INSIDE_LAYERS & {name for name, _ in fabric.places()}
    if taken:
        raise UsageError(f"{fabric.name} has a layer {min(taken)} already")
    if not 0 < nvlink_bytes_per_s < float("inf"):
        raise UsageError(f"NVLink of {nvlink_bytes_per_s} bytes per second; give a number above 0")
    pcie = max(nvlink_bytes_per_s, fabric.link_bytes_per_s) if pcie_bytes_per_s is None else pcie_bytes_per_s
    opened = [group for group in fabric.groups if group.kind in kinds]
    gpus = sum(group.count * group.ports for group in opened)
    groups = tuple(
        NodeGroup(kind=group.kind, count=group.count * group.ports) if group.kind in kinds else group
        for group in fabric.groups
    )
    boxes = sum(group.count for group in opened)
    inside = (
        Layer(name=NVSWITCH_LAYER, count=boxes, radix=2 * max(group.ports for group in opened)),
        Layer(name=NIC_LAYER, count=gpus, radix=3),
    )
    rates = [
        LayerRate(kind, above, rate)
        for kind in kinds
        for above, rate in ((NVSWITCH_LAYER, nvlink_bytes_per_s), (NIC_LAYER, pcie))
    ]
    return msgspec.structs.replace(
        fabric,
        groups=groups,
        layers=(*inside, *fabric.layers),
        cables=tuple(_cables(fabric, kinds, sum(group.count for group in groups), boxes)),
        rates=(*fabric.rates, *rates, LayerRate(NVSWITCH_LAYER, NIC_LAYER, nvlink_bytes_per_s)),
    ).check()


def _cables(fabric: Fabric, kinds: Collection[str], nodes: int, boxes: int) -> list[Cable]:
    """Of GPUs, NVSwitches and NICs, then those of the network: `nodes` vertices come before the NVSwitches."""
    found: list[Cable] = []
    ends: dict[int, list[int]] = {}
    """Vertices from which the links of each node go into the network, in turn."""
    vertex = node = box = 0
    nic = nodes + boxes
    for group in fabric.groups:
        for _ in range(group.count):
            if group.kind not in kinds:
                ends[node] = [vertex] * group.ports
                vertex += 1
            else:
                ends[node] = list(range(nic, nic + group.ports))
                for gpu, own in enumerate(ends[node], vertex):
                    found += [Cable(gpu, nodes + box, 1), Cable(gpu, own, 1), Cable(nodes + box, own, 1)]
                vertex, nic, box = vertex + group.ports, nic + group.ports, box + 1
            node += 1
    moved = nic - node  # switches come after the NICs
    taken: dict[int, int] = defaultdict(int)
    first = fabric.nodes
    for cable in fabric.cables:
        if cable.a >= first:
            found.append(Cable(cable.a + moved, cable.b + moved, cable.links))
            continue
        for _ in range(cable.links):
            found.append(Cable(ends[cable.a][taken[cable.a]], cable.b + moved, 1))
            taken[cable.a] += 1
    return found
