"""Models of nodes, as `MACHINE / 64 x PROCESSOR / 8 x GPU`: whether a node lacks GPUs that its peers have. Pure.

A node whose driver is not loaded, or has lost a GPU, names another model than its peers, and would have none. So it is
compared with the nodes that have the same other hardware, where its own model has too few.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from fireflyer.validators.core.checks.evidence import Finding
from fireflyer.validators.core.validation.records import MIN_PEERS, NodeRecord

__all__ = ["FEWER_GPUS", "UsualModel", "as_its_peers", "lacking_gpus", "usual_model"]

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
    has: int
    """GPUs of the node that differs from them."""


def usual_model(record: NodeRecord, records: Sequence[NodeRecord]) -> UsualModel | None:
    """The most common model that is this node's but for GPUs that it lacks. None: it lacks none, or `MIN_PEERS` other
    nodes are as it is, or fewer have that model, or it was as it is when it was recorded before, and never otherwise:
    a node that is meant to have fewer."""
    machine, has = _parts(record.model)
    models = {one.node: one.model for one in sorted(records, key=lambda one: one.seen_ns) if one.node != record.node}
    counts = Counter(models.values())
    before = {one.model for one in records if one.node == record.node and one.seen_ns < record.seen_ns}
    for model, nodes in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        found = _WITH_GPUS.fullmatch(model)
        if found is None or not _PROCESSORS.fullmatch(found["machine"]) or nodes < MIN_PEERS:
            continue
        lacks = _lacks(record.model, machine, has, found)
        if lacks is None:
            continue
        is_meant = record.model in before or counts[record.model] >= MIN_PEERS
        if model in before or not is_meant:
            return UsualModel(model, found["gpu"], int(found["count"]), nodes, lacks)
    return None


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
    """What is wrong with a node that differs from its peers so."""
    if usual is None:
        return []
    words = f"{usual.has} of {usual.gpus} GPUs; its {usual.nodes} peers have {usual.gpus} ({usual.gpu})"
    return [Finding(severity="high", cause=FEWER_GPUS, words=words, at_once=True)]


def as_its_peers(record: NodeRecord, usual: UsualModel | None) -> NodeRecord:
    """With their model, so that what it has is compared with theirs."""
    return record if usual is None else msgspec.structs.replace(record, model=usual.model)
