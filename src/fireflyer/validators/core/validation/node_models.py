"""Models of nodes, as `MACHINE / 64 x PROCESSOR / 8 x GPU`: whether a node lacks GPUs that its peers have. Pure.

A node whose driver is not loaded, or has lost a GPU, names another model than its peers, and would have none. So it is
compared with the nodes that have the same other hardware. It is at fault where it had more GPUs itself, also where its
peers have lost theirs, too: clusters have nodes of the same board with fewer, or without. A node that never had more
is warned of by each validation, until it has them or a record without peers says that it is meant so: the driver of a
new node may never have been loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.records import MIN_PEERS, NodeRecord

__all__ = ["FEWER_GPUS", "UsualModel", "as_its_peers", "as_recorded", "lacking_gpus", "usual_model"]

FEWER_GPUS: Final = "fewer_gpus"
"""Cause of the fault, which is seen beside peers alone."""
_WITH_GPUS: Final = re.compile(r"(?P<machine>.+) / (?P<count>[0-9]{1,3}) x (?P<gpu>[^/]*[^/ ])")
_PROCESSORS: Final = re.compile(r"(?:.+ / )?[0-9]{1,4} x .*")
"""What stands before the GPUs, if it is the whole of a machine."""


class UsualModel(NamedTuple):
    """Of the nodes with the same other hardware."""

    model: str
    gpu: str
    gpus: int
    nodes: int
    """0 where it is the node's own record that says so."""
    has: int
    """GPUs of the node that differs from them."""
    had: int = 0
    """GPUs of that node by the newest of its records before, where these are more; 0: it was not recorded with more."""

    @property
    def is_fault(self) -> bool:
        """It has lost some. Else nobody knows: it may be meant to have fewer."""
        return self.had > 0


def usual_model(record: NodeRecord, records: Sequence[NodeRecord]) -> UsualModel | None:
    """The model of the node's own record before where it had more GPUs, else the most common model that is this node's
    but for GPUs that it lacks. None: it lacks none; or it was as it is when it was recorded last, without a warning: a
    node that is meant to have fewer; or it was not recorded with more, and fewer than `MIN_PEERS` other nodes have
    more, or as many are as it is."""
    machine, has = _parts(record.model)
    models = {one.node: one.model for one in sorted(records, key=lambda one: one.seen_ns) if one.node != record.node}
    counts = Counter(models.values())
    last = _record_before(record, records)
    before = last.model if last is not None else ""
    is_meant = last is not None and record.model == before and not last.fewer_gpus
    lost = _WITH_GPUS.fullmatch(before)
    left = None if lost is None else _lacks(record.model, machine, has, lost)
    had = 0 if lost is None or left is None else int(lost["count"])
    if is_meant or (not had and counts[record.model] >= MIN_PEERS):
        return None
    for model, nodes in sorted(counts.items(), key=lambda one: (one[0] != before, -one[1], one[0])):
        found = _WITH_GPUS.fullmatch(model)
        if found is None or not _PROCESSORS.fullmatch(found["machine"]) or nodes < MIN_PEERS:
            continue
        lacks = _lacks(record.model, machine, has, found)
        if lacks is not None:
            return UsualModel(model, found["gpu"], int(found["count"]), nodes, lacks, had)
    return None if lost is None or left is None else UsualModel(before, lost["gpu"], had, 0, left, had)


def _record_before(record: NodeRecord, records: Sequence[NodeRecord]) -> NodeRecord | None:
    """The newest older one of the same node. Older ones do not count: a node that was rebuilt is another one."""
    own = [one for one in records if one.node == record.node and one.seen_ns < record.seen_ns]
    return max(own, key=lambda one: one.seen_ns, default=None)


def _parts(model: str) -> tuple[str, re.Match[str] | None]:
    """What is not a GPU, and the GPUs."""
    found = _WITH_GPUS.fullmatch(model)
    if found is None or not _PROCESSORS.fullmatch(found["machine"]):
        return model, None
    return found["machine"], found


def _lacks(model: str, machine: str, has: re.Match[str] | None, usual: re.Match[str]) -> int | None:
    """How many GPUs a node has that has fewer than usual; None: it is not such a node."""
    if usual["machine"] == model:
        return 0
    if has is None or (machine, has["gpu"]) != (usual["machine"], usual["gpu"]):
        return None
    return int(has["count"]) if int(has["count"]) < int(usual["count"]) else None


def lacking_gpus(usual: UsualModel | None) -> list[Finding]:
    """What is wrong with a node that differs from its peers so: a fault where it had more, else a warning."""
    if usual is None:
        return []
    if not usual.nodes:
        words = (
            f"{usual.has} of {usual.gpus} GPUs: it had {usual.had} ({usual.gpu}) when it was recorded last; load its "
            "driver, or record on it that it is meant so"
        )
        return [Finding(severity="high", cause=FEWER_GPUS, words=words, at_once=True)]
    words = f"{usual.has} of {usual.gpus} GPUs; its {usual.nodes} peers have {usual.gpus} ({usual.gpu})"
    if not usual.is_fault:
        words += "; it was not recorded with more: load its driver, or record on it that it is meant so"
        return [Finding(severity="warn", cause=FEWER_GPUS, words=words)]
    words += f", and it had {usual.had} when it was recorded last"
    return [Finding(severity="high", cause=FEWER_GPUS, words=words, at_once=True)]


def as_recorded(record: NodeRecord, usual: UsualModel | None) -> NodeRecord:
    """With the mark of a node of which it is not known that it is meant to have fewer GPUs than its peers."""
    return record if usual is None else msgspec.structs.replace(record, fewer_gpus=True)


def as_its_peers(record: NodeRecord, usual: UsualModel | None) -> NodeRecord:
    """With their model where it has lost GPUs, so that what it has is compared with theirs."""
    return record if usual is None or not usual.is_fault else msgspec.structs.replace(record, model=usual.model)
