"""Looks at platform and file system while the demonstration runs: what the director decides by, and the time line."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fireflyer.cluster.core.platform.views import NodeView, TaskAnswer
from fireflyer.recipes.testbed.facts import StorageSample
from fireflyer.recipes.whole.director import TaskSeen
from fireflyer.recipes.whole.facts import Fault, NodeSpan

__all__ = ["NodeHistory", "recovery_of", "seen_of"]


def recovery_of(samples: Sequence[StorageSample], fault: Fault, incarnation: int) -> Fault:
    """With when the killed storage node counted as failed, was back, and every chain was whole, as far as `samples`
    tell. Pure. `incarnation`: before it was killed."""
    number = int(fault.what)
    failed_ns = over_ns = whole_ns = None
    for sample in samples:
        if sample.at_ns <= fault.at_ns:
            continue
        alive = number in sample.alive
        if failed_ns is None and not alive:
            failed_ns = sample.at_ns
        back = alive and sample.incarnations[number - 1] != incarnation
        if failed_ns is not None and over_ns is None and back:
            over_ns = sample.at_ns
        if over_ns is not None and sample.whole == sample.chains:
            whole_ns = sample.at_ns
            break
    return msgspec.structs.replace(fault, failed_ns=failed_ns, over_ns=over_ns, whole_ns=whole_ns)


class NodeHistory:
    """Spans of what each compute node did, from looks at it. Pure."""

    def __init__(self) -> None:
        self.spans: list[NodeSpan] = []
        self._now: dict[str, NodeSpan] = {}
        self._killed: dict[str, int] = {}

    def killed(self, node: str, at_ns: int) -> None:
        self._killed[node] = at_ns

    def look(self, at_ns: int, nodes: tuple[NodeView, ...], names: dict[int, str]) -> None:
        """`names`: of tasks, by number."""
        for node in nodes:
            state, task = node.state, names.get(node.task or 0, "")
            killed_ns = self._killed.get(node.name)
            if killed_ns is not None:
                if node.silent_ns is not None and at_ns - node.silent_ns > killed_ns:
                    del self._killed[node.name]  # heard since
                else:
                    state = "down"
            self._go_on(node.name, at_ns, state, task)

    def is_down(self, node: str) -> bool:
        return node in self._killed

    def end(self, at_ns: int) -> tuple[NodeSpan, ...]:
        for node, span in self._now.items():
            self.spans.append(NodeSpan(node, span.begin_ns, at_ns, span.state, span.task))
        self._now = {}
        return tuple(sorted(self.spans, key=lambda span: (span.node, span.begin_ns)))

    def _go_on(self, node: str, at_ns: int, state: str, task: str) -> None:
        span = self._now.get(node)
        if span is not None and (span.state, span.task) == (state, task):
            return
        if span is not None:
            self.spans.append(NodeSpan(node, span.begin_ns, at_ns, span.state, span.task))
        self._now[node] = NodeSpan(node, at_ns, at_ns, state, task)


def seen_of(answer: TaskAnswer) -> TaskSeen:
    """Pure."""
    steps = [run.step for run in answer.runs if run.step is not None]
    return TaskSeen(state=answer.task.state.value, step=max(steps, default=0), nodes=answer.task.nodes)
