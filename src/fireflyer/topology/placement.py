"""Where the ranks of a node run their collective threads, and where the memory of their arrays lies. Pure.

A rank of a sum reads every rank's array once and writes its slice to all of them, so no placement makes all traffic
local. What placement does: it spreads the arrays over all memory controllers (each rank's memory with the rank), keeps
a thread behind one last-level cache while a chunk is hot, and keeps the scheduler from moving it to the other socket.

Nothing is pinned where that could only do harm:
- only one NUMA node is usable: first touch is right already, and the scheduler knows more than we do;
- fewer cores than ranks: a pinned thread cannot go where a core is free.

The rules, in this order: ranks that were given processors of their own by the launcher (different affinity masks) stay
within them; ranks of the same mask share it: consecutive ranks on the same NUMA node in proportion to its cores
(or on the node that `near` says, e.g. that of their GPU); within a NUMA node whole last-level caches as long as
there are enough, else equal parts of one. SMT siblings go together. Of several caches the thread gets the first:
moving between caches is what pinning is to prevent.

The paper's rule for the network (section IV-D1: results and received data lie on the NIC's NUMA node) is
`network_placement`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from fireflyer.base.errors import UsageError
from fireflyer.topology.machine import Machine

__all__ = ["Placement", "network_placement", "rank_placement"]

Group = tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of one local rank. Give `cpus` to the collective thread and bind the arena to `memory_node`."""

    rank: int
    """Local rank: number of the rank on its node, from 0."""
    cpus: tuple[int, ...] = ()
    """Processors for the collective thread; empty: do not pin."""
    memory_node: int | None = None
    """NUMA node for the arena; None: leave it to first touch."""
    reason: str
    """One line that a person reads."""

    @property
    def pinned(self) -> bool:
        return bool(self.cpus)


def rank_placement(
    machine: Machine,
    ranks: int,
    *,
    masks: Sequence[Collection[int]] | None = None,
    near: Sequence[int | None] | None = None,
) -> tuple[Placement, ...]:
    """Placement of each of the `ranks` processes of this node, in order.

    `masks[r]` are the processors on which rank r may run (None: all have the mask of this process); `near[r]` is the
    NUMA node that rank r should be on, e.g. that of its GPU (`Machine.gpus`). Raises `UsageError` for lists that do not
    have one entry for each rank.
    """
    if ranks < 1:
        raise UsageError(f"a node has at least 1 rank, not {ranks}")
    for name, given in (("masks", masks), ("near", near)):
        if given is not None and len(given) != ranks:
            raise UsageError(f"{name} has {len(given)} entries for {ranks} ranks; one for each is needed")
    homes = {node.node: machine.memory_near(node) for node in machine.numa_nodes}
    wanted = [None if node is None else homes.get(node) for node in near or [None] * ranks]
    shares: dict[Group, list[int]] = {}
    for rank in range(ranks):
        mask = machine.allowed_cpus if masks is None else masks[rank]
        usable = set(machine.cpus) & set(mask)
        shares.setdefault(tuple(sorted(usable)) or machine.allowed_cpus, []).append(rank)
    why_not = _why_not(machine, shares)
    if why_not:
        return tuple(Placement(rank=rank, reason=f"not pinned: {why_not}") for rank in range(ranks))
    placed: list[Placement] = []
    for mask, members in shares.items():
        placed += _place_on_nodes(machine, _cores_by_memory(machine, mask), members, wanted)
    return tuple(sorted(placed, key=lambda placement: placement.rank))


def network_placement(machine: Machine) -> Placement:
    """Placement of the leader's thread that talks to other nodes, and of its receive slots: near the fastest NIC.

    `rank` is 0 and means nothing.
    """
    nics = [nic for nic in machine.nics() if nic.numa_node is not None]
    memories = _cores_by_memory(machine, machine.allowed_cpus)
    if len(memories) < 2 or not nics:
        why = "only one NUMA node is usable" if len(memories) < 2 else "the NUMA node of the network card is unknown"
        return Placement(rank=0, reason=f"not pinned: {why}")
    fastest = max(nics, key=lambda nic: (nic.network_bytes_per_s or 0, nic.max_link_bytes_per_s or 0))
    home = next(node for node in machine.numa_nodes if node.node == fastest.numa_node)
    memory_node = machine.memory_near(home)
    cpus = tuple(sorted(cpu for core in memories.get(memory_node, ()) for cpu in core))
    label = ", ".join(fastest.interfaces) or fastest.address
    return Placement(rank=0, cpus=cpus, memory_node=memory_node, reason=f"near {label} on NUMA node {memory_node}")


