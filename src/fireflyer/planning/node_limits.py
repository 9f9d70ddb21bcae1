"""Bandwidth limits of an allreduce inside and out of a node (Fire-Flyer paper, IV-D). Pure.

Bandwidth is that of the algorithm: bytes of the array of one GPU over the time. HFReduce touches host memory for each
byte several times, its double binary tree sends and receives each byte twice over the NIC, and GPUs behind one host
bridge share that in both directions.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.planning.node_buffers import buffer_sockets, gpu_sockets, nic_bridges, nic_sockets, nic_switches

__all__ = ["Limits", "hfreduce_limits", "host_memory_operations", "pcie_bandwidth", "ring_pcie_bandwidth"]

_LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 1e9, 4: 2e9, 5: 4e9, 6: 8e9}
"""Of a PCIe lane in one direction by generation, as transfers over 8; from generation 3 on a 65th of them is coding."""


class Limits(NamedTuple):
    """Bytes per second that each part of a node allows; infinite: it never limits."""

    host_memory: float
    nic: float
    bridge: float
    between_sockets: float = math.inf
    switch: float = math.inf
    """Bandwidth that the uplink of a PCIe switch allows."""

    @property
    def binding(self) -> str:
        """Name of the lowest."""
        return min(self._fields, key=lambda name: float(getattr(self, name)))

    @property
    def bandwidth(self) -> float:
        return min(self)


def host_memory_operations(gpus: int, *, pairs: bool = False, copied_back_by_dma: bool = False) -> int:
    """Reads and writes of host memory for each byte of an array: the copies of `gpus` GPUs are written, and read to be
    added; the sum is written, read twice to be sent (to a child and to the parent of a tree), what comes from two peers
    is written and read once to be added; the result is read for the copies back: once for each half of the GPUs where
    GDRCopy writes to all of them, once for each GPU where DMA copies.

    8 GPUs: 24 (the paper's 8+8+1+2+2+1+2), 30 with copies by DMA; with NVLink pairs 16. Raises `UsageError`.
    """
    if gpus < 1 or (pairs and gpus % 2):
        raise UsageError(f"{gpus} GPUs {'do not form pairs' if gpus > 0 else 'are none'}")
    copies = gpus // 2 if pairs else gpus
    return 2 * copies + 1 + 2 + 2 + 1 + (copies if copied_back_by_dma else 2)


def hfreduce_limits(node: NodeModel, *, pairs: bool = False, copied_back_by_dma: bool = False) -> Limits:
    """Limits of HFReduce on this node. `pairs`: GPUs joined by NVLink add first, and one of them copies. Raises
    `UsageError` for GPUs that do not divide into pairs, bridges and sockets."""
    operations = host_memory_operations(node.gpus, pairs=pairs, copied_back_by_dma=copied_back_by_dma)
    copies = gpu_sockets(node)[:: 2 if pairs else 1]
    results = _results(node)
    # Copies of GPUs are written, and read to be added; what is left are sums, and what the network sends and receives.
    of_gpus = _copies(node, copies)
    rest = operations - 2 * len(copies)
    fullest = max(2 * of_gpus[memory] + rest * results[memory] for memory in range(node.sockets))
    crossing = _crossing(node, copies, results, copied_back_by_dma=copied_back_by_dma)
    limited = crossing and node.between_sockets_bytes_per_s
    return Limits(
        host_memory=node.host_memory_bytes_per_s / node.sockets / fullest,
        nic=node.nics * node.nic_bytes_per_s / 2,
        bridge=node.bridge_bytes_per_s / (2 * _most_behind(node, node.bridge_gpus, nic_bridges(node), pairs=pairs)),
        between_sockets=node.between_sockets_bytes_per_s / crossing if limited else math.inf,
        switch=node.switch_bytes_per_s / _most_behind(node, node.switch_gpus, nic_switches(node), pairs=pairs)
        if node.switch_gpus
        else math.inf,
    )


def _most_behind(node: NodeModel, size: int, nics: tuple[int, ...] | None, *, pairs: bool) -> float:
    """Most arrays that go up from one of the bridges or switches of `size` GPUs each, and as many down: of each GPU
    that copies, and two of what its NICs send and receive. `nics`: behind which one each is; None: behind none."""
    arrays = [0.0] * (node.gpus // size)
    for gpu in range(0, node.gpus, 2 if pairs else 1):
        arrays[gpu // size] += 1
    for place in nics or ():
        arrays[place] += 2 / node.nics
    return max(arrays)


def _copies(node: NodeModel, copies: tuple[int, ...]) -> list[float]:
    """Arrays in the memory of each socket, of GPUs at these sockets."""
    found = [0.0] * node.sockets
    for socket in copies:
        places = buffer_sockets(node.gpu_buffers, socket, node.sockets)
        for memory in places:
            found[memory] += 1 / len(places)
    return found


def _results(node: NodeModel) -> list[float]:
    """Share of the memory of each socket in sums, and in what the network sends and receives."""
    found = [0.0] * node.sockets
    for socket in nic_sockets(node):
        places = buffer_sockets(node.network_buffers, socket, node.sockets)
        for memory in places:
            found[memory] += 1 / (node.nics * len(places))
    return found


def _crossing(node: NodeModel, copies: tuple[int, ...], results: list[float], *, copied_back_by_dma: bool) -> float:
    """Most arrays that go from one socket to another one. Processors of all sockets add a part of the array each."""
    sockets = node.sockets
    crossed = [[0.0] * sockets for _ in range(sockets)]
    for socket in copies:
        places = buffer_sockets(node.gpu_buffers, socket, sockets)
        for memory in places:
            crossed[socket][memory] += 1 / len(places)
            for adding in range(sockets):
                crossed[memory][adding] += 1 / (len(places) * sockets)
        if copied_back_by_dma:
            for memory in range(sockets):
                crossed[memory][socket] += results[memory]
    for memory in range(sockets):
        for processor in range(sockets):
            part = results[memory] / sockets
            crossed[processor][memory] += part  # the sum is written
            crossed[memory][processor] += part + (0.0 if copied_back_by_dma else 2 * part)  # to be added, to be copied
    for socket in nic_sockets(node):
        places = buffer_sockets(node.network_buffers, socket, sockets)
        for memory in places:
            crossed[memory][socket] += 2 / (node.nics * len(places))
            crossed[socket][memory] += 2 / (node.nics * len(places))
    return max((crossed[a][b] for a in range(sockets) for b in range(sockets) if a != b), default=0.0)


def ring_pcie_bandwidth(peer_bytes_per_s: float, ranks: int) -> float:
    """Bandwidth of a ring over PCIe whose links carry `peer_bytes_per_s` in each direction: each rank moves (2n - 1)/n
    times the array past the slowest link. 9 GiB/s: 4.99 GB/s for 16 ranks, 4.83 for very many. Raises `UsageError`."""
    if ranks < 2:
        raise UsageError(f"a ring of {ranks} ranks; use 2 or more")
    return peer_bytes_per_s * ranks / (2 * ranks - 1)


def pcie_bandwidth(lanes: int, generation: int, *, coding: bool = False) -> float:
    """Bytes per second of PCIe lanes in one direction, as vendors count them, or less the 128/130 coding. 160 lanes of
    generation 5: 640 GB/s (DeepSeek-V3 paper, 6.2), 630 without the coding. Raises `UsageError`."""
    if lanes < 1 or generation not in _LANE_BYTES_PER_S:
        raise UsageError(f"{lanes} lanes of PCIe generation {generation}; use 1 or more, of generation 1 to 6")
    coded = 128 / 130 if coding and generation >= 3 else 1.0
    return lanes * _LANE_BYTES_PER_S[generation] * coded
