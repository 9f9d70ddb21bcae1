"""What administrators ask of the cluster manager, as changes of its ledger's draft.

`apply` checks a request wholly before it puts anything, so a refused one leaves no trace. Requests may come twice: what
is there already, and the same, is left as it is. None of them takes a role from a target that can use it: a drain is an
invitation (see `health`), members are taken out only when they have no role, and `Override` gives a role where nobody
has it."""

from __future__ import annotations

import bisect
from typing import Final

import msgspec

from fireflyer.base.errors import Exists, NotFound, UsageError
from fireflyer.base.units import counted, format_duration
from fireflyer.fs.core.manager.chains import in_order
from fireflyer.fs.core.manager.health import Health
from fireflyer.fs.core.manager.key_rotation import rotate
from fireflyer.fs.core.manager.ledger import Ledger
from fireflyer.fs.core.manager.migration import change_moves, leave_drained
from fireflyer.fs.core.rows import NodeRow, TargetRow
from fireflyer.fs.schema.manager import (
    MAX_TARGETS_PER_NODE,
    AddChains,
    AddMoves,
    AddNode,
    AddTable,
    AddTargets,
    AdminRequest,
    CancelMoves,
    ChangeMembers,
    Condition,
    Done,
    Drain,
    NewChain,
    NodeStatus,
    Override,
    OverrideWarning,
    RetireNode,
    RetireTargets,
    RotateKeys,
    Status,
    TargetReport,
    TargetStatus,
)
from fireflyer.fs.schema.routing import MAX_REPLICAS, Chain, ChainTable, Member, TargetState

__all__ = ["MAX_CHAINS", "MAX_NODES", "MAX_TABLES", "MAX_TARGETS", "STATUS_TARGETS", "apply", "status"]

MAX_NODES: Final = 4096
MAX_TARGETS: Final = 1 << 17
MAX_CHAINS: Final = 1 << 16
MAX_TABLES: Final = 256
STATUS_TARGETS: Final = 8192
"""Of one page. With all nodes and chains that there may be, the first one has about 10 MB."""


def apply(request: AdminRequest, ledger: Ledger, health: Health, now_ns: int) -> Done | OverrideWarning:
    """Puts what is asked into the draft. Raises `UsageError`, `Exists` or `NotFound`, and has put nothing then."""
    match request:
        case AddNode(node):
            return _add_node(ledger, node)
        case AddTargets():
            return _add_targets(ledger, request)
        case AddChains(chains):
            return _add_chains(ledger, chains)
        case AddTable():
            return _add_table(ledger, request)
        case ChangeMembers():
            return _change_members(ledger, request)
        case Drain():
            return _drain(ledger, request)
        case RetireTargets(targets):
            return _retire_targets(ledger, targets)
        case RetireNode(node):
            return _retire_node(ledger, node)
        case AddMoves() | CancelMoves():
            return change_moves(request, ledger)
        case Override():
            return _override(ledger, health, request, now_ns)
        case RotateKeys():
            return rotate(request, ledger)


def status(ledger: Ledger, health: Health, now_ns: int, after: int = 0) -> Status:
    """What is committed, and what is heard of it: a page of targets, the first one with all the rest."""
    ids = sorted(ledger.targets.committed)
    begin = bisect.bisect_right(ids, after)
    page = ids[begin : begin + STATUS_TARGETS]
    state = ledger.state
    return Status(
        state.version,
        ledger.term,
        () if after else tuple(_node_status(row, health, now_ns) for _, row in sorted(ledger.nodes.committed.items())),
        tuple(_target_status(ledger, health, ledger.targets.committed[one]) for one in page),
        () if after else tuple(chain for _, chain in sorted(ledger.chains.committed.items())),
        state.cluster,
        len(ledger.sessions.committed),
        state.key_ids,
        page[-1] if begin + len(page) < len(ids) else 0,
    )


def _node_status(row: NodeRow, health: Health, now_ns: int) -> NodeStatus:
    known = health.get(row.id)
    alive = row.incarnation > 0 and known is not None and known.sequence > 0 and not known.dead
    heard = known is not None and (known.sequence > 0 or known.dead)
    silent_ns = health.silent_ns(row.id, now_ns)
    return NodeStatus(row.id, row.address, row.incarnation, silent_ns, alive, row.machine, heard)


def _target_status(ledger: Ledger, health: Health, row: TargetRow) -> TargetStatus:
    report = health.report(row.node, row.id)
    return TargetStatus(row.id, row.node, ledger.chain_of(row.id), row.drained, report, row.used, row.leaving)


