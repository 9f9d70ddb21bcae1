"""What is really so in a simulated cluster, and what must never be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tests.support.fs.manager_sim.sessions import SessionOracle

from fireflyer.base.units import SECOND
from fireflyer.fs.core.manager.sessions import LiveSessions
from fireflyer.fs.core.rows import (
    CHAINS,
    LEASE_KEY,
    MOVES,
    NODES,
    SESSIONS,
    STATE_KEY,
    TARGETS,
    MoveRow,
    NodeRow,
    StateRow,
    TargetRow,
)
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.routing import Chain, Routing, TargetState
from fireflyer.kvstore.core.fenced import LeaseRow
from fireflyer.kvstore.core.rows import decode_row
from fireflyer.sim import SimNode, World

__all__ = ["KEY_LIFE_NS", "TORN", "ClusterOracle"]

STAYS_UNDER_WAY = 0.2
"""Of an update, at each target."""
MAX_STEPS = 20
TORN = -1
"""What a target has that was given a part of what its source has."""
_RANKS = ["serving", "lastsrv", "syncing", "waiting", "offline"]


class Host(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def node_id(self) -> NodeId: ...
    @property
    def targets(self) -> list[TargetId]: ...
    @property
    def process(self) -> Process | None: ...
    @property
    def node(self) -> SimNode: ...
    @property
    def broken_to(self) -> dict[NodeId, bool]: ...


class Process(Protocol):
    @property
    def host(self) -> Host: ...
    @property
    def alive(self) -> bool: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def routing(self) -> Routing: ...
    @property
    def sessions(self) -> LiveSessions: ...
    @property
    def key_ids(self) -> tuple[int, ...]: ...
    @property
    def is_open(self) -> bool: ...
    def serves(self, target: TargetId) -> bool: ...
    def takes(self, target: TargetId, chain: Chain) -> bool: ...


class Acting(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def key_ids(self) -> tuple[int, ...]: ...
    def acts(self) -> bool: ...


KEY_LIFE_NS = 8 * SECOND
"""Of a key that signs no more, in these worlds."""


class KeyOracle:
    """Keys of capabilities: what is signed is taken by whoever may answer, for as long as it was promised."""

    def __init__(self) -> None:
        self.turns = 0
        self._revoking: dict[int, bool] = {}
        """Keys that signed before anybody else knew them, because an administrator wanted it so."""
        self._signed_ns: dict[int, int] = {}

    def committed(self, now_ns: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        if before == after:
            return
        self.turns += 1
        self._signed_ns[before[0]] = now_ns
        if after[0] not in before:
            self._revoking[after[0]] = True
            return
        for key in before:
            unused_ns = now_ns - self._signed_ns.get(key, 0)
            kept = key in after or unused_ns >= KEY_LIFE_NS * 0.98
            assert kept, f"key {key} is forgotten {unused_ns} ns after it signed"

    def check(self, process: Process, managers: Sequence[Acting]) -> None:
        for manager in managers:
            if manager.acts() and process.is_open and manager.key_ids[0] not in self._revoking:
                key = manager.key_ids[0]
                assert key in process.key_ids, f"{process.host.name} knows {process.key_ids}, and {key} signs"


class ClusterOracle:
    """Raises `AssertionError` when two act as primary, when a role is taken from one that uses it, when a role is given
    to one that may lack something, or when something acknowledged is lost."""

    def __init__(self, world: World, manager_names: list[str]) -> None:
        self.manager_names = manager_names
        self.managers: list[Acting] = []
        self.hosts: list[Host] = []
        self.chains: dict[int, Chain] = {}
        self.incarnations: dict[NodeId, int] = {}
        self.overridden: dict[int, int] = {}
        """Of a chain, the version in which an administrator has confirmed a warning."""
        self.acknowledged: dict[int, int] = {}
        self.content: dict[TargetId, int] = {}
        self.flushed: dict[TargetId, int] = {}
        self.drained: dict[TargetId, bool] = {}
        """Targets that were ever to lay down their roles."""
        self.may_drain: dict[NodeId, bool] = {}
        """Of these nodes because an administrator wanted it at once."""
        self.roles_taken = self.moved = 0
        self.sessions = SessionOracle()
        self.keys = KeyOracle()
        self._granted: dict[TargetId, int] = {}
        """The chain version in which its predecessor gave it everything: without it nothing is acknowledged then."""
        self._begun: dict[TargetId, int] = {}
        """In which chain version it began to be overwritten."""
        self._staged: dict[int, list[TargetId]] = {}
        """Of a chain's one update under way, who has made it durable, from the head on."""
        self._random = world.fork_random("writes")
        self._unsure: dict[TargetId, bool] = {}
        self._last: dict[int, tuple[int, list[TargetId]]] = {}
        """Of a chain, the last version in which anything may have been committed, and who served in it."""
        self._served: dict[int, list[tuple[int, list[TargetId]]]] = {}
        """Of a chain, who served in which version."""
        self._knew: dict[tuple[int, int], list[TargetId]] = {}
        self._world = world

    # --- data ---

    def clean(self, target: TargetId) -> bool:
        return not self._unsure.get(target, False)

    def lose_unflushed(self, target: TargetId) -> None:
        if self.flushed.get(target, 0) < self.content.get(target, 0):
            self.content[target] = self.flushed.get(target, 0)
            self.sessions.lose_unflushed(target)
            self._unsure[target] = True

    def write(self, chain_id: int, *, flush: bool) -> bool:
        """Carries the chain's update on, or begins one: from target to target, each by the version that it knows and
        only to one that knows the same, often not to the end. True when its tail has committed it."""
        for _ in range(MAX_STEPS):
            if self._random.random() < STAYS_UNDER_WAY:
                return False
            following = self._next_to_stage(chain_id)
            if following is None:
                return False
            staged = self._staged.setdefault(chain_id, [])
            if following not in staged:
                staged.append(following)
                continue
            # Whoever has it now has it in every history to come: it may be read, and is acknowledged.
            self.acknowledged[chain_id] += 1
            self._writes_of_a_client(chain_id, staged, flush=flush)
            for target in self._staged.pop(chain_id):
                self.content[target] = self.acknowledged[chain_id]
                if flush:
                    self.flushed[target] = self.content[target]
            return True
        return False

    def _writes_of_a_client(self, chain_id: int, staged: list[TargetId], *, flush: bool) -> None:
        """It was one that the head admits, or nobody's."""
        heads = [one for one in self._processes(staged[0]) if one.serves(staged[0])]
        admitted = [one for one in self.sessions.given if any(head.sessions.admits(one) for head in heads)]
        if admitted:
            self.sessions.wrote(chain_id, staged, self._random.choice(admitted), flush=flush)

    def _next_to_stage(self, chain_id: int) -> TargetId | None:
        """Who is to stage the update now; the last that has, if it is the tail; None if nobody can."""
        staged = self._staged.get(chain_id, [])
        holding = [one for one in staged if self._serves_in(one, chain_id) is not None]
        if not holding:
            heads = [one for one in self._last[chain_id][1] + self._since(chain_id) if self._is_head(one, chain_id)]
            self._staged.pop(chain_id, None)
            return heads[0] if heads else None
        place = self._serves_in(holding[-1], chain_id)
        if place is None or self._broken(place):
            return None
        line = [one.target for one in place.members if one.state is TargetState.SERVING]
        line += [target for target in self._synced_in(place) if target not in line]
        behind = line[line.index(holding[-1]) + 1 :]
        if not behind:
            return holding[-1]
        if _state(place, behind[0]) is TargetState.SYNCING:
            # The last of the line: once it has it, the tail commits.
            takes = any(process.takes(behind[0], place) for process in self._processes(behind[0]))
            return behind[0] if takes else None
        other = self._serves_in(behind[0], chain_id)
        return behind[0] if other is not None and other.version == place.version else None

    def _is_head(self, target: TargetId, chain_id: int) -> bool:
        place = self._serves_in(target, chain_id)
        return place is not None and place.members[0].target == target

    def _synced_in(self, chain: Chain) -> list[TargetId]:
        syncing = [one.target for one in chain.members if one.state is TargetState.SYNCING]
        return [one for one in syncing if self._granted.get(one) == chain.version]

    def sync(self, target: TargetId, chain: Chain) -> bool:
        """The last serving one gives it everything, if it serves in this version: it begins, and is done when asked
        again."""
        serving = [one.target for one in chain.members if one.state is TargetState.SERVING]
        place = self._serves_in(serving[-1], chain.id) if serving else None
        if place is None or place.version != chain.version or self._broken(chain):
            return False
        if self._begun.get(target) != chain.version:
            self._begun[target] = chain.version
            self.content[target] = self.flushed[target] = TORN
            return False
        self.content[target] = self.flushed[target] = self.content.get(serving[-1], 0)
        self.sessions.copy(serving[-1], target)
        staged = self._staged.get(chain.id, [])
        if target in staged and serving[-1] not in staged:
            staged.remove(target)
        elif serving[-1] in staged and target not in staged:
            staged.append(target)
        self._unsure[target] = False
        self._granted[target] = chain.version
        return True

    def _broken(self, chain: Chain) -> bool:
        states = (TargetState.SERVING, TargetState.SYNCING)
        line = [one.node for one in chain.members if one.state in states]
        return any(host.broken_to.get(node, False) for host in self.hosts if host.node_id in line for node in line)

    def _serves_in(self, target: TargetId, chain_id: int) -> Chain | None:
        for process in self._processes(target):
            if process.serves(target):
                return next((one for one in process.routing.chains if one.id == chain_id and _has(one, target)), None)
        return None

    def _processes(self, target: TargetId) -> Sequence[Process]:
        return [one.process for one in self.hosts if target in one.targets and one.process is not None]

    # --- checks ---

    def check_primaries(self) -> None:
        acting = [one.name for one in self.managers if one.acts()]
        assert len(acting) <= 1, f"{acting} act as primary at the same time"

    def check_process(self, process: Process) -> None:
        """Called when it has learned something: time alone only closes its fence."""
        self.keys.check(process, self.managers)
        self._note_what_is_known(process)
        for target in process.host.targets:
            if not process.serves(target):
                continue
            chain = next(one for one in self.chains.values() if _has(one, target))
            who = f"target {target} on {process.host.name}"
            assert _state(chain, target) is TargetState.SERVING, f"{who} believes that it serves, but {chain}"
            assert process.incarnation == self.incarnations[process.host.node_id], f"{who} serves but was replaced"
            has, all_of_it = self.content.get(target, 0), self.acknowledged[chain.id]
            self.sessions.check(who, chain.id, target, process.sessions)
            assert has == all_of_it, f"{who} serves with {has} of {all_of_it} acknowledged updates"

    def _note_what_is_known(self, process: Process) -> None:
        for chain in process.routing.chains:
            knew = self._knew.setdefault((chain.id, chain.version), [])
            if chain.version <= self._last[chain.id][0]:
                continue
            knew += [one for one in process.host.targets if _has(chain, one) and one not in knew]
            serving = [one.target for one in chain.members if one.state is TargetState.SERVING]
            last = self._last[chain.id][1]
            new_tail = bool(serving) and serving[-1] in knew and serving[-1:] != last[-1:]
            if new_tail or (serving and all(one in knew for one in serving)):
                self._last[chain.id] = (chain.version, serving)

    def committed(self, before: dict[bytes, bytes], written: dict[bytes, bytes | None]) -> None:
        """Called at the instant of each commit."""
        for key, value in written.items():
            if key == LEASE_KEY and value is not None:
                self._check_lease(before.get(key), decode_row(LEASE_KEY, value, LeaseRow))
            elif key == STATE_KEY and value is not None:
                old = decode_row(key, before[key], StateRow) if key in before else StateRow(0, 0, 0, 0)
                new = decode_row(key, value, StateRow)
                term = decode_row(LEASE_KEY, before[LEASE_KEY], LeaseRow).term
                assert new.term == term, f"the primary of term {new.term} commits in term {term}"
                assert (new.term, new.number) > (old.term, old.number)
                assert old.version <= new.version <= old.version + 1, "routing versions jump"
                self.keys.committed(self._world.now_ns, old.key_ids, new.key_ids)
            elif key.startswith(NODES.prefix) and value is not None:
                node: NodeRow = NODES.decode(key, value)[1]
                self.incarnations[node.id] = node.incarnation
                if key in before:
                    self._check_replaced(NODES.decode(key, before[key])[1], node)
            elif key.startswith(SESSIONS.prefix):
                self.sessions.committed(self._world.now_ns, key, before.get(key), value)
            elif key.startswith(CHAINS.prefix) and value is not None:
                self._check_chain(CHAINS.decode(key, value)[1])
        for key in written:
            self._check_target(before.get(key), key, written)
            self._check_move(before.get(key), key, written[key])
            if key.startswith(NODES.prefix) and key in before:
                self._check_restart(NODES.decode(key, before[key])[1])
        for host in self.hosts:
            if host.process is not None:
                self.check_process(host.process)

    def _check_move(self, before: bytes | None, key: bytes, value: bytes | None) -> None:
        """The old target is asked for its role, and leaves, only when the new one has it."""
        if before is None or not key.startswith(MOVES.prefix):
            return
        old: MoveRow = MOVES.decode(key, before)[1]
        drained = value is not None and MOVES.decode(key, value)[1].drained and not old.drained
        chain = self.chains[old.id]
        # Who served may have lost its process in the same transaction.
        came = _state(chain, old.target) in (TargetState.SERVING, TargetState.LASTSRV)
        left = _has(chain, old.target) and not _has(chain, old.source)
        assert came or not left, f"target {old.source} has left too early: {chain}"
        assert came or not drained, f"target {old.source} is drained too early: {chain}"
        self.moved += left

    def _check_target(self, before: bytes | None, key: bytes, written: dict[bytes, bytes | None]) -> None:
        """Who shall lay down its role: an administrator wants it at once, or a move has put another one there."""
        value = written[key]
        if value is None or not key.startswith(TARGETS.prefix):
            return
        row: TargetRow = TARGETS.decode(key, value)[1]
        if not row.drained or (before is not None and TARGETS.decode(key, before)[1].drained):
            return
        moves = [MOVES.decode(one, raw)[1] for one, raw in written.items() if raw and one.startswith(MOVES.prefix)]
        moved = any(one.source == row.id and one.drained for one in moves)
        assert moved or row.node in self.may_drain, f"target {row.id} is drained, and nobody wanted it"
        self.drained[row.id] = True

    def check_give_up(self, target: TargetId, reason: str) -> None:
        """A process is asked to let the target lay down its role."""
        assert reason != "drained" or target in self.drained, f"target {target} shall go before another one came"

    def _check_replaced(self, old: NodeRow, new: NodeRow) -> None:
        """On one machine, a process registers only when the one before it is dead."""
        for host in self.hosts:
            process = host.process
            if process is not None and process.alive and new.machine == old.machine == host.name:
                assert process.incarnation in (0, new.incarnation), f"{new} registers while {old} is alive"

    def _check_restart(self, old: NodeRow) -> None:
        """A process that is replaced leaves no role to the next one."""
        if old.incarnation in (0, self.incarnations[old.id]):
            return
        for chain in self.chains.values():
            for member in chain.members:
                role = member.state in (TargetState.SERVING, TargetState.SYNCING)
                assert member.node != old.id or not role, f"node {old.id} starts again with a role in {chain}"

    def _check_lease(self, before: bytes | None, lease: LeaseRow) -> None:
        if before is not None:
            old = decode_row(LEASE_KEY, before, LeaseRow)
            same = (old.holder, old.term) == (lease.holder, lease.term)
            assert same or lease.term == old.term + 1, f"term {lease.term} follows term {old.term}"

    def _check_chain(self, new: Chain) -> None:
        old = self.chains.get(new.id)
        self.chains[new.id] = new
        serving = [one.target for one in new.members if one.state is TargetState.SERVING]
        syncing = [one.target for one in new.members if one.state is TargetState.SYNCING]
        ranks = [_RANKS.index(one.state) for one in new.members]
        assert ranks == sorted(ranks), f"members out of order: {new}"
        assert len(syncing) <= (1 if serving else 0), f"syncs without a source, or twice: {new}"
        if old is None:
            self._served[new.id] = []
            self._last[new.id], self.acknowledged[new.id] = (new.version, serving), 0
            return
        assert new.version == old.version + 1, f"{new} follows {old}"
        last = self._last[new.id][1] + self._since(new.id)
        for target in serving:
            if _state(old, target) is TargetState.SERVING:
                continue
            synced = _state(old, target) is TargetState.SYNCING and self._granted.get(target) == old.version
            if self.overridden.get(new.id) == old.version:
                self._accept_loss(new, target)
            else:
                assert synced or target in last, f"target {target} was neither synced nor among the last {last}: {new}"
                has, all_of_it = self.content.get(target, 0), self.acknowledged[new.id]
                # After a power cut what it had reported may still come in: it gets a role that nobody uses, since its
                # next process says that it is not clean. Whoever serves all the same is found by `check_process`.
                if not self.clean(target) and not self._lives(target):
                    continue
                assert has == all_of_it, f"target {target} shall serve with {has} of {all_of_it} updates: {new}"
                assert synced or self.clean(target), f"target {target} serves again although it is not clean: {new}"
        self._served[new.id].append((new.version, serving))
        self.roles_taken += sum(
            1 for one in old.members if one.state is TargetState.SERVING and one.target not in serving
        )

    def _lives(self, target: TargetId) -> bool:
        """The process of it that registered last."""
        last = self.incarnations
        return any(one.alive and one.incarnation == last[one.host.node_id] for one in self._processes(target))

    def _since(self, chain_id: int) -> list[TargetId]:
        """Who was to serve in versions in which nothing can have been committed."""
        since = self._last[chain_id][0]
        return [one for version, served in self._served[chain_id] if version > since for one in served]

    def _accept_loss(self, chain: Chain, target: TargetId) -> None:
        self.acknowledged[chain.id] = self.content.get(target, 0)
        self.sessions.accept_loss(chain.id, target)
        self._last[chain.id] = (chain.version, [target])
        self._unsure[target] = False


def _has(chain: Chain, target: TargetId) -> bool:
    return any(one.target == target for one in chain.members)


def _state(chain: Chain, target: TargetId) -> TargetState | None:
    return next((one.state for one in chain.members if one.target == target), None)
