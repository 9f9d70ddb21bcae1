"""The time line: a lane for each compute node, storage node and task, cut into spans. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.analytics import account
from fireflyer.recipes.testbed.facts import RunFacts, StorageSample, TaskFacts
from fireflyer.recipes.whole.facts import Facts
from fireflyer.recipes.whole.plan import WholePlan

__all__ = ["LEGEND", "Lane", "Span", "degraded", "lanes"]

LEGEND: Final = (
    ("train", "training"),
    ("start", "starting, restarting"),
    ("lost", "lost: done again"),
    ("wait", "waiting for nodes"),
    ("down", "down"),
    ("sync", "copying what it missed"),
    ("up", "serving"),
)
_OF_BLOCK: Final = {"startup": "start", "restart": "start", "kept": "train", "lost": "lost", "broken": "lost"}
_NODE_STATES: Final = {"busy": "train", "leaving": "start", "down": "down", "lost": "down"}


class Span(msgspec.Struct, frozen=True):
    kind: str
    """Of `LEGEND`."""
    begin_ns: int
    end_ns: int
    label: str


class Lane(msgspec.Struct, frozen=True):
    group: str
    name: str
    spans: tuple[Span, ...]


def lanes(plan: WholePlan, facts: Facts) -> list[Lane]:
    """Tasks, then compute nodes, then storage nodes."""
    found = [Lane("Tasks", task.name, tuple(_task_spans(task))) for task in facts.tasks]
    for node in sorted({span.node for span in facts.nodes}):
        spans = [
            Span(_NODE_STATES[one.state], one.begin_ns, one.end_ns, one.task or one.state)
            for one in facts.nodes
            if one.node == node and one.state in _NODE_STATES
        ]
        found.append(Lane("Compute nodes", node, tuple(spans)))
    return found + [
        Lane("Storage nodes", f"storage {number}", tuple(_storage_spans(facts, number)))
        for number in range(1, plan.storage_nodes + 1)
    ]


def _task_spans(task: TaskFacts) -> list[Span]:
    spans, at_ns = [], task.submitted_ns
    for run in task.runs:
        if run.scheduled_ns > at_ns:
            spans.append(Span("wait", at_ns, run.scheduled_ns, "waiting"))
        spans += _run_spans(run)
        at_ns = run.over_ns
    if task.ended_ns is not None and task.ended_ns > at_ns:
        spans.append(Span("wait", at_ns, task.ended_ns, "waiting"))
    return spans


def _run_spans(run: RunFacts) -> list[Span]:
    if run.log_begins_ns is None:
        return [Span("start", run.scheduled_ns, run.over_ns, "starting")]
    begin_ns = max(run.scheduled_ns, run.log_begins_ns)
    spans = [Span("start", run.scheduled_ns, begin_ns, "starting")]
    for block in account(run.log).blocks:
        kind = _OF_BLOCK.get(block.kind)
        if kind is not None:
            label = {"train": "training", "start": "starting", "lost": "lost"}[kind]
            spans.append(Span(kind, begin_ns + block.start_ns, begin_ns + block.end_ns, label))
    return [span for span in spans if span.end_ns > span.begin_ns]


def _storage_spans(facts: Facts, number: int) -> list[Span]:
    fault = next((one for one in facts.faults if one.kind == "storage" and one.what == str(number)), None)
    if fault is None:
        return [Span("up", 0, facts.end_ns, "serving")]
    back_ns = facts.end_ns if fault.over_ns is None else fault.over_ns
    whole_ns = facts.end_ns if fault.whole_ns is None else fault.whole_ns
    return [
        Span("up", 0, fault.at_ns, "serving"),
        Span("down", fault.at_ns, back_ns, "down"),
        Span("sync", back_ns, whole_ns, "copying"),
        Span("up", whole_ns, facts.end_ns, "serving"),
    ]


def degraded(samples: tuple[StorageSample, ...]) -> list[tuple[int, int]]:
    """Spans in which a chain lacked a replica."""
    spans: list[tuple[int, int]] = []
    begin_ns: int | None = None
    for sample in samples:
        if sample.whole < sample.chains and begin_ns is None:
            begin_ns = sample.at_ns
        elif sample.whole == sample.chains and begin_ns is not None:
            spans.append((begin_ns, sample.at_ns))
            begin_ns = None
    if begin_ns is not None and samples:
        spans.append((begin_ns, samples[-1].at_ns))
    return spans
