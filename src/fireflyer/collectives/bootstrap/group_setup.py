"""How a communicator comes to be: made with others, or the next one of a group that lost ranks or lets others in.

`GroupMember` is what `Communicator` is besides its operations.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, NamedTuple, Self

from fireflyer.base.errors import Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MS, SECOND
from fireflyer.collectives.bootstrap.arena import OwnMemory
from fireflyer.collectives.bootstrap.cpu_binding import (
    CpuBinding,
    bind_arena,
    cpu_binding_of,
    local_machine,
    mask_text,
    report,
)
from fireflyer.collectives.bootstrap.local_peers import own_peer_info
from fireflyer.collectives.bootstrap.membership import Generation, JoinRequest, Policy
from fireflyer.collectives.bootstrap.reconfiguration import Lineage, follow, new_uid, seek, successor
from fireflyer.collectives.bootstrap.rendezvous import GroupResources, Planner, rendezvous
from fireflyer.collectives.bootstrap.transports import make_offer
from fireflyer.collectives.p2p.exchange import RankExchange
from fireflyer.collectives.p2p.peer_listener import PeerListener
from fireflyer.collectives.planning.plan import SUMS, Plan
from fireflyer.collectives.planning.programs import MAX_NETWORKS
from fireflyer.collectives.planning.routing import default_plan
from fireflyer.identity.secrets import Secret
from fireflyer.native import Executor, OpenMemory
from fireflyer.runtime.store import Store
from fireflyer.topology import Machine

__all__ = ["DEFAULT_JOIN_TIMEOUT_NS", "DEFAULT_TIMEOUT_NS", "GroupConfig", "GroupMember"]

DEFAULT_TIMEOUT_NS: Final = 30 * SECOND
DEFAULT_JOIN_TIMEOUT_NS: Final = 120 * SECOND


class GroupConfig(NamedTuple):
    """What a process brings into a group, and into those that follow from it."""

    node: int
    secret: Secret
    hosts: tuple[str, ...]
    """At which other nodes reach it, one in each network."""
    timeout_ns: int
    peer_memory: bool
    dump_dir: str | None
    machine: Machine | None
    """Where its threads are to be placed; None: leave them alone."""
    transport: str = "tcp"
    ports: PortRange | None = None


class GroupMember(ABC):
    """A member of a group."""

    rank: int
    world_size: int
    timeout_ns: int
    plan: Plan
    _config: GroupConfig
    _memory: OwnMemory
    _lineage: Lineage
    _suspects: set[int]
    """Ranks that operations of this group have named as failed."""
    _exchange: RankExchange
    _native: Executor
    _handed_over = False
    """The memory belongs to the next group."""

    @abstractmethod
    def __init__(
        self,
        rank: int,
        resources: GroupResources,
        peer_listener: PeerListener | None,
        memory: OwnMemory,
        config: GroupConfig,
        lineage: Lineage,
        cpu_binding: CpuBinding,
    ) -> None: ...

    @abstractmethod
    def barrier(self) -> object: ...

    @abstractmethod
    def abort(self, reason: str) -> None: ...

    @abstractmethod
    def retire(self) -> None:
        """Closes it, but for the memory, which the next group takes over."""

    @abstractmethod
    def _busy(self) -> bool: ...

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        world_size: int,
        node: int,
        store: Store,
        secret: Secret,
        plan: Plan | None = None,
        sums: str | None = None,
        name: str = "world",
        attempt: int = 0,
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
        arena_bytes: int | None = None,
        peer_memory: bool = True,
        transport: str = "tcp",
        dump_dir: str | None = None,
        pin: bool = True,
        machine: Machine | None = None,
        planner: Planner = default_plan,
    ) -> Self:
        """Joins the group `name`; returns when this rank is connected.

        `node` is what the launcher says; ranks of different nodes share no memory. `plan` fixes the order of sums
        (None: `planner` makes one at rank 0 from the nodes; see `plan_for`). `sums="canonical"` makes results that do
        not depend on which ranks sit on which node (None: as the plan says, "by_node" where there is none; see `plan`).
        `host` is the address at which other nodes reach this process, at ports of the range `ports` (None: any that are
        free); several, separated by commas and as many on all ranks, are its addresses in several networks, over which
        TCP sends operations between nodes in turn. `timeout_ns` bounds how long a rank may hold the others up,
        `join_timeout_ns` how long joining takes. `arena_bytes` is how much `empty` can hand out at most (None: as much
        as the machine has memory, at most 1 TiB, together with the other groups of this process that say so; only what
        is used exists). Without `peer_memory` at one rank no rank of its node reads private memory of another, nor lets
        others read its own (docs/safety.md). `transport` carries the operations between nodes: "tcp"; "ucx", for RDMA,
        where UCX is installed and was when this was built; "auto": UCX where every machine has an RDMA device. The
        attribute says which it became. `dump_dir` is where this rank leaves a dump of its flight recorder when an
        operation fails (see `flight`).
        Where the machine has several NUMA nodes, native threads are kept on processors near the arena; `pin=False`
        leaves them alone. `machine` is what is known of this machine (None: what its kernel says).
        Raises `UsageError`, `Timeout`, `Unreachable`, `PermissionDenied`; `Busy` where no more files may be opened.
        """
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is out of range; ranks of {world_size} count from 0 to {world_size - 1}")
        if sums is not None and sums not in SUMS:
            raise UsageError(f"sums {sums!r} is not known; use one of {', '.join(SUMS)}")
        addresses = _addresses(host)
        memory = _checked_memory(timeout_ns, join_timeout_ns, arena_bytes)
        known = (machine or local_machine()) if pin else None
        with ExitStack() as undo:
            undo.callback(memory.release)
            generation = store.add(f"{_place(attempt, name)}/joined/{rank}", 1)
            communicator = cls._form(
                store,
                Lineage(f"{_place(attempt, name)}/{generation}", 0),
                rank=rank,
                world_size=world_size,
                node=node,
                plan=plan,
                sums=sums,
                config=GroupConfig(node, secret, addresses, timeout_ns, peer_memory, dump_dir, known, transport, ports),
                memory=memory,
                planner=planner,
                join_timeout_ns=join_timeout_ns,
            )
            undo.pop_all()
            return communicator

    @classmethod
    def _form(
        cls,
        store: Store,
        lineage: Lineage,
        *,
        rank: int,
        world_size: int,
        node: int,
        plan: Plan | None,
        sums: str | None,
        config: GroupConfig,
        memory: OwnMemory,
        join_timeout_ns: int,
        planner: Planner = default_plan,
    ) -> Self:
        """Meets the others; `node` is as the plan counts."""
        prefix = lineage.here
        offer, fabric = make_offer(config.transport, ports=config.ports)
        with _under_way() as forming, ExitStack() as undo:
            peer_listener = None
            if world_size > 1:
                peer_listener = PeerListener(
                    rank=rank,
                    world_size=world_size,
                    host=config.hosts[0],
                    ports=config.ports,
                    secret=config.secret,
                    prefix=prefix,
                )
                undo.callback(peer_listener.close)
                forming.peer_listener = peer_listener
                peer_listener.publish(store)
            if config.peer_memory:
                forming.stack.callback(OpenMemory().close)  # by then native code has its own, if it needs one
            resources = rendezvous(
                store,
                prefix,
                rank=rank,
                world_size=world_size,
                node=node,
                plan=plan,
                sums=sums,
                secret=config.secret,
                hosts=config.hosts,
                ports=config.ports,
                join_timeout_ns=join_timeout_ns,
                timeout_ns=config.timeout_ns,
                own=own_peer_info(memory.fd, peer_memory=config.peer_memory, cpus=mask_text(config.machine)),
                planner=planner,
                machine=config.machine,
                offer=offer,
                fabric=fabric,
                stack=forming.stack,
            )
            masks = [one.cpus for one in resources.local_peers]
            binding = cpu_binding_of(
                config.machine, masks, resources.plan.ranks_of(resources.plan.node_of_rank[rank]).index(rank)
            )
            refused = bind_arena(memory.arena, binding) if memory.arena.used == 0 else ""
            try:
                communicator = cls(rank, resources.duplicate(), peer_listener, memory, config, lineage, binding)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise translate_os_error(error, "map the memory that the ranks of the node share") from error
                raise UsageError(
                    f"cannot map the arenas of {len(resources.local_peers)} ranks of {memory.arena.bytes} bytes each: "
                    f"{error}; pass a smaller arena_bytes, or raise the limit on address space (ulimit -v)"
                ) from error
            except (RuntimeError, ValueError) as error:
                raise Unreachable(f"rank {rank} cannot use the shared memory of node {node}: {error}") from error
            if peer_listener is not None:
                undo.callback(communicator.retire)
                peer_listener.open(store, communicator._exchange.admit, join_timeout_ns)
            undo.pop_all()
            if config.machine is not None:
                report(rank, binding, [*filter(None, [refused]), *communicator._native.placement_warnings()])
            return communicator

    @classmethod
    def join(
        cls,
        *,
        store: Store,
        secret: Secret,
        node: int,
        name: str = "world",
        attempt: int = 0,
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
        arena_bytes: int | None = None,
        peer_memory: bool = True,
        transport: str = "tcp",
        dump_dir: str | None = None,
        pin: bool = True,
        machine: Machine | None = None,
    ) -> Self:
        """Comes into the group `name`, which exists, as a new rank: when its ranks call `reform` the next time.

        Arguments as for `create`; rank, world size and plan are the group's to say. Its ranks learn from `newcomers`
        that this process waits. Raises `Timeout` where they do not take it in, and as `create` does.
        """
        joined = store.get(f"{_place(attempt, name)}/joined/0", join_timeout_ns)
        lineage = follow(store, f"{_place(attempt, name)}/{int(joined)}")
        join_order = store.add(f"{lineage.prefix}/tickets", 1)
        memory = _checked_memory(timeout_ns, join_timeout_ns, arena_bytes)
        known = (machine or local_machine()) if pin else None
        addresses = _addresses(host)
        config = GroupConfig(node, secret, addresses, timeout_ns, peer_memory, dump_dir, known, transport, ports)
        me = JoinRequest(new_uid(), -1, join_order, node)
        policy = Policy(1, None, timeout_ns)
        member = cls._seek(store, lineage, me, 0, policy, None, config, memory, join_timeout_ns)
        if member is None:
            raise UsageError("this process has announced that it leaves, so it cannot join")
        return member

    def reform(
        self,
        store: Store,
        *,
        min_world_size: int = 1,
        max_world_size: int | None = None,
        grace_ns: int | None = None,
        join_timeout_ns: int = DEFAULT_JOIN_TIMEOUT_NS,
        plan: Callable[[tuple[int, ...]], Plan] | None = None,
    ) -> Self:
        """The group that follows from this one: those of its ranks that call this too, and processes that `join`.

        To be called by all ranks that are left after a failure, or by all at the same place of the program to let
        others in or out (`leave`). Closes this communicator. Survivors keep their order and have the lowest ranks.
        Arrays made by `empty` stay what they are and are registered in the new group; drop this object, so that the
        memory of lost ranks goes back. Arrays of the operation that broke hold garbage.

        Ranks that the failure has named are waited for for a second, other missing ones for `grace_ns` (None:
        `timeout_ns`), and until there are `min_world_size` the wait goes on. Of more than `max_world_size` the highest
        are left out, newcomers first. `plan` makes the plan from the node of each rank, the same on all ranks (None:
        as this group's, see `reconfiguration.successor`). All ranks pass the same arguments.

        Raises `StaleVersion` where the others have gone on without this process, `Timeout` after `join_timeout_ns`,
        `UsageError`, `Unreachable`, `PermissionDenied`.
        """
        if min_world_size < 1 or (max_world_size is not None and max_world_size < min_world_size):
            raise UsageError(
                f"min_world_size {min_world_size} and max_world_size {max_world_size} must be 1 <= min <= max"
            )
        policy = Policy(min_world_size, max_world_size, self.timeout_ns if grace_ns is None else grace_ns)
        if policy.grace_ns < MS or join_timeout_ns < MS:
            raise UsageError("grace_ns and join_timeout_ns are nanoseconds and at least 1_000_000")
        member = self._go_on(store, policy, join_timeout_ns, plan, leaves=False)
        if member is None:
            raise UsageError(f"rank {self.rank} has left the group")
        return member

    def leave(self, store: Store) -> None:
        """Closes this communicator and tells the others, who call `reform`, not to wait for this process."""
        self._go_on(store, Policy(1, None, self.timeout_ns), DEFAULT_JOIN_TIMEOUT_NS, None, leaves=True)

    def newcomers(self, store: Store) -> int:
        """How many processes wait to `join` when the group re-forms. Ranks that ask at different times may be told
        different numbers: share one rank's answer."""
        return len(store.keys(f"{self._lineage.of(self._lineage.generation + 1)}/waiting/"))

    def _go_on(
        self,
        store: Store,
        policy: Policy,
        join_timeout_ns: int,
        plan: Callable[[tuple[int, ...]], Plan] | None,
        *,
        leaves: bool,
    ) -> Self | None:
        if self._handed_over or not self._memory.shared:
            raise UsageError("this communicator was closed or re-formed; call reform or leave once, and not close")
        self._handed_over = True
        if self._busy():
            self.abort("the group is re-formed while operations are pending")
        self.retire()
        me = JoinRequest(new_uid(), self.rank, -1, self._config.node, leaves, tuple(sorted(self._suspects)))
        plan_of = plan or successor(self.plan)
        return self._seek(
            store, self._lineage, me, self.world_size, policy, plan_of, self._config, self._memory, join_timeout_ns
        )

    @classmethod
    def _seek(
        cls,
        store: Store,
        lineage: Lineage,
        me: JoinRequest,
        world_size: int,
        policy: Policy,
        plan_of: Callable[[tuple[int, ...]], Plan] | None,
        config: GroupConfig,
        memory: OwnMemory,
        join_timeout_ns: int,
    ) -> Self | None:
        form = partial(cls._sit_down, store, config, memory)
        with ExitStack() as undo:
            undo.callback(memory.release)
            member = seek(
                store, lineage, me, world_size, form, policy=policy, plan_of=plan_of, timeout_ns=join_timeout_ns
            )
            if member is not None:
                undo.pop_all()
            return member

    @classmethod
    def _sit_down(
        cls,
        store: Store,
        config: GroupConfig,
        memory: OwnMemory,
        lineage: Lineage,
        formed: Generation,
        rank: int,
        timeout_ns: int,
    ) -> Self:
        return cls._form(
            store,
            lineage,
            rank=rank,
            world_size=len(formed.slots),
            node=formed.plan.node_of_rank[rank],
            plan=formed.plan,
            sums=None,
            config=config,
            memory=memory,
            join_timeout_ns=timeout_ns,
        )


class _FormingGroup:
    """Descriptors of a group that is being formed. A child that is forked meanwhile must not keep them: the others
    would not see that this process has died."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.peer_listener: PeerListener | None = None

    def abandon(self) -> None:
        self.stack.close()
        if self.peer_listener is not None:
            self.peer_listener.abandon()


@contextmanager
def _under_way() -> Iterator[_FormingGroup]:
    forming = _FormingGroup()
    _forming.append(forming)
    try:
        with forming.stack:
            yield forming
    finally:
        _forming.remove(forming)


_forming: Final[list[_FormingGroup]] = []


def _after_fork_in_child() -> None:
    for forming in _forming:
        forming.abandon()
    _forming.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _place(attempt: int, name: str) -> str:
    return f"attempt-{attempt}/collectives/{name}"


def _addresses(host: str) -> tuple[str, ...]:
    """Raises `UsageError`."""
    addresses = tuple(host.split(","))
    if not all(addresses) or len(set(addresses)) < len(addresses) or len(addresses) > MAX_NETWORKS:
        raise UsageError(
            f"host {host[:200]!r} (FF_ADDRESS) must be an address of this machine, or up to {MAX_NETWORKS} different "
            "ones separated by commas"
        )
    return addresses


def _checked_memory(timeout_ns: int, join_timeout_ns: int, arena_bytes: int | None) -> OwnMemory:
    if timeout_ns < MS or join_timeout_ns < MS:
        raise UsageError("timeout_ns and join_timeout_ns are nanoseconds and at least 1_000_000")
    return OwnMemory(arena_bytes)
