"""Moves of chains: the one that comes serves before the one that leaves is asked for its role."""

from __future__ import annotations

import pytest

from fireflyer.base.errors import Busy, Exists, NotFound, UsageError
from fireflyer.base.units import SECOND
from fireflyer.fs.core.manager import admin, migration
from fireflyer.fs.core.manager.health import Health
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.manager.move_plan import chains_of_new_targets, plan_moves
from fireflyer.fs.schema.manager import (
    AddChains,
    AddMoves,
    AddNode,
    AddTable,
    AddTargets,
    AdminRequest,
    CancelMoves,
    ChangeMembers,
    Drain,
    MoveStatus,
    NewChain,
    NewMove,
    RetireTargets,
    Status,
)
from fireflyer.fs.schema.routing import ChainTable, Member, TargetState

SERVING, SYNCING, OFFLINE = TargetState.SERVING, TargetState.SYNCING, TargetState.OFFLINE
LASTSRV = TargetState.LASTSRV


class Cluster:
    """Nodes 1 to 3 with two targets each, 11, 12 to 31, 32; chains 1: 11, 21 and 2: 12, 22."""

    def __init__(self) -> None:
        self.ledger = Ledger(1, 6 * SECOND)
        for node in (1, 2, 3):
            self.ask(AddNode(node))
            self.ask(AddTargets(node, (10 * node + 1, 10 * node + 2)))
        self.ask(AddChains((NewChain(1, (11, 21)), NewChain(2, (12, 22)))))
        self.ask(AddTable(1, (1, 2)))

    def ask(self, request: AdminRequest) -> str:
        done = admin.apply(request, self.ledger, Health(self.ledger, 0), 0)
        self.commit()
        return getattr(done, "note", "")

    def commit(self) -> None:
        if self.ledger.pending() is not None:
            self.ledger.commit()

    def advance(self) -> list[str]:
        notes = migration.advance(self.ledger)
        self.commit()
        return notes

    def say(self, chain: int, **states: TargetState) -> None:
        """What the rules of chains make of reports."""
        members = self.ledger.chains.committed[chain].members
        changed = tuple(Member(one.target, one.node, states.get(f"t{one.target}", one.state)) for one in members)
        self.ledger.put_chain(chain, changed)
        self.commit()

    def chain(self, chain: int = 1) -> str:
        return " ".join(f"{one.target}={one.state}" for one in self.ledger.chains.committed[chain].members)

    def drained(self, target: int) -> bool:
        return self.ledger.targets.committed[target].drained

    def moves(self) -> tuple[MoveStatus, ...]:
        return migration.moves_status(self.ledger)

    def status(self) -> Status:
        return admin.status(self.ledger, Health(self.ledger, 0), 0)


def with_a_drained_source() -> Cluster:
    """Target 21 leaves chain 1, and 31 serves in its place."""
    cluster = Cluster()
    cluster.ask(AddMoves((NewMove(1, 21, 3),)))
    cluster.advance()
    cluster.say(1, t31=SERVING)
    cluster.advance()
    assert cluster.drained(21)
    return cluster


def test_a_move_waits_for_each_step_and_ends_with_the_old_target_free_again() -> None:
    cluster = Cluster()
    assert cluster.ask(AddMoves((NewMove(1, 21, 3),))) == "1 move added"
    assert cluster.advance() == ["chain 1 gets target 31 on node 3, to replace target 21"]
    assert cluster.chain() == "11=serving 21=serving 31=offline"
    assert cluster.advance() == []
    cluster.say(1, t31=SYNCING)
    assert cluster.advance() == []
    assert not cluster.drained(21)
    cluster.say(1, t31=SERVING)
    cluster.advance()
    assert cluster.drained(21)
    assert cluster.advance() == []
    cluster.say(1, t21=OFFLINE)
    assert cluster.advance() == ["chain 1 has moved from target 21 to 31"]
    assert cluster.chain() == "11=serving 31=serving"
    assert not cluster.drained(21)
    assert cluster.moves() == ()


