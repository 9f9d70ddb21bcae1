"""Published figures about what limits an allreduce in a node. Pure."""

from __future__ import annotations

from fireflyer.base.units import GIB
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.planning.node_limits import hfreduce_limits, host_memory_operations, pcie_bandwidth, ring_pcie_bandwidth
from fireflyer.planning.published.figure import PublishedFigure, row
from fireflyer.planning.published.networks import FIRE_FLYER, V3

__all__ = ["allreduce_limits", "lanes"]


def allreduce_limits(node: NodeModel) -> PublishedFigure:
    """`node`: pcie-a100."""
    plain, paired = hfreduce_limits(node), hfreduce_limits(node, pairs=True)
    return PublishedFigure(
        "ff-hfreduce",
        "limits of HFReduce and of a ring on a PCIe node",
        f"{FIRE_FLYER}, IV-D",
        (
            row("memory operations", 24, host_memory_operations(8), "8+8+1+2+2+1+2"),
            row("host memory", 13.3, plain.host_memory / 1e9, "320 GB/s / 24", unit="GB/s", step=0.1),
            row(
                "NIC",
                12,
                plain.nic / 1e9,
                "25 GB/s / 2: a double tree sends and receives each byte twice",
                unit="GB/s",
                printed="cut",
            ),
            row(
                "host bridge of two GPUs, measured",
                8.1,
                plain.bridge / 1e9,
                "37.5 GB/s / 4 is a limit; 8.1 were measured",
                unit="GB/s",
                step=0.1,
            ),
            row(
                "with NVLink pairs, over",
                10,
                paired.bandwidth / 1e9,
                "the NIC binds: memory allows 20, the bridge 18.75",
                unit="GB/s",
                printed="at least",
            ),
            row(
                "NCCL ring, most",
                4.8,
                ring_pcie_bandwidth(9 * GIB, 1440) / 1e9,
                "9 GiB/s between GPU and NIC",
                unit="GB/s",
                step=0.1,
            ),
        ),
    )


def lanes() -> PublishedFigure:
    return PublishedFigure(
        "v3-lanes",
        "what PCIe lanes ask of host memory",
        f"{V3}, 6.2",
        (
            row("160 lanes of PCIe 5.0, over", 640, pcie_bandwidth(160, 5) / 1e9, "160 x 4 GB/s", unit="GB/s"),
            row(
                "the same less the coding",
                640,
                pcie_bandwidth(160, 5, coding=True) / 1e9,
                "128/130 of it is data: 'over 640' counts the coding",
                unit="GB/s",
                printed="at least",
            ),
            row(
                "memory for them, approximately",
                1000,
                None,
                "1 TB/s for 640 GB/s: the text does not say which reads and writes it counts",
                unit="GB/s",
            ),
        ),
    )
