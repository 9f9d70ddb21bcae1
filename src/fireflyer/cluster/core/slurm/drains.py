"""Whether a node of Slurm drains itself, serves again, and what happens to its jobs: pure.

The node's checks found something, or nothing; Slurm says how all nodes stand. `decide` is asked again after each thing
that was done, with what Slurm says then, so a decision that was not carried out is made again in the next round.

*Whose drain.* A reason that we write ends in a mark, the digest of the node and of the words before it. Who edits the
reason makes the drain his own: it is not taken back, not written over, and the breaker does not count it. The mark
protects against nobody: only who may drain nodes writes reasons. Slurm dates a reason, not a drain: one that is
written anew, as it says more, says since when its node is drained.

*Breaker.* Of each partition at most a share, and at least one node, is drained by us. Nodes do not wait for each
other, so after a drain each looks again: the nodes that are drained by us have an order, of time and name, and those
beyond the share take back the drain that they have just made. Earlier drains stay, also where a partition has become
smaller than it was: they were within the share once, and their nodes are faulty.

A node that waits for a person, for a remedy that its reason names, leaves room for another one, up to a second share:
a node that fails meanwhile is drained, and faults that come and go everywhere still do not drain all nodes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from fireflyer.base.health_event import HealthEvent
from fireflyer.base.units import SECOND
from fireflyer.cluster.core.slurm.findings import Evidence
from fireflyer.cluster.core.slurm.fleet import FleetNode, NodeJob
from fireflyer.cluster.core.slurm.node_record import DAY_S, DrainRecord
from fireflyer.cluster.core.slurm.output import MAX_TEXT, plain
from fireflyer.cluster.schema.sync import VALIDATION

__all__ = [
    "Decision",
    "DrainLimits",
    "Step",
    "counted_faults",
    "decide",
    "drain_reason",
    "drained_since_s",
    "is_own",
    "jobs_to_requeue",
    "missed_checks",
    "reason_fault",
    "reason_with_remedy",
    "worst_fault",
]

Step = Literal["check", "prolog", "epilog", "validate", "validated", "resume"]
"""Who asks: Slurm's HealthCheckProgram, the prolog or epilog of a job, who may validate the node now, whose validators
have found it in order, and a person who has judged it."""

PREFIX: Final = "ff: "
VALIDATE: Final = "; validate it"
_DUE: Final = re.compile(r"; [a-z ]{1,32} is due(?=(?:; validate it)?$)")
_CAUSE: Final = re.compile(r"; cause ([a-z][a-z0-9_]{0,63})(?=(?:; [a-z ]{1,32} is due)?(?:; validate it)?$)")
_MARK_BYTES: Final = 4
_MARK: Final = re.compile(r"([0-9a-f]{8})(?: since ([0-9]{1,12}))?\)")
_Count = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class DrainLimits(msgspec.Struct, frozen=True, kw_only=True):
    breaker_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.05
    """Of the nodes of a partition, that may be drained by us; one may be in any case."""
    requeues: _Count = 3
    """A job that Slurm has started again so often is not requeued by us: it stays until it ends."""
    back_off_s: Annotated[int, msgspec.Meta(ge=0, le=DAY_S)] = 600
    """A node that was drained before within a day stays out for so long; doubles with each drain, up to a day."""
    validates: bool = False
    """Checks that pass let no node serve again: its validation does."""


class Decision(NamedTuple):
    """What is to be done now; nothing by default."""

    words: str = ""
    """For the log; empty: there is nothing to tell."""
    drain: str = ""
    """Reason; empty: the node is not drained."""
    undrain: bool = False
    requeue: bool = False
    """Jobs of the node leave it."""
    refuse: bool = False
    """The job whose prolog this is must not start here."""
    held: bool = False
    """By the breaker: a fault stays without consequence."""
    validate: bool = False
    """Its validation alone is what the node waits for."""


# --- whose drain ---


def drain_reason(node: str, fault: HealthEvent, beside: HealthEvent | None = None, *, since_s: int = 0) -> str:
    """One line of ASCII, with the mark of `is_own` at its end. `beside`: an event that happened as well, for which the
    node has to be validated. `since_s`: the node is drained since then, by another reason; 0: it is not."""
    part = f" {fault.part}" if fault.part else ""
    words = fault.words or fault.cause or "failed"
    # without its cause a figure that is low beside its peers would have the remedies of a fault of an unknown kind
    end = f"; also {beside.check} {beside.cause}".rstrip() if beside is not None else ""
    end += f"; cause {fault.cause}" if fault.check == VALIDATION and fault.cause else ""
    end += VALIDATE if fault.once or beside is not None else ""
    text = plain(plain(f"{PREFIX}{fault.check}{part}: {words}"))  # twice: as it is when it is read again
    text = text.encode("ascii", "replace").decode()
    end = end.encode("ascii", "replace").decode()
    return _marked(node, text, end, since_s)


def reason_with_remedy(node: FleetNode, remedy: str) -> str:
    """Our reason, which says that `remedy` is due as well; empty: it says so."""
    before = node.reason.rpartition(" (")[0]
    cause = _CAUSE.search(before)
    end = f"{cause[0] if cause else ''}; {remedy} is due{VALIDATE if _needs_validation(node) else ''}"
    text = _CAUSE.sub("", _DUE.sub("", before)).removesuffix(VALIDATE)
    reason = _marked(node.name, text, end, drained_since_s(node))
    return reason if reason.rpartition(" (")[0] != before else ""


def _waits_for_person(node: FleetNode) -> bool:
    return is_own(node) and _DUE.search(node.reason.rpartition(" (")[0]) is not None


def is_own(node: FleetNode) -> bool:
    """We have drained it, and nobody has changed the reason since."""
    text, _, end = node.reason.rpartition(" (")
    mark = _MARK.fullmatch(end)
    if mark is None or not (node.drains and text.startswith(PREFIX)):
        return False
    return mark[1] == _digest(node.name, text, mark[2] or "")


def drained_since_s(node: FleetNode) -> int:
    """Unix time of the drain, by our reason where that was written anew; 0: not known."""
    mark = _MARK.fullmatch(node.reason.rpartition(" (")[2]) if is_own(node) else None
    return int(mark[2]) if mark is not None and mark[2] else node.since_s


def _needs_validation(node: FleetNode) -> bool:
    """What happened once is not taken back by checks that pass."""
    return node.reason.rpartition(" (")[0].endswith(VALIDATE)


def reason_fault(node: FleetNode, now_s: int) -> HealthEvent:
    """What our reason says of the fault, where the node has forgotten it."""
    check = _check_of(node)
    known = re.fullmatch(r"[a-z][a-z0-9_]{0,63}", check) is not None
    cause = _CAUSE.search(node.reason.rpartition(" (")[0])
    return HealthEvent(
        check=check if known else "health", severity="low", cause=cause[1] if cause else "", words=node.reason[:400],
        seen_ns=now_s * SECOND,
    )  # fmt: skip


def _check_of(node: FleetNode) -> str:
    """That found the fault for which the node is drained by us."""
    return node.reason.removeprefix(PREFIX).partition(" ")[0].rstrip(":")


def _marked(node: str, text: str, end: str, since_s: int) -> str:
    """The reason, of which `text` is cut to what Slurm's answers have room for."""
    since = str(since_s) if since_s else ""
    told = f" since {since}" if since else ""
    text = text[: MAX_TEXT - len(end) - 2 * _MARK_BYTES - 3 - len(told)].rstrip() + end
    return f"{text} ({_digest(node, text, since)}{told})"


