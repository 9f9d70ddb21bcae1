"""What a chain says to one of its targets: which place it has, and who stands before and behind it."""

from __future__ import annotations

import msgspec

from fireflyer.fs.schema.ids import ChainVersion, TargetId
from fireflyer.fs.schema.routing import Chain, TargetState

__all__ = ["NO_ROLE", "Role", "role_of"]


class Role(msgspec.Struct, frozen=True):
    """Without a place in the chain all is false and 0, which is no target."""

    chain_version: ChainVersion = 0
    state: TargetState | None = None
    serving: bool = False
    head: bool = False
    last: bool = False
    """The last serving one: the tail, unless it has granted *done* to a syncing successor."""
    alone: bool = False
    """Nobody else serves."""
    predecessor: TargetId = 0
    successor: TargetId = 0
    """The next serving one; for the last one, the syncing one."""
    tail: TargetId = 0

    @property
    def syncing(self) -> bool:
        return self.state is TargetState.SYNCING


NO_ROLE = Role()


def role_of(chain: Chain, target: TargetId) -> Role:
    """Of `target`, which has no role when the chain does not name it."""
    state = next((one.state for one in chain.members if one.target == target), None)
    serving = [one.target for one in chain.members if one.state is TargetState.SERVING]
    syncing = [one.target for one in chain.members if one.state is TargetState.SYNCING]
    tail = serving[-1] if serving else 0
    line = serving + syncing[:1]
    if not serving or target not in line:
        return Role(chain.version, state, tail=tail)
    at = line.index(target)
    return Role(
        chain.version,
        state,
        serving=target in serving,
        head=at == 0,
        last=target == tail,
        alone=serving == [target],
        predecessor=line[at - 1] if at else 0,
        successor=line[at + 1] if at + 1 < len(line) else 0,
        tail=tail,
    )
