"""Tasks of a fleet: the mix of `replay.generator`, with ten tasks of one node after the other drawn as one.

Tasks of one node are 93 % of all tasks and 9 % of the node-time, and their number is most of the time that a replay
takes. As chains of ten they have the same node-time on the same number of nodes; what is measured is said of large
tasks, which are as they were.
"""

from __future__ import annotations

from typing import Final

import msgspec

from fireflyer.base.units import SECOND
from fireflyer.cluster.core.replay.fleet.settings import FleetSettings
from fireflyer.cluster.core.replay.generator import TraceSettings, generate
from fireflyer.cluster.core.replay.trace import TraceTask

__all__ = ["draw_tasks"]

CHAIN: Final = 10
_MARGIN_NS: Final = 900 * SECOND


def draw_tasks(settings: FleetSettings, seed: int) -> tuple[TraceTask, ...]:
    """In the order of submission. A chain is submitted with its last task, by the user of that one."""
    drawn = generate(TraceSettings(nodes=settings.nodes, days=settings.days, demand=settings.demand), seed)
    tasks: list[TraceTask] = []
    chain: list[TraceTask] = []
    for task in drawn:
        if task.nodes > 1:
            tasks.append(task)
            continue
        chain.append(task)
        if len(chain) == CHAIN:
            tasks.append(_chained(chain))
            chain.clear()
    if chain:
        tasks.append(_chained(chain))
    return tuple(sorted(tasks, key=lambda task: task.submit_ns))


def _chained(chain: list[TraceTask]) -> TraceTask:
    work_ns = sum(task.work_ns for task in chain)
    time_ns = None if chain[-1].time_ns is None else 2 * work_ns + _MARGIN_NS
    return msgspec.structs.replace(chain[-1], work_ns=work_ns, time_ns=time_ns)