def _digest(node: str, text: str, since: str) -> str:
    said = f"{node}\0{text}" + (f"\0{since}" if since else "")
    return hashlib.blake2b(said.encode(), digest_size=_MARK_BYTES).hexdigest()


# --- the breaker ---


def _most_of(fleet: Mapping[str, FleetNode], partition: str, share: float) -> int:
    nodes = sum(partition in node.partitions for node in fleet.values())
    return max(1, int(share * nodes + 1e-9))  # 0.29 of 100 are 29


def _own_of(fleet: Mapping[str, FleetNode], partition: str, most: int) -> list[str]:
    """Names, the first one that was drained first, without the first `most` of those that wait for a person."""
    own = [node for node in fleet.values() if partition in node.partitions and is_own(node)]
    own.sort(key=lambda node: (drained_since_s(node), node.name))
    waiting = {node.name for node in [one for one in own if _waits_for_person(one)][:most]}
    return [node.name for node in own if node.name not in waiting]


def _held(node: FleetNode, fleet: Mapping[str, FleetNode], share: float) -> str:
    """Which partition leaves no room for the node to be out; empty: all do."""
    for partition in node.partitions:
        most = _most_of(fleet, partition, share)
        own = _own_of(fleet, partition, most)
        place = own.index(node.name) if node.name in own else len(own)
        if place >= most:
            return f"held by the breaker: of partition {partition} {most} may be drained by ff, and {len(own)} are"
    return ""


# --- the decision ---


