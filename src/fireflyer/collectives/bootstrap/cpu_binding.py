"""Where a rank's native threads run and where its registered memory lies, on machines with several NUMA nodes.

What is asked for is decided by `fireflyer.topology.rank_placement`; here the machine is read, the ranks of a node tell
each other which processors each may use, and the choice becomes numbers for native code. On a machine with one memory
node nothing is done: first touch is right already. Nothing here fails a communicator, and no thread of the program
itself is moved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.native import Arena, interleave_window
from fireflyer.runtime.disk import RealDisk
from fireflyer.topology import (
    Machine,
    format_list,
    memory_nodes,
    network_placement,
    parse_list,
    rank_placement,
    read_machine,
)

__all__ = [
    "MAX_MASK_TEXT",
    "CpuBinding",
    "bind_arena",
    "cpu_binding_of",
    "interleave_window_pages",
    "local_machine",
    "mask_text",
    "report",
]

MAX_MASK_TEXT: Final = 512
"""Bytes of a list of processors that a rank tells the others; a longer one counts as that of everybody."""
MAX_CPUS: Final = 8192

logger = logging.getLogger(__name__)


class CpuBinding(NamedTuple):
    """Empty or None: leave it to the system."""

    cpus: tuple[int, ...] = ()
    """For the collective thread and that of messages between ranks."""
    network_cpus: tuple[int, ...] = ()
    """For the leader's thread that talks to other nodes."""
    memory_node: int | None = None
    """For the arena."""
    reason: str = "one NUMA node"

    def __str__(self) -> str:
        if not self.cpus:
            return self.reason
        return f"processors {format_list(self.cpus)}, arena on NUMA node {self.memory_node} ({self.reason})"


def local_machine(root: str = "/sys") -> Machine | None:
    """This machine as this process may use it; None where it has one NUMA node."""
    disk = RealDisk()
    return read_machine(disk, root=root) if len(memory_nodes(disk, root=root)) > 1 else None


def mask_text(machine: Machine | None) -> str:
    """The processors of this process for the others of its node; empty: as theirs."""
    text = "" if machine is None else format_list(machine.allowed_cpus)
    return text if len(text) <= MAX_MASK_TEXT else ""


def cpu_binding_of(machine: Machine | None, masks: Sequence[str], local: int) -> CpuBinding:
    """For the `local`-th rank of its node, whose ranks have told these masks."""
    if machine is None:
        return CpuBinding()
    allowed = [parse_list(text.encode(), MAX_CPUS) or machine.allowed_cpus for text in masks]
    placement = rank_placement(machine, len(masks), masks=allowed)[local]
    if not placement.pinned:
        return CpuBinding(reason=placement.reason)
    network = network_placement(machine)
    return CpuBinding(placement.cpus, network.cpus or placement.cpus, placement.memory_node, placement.reason)


def bind_arena(arena: Arena, binding: CpuBinding) -> str:
    """Before anything of it is touched. Empty, or what the system said against it."""
    refused = "" if binding.memory_node is None else arena.prefer_node(binding.memory_node)
    return f"arena: {refused}" if refused else ""


def interleave_window_pages(fd: int, machine: Machine | None) -> None:
    """The slots are read by all ranks of the node: every NUMA node gets its share of their pages."""
    if machine is None:
        return
    nodes = [node.node for node in machine.numa_nodes if node.memory_bytes and node.node in machine.allowed_nodes]
    if len(nodes) > 1 and (refused := interleave_window(fd, nodes)):
        logger.warning("the slots are not interleaved over NUMA nodes, they are allocated on first touch: %s", refused)


def report(rank: int, binding: CpuBinding, placement_warnings: Sequence[str]) -> None:
    """One line of what was done, one for what was refused."""
    logger.info("rank %d: %s", rank, binding)
    if placement_warnings:
        logger.warning("rank %d: CPU or memory binding failed: %s", rank, "; ".join(placement_warnings))
