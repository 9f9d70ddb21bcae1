"""What a target notes on its disk of the chain that it serves, before it does anything as its role there says.

    answer of the manager ──> `notes_due` ──> written down, and durable ──> the answer is taken over

Only the manager's store says who may serve, and that may be older than what was done since: it was loaded from a dump.
Then these notes say who served last (`core.manager.restored`). So they come first: an update that is acknowledged in a
version of the chain is on targets that have all noted this version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec

from fireflyer.fs.schema.ids import ChainId, ChainVersion, TargetId
from fireflyer.fs.schema.manager import Answer, HeartbeatAnswer
from fireflyer.fs.schema.routing import MAX_REPLICAS, Chain, TargetState

__all__ = ["ServedNote", "note_of", "notes_due"]


class ServedNote(msgspec.Struct, frozen=True):
    """Of one target. A target that has never served its chain has none."""

    chain: ChainId
    served_in: ChainVersion
    """The last version of the chain in which it served."""
    members: Annotated[tuple[TargetId, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()
    """All members of the chain in the last version that it knows."""


def notes_due(
    answer: Answer, targets: Collection[TargetId], noted: Mapping[TargetId, ServedNote]
) -> dict[TargetId, ServedNote]:
    """What these targets have to note before the answer is taken over."""
    if not isinstance(answer, HeartbeatAnswer) or answer.routing is None:
        return {}
    due: dict[TargetId, ServedNote] = {}
    for chain in answer.routing.chains:
        for member in chain.members:
            note = note_of(chain, member.target, noted.get(member.target)) if member.target in targets else None
            if note is not None and note != noted.get(member.target):
                due[member.target] = note
    return due


def note_of(chain: Chain, target: TargetId, noted: ServedNote | None) -> ServedNote | None:
    """After `noted`, when the chain is as it is. What a dump says that was loaded is no reason to note anything."""
    if chain.restored:
        return noted
    known = noted if noted is not None and noted.chain == chain.id else None
    if known is not None and chain.version < known.served_in:
        return known  # of an answer that was overtaken by another one
    members = tuple(sorted(one.target for one in chain.members))
    if any(one.target == target and one.state is TargetState.SERVING for one in chain.members):
        return ServedNote(chain.id, chain.version, members)
    return noted if known is None else msgspec.structs.replace(known, members=members)
