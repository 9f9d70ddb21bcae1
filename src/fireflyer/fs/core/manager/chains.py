"""The states of a chain's targets: one pure function, from a chain and what is said of its targets to the next chain.

Of each target is said, for the chain's present version: *gone*, *online*, *up to date*, *clean* or not. Who said
nothing for this version (the manager is new, or the report is of another version) is *silent*: it keeps what it has
and gets nothing.

| state | becomes |
|---|---|
| serving | not gone → serving. Gone, another one serves → offline. All gone → lastsrv, they and all who are complete |
| lastsrv | nobody serves, online and clean → serving, the first such one. Somebody serves → without a role |
| ... not clean | online → without a role, unless it is the last lastsrv: then it stays |
| syncing | up to date → serving. Not gone, somebody serves → syncing, otherwise without a role |
| waiting, offline | without a role |

*Complete* are those that served before and cannot have missed anything since (see `acknowledged`).

*Without a role*: gone → offline. Online, somebody serves and nobody else syncs → syncing, the first such one. Online →
waiting. Silent → as it was, or waiting if it was syncing, or offline if it was lastsrv.

Why it is safe. What was acknowledged is on every target that was serving in the last version in which any was: an
update is acknowledged when all serving ones have it, and who takes a role away here knows that it can be used no more.
`serving` comes only from there: from `serving` and `lastsrv`, which are those of that version, or of one before when
nothing was acknowledged since, and from `syncing` when the target has been given everything in this very version.

One pass is enough: with the same reports the next chain stays as it is.

A chain of a dump that was loaded goes another way until it is known who served last: `restored`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from fireflyer.fs.core.manager.restored import confirmed
from fireflyer.fs.schema.ids import TargetId
from fireflyer.fs.schema.manager import Condition, TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

__all__ = ["in_order", "next_chain"]

_SERVING, _LASTSRV, _SYNCING = TargetState.SERVING, TargetState.LASTSRV, TargetState.SYNCING
_WAITING, _OFFLINE = TargetState.WAITING, TargetState.OFFLINE
_RANK: Final = {state: rank for rank, state in enumerate((_SERVING, _LASTSRV, _SYNCING, _WAITING, _OFFLINE))}

_Said = TargetReport | None
_States = dict[TargetId, TargetState]


def next_chain(
    chain: Chain, reports: Mapping[TargetId, TargetReport], complete: Collection[TargetId] = ()
) -> tuple[Chain, str]:
    """The chain after this one, and why; the same object if nothing changes. Reports of another version do not
    count. `complete`: who has every acknowledged update although it does not serve."""
    said = {member.target: _said(reports.get(member.target), chain) for member in chain.members}
    if chain.restored:
        known, reason = confirmed(chain, {target: report for target, report in said.items() if report is not None})
        if known is None:
            return chain, reason
        return Chain(chain.id, chain.version + 1, in_order(chain.members, known)), reason
    states: _States = {}
    _serve(chain, said, states)
    if _SERVING not in states.values():
        _wait_for_the_last(chain, said, states, complete)
    _without_role(chain, said, states)
    members = in_order(chain.members, states)
    if members == chain.members:
        return chain, "no change"
    changes = [
        f"target {member.target} {member.state} -> {states[member.target]} ({_shown(said[member.target])})"
        for member in chain.members
        if states[member.target] is not member.state
    ]
    return Chain(chain.id, chain.version + 1, members), "; ".join(changes) or "order"


def in_order(members: tuple[Member, ...], states: Mapping[TargetId, TargetState]) -> tuple[Member, ...]:
    """The members with these states: serving, lastsrv, syncing, waiting, offline; among equals, as they came."""

    def place(member: Member) -> tuple[int, int]:
        return _RANK[states[member.target]], _RANK[member.state]

    return tuple(Member(one.target, one.node, states[one.target]) for one in sorted(members, key=place))


def _said(report: _Said, chain: Chain) -> _Said:
    if report is None or report.chain not in (0, chain.id) or report.chain_version != chain.version:
        return None
    return report


def _there(said: _Said) -> bool:
    return said is not None and said.condition is not Condition.GONE


def _gone(said: _Said) -> bool:
    return said is not None and said.condition is Condition.GONE


def _serve(chain: Chain, said: Mapping[TargetId, _Said], states: _States) -> None:
    """Who serves: those who did and are not gone, and who has been synced; else the first clean one of the last."""
    for member in chain.members:
        report = said[member.target]
        synced = member.state is _SYNCING and report is not None and report.condition is Condition.UP_TO_DATE
        if synced or (member.state is _SERVING and not _gone(report)):
            states[member.target] = _SERVING
    if states or any(member.state is _SERVING for member in chain.members):
        return
    for member in chain.members:
        report = said[member.target]
        if member.state is _LASTSRV and _there(report) and report is not None and report.clean:
            states[member.target] = _SERVING
            return


def _wait_for_the_last(
    chain: Chain, said: Mapping[TargetId, _Said], states: _States, complete: Collection[TargetId]
) -> None:
    """Nobody serves: who has every acknowledged update."""
    serving = [member.target for member in chain.members if member.state is _SERVING]
    if serving:
        serving += [one.target for one in chain.members if one.target in complete and one.target not in serving]
    last = serving or [member.target for member in chain.members if member.state is _LASTSRV]
    unclean = [] if serving else [target for target in last if _there(said[target])]
    for target in reversed(unclean):
        if len(last) > 1:
            last.remove(target)
    states.update((target, _LASTSRV) for target in last)


def _without_role(chain: Chain, said: Mapping[TargetId, _Said], states: _States) -> None:
    """All the others; at most one of them syncs, and who does goes on before another one begins."""
    others = [member for member in chain.members if member.target not in states]
    if _SERVING in states.values():
        going_on = [one for one in others if one.state is _SYNCING and not _gone(said[one.target])]
        syncing = going_on or [one for one in others if _there(said[one.target])]
        states.update((member.target, _SYNCING) for member in syncing[:1])
    for member in others:
        if member.target in states:
            continue
        if _gone(said[member.target]):
            states[member.target] = _OFFLINE
        elif _there(said[member.target]) or member.state in (_SYNCING, _WAITING):
            states[member.target] = _WAITING
        else:
            states[member.target] = _OFFLINE


def _shown(said: _Said) -> str:
    if said is None:
        return "silent"
    return str(said.condition) if said.clean else f"{said.condition}, possibly stale"
