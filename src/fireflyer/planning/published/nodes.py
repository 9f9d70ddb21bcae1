"""Published figures about what limits an allreduce in a node. Pure."""

from __future__ import annotations

from fireflyer.base.units import GIB
from fireflyer.codesign.parallel.node import NodeModel
from fireflyer.planning.node_limits import hfreduce_limits, host_memory_operations, ring_pcie_bandwidth
from fireflyer.planning.published.figure import PublishedFigure, row
from fireflyer.planning.published.networks import FIRE_FLYER

__all__ = ["allreduce_limits"]


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
