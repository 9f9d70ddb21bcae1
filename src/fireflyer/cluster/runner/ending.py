"""How a run ended, from what its launcher says and from its event log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from fireflyer.analytics.accounting import Parts, account
from fireflyer.base.events import (
    AttemptFailed,
    AttemptSized,
    CorruptionReport,
    JobEvent,
    JobStarted,
    Logged,
    NodeChecked,
    NodeLost,
    Suspended,
    SuspendRequested,
)
from fireflyer.cluster.schema.job import JobResult
from fireflyer.cluster.schema.sync import EndedRun
from fireflyer.cluster.schema.tasks import Cause, RunParts

__all__ = ["ending_of", "shown"]

_MAX_REASON = 1000
_HUNG = "no rank printed or reported anything"


def ending_of(result: JobResult, log: Sequence[Logged], nodes: Sequence[str]) -> EndedRun:
    """`nodes`: names, in the order of the run's hosts."""
    last = next((entry.event for entry in reversed(log) if isinstance(entry.event, AttemptFailed)), None)
    suspended = next((entry.event for entry in reversed(log) if isinstance(entry.event, Suspended)), None)
    asked_to_suspend = any(isinstance(entry.event, SuspendRequested) for entry in log)
    cause = _cause(result, last, asked_to_suspend=asked_to_suspend)
    accused = _accusations(log, nodes, result) if cause is Cause.INFRASTRUCTURE else {}
    said = [f"{name}: {words}" for name, words in accused.items() if words]
    if cause is Cause.SUSPENDED and suspended is not None and suspended.ended_ranks:
        cause = Cause.INTERRUPTED  # some were killed: what they did since their last checkpoint is lost
    return EndedRun(
        cause=cause,
        exit_code=min(max(result.exit_code, 0), 255),
        reason=shown("; ".join((*said, result.reason))),
        parts=_parts(account(log).parts),
        whole_life=result.whole_life_state,
        bad_nodes=tuple(sorted(accused)),
        corrupt=_corrupt(log, nodes),
    )


def _cause(result: JobResult, last: AttemptFailed | None, *, asked_to_suspend: bool) -> Cause:
    if result.exit_code == 0:
        return Cause.SUCCEEDED
    if result.suspended:
        return Cause.SUSPENDED
    if result.signal is not None:
        return Cause.INTERRUPTED if asked_to_suspend else Cause.STOPPED
    if last is None:
        return Cause.INFRASTRUCTURE  # nothing of the user's program ran to an end
    if last.reason.startswith(_HUNG):
        return Cause.HUNG
    lost = last.node is not None and last.rank is None
    return Cause.INFRASTRUCTURE if lost or last.kind == "infrastructure" else Cause.PROGRAM


def _parts(parts: Parts) -> RunParts:
    return RunParts(
        start_ns=parts.startup_ns,
        productive_ns=parts.productive_ns,
        checkpoint_ns=parts.checkpoint_ns,
        lost_ns=parts.lost_ns,
        restart_ns=parts.restart_ns,
        other_ns=parts.other_ns,
        unknown_ns=parts.unknown_ns,
    )


def _accusations(log: Sequence[Logged], nodes: Sequence[str], result: JobResult) -> dict[str, str]:
    """Of the last attempt: nodes that were lost, or that the check found at fault, and the culprit's; with what the
    check said, if it was that."""
    attempt = max((entry.event.attempt for entry in log if isinstance(entry.event, AttemptFailed)), default=0)
    hosts: Sequence[int] = range(len(nodes))
    found: dict[int, str] = {}
    if result.culprit is not None and result.culprit.attempt == attempt:
        found[result.culprit.node] = ""
    for entry in log:
        event = entry.event
        if isinstance(event, AttemptSized) and event.attempt <= attempt:
            hosts = [nodes.index(host) for host in event.hosts if host in nodes]
        elif _accuses(event) and event.attempt == attempt:
            found[event.node] = event.reason if isinstance(event, NodeChecked) else ""
    return {nodes[hosts[number]]: said for number, said in found.items() if 0 <= number < len(hosts)}


def _corrupt(log: Sequence[Logged], nodes: Sequence[str]) -> tuple[str, ...]:
    """Of all attempts: the nodes of ranks that a majority of replicas differs from."""
    found: set[str] = set()
    hosts: Sequence[str] = nodes
    of_rank: list[int] = []
    for entry in log:
        match entry.event:
            case JobStarted() as started:
                of_rank = _nodes_of_ranks(started.node_ranks or (started.ranks_per_node,) * started.nodes)
            case AttemptSized() as sized:
                hosts = sized.hosts
                of_rank = _nodes_of_ranks(sized.node_ranks) or of_rank
            case CorruptionReport(decided=True) as report:
                numbers = {of_rank[rank] for rank in report.suspects if 0 <= rank < len(of_rank)}
                found.update(hosts[number] for number in numbers if number < len(hosts) and hosts[number] in nodes)
            case _:
                pass
    return tuple(sorted(found))


def _nodes_of_ranks(node_ranks: Sequence[int]) -> list[int]:
    return [node for node, count in enumerate(node_ranks) for _ in range(count)]


def _accuses(event: JobEvent) -> TypeGuard[NodeLost | NodeChecked]:
    return isinstance(event, NodeLost) or (isinstance(event, NodeChecked) and event.verdict == "suspect")


def shown(text: str) -> str:
    """One line of a bounded length, without control characters."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:_MAX_REASON]
