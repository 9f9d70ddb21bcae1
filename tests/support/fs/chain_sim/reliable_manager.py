"""A small cluster manager for simulations of replicas: one that never fails, and obeys the rules of the design note.

It takes a role only from a target whose node was silent for T, which reported itself gone, or whose process is known to
be dead since its successor registered. `ReliableManager` has the seam of the real manager: heartbeats come in,
answers go out.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fireflyer.fs.schema.ids import ChainVersion, Incarnation, NodeId, TargetId
from fireflyer.fs.schema.routing import Chain, Member, TargetState

__all__ = ["Beat", "BeatAnswer", "ReliableManager", "next_chain"]


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """From a storage node with one target. `up_to_date`: for which chain version, 0 for none."""

    node: NodeId
    incarnation: Incarnation
    sent_ns: int
    gone: bool
    up_to_date: ChainVersion
    unreachable: TargetId = 0


class BeatAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`incarnation`: the newest that is known. `give_up`: stop serving, then report the target gone."""

    sent_ns: int
    incarnation: Incarnation
    chain: Chain
    give_up: bool = False


def next_chain(chain: Chain, present: dict[TargetId, ChainVersion]) -> Chain:
    """`present`: targets that are there, with the chain version that they are up to date for, or 0."""

    def there(*states: TargetState) -> list[TargetId]:
        return [one.target for one in chain.members if one.state in states and one.target in present]

    synced = [one for one in there(TargetState.SYNCING) if present[one] == chain.version]
    serving = there(TargetState.SERVING) + synced
    if not serving:
        serving = there(TargetState.LASTSRV)[:1]
    syncing = [one for one in there(TargetState.SYNCING) if one not in synced]
    if serving and not syncing:
        syncing = there(TargetState.WAITING, TargetState.OFFLINE)[:1]
    made = [
        Member(one.target, one.node, _state(one, one.target in present, bool(serving), serving, syncing))
        for one in chain.members
    ]
    rank = list(TargetState)
    order = [*serving, *(one.target for one in made if one.target not in serving)]
    made.sort(key=lambda one: (rank.index(one.state), order.index(one.target)))
    return chain if tuple(made) == chain.members else Chain(chain.id, chain.version + 1, tuple(made))


def _state(one: Member, present: bool, somebody: bool, serving: list[TargetId], syncing: list[TargetId]) -> TargetState:
    if one.target in serving:
        return TargetState.SERVING
    if one.state in (TargetState.SERVING, TargetState.LASTSRV):
        return TargetState.OFFLINE if somebody else TargetState.LASTSRV
    if not present:
        return TargetState.OFFLINE
    return TargetState.SYNCING if somebody and one.target in syncing else TargetState.WAITING


@dataclass
class _Heard:
    at_ns: int
    incarnation: Incarnation = 0
    gone: bool = True
    up_to_date: ChainVersion = 0


class ReliableManager:
    """One chain whose target t is on node t."""

    def __init__(self, chain: Chain, silence_ns: int) -> None:
        self.chain = chain
        self._silence_ns = silence_ns
        self._heard = {one.node: _Heard(0, gone=False) for one in chain.members}
        self._give_up: dict[TargetId, None] = {}

    @property
    def changes(self) -> int:
        return self.chain.version - 1

    def beat(self, now_ns: int, beat: Beat) -> BeatAnswer | None:
        heard = self._heard[beat.node]
        if beat.incarnation < heard.incarnation:
            return None
        if beat.incarnation > heard.incarnation:
            known, heard.incarnation = heard.incarnation, beat.incarnation
            if known:
                heard.gone = True
                self.evaluate(now_ns)
        heard.at_ns, heard.gone, heard.up_to_date = now_ns, beat.gone, beat.up_to_date
        if beat.unreachable:
            self._give_up[beat.unreachable] = None
        gives_up = self._give_up.pop(beat.node, 1) is None and self._serving_or_syncing(beat.node)
        return BeatAnswer(beat.sent_ns, heard.incarnation, self.chain, gives_up)

    def _serving_or_syncing(self, target: TargetId) -> bool:
        states = {one.target: one.state for one in self.chain.members}
        others = [one for one, state in states.items() if state is TargetState.SERVING and one != target]
        return bool(others) and states[target] in (TargetState.SERVING, TargetState.SYNCING)

    def evaluate(self, now_ns: int) -> None:
        """Now and then, so that what happens within a short time is decided in one change."""
        present = {
            node: heard.up_to_date
            for node, heard in self._heard.items()
            if not heard.gone and now_ns - heard.at_ns < self._silence_ns
        }
        after = next_chain(self.chain, present)
        self.chain = after
