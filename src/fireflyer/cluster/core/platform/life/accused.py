"""Which nodes a run accuses of its end. Pure.

A launcher names nodes that it holds responsible for an infrastructure cause: one that was lost, one whose check found a
fault, one that could not prepare the run. A run that did not start in time accuses the node of its launcher. One
accusation says little, as a user's program may look like a fault; those of several tasks and users say much.
"""

from __future__ import annotations

from fireflyer.cluster.core.platform.store.rows import RunRow, RunState, Wish

__all__ = ["accused_nodes"]


def accused_nodes(run: RunRow) -> tuple[str, ...]:
    """Of the run's own nodes; nothing before it has ended."""
    if run.state not in (RunState.ENDED, RunState.OVER):
        return ()
    bad = run.ended.bad_nodes if run.ended is not None else ()
    if run.wish is Wish.NO_START and not bad:
        bad = run.nodes[:1]
    return tuple(dict.fromkeys(name for name in bad if name in run.nodes))
