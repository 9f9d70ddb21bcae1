"""Policies by the names of the command line, and their replays one after the other."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

from fireflyer.cluster.core.replay import baselines
from fireflyer.cluster.core.replay.policy import Policy
from fireflyer.cluster.core.replay.replay import Replay, ReplaySettings
from fireflyer.cluster.core.replay.sharing import TimeSharing
from fireflyer.cluster.core.replay.summary import Summary, summarise
from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["Chosen", "replay_all"]


class Chosen(enum.Enum):
    """Which policy."""

    SHARING = "sharing"
    FIFO = "fifo"
    BACKFILL = "backfill"
    PREEMPTION = "preemption"

    def make(self, tasks: Sequence[TraceTask], settings: ReplaySettings) -> Policy:
        cluster, costs = settings.cluster, settings.costs
        if self is Chosen.SHARING:
            return TimeSharing(tasks, cluster, interrupt_cost_ns=costs.save_ns + costs.start_ns)
        made = {Chosen.FIFO: baselines.fifo, Chosen.BACKFILL: baselines.backfill}
        return made.get(self, baselines.preemption)(tasks, cluster)


def replay_all(
    tasks: Sequence[TraceTask], settings: ReplaySettings, chosen: Sequence[Chosen], tell: Callable[[str], None]
) -> tuple[Summary, ...]:
    """`tell` gets a line about each replay that is done."""
    found = []
    for one in chosen:
        policy = one.make(tasks, settings)
        began_s = time.process_time()
        outcome = Replay(tasks, settings, policy).run()
        took_s = time.process_time() - began_s
        found.append(summarise(outcome))
        tell(f"{policy.name}: {outcome.events:,} events, {took_s:.1f} s, {1e3 * took_s / outcome.events:.3f} ms each")
    return tuple(found)