# --- nodes and targets ---


def _add_node(ledger: Ledger, node: int) -> Done:
    if ledger.nodes.get(node) is not None:
        return Done(f"node {node} existed already; nothing was changed")
    if len(ledger.nodes) >= MAX_NODES:
        raise UsageError(
            f"the cluster has {MAX_NODES} nodes, the maximum; retire one first: ff fs admin retire-node NODE"
        )
    ledger.nodes.put(node, NodeRow(node))
    return Done(f"node {node} is added; its storage process can register now")


def _add_targets(ledger: Ledger, request: AddTargets) -> Done:
    if ledger.nodes.get(request.node) is None:
        raise NotFound(f"there is no node {request.node}; add it: ff fs admin register-node --node {request.node}")
    new = []
    for target in dict.fromkeys(request.targets):
        row = ledger.targets.get(target)
        if row is not None and row.node != request.node:
            raise Exists(f"target {target} belongs to node {row.node} already; give another id")
        if row is None:
            new.append(target)
    there = len(ledger.targets_of(request.node)) + len(new)
    if there > MAX_TARGETS_PER_NODE or len(ledger.targets) + len(new) > MAX_TARGETS:
        raise UsageError(
            f"node {request.node} would have {counted(there, 'target')}, and the cluster "
            f"{len(ledger.targets) + len(new)}; at most {MAX_TARGETS_PER_NODE} per node and {MAX_TARGETS} in the "
            "cluster are allowed"
        )
    for target in new:
        ledger.targets.put(target, TargetRow(target, request.node))
    return Done(f"{counted(len(new), 'target')} added to node {request.node}")


def _drain(ledger: Ledger, request: Drain) -> Done:
    if request.node and ledger.nodes.get(request.node) is None:
        raise NotFound(f"there is no node {request.node}; `ff fs status` lists the nodes")
    of_node = ledger.targets_of(request.node) if request.node else []
    rows = [_target(ledger, target) for target in dict.fromkeys((*request.targets, *of_node))]
    for row in rows:
        leaving = request.drain and (row.leaving or not request.at_once)
        drained = request.drain and (row.drained or request.at_once)
        if (row.drained, row.leaving) != (drained, leaving):
            ledger.targets.put(row.id, msgspec.structs.replace(row, drained=drained, leaving=leaving))
        if request.drain and request.at_once:
            leave_drained(ledger, row.id)
    what = counted(len(rows), "target")
    where = f"node {request.node}: " if request.node else ""
    if not request.drain:
        return Done(f"{where}{what} no longer drained: synced if necessary, then serving again")
    if request.at_once:
        return Done(f"{where}{what} drained: they stop serving, one per chain at a time and never the last of a chain")
    return Done(f"{where}{what} draining: run `ff fs admin rebalance` to move their chains; they serve until then")


def _retire_targets(ledger: Ledger, targets: tuple[int, ...]) -> Done:
    there = [target for target in dict.fromkeys(targets) if ledger.targets.get(target) is not None]
    for target in there:
        chain = _chain_with(ledger, target)
        if chain is not None:
            raise UsageError(
                f"target {target} is in chain {chain}; empty it first with `ff fs admin drain` and "
                "`ff fs admin rebalance`"
            )
    for target in there:
        ledger.targets.put(target, None)
    return Done(f"{counted(len(there), 'target')} retired")


def _retire_node(ledger: Ledger, node: int) -> Done:
    if ledger.nodes.get(node) is None:
        return Done(f"there is no node {node}; nothing was changed")
    left = [target for target in ledger.targets.ids() if _target(ledger, target).node == node]
    if left:
        raise UsageError(
            f"node {node} still has {counted(len(left), 'target')} (target {left[0]}, …); retire them first"
        )
    ledger.nodes.put(node, None)
    return Done(f"node {node} retired")


# --- chains ---