def decide(
    step: Step, name: str, fleet: Mapping[str, FleetNode], evidence: Evidence, record: DrainRecord, limits: DrainLimits,
    now_s: int, *, fresh: bool = False,
) -> Decision:  # fmt: skip
    """`fleet`: what Slurm says now; without a fault, of this node is enough. `fresh`: the drain of the node was made
    in this round, or in one that was cut off before it looked again. Nothing is done to a node that Slurm does not
    know."""
    node = fleet.get(name)
    if node is None:
        return Decision(f"Slurm knows no node {name}; give its name with --node")
    fault = worst_fault(evidence.faults, busy=node.busy)
    if fault is None:
        if evidence.faults:
            return Decision(
                f"{_told(evidence.faults[0])}: a user can have made it; looked at again when the node is idle"
            )
        return _without_fault(node, evidence, record, limits, now_s, loaded=step == "validated")
    if node.drains and not is_own(node):
        return Decision(f"{_told(fault)}; drained already, not by ff: {node.reason or 'no reason given'}")
    held = _held(node, fleet, limits.breaker_share)
    if held and (fresh or not node.drains):
        return Decision(f"{_told(fault)}; {held}", undrain=node.drains, held=True)
    event = _event_of(evidence.faults, busy=node.busy)
    if not node.drains or (event is not None and _says_more(event, node, now_s)):
        beside, since_s = event if event is not fault else None, drained_since_s(node) if node.drains else 0
        return Decision(_told(fault), drain=drain_reason(name, fault, beside, since_s=since_s))
    if evidence.remedy and (reason := reason_with_remedy(node, evidence.remedy)):
        return Decision(f"{_told(fault)}; {evidence.remedy} is due", drain=reason)
    if held:
        return Decision(f"{_told(fault)}; drained in an earlier round, {held}: its jobs stay")
    high = fault.severity == "high" and not fault.user_made
    return Decision(f"{_told(fault)}; drained", requeue=high and node.busy, refuse=step == "prolog")


def _without_fault(
    node: FleetNode, evidence: Evidence, record: DrainRecord, limits: DrainLimits, now_s: int, *, loaded: bool
) -> Decision:
    """`loaded`: its validators pass as well."""
    if not is_own(node):
        return Decision()
    if node.busy or node.state != "drained":
        return Decision("drained by ff; jobs are on it still")
    if evidence.remedy and not evidence.validated and (reason := reason_with_remedy(node, evidence.remedy)):
        return Decision(f"drained by ff; {evidence.repair}", drain=reason)
    if not evidence.passed:
        return Decision("drained by ff; a check is missing, could not run or fails")
    if missed := missed_checks(node, evidence, record):
        return Decision(f"drained by ff; {', '.join(missed)} found a fault, and could not run now")
    if evidence.validated or (loaded and not evidence.repair):
        return Decision("its checks and validators pass: it serves again", undrain=True)
    if evidence.repair:
        return Decision(f"drained by ff; its checks pass, but {evidence.repair}")
    waits_s = _back_off_s(record, limits, now_s) - max(0, now_s - drained_since_s(node))
    if waits_s > 0:
        return Decision(f"drained by ff; its checks pass, it stays out for {waits_s} s as it was drained before")
    if _needs_validation(node) or limits.validates:
        words = "drained by ff; its checks pass, and it is to be validated: run `ff health slurm validate` on it"
        return Decision(words, validate=True)
    return Decision("its checks pass: it serves again", undrain=True)


def missed_checks(node: FleetNode, evidence: Evidence, record: DrainRecord) -> list[str]:
    """Which found the faults of a node that is drained by us, and could not run now: their faults are not gone."""
    return [name for name in dict.fromkeys((_check_of(node), *record.failed)) if name in evidence.not_run]


def _back_off_s(record: DrainRecord, limits: DrainLimits, now_s: int) -> int:
    before = len(record.recent(now_s)) - 1
    return min(DAY_S, limits.back_off_s << (before - 1)) if before > 0 else 0


def worst_fault(faults: Sequence[HealthEvent], *, busy: bool) -> HealthEvent | None:
    """For which a node is drained. Never more than low is what a user can have made; None: nothing counts."""
    return next(iter(counted_faults(faults, busy=busy)), None)


def _says_more(event: HealthEvent, node: FleetNode, now_s: int) -> bool:
    """Whether our reason is to be written anew: it asks for no validation yet, or for one that has failed since, by
    what it does not name."""
    if not _needs_validation(node):
        return True
    known = reason_fault(node, now_s)
    return event.check == VALIDATION and (known.check, known.cause) != (event.check, event.cause)


def _event_of(faults: Sequence[HealthEvent], *, busy: bool) -> HealthEvent | None:
    """The worst of those that happened."""
    return worst_fault([event for event in faults if event.once], busy=busy)


def counted_faults(faults: Sequence[HealthEvent], *, busy: bool) -> list[HealthEvent]:
    """The worst first. What a user can have made says nothing while jobs are there."""
    counted = (event for event in faults if not (event.user_made and busy))
    return sorted(counted, key=lambda event: (event.user_made, event.severity != "high"))


def _told(fault: HealthEvent) -> str:
    return plain(f"{fault.check} {fault.part}: {fault.words or fault.cause}".replace(" :", ":"))


def jobs_to_requeue(jobs: Sequence[NodeJob], limits: DrainLimits) -> tuple[tuple[NodeJob, ...], tuple[str, ...]]:
    """Which are requeued, and why the others are not."""
    requeued, left = [], []
    for job in jobs:
        if not job.requeues:
            left.append(f"job {job.id} stays: it was submitted with --no-requeue")
        elif job.restarts >= limits.requeues:
            left.append(f"job {job.id} stays: it was started again {job.restarts} times already")
        else:
            requeued.append(job)
    return tuple(requeued), tuple(left)
