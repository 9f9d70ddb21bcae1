"""Since which version of a chain something may have been acknowledged, or shown, that not all before it have.

Targets that fail together are noticed one after the other, and each time a version is made without one of them. If
nothing could happen in those versions, all that served at the beginning still have everything, and any of them may
bring the chain back. After a power cut of the whole cluster it would otherwise be some one machine, for each chain,
that must come up again.

Something can happen in a version only in two ways:

1. All that serve in it have been told of it: then new updates pass through all of them.
2. Its tail has been told of it and was not the tail before: it commits what it had pending, which may never have come
   to the one that was; it shows it to readers, and a predecessor that has been told of nothing yet passes the
   acknowledgement on.

Otherwise, whatever the old tail commits came to it through all that served before it, and so did whatever they
acknowledge.

*Who is to be synced* keeps what it has until its source, the last one that serves, knows it: then it is overwritten,
and is complete no more. So after the end of all processes nobody is waited for only because it came up last.

*Who left before nothing happened any more* is complete too (`unchanged`), however long ago that was and whoever was
told: the tail says, when it lays its role down, in which version it has last changed anything; what was acknowledged or
shown is committed there, so all who served in that version have it. Who has begun to be synced since is being
overwritten, and does not count. So after an orderly end of a whole cluster any replica can bring its chain back.

A storage process is told of routing by the answers to its heartbeats and by nothing else, so it is enough to see to
whom the manager has answered since the version was committed. A new primary knows nothing of it: to it, what it has
loaded was told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fireflyer.fs.schema.ids import ChainId, ChainVersion, NodeId, TargetId
from fireflyer.fs.schema.manager import Condition, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

__all__ = ["AcknowledgedVersions", "unchanged"]


@dataclass(slots=True)
class _Unconfirmed:
    complete: tuple[TargetId, ...]
    """Who served in the last version in which something may have happened, or in one after that."""
    tail: TargetId | None
    """Of the last version in which something may have happened."""
    present_tail: Member | None
    nodes: dict[NodeId, None]
    """Of the serving ones of the present version: those that have not been told."""
    syncing: tuple[TargetId, ...]
    """In the present version."""


class AcknowledgedVersions:
    def __init__(self) -> None:
        self._untold: dict[ChainId, _Unconfirmed] = {}

    def committed(self, old: Chain | None, new: Chain) -> None:
        """`new` follows `old`."""
        known = self._untold.get(new.id)
        served = _serving(old) if old is not None else []
        before = known.complete if known is not None else ()
        before = (*before, *(one.target for one in served if one.target not in before))
        tail = known.tail if known is not None else served[-1].target if served else None
        states = {one.target: one.state for one in new.members}
        complete = tuple(one for one in before if one in states)
        syncing = tuple(one for one in complete if states[one] is TargetState.SYNCING)
        serving = _serving(new)
        nodes = {one.node: None for one in serving}
        self._untold[new.id] = _Unconfirmed(complete, tail, serving[-1] if serving else None, nodes, syncing)

    def answered(self, node: NodeId, chains: Iterable[ChainId]) -> None:
        """This node, which has targets in these chains, is told of all that is committed."""
        for chain_id in chains:
            untold = self._untold.get(chain_id)
            if untold is None or node not in untold.nodes or untold.present_tail is None:
                continue
            del untold.nodes[node]
            new_tail = untold.present_tail.node == node and untold.present_tail.target != untold.tail
            if new_tail or not untold.nodes:
                del self._untold[chain_id]
            else:
                untold.complete = tuple(one for one in untold.complete if one not in untold.syncing)

    def complete(self, chain_id: ChainId) -> tuple[TargetId, ...]:
        """Targets that have everything, beside those that serve now and whatever those were told since."""
        untold = self._untold.get(chain_id)
        return untold.complete if untold is not None else ()


def unchanged(
    chain: Chain, reports: Mapping[TargetId, TargetReport], intact_until: Mapping[TargetId, ChainVersion]
) -> tuple[TargetId, ...]:
    """Targets without a role that have everything that the tail has, if that says that it is gone. `intact_until`: the
    last version in which each served, 0 for one that was not left as it was since."""
    serving = _serving(chain)
    tail = reports.get(serving[-1].target) if serving else None
    if tail is None or tail.condition is not Condition.GONE or not tail.changed_in:
        return ()
    if tail.chain not in (0, chain.id) or tail.chain_version != chain.version:
        return ()
    without = [one.target for one in chain.members if one.state in (TargetState.WAITING, TargetState.OFFLINE)]
    return tuple(one for one in without if intact_until.get(one, 0) >= tail.changed_in)


def _serving(chain: Chain) -> list[Member]:
    return [one for one in chain.members if one.state is TargetState.SERVING]