def test_when_the_one_that_came_dies_the_one_that_leaves_gets_its_role_back_until_it_serves_again() -> None:
    cluster = with_a_drained_source()
    cluster.say(1, t11=LASTSRV, t21=OFFLINE, t31=LASTSRV)
    assert cluster.advance() == []
    assert cluster.drained(21), "nobody serves that it could be synced from"
    cluster.say(1, t11=SERVING, t31=OFFLINE)
    assert cluster.advance() == ["target 21 serves chain 1 again until target 31 does"]
    assert not cluster.drained(21)
    assert cluster.advance() == []
    cluster.say(1, t21=SERVING, t31=SERVING)
    cluster.advance()
    assert cluster.drained(21)
    cluster.say(1, t21=OFFLINE)
    assert cluster.advance() == ["chain 1 has moved from target 21 to 31"]
    assert not cluster.drained(21)


def test_a_node_takes_one_target_at_a_time_and_an_old_one_may_be_used_again() -> None:
    cluster = Cluster()
    cluster.ask(AddMoves((NewMove(1, 21, 3), NewMove(2, 12, 3))))
    cluster.advance()
    assert [one.target for one in cluster.moves()] == [31, 0]
    cluster.say(1, t31=SERVING)
    cluster.advance()
    cluster.say(1, t21=OFFLINE)
    cluster.advance()
    cluster.advance()
    assert cluster.moves() == (MoveStatus(2, 12, 3, 32),)
    cluster.say(2, t32=SERVING)
    cluster.advance()
    cluster.say(2, t12=OFFLINE)
    cluster.advance()
    cluster.ask(AddMoves((NewMove(1, 31, 2),)))
    assert cluster.advance() == ["chain 1 gets target 21 on node 2, to replace target 31"]


def test_a_target_that_an_administrator_has_drained_stays_drained() -> None:
    cluster = Cluster()
    cluster.ask(Drain((21,)))
    cluster.ask(AddMoves((NewMove(1, 21, 3),)))
    cluster.advance()
    cluster.say(1, t31=SERVING, t21=OFFLINE)
    cluster.advance()
    assert cluster.chain() == "11=serving 31=serving"
    assert cluster.drained(21)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_target_that_an_administrator_drains_after_its_move_did_stays_drained(comes_back: bool) -> None:
    cluster = with_a_drained_source()
    cluster.ask(Drain((21,), at_once=True))
    if comes_back:
        cluster.say(1, t31=OFFLINE)
        assert cluster.advance() == []
        assert cluster.drained(21)
        cluster.say(1, t31=SERVING)
    cluster.say(1, t21=OFFLINE)
    assert cluster.advance() == ["chain 1 has moved from target 21 to 31"]
    assert cluster.drained(21)


@pytest.mark.parametrize("ends", [False, True], ids=["leaving", "ended"])
def test_what_an_administrator_does_not_drain_at_once_is_free_of_it_after_the_move(ends: bool) -> None:
    cluster = Cluster()
    cluster.ask(AddMoves((NewMove(1, 21, 3),)))
    cluster.advance()
    cluster.say(1, t31=SERVING)
    cluster.advance()
    cluster.ask(Drain((21,), drain=not ends, at_once=False))
    cluster.advance()
    assert cluster.drained(21), "the move goes on"
    cluster.say(1, t21=OFFLINE)
    cluster.advance()
    assert cluster.chain() == "11=serving 31=serving"
    assert not cluster.drained(21)


def test_a_target_that_is_leaving_keeps_its_role_until_its_move_and_gets_no_new_one() -> None:
    cluster = Cluster()
    assert cluster.ask(Drain(node=1, at_once=False)) == (
        "node 1: 2 targets draining: run `ff fs admin rebalance` to move their chains; they serve until then"
    )
    assert not cluster.drained(11)
    _, _, moves = plan_moves(cluster.status(), ChainTable(1, (1, 2)), ())
    assert sorted((one.chain, one.source, one.node) for one in moves) == [(1, 11, 3), (2, 12, 3)]
    cluster.ask(AddMoves(moves))
    for _ in range(2):
        (chain, source, _, target) = next((one.chain, one.source, one.node, one.target) for one in begun(cluster))
        cluster.say(chain, **{f"t{target}": SERVING})
        cluster.advance()
        assert cluster.drained(source)
        cluster.say(chain, **{f"t{source}": OFFLINE})
        cluster.advance()
        assert not cluster.drained(source)
    assert cluster.moves() == ()
    cluster.ask(AddMoves((NewMove(1, 21, 1),)))
    assert cluster.advance() == []
    with pytest.raises(UsageError, match="target 11 is drained; run `ff fs admin undrain --target 11` first"):
        cluster.ask(ChangeMembers(1, add=11))
    assert cluster.ask(Drain(node=1, drain=False)) == (
        "node 1: 2 targets no longer drained: synced if necessary, then serving again"
    )
    assert len(cluster.advance()) == 1