def _why_not(machine: Machine, shares: dict[Group, list[int]]) -> str:
    reachable = {node for mask in shares for node in _cores_by_memory(machine, mask)}
    if len(reachable) < 2:
        return "only one NUMA node is usable"
    for mask, members in shares.items():
        cores = _cores_within(machine.cores, mask)
        if len(cores) < len(members):
            return f"{len(members)} ranks on {len(cores)} cores"
    return ""


def _cores_within(groups: Sequence[Group], mask: Group) -> list[Group]:
    """What is left of each group within the mask."""
    usable = set(mask)
    cut = (tuple(cpu for cpu in group if cpu in usable) for group in groups)
    return [group for group in cut if group]


def _cores_by_memory(machine: Machine, mask: Group) -> dict[int, list[Group]]:
    """The cores within the mask under the NUMA node that they should use, NUMA nodes ascending."""
    memory_of_cpu = {}
    for node in machine.numa_nodes:
        memory_of_cpu.update(dict.fromkeys(node.cpus, machine.memory_near(node)))
    found: dict[int, list[Group]] = {}
    for core in _cores_within(machine.cores, mask):
        memory = memory_of_cpu.get(core[0])
        if memory is not None:  # the kernel may list processors under no node
            found.setdefault(memory, []).append(core)
    return dict(sorted(found.items()))


def _place_on_nodes(
    machine: Machine, memories: dict[int, list[Group]], members: list[int], wanted: Sequence[int | None]
) -> list[Placement]:
    by_node: dict[int, list[int]] = {}
    free: list[int] = []
    for rank in members:
        node = wanted[rank]
        if node is not None and len(by_node.get(node, ())) < len(memories.get(node, ())):
            by_node.setdefault(node, []).append(rank)
        else:
            free.append(rank)
    room = [len(cores) for cores in memories.values()]
    taken = [len(by_node.get(node, ())) for node in memories]
    for node, count in zip(memories, _proportional(len(free), room, taken), strict=True):
        by_node.setdefault(node, []).extend(free[:count])
        free = free[count:]
    placed: list[Placement] = []
    for node, ranks in by_node.items():
        parts = _divide(machine, memories[node], len(ranks))
        placed += [
            Placement(rank=rank, cpus=cpus, memory_node=node, reason=f"NUMA node {node}, {text}")
            for rank, (cpus, text) in zip(sorted(ranks), parts, strict=True)
        ]
    return placed


def _divide(machine: Machine, cores: list[Group], ranks: int) -> list[tuple[Group, str]]:
    """Processors of each of `ranks` ranks among these cores, and how to say it."""
    cache_of_cpu = {cpu: index for index, group in enumerate(machine.l3_groups) for cpu in group}
    by_cache: dict[int, list[Group]] = {}
    for core in cores:
        by_cache.setdefault(cache_of_cpu[core[0]], []).append(core)
    caches = list(by_cache.values())
    if ranks <= len(caches):
        first = [len(caches) * index // ranks for index in range(ranks)]
        return [
            (_flat(caches[index]), f"a last-level cache of its own ({len(caches[index])} cores)") for index in first
        ]
    parts = []
    counts = _proportional(ranks, [len(cache) for cache in caches], [0] * len(caches))
    for cache, count in zip(caches, counts, strict=True):
        for index in range(count):
            part = cache[len(cache) * index // count : len(cache) * (index + 1) // count]
            parts.append((_flat(part), f"{len(part)} of {len(cache)} cores of a last-level cache"))
    return parts


def _flat(cores: Sequence[Group]) -> Group:
    return tuple(sorted(cpu for core in cores for cpu in core))


def _proportional(count: int, room: Sequence[int], taken: Sequence[int]) -> list[int]:
    """`count` more things divided over places, so that all that is there is in proportion to the room; never more than
    the room where everything fits in."""
    full = list(taken)
    for _ in range(count):
        best = min(range(len(room)), key=lambda at: ((full[at] + 1) / room[at], at))
        full[best] += 1
    return [now - before for now, before in zip(full, taken, strict=True)]
