"""Where devices and buffers of a node are: sockets of GPUs and NICs, and of the host memory that they use. Pure."""

from __future__ import annotations

from fireflyer.base.errors import UsageError
from fireflyer.codesign.parallel.node import Buffers, NodeModel

__all__ = ["buffer_sockets", "gpu_sockets", "nic_bridges", "nic_sockets", "nic_switches"]


def gpu_sockets(node: NodeModel) -> tuple[int, ...]:
    """Of each GPU. Raises `UsageError` where GPUs do not divide into bridges and sockets."""
    bridges = _bridges(node)
    return tuple(gpu // node.bridge_gpus * node.sockets // bridges for gpu in range(node.gpus))


def nic_switches(node: NodeModel) -> tuple[int, ...] | None:
    """PCIe switch of each NIC; None: NICs are not behind switches."""
    if not node.switch_gpus or not node.switch_nics:
        return None
    return tuple(nic * (node.gpus // node.switch_gpus) // node.nics for nic in range(node.nics))


def nic_bridges(node: NodeModel) -> tuple[int, ...] | None:
    """Bridge of each NIC: that of its switch, or where there are as many NICs as bridges, as with one for each GPU;
    None: NICs are at sockets. Raises `UsageError` as `gpu_sockets`."""
    bridges = _bridges(node)
    switches = nic_switches(node)
    if switches is not None:
        return tuple(switch * node.switch_gpus // node.bridge_gpus for switch in switches)
    return tuple(nic * bridges // node.nics for nic in range(node.nics)) if node.nics >= bridges else None


def nic_sockets(node: NodeModel) -> tuple[int, ...]:
    """Of each NIC. Raises `UsageError` as `gpu_sockets`."""
    at = nic_bridges(node)
    if at is None:
        return tuple(nic * node.sockets // node.nics for nic in range(node.nics))
    return tuple(bridge * node.sockets // _bridges(node) for bridge in at)


def buffer_sockets(buffers: Buffers, socket: int, sockets: int) -> tuple[int, ...]:
    """Whose memory has the buffers of a device of `socket`, in equal parts."""
    match buffers:
        case "near":
            return (socket,)
        case "interleaved":
            return tuple(range(sockets))
        case "far":
            return tuple(other for other in range(sockets) if other != socket)


def _bridges(node: NodeModel) -> int:
    bridges = node.gpus // node.bridge_gpus
    if node.gpus % node.bridge_gpus or bridges % node.sockets:
        raise UsageError(
            f"{node.gpus} GPUs behind bridges of {node.bridge_gpus} do not divide over {node.sockets} sockets"
        )
    if node.switch_gpus and node.bridge_gpus % node.switch_gpus:
        raise UsageError(
            f"{node.bridge_gpus} GPUs of a host bridge do not divide into PCIe switches of {node.switch_gpus}"
        )
    return bridges
