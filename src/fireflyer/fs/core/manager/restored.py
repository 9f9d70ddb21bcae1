"""Chains of a store that was loaded from a dump: who may serve is not what the dump says, but who served last.

    load: `restored(chain)`: everybody *lastsrv*, `restored`, a version that nobody can know
        ──> nobody serves; targets take that version over, and lay down what they did before
        ──> all report for it what their directories say: the last version in which they served, and beside whom
        ──> `confirmed`: those who served in the newest of these versions are lastsrv, the others are without a role
        ──> from there `chains`

What was acknowledged since the dump is on all who served in the last version of the chain, and the dump does not know
of that version. Each target notes, before it does anything in a version in which it serves, that version and all the
members that the chain has (`chain.served_notes`).

Why it is safe. Let L be the last version in which anybody served, and S somebody who served in it: S has everything,
and its note says L. Nobody's says more. So it is enough to have heard S. Who begins to serve was given everything by
one who served, and who had noted before that this one is a member; so from the members by the dump, the notes of each
name the next, up to S. Therefore nobody is chosen while a member is silent, has no note (it never served, or its
directory was made anew), or names somebody who is no member any more: then an administrator has to decide (`override`),
as where replicas are lost.

Nobody acts by an older version meanwhile: a report for this version says that its sender has taken it over, and has
laid down what it had.
"""

from __future__ import annotations

from collections.abc import Mapping

from fireflyer.fs.schema.ids import ChainVersion, TargetId
from fireflyer.fs.schema.manager import TargetReport
from fireflyer.fs.schema.routing import Chain, Member, TargetState

__all__ = ["confirmed", "restored"]


def restored(chain: Chain, version: ChainVersion) -> Chain:
    """The chain of a dump as it is when that is loaded. `version`: above all that it had since."""
    members = tuple(Member(one.target, one.node, TargetState.LASTSRV) for one in chain.members)
    return Chain(chain.id, version, members, restored=True)


def confirmed(chain: Chain, reports: Mapping[TargetId, TargetReport]) -> tuple[dict[TargetId, TargetState] | None, str]:
    """The states of a `restored` chain's members, and why; None while that is not known. `reports`: for this version of
    the chain."""
    members = [one.target for one in chain.members]
    for target in members:
        report = reports.get(target)
        if report is None:
            return None, f"metadata were loaded: waiting for target {target} to say in which version it last served"
        if not report.served_in:
            return None, f"metadata were loaded, and target {target} does not know in which version it last served"
        others = [one for one in report.served_with if one not in members]
        if others:
            return None, f"metadata were loaded, and since the dump target {others[0]} has been in the chain"
    last = max(reports[target].served_in for target in members)
    states = {
        target: TargetState.LASTSRV if reports[target].served_in == last else TargetState.WAITING for target in members
    }
    return states, f"metadata were loaded: the last version in which a target served is {last}"