def _add_chains(ledger: Ledger, chains: tuple[NewChain, ...]) -> Done:
    new: dict[int, tuple[TargetRow, ...]] = {}
    taken: dict[int, int] = {}
    for chain in chains:
        known = ledger.chains.get(chain.id)
        if known is not None and sorted(one.target for one in known.members) == sorted(chain.targets):
            continue
        if known is not None or chain.id in new:
            raise Exists(f"chain {chain.id} exists already with other targets; give another id")
        rows = tuple(_target(ledger, target) for target in chain.targets)
        for row in rows:
            if row.used or row.unwanted or row.id in taken:
                raise UsageError(
                    f"target {row.id} cannot be used for new chain {chain.id}: it was in a chain before or is "
                    "drained; give a new target"
                )
            taken[row.id] = chain.id
        _check_nodes(chain.id, rows)
        new[chain.id] = rows
    if len(ledger.chains) + len(new) > MAX_CHAINS:
        raise UsageError(
            f"the cluster would have {len(ledger.chains) + len(new)} chains, at most {MAX_CHAINS} are allowed; use "
            "fewer, larger targets"
        )
    for chain_id, rows in new.items():
        ledger.put_chain(chain_id, tuple(Member(row.id, row.node, TargetState.SERVING) for row in rows))
        for row in rows:
            ledger.targets.put(row.id, msgspec.structs.replace(row, used=True))
    return Done(f"{counted(len(new), 'chain')} added")


def _add_table(ledger: Ledger, request: AddTable) -> Done:
    known = ledger.tables.get(request.id)
    if known is not None and known.chains == request.chains:
        return Done(f"chain table {request.id} existed already; nothing was changed")
    if known is not None:
        raise Exists(
            f"chain table {request.id} exists already with other chains, and tables cannot be changed; give another id"
        )
    if len(ledger.tables) >= MAX_TABLES:
        raise UsageError(f"the cluster has {MAX_TABLES} chain tables, the maximum")
    for chain in request.chains:
        if ledger.chains.get(chain) is None:
            raise NotFound(f"chain table {request.id} names chain {chain}, which does not exist; add the chain first")
    ledger.tables.put(request.id, ChainTable(request.id, request.chains))
    return Done(f"chain table {request.id} added")


def _change_members(ledger: Ledger, request: ChangeMembers) -> Done:
    chain = _chain(ledger, request.chain)
    if chain.restored:
        raise UsageError(
            f"chain {chain.id} waits until all its targets have said which of them served last (metadata were loaded); "
            "start their storage processes, or decide with `ff fs admin override`"
        )
    members = list(chain.members)
    leaving = next((one for one in members if one.target == request.remove), None)
    if leaving is not None:
        if leaving.state not in (TargetState.WAITING, TargetState.OFFLINE):
            raise UsageError(
                f"target {leaving.target} is {leaving.state} in chain {chain.id}; drain it with --now and wait until "
                "it is offline"
            )
        members.remove(leaving)
    if request.add is not None and all(one.target != request.add for one in members):
        row = _target(ledger, request.add)
        holder = _chain_with(ledger, row.id)
        if holder is not None:
            raise UsageError(f"target {row.id} is in chain {holder} already; a target can be in one chain")
        if row.unwanted:
            raise UsageError(f"target {row.id} is drained; run `ff fs admin undrain --target {row.id}` first")
        if len(members) >= MAX_REPLICAS:
            raise UsageError(f"chain {chain.id} has {MAX_REPLICAS} targets, the maximum; remove one first")
        _check_nodes(chain.id, (*(_target(ledger, one.target) for one in members), row))
        members.append(Member(row.id, row.node, TargetState.OFFLINE))
        ledger.targets.put(row.id, msgspec.structs.replace(row, used=True))
    if tuple(members) == chain.members:
        return Done(f"chain {chain.id} had these targets already; nothing was changed")
    ledger.put_chain(chain.id, tuple(members))
    return Done(f"chain {chain.id} has {counted(len(members), 'target')}")


# --- a chain that cannot go on by itself ---


def _override(ledger: Ledger, health: Health, request: Override, now_ns: int) -> Done | OverrideWarning:
    chain = _chain(ledger, request.chain)
    member = next((one for one in chain.members if one.target == request.target), None)
    if member is None:
        raise NotFound(f"target {request.target} is not in chain {chain.id}")
    if any(one.state is TargetState.SERVING for one in chain.members):
        raise UsageError(f"chain {chain.id} is available; it needs no override")
    report = health.report(member.node, member.target)
    if not _usable(report, chain) or health.silent(member.node, now_ns):
        raise UsageError(
            f"target {member.target} on node {member.node} is not online; start the storage process of the node first"
        )
    if chain.restored:
        _check_nobody_acts(health, chain, now_ns)
    if request.confirm != chain.version:
        return OverrideWarning(_warning(ledger, health, chain, member, now_ns), chain.version)
    states = {one.target: TargetState.OFFLINE for one in chain.members} | {member.target: TargetState.SERVING}
    ledger.put_chain(chain.id, in_order(chain.members, states))
    return Done(f"target {member.target} serves chain {chain.id} now, in chain version {chain.version + 1}")


