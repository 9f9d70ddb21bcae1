"""What can be seen of the cluster at one moment, and what of it is not as it was before a fault. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fireflyer.recipes.soak.facts import FaultFact
from fireflyer.recipes.soak.faults import Kind, Lane, Target
from fireflyer.recipes.soak.plan import SoakPlan
from fireflyer.recipes.testbed.facts import StorageSample

__all__ = ["PlatformSample", "Seen", "TaskSeen", "finished", "missing_of", "serves", "task_on"]


class TaskSeen(msgspec.Struct, frozen=True):
    state: str
    step: int
    """The newest that its last attempt has logged; 0: none."""
    starts: int
    """Attempts that have begun, of all its runs."""
    nodes: tuple[str, ...]
    """Of its run, in the order of ranks."""


class PlatformSample(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager of the platform said at one moment."""

    at_ns: int
    """When it was asked."""
    heard_ns: Mapping[str, int]
    """When each node was heard last; nodes that were not heard are absent."""
    well: frozenset[str]
    """Nodes that can have tasks."""
    tasks: Mapping[str, TaskSeen]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What can be seen at one moment."""

    storage: StorageSample | None
    platform: PlatformSample | None
    acknowledged_ns: Mapping[str, int]
    """When the last write of each writer that was acknowledged had begun."""
    busy: float = 1.0
    """Runnable threads per processor, at least 1: limits are stated for a machine that does nothing else."""


def finished(seen: Seen, name: str) -> bool:
    look = None if seen.platform is None else seen.platform.tasks.get(name)
    return look is not None and look.state == "finished"


def task_on(seen: Seen, node: str) -> str:
    """The task that runs on `node`; empty: none."""
    tasks = {} if seen.platform is None else seen.platform.tasks
    return next((name for name, task in tasks.items() if task.state == "running" and node in task.nodes), "")


def serves(seen: Seen, plan: SoakPlan, since_ns: int) -> bool:
    """The file system is whole, and each writer has a write acknowledged that began after `since_ns`."""
    sample = seen.storage
    if sample is None or sample.at_ns <= since_ns or not sample.chains:
        return False
    whole = len(sample.alive) == plan.storage_nodes and sample.whole == sample.chains
    return whole and bool(seen.acknowledged_ns) and all(at_ns > since_ns for at_ns in seen.acknowledged_ns.values())


def missing_of(
    seen: Seen,
    plan: SoakPlan,
    kind: Kind,
    fault: FaultFact,
    *,
    incarnation: int | None,
    before: Mapping[str, TaskSeen],
) -> str:
    """What is not as it was before a fault that was taken back; empty: it was recovered from. `incarnation`: of the
    storage node that was killed, before; `before`: tasks that must have
    gone on, as they were then."""
    released_ns = fault.released_ns or 0
    if kind.lane is Lane.PLATFORM:
        return _missing_of_platform(seen, plan, released_ns, before, again=kind.target is Target.TASK_NODE)
    if not serves(seen, plan, released_ns):
        return "not every chain is whole, or a writer has no write acknowledged that began later"
    if kind.name in ("storage-kill", "storage-away") and seen.storage is not None:
        same = seen.storage.incarnations[int(fault.target) - 1] == incarnation
        return f"storage node {fault.target} has not registered again" if same else ""
    return ""


def _missing_of_platform(
    seen: Seen, plan: SoakPlan, released_ns: int, before: Mapping[str, TaskSeen], *, again: bool
) -> str:
    """`again`: tasks must also have started again, not only gone on: they do so until somebody notices."""
    platform = seen.platform
    if platform is None or platform.at_ns <= released_ns:
        return "the manager of the platform does not answer"
    for number in range(1, plan.nodes + 1):
        node = f"agent-{number}"
        if platform.heard_ns.get(node, -1) <= released_ns or node not in platform.well:
            return f"{node} was not heard, or may not have tasks"
    for name, old in before.items():
        look = platform.tasks.get(name)
        if look is None or (look.state != "finished" and (look.state != "running" or look.step <= old.step)):
            how = "is unknown" if look is None else f"is {look.state} at step {look.step}"
            return f"task {name} {how} and has not gone on beyond step {old.step}"
        if again and look.state != "finished" and look.starts <= old.starts:
            return f"task {name} goes on, but has not started again"
    return ""
