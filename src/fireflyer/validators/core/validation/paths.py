"""Which parts of a node its inner paths join, by its topology. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from fireflyer.topology import Machine

__all__ = ["MAX_GPUS", "MAX_SETS", "CpuSet", "cpu_sets", "is_path", "numa_sets", "path_name"]

MAX_SETS: Final = 16
"""Of processors; a record has room for the figures of all pairs."""
MAX_GPUS: Final = 16
_PATH: Final = re.compile(r"(?:gpu|numa|cache|package)\d+_(?:by_host_)?to_(?:gpu|numa|cache|package)\d+_bytes_per_s")


class CpuSet(NamedTuple):
    """Processors that are measured together, and the memory which the kernel gives to who runs there."""

    name: str
    cpus: tuple[int, ...]
    """One of each core, ascending."""
    node: int | None = None
    """The NUMA node of that memory; None: there is one, and nothing to choose."""


def numa_sets(machine: Machine) -> list[CpuSet]:
    """One for each NUMA node of which this process may use a processor and memory; at least one. Without memory of its
    own a node gets that of another, and its paths would have the wrong name."""
    own = [node for node in machine.numa_nodes if node.memory_bytes > 0 and node.node in machine.allowed_nodes]
    nodes = own or list(machine.numa_nodes)  # of which sysfs tells no memory
    found = [
        CpuSet(f"numa{node.node}", cpus, node.node if len(nodes) > 1 else None)
        for node in nodes
        if (cpus := _one_of_each_core(machine, node.cpus))
    ]
    everything = CpuSet(f"numa{machine.numa_nodes[0].node}", _one_of_each_core(machine, machine.cpus))
    return found[:MAX_SETS] or [everything]


def cpu_sets(machine: Machine) -> list[CpuSet]:
    """Those of the NUMA nodes; where there is one, a set for each last-level cache, which has its own way to the
    memory, or for each socket."""
    numa = numa_sets(machine)
    caches = _sets(machine, "cache", machine.l3_groups, numa[0].node)
    packages = _sets(machine, "package", machine.packages, numa[0].node)
    return next((found for found in (numa, caches, packages) if 1 < len(found) <= MAX_SETS), numa)


def _sets(machine: Machine, name: str, groups: Sequence[Sequence[int]], node: int | None) -> list[CpuSet]:
    return [
        CpuSet(f"{name}{number}", cpus, node)
        for number, group in enumerate(groups)
        if (cpus := _one_of_each_core(machine, group))
    ]


def _one_of_each_core(machine: Machine, group: Sequence[int]) -> tuple[int, ...]:
    usable = set(machine.allowed_cpus).intersection(group)
    first = (next((cpu for cpu in core if cpu in usable), None) for core in machine.cores)
    return tuple(sorted(cpu for cpu in first if cpu is not None))


def path_name(source: str, target: str, *, by_host: bool = False) -> str:
    """Of its figure. `by_host`: between GPUs, through host memory."""
    return f"{source}_{'by_host_' if by_host else ''}to_{target}_bytes_per_s"


def is_path(figure: str) -> bool:
    """A figure whose name `path_name` has made."""
    return _PATH.fullmatch(figure) is not None