def _check_nobody_acts(health: Health, chain: Chain, now_ns: int) -> None:
    """By what it knew before metadata were loaded. Raises `UsageError`."""
    for member in chain.members:
        report = health.report(member.node, member.target)
        told = report is not None and report.chain in (0, chain.id) and report.chain_version == chain.version
        if not told and not health.silent(member.node, now_ns):
            raise UsageError(
                f"target {member.target} on node {member.node} may serve by what it knew before metadata were loaded; "
                "wait until it has answered, or counts as failed"
            )


def _usable(report: TargetReport | None, chain: Chain) -> bool:
    if report is None or report.chain not in (0, chain.id):
        return False
    return report.condition is not Condition.GONE and report.chain_version == chain.version


def _warning(ledger: Ledger, health: Health, chain: Chain, member: Member, now_ns: int) -> str:
    last = [one for one in chain.members if one.state is TargetState.LASTSRV and not chain.restored]
    until = max((_target(ledger, one.target).served_until for one in chain.members), default=0)
    if chain.restored:
        report = health.report(member.node, member.target)
        lost = (
            f"all writes acknowledged since it served last (in version {report.served_in} of the chain)"
            if report is not None and report.served_in
            else "all writes of which it does not know (its directory does not say when it served)"
        )
    elif member.state is TargetState.LASTSRV:
        lost = "writes that it acknowledged shortly before it failed and that were not on its disk"
    else:
        served = _target(ledger, member.target).served_until
        since = (
            f"since it left the chain (it served until version {served}, the chain"
            if served
            else "ever (it never served, the chain"
        )
        lost = f"all writes acknowledged {since} until version {until})"
    others = [one for one in last if one.target != member.target]
    waited = ", ".join(f"target {one.target} on node {one.node}, {_how(health, one, now_ns)}" for one in others)
    hope = f" Complete replicas: {waited}. If one of them can be started again, do that instead." if others else ""
    return (
        f"{_emptiness(health, chain, member)}If target {member.target} serves chain {chain.id} now, {lost} may be lost "
        f"for ever, and what the other targets have is overwritten.{hope} To do it, confirm with version "
        f"{chain.version}."
    )


def _how(health: Health, member: Member, now_ns: int) -> str:
    if health.silent(member.node, now_ns) or health.report(member.node, member.target) is None:
        return f"silent for {format_duration(health.silent_ns(member.node, now_ns))}"
    return "empty" if _holds_nothing(health, member) else "running"


def _emptiness(health: Health, chain: Chain, member: Member) -> str:
    """What whoever overrides must know first: a directory that was made anew has nothing of what was acknowledged."""
    if not _holds_nothing(health, member):
        return ""
    if all(_holds_nothing(health, one) for one in chain.members):
        return f"All targets of chain {chain.id} are empty: its data are lost. "
    return f"Target {member.target} is empty; its directory may have been replaced. "


def _holds_nothing(health: Health, member: Member) -> bool:
    report = health.report(member.node, member.target)
    return report is not None and report.capacity_bytes > 0 and report.used_bytes == 0 and not report.clean


# --- looking things up ---


def _target(ledger: Ledger, target: int) -> TargetRow:
    row = ledger.targets.get(target)
    if row is None:
        raise NotFound(
            f"there is no target {target}; `ff fs status --all` lists the targets, `ff fs admin register-node` adds "
            "some"
        )
    return row


def _chain(ledger: Ledger, chain_id: int) -> Chain:
    chain = ledger.chains.get(chain_id)
    if chain is None:
        raise NotFound(f"there is no chain {chain_id}; `ff fs status --all` lists the chains")
    return chain


def _chain_with(ledger: Ledger, target: int) -> int | None:
    """In which chain it is, the draft included."""
    for chain_id, chain in ledger.chains.changes():
        if chain is not None and any(one.target == target for one in chain.members):
            return chain_id
    committed = ledger.chain_of(target)
    if committed is not None and ledger.chains.in_draft(committed):
        return None
    return committed


def _check_nodes(chain_id: int, rows: tuple[TargetRow, ...]) -> None:
    nodes = [row.node for row in rows]
    if len(dict.fromkeys(nodes)) < len(nodes):
        raise UsageError(
            f"chain {chain_id} would have two targets on one node, which can fail together; give targets of other nodes"
        )
