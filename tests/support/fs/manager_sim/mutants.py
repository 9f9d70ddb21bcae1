"""Mutants of the cluster manager's protocol: the real code with one bug each, which the simulation must find."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.support.fs.manager_sim.oracle import KEY_LIFE_NS

from fireflyer.fs.core.chain.node_membership import NodeMembership
from fireflyer.fs.core.fence import Fence
from fireflyer.fs.core.manager import admin, chains, migration, state_machine
from fireflyer.fs.core.manager.acknowledged import AcknowledgedVersions
from fireflyer.fs.core.manager.health import Health
from fireflyer.fs.core.manager.key_rotation import KeyRotation
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.manager.sessions import SessionTable
from fireflyer.fs.core.manager.state_machine import Manager
from fireflyer.fs.core.rows import MOVES, MoveRow
from fireflyer.fs.schema.manager import Answer, Condition, Done, Drain, HeartbeatAnswer, Register, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, Routing, TargetState
from fireflyer.fs.schema.sessions import SessionsDelta
from fireflyer.kvstore.core import fenced
from fireflyer.kvstore.core.fenced import Outcome
from fireflyer.kvstore.core.lease import LeaseMachine

__all__ = ["MUTANTS", "another_chains_versions_count", "who_is_overwritten_is_complete"]

Patch = pytest.MonkeyPatch


def no_fence(patch: Patch) -> None:
    patch.setattr(Fence, "is_open", lambda self, _now_ns: self.until_ns is not None)


def fence_from_the_answer(patch: Patch) -> None:
    original = NodeMembership._on_heartbeat_answer

    def on_answer(self: NodeMembership, now_ns: int, fence: Fence, answer: HeartbeatAnswer) -> None:
        original(self, now_ns, fence, answer)
        fence._until_ns = now_ns + fence._fence_ns

    patch.setattr(NodeMembership, "_on_heartbeat_answer", on_answer)


def serves_on_after_it_said_gone(patch: Patch) -> None:
    def serves(self: NodeMembership, now_ns: int, target: int) -> bool:
        place = self._place.get(target)
        fenced = self._fence is None or not self._fence.is_open(now_ns)
        return place is not None and place[1].state is TargetState.SERVING and not fenced

    patch.setattr(NodeMembership, "serves", serves)


def fence_as_long_as_the_timeout(patch: Patch) -> None:
    original = Fence.__init__

    def init(self: Fence, failure_timeout_ns: int) -> None:
        original(self, failure_timeout_ns)
        self._fence_ns = failure_timeout_ns

    patch.setattr(Fence, "__init__", init)


def new_primary_does_not_wait(patch: Patch) -> None:
    original = Health.__init__

    def init(self: Health, ledger: Ledger, now_ns: int) -> None:
        original(self, ledger, now_ns - ledger.state.failure_timeout_ns)

    patch.setattr(Health, "__init__", init)


def answers_while_it_is_decided(patch: Patch) -> None:
    patch.setattr(Health, "dead", lambda _self: [])


def commits_without_the_lease(patch: Patch) -> None:
    patch.setattr(fenced, "_holds", lambda _key, _lease, _held: True)


def acts_until_told_otherwise(patch: Patch) -> None:
    patch.setattr(LeaseMachine, "may_act", lambda self, _now_ns: self.held is not None)


def nobody_counts_as_told(patch: Patch) -> None:
    patch.setattr(AcknowledgedVersions, "answered", lambda _self, _node, _chains: None)


def who_is_overwritten_is_complete(patch: Patch) -> None:
    """Too rare for seeds: it has a story of its own."""
    original = AcknowledgedVersions.committed

    def committed(self: AcknowledgedVersions, old: Chain | None, new: Chain) -> None:
        original(self, old, new)
        self._untold[new.id].syncing = ()

    patch.setattr(AcknowledgedVersions, "committed", committed)


def two_syncing(patch: Patch) -> None:
    original = chains._without_role

    def without_role(chain: Chain, said: dict[int, TargetReport | None], states: dict[int, TargetState]) -> None:
        serves = TargetState.SERVING in states.values()
        for member in chain.members:
            if serves and member.target not in states and chains._there(said[member.target]):
                states[member.target] = TargetState.SYNCING
        original(chain, said, states)

    patch.setattr(chains, "_without_role", without_role)


def any_offline_one_comes_back(patch: Patch) -> None:
    original = chains._serve

    def serve(chain: Chain, said: dict[int, TargetReport | None], states: dict[int, TargetState]) -> None:
        original(chain, said, states)
        if not states:
            there = [one.target for one in chain.members if chains._there(said[one.target])]
            states.update((target, TargetState.SERVING) for target in there[:1])

    patch.setattr(chains, "_serve", serve)


def sure_or_not(patch: Patch) -> None:
    original = chains._said

    def said(report: TargetReport | None, chain: Chain) -> TargetReport | None:
        known = original(report, chain)
        return TargetReport(known.target, known.condition, known.chain_version) if known is not None else None

    patch.setattr(chains, "_said", said)


def reports_of_any_version(patch: Patch) -> None:
    patch.setattr(chains, "_said", lambda report, _chain: report)


def synced_in_any_version(patch: Patch) -> None:
    original = chains._said

    def said(report: TargetReport | None, chain: Chain) -> TargetReport | None:
        if report is not None and report.condition is Condition.UP_TO_DATE:
            return report
        return original(report, chain)

    patch.setattr(chains, "_said", said)


def _with_register(patch: Patch, change: Callable[[Register, str, int], Register]) -> None:
    original = Manager._register

    def register(self: Manager, now_ns: int, ledger: Ledger, draft: object, request: Register) -> Answer:
        row = ledger.nodes.get(request.node)
        if row is not None and row.incarnation:
            request = change(request, row.machine, row.incarnation)
        return original(self, now_ns, ledger, draft, request)  # type: ignore[arg-type]

    patch.setattr(Manager, "_register", register)


def restart_is_no_death(patch: Patch) -> None:
    original = Manager._register

    def register(self: Manager, now_ns: int, ledger: Ledger, draft: object, request: Register) -> Answer:
        answer = original(self, now_ns, ledger, draft, request)  # type: ignore[arg-type]
        draft.replaced.clear()  # type: ignore[attr-defined]
        return answer

    patch.setattr(Manager, "_register", register)


def stragglers_may_register(patch: Patch) -> None:
    def change(request: Register, _machine: str, incarnation: int) -> Register:
        return Register(request.node, request.nonce, incarnation, request.address, request.machine, request.boot)

    _with_register(patch, change)


def moved_disks_are_believed_at_once(patch: Patch) -> None:
    def change(request: Register, machine: str, _incarnation: int) -> Register:
        return Register(request.node, request.nonce, request.previous, request.address, machine, request.boot)

    _with_register(patch, change)


def old_processes_are_heard(patch: Patch) -> None:
    original = Manager.handle

    def handle(self: Manager, now_ns: int, event: object) -> object:
        request = getattr(event, "request", None)
        incarnation = getattr(request, "incarnation", 0)
        node = self._health.get(request.node) if request is not None and incarnation else None
        if node is not None and 0 < incarnation < node.incarnation:
            node.incarnation = incarnation
        return original(self, now_ns, event)  # type: ignore[arg-type]

    patch.setattr(Manager, "handle", handle)


def forgets_while_it_is_decided(patch: Patch) -> None:
    """Storage processes are told of an end that the store may not take."""
    original = SessionTable.delta

    def delta(self: SessionTable, known: int) -> SessionsDelta | None:
        ended = [one for one, row in self._ledger.sessions.changes() if row is None]
        found = original(self, known)
        if not ended or found is not None:
            return found
        state = self._ledger.state
        return SessionsDelta(state.sessions, state.sessions + 1, state.next_client, (), tuple(ended))

    patch.setattr(SessionTable, "delta", delta)


def routing_without_its_sessions(patch: Patch) -> None:
    original = NodeMembership._on_heartbeat_answer

    def on_answer(self: NodeMembership, now_ns: int, fence: Fence, answer: HeartbeatAnswer) -> None:
        if answer.sequence % 8:
            answer = msgspec.structs.replace(answer, sessions=None)
        original(self, now_ns, fence, answer)

    patch.setattr(NodeMembership, "_on_heartbeat_answer", on_answer)


def ids_are_given_again(patch: Patch) -> None:
    def new_client(self: Ledger) -> int:
        used = self.sessions.ids()
        return next(one for one in range(1, len(used) + 2) if one not in used)

    patch.setattr(Ledger, "new_client", new_client)


def new_primary_has_heard_no_client(patch: Patch) -> None:
    original = SessionTable.__init__

    def init(self: SessionTable, ledger: Ledger, lifetime_ns: int, now_ns: int) -> None:
        original(self, ledger, lifetime_ns, now_ns - lifetime_ns)

    patch.setattr(SessionTable, "__init__", init)


def acts_after_it_gave_the_lease_up(patch: Patch) -> None:
    original, forget = LeaseMachine.outcome, Manager._forget

    def may_act(self: LeaseMachine, now_ns: int) -> bool:
        return bool(self._term) and self._acts_until_ns is not None and now_ns < self._acts_until_ns

    def outcome(self: LeaseMachine, now_ns: int, outcome: Outcome) -> bool:
        term, given_up = self._term, self._trying is self._last
        done = original(self, now_ns, outcome)
        if done and given_up:
            self._term = term
        return done

    def forget_unless_it_leaves(self: Manager) -> None:
        if not self.leaving:
            forget(self)

    patch.setattr(LeaseMachine, "may_act", may_act)
    patch.setattr(LeaseMachine, "outcome", outcome)
    patch.setattr(Manager, "_forget", forget_unless_it_leaves)


def leaves_before_the_new_one_serves(patch: Patch) -> None:
    original = migration._carry_on

    def carry_on(ledger: Ledger, row: MoveRow) -> list[str]:
        chain, source = ledger.chains.get(row.id), ledger.targets.get(row.source)
        if chain is not None and source is not None and not source.drained:
            ledger.targets.put(source.id, msgspec.structs.replace(source, drained=True))
            ledger.moves.put(row.id, msgspec.structs.replace(row, drained=True))
            return []
        return original(ledger, row)

    patch.setattr(migration, "_carry_on", carry_on)


def leaving_ones_lay_down_at_once(patch: Patch) -> None:
    patch.setattr(
        Health, "_unwanted", lambda self, target: getattr(self._ledger.targets.get(target), "unwanted", False)
    )

    def drained(self: Health, serving: list[Member]) -> Member | None:
        rows = ((one, self._ledger.targets.committed.get(one.target)) for one in serving)
        unwanted = [one for one, row in rows if row is not None and row.unwanted]
        return unwanted[0] if unwanted and len(serving) > 1 else None

    patch.setattr(Health, "_drained", drained)


def emptying_is_draining(patch: Patch) -> None:
    original = admin._drain

    def drain(ledger: Ledger, request: Drain) -> Done:
        return original(ledger, msgspec.structs.replace(request, at_once=True))

    patch.setattr(admin, "_drain", drain)


def a_new_key_signs_at_once(patch: Patch) -> None:
    original = KeyRotation.due

    def due(self: KeyRotation, now_ns: int) -> bool:
        return original(self, now_ns) or self._keys[0] != max(self._keys)

    patch.setattr(KeyRotation, "due", due)


def an_old_key_is_forgotten_at_once(patch: Patch) -> None:
    original = KeyRotation.due

    def due(self: KeyRotation, now_ns: int) -> bool:
        return original(self, now_ns + KEY_LIFE_NS // 2) if self._keys[0] == max(self._keys) else original(self, now_ns)

    patch.setattr(KeyRotation, "due", due)


def keys_are_told_at_registration_only(patch: Patch) -> None:
    original = NodeMembership._on_heartbeat_answer

    def on_answer(self: NodeMembership, now_ns: int, fence: Fence, answer: HeartbeatAnswer) -> None:
        original(self, now_ns, fence, msgspec.structs.replace(answer, key_ids=()))

    patch.setattr(NodeMembership, "_on_heartbeat_answer", on_answer)


def new_primary_forgets_moves(patch: Patch) -> None:
    original = state_machine._RANGES
    patch.setattr(state_machine, "_RANGES", tuple(one for one in original if one[0] != MOVES.prefix))


def another_chains_versions_count(patch: Patch) -> None:
    """Too rare for seeds with all their faults: it has a test of its own."""
    original = NodeMembership._take_routing

    def take_routing(self: NodeMembership, routing: Routing) -> None:
        before = {target: (known.stopped_in, known.synced_in) for target, known in self._targets.items()}
        original(self, routing)
        for target, known in self._targets.items():
            known.stopped_in = max(known.stopped_in, before[target][0])
            known.synced_in = max(known.synced_in, before[target][1])

    patch.setattr(NodeMembership, "_take_routing", take_routing)


MUTANTS: dict[str, Callable[[Patch], None]] = {
    mutant.__name__: mutant
    for mutant in (
        no_fence,
        fence_from_the_answer,
        serves_on_after_it_said_gone,
        fence_as_long_as_the_timeout,
        new_primary_does_not_wait,
        answers_while_it_is_decided,
        commits_without_the_lease,
        acts_until_told_otherwise,
        nobody_counts_as_told,
        two_syncing,
        any_offline_one_comes_back,
        sure_or_not,
        reports_of_any_version,
        synced_in_any_version,
        restart_is_no_death,
        stragglers_may_register,
        moved_disks_are_believed_at_once,
        old_processes_are_heard,
        forgets_while_it_is_decided,
        routing_without_its_sessions,
        ids_are_given_again,
        new_primary_has_heard_no_client,
        acts_after_it_gave_the_lease_up,
        leaves_before_the_new_one_serves,
        a_new_key_signs_at_once,
        an_old_key_is_forgotten_at_once,
        keys_are_told_at_registration_only,
        leaving_ones_lay_down_at_once,
        emptying_is_draining,
        new_primary_forgets_moves,
    )
}
