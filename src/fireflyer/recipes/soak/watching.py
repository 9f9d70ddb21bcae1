"""Looks at the platform all the time, in a thread of its own: nothing else waits for a manager that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from fireflyer.base.errors import FireflyerError
from fireflyer.base.events import AttemptStarted, Logged, StepReport
from fireflyer.cluster.client import Client
from fireflyer.cluster.core.platform.views import NodeView, TaskAnswer
from fireflyer.cluster.local.layout import PlatformLayout
from fireflyer.recipes.soak.seen import PlatformSample, TaskSeen
from fireflyer.recipes.testbed.cluster import log_of

__all__ = ["PlatformWatch", "platform_sample", "task_seen"]

PERIOD_S: Final = 0.3
_AWAY: Final = frozenset({"lost", "drained", "draining"})


class PlatformWatch:
    """`start`, then `stop`, which ends with the look in progress. `now_ns`: the soak's clock."""

    def __init__(self, client: Client, layout: PlatformLayout, now_ns: Callable[[], int]) -> None:
        self.newest: PlatformSample | None = None
        self._client = client
        self._layout = layout
        self._now_ns = now_ns
        self._numbers: dict[str, int] = {}
        self._finished: dict[str, TaskSeen] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ff-soak-platform", daemon=True)

    def follow(self, name: str, number: int) -> None:
        """From now on samples have this task."""
        self._numbers = {**self._numbers, name: number}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                self.newest = self._look()
            except FireflyerError:
                pass  # the next look tells more

    def _look(self) -> PlatformSample:
        at_ns = self._now_ns()
        nodes = self._client.nodes()
        tasks = dict(self._finished)
        for name, number in self._numbers.items():
            if name not in tasks:
                answer = self._client.task(number)
                tasks[name] = task_seen(answer, [log_of(self._layout, run) for run in answer.runs])
                if tasks[name].state == "finished":
                    self._finished[name] = tasks[name]
        return platform_sample(at_ns, nodes, tasks)


def platform_sample(at_ns: int, nodes: tuple[NodeView, ...], tasks: dict[str, TaskSeen]) -> PlatformSample:
    """Pure."""
    return PlatformSample(
        at_ns=at_ns,
        heard_ns={node.name: at_ns - node.silent_ns for node in nodes if node.silent_ns is not None},
        well=frozenset(node.name for node in nodes if node.state not in _AWAY),
        tasks=tasks,
    )


def task_seen(answer: TaskAnswer, logs: Sequence[Sequence[Logged]]) -> TaskSeen:
    """`logs`: the event logs of its runs, which know steps at once; the manager hears of them now and then. Pure."""
    starts = sum(isinstance(entry.event, AttemptStarted) for log in logs for entry in log)
    told = (entry.event for entry in reversed(logs[-1] if logs else ()))
    newest = next((event for event in told if isinstance(event, StepReport | AttemptStarted)), None)
    step = newest.step if isinstance(newest, StepReport) else 0
    return TaskSeen(state=answer.task.state.value, step=step, starts=starts, nodes=answer.task.nodes)
