"""What the manager knows of who places tasks: our scheduler on the agents of the cluster (`planner`), or Slurm.

It hears of rows that have changed, and puts its decisions into the draft. What a run is, who starts it on its nodes and
when these are free is the same for all engines (`life`, `orders`)."""

from __future__ import annotations

from typing import Protocol

from fireflyer.cluster.core.platform.store.rows import TaskRow
from fireflyer.cluster.core.scheduler.forecast import Forecast
from fireflyer.cluster.core.scheduler.model import Decision, Wait
from fireflyer.cluster.schema.tasks import TaskSpec

__all__ = ["Engine"]


class Engine(Protocol):
    def rebuild(self, time_ns: int, now_ns: int, /) -> None:
        """From what is committed: it begins, or a draft was dropped."""

    def settings_changed(self, time_ns: int, /) -> None: ...

    def node(self, name: str, time_ns: int, now_ns: int, /) -> None:
        """Something is known anew of a node of ours."""

    def told(self, time_ns: int, /) -> None:
        """Tasks were touched."""

    def is_due(self, time_ns: int, /) -> bool: ...

    def decide(self, time_ns: int, /) -> None:
        """Into the draft."""

    def why(self, task: int, time_ns: int, /) -> Decision | None:
        """Of one that waits."""

    def before(self, task: int, time_ns: int, /) -> int | None:
        """How many tasks come before one that waits; None where nobody can tell."""

    def would_start(self, row: TaskRow, spec: TaskSpec, time_ns: int, /) -> Forecast | Wait:
        """What would become of a task that is not submitted, if it were now."""

    def usage(self) -> dict[str, float]:
        """Node-seconds of users, where this engine counts them."""

    def sample_usage(self, time_ns: int, /) -> None: ...
