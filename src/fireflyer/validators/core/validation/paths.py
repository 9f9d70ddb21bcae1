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


def numa_sets(machine: Machine) -> list[CpuSet]:
    """One for each NUMA node of which this process may use a processor; at least one."""
    found = _sets(machine, [(f"numa{node.node}", node.cpus) for node in machine.numa_nodes])
    everything = CpuSet(f"numa{machine.numa_nodes[0].node}", _one_of_each_core(machine, machine.cpus))
    return found[:MAX_SETS] or [everything]


def cpu_sets(machine: Machine) -> list[CpuSet]:
    """Those of the NUMA nodes; where there is one, a set for each last-level cache, which has its own way to the
    memory, or for each socket."""
    numa = numa_sets(machine)
    caches = _sets(machine, [(f"cache{number}", group) for number, group in enumerate(machine.l3_groups)])
    packages = _sets(machine, [(f"package{number}", group) for number, group in enumerate(machine.packages)])
    return next((found for found in (numa, caches, packages) if 1 < len(found) <= MAX_SETS), numa)


def _sets(machine: Machine, groups: Sequence[tuple[str, Sequence[int]]]) -> list[CpuSet]:
    return [CpuSet(name, cpus) for name, group in groups if (cpus := _one_of_each_core(machine, group))]


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
