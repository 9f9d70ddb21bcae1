"""Moves of chains from one node to another, carried out by the primary: what a rebalance has planned.

    AddMoves ──> a row per chain ──room──> a spare target of the node joins the chain ──synced──> it serves
             ──> the old target is drained ──gave its role up──> it leaves the chain ──> the row goes

Each step is a change of the ledger that `admin` could make as well, in the transaction that also writes the row. So the
row always says how far a move is, whoever is primary next goes on from there, and nothing is decided twice. A chain has
one move at a time. Its target that leaves keeps its role until the one that comes has it, and gets it back if that one
dies before it has left: no step makes the chain smaller. What can be done only later (no spare target, no room, nothing
to copy from) waits; what cannot be done at all any more (the chain or the node is gone) is dropped with a note.

*Why there is no operation that only reorders a chain.* Each serving target has at least what those behind it have. Put
in another order, a new tail would commit what the target before it, once behind it, never had. A target gets another
place only by leaving its role and being synced again, to the end. So the orders of a plan's goal are not followed: who
comes stands at the end, and those before it keep their places."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.errors import Busy, Exists, NotFound, UsageError
from fireflyer.base.units import counted
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.rows import MoveRow, TargetRow
from fireflyer.fs.schema.ids import NodeId, TargetId
from fireflyer.fs.schema.manager import AddMoves, CancelMoves, Done, MoveStatus
from fireflyer.fs.schema.routing import MAX_REPLICAS, Chain, Member, TargetState

__all__ = ["MAX_MOVES", "MAX_UNDER_WAY", "advance", "change_moves", "leave_drained", "moves_status"]

MAX_MOVES: Final = 1 << 14
MAX_UNDER_WAY: Final = 8
"""Targets that are copied for moves at one time; one per node that takes them."""
_NO_ROLE: Final = (TargetState.WAITING, TargetState.OFFLINE)


def change_moves(request: AddMoves | CancelMoves, ledger: Ledger) -> Done:
    """Raises as `_add` does."""
    return _add(request, ledger) if isinstance(request, AddMoves) else _cancel(ledger)


def _add(request: AddMoves, ledger: Ledger) -> Done:
    """Puts them behind those that are there. Raises `NotFound`, `UsageError`, `Exists` or `Busy`, and has put nothing
    then."""
    if len(ledger.moves) + len(request.moves) > MAX_MOVES:
        raise Busy(f"more than {MAX_MOVES} moves would be planned, the maximum; wait until some are done")
    number = max((row.number for row in map(ledger.moves.get, ledger.moves.ids()) if row is not None), default=0)
    new: dict[int, MoveRow] = {}
    for move in request.moves:
        chain = ledger.chains.get(move.chain)
        if chain is None:
            raise NotFound(f"there is no chain {move.chain}; `ff fs status --all` lists the chains")
        known = ledger.moves.get(move.chain)
        if known is not None and (known.source, known.node) == (move.source, move.node):
            continue
        if known is not None or move.chain in new:
            raise Exists(
                f"chain {move.chain} is being moved already; wait until it is done, or run "
                "`ff fs admin rebalance --cancel`"
            )
        _check(ledger, chain, move.source, move.node)
        number += 1
        new[move.chain] = MoveRow(move.chain, move.source, move.node, number)
    for row in new.values():
        ledger.moves.put(row.id, row)
    return Done(f"{counted(len(new), 'move')} added")


def _check(ledger: Ledger, chain: Chain, source: TargetId, node: NodeId) -> None:
    if all(member.target != source for member in chain.members):
        raise NotFound(f"target {source} is not in chain {chain.id}")
    if ledger.nodes.get(node) is None:
        raise NotFound(f"there is no node {node}; `ff fs status` lists the nodes")
    if any(member.node == node and member.target != source for member in chain.members):
        raise UsageError(
            f"chain {chain.id} has a target on node {node} already; both could fail together, so name another node"
        )
    if any(member.node == node for member in chain.members):
        raise UsageError(f"target {source} of chain {chain.id} is on node {node} already; name another node")
    if len(chain.members) >= MAX_REPLICAS:
        raise UsageError(f"chain {chain.id} has {MAX_REPLICAS} targets, the maximum; remove one first")


def _cancel(ledger: Ledger) -> Done:
    """Those that have not begun; the others come to their end."""
    waiting = [row.id for row in _rows(ledger) if not row.target]
    for chain_id in waiting:
        ledger.moves.put(chain_id, None)
    return Done(f"{counted(len(waiting), 'move')} cancelled, {len(ledger.moves)} running")


def leave_drained(ledger: Ledger, target: TargetId) -> None:
    """An administrator wants it drained: the move that may have drained it does not end that any more."""
    row = ledger.moves.get(ledger.chain_of(target) or 0)
    if row is not None and row.source == target and row.drained:
        ledger.moves.put(row.id, msgspec.structs.replace(row, drained=False))


def moves_status(ledger: Ledger) -> tuple[MoveStatus, ...]:
    committed = sorted(ledger.moves.committed.values(), key=lambda row: row.number)
    return tuple(MoveStatus(row.id, row.source, row.node, row.target) for row in committed)


def advance(ledger: Ledger) -> list[str]:
    """Puts the next steps of all moves into the draft; what it did, for the log. Chains that change in this draft
    already are left for the next."""
    notes: list[str] = []
    rows = _rows(ledger)
    busy = {row.node: None for row in rows if row.target}
    for row in rows:
        if ledger.chains.in_draft(row.id) or ledger.moves.in_draft(row.id):
            continue
        if row.target:
            notes += _carry_on(ledger, row)
        elif len(busy) < MAX_UNDER_WAY and row.node not in busy and _begin(ledger, row, notes):
            busy[row.node] = None
    return notes


def _rows(ledger: Ledger) -> list[MoveRow]:
    rows = [ledger.moves.get(row_id) for row_id in ledger.moves.ids()]
    return sorted((row for row in rows if row is not None), key=lambda row: row.number)


def _begin(ledger: Ledger, row: MoveRow, notes: list[str]) -> bool:
    chain = ledger.chains.get(row.id)
    try:
        if chain is None:
            raise NotFound(f"there is no chain {row.id}")
        _check(ledger, chain, row.source, row.node)
    except (NotFound, UsageError) as error:
        ledger.moves.put(row.id, None)
        notes.append(f"the move of chain {row.id} to node {row.node} is cancelled: {error}")
        return False
    spare = _spare(ledger, row.node)
    if spare is None or not any(member.state is TargetState.SERVING for member in chain.members):
        return False
    ledger.put_chain(row.id, (*chain.members, Member(spare.id, row.node, TargetState.OFFLINE)))
    ledger.targets.put(spare.id, msgspec.structs.replace(spare, used=True, served_until=0, intact_until=0))
    ledger.moves.put(row.id, msgspec.structs.replace(row, target=spare.id))
    notes.append(f"chain {row.id} gets target {spare.id} on node {row.node}, to replace target {row.source}")
    return True


def _spare(ledger: Ledger, node: NodeId) -> TargetRow | None:
    """A target of it that is in no chain; rather one that was in none yet."""
    found = None
    for target in ledger.targets_of(node):
        row = ledger.targets.get(target)
        if row is None or row.unwanted or ledger.targets.in_draft(target) or ledger.chain_of(target) is not None:
            continue
        if not row.used:
            return row
        found = found or row
    return found


def _carry_on(ledger: Ledger, row: MoveRow) -> list[str]:
    chain, source = ledger.chains.get(row.id), ledger.targets.get(row.source)
    states = {member.target: member.state for member in chain.members} if chain is not None else {}
    if chain is None or row.target not in states:
        ledger.moves.put(row.id, None)
        return [f"the move of chain {row.id} is cancelled: target {row.target} is no longer in the chain"]
    if row.source not in states:
        _finish(ledger, row, source)
        return [f"chain {row.id} has moved to node {row.node}"]
    if states[row.target] is not TargetState.SERVING:
        return _take_back(ledger, row, source) if TargetState.SERVING in states.values() else []
    if states[row.source] in _NO_ROLE:
        ledger.put_chain(row.id, tuple(one for one in chain.members if one.target != row.source))
        _finish(ledger, row, source)
        return [f"chain {row.id} has moved from target {row.source} to {row.target}"]
    if source is not None and not source.drained:
        ledger.targets.put(source.id, msgspec.structs.replace(source, drained=True))
        ledger.moves.put(row.id, msgspec.structs.replace(row, drained=True))
    return []


def _take_back(ledger: Ledger, row: MoveRow, source: TargetRow | None) -> list[str]:
    """The one that came has gone again, perhaps for ever: who was drained for it gets its role back until it serves."""
    if not row.drained or source is None:
        return []
    ledger.targets.put(source.id, msgspec.structs.replace(source, drained=False))
    ledger.moves.put(row.id, msgspec.structs.replace(row, drained=False))
    return [f"target {row.source} serves chain {row.id} again until target {row.target} does"]


def _finish(ledger: Ledger, row: MoveRow, source: TargetRow | None) -> None:
    """The target that left may be used again, unless an administrator wants it drained."""
    ledger.moves.put(row.id, None)
    if row.drained and source is not None and source.drained:
        ledger.targets.put(source.id, msgspec.structs.replace(source, drained=False))