def begun(cluster: Cluster) -> list[MoveStatus]:
    cluster.advance()
    return [one for one in cluster.moves() if one.target]


def test_what_cannot_be_any_more_is_dropped_and_what_cannot_be_yet_waits() -> None:
    cluster = Cluster()
    cluster.ask(Drain(node=3))
    cluster.ask(AddMoves((NewMove(1, 21, 3),)))
    assert cluster.advance() == []
    cluster.say(1, t21=OFFLINE)
    cluster.ask(ChangeMembers(1, remove=21))
    notes = cluster.advance()
    assert notes == ["the move of chain 1 to node 3 is cancelled: target 21 is not in chain 1"]
    assert cluster.moves() == ()


def test_moves_that_have_not_begun_can_be_cancelled() -> None:
    cluster = Cluster()
    cluster.ask(AddMoves((NewMove(1, 21, 3), NewMove(2, 12, 3))))
    cluster.advance()
    assert cluster.ask(CancelMoves()) == "1 move cancelled, 1 running"
    assert [one.chain for one in cluster.moves()] == [1]


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (NewMove(9, 21, 3), NotFound, "there is no chain 9"),
        (NewMove(1, 22, 3), NotFound, "target 22 is not in chain 1"),
        (NewMove(1, 21, 9), NotFound, "there is no node 9; `ff fs status` lists the nodes"),
        (
            NewMove(1, 21, 1),
            UsageError,
            "chain 1 has a target on node 1 already; both could fail together, so name another node",
        ),
        (NewMove(1, 21, 2), UsageError, "target 21 of chain 1 is on node 2 already; name another node"),
        (NewMove(2, 22, 1), Exists, "chain 2 is being moved already; wait until it is done"),
    ],
)
def test_a_move_that_cannot_be_is_refused(move: NewMove, error: type[Exception], message: str) -> None:
    cluster = Cluster()
    cluster.ask(AddMoves((NewMove(2, 22, 3),)))
    with pytest.raises(error, match=message):
        cluster.ask(AddMoves((move,)))
    assert cluster.ask(AddMoves((NewMove(2, 22, 3),))) == "0 moves added"


def test_a_plan_gives_a_new_node_its_share_and_takes_all_from_a_drained_one() -> None:
    cluster = Cluster()
    table = ChainTable(1, (1, 2))
    plan, _, moves = plan_moves(cluster.status(), table, ())
    assert len(moves) == plan.minimum == 1
    assert moves[0].node == 3
    with pytest.raises(Busy, match="1 moves are running"):
        plan_moves(cluster.status(), table, (MoveStatus(1, 21, 3, 0),))
    cluster.ask(Drain(node=1))
    _, _, moves = plan_moves(cluster.status(), table, ())
    assert sorted((one.chain, one.source, one.node) for one in moves) == [(1, 11, 3), (2, 12, 3)]


def test_chains_are_made_of_targets_that_were_in_none() -> None:
    cluster = Cluster()
    cluster.ask(AddNode(4))
    cluster.ask(AddTargets(4, (41, 42)))
    chains = chains_of_new_targets(cluster.status(), 2)
    assert [chain.id for chain in chains] == [3, 4]
    assert sorted(target for chain in chains for target in chain.targets) == [31, 32, 41, 42]
    cluster.ask(RetireTargets((31, 32)))
    with pytest.raises(UsageError, match="2 replicas need 2 nodes"):
        chains_of_new_targets(cluster.status(), 2)
