"""How the ranks of a group find each other and end up with authenticated sockets and shared memory.

1. Every rank writes into the store where it is. Rank 0 reads them all, fixes the plan, and publishes the result (plan
   and hosts), or the reason why there is none: a rank that is missing is named to everybody.
2. The leader of a node (its lowest rank) makes the shared memory. The others of the node connect to its Unix socket,
   prove that they hold the secret, and receive the descriptors. The connection stays open: its end is a rank's death.
3. The leaders listen on TCP. For each pair of neighbours the higher node connects to the lower one: a control
   connection, and those that `programs.links` names for each lane of each algorithm of the plan; these are left to UCX
   where the group uses it (`transports`). Where machines have addresses in several networks, the leaders listen in
   each, and `programs.network_of` says in which a connection is made.

Nothing is sent to, and nothing believed from, a connection that has not authenticated. All waits have one deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import msgspec

from fireflyer.base.decoding import decode_published
from fireflyer.base.errors import FireflyerError, PermissionDenied, Timeout, Unreachable, UsageError
from fireflyer.base.os_errors import translate_os_error
from fireflyer.base.port_range import PortRange
from fireflyer.base.units import MS, SECOND, format_duration
from fireflyer.collectives.bootstrap import local_peers
from fireflyer.collectives.bootstrap.cpu_binding import interleave_window_pages
from fireflyer.collectives.bootstrap.local_peers import LocalPeer, LocalPeerInfo
from fireflyer.collectives.bootstrap.transports import Choice, Offer, choose, exchange_worker_addresses
from fireflyer.collectives.p2p.acceptor import Acceptor
from fireflyer.collectives.p2p.peer_listener import ListenAddress, listen
from fireflyer.collectives.planning.plan import BY_NODE, Plan, check_ranks
from fireflyer.collectives.planning.programs import CONTROL, Link, links, network_of, sockets_for
from fireflyer.identity.secrets import Secret
from fireflyer.native import Fabric, create_window
from fireflyer.runtime.address import Address
from fireflyer.runtime.environment import read_environment
from fireflyer.runtime.sockets import authenticate_client
from fireflyer.runtime.store import Store
from fireflyer.topology import Machine

__all__ = ["GroupResources", "Planner", "RankInfo", "RankMissing", "RendezvousResult", "rendezvous"]

logger = logging.getLogger(__name__)
_RESULT_GRACE_NS: Final = 5 * SECOND
_BACKLOG: Final = 64


Planner = Callable[[tuple[int, ...], tuple[str, ...]], Plan]
"""A plan for ranks on these nodes, whose hosts have these names. Called at rank 0 only. Raises `UsageError`."""


class RankMissing(UsageError):
    """A rank did not join the rendezvous."""


class RankInfo(msgspec.Struct, frozen=True):
    """What a rank says of itself."""

    node: int
    host: str
    plan: Plan | None = None
    sums: str | None = None
    """As it was asked for; None: as the plan says."""
    offer: Offer = Offer()
    networks: int = 1
    """In how many it has an address."""


class RendezvousResult(msgspec.Struct, frozen=True):
    """What rank 0 says of all; with `error`, that there is no group."""

    error: str | None
    absent: bool = False
    """The error is that a rank did not come."""
    hosts: tuple[str, ...] = ()
    plan: Plan | None = None
    choice: Choice = Choice()


class GroupResources(NamedTuple):
    """What the native executor needs."""

    plan: Plan
    labels: tuple[str, ...]
    hosts: tuple[str, ...]
    """Of each rank."""
    window_fd: int
    doorbell_fd: int
    leader_fd: int
    local_fds: tuple[tuple[int, int], ...]
    connections: tuple[tuple[int, int, int, int], ...]
    """Channel, node, socket (see `programs.Link`), descriptor; -1 where `fabric` carries it."""
    local_peers: tuple[LocalPeer, ...]
    """The ranks of the node."""
    choice: Choice = Choice()
    fabric: Fabric | None = None

    def duplicate(self) -> GroupResources:
        """The same with descriptors of its own, for native code to own and close. Raises `Busy` where the process may
        not have as many; then it has none of them."""
        with ExitStack() as undo:

            def own(fd: int) -> int:
                if fd < 0:
                    return -1
                copy = os.dup(fd)
                undo.callback(os.close, copy)
                return copy

            try:
                copies = self._replace(
                    window_fd=own(self.window_fd),
                    doorbell_fd=own(self.doorbell_fd),
                    leader_fd=own(self.leader_fd),
                    local_fds=tuple((rank, own(fd)) for rank, fd in self.local_fds),
                    connections=tuple((c, node, n, own(fd)) for c, node, n, fd in self.connections),
                    local_peers=tuple(one._replace(arena_fd=own(one.arena_fd)) for one in self.local_peers),
                )
            except OSError as error:
                raise translate_os_error(error, f"keep the connections of {len(self.labels)} ranks open") from error
            undo.pop_all()
            return copies


class _Rendezvous:
    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world_size: int,
        secret: Secret,
        hosts: Sequence[str],
        ports: PortRange | None,
        timeouts: tuple[int, int],
        planner: Planner,
    ) -> None:
        self.store = store
        self.prefix = prefix
        self.rank = rank
        self.world_size = world_size
        self.secret = secret
        self.hosts = hosts
        self.ports = ports
        self.planner = planner
        self.timeout_ns, self.user_timeout_ns = timeouts
        self.deadline_ns = time.monotonic_ns() + self.timeout_ns

    def left_ns(self) -> int:
        return max(1, self.deadline_ns - time.monotonic_ns())

    def acceptor(self, listeners: Sequence[socket.socket], purpose: str, identity: str) -> Acceptor:
        return Acceptor(listeners, self.secret, f"{self.prefix}/{purpose}", identity)

    # --- the result ---

    def agree(self, member: RankInfo) -> RendezvousResult:
        self.store.set(f"{self.prefix}/rank/{self.rank}", msgspec.json.encode(member))
        if self.rank == 0:
            result = self._collect()
            self.store.set(f"{self.prefix}/roster", msgspec.json.encode(result))
        else:
            try:
                data = self.store.get(f"{self.prefix}/roster", self.left_ns() + _RESULT_GRACE_NS)
            except Timeout:
                raise Timeout(f"rank 0 did not join within {format_duration(self.timeout_ns)}; see its log") from None
            result = decode_published(data, RendezvousResult, "rank 0")
        if result.error is not None:
            raise (RankMissing if result.absent else UsageError)(result.error)
        return result

    def _collect(self) -> RendezvousResult:
        keys = [f"{self.prefix}/rank/{rank}" for rank in range(self.world_size)]
        try:
            offers = self.store.get_all(keys, self.left_ns())
        except Timeout:
            present = set(self.store.keys(f"{self.prefix}/rank/"))
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if key not in present)
            return RendezvousResult(
                f"rank {missing} did not join within {format_duration(self.timeout_ns)}; see its log", True
            )
        try:
            members = [decode_published(offer, RankInfo, f"rank {rank}") for rank, offer in enumerate(offers)]
            hosts, choice = tuple(member.host for member in members), choose([member.offer for member in members])
            return RendezvousResult(None, False, hosts, _plan_of(members, self.planner), choice)
        except FireflyerError as error:
            return RendezvousResult(error.message)

    # --- inside the node ---

    def serve_window(
        self, acceptor: Acceptor, others: tuple[int, ...], window_fds: list[int], own: LocalPeerInfo, stack: ExitStack
    ) -> tuple[list[tuple[int, int]], list[LocalPeer]]:
        """The sockets of the other ranks, and all ranks' processes and arenas."""
        found: dict[int, socket.socket] = {}
        peers = {self.rank: own}
        names = {f"rank {rank}": rank for rank in others}
        while len(found) < len(others):
            sock, identity = self._welcome(acceptor, _missing(others, found))
            rank = names.get(identity, -1)
            if rank < 0 or rank in found:
                sock.close()
                continue
            found[rank] = stack.enter_context(sock)
            sock.settimeout(self.left_ns() / SECOND)
            peers[rank] = local_peers.receive(sock, f"rank {rank}", stack)
        everybody = [peers[rank] for rank in (self.rank, *others)]
        for sock in found.values():
            local_peers.send_all(sock, window_fds, everybody)
        open_ = local_peers.decide({f"rank {rank}": sock for rank, sock in found.items()}, own, everybody)
        return [(rank, sock.fileno()) for rank, sock in sorted(found.items())], local_peers.local_peers(
            everybody, open_
        )

    def join_window(
        self, address: ListenAddress, leader: int, ranks: int, own: LocalPeerInfo, stack: ExitStack
    ) -> tuple[int, int, int, list[LocalPeer]]:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            sock.settimeout(self.left_ns() / SECOND)
            sock.connect(f"\0{address.unix}")
        except OSError as error:
            raise UsageError(
                f"rank {self.rank} cannot reach rank {leader} by a Unix socket ({error.strerror or error}); ranks of "
                "one node must run on one host and in one network namespace"
            ) from error
        peer = authenticate_client(sock, self.secret, f"rank {self.rank}", f"{self.prefix}/window", self.left_ns())
        if peer != f"rank {leader}":
            raise PermissionDenied(f"expected rank {leader} at its Unix socket, found {peer!r}")
        sock.settimeout(self.left_ns() / SECOND)
        local_peers.send(sock, own, f"rank {leader}")
        (window_fd, doorbell_fd), everybody = local_peers.receive_all(sock, f"rank {leader}", ranks, stack)
        open_ = local_peers.agree(sock, f"rank {leader}", own, everybody)
        return window_fd, doorbell_fd, sock.fileno(), local_peers.local_peers(everybody, open_)

    # --- between nodes ---

    def connect(
        self, plan: Plan, node: int, acceptor: Acceptor, fabric: Fabric | None, stack: ExitStack
    ) -> list[tuple[int, int, int, int]]:
        every = links(plan, node)
        wanted = every if fabric is None else [link for link in every if link.channel == CONTROL]
        made: dict[Link, socket.socket] = {}
        for link in wanted:
            if link.node < node:
                made[link] = stack.enter_context(self._dial(plan, node, link))
        expected = {_name(link, link.node): link for link in wanted if link.node > node}
        while len(made) < len(wanted):
            lacking = min(link.node for link in wanted if link not in made)
            sock, identity = self._welcome(acceptor, f"rank {plan.leader_of(lacking)}")
            arrived = expected.get(identity)
            if arrived is None or arrived in made:
                sock.close()
                continue
            made[arrived] = stack.enter_context(sock)
        for link, sock in made.items():
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if link.channel == CONTROL:  # data may wait for a rank that is busy; heartbeats never do
                limit_ms = max(1, 2 * self.user_timeout_ns // MS)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        if fabric is not None:
            for sock in made.values():
                sock.settimeout(self.left_ns() / SECOND)
            exchange_worker_addresses(
                fabric, {link.node: (f"rank {plan.leader_of(link.node)}", made[link]) for link in wanted}
            )
        return [(*link, made[link].fileno() if link in made else -1) for link in every]

    def _dial(self, plan: Plan, node: int, link: Link) -> socket.socket:
        other = link.node
        leader = plan.leader_of(other)
        networks = self.listen_address_of(other, leader).networks
        number = network_of(link, len(self.hosts))
        if len(networks) != len(self.hosts):
            raise UsageError(f"rank {leader} published an invalid address; do all ranks run the same version?")
        target = Address(*networks[number])
        own = self.hosts[number] if len(networks) > 1 else None
        try:
            sock = socket.create_connection(
                target, timeout=self.left_ns() / SECOND, source_address=None if own is None else (own, 0)
            )
        except OSError as error:
            here = "" if own is None else f" from its address {own}"
            raise Unreachable(f"rank {self.rank} cannot connect to rank {leader} at {target}{here}: {error}") from error
        try:
            peer = authenticate_client(sock, self.secret, _name(link, node), f"{self.prefix}/link", self.left_ns())
            if peer != f"node {other}":
                raise PermissionDenied(f"expected node {other} at {target}, found {peer!r}")
        except FireflyerError:
            sock.close()
            raise
        return sock

    def listen_address_of(self, node: int, leader: int) -> ListenAddress:
        try:
            data = self.store.get(f"{self.prefix}/node/{node}", self.left_ns())
            return decode_published(data, ListenAddress, f"rank {leader}")
        except Timeout:
            raise Timeout(
                f"rank {leader}, the leader of node {node}, did not publish its address; see its log"
            ) from None

    def _welcome(self, acceptor: Acceptor, missing: str) -> tuple[socket.socket, str]:
        try:
            return acceptor.next_peer(self.left_ns())
        except TimeoutError:
            raise Timeout(f"{missing} did not connect within {format_duration(self.timeout_ns)}; see its log") from None


def rendezvous(
    store: Store,
    prefix: str,
    *,
    rank: int,
    world_size: int,
    node: int,
    plan: Plan | None,
    sums: str | None,
    secret: Secret,
    hosts: Sequence[str],
    ports: PortRange | None,
    join_timeout_ns: int,
    timeout_ns: int,
    own: LocalPeerInfo,
    planner: Planner,
    machine: Machine | None,
    offer: Offer,
    fabric: Fabric | None,
    stack: ExitStack,
) -> GroupResources:
    """Meets the others; `hosts` are the addresses at which they reach this one, one in each network. All sockets and
    descriptors are entered into `stack` and closed with it: duplicate what is to stay. `offer` and `fabric` are from
    `transports.make_offer`. Raises `UsageError`, `Timeout`, `Unreachable`, `PermissionDenied`, each naming a rank, and
    what a system says that has no more of something."""
    group = _Rendezvous(store, prefix, rank, world_size, secret, hosts, ports, (join_timeout_ns, timeout_ns), planner)
    try:
        return _met(group, node, plan, sums, own, machine, offer, fabric, stack)
    except FireflyerError:  # some are OSErrors, too
        raise
    except OSError as error:  # what a peer does has other errors: this process may open no more files, or the like
        raise translate_os_error(error, f"rendezvous as rank {rank}") from error


def _met(
    group: _Rendezvous,
    node: int,
    plan: Plan | None,
    sums: str | None,
    own: LocalPeerInfo,
    machine: Machine | None,
    offer: Offer,
    fabric: Fabric | None,
    stack: ExitStack,
) -> GroupResources:
    store, prefix, rank, world_size = group.store, group.prefix, group.rank, group.world_size
    name = read_environment().host or socket.gethostname()
    result = group.agree(RankInfo(node, name, plan, sums, offer, len(group.hosts)))
    if result.plan is None or len(result.hosts) != world_size:
        raise UsageError("rank 0 published an invalid list of ranks; do all ranks run the same version?")
    plan = result.plan
    if rank == 0 and offer.transport != "tcp":
        logger.info("group=%s transport=%s reason=%s", prefix, result.choice.transport, result.choice.reason)
    labels = tuple(f"rank {r} (node {plan.node_of_rank[r]}, host {h})" for r, h in enumerate(result.hosts))
    locals_ = plan.ranks_of(node)
    if rank != locals_[0]:
        address = group.listen_address_of(node, locals_[0])
        window_fd, doorbell_fd, leader_fd, peers = group.join_window(address, locals_[0], len(locals_), own, stack)
        return GroupResources(
            plan, labels, result.hosts, window_fd, doorbell_fd, leader_fd, (), (), tuple(peers), result.choice
        )
    if result.choice.transport != "ucx" or plan.nodes == 1:
        fabric = None
    window_fd = create_window(len(locals_), plan.window, plan.largest_chunk_bytes)
    stack.callback(os.close, window_fd)
    interleave_window_pages(window_fd, machine)
    doorbell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    stack.callback(os.close, doorbell_fd)
    with ExitStack() as listening:
        unix, servers, address = listen(group.hosts, stack, backlog=_BACKLOG, ports=group.ports)
        inside = listening.enter_context(group.acceptor([unix], "window", f"rank {rank}"))
        outside = listening.enter_context(group.acceptor(servers, "link", f"node {node}"))
        store.set(f"{prefix}/node/{node}", msgspec.json.encode(address))
        local_fds, peers = group.serve_window(inside, locals_[1:], [window_fd, doorbell_fd], own, stack)
        connections = group.connect(plan, node, outside, fabric, stack)
    found = tuple(local_fds), tuple(connections), tuple(peers)
    return GroupResources(plan, labels, result.hosts, window_fd, doorbell_fd, -1, *found, result.choice, fabric)


def _plan_of(members: list[RankInfo], planner: Planner) -> Plan:
    """Of all ranks, with connections enough for each network. Raises `UsageError`."""
    networks = members[0].networks
    for rank, member in enumerate(members):
        if member.networks != networks:
            raise UsageError(
                f"rank {rank} ({member.host}) has addresses in {member.networks} networks, and rank 0 "
                f"({members[0].host}) in {networks}; give all machines as many (--interface, --subnet, FF_ADDRESS)"
            )
    plan = _common_plan(members, planner)
    return msgspec.structs.replace(plan, sockets=max(plan.sockets, sockets_for(networks)))


def _common_plan(members: list[RankInfo], planner: Planner) -> Plan:
    node_of_rank = tuple(member.node for member in members)
    plans = {rank: member.plan for rank, member in enumerate(members) if member.plan is not None}
    asked = {rank: member.sums for rank, member in enumerate(members) if member.sums is not None}
    for rank, sums in asked.items():
        if sums != asked[min(asked)]:
            raise UsageError(
                f"rank {rank} asks for sums={sums!r}, but rank {min(asked)} for sums={asked[min(asked)]!r}"
            )
    sums = asked[min(asked)] if asked else BY_NODE
    if not plans:
        check_ranks(node_of_rank)
        first_on = {node: rank for rank, node in reversed(list(enumerate(node_of_rank)))}
        plan = planner(node_of_rank, tuple(members[rank].host for _, rank in sorted(first_on.items())))
        return msgspec.structs.replace(plan, sums=sums) if asked else plan
    first, plan = next(iter(plans.items()))
    for rank, other in plans.items():
        if other != plan:
            raise UsageError(f"rank {rank} was given another plan than rank {first}; pass the same plan on all ranks")
    if asked and plan.sums != sums:
        raise UsageError(f"sums={sums!r} is asked for, but the plan has sums={plan.sums!r}; pass make_plan(..., sums=)")
    if plan.node_of_rank != node_of_rank:
        raise UsageError(
            f"the plan is for ranks on nodes {_short(plan.node_of_rank)}, but the group has them on "
            f"{_short(node_of_rank)}; start with the same nodes and ranks, or make a new plan"
        )
    return plan


def _short(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes[:16])) + ("..." if len(nodes) > 16 else "")


def _name(link: Link, node: int) -> str:
    """How `node`, which connects, names itself at the other end of the link."""
    return f"node {node} link {link.channel}.{link.socket}"


def _missing(wanted: tuple[int, ...], found: dict[int, socket.socket]) -> str:
    return "rank " + ", ".join(str(rank) for rank in wanted if rank not in found)
