"""A node as its kernel describes it: which processors share a cache, which memory is near, what hangs on a bus. Pure.

    machine = read_machine(disk)          # fireflyer.topology.sysfs
    rank_placement(machine, ranks=8)      # fireflyer.topology.placement

A `Machine` is plain data: it can be sent, stored with a job, or written by hand in a test. What the kernel does not
tell is absent (`None`, or an empty tuple), never guessed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Device", "DeviceKind", "Machine", "NumaNode"]

DeviceKind = Literal["gpu", "nic"]


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the memory, and the processors near to it. Either may be missing: expanders have memory only, some
    virtual machines have nodes without any."""

    node: int
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    distances: tuple[int, ...] = ()
    """Distances to the machine's nodes in ascending order, 10 = itself, as the firmware says; empty when it does
    not."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU or a network card on the PCI bus."""

    address: str
    """`0000:41:00.0`"""
    kind: DeviceKind
    vendor: int
    numa_node: int | None = None
    link_bytes_per_s: int | None = None
    """Bandwidth of the PCIe link in one direction, as trained now; None: not known. Cards that save power train down
    while they are idle."""
    max_link_bytes_per_s: int | None = None
    network_bytes_per_s: int | None = None
    """Rate at which the network side of a card runs; None: not known, or no network card."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces and InfiniBand devices of the card."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Groups of processors are disjoint, ascending inside, ordered by their first processor."""

    cpus: tuple[int, ...]
    """Processors that are switched on, ascending."""
    allowed_cpus: tuple[int, ...]
    """Processors, of `cpus`, on which this process may run (affinity, cpuset); never empty."""
    allowed_nodes: tuple[int, ...]
    """NUMA nodes from which this process may take memory; never empty."""
    packages: tuple[tuple[int, ...], ...]
    """Sockets."""
    cores: tuple[tuple[int, ...], ...]
    """Processors of the same core (SMT siblings)."""
    l3_groups: tuple[tuple[int, ...], ...]
    """Processors behind the same last-level cache; where the kernel shows no cache, those of a package."""
    numa_nodes: tuple[NumaNode, ...]
    """Ascending by number; at least one."""
    devices: tuple[Device, ...] = ()
    nvlinks: tuple[tuple[str, str], ...] = ()
    """Pairs of GPU addresses with a bridge between them. Not in sysfs: whoever can ask the driver fills it in."""

    def memory_near(self, node: NumaNode) -> int:
        """The NUMA node from which a processor of `node` should take memory: its own, or the nearest that has any which
        this process may use."""
        order = [other.node for other in self.numa_nodes]

        def farness(other: NumaNode) -> tuple[bool, int, int]:
            usable = other.memory_bytes > 0 and other.node in self.allowed_nodes
            place = order.index(other.node)
            known = node.distances[place] if place < len(node.distances) else abs(node.node - other.node) + 10
            return not usable, known, other.node

        return min(self.numa_nodes, key=farness).node

    def gpus(self) -> tuple[Device, ...]:
        """GPUs by bus address, which is CUDA's order for equal cards."""
        return tuple(device for device in self.devices if device.kind == "gpu")

    def nics(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == "nic")
