"""What to move when nodes or disks come, go, or are to be emptied; and in which order.

The caller describes the cluster as it shall be: a new node or disk is in it, one that is to be emptied has 0 slots, one
that is lost for ever is not in it. `rebalance` answers with a *goal* (a table of the same chains) and the moves there.

    stored table ──rebalance(cluster)──> Plan: goal, moves in rounds
    for each move: the new target joins the chain, is copied, serves; the old one leaves chain and table
    after any interruption: moves_between(table, goal), or rebalance again

*Few moves.* Quotas are chosen such that as few targets as possible are above them (`quotas`); no plan can move fewer,
that is `minimum`. The search (`search.Stay`) only changes which target goes where. `extra_percent` lets it move more
where that brings the ratio nearer to its bound; never if nothing has to be moved: a table that obeys its quotas is
settled, and stays as it is.

*No ping-pong.* Every move that is needed leads from a place above its quota to one below. So after any part of a plan
without extra moves exactly the rest of the minimum is missing, whatever a new plan chooses; a target that was moved and
moved again would make the minimum too large. What a new plan from the middle cannot know is why the old one chose as it
did: to get its balance too, and always with extra moves, store the goal; what is left is `moves_between(table, goal)`.

*Safe at every step.* A move's new node is not in the chain, and its domain is in no other member of it; its disk has a
slot free while the old target still has its own. A chain has one move per round, and a node takes one target per round.
Targets that are lost come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fireflyer.base.errors import InvariantViolation
from fireflyer.fs.core.placement.disks import NO_DISK, assign_disks
from fireflyer.fs.core.placement.measure import Counts, Quality, count_pairs, measure, ratio_of
from fireflyer.fs.core.placement.model import Cluster, DiskLocation, StorageNode, Table, check_cluster, check_table
from fireflyer.fs.core.placement.placing import make_table, role_steps
from fireflyer.fs.core.placement.quotas import Quotas, domain_numbers, share_among_nodes, share_out
from fireflyer.fs.core.placement.roles import balance_positions, order_chains
from fireflyer.fs.core.placement.search import Search, Stay, goal_of
from fireflyer.fs.core.placement.seeded_random import SeededRandom
from fireflyer.fs.core.placement.vacancies import fewest_moves

__all__ = ["Move", "Plan", "moves_between", "rebalance"]

SEARCH_STEPS: Final = 3000
POLISH_STEPS: Final = 300


class Move(msgspec.Struct, frozen=True):
    """One target of a chain gets another place."""

    chain: int
    """In the table."""
    source: DiskLocation
    to: DiskLocation
    round: int
    """Moves of one round may be under way at the same time."""
    lost: bool
    """The source is no more, so the chain has one replica less until this is done."""


class Plan(msgspec.Struct, frozen=True):
    goal: Table
    """After all moves. Only the orders inside chains may differ from what the moves alone lead to."""
    moves: tuple[Move, ...]
    """By rounds."""
    minimum: int
    """So many targets at least are where they cannot stay."""
    reordered: int
    """Chains that get another order besides."""
    quality: Quality
    """Of the goal."""


class _Now(NamedTuple):
    """A table in numbers: nodes by index in `cluster`, which ends with those that are no more."""

    cluster: Cluster
    chains: Counts
    disks: Counts
    """(b, k) where each target lies; `NO_DISK` where it cannot stay."""
    quotas: Quotas
    domains: tuple[int, ...]


def rebalance(cluster: Cluster, table: Table, *, extra_percent: int = 0, seed: int = 0) -> Plan:
    """`cluster` as it shall be, `table` as it is. Raises `UsageError`: one line, where there is no room.

    Where the fewest moves do not lead to the bound of the worst peer-load ratio, `extra_percent` more may be made."""
    replicas = check_table(table)
    check_cluster(cluster, replicas)
    now = _read(cluster, table, replicas)
    minimum = _minimum(now)
    rng = SeededRandom(seed)
    members = _members(now, rng, most_extra=minimum * extra_percent // 100)
    plan = _plan(cluster, now, table, members, minimum, rng)
    if plan is None:  # more moves than necessary, and disks so full that they have no order
        plan = _plan(cluster, now, table, _members(now, rng, most_extra=0), minimum, rng)
    if plan is None:
        raise InvariantViolation("moves from full to empty disks have no order")
    return plan


def _read(cluster: Cluster, table: Table, replicas: int) -> _Now:
    known = {node.id for node in cluster}
    gone = sorted({place.node for chain in table.chains for place in chain} - known)
    everyone = cluster + tuple(StorageNode(node, (0,)) for node in gone)
    index = {node.id: i for i, node in enumerate(everyone)}
    chains = np.array([[index[place.node] for place in chain] for chain in table.chains], dtype=np.int64)
    disks = np.full(chains.shape, NO_DISK, dtype=np.int64)
    held: dict[tuple[int, int], int] = {}
    for row, chain in enumerate(table.chains):
        for at, place in enumerate(chain):
            slots = everyone[index[place.node]].slots
            if 0 <= place.disk < len(slots) and slots[place.disk]:
                disks[row, at] = place.disk
                here = index[place.node], place.disk
                held[here] = held.get(here, 0) + 1
    quotas = share_among_nodes(everyone, len(chains), replicas, held)
    return _Now(everyone, chains, disks, quotas, domain_numbers(everyone))


def _minimum(now: _Now) -> int:
    """Targets that are missing where quotas want them; as many are where they cannot stay."""
    missing = 0
    for node, quotas in enumerate(now.quotas.disks):
        for disk, quota in enumerate(quotas):
            missing += max(0, quota - int(((now.chains == node) & (now.disks == disk)).sum()))
    return missing


def _members(now: _Now, rng: SeededRandom, *, most_extra: int) -> Counts:
    """Which nodes share each chain; row i is chain i, places that stay in their position."""
    quotas, domains, replicas = now.quotas.nodes, now.domains, now.chains.shape[1]
    if not _unsettled(now):
        return now.chains
    goal = goal_of(quotas, domains, replicas)
    kept = np.zeros((len(now.chains), len(now.cluster)), dtype=bool)
    lies_on = np.full(kept.shape, NO_DISK, dtype=np.int64)
    np.put_along_axis(kept, now.chains, now.disks != NO_DISK, axis=1)
    np.put_along_axis(lies_on, now.chains, now.disks, axis=1)
    any_disk = _any_disk(now)
    lies_on[:, any_disk] = NO_DISK
    stay = Stay(kept, lies_on)
    found = fewest_moves(now.chains, now.disks, now.quotas, goal, any_disk, rng)
    search = Search(found, goal, rng, stay, stay.moved(found))
    if not search.run(SEARCH_STEPS, polish_steps=POLISH_STEPS) and most_extra:
        wider = Search(search.best, goal, rng, stay, stay.moved(search.best) + most_extra)
        wider.run(SEARCH_STEPS, polish_steps=0)
        if _worst(wider.best, now) < _worst(search.best, now):
            return wider.best
    return search.best


def _any_disk(now: _Now) -> npt.NDArray[np.bool_]:
    """Nodes that give away one target at most, from whichever of their disks: all are equally full and large."""
    found = []
    for node, (of_cluster, quota) in enumerate(zip(now.cluster, now.quotas.nodes, strict=True)):
        held = np.bincount(now.disks[(now.chains == node) & (now.disks != NO_DISK)], minlength=len(of_cluster.slots))
        leave = int((now.chains == node).sum()) - quota
        found.append(leave <= 1 and bool((held == held[0]).all()) and min(of_cluster.slots) == max(of_cluster.slots))
    return np.array(found)


def _unsettled(now: _Now) -> bool:
    counts = np.bincount(now.chains.ravel(), minlength=len(now.cluster))
    return bool((counts != np.asarray(now.quotas.nodes)).any()) or _conflicts(now)


def _conflicts(now: _Now) -> bool:
    """Whether a chain has two targets in one domain, because domains were named anew."""
    numbers = np.sort(np.asarray(now.domains)[now.chains], axis=1)
    return bool((numbers[:, 1:] == numbers[:, :-1]).any())


def _worst(chains: Counts, now: _Now) -> float:
    return float(ratio_of(count_pairs(chains, len(now.cluster)), now.quotas.nodes, now.domains) or 0)


def _plan(cluster: Cluster, now: _Now, table: Table, members: Counts, minimum: int, rng: SeededRandom) -> Plan | None:
    """None if the disks are too full for any order of these moves."""
    chains = _in_place(now, members)
    kept = np.where(chains == now.chains, now.disks, NO_DISK)
    disks = assign_disks(chains, _disk_quotas(now, chains, kept), rng, kept)
    moved = make_table(now.cluster, chains, disks)
    moves = moves_between(table, moved, cluster)
    if moves is None:
        return None
    ordered = chains.copy()
    if moves:
        ordered = order_chains(chains, len(now.cluster), rng, steps=role_steps(len(chains)))
    else:
        balance_positions(ordered, len(now.cluster))
    disk_of = {(row, int(node)): int(disks[row, at]) for row, own in enumerate(chains) for at, node in enumerate(own)}
    own_disks = np.array([[disk_of[row, int(node)] for node in own] for row, own in enumerate(ordered)])
    return Plan(
        goal=make_table(now.cluster, ordered, own_disks),
        moves=moves,
        minimum=minimum,
        reordered=int((ordered != chains).any(axis=1).sum()),
        quality=measure(ordered, now.quotas.nodes, now.domains),
    )


def _disk_quotas(now: _Now, chains: Counts, kept: Counts) -> list[tuple[int, ...]]:
    """Those of each node again, now that it is known which of its targets stay: equally full disks may take turns."""
    found = []
    for node, (of_cluster, quota) in enumerate(zip(now.cluster, now.quotas.nodes, strict=True)):
        held = np.bincount(kept[(chains == node) & (kept != NO_DISK)], minlength=len(of_cluster.slots))
        found.append(share_out(quota, of_cluster.slots, held.tolist()))
    return found


def _in_place(now: _Now, members: Counts) -> Counts:
    """The same nodes in each chain, those that were there before in their old positions."""
    found = members.copy()
    for row in np.flatnonzero((np.sort(members, axis=1) != np.sort(now.chains, axis=1)).any(axis=1)):
        before, after = now.chains[row].tolist(), members[row].tolist()
        for at, node in _successors(before, after, now.domains).items():
            found[row, at] = node
    unchanged = (np.sort(members, axis=1) == np.sort(now.chains, axis=1)).all(axis=1)
    found[unchanged] = now.chains[unchanged]
    return found


def _successors(before: Sequence[int], after: Sequence[int], domains: Sequence[int]) -> dict[int, int]:
    """Who comes to each position: who is there and stays, one of the same domain, then who is left, in order."""
    comes = {at: node for at, node in enumerate(before) if node in after}
    arrivals = [node for node in after if node not in before]
    for same_domain in (True, False):
        for at, node in enumerate(before):
            if at in comes:
                continue
            fits = [one for one in arrivals if not same_domain or domains[one] == domains[node]]
            if fits:
                comes[at] = fits[0]
                arrivals.remove(fits[0])
    return comes


def moves_between(table: Table, goal: Table, cluster: Cluster) -> tuple[Move, ...] | None:
    """The moves from one to the other, by rounds; None where disks are too full for any order of them. Orders inside
    chains do not matter. `cluster` as `rebalance` had it."""
    left = _unordered(table, goal, cluster)
    slots = {DiskLocation(node.id, disk): count for node in cluster for disk, count in enumerate(node.slots)}
    held: dict[DiskLocation, int] = {}
    for chain in table.chains:
        for place in chain:
            held[place] = held.get(place, 0) + 1
    ordered: list[Move] = []
    number = 0
    while left:
        chains: dict[int, bool] = {}
        nodes: dict[int, bool] = {}
        taken: list[Move] = []
        rest: list[Move] = []
        for move in left:
            free = held.get(move.to, 0) < slots.get(move.to, 0)
            if move.chain in chains or move.to.node in nodes or not free:
                rest.append(move)
                continue
            chains[move.chain] = nodes[move.to.node] = True
            held[move.to] = held.get(move.to, 0) + 1
            taken.append(msgspec.structs.replace(move, round=number))
        if not taken:
            return None
        for move in taken:
            held[move.source] -= 1
        ordered += taken
        left, number = rest, number + 1
    return tuple(ordered)


def _unordered(table: Table, goal: Table, cluster: Cluster) -> list[Move]:
    """Lost targets first, then by chain. A target goes to its own node, else to its own domain, else anywhere."""
    domains = {node.id: node.domain or f"\0{node.id}" for node in cluster}
    found: list[Move] = []
    for index, (before, after) in enumerate(zip(table.chains, goal.chains, strict=True)):
        leaving = [place for place in before if place not in after]
        coming = [place for place in after if place not in before]

        def pair(
            wanted: int, leaving: list[DiskLocation] = leaving, coming: list[DiskLocation] = coming, index: int = index
        ) -> None:
            for source in leaving.copy():
                for to in coming:
                    near = 2 if source.node == to.node else int(domains.get(source.node) == domains[to.node])
                    if near >= wanted:
                        found.append(Move(index, source, to, 0, source.node not in domains))
                        leaving.remove(source)
                        coming.remove(to)
                        break

        for wanted in (2, 1, 0):
            pair(wanted)
    found.sort(key=lambda move: not move.lost)
    return found
